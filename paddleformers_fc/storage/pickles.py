"""Read pickles of old checkpoints as data, without imports, calls or large allocations on their behalf.

A pickle is a program for a small stack machine, and Python's machine runs everything that it names. The machine here
has the same stack and other instructions. A name is looked up in a short table, and an unknown one ends the reading. A
call of a known name creates a description in place of an object. Arrays are not built either. The description of an
array is its element type, its shape, and *the position of its bytes in the file*, from which ranges are read later, as
in every other format.

Known names: plain containers and numbers, arrays and numbers of numpy, ``OrderedDict``, and the metadata classes of
Paddle's FlexCheckpoint (:class:`Record`). Everything else is refused by name: other names, persistent ids, extensions,
protocol 5 and buffers outside the file, big-endian and column-major arrays. Protocols 2 and below write an array's
bytes as text, in which they cannot be located; such a file is refused as well.

Bounds: at most :data:`MAX_PROGRAM_BYTES` of instructions are executed; bytes of arrays are skipped. Memory is at most a
hundred times the instructions, which are about 60 bytes per array. No function here recurses.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from paddleformers_fc.errors import FormatError
from paddleformers_fc.storage.files import OpenFile, open_local, read_range

MAX_PROGRAM_BYTES = 512 * 1024 * 1024
"""Maximum bytes of instructions of a pickle: the metadata of a checkpoint of 154 GB has 227 MiB."""

MAX_TEXT_BYTES = 64 * 1024
"""The longest text, in bytes."""

MAX_AXES = 32
"""The most axes of an array."""

_WINDOW = 1 << 20
_SMALL = 32
"""Bytes up to this length are kept, because numbers are written so; longer ones are only located."""
_QUOTED = 100
"""Maximum number of characters of a text that an error quotes."""


@dataclass(frozen=True, slots=True)
class PickledBytes:
    """A run of bytes in the file.

    Args:
        offset: of the first byte, from the start of the file.
        length: how many.
        value: the bytes themselves, where they are few; else None.
    """

    offset: int
    length: int
    value: bytes | None = None


@dataclass(frozen=True, slots=True)
class PickledArray:
    """An array that is contiguous in the file, row-major and little-endian.

    Args:
        code: numpy's code of the element type without its byte order: ``"f4"``, ``"u2"``, ...
        shape: extents, outermost first.
        begin: byte offset of the first element, from the start of the file.
        length: how many bytes.
    """

    code: str
    shape: tuple[int, ...]
    begin: int
    length: int


@dataclass(eq=False, slots=True)
class Record:
    """An instance of a class of Paddle: its name and its content. It has no behaviour.

    Args:
        name: of the class.
        fields: attribute -> value.
    """

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    built: bool = False


@dataclass(frozen=True, slots=True)
class _KnownGlobal:
    """A global name of the table."""

    kind: str
    name: str


@dataclass(eq=False, slots=True)
class _Type:
    """A numpy element type, before or after its byte order is known."""

    code: str
    built: bool = False


@dataclass(eq=False, slots=True)
class _Array:
    """An array between its call and its state; then its description is in ``found``."""

    found: PickledArray | None = None


_METADATA = "paddle.distributed.flex_checkpoint.dcp.metadata"
_OLD_METADATA = "paddle.distributed.checkpoint.metadata"
_RECORDS = ("Metadata", "LocalTensorMetadata", "LocalTensorIndex")
_WORDS: dict[tuple[str, str], _KnownGlobal] = {
    **{(module, name): _KnownGlobal("record", name) for module in (_METADATA, _OLD_METADATA) for name in _RECORDS},
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _KnownGlobal("array", "") for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _KnownGlobal("number", "") for core in ("core", "_core")},
    ("numpy", "ndarray"): _KnownGlobal("ndarray", ""),
    ("numpy", "dtype"): _KnownGlobal("dtype", ""),
    ("collections", "OrderedDict"): _KnownGlobal("dict", ""),
    ("builtins", "tuple"): _KnownGlobal("tuple", ""),
    ("builtins", "slice"): _KnownGlobal("slice", ""),
}
_WIDTHS = {"f8": 8, "f4": 4, "f2": 2, "i8": 8, "i4": 4, "i2": 2, "i1": 1, "u8": 8, "u4": 4, "u2": 2, "u1": 1, "b1": 1}
_PLAIN = (str, int, float, bool, type(None))


def read_pickle(path: Path) -> Any:
    """Return the value that a pickle describes.

    Args:
        path: the file; a link is followed.

    Returns:
        None, bool, int, float, str, list, tuple, dict, :class:`PickledBytes`, :class:`PickledArray` and
        :class:`Record`, and such in each other.

    Raises:
        Corrupt: there is no such file.
        FormatError: it is no pickle, it names something that is not data, or a bound is exceeded.
        StorageError: the operating system refused.
    """
    return _read(path, _known_word)


def read_pickled_objects(path: Path) -> Any:
    """As :func:`read_pickle`, for objects of any class: each is a :class:`Record` with the attributes that it holds.

    No import or call is made for them either: their names are text. The key ``""`` has the argument of an enumeration
    (its value, or its name last), or the content of a class without attributes.

    Args:
        path: the file.
    """
    return _read(path, _any_word)


def _read(path: Path, words: Callable[[str, str], _KnownGlobal | None]) -> Any:
    with open_local(path) as file:
        return _Machine(_Tape(file), words).run()


def quoted(value: Any) -> str:
    """Describe a value of a pickle for an error: the beginning of a text, the type of anything else.

    A list that holds another one twice, which does the same, is written out in no memory that there is.
    """
    return value[:_QUOTED] if isinstance(value, str) else f"a {type(value).__name__}"


class _Tape:
    """The bytes of a file from front to back, read in windows; skipped bytes are not read."""

    def __init__(self, file: OpenFile) -> None:
        self.path = file.path
        self.size = file.size
        self.at = 0
        self._file = file
        self._window = b""
        self._start = 0
        self.frame_end = 0
        self._read = 0

    def take(self, count: int) -> bytes:
        """Read the next bytes, at most a window of them."""
        self._within(count)
        self._read += count
        if self._read > MAX_PROGRAM_BYTES:
            self.refuse(f"it has more than {MAX_PROGRAM_BYTES} bytes of instructions")
        begin = self.at - self._start
        if begin < 0 or begin + count > len(self._window):
            self._start = self.at
            self._window = read_range(self._file, self.at, min(max(count, _WINDOW), self.size - self.at))
            begin = 0
        self.at += count
        return self._window[begin : begin + count]

    def line(self) -> str:
        """Read the text up to the next line feed."""
        text = bytearray()
        while (one := self.take(1)) != b"\n":
            text += one
            if len(text) > 256:
                self.refuse("it has a name of more than 256 bytes")
        return self.text(bytes(text))

    def number(self, form: str) -> Any:
        """Read a number in a format of ``struct``."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self, raw: bytes) -> str:
        """Decode bytes as text."""
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.refuse("it has a text that is not UTF-8")

    def span(self, length: int) -> PickledBytes:
        """Step over bytes; few of them are kept."""
        self._within(length)
        offset = self.at
        if length <= _SMALL:
            return PickledBytes(offset, length, self.take(length))
        self.at += length
        return PickledBytes(offset, length)

    def frame(self, length: int) -> None:
        """Enter a frame: instructions that the writer wrote in one piece."""
        if self.at < self.frame_end:
            self.refuse("it has a frame inside a frame")
        self._within(length)
        self.frame_end = self.at + length

    def refuse(self, fault: str) -> NoReturn:
        """Raise the error for this file at this place."""
        raise FormatError(
            f"{self.path} cannot be read: {fault}.",
            where=f"{self.path}, byte {self.at}",
            next_step="Nothing of it was run. Save it again in a format without pickles, where you trust it.",
        )

    def _within(self, count: int) -> None:
        if not 0 <= count <= self.size - self.at:
            self.refuse(f"it is truncated: {count} bytes are due and {self.size - self.at} are there")


class _Machine:
    """Carries out the instructions of one pickle on descriptions.

    Args:
        tape: the pickle.
        words: returns what a global name means, by its module and name; None if it is unknown.
    """

    def __init__(self, tape: _Tape, words: Callable[[str, str], _KnownGlobal | None]) -> None:
        self._tape = tape
        self._words = words
        self._stack: list[Any] = []
        self._memo: list[Any] = []
        self._others: dict[int, Any] = {}
        self._marks: list[int] = []

    def run(self) -> Any:
        """Execute the pickle to its end, which must be that of the file, and return its value."""
        tape = self._tape
        if tape.take(1) != b"\x80":
            tape.refuse("it is no pickle of protocol 2 or newer")
        protocol = tape.number("<B")
        if protocol not in (2, 3, 4):
            tape.refuse(f"it is a pickle of protocol {protocol}, and 2, 3 and 4 are known")
        while True:
            begin = tape.at
            code = tape.take(1)
            if code == b".":
                break
            work = _INSTRUCTIONS.get(code)
            if work is None:
                tape.refuse(f"it holds the instruction {code!r}, which data does not need")
            work(self)
            if begin < tape.frame_end < tape.at:
                tape.refuse("it has a frame that ends within an instruction")
        if tape.at != tape.size or len(self._stack) != 1 or self._marks:
            tape.refuse("it continues after its end, or ends with something unfinished")
        return self._finished(self._stack[0])

    # ---- The stack.

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def pop(self) -> Any:
        """Take a value off the stack, above the last mark."""
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            self._tape.refuse("it takes more from the stack than there is")
        return self._stack.pop()

    def popped(self, count: int) -> list[Any]:
        """Take the last values off the stack; the lowest is the first."""
        return [self.pop() for _ in range(count)][::-1]

    def mark(self) -> None:
        """Note the height of the stack."""
        self._marks.append(len(self._stack))

    def marked(self) -> list[Any]:
        """Take everything above the last mark."""
        if not self._marks:
            self._tape.refuse("it goes back to a mark that is not there")
        height = self._marks.pop()
        taken = self._stack[height:]
        del self._stack[height:]
        return taken

    def top(self, kind: type) -> Any:
        """Return the top of the stack, which must be of a type."""
        value = self.pop()
        if type(value) is not kind:
            self._tape.refuse("it fills something that is no container")
        self.push(value)
        return value

    # ---- The memo.

    def memoize(self) -> None:
        """Remember the top under the next number."""
        value = self.pop()
        self.push(value)
        self._memo.append(value)

    def put(self, number: int) -> None:
        """Remember the top under a number."""
        if number == len(self._memo) and not self._others:
            self.memoize()
            return
        value = self.pop()
        self.push(value)
        self._others[number] = value

    def get(self, number: int) -> None:
        """Push the value that was remembered under a number."""
        if number in self._others:
            self.push(self._others[number])
        elif number < len(self._memo):
            self.push(self._memo[number])
        else:
            self._tape.refuse("it remembers something that it never noted")

    # ---- Containers.

    def tuple_of(self, items: list[Any]) -> None:
        """Put values on the stack as a tuple."""
        self.push(tuple(map(self._finished, items)))

    def append(self, items: list[Any]) -> None:
        """Add values to the list below them."""
        self.top(list).extend(map(self._finished, items))

    def set_items(self, items: list[Any]) -> None:
        """Add keys and values to the dict below them."""
        known = self.top(dict)
        if len(items) % 2:
            self._tape.refuse("it has a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not _is_key(key):
                self._tape.refuse(f"it has a key that is a {type(key).__name__}")
            known[key] = self._finished(value)

    def _finished(self, value: Any) -> Any:
        """Return a value; for a completed array, its description."""
        if type(value) is _Array and value.found is not None:
            return value.found
        return value

    # ---- Words.

    def word(self, module: Any, name: Any) -> None:
        """Look a global name up."""
        known = self._words(module, name) if isinstance(module, str) and isinstance(name, str) else None
        if known is None:
            self._tape.refuse(f"it imports {quoted(module)}.{quoted(name)}, which is not data")
        self.push(known)

    def new(self) -> None:
        """Create an instance of a class, without arguments."""
        arguments, word = self.pop(), self.pop()
        if type(word) is not _KnownGlobal or word.kind != "record" or type(arguments) is not tuple or arguments:
            self._tape.refuse("it makes an instance of something that is not data")
        self.push(Record(word.name))

    def call(self) -> None:
        """Execute a call of a known name."""
        arguments, word = self.pop(), self.pop()
        if type(word) is not _KnownGlobal or type(arguments) is not tuple:
            self._tape.refuse("it calls something that is not data")
        call = _CALLS.get(word.kind)
        if word.kind == "record" and self._words is _any_word:
            self.push(Record(word.name, {"": arguments}))
            return
        made = None if call is None else call(arguments)
        if made is None:
            self._tape.refuse(f"it calls {word.kind} with arguments that it never has")
        self.push(made)

    def build(self) -> None:
        """Give an instance its state."""
        state, made = self.pop(), self.pop()
        if type(made) is Record and not made.built and type(state) is dict and all(type(key) is str for key in state):
            made.fields, made.built = state, True
        elif type(made) is Record and not made.built and self._words is _any_word:
            made.fields, made.built = {"": state}, True
        elif type(made) is _Type and not made.built and _is_type_state(state):
            made.built = True
        elif type(made) is _Array and made.found is None:
            made.found = self._array(state)
        else:
            self._tape.refuse("it gives a state to something that has none")
        self.push(made)

    def _array(self, state: Any) -> PickledArray:
        if type(state) is not tuple or len(state) != 5:
            self._tape.refuse("it has an array whose state is none")
        _, shape, kind, by_columns, data = state
        if type(data) is not PickledBytes:
            self._tape.refuse("it has an array whose bytes are text or objects, as before protocol 3")
        if type(kind) is not _Type or not kind.built or type(shape) is not tuple or len(shape) > MAX_AXES:
            self._tape.refuse("it has an array of an element type or a shape that cannot be")
        if not all(type(length) is int and 0 <= length < 2**63 for length in shape):
            self._tape.refuse("it has an array of a shape that cannot be")
        if by_columns is not False and len(shape) > 1:
            self._tape.refuse("it has an array that is stored column by column")
        if math.prod(shape) * _WIDTHS[kind.code] != data.length:
            self._tape.refuse(f"it has an array of shape {list(shape)} in {data.length} bytes")
        return PickledArray(kind.code, shape, data.offset, data.length)


def _known_word(module: str, name: str) -> _KnownGlobal | None:
    return _WORDS.get((module, name))


def _any_word(module: str, name: str) -> _KnownGlobal:
    return _WORDS.get((module, name)) or _KnownGlobal("record", name)


def _is_key(key: Any) -> bool:
    return isinstance(key, (*_PLAIN, Record)) or (type(key) is tuple and all(isinstance(one, _PLAIN) for one in key))


def _is_type_state(state: Any) -> bool:
    return type(state) is tuple and len(state) == 8 and state[1] in ("<", "|", "=") and state[2:5] == (None, None, None)


# ---- What known words make of their arguments; None where they never have such arguments.

Arguments = tuple[Any, ...]


def _reconstructed(arguments: Arguments) -> _Array | None:
    if len(arguments) != 3:
        return None
    kind, shape, code = arguments
    plain = type(kind) is _KnownGlobal and kind.kind == "ndarray" and shape == (0,) and type(code) is PickledBytes
    return _Array() if plain and code.value == b"b" else None


def _element_type(arguments: Arguments) -> _Type | None:
    code = arguments[0] if arguments else None
    return _Type(code) if len(arguments) == 3 and isinstance(code, str) and code in _WIDTHS else None


def _scalar(arguments: Arguments) -> int | float | bool | None:
    if len(arguments) != 2:
        return None
    kind, data = arguments
    if type(kind) is not _Type or not kind.built or type(data) is not PickledBytes or data.value is None:
        return None
    return _decoded(kind.code, data.value) if data.length == _WIDTHS[kind.code] else None


def _decoded(code: str, value: bytes) -> int | float | bool:
    """Return a number of numpy as one of Python."""
    found: int | float | bool = np.frombuffer(value, f"<{code}")[0].item()
    return found


def _tuple(arguments: Arguments) -> tuple[Any, ...] | None:
    return arguments[0] if len(arguments) == 1 and type(arguments[0]) is tuple else None


def _slice(arguments: Arguments) -> tuple[Any, ...] | None:
    return arguments[:2] if len(arguments) == 3 and arguments[2] is None else None


def _array_in(arguments: Arguments) -> PickledArray | None:
    """Return an array that is part of a run of bytes: its shape, its element type, the run, and its position."""
    if len(arguments) != 4:
        return None
    shape, kind, data, offset = arguments
    if type(kind) is not _Type or not kind.built or type(data) is not PickledBytes or type(offset) is not int:
        return None
    if type(shape) is not tuple or len(shape) > MAX_AXES or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        return None
    length = math.prod(shape) * _WIDTHS[kind.code]
    if not 0 <= offset <= data.length - length:
        return None
    return PickledArray(kind.code, shape, data.offset + offset, length)


_CALLS: dict[str, Callable[[Arguments], Any]] = {
    "array": _reconstructed,
    "ndarray": _array_in,
    "dtype": _element_type,
    "number": _scalar,
    "dict": lambda arguments: None if arguments else {},
    "tuple": _tuple,
    "slice": _slice,
}


# ---- Instructions.


def _text(form: str) -> Callable[[_Machine], None]:
    def work(machine: _Machine) -> None:
        tape = machine._tape
        length = tape.number(form)
        if length > MAX_TEXT_BYTES:
            tape.refuse(f"it has a text of {length} bytes")
        machine.push(tape.text(tape.take(length)))

    return work


def _long(machine: _Machine) -> None:
    length = machine._tape.number("<B")
    if length > 16:
        machine._tape.refuse(f"it has an integer of {length} bytes")
    machine.push(int.from_bytes(machine._tape.take(length), "little", signed=True))


def _number(form: str) -> Callable[[_Machine], None]:
    return lambda machine: machine.push(machine._tape.number(form))


def _span(form: str) -> Callable[[_Machine], None]:
    return lambda machine: machine.push(machine._tape.span(machine._tape.number(form)))


def _constant(value: Any) -> Callable[[_Machine], None]:
    return lambda machine: machine.push(value)


def _global(machine: _Machine) -> None:
    module = machine._tape.line()
    machine.word(module, machine._tape.line())


_INSTRUCTIONS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x95": lambda machine: machine._tape.frame(machine._tape.number("<Q")),
    b"(": _Machine.mark,
    b"\x94": _Machine.memoize,
    b"q": lambda machine: machine.put(machine._tape.number("<B")),
    b"r": lambda machine: machine.put(machine._tape.number("<I")),
    b"h": lambda machine: machine.get(machine._tape.number("<B")),
    b"j": lambda machine: machine.get(machine._tape.number("<I")),
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"J": _number("<i"),
    b"K": _number("<B"),
    b"M": _number("<H"),
    b"\x8a": _long,
    b"G": _number(">d"),
    b"\x8c": _text("<B"),
    b"X": _text("<I"),
    b"\x8d": _text("<Q"),
    b"C": _span("<B"),
    b"B": _span("<I"),
    b"\x8e": _span("<Q"),
    b"}": lambda machine: machine.push({}),
    b"]": lambda machine: machine.push([]),
    b")": _constant(()),
    b"t": lambda machine: machine.tuple_of(machine.marked()),
    b"\x85": lambda machine: machine.tuple_of(machine.popped(1)),
    b"\x86": lambda machine: machine.tuple_of(machine.popped(2)),
    b"\x87": lambda machine: machine.tuple_of(machine.popped(3)),
    b"a": lambda machine: machine.append(machine.popped(1)),
    b"e": lambda machine: machine.append(machine.marked()),
    b"s": lambda machine: machine.set_items(machine.popped(2)),
    b"u": lambda machine: machine.set_items(machine.marked()),
    b"c": _global,
    b"\x93": lambda machine: machine.word(*machine.popped(2)),
    b"\x81": _Machine.new,
    b"R": _Machine.call,
    b"b": _Machine.build,
}
"""The instructions that data needs, of about seventy."""
