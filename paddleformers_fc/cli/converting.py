"""``convert``: a checkpoint of any format in another one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

import paddleformers_fc
from paddleformers_fc.cli.exporting import ExportedFile, file_table
from paddleformers_fc.formats import FORMATS
from paddleformers_fc.formats.registry import conversion_target
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import count_text, size_text

if TYPE_CHECKING:
    from rich.console import Console


class Converted(msgspec.Struct, frozen=True):
    """The report of a conversion.

    Attributes:
        source: the checkpoint as it was named.
        source_format: its format.
        path: the directory that was written.
        format: its format.
        step: optimizer steps done; None if neither has a record of a run.
        roles: number of tensors by role.
        files: the files of tensors.
        bytes: of those tensors.
        seconds: how long it took.
    """

    source: str
    source_format: str
    path: str
    format: str
    step: int | None
    roles: dict[str, int]
    files: list[ExportedFile]
    bytes: int
    seconds: float


@dataclass(frozen=True)
class ConvertOptions:
    """The options of a conversion.

    Args:
        format: ``flex``, ``hf`` or ``distcp``.
        config: a directory with the model's ``config.json``; empty for that of the source.
        max_shard_bytes: bound on the tensors of one file, in bytes.
        verify: how recorded checksums are compared first: ``off``, ``size`` or ``full``.
        replace: whether older weights in the target may be replaced.
        tied: the copy of a tied tensor to read: ``refuse``, ``first`` or ``last``.
    """

    format: str
    config: str
    max_shard_bytes: int
    verify: str
    replace: bool
    tied: str


def convert(source: AnyPath, target: AnyPath, choices: ConvertOptions) -> Converted:
    """Convert a checkpoint.

    Args:
        source: a checkpoint of any format.
        target: the directory or URL to write.
        choices: the options.
    Raises:
        FlexError: the source cannot be opened, proved or read, or the target not be written.
    """
    started = time.monotonic()
    level, config = "size" if choices.verify == "full" else choices.verify, choices.config or None
    checkpoint = paddleformers_fc.open(source, level, config=config)
    report = checkpoint.convert(
        target,
        format=choices.format,
        config=config,
        max_shard_bytes=choices.max_shard_bytes,
        verify=choices.verify,
        replace=choices.replace,
        tied=choices.tied,
    )
    written, _ = conversion_target(choices.format)
    # Paddle's checkpoints at URLs are written and not read.
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
        seconds=round(time.monotonic() - started, 3),
    )


def show(found: Converted, console: Console) -> None:
    """Print a line per file, the roles, and the sum."""
    from rich.text import Text

    console.print(Text(found.path, "bold"))
    console.print(file_table(found.files))
    for role, tensors in found.roles.items():
        console.print(f"{role}: {count_text(tensors, 'tensor')}")
    titles = {one.name: one.title for one in FORMATS}
    formats = f"{titles[found.source_format]} to {titles[found.format]}"
    what = f"{formats}, {size_text(found.bytes)}, {found.seconds:.2f} s"
    console.print(Text.assemble(("converted", "bold green"), f": {what}"))
