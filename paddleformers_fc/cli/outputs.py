"""An output directory: its checkpoints, and what saves have left beside them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paddleformers_fc.cli.cleaning import LeftoverFacts, facts_of, show_leftovers
from paddleformers_fc.errors import CheckpointError, Diverged
from paddleformers_fc.storage.leftovers import leftovers
from paddleformers_fc.storage.manifest import candidates_in, read_manifest, refuse_as_newest, verify_files
from paddleformers_fc.storage.names import parse_step

if TYPE_CHECKING:
    from rich.console import Console


class CheckpointFacts(msgspec.Struct, frozen=True):
    """A directory that is named like a checkpoint.

    Attributes:
        name: its name.
        step: of its manifest; None where that cannot be read.
        run: id of the run that saved it; empty where it is not recorded.
        fault: why ``resume_from_checkpoint: true`` skips it; empty where it does not. Tensors are not read.
    """

    name: str
    step: int | None
    run: str
    fault: str


class OutputFacts(msgspec.Struct, frozen=True):
    """What an output directory holds.

    Attributes:
        checkpoints: by falling step.
        leftovers: what saves have left beside them.
    """

    checkpoints: list[CheckpointFacts]
    leftovers: list[LeftoverFacts]


def output_facts(directory: Path) -> OutputFacts | None:
    """The checkpoints and leftovers of a directory; None where it holds neither.

    Raises:
        StorageError: the operating system refused to look.
    """
    named = [path for path in candidates_in(directory) if parse_step(path) is not None]
    found = OutputFacts([_checkpoint(path) for path in named], [facts_of(one) for one in leftovers(directory)])
    return found if found.checkpoints or found.leftovers else None


def _checkpoint(path: Path) -> CheckpointFacts:
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return CheckpointFacts(path.name, None, "", error.in_one_line())
    fault = ""
    try:
        refuse_as_newest(path, manifest)
        verify_files(path, manifest, "size")
    except (CheckpointError, Diverged) as error:
        fault = error.in_one_line()
    return CheckpointFacts(path.name, manifest.step, manifest.saved_by.id, fault)


def show(found: OutputFacts, console: Console) -> None:
    """A line per checkpoint, then a line per leftover."""
    for one in found.checkpoints:
        run = f", run {one.run}" if one.run else ""
        console.print(f"  {one.name}{run}{f': {one.fault}' if one.fault else ''}")
    if found.leftovers:
        console.print("  leftovers (paddleformers-fc clean removes those that you confirm):")
        show_leftovers(found.leftovers, console)
