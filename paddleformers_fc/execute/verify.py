"""Verify that a checkpoint is as it was saved, and that it can be used.

Checks of a flex checkpoint: ``manifest`` (valid, matches its own checksum), ``files`` (sizes; at level ``full`` all
bytes), ``tensors`` (headers; every tensor is complete and stored once), ``run`` (the Trainer's files match the
manifest; not at level ``off``), ``mapping`` (proved) and ``equal values`` (tied tensors, repeated numbers, and 16-bit
weights against their rounded master weights; level ``full``). Open weights have ``checksums``, ``tensors``, ``model``
(names and shapes match ``config.json``) and ``equal values``. For other formats see ``Format.checks``.

Damaged files do not prevent the checks of headers and mapping; every other check requires the previous ones. One error
lists the faults of all checks. Missing read permission does not count as damage: the check is reported as not done.
Time: at level ``full`` one pass over the files, by a few threads. Memory: one block per thread.
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
    """The result of a verification.

    Attributes:
        kind: ``flex_checkpoint``, ``huggingface`` or ``paddle``.
        path: the directory, as the user named it.
        level: ``off``, ``size`` or ``full``.
        passed: whether no check failed.
        checks: the checks, in the order in which they ran.
        not_checked: the checks that did not run, because a required check failed, a file cannot be read, or the level
            does not include them.
        files: number of files of the checkpoint.
        bytes: total size of the files.
        tensors: number of stored tensors in all roles.
        seconds: duration of the verification.
        cannot_be_checked: properties that cannot be checked with the content of the directory, one line each.
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
        level: ``off`` reads manifest and headers, ``size`` also checks the sizes of files, ``full`` reads every byte.
    Returns:
        the result, and an error that lists every fault, or None.
    Raises:
        OptionError: the directory is not a checkpoint, but there are checkpoints below it.
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
    problem = combined(checks.faults, directory)
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
    """Return a line for every checkpoint in a directory, and in a local one also up to two levels deeper."""
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
    """Compare what a load compares of a checkpoint without a stored mapping, whose ties follow from its family."""
    stored = OPEN_WEIGHTS if checkpoint.format.canonical else CHECKPOINT
    try:
        source = canonical_source(checkpoint)
        if checkpoint.format.canonical:
            family_for(checkpoint.config)
            # Open weights may store both names of a tied tensor.
            source = structs.replace(source, stored_aliases=canonical_ties(described_by_file(checkpoint.config)))
    except (MappingError, NotACheckpoint) as error:
        checks.impossible.append(f"copies of tied tensors: {error.in_one_line()}")
        return
    with checks.required(_EQUAL):
        compared = _compare(checkpoint, source, _planned(source, stored), "full")
    checks.passed(_EQUAL, _equal_text(*compared))


def _compare(checkpoint: OpenedCheckpoint, source: ReadSource, plan: LoadPlan, level: str) -> tuple[int, int]:
    """Compare what must be equal, and return the number of pairs, and of weights with master weights."""
    record, rounded = checkpoint.commit_record, 0
    if record is not None:
        check_not_diverged(checkpoint.catalog.root, record)
    if level == "full":
        verify_equal(plan.checks, checkpoint.catalog.root, checkpoint.catalog.identities)
        # If replicas differed, weight and master weight may have been saved from different replicas.
        if record is None or not record.differences:
            rounded = compare_rounded(source)
    return len(plan.checks), rounded


def _equal_text(pairs: int, rounded: int) -> str:
    found = [f"{count_text(pairs, 'pair')} compared"] if pairs else []
    found += [f"{count_text(rounded, 'weight')} compared with master weights"] if rounded else []
    return ", ".join(found) or "no tied tensors, and no numbers that are stored several times"


def _planned(source: ReadSource, stored: str = CHECKPOINT) -> LoadPlan:
    """Return the plan that reads every canonical tensor of every role from the stored tensors."""
    plan = plan_reads(source, canonical_layout(source))
    plan.report.raise_error(str(source.catalog.root), stored=stored)
    return plan


def _plan_text(plan: LoadPlan) -> str:
    names = {(item.role, item.name) for item in plan.items}
    return f"proved; {count_text(len(names), 'canonical tensor')}"


def _check_model(checkpoint: OpenedCheckpoint, checks: CheckList) -> None:
    if not checkpoint.config:
        checks.impossible.append(f"names, shapes and sizes: there is no {CONFIG_NAME}")
        return
    try:
        declared_model(family_for(checkpoint.config), described_by_file(checkpoint.config), ParallelGrid())
    except FlexError as error:
        # An unknown family, or a configuration without sizes, is not a fault of the weights.
        checks.impossible.append(f"names, shapes and sizes: {error.in_one_line()}")
        return
    with checks.required("model"):
        planned = plan_load(checkpoint, "dp=1").plan()
    checks.passed("model", _model_text(planned))


def _model_text(found: GridPlan) -> str:
    summary = f"names, shapes and sizes match {CONFIG_NAME}"
    optional = [f"{count_text(len(found.fresh), 'tensor')} absent"] if found.fresh else []
    optional += [f"{count_text(len(found.dropped), 'tensor')} not used"] if found.dropped else []
    return f"{summary}; optional: {', '.join(optional)}" if optional else summary
