"""``verify``: is this checkpoint what was saved, and can all of it be used?

================  ==================================================================================================
``manifest``      it can be read and matches its own checksum
``files``         every file is there and of its size; at level ``full`` every byte is as it was written
``tensors``       headers follow their format; every tensor is stored whole and once, and is one that the rules know
``mapping``       the rules are proved; all canonical tensors can be made
``equal values``  tied tensors, and numbers stored several times, are equal bit for bit (level ``full``); at every level
                  the save found the copies of tied tensors equal
================  ==================================================================================================

Each check rests on the ones before it, so the first that fails is the last that is made; it reports all it finds. What
the system or a store does not let be read is not known to be wrong: such a check counts as not made.
Open weights have no checksums: their index, headers and ranges are checked, which is all that can be.

Time: at level ``full`` one pass over the files, by a few threads; memory: one block per thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from paddleformers_fc.catalog import FlexCheckpoint, open_flex
from paddleformers_fc.cli.opening import FLEX, HUGGINGFACE, PADDLE, Kind, kind_of, open_directory
from paddleformers_fc.errors import CheckpointError, FlexError, MappingError, MismatchError
from paddleformers_fc.execute.reading import verify_equal
from paddleformers_fc.plan import LoadPlan, canonical_layout, canonical_source, plan_reads
from paddleformers_fc.storage.files import each, size_of
from paddleformers_fc.storage.manifest import Manifest, read_manifest, refuse_diverged, verify_files
from paddleformers_fc.storage.places import Place
from paddleformers_fc.wording import count_text, size_text

if TYPE_CHECKING:
    from rich.console import Console

_T = TypeVar("_T")
_CHECKS: dict[Kind, tuple[str, ...]] = {
    FLEX: ("manifest", "files", "tensors", "mapping", "equal values"),
    HUGGINGFACE: ("tensors",),
    PADDLE: ("tensors",),
}
_WHOLE = {
    HUGGINGFACE: "each in the file that the index names; this format has no checksums",
    PADDLE: "each stored whole and once; this format has no checksums",
}
_DEPTH = {"size": "all there and of their sizes", "full": "every byte as it was written"}


class Check(msgspec.Struct, frozen=True):
    """One check.

    Attributes:
        name: what was checked.
        passed: whether it is right.
        detail: what was found; for a check that failed, the fault in one sentence.
    """

    name: str
    passed: bool
    detail: str


class Verification(msgspec.Struct, frozen=True):
    """The outcome.

    Attributes:
        kind: ``flex_checkpoint``, ``huggingface`` or ``paddle``.
        path: the directory as it was named.
        level: ``off``, ``size`` or ``full``.
        passed: whether everything that was to be checked is right.
        checks: in the order in which they were made.
        not_checked: the checks that were not made, because one before them failed, because what they look at may not be
            read, or because the level has them not.
        files: files of the checkpoint.
        bytes: their sizes together.
        tensors: stored tensors, of all roles.
        seconds: how long it took.
    """

    kind: Kind
    path: str
    level: str
    passed: bool
    checks: list[Check]
    not_checked: list[str]
    files: int
    bytes: int
    tensors: int
    seconds: float


class _Protocol:
    """The checks made so far, and what they counted."""

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.files = self.bytes = self.tensors = 0

    def check(self, name: str, work: Callable[[], _T], detail: Callable[[_T], str]) -> _T:
        """Make one check: note what it found, or its fault, which is raised again; a refusal to be read is no fault."""
        try:
            found = work()
        except (CheckpointError, MappingError, MismatchError) as error:
            self.checks.append(Check(name, False, error.what))
            raise
        self.checks.append(Check(name, True, detail(found)))
        return found


def verify(directory: Place, level: str) -> tuple[Verification, FlexError | None]:
    """Check a directory.

    Args:
        directory: a flex checkpoint or a directory of open weights.
        level: ``off`` reads manifest and headers, ``size`` looks at the files as well, ``full`` reads every byte.
    Returns:
        the outcome, and the error that says all that is wrong, or None.
    """
    started = time.monotonic()
    kind = kind_of(directory)
    protocol = _Protocol()
    problem: FlexError | None = None
    try:
        (_check_flex if kind == FLEX else _check_tensors)(directory, level, protocol)
    except FlexError as error:
        problem = error
    outcome = Verification(
        kind=kind,
        path=str(directory),
        level=level,
        passed=problem is None,
        checks=protocol.checks,
        not_checked=[name for name in _CHECKS[kind] if name not in {check.name for check in protocol.checks}],
        files=protocol.files,
        bytes=protocol.bytes,
        tensors=protocol.tensors,
        seconds=round(time.monotonic() - started, 3),
    )
    return outcome, problem


def _check_flex(directory: Place, level: str, protocol: _Protocol) -> None:
    manifest = protocol.check("manifest", lambda: read_manifest(directory), _manifest_text)
    protocol.files = len(manifest.files)
    protocol.bytes = sum(receipt.size for receipt in manifest.files)
    if level != "off":
        protocol.check(
            "files",
            lambda: verify_files(directory, manifest, level),
            lambda _: f"{count_text(protocol.files, 'file')}, {size_text(protocol.bytes)}: {_DEPTH[level]}",
        )
    checkpoint = protocol.check(
        "tensors",
        lambda: open_flex(directory, "off"),
        lambda opened: f"{count_text(_tensor_count(opened), 'tensor')}, each stored whole and once",
    )
    protocol.tensors = _tensor_count(checkpoint)
    plan = protocol.check("mapping", lambda: _prove(checkpoint), _plan_text)
    if level == "full" or manifest.ties:
        protocol.check(
            "equal values",
            lambda: _compare(directory, manifest, plan, level),
            lambda _: (
                f"{count_text(len(plan.checks), 'pair')} compared"
                if plan.checks
                else "there are no tied tensors and no numbers that are stored several times"
            ),
        )


def _compare(directory: Place, manifest: Manifest, plan: LoadPlan, level: str) -> None:
    refuse_diverged(directory, manifest)
    if level == "full":
        verify_equal(plan.checks, directory)


def _check_tensors(directory: Place, level: str, protocol: _Protocol) -> None:
    opened = protocol.check(
        "tensors",
        lambda: open_directory(directory, level),
        lambda found: f"{count_text(sum(map(len, found.catalog.roles.values())), 'tensor')}, {_WHOLE[found.kind]}",
    )
    tensors = [tensor for named in opened.catalog.roles.values() for tensor in named.values()]
    files = {fragment.file for tensor in tensors for fragment in tensor.fragments}
    protocol.tensors = len(tensors)
    protocol.files = len(files)
    protocol.bytes = sum(each(size_of, (directory / name for name in files), directory))


def _manifest_text(manifest: Manifest) -> str:
    said = f"step {manifest.step:,}, {count_text(manifest.world_size, 'rank')}, {manifest.written_by}"
    if not manifest.differences:
        return said
    # That is a fault of the training, and the checkpoint is what was saved.
    return f"{said}; {count_text(len(manifest.differences), 'replica')} differed when it was saved, see inspect"


def _tensor_count(checkpoint: FlexCheckpoint) -> int:
    return sum(len(tensors) for tensors in checkpoint.catalog.roles.values())


def _prove(checkpoint: FlexCheckpoint) -> LoadPlan:
    """The plan that makes every canonical tensor of every role out of what is stored."""
    source = canonical_source(checkpoint)
    plan = plan_reads(source, canonical_layout(source))
    plan.report.refuse(str(checkpoint.catalog.root))
    return plan


def _plan_text(plan: LoadPlan) -> str:
    names = {(item.role, item.name) for item in plan.items}
    return f"proved; {count_text(len(names), 'canonical tensor')} can be made"


def show(outcome: Verification, console: Console) -> None:
    """The checks, a line each, and the sum."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(outcome.path, "bold"))
    table = Table.grid(padding=(0, 2))
    for check in outcome.checks:
        mark = Text("  right", "green") if check.passed else Text("  WRONG", "bold red")
        # What is wrong is said below, once.
        table.add_row(mark, check.name, check.detail if check.passed else "see below")
    for name in outcome.not_checked:
        table.add_row(Text("  -", "dim"), name, Text("not checked", "dim"))
    console.print(table)
    console.print(Text.assemble(_verdict(outcome), f": level {outcome.level}, {outcome.seconds:.2f} s"))


def _verdict(outcome: Verification) -> tuple[str, str]:
    if outcome.passed:
        return "right", "bold green"
    if all(check.passed for check in outcome.checks):
        return "could not be checked", "bold yellow"
    return "found wrong", "bold red"
