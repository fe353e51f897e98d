"""``export`` and ``convert``: write a checkpoint as Hugging Face files or in another format."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec

import paddleformers_fc
from paddleformers_fc import output
from paddleformers_fc.formats.registry import FORMATS, conversion_target
from paddleformers_fc.layout.roles import MASTER_WEIGHT, MODEL_STATE
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import count_text, fold, natural, size_text


class ExportedFile(msgspec.Struct, frozen=True):
    """A weight file.

    Attributes:
        name: the file name.
        bytes: the size.
    """

    name: str
    bytes: int


class Exported(msgspec.Struct, frozen=True):
    """The report of an export.

    Attributes:
        source: the checkpoint as it was named.
        path: the directory that was written.
        files: the weight files.
        tensors: number of canonical tensors.
        bytes: size of these tensors.
        md5: digest of all names and weights, see :func:`.digest.weights_md5`.
        seconds: duration.
    """

    source: str
    path: str
    files: list[ExportedFile]
    tensors: int
    bytes: int
    md5: str
    seconds: float


def export(
    source: AnyPath, target: AnyPath, config: str | None, verify: str, role: str, dtype: str, **options: Any
) -> Exported:
    """Export a checkpoint.

    Args:
        source: a finished flex checkpoint, or a checkpoint of Paddle or PaddleFormers.
        target: the directory or URL to write; other files in it are kept.
        config: as for :func:`.api.open`.
        verify: as for :meth:`.api.Checkpoint.export`.
        role: likewise.
        dtype: likewise.
        options: its other options.
    Raises:
        OptionError: the target is a checkpoint, or contains a model that may not be replaced.
        FlexError: opening, proving or reading the source, or writing the target, has failed.
    """
    started = time.monotonic()
    # Without verification, files of other roles may be missing.
    roles = {MODEL_STATE, role} | ({MASTER_WEIGHT} if dtype else set()) if verify == "off" else None
    checkpoint = paddleformers_fc.open(source, _level(verify), roles, config=config)
    report = checkpoint.export(target, verify=verify, role=role, dtype=dtype, md5=True, **options)
    return Exported(
        source=str(source),
        path=str(target),
        files=[ExportedFile(name, size) for name, size in report.files.items()],
        tensors=report.tensors,
        bytes=report.bytes,
        md5=report.md5,
        seconds=round(time.monotonic() - started, 3),
    )


def _level(verify: str) -> str:
    """Return the level at which to open a checkpoint; ``full`` then compares checksums while bytes are read."""
    return "size" if verify == "full" else verify


def show(found: Exported, console: output.Console) -> None:
    """Print a line per file, and the total."""
    console.print(found.path, style="bold")
    console.print(file_table(found.files))
    console.print(f"md5 of names and bytes: {found.md5}")
    tensors = f"{count_text(found.tensors, 'tensor')}, {size_text(found.bytes)}"
    output.print_styled(console, ("exported", "bold green"), f": {tensors}, {found.seconds:.2f} s")


def file_table(files: Iterable[ExportedFile]) -> output.Table:
    """Return a table of the files and their sizes."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for file in files:
        table.add_row(f"  {file.name}", size_text(file.bytes))
    return table


class Converted(msgspec.Struct, frozen=True):
    """The report of a conversion.

    Attributes:
        source: the checkpoint as it was named.
        source_format: the format of the source.
        path: the directory that was written.
        format: the format that was written.
        step: completed optimizer steps; None if the checkpoint does not record a run.
        roles: number of tensors by role.
        files: the files that contain tensors.
        bytes: size of these tensors.
        dropped: the tensors of open weights that were not written, because the model does not have them.
        seconds: duration.
    """

    source: str
    source_format: str
    path: str
    format: str
    step: int | None
    roles: dict[str, int]
    files: list[ExportedFile]
    bytes: int
    dropped: list[str]
    seconds: float


def convert(
    source: AnyPath, target: AnyPath, format: str, config: str | None, verify: str, **options: Any
) -> Converted:
    """Convert a checkpoint.

    Args:
        source: a checkpoint of any format.
        target: the directory or URL to write.
        format: as for :meth:`.api.Checkpoint.convert`.
        config: as for :func:`.api.open`.
        verify: as for :meth:`.api.Checkpoint.convert`.
        options: its other options.
    Raises:
        FlexError: opening, proving or reading the source, or writing the target, has failed.
    """
    started = time.monotonic()
    checkpoint = paddleformers_fc.open(source, _level(verify), config=config)
    report = checkpoint.convert(target, format=format, verify=verify, **options)
    written, _ = conversion_target(format)
    # Paddle's checkpoints can be written to URLs, but not read from there.
    job = paddleformers_fc.open(target).metadata.job if written.recognises(target) else None
    return Converted(
        source=str(source),
        source_format=checkpoint.metadata.format,
        path=str(target),
        format=written.name,
        step=job.step if job is not None else None,
        roles=report.roles,
        files=[ExportedFile(name, size) for name, size in report.files.items()],
        bytes=report.bytes,
        dropped=sorted(report.dropped, key=natural),
        seconds=round(time.monotonic() - started, 3),
    )


def show_converted(found: Converted, console: output.Console) -> None:
    """Print a line per file, the roles, the dropped tensors, and the total."""
    console.print(found.path, style="bold")
    console.print(file_table(found.files))
    for role, tensors in found.roles.items():
        console.print(f"{role}: {count_text(tensors, 'tensor')}")
    if found.dropped:
        console.print(f"dropped, because the model does not have them: {count_text(len(found.dropped), 'tensor')}")
    for line in fold(found.dropped):
        console.print(f"  {line}", soft_wrap=True)
    titles = {one.name: one.title for one in FORMATS}
    formats = f"{titles[found.source_format]} to {titles[found.format]}"
    what = f"{formats}, {size_text(found.bytes)}, {found.seconds:.2f} s"
    output.print_styled(console, ("converted", "bold green"), f": {what}")
