"""Small checkpoints to damage, leftovers of crashes, and a machine whose calls are recorded or refused."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from paddleformers_fc.storage.checksum import FileChecksum, FileRecord
from paddleformers_fc.storage.commit import Staging, commit, hidden_name, run_digest, staging_directory, sync_staging
from paddleformers_fc.storage.executor import ReadPool
from paddleformers_fc.storage.files import RandomAccessWriter, write_file
from paddleformers_fc.storage.manifest import Manifest, read_manifest, verify_files, write_manifest
from paddleformers_fc.storage.operations import Operation
from paddleformers_fc.storage.paths import LOCK_NAME, UNFINISHED, AnyPath, parse_step
from paddleformers_fc.storage.safetensors import TensorWriter, layout_file, read_header
from tests.crash import net

WEIGHTS = "model_state/rank-00000.safetensors"
STATE = "trainer/state.json"


SPELLINGS = {"with spaces": (", ", ": "), "as writers spell it": (",", ":")}
"""The separators of a JSON text."""


def header_bytes(document: Any, spelling: str = "with spaces") -> bytes:
    """The length field and the JSON text of a safetensors header; text is taken as it is."""
    if not isinstance(document, bytes):
        document = json.dumps(document, ensure_ascii=False, separators=SPELLINGS[spelling]).encode()
    return struct.pack("<Q", len(document)) + document


def write_tensors(
    path: Path, entries: Any, tensors: Mapping[str, Any], metadata: Any = MappingProxyType({}), root: Path | None = None
) -> FileChecksum:
    """Write a file of tensors as they are declared."""
    layout = layout_file(path, entries, dict(metadata))
    writer = TensorWriter(RandomAccessWriter(path, root=root), layout)
    begin = 0
    try:
        for (name, *_), size in zip(entries, layout.sizes, strict=True):
            writer.write(begin, tensors[name])
            begin += size
        return writer.close()
    finally:
        writer.abandon()


def fill(directory: Path, value: int, step: int | None = None) -> Path:
    """Write a complete checkpoint into a directory; ``value`` is in every tensor."""
    entries = [("a", "F32", (8, 8)), ("b", "I64", (5,))]
    tensors = {"a": np.full((8, 8), value, np.float32), "b": np.full(5, value, np.int64)}
    weights = write_tensors(directory / WEIGHTS, entries, tensors, root=directory)
    state = write_file(directory / STATE, json.dumps({"value": value}).encode(), root=directory)
    write_manifest(directory, manifest_of([weights, state], **({} if step is None else {"step": step})))
    return directory


@contextmanager
def stage(target: Path, value: int) -> Iterator[Staging]:
    """A complete checkpoint in a staging directory of this process."""
    with staging_directory(target) as staging:
        fill(staging.path, value, parse_step(target))
        yield staging


def leave(target: Path, value: int, state: str = UNFINISHED, run: str = "") -> Path:
    """What a save leaves that is killed before its commit, or between its renames."""
    directory = hidden_name(target, state, run and run_digest(run) + "0123")
    directory.mkdir(parents=True)
    (directory / LOCK_NAME).touch()
    return fill(directory, value, parse_step(target))


def save(target: Path, value: int) -> Path | None:
    """One whole save; where files of others are now that had its name."""
    with stage(target, value) as staging:
        sync_staging(staging, (WEIGHTS, STATE))
        return commit(staging)


def manifest_of(checksums: Sequence[FileRecord], **fields: Any) -> Manifest:
    """A manifest with something in every field."""
    values: dict[str, Any] = {
        "step": 500,
        "consumed_samples": 4000,
        "world_size": 2,
        "parallel": {"tensor": 2, "pipeline": 1},
        "family": "llama",
        "written_by": "a test",
    }
    return Manifest(files=[FileRecord(one.path, one.size, one.digest) for one in checksums], **{**values, **fields})


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


class Machine(net.Gate):
    """Records every call that changes the file system.

    Args:
        ask: called with the name and the path of every call before it is carried out; may raise its error.

    Attributes:
        log: every call carried out: its name and its path.
    """

    def __init__(self, ask: Callable[[str, Path], None] = lambda name, path: None) -> None:
        self._ask = ask
        self.log: list[tuple[str, str]] = []

    def before(self, operation: net.Operation) -> None:
        """Ask."""
        if operation.kind != "look":
            self._ask(operation.kind, Path(operation.path))

    def after(self, operation: net.Operation) -> None:
        """Record."""
        if operation.kind != "look":
            self.log.append((operation.kind, operation.path))


def running_on(machine: Machine) -> AbstractContextManager[net.Net]:
    """Let the package run on ``machine``."""
    return net.cast(net.Net(machine))


def flip(path: Path, at: int = -1, bits: int = 1) -> None:
    """Change bits of one byte of a file, by default of the last."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= bits
    path.write_bytes(raw)


class RangeReader(ReadPool):
    """A pool that reads single ranges."""

    def read_into(self, path: AnyPath, offset: int, buffer: Any) -> int:
        """Fill a buffer with the bytes from an offset on."""
        memory = np.frombuffer(buffer, np.uint8)
        address = memory.__array_interface__["data"][0]
        return self.run([Operation(path, offset, memory.size, address, memory)])
