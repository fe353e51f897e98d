"""One md5 for a directory of open weights: equal for equal weights, however they are divided into files.

Time: one pass over the files, which the page cache mostly serves after an export. Memory: one block.
"""

from __future__ import annotations

import hashlib
import math

from paddleformers_fc.formats.registry import open_checkpoint
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.storage.dtypes import dtype_size
from paddleformers_fc.storage.paths import AnyPath, RemotePath
from paddleformers_fc.storage.progress import advance, expect
from paddleformers_fc.storage.ranges import RangeReader
from paddleformers_fc.storage.remote import PART_BYTES, PARTS

_READ_BYTES = 1024 * 1024


def weights_md5(directory: AnyPath) -> str:
    """Return the md5 of the names and bytes of all tensors.

    For every tensor in the order of its name (compared as text): the name in UTF-8, then the tensor's bytes,
    row-major and little-endian. With the safetensors library::

        digest = hashlib.md5()
        for name in sorted(tensors):
            digest.update(name.encode())
            digest.update(tensors[name].tobytes())

    Args:
        directory: a directory or URL of open weights.
    Raises:
        FlexError: the directory cannot be opened or read.
    """
    digest = hashlib.md5()
    length = PARTS * PART_BYTES if isinstance(directory, RemotePath) else _READ_BYTES
    buffer = memoryview(bytearray(length))
    catalog = open_checkpoint(directory).catalog
    tensors = catalog.roles[MODEL_STATE]
    expect(sum(math.prod(one.shape) * dtype_size(one.dtype) for one in tensors.values()))
    with RangeReader(identities=catalog.identities) as reader:
        for name in sorted(tensors):
            digest.update(name.encode())
            width = dtype_size(tensors[name].dtype)
            for fragment in tensors[name].fragments:  # One, or none where the tensor has no element.
                end = fragment.begin + fragment.box.volume * width
                for position in range(fragment.begin, end, length):
                    chunk = buffer[: min(end - position, length)]
                    reader.read_into(directory / fragment.file, position, chunk)
                    digest.update(chunk)
                    advance(len(chunk))
    return digest.hexdigest()
