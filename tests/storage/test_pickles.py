"""Pickles are read as data: real ones to the byte, hostile ones not at all, and nothing of either is run."""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import os
import pickle
import random
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddleformers_fc.errors import FlexError, FormatError
from paddleformers_fc.storage import pickles
from paddleformers_fc.storage.pickles import MAX_DEPTH, MAX_INTEGER_KEY, PickledArray, Record, read_pickle

METADATA = "paddle.distributed.flex_checkpoint.dcp.metadata"


def written(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


def described(path: Path, value: Any, protocol: int = 4) -> Any:
    """What is read of a value that Python has pickled."""
    return read_pickle(written(path, pickle.dumps(value, protocol)))


def peak_of(work: Callable[[], object]) -> int:
    """How many bytes Python has held at most while it worked."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("protocol", [3, 4])
def test_containers_and_numbers_are_what_they_were(tmp_path: Path, protocol: int) -> None:
    value = {
        "a": [1, -1, 255, 65_536, -(2**31), 2**40, -(2**70), 0.5, float("inf"), True, False, None],
        "b": (),
        "c": ((1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "d": {1: "x" * 300, None: "ü", MAX_INTEGER_KEY: {}},
        "e": ["same", "same"] * 300,
    }
    assert described(tmp_path / "x", value, protocol) == value
    assert described(tmp_path / "x", collections.OrderedDict(a=1), protocol) == {"a": 1}
    assert described(tmp_path / "x", slice(2, 5), protocol) == (2, 5)


@pytest.mark.parametrize("protocol", [3, 4])
def test_arrays_are_located_and_not_read(tmp_path: Path, protocol: int) -> None:
    kinds = ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "b1")
    arrays = {kind: np.arange(24).reshape(2, 3, 4).astype(kind) for kind in kinds}
    arrays |= {"empty": np.zeros((0, 3), "f4"), "scalar": np.array(3.0), "large": np.arange(2**18, dtype="f4")}
    found = described(tmp_path / "x", arrays, protocol)
    assert found.keys() == arrays.keys()
    raw = (tmp_path / "x").read_bytes()
    for name, array in arrays.items():
        one = found[name]
        again = np.frombuffer(raw[one.begin : one.begin + one.length], f"<{one.code}").reshape(one.shape)
        assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, array.shape, array.tobytes())
    numbers = [np.float32(2.5), np.int64(-3), np.uint16(65_535), np.bool_(False)]
    with pytest.raises(FormatError, match="column by column"):
        described(tmp_path / "x", np.zeros((2, 3), order="F"), protocol)
    found = described(tmp_path / "x", numbers, protocol)
    assert found == [2.5, -3, 65_535, False]
    assert [type(one) for one in found] == [float, int, int, bool]


def test_bytes_of_arrays_cost_no_memory_and_instructions_a_bounded_one(tmp_path: Path) -> None:
    arrays = written(tmp_path / "x", pickle.dumps({str(number): np.zeros(2**20, "f4") for number in range(16)}, 4))
    assert arrays.stat().st_size > 64 << 20
    assert peak_of(lambda: read_pickle(arrays)) < 4 << 20
    raw = b"\x80\x04](" + b"}" * 50_000 + b"e."
    assert peak_of(lambda: read_pickle(written(tmp_path / "y", raw))) < 100 * len(raw) + (4 << 20)


class Kind(enum.Enum):
    """An enumeration, as in training arguments."""

    ONE = "one"


@dataclasses.dataclass
class Settings:
    """An object of a class that no table names."""

    kind: Kind
    size: int


def test_objects_of_any_class_are_their_attributes_and_nothing_is_called(tmp_path: Path) -> None:
    path = written(tmp_path / "x", pickle.dumps({"a": Settings(Kind.ONE, 3), "b": Calls(os.system, "exit 3")}, 4))
    found = read_pickle(path, any_class=True)
    assert (found["a"].name, found["a"].fields["size"]) == ("Settings", 3)
    # Some versions of Python (3.11.2) pickle a member by its name, the others by its value.
    assert found["a"].fields["kind"].fields[""][-1] in ("ONE", "one")
    assert (found["b"].name, found["b"].fields) == ("system", {"": ("exit 3",)})
    with pytest.raises(FormatError, match="which is not data"):
        read_pickle(path)


# ---- What must not run.


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.parts = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


def raw_global(module: str, name: str, *arguments: Any) -> bytes:
    """A call of any global name, whether there is such a one or not."""
    return f"c{module}\n{name}\n".encode() + pickle.dumps(arguments, 3)[2:-1] + b"R"


def hostile(canary: Path) -> dict[str, bytes]:
    """Pickles that would do something, or be something huge, if Python read them."""
    touch = f"touch {canary}"
    code = f"open({str(canary)!r}, 'w')"
    start, end, inner = b"\x80\x03", b".", pickle.dumps(Calls(os.system, touch), 3)
    reconstruct = b"cnumpy.core.multiarray\n_reconstruct\n"
    array = reconstruct + b"(cnumpy\nndarray\nK\x00\x85C\x01btR"
    element = b"cnumpy\ndtype\n(X\x02\x00\x00\x00f4\x89\x88tR"
    element += b"(K\x03X\x01\x00\x00\x00<NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\x00tb"
    metadata = f"c{METADATA}\nMetadata\n".encode()

    # A dictionary of them takes seconds to make.
    multiples = (pickle.dumps(number * (2**61 - 1), 3)[2:-1] for number in range(10_000))

    def stated(length: bytes) -> bytes:
        return start + array + b"(K\x01" + length + b"\x85" + element + b"\x89C\x04abcdtb"

    return {
        "os.system": pickle.dumps(Calls(os.system, touch), 4),
        "posix.system by text": start + raw_global("posix", "system", touch) + end,
        "eval": pickle.dumps(Calls(eval, code), 4),
        "exec": pickle.dumps(Calls(exec, code), 4),
        "builtins.exec in protocol 3": start + raw_global("builtins", "exec", code) + end,
        "__import__": start + raw_global("builtins", "__import__", "antigravity") + end,
        "a chain of getattr": start + raw_global("builtins", "getattr", "os", "system") + end,
        "a dotted name": b"\x80\x04\x8c\x02os\x8c\x0bpath.system\x93.",
        "a name within a known module": start + raw_global("numpy", "load", str(canary)) + end,
        "numpy's own pickle": start + raw_global("numpy.core.multiarray", "fromfile", str(canary)) + end,
        "a subclass of an array": start + reconstruct + b"(cos\npath\nK\x00\x85C\x01btR" + end,
        "an array of objects": start + b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8\x89\x88tR" + end,
        "an array of 2^62 elements": stated(b"\x8a\x08\0\0\0\0\0\0\0\x40") + end,
        "an array of negative length": stated(b"J\xff\xff\xff\xff") + end,
        "an array without bytes": start + array + b"(K\x01K\x01\x85" + element + b"\x89Ntb" + end,
        "an array that is never built twice": stated(b"K\x01") + b"(K\x01tb" + end,
        "a state for a class": start + metadata + b"}X\x08\x00\x00\x00__init__K\x01sb" + end,
        "a class called with arguments": start + metadata + b"K\x01\x85\x81" + end,
        "another class of Paddle": start + b"c" + METADATA.encode() + b"\ndataclass\n)\x81" + end,
        "an instance by INST": start + b"(X\x04\x00\x00\x00truei" + b"os\nsystem\n" + end,
        "an instance by OBJ": start + b"(cos\nsystem\nX\x04\x00\x00\x00trueo" + end,
        "a persistent id": start + b"Pfile\n" + end,
        "a persistent id off the stack": start + b"K\x01Q" + end,
        "an extension": start + b"\x82\x01" + end,
        "a buffer outside the file": b"\x80\x05\x97.",
        "protocol 5": pickle.dumps([1], 5),
        "protocol 2": pickle.dumps(np.arange(5), 2),
        "protocol 0": pickle.dumps([1], 0),
        "protocol 255": b"\x80\xffN.",
        "a memo of 2^32": start + b"]h\xff" + end,
        "a frame of 2^63": b"\x80\x04\x95" + struct.pack("<Q", 2**63) + b"N.",
        "a frame that is too short": b"\x80\x04\x95" + struct.pack("<Q", 2) + b"\x8c\x04abcd.",
        "a frame in a frame": b"\x80\x04\x95" + struct.pack("<QB", 12, 0x95) + struct.pack("<Q", 1) + b"N." + b"N" * 8,
        "bytes of 2^63": b"\x80\x04\x8e" + struct.pack("<Q", 2**63) + b"x.",
        "bytes of 4 GB": start + b"B\xff\xff\xff\xffx" + end,
        "a text of 2^63": b"\x80\x04\x8d" + struct.pack("<Q", 2**63) + b"x.",
        "a text that is not UTF-8": start + b"X\x01\x00\x00\x00\xff" + end,
        "a text with half a character": start + b"X\x03\x00\x00\x00\xed\xa0\x80" + end,
        "an integer of 2 GB": start + b"\x8b\xff\xff\xff\x7f" + end,
        "an integer of 255 bytes": start + b"\x8a\xff" + b"\x7f" * 255 + end,
        "a list as a key": start + b"}]K\x01s" + end,
        "a key without a value": start + b"}(K\x01u" + end,
        "more off the stack than there is": start + b"\x87" + end,
        "a mark that is not there": start + b"t" + end,
        "a mark that stays": start + b"(N" + end,
        "what lies below a mark": start + b"N(\x85t" + end,
        "nothing": b"",
        "no end": start + b"N",
        "something behind the end": start + b"N.N",
        "a second value": start + b"NN.",
        "a global of a million letters": start + b"c" + b"a" * 10**6 + b"\nb\n" + end,
        "a duplicate of the stack": start + b"]2" + end,
        "a pickle that unpickles another": start + raw_global("pickle", "loads", inner) + end,
        "an integer as a million digits of text": start + b"L" + b"9" * 10**6 + b"L\n" + end,
        "a tuple as a key": pickle.dumps({(0, ((1,),)): None}, 4),
        "multiples of 2^61-1 as keys": b"\x80\x04}(" + b"".join(multiple + b"N" for multiple in multiples) + b"u.",
    }


@pytest.mark.parametrize("name", ["os.system", "a pickle that unpickles another"])
def test_the_canary_would_have_been_seen(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    pickle.loads(hostile(canary)[name])
    assert canary.exists()


def refused(path: Path, raw: bytes, message: str) -> None:
    """Read a pickle that must be refused."""
    with pytest.raises(FormatError, match=message):
        read_pickle(written(path, raw))


SHARED = "counting shared parts each time"


def test_a_memo_bomb_is_refused_in_memory_as_small_as_its_text(tmp_path: Path) -> None:
    # Each tuple holds the one before it twice: 2^90 elements for a reader that visits them all.
    twice = b"".join(b"h" + bytes([at]) + b"h" + bytes([at]) + b"\x86\x94" for at in range(90))
    assert peak_of(lambda: refused(tmp_path / "x", b"\x80\x04(N\x94" + twice + b"t.", SHARED)) < 4 << 20


@pytest.mark.parametrize(
    "key",
    [2**61 - 1, -1, MAX_INTEGER_KEY + 1, 0.5, 2.0**61, (1,), ("a", (2**61 - 1,)), ("a", "b")],
    ids=str,
)
def test_a_key_of_which_a_file_can_choose_the_hash_is_refused(tmp_path: Path, key: Any) -> None:
    for value in ({key: None}, [{"a": {None: 0, "b": 1, key: None}}]):
        refused(tmp_path / "x", pickle.dumps(value, 4), "a key that is neither text nor a small integer")


def test_integers_that_are_keys_have_different_hashes(tmp_path: Path) -> None:
    keys = described(tmp_path / "x", dict.fromkeys(range(MAX_INTEGER_KEY + 1)))
    assert len({hash(key) for key in keys}) == len(keys) == MAX_INTEGER_KEY + 1


def test_a_state_of_many_instances_is_not_visited_for_each(tmp_path: Path) -> None:
    count = 1000
    state = b"}(" + b"".join(b"\x8c\x04%04dN" % number for number in range(count)) + b"u\x94"
    metadata = b"c" + METADATA.encode() + b"\nMetadata\n\x94"
    raw = b"\x80\x04(" + state + metadata + b"h\x01)\x81h\x00b" * count + b"t."
    calls = itertools.count()
    sys.setprofile(lambda *_: next(calls))
    try:
        refused(tmp_path / "x", raw, SHARED)
    finally:
        sys.setprofile(None)
    assert next(calls) < 10 * len(raw)


def test_what_is_no_data_is_not_written() -> None:
    with pytest.raises(FormatError, match="A set cannot be written as plain data"):
        pickles.encode_pickle({"a": [{1}]})


def named(length: int) -> bytes:
    """A class with a name of this many bytes, and the line feed that ends it."""
    return b"\x80\x03c" + b"a" * length + b"\nb\n."


def with_axes(count: int) -> bytes:
    """An array of one element with this many axes."""
    raw = pickle.dumps(np.zeros((1, 1, 1), "f4"), 3)
    return raw.replace(b"K\x01K\x01K\x01\x87", b"(" + b"K\x01" * count + b"t")


def shared(times: int) -> bytes:
    """A list of 20 elements that a tuple contains this many times and once more: 22 + 21 times parts."""
    return b"\x80\x04(](" + b"N" * 20 + b"e\x94" + b"h\x00" * times + b"t."


def instructions(length: int) -> bytes:
    """A list whose instructions have this many bytes before the last one, which ends the pickle."""
    return b"\x80\x04](" + b"N" * (length - 5) + b"e."


@pytest.mark.parametrize(
    ("within", "beyond", "message"),
    [
        (named(256), named(257), "a name that does not end within 256 bytes"),
        (pickle.dumps("x" * 65_536, 4), pickle.dumps("x" * 65_537, 4), "a text of 65537 bytes"),
        (pickle.dumps(2**127, 4), pickle.dumps(2**128, 4), "an integer of more than 16 bytes"),
        (with_axes(32), with_axes(33), "an array with an invalid shape"),
        (shared(42), shared(43), SHARED),
        (instructions(70_000), instructions(70_001), "more than 70000 bytes of instructions"),
    ],
    ids=["name", "text", "integer", "axes", "parts", "instructions"],
)
def test_a_pickle_beyond_a_bound_is_refused_and_one_that_reaches_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: bytes, beyond: bytes, message: str
) -> None:
    monkeypatch.setattr(pickles, "MAX_PROGRAM_BYTES", 70_000)
    read_pickle(written(tmp_path / "x", within), any_class=True)
    with pytest.raises(FormatError, match=message):
        read_pickle(written(tmp_path / "x", beyond), any_class=True)


@pytest.mark.parametrize("length", [5, 2**62, 2**64 - 1])
def test_bytes_that_are_not_in_the_file_are_not_skipped(tmp_path: Path, length: int) -> None:
    raw = b"\x80\x04\x8e" + length.to_bytes(8, "little") + b"1234"
    refused(tmp_path / "x", raw, f"truncated: 15 of {11 + length} bytes")


@pytest.mark.parametrize(
    "raw", [b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".", b"\x80\x04]\x94h\x00a."], ids=["deep", "in itself"]
)
def test_a_depth_in_which_a_reader_would_recurse_is_refused(tmp_path: Path, raw: bytes) -> None:
    refused(tmp_path / "x", raw, f"nested more than {MAX_DEPTH} deep|{SHARED}")
    inner = b"\x80\x04" + b"]" * MAX_DEPTH + b"a" * (MAX_DEPTH - 1) + b"."
    assert isinstance(read_pickle(written(tmp_path / "x", inner)), list)


@pytest.mark.parametrize("name", ["a memo bomb", "a depth of 100000"])
def test_a_name_that_is_no_text_is_refused_without_being_written_out(tmp_path: Path, name: str) -> None:
    # As text the bomb would have 2^22 times the length of an empty list: enough to be seen, and not to harm the tests.
    twice = b"".join(b"](h" + bytes([at]) + b"h" + bytes([at]) + b"e\x94" for at in range(22))
    module = b"]\x94" + twice if name == "a memo bomb" else b"]" + b"\x85" * 100_000
    raw = b"\x80\x04" + module + b"\x8c\x06system\x93."
    peak = peak_of(lambda: refused(tmp_path / "x", raw, r"it imports a (list|tuple)\.system"))
    assert peak < 100 * len(raw) + (4 << 20)


def test_any_change_of_a_real_pickle_is_refused_or_data(tmp_path: Path) -> None:
    value = {"w": np.arange(6, dtype="f4").reshape(2, 3), "n": {"a": (1, 2), "b": [None, 0.5]}, "s": np.float32(1)}
    real, chance, count = pickle.dumps(value, 4), random.Random(1), 0
    for _ in range(1000):
        raw = bytearray(real)
        for _ in range(chance.choice((1, 1, 2, 4))):
            at, length, other = chance.randrange(len(raw)), chance.randrange(1, 9), chance.randrange(len(raw))
            noise, copied = chance.randbytes(length), raw[other : other + 5 * length]
            end, new = chance.choice([(at + 1, noise[:1]), (at + length, b""), (at, noise), (at, copied)])
            raw[at:end] = new
        try:
            _walk(read_pickle(written(tmp_path / "x", bytes(raw))), set())
        except FlexError as error:
            str(error).encode()
            count += 1
    assert count > 500


def _walk(value: Any, seen: set[int]) -> None:
    """Only data comes out."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for key, one in value.items():
            _walk(key, seen)
            _walk(one, seen)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _walk(one, seen)
    elif isinstance(value, Record):
        _walk(value.fields, seen)
    else:
        plain = (str, int, float, bool, type(None), PickledArray, pickles.PickledBytes)
        unfinished = (np.dtype, pickles._Global)
        assert isinstance(value, (*plain, *unfinished))
