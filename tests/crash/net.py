"""A net under the package: every operation on files passes through it, is counted, and can be stopped there.

Idea: all that this package does to a file system, it does by calling a function of ``os`` by its name in one of its
own modules. The net takes the place of ``os`` in every module of the package that has it. Nothing in the package knows
of it.

That nothing passes beside it is not taken on trust. While the net is cast, an audit hook of the interpreter, which sees
every file that is opened and every name that is made, moved or deleted from whatever Python code, reports what happens
below the watched directory outside of an operation of the net. Bytes that are written are counted by the operating
system (``/proc/self/io``) and must be those that the net has seen.

Time: a few microseconds per operation. Operations of several threads are brought into one order.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

_NAMES = {
    "write": ("write", "writev", "pwrite", "pwritev"),
    "sync": ("fsync", "fdatasync"),
    "mkdir": ("mkdir", "makedirs"),
    "rename": ("rename", "replace", "renames"),
    "unlink": ("unlink", "remove"),
    "rmdir": ("rmdir", "removedirs"),
    "truncate": ("truncate", "ftruncate", "posix_fallocate"),
    "link": ("link", "symlink"),
    "copy": ("sendfile", "copy_file_range", "splice"),
    "look": ("listdir", "scandir"),
}
KINDS = {name: kind for kind, names in _NAMES.items() for name in names}
"""What the functions of ``os`` that are operations are called here. ``open`` is classified by its flags."""
AUDITED = {
    *("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod"),
    *("shutil.copyfile", "shutil.copytree", "shutil.move", "shutil.rmtree"),
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True)
class Operation:
    """One call on the file system.

    Args:
        number: from 0, in the order of one process.
        change: from 0, among those that change something; -1 for one that does not. Where threads share the work, who
            opens and looks at what is not the same in every run, and what is changed is.
        kind: ``create``, ``write``, ``sync``, ``mkdir``, ``rename``, ``link``, ``unlink``, ``rmdir``; ``look`` for one
            that changes nothing.
        path: the file or directory; of a rename or link the new name.
        other: of a rename or link the old name.
        data: of a write, what is written.
        offset: of a write, where in the file; None for its end.
        descriptor: of a write, the open file.
    """

    number: int
    change: int
    kind: str
    path: str
    other: str = ""
    data: memoryview | bytes = b""
    offset: int | None = None
    descriptor: int = -1

    def tear(self) -> None:
        """Carry out the first half of a write."""
        half = self.data[: len(self.data) // 2]
        if half and self.offset is None:
            os.write(self.descriptor, half)
        elif half:
            os.pwrite(self.descriptor, half, self.offset)


class Gate:
    """Decides at every operation what becomes of the process; this one lets everything pass."""

    def before(self, operation: Operation) -> None:
        """The operation has not been carried out. May raise the OSError it ends with, or not return."""

    def after(self, operation: Operation) -> None:
        """The operation has been carried out."""


@dataclass
class Net:
    """Stands in for ``os`` in the modules of the package.

    Args:
        gate: what happens at every operation.

    Attributes:
        kinds: of every operation so far, by number.
        written: bytes that were written.
        outside: what was done below the watched directory without passing through; must stay empty.
    """

    gate: Gate = field(default_factory=Gate)
    kinds: list[str] = field(default_factory=list)
    written: int = 0
    outside: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._paths: dict[int, str] = {}
        self._order = threading.RLock()
        self._inside = threading.local()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return functools.partial(self._call, name, real) if name in KINDS else real

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        """Open a file; making or truncating one is an operation."""
        kind = "create" if flags & _WRITING else "look"
        descriptor = int(self._pass(lambda: os.open(path, flags, mode), kind=kind, path=os.fspath(path)))
        self._paths[descriptor] = os.fspath(path)
        return descriptor

    def _call(self, name: str, real: Callable[..., Any], subject: Any = ".", *rest: Any, **named: Any) -> Any:
        kind = KINDS[name]
        path = self._paths.get(subject, f"descriptor {subject}") if isinstance(subject, int) else os.fspath(subject)
        told: dict[str, Any] = {"kind": kind, "path": path}
        if kind in ("rename", "link"):
            told |= {"path": os.fspath(rest[0]), "other": path}
        elif name in ("write", "pwrite"):
            told |= {"data": memoryview(rest[0]), "offset": rest[1] if name == "pwrite" else None}
            told |= {"descriptor": subject}
        result = self._pass(lambda: real(subject, *rest, **named), **told)
        if "data" in told:
            self.written += result
        return result

    def _pass(self, call: Callable[[], Any], kind: str, **told: Any) -> Any:
        with self._order:
            change = -1 if kind == "look" else sum(one != "look" for one in self.kinds)
            operation = Operation(len(self.kinds), change, kind, **told)
            self.kinds.append(kind)
            self.gate.before(operation)
            self._inside.now = True
            try:
                result = call()
            finally:
                self._inside.now = False
            self.gate.after(operation)
            return result

    def watch(self, root: Path) -> None:
        """Report what happens below ``root`` outside of the net, for the rest of this process."""

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event not in AUDITED or getattr(self._inside, "now", False):
                return
            if event == "open" and not (isinstance(args[2], int) and args[2] & _WRITING):
                return
            names = [os.fsdecode(one) for one in args if isinstance(one, (str, bytes, os.PathLike))]
            if any(name.startswith(str(root)) for name in names):
                self.outside.append(f"{event} {' '.join(names)}")

        sys.addaudithook(hook)


@contextlib.contextmanager
def cast(net: Net) -> Iterator[Net]:
    """Let the package work above ``net``, also where it works above another one."""
    loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] == "paddleformers_fc"]
    with contextlib.ExitStack() as stack:
        for module in loaded:
            found = vars(module).get("os")
            if found is os or isinstance(found, Net):
                stack.enter_context(mock.patch.object(module, "os", net))
        yield net


def refusing(kind: str, pattern: str, number: int, only: int = 0) -> contextlib.AbstractContextManager[Net]:
    """Let the system refuse calls of a kind on paths of a pattern: all of them, or only the one of this number."""
    calls = itertools.count(1)

    class Refuse(Gate):
        def before(self, operation: Operation) -> None:
            if operation.kind == kind and re.search(pattern, operation.path) and (not only or next(calls) == only):
                raise OSError(number, os.strerror(number), operation.path)

    return cast(Net(Refuse()))


def bytes_written() -> int:
    """Bytes that this process has written by system calls, to files and pipes, as the operating system counts."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["wchar"])
