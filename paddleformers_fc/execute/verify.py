"""Verify that a checkpoint is as it was saved, and that all of it can be used.

================  ==================================================================================================
``manifest``      it can be read and matches its own checksum
``files``         every file is there and of its size; at level ``full`` every byte is as it was written
``tensors``       headers follow their format; every tensor is stored whole and once, and is in the rules
``run``           documents of the Trainer have the manifest's step, samples and ranks (not at level ``off``)
``mapping``       the rules are proved; all canonical tensors can be made
``equal values``  tied tensors, and numbers stored several times, are equal bit for bit, and weights of 16 bits are
                  their rounded master weights (level ``full``); at every level the save found the copies of tied
                  tensors equal
================  ==================================================================================================

The format of a checkpoint determines which checks are made (``Format.checks``). Damaged files do not prevent the checks
of headers and mapping; every other check requires the ones before it. One error lists the faults of all checks. Missing
read permission is no evidence of damage: such a check counts as not made. Open weights have four checks: ``checksums``
(those that an export has recorded), ``tensors`` (index, headers and ranges), ``model`` (names, shapes and sizes match
``config.json``, by its family), and ``equal values``. Stock checkpoints have neither checksums nor a stored mapping; a
load compares what ``equal values`` compares. For files of ranks and unified checkpoints, ``model`` is a proof that all
tensors of the configuration are stored. The outcome lists the parts that cannot be checked, and the checkpoints below
the directory, which are not checked.

Time: at level ``full`` one pass over the files, by a few threads; memory: one block per thread.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from msgspec import structs

from paddleformers_fc.errors import CheckpointError, FlexError, MappingError, NotACheckpoint, OptionError
from paddleformers_fc.execute.digest import compare_rounded
from paddleformers_fc.execute.output_directory import checkpoints_below
from paddleformers_fc.execute.reading import verify_equal
from paddleformers_fc.families import described_by_file, family_for
from paddleformers_fc.families.stated import canonical_ties
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.formats.checkpoint import CONFIG_NAME, Check, CheckList, combined, compare_run
from paddleformers_fc.formats.flex import manifest_text
from paddleformers_fc.formats.registry import require_format
from paddleformers_fc.layout.grid import ParallelGrid
from paddleformers_fc.plan.build import ReadSource, plan_reads
from paddleformers_fc.plan.forecast import GridPlan, plan_load
from paddleformers_fc.plan.items import LoadPlan
from paddleformers_fc.plan.report import CHECKPOINT, OPEN_WEIGHTS
from paddleformers_fc.plan.simulate import declared_model
from paddleformers_fc.plan.sources import canonical_layout, canonical_source
from paddleformers_fc.storage.files import is_directory, list_directory
from paddleformers_fc.storage.manifest import check_not_diverged, read_manifest
from paddleformers_fc.storage.paths import AnyPath, parse_step
from paddleformers_fc.text import count_text

_EQUAL = "equal values"


class Verification(msgspec.Struct, frozen=True):
    """The outcome.

    Attributes:
        kind: ``flex_checkpoint``, ``huggingface`` or ``paddle``.
        path: the directory as it was named.
        level: ``off``, ``size`` or ``full``.
        passed: whether no check failed.
        checks: in the order in which they were made.
        not_checked: the checks that were not made: one that they require failed, a file cannot be read, or the level
            does not include them.
        files: files of the checkpoint.
        bytes: their sizes together.
        tensors: stored tensors, of all roles.
        seconds: how long it took.
        cannot_be_checked: the properties that the directory records no evidence of, one line each.
        below: checkpoints below the directory, which were not checked, one line each.
    """

    kind: str
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


def verify_checkpoint(directory: AnyPath, level: str) -> tuple[Verification, FlexError | None]:
    """Check a directory.

    Args:
        directory: a checkpoint of any format.
        level: ``off`` reads manifest and headers, ``size`` looks at the files as well, ``full`` reads every byte.
    Returns:
        the outcome, and the error that lists every fault, or None.
    Raises:
        OptionError: the directory is not a checkpoint and there are checkpoints below it.
        NotACheckpoint: it is not a checkpoint.
    """
    started = time.monotonic()
    below = _below(directory)
    try:
        format = require_format(directory)
    except NotACheckpoint as error:
        if not below:
            raise
        raise OptionError(
            f"{directory} is not a checkpoint; the checkpoints in it were not verified.",
            where=str(directory),
            evidence=below,
            next_step="Name one of these checkpoints.",
        ) from error
    checks = CheckList()
    try:
        checkpoint = format.verify(directory, level, checks)
        sizes = checkpoint.file_sizes
        checks.tensors, checks.files, checks.bytes = checkpoint.catalog.count, len(sizes), sum(sizes.values())
        if level != "off" and checkpoint.has_run and not checks.faults:
            with checks.optional("run"):
                checks.passed("run", _run_text(compare_run(checkpoint)))
        if "mapping" in format.checks:
            _check_mapping(checkpoint, level, checks)
        if format.canonical and "model" in format.checks:
            _check_model(checkpoint, checks)
        if level == "full" and _EQUAL in format.checks and "mapping" not in format.checks:
            _check_copies(checkpoint, checks)
    except FlexError as error:
        if error not in checks.faults:
            checks.faults.append(error)
    problem = combined(checks.faults)
    outcome = Verification(
        kind=format.name,
        path=str(directory),
        level=level,
        passed=problem is None,
        checks=checks.made,
        not_checked=[name for name in format.checks if name not in {check.name for check in checks.made}],
        files=checks.files,
        bytes=checks.bytes,
        tensors=checks.tensors,
        seconds=round(time.monotonic() - started, 3),
        cannot_be_checked=checks.impossible,
        below=below,
    )
    return outcome, problem


def _below(directory: AnyPath) -> list[str]:
    """Return a line for every checkpoint in a directory, of a local one also two levels below; none is verified."""
    found: list[AnyPath] = list(list_directory(directory))
    if isinstance(directory, Path):
        found += checkpoints_below(directory)
    steps = sorted((step, str(path), path) for path in found if (step := parse_step(path)) is not None)
    return [f"{name}: {_state_text(path)}" for _, name, path in steps if is_directory(path)]


def _state_text(directory: AnyPath) -> str:
    try:
        return manifest_text(read_manifest(directory))
    except CheckpointError as error:
        return error.in_one_line()


def _run_text(count: int) -> str:
    return f"{count_text(count, 'document')} of the Trainer agree" if count else "there is no state of a Trainer"


def _check_mapping(checkpoint: OpenedCheckpoint, level: str, checks: CheckList) -> None:
    with checks.required("mapping"):
        source = canonical_source(checkpoint)
        plan = _planned(source)
    checks.passed("mapping", _plan_text(plan))
    if level == "full" or checkpoint.manifest.ties:
        with checks.required(_EQUAL):
            compared = _compare(checkpoint, source, plan, level)
        checks.passed(_EQUAL, _equal_text(*compared))


def _check_copies(checkpoint: OpenedCheckpoint, checks: CheckList) -> None:
    """Compare what a load compares of a checkpoint without a stored mapping: its ties follow from its family."""
    stored = OPEN_WEIGHTS if checkpoint.format.canonical else CHECKPOINT
    try:
        source = canonical_source(checkpoint)
        if checkpoint.format.canonical:
            family_for(checkpoint.config)
            # Both names of a tied tensor are canonical.
            source = structs.replace(source, stored_aliases=canonical_ties(described_by_file(checkpoint.config)))
    except (MappingError, NotACheckpoint) as error:
        checks.impossible.append(f"copies of tied tensors: {error.in_one_line()}")
        return
    with checks.required(_EQUAL):
        compared = _compare(checkpoint, source, _planned(source, stored), "full")
    checks.passed(_EQUAL, _equal_text(*compared))


def _compare(checkpoint: OpenedCheckpoint, source: ReadSource, plan: LoadPlan, level: str) -> tuple[int, int]:
    """Compare what must be equal, and return the number of pairs, and of weights that have master weights."""
    record, rounded = checkpoint.commit_record, 0
    if record is not None:
        check_not_diverged(checkpoint.catalog.root, record)
    if level == "full":
        verify_equal(plan.checks, checkpoint.catalog.root, identities=checkpoint.catalog.identities)
        # Of replicas that differ one has been saved for the weight, and maybe another one for the master weight.
        if record is None or not record.differences:
            rounded = compare_rounded(source)
    return len(plan.checks), rounded


def _equal_text(pairs: int, rounded: int) -> str:
    found = [f"{count_text(pairs, 'pair')} compared"] if pairs else []
    found += [f"{count_text(rounded, 'weight')} compared with master weights"] if rounded else []
    return ", ".join(found) or "there are no tied tensors and no numbers that are stored several times"


def _planned(source: ReadSource, stored: str = CHECKPOINT) -> LoadPlan:
    """Return the plan that makes every canonical tensor of every role out of the stored tensors."""
    plan = plan_reads(source, canonical_layout(source))
    plan.report.raise_error(str(source.catalog.root), stored=stored)
    return plan


def _plan_text(plan: LoadPlan) -> str:
    names = {(item.role, item.name) for item in plan.items}
    return f"proved; {count_text(len(names), 'canonical tensor')} can be made"


def _check_model(checkpoint: OpenedCheckpoint, checks: CheckList) -> None:
    if not checkpoint.config:
        checks.impossible.append(f"names, shapes and sizes: there is no {CONFIG_NAME}")
        return
    try:
        declared_model(family_for(checkpoint.config), described_by_file(checkpoint.config), ParallelGrid())
    except FlexError as error:
        # An unknown family, or a configuration without sizes: no fault of the weights is known.
        checks.impossible.append(f"names, shapes and sizes: {error.in_one_line()}")
        return
    with checks.required("model"):
        planned = plan_load(checkpoint, "dp=1").plan()
    checks.passed("model", _model_text(planned))


def _model_text(found: GridPlan) -> str:
    summary = f"names, shapes and sizes are those of {CONFIG_NAME}"
    optional = [f"{count_text(len(found.fresh), 'tensor')} absent"] if found.fresh else []
    optional += [f"{count_text(len(found.dropped), 'tensor')} not used"] if found.dropped else []
    return f"{summary}; optional: {', '.join(optional)}" if optional else summary
