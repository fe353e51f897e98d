"""What a save or load leaves behind, wherever it fails: nothing; and the next one in the same process is right."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.errors import FlexError, StorageError
from paddleformers_fc.execute import commit_coordinator
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.load import load_checkpoint
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.storage.manifest import newest_checkpoint
from tests.cli.test_main import python
from tests.corruption.jobs import no_longer_than
from tests.execute.simulated import (
    ARRAYS,
    MODEL,
    canonical,
    load,
    save,
    succeed,
)
from tests.harness.limits import LIMIT
from tests.harness.on_ranks import on_ranks
from verification.digests import canonical_digests

RANKS = 2
WEIGHTS = "model_state/rank-00000.safetensors"


@dataclass(frozen=True)
class Traces:
    """What a process has, and what lies where it works."""

    threads: frozenset[str]
    descriptors: frozenset[str]
    files: frozenset[str]


def traces(*directories: Path) -> Traces:
    """Threads, open files and what is under some directories, now."""
    names = {name: _target(name) for name in os.listdir("/proc/self/fd")}
    return Traces(
        threads=frozenset(thread.name for thread in threading.enumerate()),
        descriptors=frozenset(f"{name} {target}" for name, target in names.items() if target),
        files=frozenset(str(path) for directory in directories for path in directory.rglob("*")),
    )


def _target(descriptor: str) -> str:
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # The descriptor that listed the directory.
        return ""
    return "" if target.startswith("/proc/") else target


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a checkpoint, and a directory for temporary files of its own."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    save(tmp_path / "checkpoint-3", ARRAYS, RANKS)
    return tmp_path


# ---- Ways to fail, by stage.


def opening(place: Path) -> None:
    """A file is shorter than it was."""
    os.truncate(place / "damaged/checkpoint-3" / WEIGHTS, 100)
    load(place / "damaged/checkpoint-3", RANKS)


def planning(place: Path) -> None:
    """The model has a layer more."""
    load(place / "checkpoint-3", RANKS, arrays=canonical(layers=3))


def reading(place: Path) -> None:
    """A file is another one than it was when the checkpoint was opened."""
    opened = threading.Barrier(RANKS)

    def changed(directory: Path, roles: Any, channel: Any) -> Any:
        checkpoint = open_on_all_ranks(directory, channel)
        opened.wait(LIMIT)
        os.utime(directory / WEIGHTS, (1, 1))
        opened.wait(LIMIT)
        return load_checkpoint(checkpoint, roles, MODEL, channel)

    load(place / "damaged/checkpoint-3", RANKS, loader=changed)


def writing(place: Path) -> None:
    """Files may not become so long."""
    with no_longer_than(4000), pytest.raises(StorageError) as refused:
        save(place / "checkpoint-4", ARRAYS, RANKS, step=4)
    assert "errno 27 (EFBIG)" in str(refused.value)
    assert "rank-00000.safetensors, byte " in str(refused.value)
    raise refused.value


def committing(place: Path) -> None:
    """The file system refuses the last rename."""

    def refuse(*_: Any) -> Any:
        raise StorageError("The operating system refused to rename.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_coordinator, "commit", refuse)
        save(place / "checkpoint-4", ARRAYS, RANKS, step=4)


STAGES = [opening, planning, reading, writing, committing]


@pytest.mark.parametrize("fail", STAGES, ids=lambda fail: fail.__name__)
def test_a_failed_operation_leaves_no_state_and_the_next_one_succeeds(
    place: Path, fail: Callable[[Path], None]
) -> None:
    shutil.copytree(place / "checkpoint-3", place / "damaged/checkpoint-3")
    load(place / "checkpoint-3", RANKS)  # Caches are filled now.
    before = traces(place)
    for _ in range(2):
        with pytest.raises(FlexError):
            fail(place)
        assert traces(place) == before
        shutil.rmtree(place / "damaged")
        shutil.copytree(place / "checkpoint-3", place / "damaged/checkpoint-3")
        load(place / "damaged/checkpoint-3", RANKS, verify="full")
    save(place / "checkpoint-4", ARRAYS, RANKS, step=4)
    load(place / "checkpoint-4", RANKS, verify="full")
    after = traces(place)
    assert (after.threads, after.descriptors) == (before.threads, before.descriptors)


# ---- Threads and forks.


def test_two_directories_are_loaded_in_two_threads_at_the_same_time(place: Path) -> None:
    save(place / "checkpoint-5", canonical(seed=1))
    both = threading.Barrier(2)

    def work(channel: Any) -> None:
        directory, seed = (("checkpoint-3", 0), ("checkpoint-5", 1))[channel.rank]
        for _ in range(5):
            both.wait(LIMIT)
            load(place / directory, arrays=canonical(seed=seed), verify="full")

    succeed(2, work)


@on_ranks(1)
def test_a_process_that_has_loaded_can_fork_and_its_child_can_load(place: Path) -> None:
    load(place / "checkpoint-3", verify="full")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            load(place / "checkpoint-3", verify="full")
            code = 0
        finally:
            os._exit(code)
    load(place / "checkpoint-3", verify="full")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("flex")]


# ---- What is read from.


def facts(directory: Path) -> dict[str, tuple[int, ...]]:
    """Names, inodes, sizes and times of change of everything in a directory, and of itself."""
    found = {}
    for path in [directory, *directory.rglob("*")]:
        status = path.lstat()
        found[str(path)] = (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return found


def test_a_source_directory_is_never_changed(place: Path) -> None:
    source = place / "checkpoint-3"
    before = facts(source)
    for verify in ("off", "size", "full"):
        load(source, RANKS, verify=verify)
    with pytest.raises(FlexError):
        planning(place)
    assert newest_checkpoint(place)[0] == source
    export_checkpoint(source, place / "exported", 4000)
    assert list(canonical_digests(source))
    assert facts(source) == before


_FIRST = """
import os, sys, threading
from pathlib import Path
from paddleformers_fc.formats.flex import open_flex

sys.setswitchinterval(1e-6)
for _ in range(20):
    child = os.fork()
    if child == 0:
        barrier = threading.Barrier(8)
        def work():
            barrier.wait()
            open_flex(Path(sys.argv[1]))
        threads = [threading.Thread(target=work) for _ in range(8)]
        for one in threads: one.start()
        for one in threads: one.join()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit("a process ended by a signal")
"""


def test_threads_may_be_the_first_to_open_a_checkpoint(tmp_path: Path) -> None:
    # What msgspec knows of a type it works out when it first decodes one, and another thread that comes meanwhile
    # takes half of that for the whole, and ends the process. So every decoder is made when its module is imported.
    save(tmp_path / "checkpoint-3", ARRAYS, RANKS, step=3)
    assert python("-c", _FIRST, tmp_path / "checkpoint-3").stderr == ""
