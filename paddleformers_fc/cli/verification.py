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
Of open weights three things are checked: ``checksums`` (what an export has recorded of its files), ``tensors`` (index,
headers and ranges), and ``model`` (names, shapes and sizes are those of its ``config.json``, by its family).
What cannot be checked is stated. Of an output directory the checkpoints below are listed and none is checked.

Time: at level ``full`` one pass over the files, by a few threads; memory: one block per thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from paddleformers_fc.cli.opening import FLEX, HUGGINGFACE, PADDLE, CheckpointKind, Opened, kind_of, open_directory
from paddleformers_fc.cli.planning import planned
from paddleformers_fc.errors import (
    CheckpointError,
    FlexError,
    MappingError,
    MismatchError,
    NotACheckpoint,
    OptionError,
)
from paddleformers_fc.execute.reading import verify_equal
from paddleformers_fc.families import described_by_file, family_for
from paddleformers_fc.formats import FlexCheckpoint, open_flex
from paddleformers_fc.formats.flex import CONFIG_NAME
from paddleformers_fc.layout.grid import ParallelGrid
from paddleformers_fc.plan import LoadPlan, canonical_layout, canonical_source, plan_reads
from paddleformers_fc.plan.forecast import Forecast
from paddleformers_fc.plan.simulate import declared_model
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME, read_checksums, verify_export
from paddleformers_fc.storage.files import is_directory, list_directory, map_paths, size_of
from paddleformers_fc.storage.manifest import Manifest, read_manifest, refuse_diverged, verify_files
from paddleformers_fc.storage.names import parse_step
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import count_text, size_text

if TYPE_CHECKING:
    from rich.console import Console

_T = TypeVar("_T")
_CHECKS: dict[CheckpointKind, tuple[str, ...]] = {
    FLEX: ("manifest", "files", "tensors", "mapping", "equal values"),
    HUGGINGFACE: ("checksums", "tensors", "model"),
    PADDLE: ("tensors",),
}
_WHOLE = {
    HUGGINGFACE: "each in the file that the index names",
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
        cannot_be_checked: what nothing in the directory allows to check, one line each.
        below: checkpoints below the directory, which were not checked, one line each.
    """

    kind: CheckpointKind
    path: str
    level: str
    passed: bool
    checks: list[Check]
    not_checked: list[str]
    files: int
    bytes: int
    tensors: int
    seconds: float
    cannot_be_checked: list[str]
    below: list[str]


class _Protocol:
    """The checks made so far, and what they counted."""

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.files = self.bytes = self.tensors = 0
        self.cannot: list[str] = []

    def check(self, name: str, work: Callable[[], _T], detail: Callable[[_T], str]) -> _T:
        """Make one check: note what it found, or its fault, which is raised again; a refusal to be read is no fault."""
        try:
            found = work()
        except (CheckpointError, MappingError, MismatchError) as error:
            self.checks.append(Check(name, False, error.what))
            raise
        self.checks.append(Check(name, True, detail(found)))
        return found

    def refused(self, name: str, work: Callable[[], _T]) -> _T:
        """Do what a check needs first; only its fault is noted."""
        try:
            return work()
        except CheckpointError as error:
            self.checks.append(Check(name, False, error.what))
            raise


def verify(directory: AnyPath, level: str) -> tuple[Verification, FlexError | None]:
    """Check a directory.

    Args:
        directory: a flex checkpoint or a directory of open weights.
        level: ``off`` reads manifest and headers, ``size`` looks at the files as well, ``full`` reads every byte.
    Returns:
        the outcome, and the error that says all that is wrong, or None.
    """
    started = time.monotonic()
    below = checkpoints_below(directory)
    try:
        kind = kind_of(directory)
    except NotACheckpoint as error:
        if not below:
            raise
        raise OptionError(
            f"{directory} is no checkpoint, and nothing in it was verified.",
            where=str(directory),
            evidence=below,
            next_step="Name one of these checkpoints.",
        ) from error
    protocol = _Protocol()
    problem: FlexError | None = None
    try:
        check = {FLEX: _check_flex, HUGGINGFACE: _check_open_weights}.get(kind, _check_tensors)
        check(directory, level, protocol)
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
        cannot_be_checked=protocol.cannot,
        below=below,
    )
    return outcome, problem


def checkpoints_below(directory: AnyPath) -> list[str]:
    """The checkpoints in a directory and in those of a machine's directory below it, a line each, none verified."""
    found: list[AnyPath] = list(list_directory(directory))
    if isinstance(directory, Path):
        found += [path for above in ("*", "*/*") for path in directory.glob(f"{above}/checkpoint-*")]
    steps = sorted((step, str(path), path) for path in found if (step := parse_step(path)) is not None)
    return [f"{name}: {_state_text(path)}" for _, name, path in steps if is_directory(path)]


def _state_text(directory: AnyPath) -> str:
    try:
        return _manifest_text(read_manifest(directory))
    except CheckpointError as error:
        return error.in_one_line()


def _check_open_weights(directory: AnyPath, level: str, protocol: _Protocol) -> None:
    receipts = protocol.refused("checksums", lambda: read_checksums(directory))
    if receipts is None:
        protocol.cannot.append(f"changed bytes: there is no {CHECKSUMS_NAME}, which exports of this package have")
    elif level != "off":
        needed = [name for name in receipts if level == "full" or name.endswith(".safetensors")]
        protocol.check(
            "checksums",
            lambda: verify_export(directory, receipts, level, needed=needed),
            lambda _: f"{count_text(len(receipts), 'file')}: {_DEPTH[level]}",
        )
    opened = _check_tensors(directory, "off" if receipts is None else level, protocol)
    if not opened.config:
        protocol.cannot.append(f"names, shapes and sizes: there is no {CONFIG_NAME}")
        return
    try:
        declared_model(family_for(opened.config), described_by_file(opened.config), ParallelGrid())
    except FlexError as error:
        # An unknown family, or a configuration without sizes: nothing is known to be wrong with the weights.
        protocol.cannot.append(f"names, shapes and sizes: {error.in_one_line()}")
        return
    protocol.check("model", lambda: planned(opened, ParallelGrid(), None)[0], _model_text)


def _model_text(found: Forecast) -> str:
    said = f"names, shapes and sizes are those of {CONFIG_NAME}"
    optional = [f"{count_text(len(found.fresh), 'tensor')} absent"] if found.fresh else []
    optional += [f"{count_text(len(found.dropped), 'tensor')} not used"] if found.dropped else []
    return f"{said}; optional: {', '.join(optional)}" if optional else said


def _check_flex(directory: AnyPath, level: str, protocol: _Protocol) -> None:
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


def _compare(directory: AnyPath, manifest: Manifest, plan: LoadPlan, level: str) -> None:
    refuse_diverged(directory, manifest)
    if level == "full":
        verify_equal(plan.checks, directory)


def _check_tensors(directory: AnyPath, level: str, protocol: _Protocol) -> Opened:
    opened = protocol.check(
        "tensors",
        lambda: open_directory(directory, level),
        lambda found: f"{count_text(sum(map(len, found.catalog.roles.values())), 'tensor')}, {_WHOLE[found.kind]}",
    )
    tensors = [tensor for named in opened.catalog.roles.values() for tensor in named.values()]
    files = {fragment.file for tensor in tensors for fragment in tensor.fragments}
    protocol.tensors = len(tensors)
    protocol.files = len(files)
    protocol.bytes = sum(map_paths(size_of, (directory / name for name in files), directory))
    return opened


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
    for line in outcome.cannot_be_checked:
        console.print(Text(f"  cannot be checked: {line}"), soft_wrap=True)
    if outcome.below:
        console.print(Text("  below it, and not checked:"))
    for line in outcome.below:
        console.print(Text(f"    {line}"), soft_wrap=True)
    console.print(Text.assemble(_verdict(outcome), f": level {outcome.level}, {outcome.seconds:.2f} s"))


def _verdict(outcome: Verification) -> tuple[str, str]:
    if outcome.passed:
        return "right", "bold green"
    if all(check.passed for check in outcome.checks):
        return "could not be checked", "bold yellow"
    return "found wrong", "bold red"
