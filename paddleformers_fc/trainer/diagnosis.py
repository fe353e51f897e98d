"""Diagnose an installation and an output directory, before a job starts.

Disk speed is measured with an unnamed temporary file, which disappears even if the process is killed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from paddleformers_fc import __version__, upstream
from paddleformers_fc.execute.output_directory import OutputFacts, is_newest_faulty, list_output
from paddleformers_fc.formats.checkpoint import Check
from paddleformers_fc.storage.files import files_within, refused, size_of
from paddleformers_fc.text import count_text, size_text
from paddleformers_fc.trainer.resume import newest_without_changes
from paddleformers_fc.trainer.tiers import local_tier_of
from paddleformers_fc.upstream.hooks import TRAINERS

PROBE_BYTES = 128 << 20
"""Number of bytes to write and read to measure a disk."""

_CHUNK = 8 << 20
_PACKAGES = ("numpy", "ml_dtypes", "msgspec", "fsspec", "xxhash")
_DISTRIBUTIONS = {
    "paddle": ("paddlepaddle", "paddlepaddle-gpu"),
    "paddleformers": ("paddleformers",),
    "paddlefleet": ("paddlefleet",),
    "paddlenlp": ("paddlenlp",),
}
KNOWN_FAULTS = {
    "paddle": {
        "S1": "a resharding load from another dtype silently fills tensors with wrong numbers",
        "S3": "the second of two tied weights silently keeps its initial values",
        "S4": "a stored tensor of another shape is silently truncated or fills the tensor in part",
        "S5": "fused feed-forward weights of several tensor-parallel ranks are split wrongly",
        "S6": "fused attention weights of several tensor-parallel ranks are split wrongly",
        "S11": "a resharding load under FLAGS_use_stride_kernel=0 silently loads nothing",
        "S12": "a save over an older save with more ranks leaves tensors of the older save in place",
        "S13": "after a failed load, the next load in the process uses the metadata of the failed load",
        "S18": "a flipped bit in a stored tensor is loaded: there are no checksums",
    },
    "paddleformers": {
        "T3": "a resume starts from an empty newest directory",
        "T5": "load_best_model_at_end keeps the weights of the last step",
        "T7": "samples are repeated and skipped if the data-parallel degree changes on resume",
        "T8": "training restarts at step 1 if the Trainer's state file is missing",
        "T18": "replicas with different numbers are saved without a warning",
        "T19": "a resume unpickles files of the checkpoint, which can run code",
    },
}
"""Correctness faults of the known upstream versions, which this package avoids: trigger and effect by module and by row
of docs/results/guarantees.md."""


class KnownFault(msgspec.Struct, frozen=True):
    """A fault of upstream that this package avoids.

    Attributes:
        id: its row in docs/results/guarantees.md.
        package: the module with the fault.
        version: the version in which it was observed.
        what: trigger and effect in one line.
    """

    id: str
    package: str
    version: str
    what: str


class PackageFacts(msgspec.Struct, frozen=True):
    """An installed package.

    Attributes:
        name: its name.
        version: the installed version; empty if it is not installed.
        known: the version that this package supports; empty if any version will do.
    """

    name: str
    version: str
    known: str


class DiskFacts(msgspec.Struct, frozen=True):
    """The disk of an output directory.

    Attributes:
        free: bytes that this user can write.
        next_save: bytes that the next save needs, which is the size of the resumed checkpoint; 0 if there is none.
        write: bytes written and synced per second; 0 if not measured.
        read: bytes read per second, bypassing the page cache where the system allows it; 0 if not measured.
    """

    free: int
    next_save: int
    write: int
    read: int


class Diagnosis(msgspec.Struct, frozen=True):
    """The report of ``doctor``.

    Attributes:
        passed: whether no check failed.
        packages: the packages of this environment.
        known_faults: faults of the installed Paddle and PaddleFormers, which this package avoids.
        checks: the checks in order of execution.
        path: the output directory; empty if none was named.
        disk: its disk; None without a directory.
        resume: the checkpoint that ``resume_from_checkpoint: true`` resumes (a path if it is in the local tier); empty
            if the run starts from the beginning.
        skipped: newer checkpoints that are skipped, with the reasons.
    """

    passed: bool
    packages: list[PackageFacts]
    known_faults: list[KnownFault]
    checks: list[Check]
    path: str = ""
    disk: DiskFacts | None = None
    resume: str = ""
    skipped: list[str] = []


def diagnose(output_dir: Path | None, hooks: bool = True) -> Diagnosis:
    """Check this environment, and an output directory if one is given.

    Args:
        output_dir: where a job saves; None to check only the environment.
        hooks: whether to import Paddle and PaddleFormers and check the upstream hooks.
    Raises:
        OptionError: the directory is a checkpoint.
        StorageError: the operating system denied access to the directory.
    """
    packages = _packages()
    faults = [
        KnownFault(id, one.name, one.known, what)
        for one in packages
        if one.version and _is_known(one)
        for id, what in KNOWN_FAULTS.get(one.name, {}).items()
    ]
    checks = list(_environment(packages, hooks))
    if output_dir is None:
        return Diagnosis(all(one.passed for one in checks), packages, faults, checks)
    local = local_tier_of(output_dir)
    newest, skipped = newest_without_changes(output_dir, local)
    disk = _disk(output_dir, newest)
    resumed = "" if newest is None else _name(newest, output_dir)
    checks += _directory(output_dir, disk, resumed, [_name(path, output_dir) for path, _ in skipped])
    checks += [] if local is None else [_local_tier(local, disk.next_save)]
    return Diagnosis(
        all(one.passed for one in checks),
        packages,
        faults,
        checks,
        str(output_dir),
        disk,
        resumed,
        [why if why.startswith(path.name) else f"{_name(path, output_dir)}: {why}" for path, why in skipped],
    )


def _packages() -> list[PackageFacts]:
    """Return versions from package metadata, without imports."""
    own = [PackageFacts("python", platform.python_version(), ""), PackageFacts("paddleformers_fc", __version__, "")]
    named = [PackageFacts(name, _version((name,)), "") for name in _PACKAGES]
    known = dict(upstream.VERSIONS)
    known.setdefault(upstream.LIBRARY, "none")
    return [*own, *named, *(PackageFacts(n, _version(_DISTRIBUTIONS[n]), v) for n, v in known.items())]


def _version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def _is_known(one: PackageFacts) -> bool:
    return not one.known or upstream.without_build(one.version) == one.known


def _environment(packages: list[PackageFacts], hooks: bool) -> Iterator[Check]:
    wrong = [one for one in packages if one.version and not _is_known(one)]
    found = [f"{one.name} {one.version}" for one in packages if one.known and one.version]
    if wrong:
        text = ", ".join(f"{one.name} {one.version}, known is {one.known}" for one in wrong)
        yield Check("versions", False, f"{text}; jobs need flex_unknown_versions: warn")
    elif "paddle" in {one.name for one in packages if one.version}:
        yield Check("versions", True, f"{', '.join(found)}: known versions")
    else:
        yield Check("versions", True, "Paddle is not installed: all commands work except those that train")
        return
    if hooks and upstream.is_installed(upstream.LIBRARY):
        trainer = TRAINERS[upstream.LIBRARY]
        with contextlib.redirect_stdout(sys.stderr):  # Imports print; standard output is for the report.
            differences = upstream.differences(trainer)
        text = "; ".join(differences) or f"all {count_text(len(trainer), 'upstream hook')} match"
        yield Check("hooks", not differences, text)


def _directory(output_dir: Path, disk: DiskFacts, newest: str, skipped: list[str]) -> Iterator[Check]:
    rate = f"write {size_text(disk.write)}/s, read {size_text(disk.read)}/s" if disk.write else "too full to measure"
    yield Check("disk", bool(disk.write), rate)
    needed = f"the next save needs {size_text(disk.next_save)}" if disk.next_save else "no checkpoint to compare with"
    yield Check("space", disk.free > disk.next_save, f"{size_text(disk.free)} free; {needed}")
    listed = list_output(output_dir)
    yield _resume(listed, newest, skipped)
    left = listed.leftovers
    size = size_text(sum(one.bytes for one in left))
    yield Check("leftovers", True, f"{count_text(len(left), 'leftover')}, {size}" if left else "none")


def _resume(listed: OutputFacts, newest: str, skipped: list[str]) -> Check:
    """Check that something can be resumed, and that the newest checkpoint is complete.

    Args:
        listed: the output directory.
        newest: the name of the checkpoint that a resume reads; empty for none.
        skipped: the names of those that are skipped.
    """
    faulty = is_newest_faulty(listed)
    if newest:
        # A newer checkpoint of the local tier hides a faulty one.
        faults = [listed.checkpoints[0].name] if faulty and listed.checkpoints[0].name not in skipped else []
        texts = [f"the run resumes from {newest}", *(f"{name} is damaged or incomplete" for name in faults)]
        texts += [f"{count_text(len(skipped), 'newer checkpoint')} skipped, see below"] if skipped else []
        return Check("resume", not faulty, "; ".join(texts))
    text = "the run starts from the beginning" if not skipped else "no checkpoint can be resumed, see below"
    return Check("resume", not faulty and not skipped, text)


def _name(checkpoint: Path, output_dir: Path) -> str:
    """Return the name of a checkpoint, or its path if it is in the local tier."""
    return checkpoint.name if checkpoint.parent == output_dir else str(checkpoint)


def _local_tier(local: Path, next_save: int) -> Check:
    try:
        free = shutil.disk_usage(local).free
    except OSError as error:
        raise refused("measure the disk of", local, error) from error
    return Check("local tier", free > next_save, f"{local}: {size_text(free)} free on this machine")


def _disk(output_dir: Path, newest: Path | None) -> DiskFacts:
    needed = 0 if newest is None else sum(size_of(path) for path in files_within(newest))
    try:
        free = shutil.disk_usage(output_dir).free
        write, read = _rates(output_dir) if free > 2 * PROBE_BYTES else (0, 0)
    except OSError as error:
        raise refused("measure the disk of", output_dir, error) from error
    return DiskFacts(free, needed, write, read)


def _rates(directory: Path) -> tuple[int, int]:
    """Write, sync and read an unnamed file; return write and read speed in bytes per second."""
    chunk = os.urandom(_CHUNK)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        started = time.monotonic()
        for _ in range(PROBE_BYTES // _CHUNK):
            file.write(chunk)
        os.fsync(file.fileno())
        written = time.monotonic()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        into = bytearray(_CHUNK)
        begun = time.monotonic()
        while file.readinto(into):
            pass
        return _rate(written - started), _rate(time.monotonic() - begun)


def _rate(seconds: float) -> int:
    return int(PROBE_BYTES / max(seconds, 1e-9))
