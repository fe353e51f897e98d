"""One md5 for a directory of open weights: equal for equal weights, however they are divided into files.

Time: one pass over the files, which the page cache mostly serves after an export. Memory: one block.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

from paddleformers_fc.formats.registry import open_checkpoint
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.storage.dtypes import item_size, to_safetensors
from paddleformers_fc.storage.progress import advance, expect
from paddleformers_fc.storage.ranges import RangeReader

_READ_BYTES = 1024 * 1024


def weights_md5(directory: Path) -> str:
    """Return the md5 of the names and bytes of all tensors.

    For every tensor in the order of its name (compared as text): the name in UTF-8, then the tensor's bytes,
    row-major and little-endian. With the safetensors library::

        digest = hashlib.md5()
        for name in sorted(tensors):
            digest.update(name.encode())
            digest.update(tensors[name].tobytes())

    Args:
        directory: a directory of open weights.
    Raises:
        FlexError: the directory cannot be opened or read.
    """
    digest = hashlib.md5()
    buffer = memoryview(bytearray(_READ_BYTES))
    tensors = open_checkpoint(directory).catalog.roles[MODEL_STATE]
    expect(sum(math.prod(one.shape) * item_size(to_safetensors(one.dtype)) for one in tensors.values()))
    with RangeReader() as reader:
        for name in sorted(tensors):
            digest.update(name.encode())
            width = item_size(to_safetensors(tensors[name].dtype))
            for fragment in tensors[name].fragments:  # One, or none where the tensor has no element.
                end = fragment.begin + fragment.box.volume * width
                for position in range(fragment.begin, end, _READ_BYTES):
                    chunk = buffer[: min(end - position, _READ_BYTES)]
                    reader.read_into(directory / fragment.file, position, chunk)
                    digest.update(chunk)
                    advance(len(chunk))
    return digest.hexdigest()
