"""A model of a disk that loses its power: what programs see, and what is on the device.

It promises no more than the standard: the bytes of a file are on the device once the file was synced, and the names in
a directory once the directory was. Before that any part of it may be: of a file nothing, a half, zeros of the full
length, or all; of the names any selection in which a change comes with the changes of the same names before it. A
rename within a directory is one change; between two directories it is one in each, and either may come
without the other.

Memory: what was written.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.net import Operation

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


class Disk:
    """The model; paths are relative to a root that is there from the beginning.

    Args:
        there: a directory whose content is on the device from the beginning.
    """

    def __init__(self, there: Path) -> None:
        self.root = _on_device(there)

    def play(self, operation: Operation) -> None:
        """What an operation does; its paths are relative to the root."""
        parent, name = self._parent(operation.path)
        match operation.kind:
            case "create":
                self._change(parent, {name: Node(False)})
            case "mkdir":
                self._change(parent, {name: Node(True)})
            case "write":
                data = parent.names[name].data
                begin = len(data) if operation.offset is None else operation.offset
                data.extend(bytes(max(0, begin - len(data))))
                data[begin : begin + len(operation.data)] = operation.data
            case "sync":
                node = self.root if operation.path == "." else parent.names[name]
                node.synced, node.durable, node.pending = bytes(node.data), dict(node.names), []
            case "rename":
                before, old = self._parent(operation.other)
                if before is parent:
                    self._change(parent, {name: parent.names[old], old: None})
                else:
                    self._change(parent, {name: before.names[old]})
                    self._change(before, {old: None})
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


def _on_device(path: Path) -> Node:
    if not path.is_dir():
        data = path.read_bytes()
        return Node(False, bytearray(data), data)
    names = {one.name: _on_device(one) for one in path.iterdir()}
    return Node(True, names=names, durable=dict(names))


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
