"""Small checkpoints to damage, and a machine that can be stopped at any system call."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddleformers_fc.storage import files, staging_lock
from paddleformers_fc.storage.commit import Committed, commit, create_staging
from paddleformers_fc.storage.files import write_file
from paddleformers_fc.storage.manifest import FileChecksum, Manifest, read_manifest, verify_files, write_manifest
from paddleformers_fc.storage.paths import parse_step
from paddleformers_fc.storage.safetensors import SequentialTensorWriter, layout_file, read_header

WEIGHTS = "model_state/rank-00000.safetensors"
STATE = "trainer/state.json"
BLOCK = 64


SPELLINGS = {"with spaces": (", ", ": "), "as writers spell it": (",", ":")}
"""The separators of a JSON text."""


def header_bytes(document: Any, spelling: str = "with spaces") -> bytes:
    """The length field and the JSON text of a safetensors header; text is taken as it is."""
    if not isinstance(document, bytes):
        document = json.dumps(document, ensure_ascii=False, separators=SPELLINGS[spelling]).encode()
    text = document
    return struct.pack("<Q", len(text)) + text


def writer_of(path: Path, entries: Any, metadata: Any, **options: Any) -> SequentialTensorWriter:
    """A writer of tensors as they are declared."""
    return SequentialTensorWriter(path, layout_file(path, entries, metadata), **options)


def stage(target: Path, value: int) -> Path:
    """A complete checkpoint in a staging directory; ``value`` is in every tensor."""
    staging = create_staging(target)
    entries = [("a", "F32", (8, 8)), ("b", "I64", (5,))]
    with writer_of(staging / WEIGHTS, entries, {}, root=staging, block_bytes=BLOCK) as writer:
        writer.write("a", np.full((8, 8), value, np.float32))
        writer.write("b", np.full(5, value, np.int64))
    state = write_file(staging / STATE, json.dumps({"value": value}).encode(), root=staging, block_bytes=BLOCK)
    step = parse_step(target)
    write_manifest(staging, manifest_of([writer.close(), state], **({} if step is None else {"step": step})))
    return staging


def save(target: Path, value: int) -> Committed:
    """One whole save."""
    return commit(stage(target, value), target)


def manifest_of(checksums: list[FileChecksum], **fields: Any) -> Manifest:
    """A manifest with something in every field."""
    values: dict[str, Any] = {
        "step": 500,
        "consumed_samples": 4000,
        "world_size": 2,
        "parallel": {"tensor": 2, "pipeline": 1},
        "family": "llama",
        "written_by": "a test",
    }
    return Manifest(files=checksums, **{**values, **fields})


def value_of(checkpoint: Path) -> int:
    """The value that :func:`stage` put into a checkpoint, after everything in it was checked."""
    verify_files(checkpoint, read_manifest(checkpoint), "full")
    entry = read_header(checkpoint / WEIGHTS).tensors["b"]
    numbers = np.frombuffer((checkpoint / WEIGHTS).read_bytes()[entry.begin : entry.end], np.int64)
    state = json.loads((checkpoint / STATE).read_bytes())["value"]
    assert {*numbers.tolist(), state} == {state}
    return int(state)


def names_in(directory: Path) -> list[str]:
    """Every entry, hidden ones included."""
    return sorted(os.listdir(directory))


def a_dead_process() -> staging_lock.Owner:
    """The record of a process of this machine that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    here = staging_lock.this_process()
    return staging_lock.Owner(here.host, process.pid, here.boot, here.namespace, "1")


class Crash(BaseException):
    """The machine stopped. Not an Exception: nothing may handle it."""


@dataclass
class Machine:
    """Stands in for ``os`` in ``storage.files`` and can stop at any call that changes the file system.

    It also models what a power failure takes: the bytes of files and the entries of directories that were not synced.

    Attributes:
        stop_at: number of the call to stop at, from 0; None never stops.
        after: whether that call is still carried out.
        can_exchange: whether names can be exchanged.
        log: every call carried out: its name and its path.
    """

    stop_at: int | None = None
    after: bool = False
    can_exchange: bool = True
    log: list[tuple[str, str]] = field(default_factory=list)
    stopped: bool = False
    _calls: int = 0
    _paths: dict[int, Path] = field(default_factory=dict)
    _unsynced_bytes: set[tuple[int, int]] = field(default_factory=set)
    _unsynced_names: dict[tuple[int, int], set[str]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        if not flags & os.O_CREAT:
            descriptor = os.open(path, flags, mode)
        else:
            descriptor = self._do("create", path, lambda: os.open(path, flags, mode))
            self._created(path)
        self._paths[descriptor] = Path(path)
        return descriptor

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        self._unsynced_bytes.add(_identity(descriptor))
        return int(self._do("write", self._paths[descriptor], lambda: os.pwrite(descriptor, data, offset)))

    def fsync(self, descriptor: int) -> None:
        # The model keeps account of it; the device need not.
        def sync() -> None:
            self._unsynced_bytes.discard(_identity(descriptor))
            self._unsynced_names.pop(_identity(descriptor), None)

        self._do("sync", self._paths[descriptor], sync)

    def mkdir(self, path: Path) -> None:
        self._do("mkdir", path, lambda: os.mkdir(path))
        self._created(path)

    def rename(self, source: Path, target: Path) -> None:
        self._do("rename", target, lambda: os.rename(source, target))

    def unlink(self, path: Path) -> None:
        self._do("unlink", path, lambda: os.unlink(path))

    def rmdir(self, path: Path) -> None:
        self._do("rmdir", path, lambda: os.rmdir(path))

    def renameat2(self, one: bytes, other: bytes) -> int:
        if not self.can_exchange:
            return -1
        return int(self._do("exchange", Path(os.fsdecode(other)), lambda: _renameat2(one, other)))

    def lose_power(self, root: Path) -> None:
        """Take from ``root`` what was not synced."""
        for directory, subdirectories, names in os.walk(root, topdown=False):
            lost = self._unsynced_names.get(_identity(directory), set())
            for name in [*subdirectories, *names]:
                path = Path(directory, name)
                if name in lost:
                    subprocess.run(["rm", "-rf", str(path)], check=True)
                elif _identity(path) in self._unsynced_bytes:
                    os.truncate(path, 0)

    def _do(self, name: str, path: Path, call: Callable[[], Any]) -> Any:
        if self.stopped:
            raise Crash
        number, self._calls = self._calls, self._calls + 1
        self.stopped = number == self.stop_at
        if self.stopped and not self.after:
            raise Crash
        result = call()
        self.log.append((name, str(path)))
        if self.stopped:
            raise Crash
        return result

    def _created(self, path: Path) -> None:
        self._unsynced_names.setdefault(_identity(Path(path).parent), set()).add(Path(path).name)


_renameat2 = files._renameat2


def _identity(file: Path | str | int) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_dev, status.st_ino


@contextmanager
def running_on(machine: Machine, process: staging_lock.Owner | None = None) -> Iterator[None]:
    """Let ``storage`` run on ``machine``, and as ``process`` where one is given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "os", machine)
        patch.setattr(files, "_renameat2", machine.renameat2)
        if process is not None:
            patch.setattr(staging_lock, "this_process", lambda: process)
        yield
