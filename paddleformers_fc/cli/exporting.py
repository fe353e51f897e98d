"""``export``: a flex checkpoint as Hugging Face files, and one number that says whether two exports are the same.

The number costs one more pass over the files, which the system's cache mostly serves; memory is one block.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import paddleformers_fc
from paddleformers_fc.formats.huggingface import open_huggingface
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.storage.dtypes import item_size, to_safetensors
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.ranges import RangeReader
from paddleformers_fc.text import count_text, size_text

if TYPE_CHECKING:
    from rich.console import Console

_READ_BYTES = 1024 * 1024


class ExportedFile(msgspec.Struct, frozen=True):
    """One weight file: its name and its size in bytes."""

    name: str
    bytes: int


class Exported(msgspec.Struct, frozen=True):
    """What was written.

    Attributes:
        source: the checkpoint as it was named.
        path: the directory that was written.
        files: the weight files.
        tensors: how many canonical tensors.
        bytes: of those tensors.
        md5: see :func:`weights_md5`.
        seconds: how long it took, md5 included.
    """

    source: str
    path: str
    files: list[ExportedFile]
    tensors: int
    bytes: int
    md5: str
    seconds: float


def export(source: AnyPath, target: Path, max_shard_bytes: int, verify: str, replace: bool, tied: str) -> Exported:
    """Export a checkpoint.

    Args:
        source: a finished flex checkpoint, or one of Paddle with a ``config.json`` in it.
        target: the directory to write; other files in it are kept.
        max_shard_bytes: bound on the tensors of one file, in bytes.
        verify: how the source is checked first: ``off``, ``size`` or ``full``.
        replace: whether a model that is in the target may be replaced.
        tied: which copy of a tied tensor is exported: ``refuse``, ``first`` or ``last``.
    Raises:
        OptionError: the target is a checkpoint, or holds a model that may not be replaced.
        FlexError: the source cannot be opened, proved or read, or the target not be written.
    """
    started = time.monotonic()
    checkpoint = paddleformers_fc.open(source, "size" if verify == "full" else verify)
    report = checkpoint.export(target, max_shard_bytes=max_shard_bytes, verify=verify, replace=replace, tied=tied)
    return Exported(
        source=str(source),
        path=str(target),
        files=[ExportedFile(name, size) for name, size in report.files.items()],
        tensors=report.tensors,
        bytes=report.bytes,
        md5=weights_md5(target),
        seconds=round(time.monotonic() - started, 3),
    )


def weights_md5(directory: Path) -> str:
    """One md5 for a directory of open weights, whatever files they are divided into.

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
    tensors = open_huggingface(directory).catalog.roles[MODEL_STATE]
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
    return digest.hexdigest()


def show(found: Exported, console: Console) -> None:
    """The files, a line each, and the sum."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(found.path, "bold"))
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for file in found.files:
        table.add_row(f"  {file.name}", size_text(file.bytes))
    console.print(table)
    console.print(f"md5 of names and bytes: {found.md5}")
    tensors = f"{count_text(found.tensors, 'tensor')}, {size_text(found.bytes)}"
    console.print(Text.assemble(("exported", "bold green"), f": {tensors}, {found.seconds:.2f} s"))
