"""What a power failure can take: everything that was not synced, in every order.

The operations of whole saves are recorded, of all ranks in one order, and played to a model of a disk. The model keeps
apart what programs see and what is on the device. It promises no more than the standard: the bytes of a file are on
the device once the file was synced, and the names in a directory once the directory was. Before that any part of it
may be: of a file nothing, a half, zeros of the full length, or all; of the names any selection in which a change comes
with the changes of the same names before it. A rename or exchange within a directory is one change.

After every operation the model is asked for what may be left: nothing of what is pending, all of it, each change
alone, all but each change, each directory alone, and random selections. Each of these is made of real files and is
looked at as after a crash: the last checkpoint whose save had returned, or a newer one, is whole and is what is taken,
and the next save cleans up. What was looked at before is not made again.

Time: 10 ms for each. Memory: what was written.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from paddleformers_fc.execute.channel import Channel
from paddleformers_fc.execute.rehearse import together
from paddleformers_fc.storage import owner
from paddleformers_fc.storage.manifest import newest_checkpoint
from tests.crash.net import Net, Operation, cast
from tests.crash.worlds import Found, Lost, chosen, cleaned_by_the_next_save, ranks_of, rotate_alone, save

NEXT = 3
CONTENTS = ("nothing", "half", "zeros", "all")
"""What may be on the device of a file that was written and not synced."""


@dataclass
class Node:
    """A file or directory.

    Attributes:
        data: of a file, what programs see.
        synced: of a file, what is on the device for certain.
        names: of a directory, what programs see.
        durable: of a directory, what is on the device for certain.
        pending: of a directory, the changes since, in order: what each name then is, None for nothing.
    """

    directory: bool
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    names: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    pending: list[dict[str, Node | None]] = field(default_factory=list)


@dataclass(frozen=True)
class Loss:
    """What of the pending changes is on the device.

    Args:
        kept: numbers of the changes, by identity of the directory.
        content: of every file that was not synced.
    """

    kept: dict[int, frozenset[int]]
    content: str


@dataclass(frozen=True)
class Recorded:
    """One operation, with paths relative to the output directory and what it writes."""

    kind: str
    path: str
    other: str = ""
    data: bytes = b""


class Disk:
    """The model; paths are relative to a root that is there from the beginning."""

    def __init__(self) -> None:
        self.root = Node(True)

    def play(self, operation: Recorded) -> None:
        """What an operation does."""
        parent, name = self._parent(operation.path)
        match operation.kind:
            case "create":
                self._change(parent, {name: Node(False)})
            case "mkdir":
                self._change(parent, {name: Node(True)})
            case "write":
                parent.names[name].data += operation.data
            case "sync":
                node = self.root if operation.path == "." else parent.names[name]
                node.synced, node.durable, node.pending = bytes(node.data), dict(node.names), []
            case "rename" | "exchange":
                before, old = self._parent(operation.other)
                if before is not parent:
                    raise NotImplementedError("a rename between two directories")
                there = parent.names.get(name) if operation.kind == "exchange" else None
                self._change(parent, {name: parent.names[old], old: there})
            case "unlink" | "rmdir":
                self._change(parent, {name: None})
            case _:
                raise NotImplementedError(operation.kind)

    def losses(self, chance: random.Random) -> Iterator[Loss]:
        """What a power failure may do now."""
        pending = [node for node in _all(self.root) if node.pending]
        everything = {id(node): frozenset(range(len(node.pending))) for node in pending}
        content = itertools.cycle(CONTENTS)
        for one in CONTENTS:
            yield Loss({}, one)
            yield Loss(everything, one)
        for node in pending:
            yield Loss({id(node): everything[id(node)]}, next(content))
            yield Loss({**everything, id(node): frozenset()}, next(content))
            for number in range(len(node.pending)):
                yield Loss({id(node): _with_what_it_needs(node, {number})}, next(content))
                without = frozenset(everything[id(node)] - _with_what_needs_it(node, number))
                yield Loss({**everything, id(node): without}, next(content))
        for _ in range(4 if pending else 0):
            picked = {
                id(node): _with_what_it_needs(node, {n for n in range(len(node.pending)) if chance.random() < 0.5})
                for node in pending
            }
            yield Loss(picked, chance.choice(CONTENTS))

    def after(self, loss: Loss) -> dict[str, bytes | None]:
        """The files by path, and directories as None, that are there when the power is back."""
        found: dict[str, bytes | None] = {}

        def descend(node: Node, path: str) -> None:
            names: dict[str, Node | None] = dict(node.durable)
            for number in sorted(loss.kept.get(id(node), ())):
                names |= node.pending[number]
            for name, child in names.items():
                if child is not None and child.directory:
                    found[path + name] = None
                    descend(child, f"{path}{name}/")
                elif child is not None:
                    found[path + name] = _left_of(child, loss.content)

        descend(self.root, "")
        return found

    def _parent(self, path: str) -> tuple[Node, str]:
        *above, name = path.split("/")
        node = self.root
        for part in above:
            node = node.names[part]
        return node, name

    def _change(self, directory: Node, change: dict[str, Node | None]) -> None:
        directory.pending.append(change)
        for name, node in change.items():
            if node is None:
                directory.names.pop(name, None)
            else:
                directory.names[name] = node


def _all(node: Node) -> Iterator[Node]:
    """Every node that may be on the device or is seen, once."""
    seen: dict[int, Node] = {}
    stack = [node]
    while stack:
        one = stack.pop()
        if id(one) not in seen:
            seen[id(one)] = one
            stack += [*one.names.values(), *one.durable.values()]
            stack += [child for change in one.pending for child in change.values() if child is not None]
    yield from seen.values()


def _with_what_it_needs(node: Node, numbers: set[int]) -> frozenset[int]:
    """Changes, and those before them that touch the same names, and so on."""
    kept = set(numbers)
    for number in reversed(range(len(node.pending))):
        if any(one > number and node.pending[one].keys() & node.pending[number].keys() for one in kept):
            kept.add(number)
    return frozenset(kept)


def _with_what_needs_it(node: Node, number: int) -> set[int]:
    lost = {number}
    for one in range(number + 1, len(node.pending)):
        if any(node.pending[one].keys() & node.pending[gone].keys() for gone in lost):
            lost.add(one)
    return lost


def _left_of(file: Node, content: str) -> bytes:
    if file.synced == file.data or content == "all":
        return bytes(file.data)
    if content == "nothing":
        return file.synced
    if content == "half":
        return bytes(file.data[: max(len(file.synced), len(file.data) // 2)])
    return file.synced + bytes(len(file.data) - len(file.synced))


@dataclass
class Recorder:
    """Takes down the operations of all ranks in their order.

    Args:
        root: what paths are relative to.
    """

    root: Path
    operations: list[Recorded] = field(default_factory=list)

    def before(self, operation: Operation) -> None:
        """Nothing."""

    def after(self, operation: Operation) -> None:
        """Take it down."""
        if operation.kind != "look":
            other = os.path.relpath(operation.other, self.root) if operation.other else ""
            path = os.path.relpath(operation.path, self.root)
            self.operations.append(Recorded(operation.kind, path, other, bytes(operation.data)))


@dataclass(frozen=True)
class Step:
    """One thing a run does, and what is found once it has returned.

    Args:
        job: what each rank does.
        found: what a resumed run takes afterwards.
    """

    job: Callable[[Path, Channel], None]
    found: Found


def steps(grid: str) -> list[Step]:
    """A first save, a second one, that one again, and rotation."""
    return [
        Step(lambda there, channel: save(there, grid, 5, 1, channel), Found(5, 1)),
        Step(lambda there, channel: save(there, grid, 6, 2, channel), Found(6, 2)),
        Step(lambda there, channel: save(there, grid, 6, 11, channel), Found(6, 11)),
        Step(lambda there, channel: rotate_alone(there, 1, channel), Found(6, 11)),
    ]


@dataclass(frozen=True)
class Instant:
    """The moment after an operation.

    Args:
        operation: the operation.
        returned: what is found if nothing is left of what runs; None before the first save has returned.
        running: what is found if all is left of it.
    """

    operation: Recorded
    returned: Found | None
    running: Found


def record(grid: str, directory: Path, can_exchange: bool) -> list[Instant]:
    """The operations of a run on the threads of this process, by instants."""
    there = directory / "recorded"
    shutil.rmtree(there, ignore_errors=True)
    there.mkdir()
    recorder = Recorder(there)
    instants: list[Instant] = []
    returned: Found | None = None
    for step in steps(grid):
        recorder.operations.clear()
        with cast(Net(recorder, can_exchange)), mock.patch.object(owner, "this_process", _a_dead_process):
            together(ranks_of(grid), lambda channel, step=step: step.job(there, channel))
        instants += [Instant(one, returned, step.found) for one in recorder.operations]
        returned = step.found
    return instants


@dataclass(frozen=True)
class Remains:
    """What one power failure leaves.

    Args:
        instant: when.
        number: of the instant.
        loss: what was on the device of what was pending.
        files: contents by path; directories as None.
    """

    instant: Instant
    number: int
    loss: Loss
    files: dict[str, bytes | None]

    def __str__(self) -> str:
        operation = self.instant.operation
        return f"power lost after operation {self.number}, {operation.kind} {operation.path}, with {self.loss}"


def remains(instants: list[Instant]) -> Iterator[Remains]:
    """Every different remains of a run at any instant; the same ones each time, in the same order.

    Args:
        instants: of the recorded run.
    """
    disk, chance = Disk(), random.Random(1)
    seen: set[bytes] = set()
    for at, instant in enumerate(instants):
        disk.play(instant.operation)
        following = instants[at + 1] if at + 1 < len(instants) else None
        if following and following.operation.kind == "write" == instant.operation.kind:
            continue  # Files that are being written are all alike to a power failure.
        for loss in disk.losses(chance):
            files = disk.after(loss)
            key = _key(files, instant)
            if key not in seen:
                seen.add(key)
                yield Remains(instant, at, loss, files)


def look(left: Remains, directory: Path) -> None:
    """After the power is back, what must hold.

    Raises:
        Lost: something does not.
    """
    there, instant = directory / "lost", left.instant
    shutil.rmtree(there, ignore_errors=True)
    there.mkdir()
    for path, data in left.files.items():
        if data is None:
            (there / path).mkdir()
        else:
            (there / path).write_bytes(data)
    if instant.returned is not None or newest_checkpoint(there)[0] is not None:
        found = chosen(there)
        if found not in (instant.returned, instant.running):
            raise Lost(f"{found} is taken, and {instant.returned} had returned")
    cleaned_by_the_next_save(there, 9, NEXT)


def _key(files: dict[str, bytes | None], instant: Instant) -> bytes:
    digest = hashlib.blake2b(repr((instant.returned, instant.running)).encode())
    # Random parts of hidden names are the same in one recording.
    for path in sorted(files):
        data = files[path]
        digest.update(path.encode() + (b"/" if data is None else b"=" + hashlib.blake2b(data).digest()))
    return digest.digest()


def _a_dead_process() -> owner.Owner:
    return _DEAD


def _ended() -> owner.Owner:
    here = owner.this_process()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return owner.Owner(here.host, pid, here.boot, here.namespace, "1")


_DEAD = _ended()
