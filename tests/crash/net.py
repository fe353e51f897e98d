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
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

CHANGES = {
    "write": "write",
    "writev": "write",
    "pwrite": "write",
    "pwritev": "write",
    "fsync": "sync",
    "fdatasync": "sync",
    "mkdir": "mkdir",
    "makedirs": "mkdir",
    "rename": "rename",
    "replace": "rename",
    "renames": "rename",
    "unlink": "unlink",
    "remove": "unlink",
    "rmdir": "rmdir",
    "removedirs": "rmdir",
    "truncate": "truncate",
    "ftruncate": "truncate",
    "posix_fallocate": "truncate",
    "link": "link",
    "symlink": "link",
    "sendfile": "copy",
    "copy_file_range": "copy",
    "splice": "copy",
}
"""Functions of ``os`` that change a file system, and what they are called here. ``open`` is classified by its flags."""
LOOKS = {"listdir", "scandir"}
"""Functions of ``os`` that only look, at which a process can be held while another one works."""
AUDITED = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "os.link",
    "os.symlink",
    "os.chmod",
    "shutil.copyfile",
    "shutil.copytree",
    "shutil.move",
    "shutil.rmtree",
}
_NOTHING = memoryview(b"")
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
        tear: carries out the first half of a write.
        data: of a write, what is written.
        offset: of a write, where in the file; None for its end.
    """

    number: int
    change: int
    kind: str
    path: str
    other: str = ""
    tear: Callable[[], None] = lambda: None
    data: memoryview = _NOTHING
    offset: int | None = None


class Gate:
    """Decides at every operation what becomes of the process; this one lets everything pass."""

    def before(self, operation: Operation) -> None:
        """The operation has not been carried out. May raise the OSError it ends with, or not return."""

    def after(self, operation: Operation) -> None:
        """The operation has been carried out."""


Open = Gate


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
        if name in CHANGES or name in LOOKS:
            return functools.partial(self._call, name, real)
        return real

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        """Open a file; making or truncating one is an operation."""
        kind = "create" if flags & _WRITING else "look"
        descriptor = int(self._pass(kind, os.fspath(path), lambda: os.open(path, flags, mode)))
        self._paths[descriptor] = str(os.fspath(path))
        return descriptor

    def _call(self, name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        subject = args[0] if args else "."
        path = self._paths.get(subject, f"descriptor {subject}") if isinstance(subject, int) else os.fspath(subject)
        kind = CHANGES.get(name, "look")
        if name in ("rename", "replace", "renames", "link"):
            return self._pass(kind, str(os.fspath(args[1])), lambda: real(*args, **kwargs), str(path))
        if name not in ("write", "pwrite"):
            return self._pass(kind, str(path), lambda: real(*args, **kwargs))
        data, offset = memoryview(args[1]), args[2] if name == "pwrite" else None
        half = data[: data.nbytes // 2]
        count = self._pass(
            kind, str(path), lambda: real(*args), tear=lambda: _tear(subject, half, offset), data=data, offset=offset
        )
        self.written += count
        return count

    def _pass(
        self,
        kind: str,
        path: str,
        call: Callable[[], Any],
        other: str = "",
        tear: Callable[[], None] = lambda: None,
        data: memoryview = _NOTHING,
        offset: int | None = None,
    ) -> Any:
        with self._order:
            change = -1 if kind == "look" else sum(one != "look" for one in self.kinds)
            operation = Operation(len(self.kinds), change, kind, path, other, tear, data, offset)
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
        below = os.fspath(root)

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event not in AUDITED or getattr(self._inside, "now", False):
                return
            if event == "open" and not (isinstance(args[2], int) and args[2] & _WRITING):
                return
            names = [os.fsdecode(one) for one in args if isinstance(one, (str, bytes, os.PathLike))]
            if any(name.startswith(below) for name in names):
                self.outside.append(f"{event} {' '.join(names)}")

        sys.addaudithook(hook)


@contextlib.contextmanager
def cast(net: Net) -> Iterator[Net]:
    """Let the package work above ``net``."""
    loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] == "paddleformers_fc"]
    with contextlib.ExitStack() as stack:
        for module in loaded:
            if vars(module).get("os") is os:
                stack.enter_context(mock.patch.object(module, "os", net))
        yield net


def bytes_written() -> int:
    """Bytes that this process has written by system calls, to files and pipes, as the operating system counts."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["wchar"])


def _tear(descriptor: int, half: memoryview, offset: int | None) -> None:
    done = 0
    while done < half.nbytes:
        left = half[done:]
        done += os.write(descriptor, left) if offset is None else os.pwrite(descriptor, left, offset + done)
