"""The header reader accepts what the safetensors library accepts, and nothing that the library refuses."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import struct
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors
from hypothesis import example, given, strategies as st

from paddleformers_fc.errors import Corrupt, FormatError, StorageError
from paddleformers_fc.storage import safetensors as ours
from paddleformers_fc.storage.dtypes import CODES, from_safetensors, to_numpy, to_safetensors
from paddleformers_fc.storage.safetensors import MAX_HEADER_BYTES, Header, TensorEntry, layout_file, read_header
from tests.harness.sampling import thorough
from tests.storage.support import SPELLINGS, header_bytes, write_tensors

THOROUGH = thorough(300, derandomize=True)


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file that every example of a property overwrites."""
    return tmp_path_factory.mktemp("safetensors") / "x.safetensors"


def tensor(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4), **fields: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **fields}


def as_the_library_reads_it(path: Path) -> Header:
    header, data = read_header(path), path.read_bytes()
    stored = {
        name: (one["dtype"], tuple(one["shape"]), bytes(one["data"])) for name, one in safetensors.deserialize(data)
    }
    assert {n: (one.dtype, one.shape, data[one.begin : one.end]) for n, one in header.tensors.items()} == stored
    return header


@THOROUGH
@given(
    entries=st.lists(
        st.tuples(
            st.text(max_size=6), st.sampled_from(sorted(CODES)), st.lists(st.integers(0, 4), max_size=3).map(tuple)
        ),
        max_size=5,
        unique_by=lambda entry: entry[0],
    ),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3),
    data=st.data(),
)
def test_both_readers_read_files_of_both_writers_alike(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Any], metadata: dict[str, str], data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("written")
    arrays, specs = {}, {}
    for name, code, shape in entries:
        size = math.prod(shape) * to_numpy(code).itemsize
        array = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)) or b"\0", np.uint8)
        arrays[name] = array[:size]
        kind = {"dtype": from_safetensors(code), "shape": list(shape)}
        specs[name] = safetensors.TensorSpec(**kind, data_ptr=array.ctypes.data, data_len=size)
    write_tensors(directory / "own", entries, arrays, metadata)
    (directory / "library").write_bytes(safetensors.serialize(specs, metadata or None))
    for path in directory.iterdir():
        header, raw = as_the_library_reads_it(path), path.read_bytes()
        assert header.metadata == metadata
        assert {(name, one.dtype, one.shape) for name, one in header.tensors.items()} == {*entries}
        assert all(raw[one.begin : one.end] == arrays[name].tobytes() for name, one in header.tensors.items())


MALFORMED: dict[str, tuple[Any, bytes, str]] = {
    "not an object": ([], b"", "does not start with '{'"),
    "leading space": (b" {}", b"", "does not start with '{'"),
    "not JSON": (b"{]", b"", "not valid JSON"),
    "cut JSON": (b'{"a": {', b"", "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "can't decode byte 0xff in position 2"),
    "half a surrogate pair": (
        b'{"\\ud800": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b"1234",
        "not valid Unicode",
    ),
    "deep nesting": (b'{"a":' + b"[" * 200_000, b"", "nested too deeply"),
    "endless number": (b'{"a": ' + b"9" * 6000 + b"}", b"", "an integer of 6000 digits"),
    "tensor is no object": ({"t": [1]}, b"", "'t' does not have exactly the fields"),
    "dtype missing": ({"t": {"shape": [1], "data_offsets": [0, 4]}}, b"1234", "'t' does not have exactly the fields"),
    "unknown field": ({"t": tensor(extra=1)}, b"1234", "'t' does not have exactly the fields"),
    "unknown dtype": ({"t": tensor(dtype="F4")}, b"1234", "'t' has the dtype 'F4'"),
    "shape no list": ({"t": tensor(shape=1)}, b"1234", "'t' has an invalid entry: .*`array`, got `int` - at `.*shape"),
    "negative extent": ({"t": tensor(shape=[-1])}, b"1234", "'t' has a shape"),
    "minus zero": (
        b'{"t": {"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}',
        b"",
        "'t' has an invalid entry: .*`int`, got `float`",
    ),
    "33 axes": ({"t": tensor("U8", [1] * 33, [0, 1])}, b"1", "'t' has 33 axes, and at most 32 are allowed"),
    "extent beyond 64 bits": ({"t": tensor(shape=[2**64, 0], offsets=[0, 0])}, b"", "'t' has a shape"),
    "size beyond 64 bits": ({"t": tensor(shape=[2**62, 4])}, b"1234", r"'t' .* more than 2\^64-1 bytes"),
    "zero hides overflow": ({"t": tensor(shape=[2**63, 4, 0], offsets=[0, 0])}, b"", r"more than 2\^64-1 bytes"),
    "negative offset": ({"t": tensor(offsets=[-4, 0])}, b"1234", "'t' has data_offsets"),
    "offsets reversed": ({"t": tensor(offsets=[4, 0])}, b"1234", "'t' takes the bytes 4 to 0"),
    "size does not fit": ({"t": tensor(shape=[2])}, b"1234", "'t' takes the bytes 0 to 4, .* has 8 bytes"),
    "gap before": ({"t": tensor(offsets=[4, 8])}, b"12345678", "'t' leaves a gap behind the header"),
    "gap between": ({"s": tensor(), "t": tensor(offsets=[8, 12])}, b"0" * 12, "'t' leaves a gap behind 's'"),
    "overlap": ({"s": tensor(shape=[2], offsets=[0, 8]), "t": tensor(offsets=[4, 8])}, b"0" * 8, "'t' overlaps 's'"),
    "key twice": (
        b'{"t":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"t":{"dtype":"I8","shape":[],"data_offsets":[0,1]}}',
        b"1",
        "the key 't' twice",
    ),
    "field twice": (
        b'{"t":{"dtype":"U8","dtype":"I8","shape":[],"data_offsets":[0,1]}}',
        b"1",
        "the key 'dtype' twice",
    ),
    "metadata key twice": (b'{"__metadata__":{"a":"1","a":"2"}}', b"", "the key 'a' twice"),
    "metadata no object": ({"__metadata__": "x"}, b"", "__metadata__ is not an object"),
    "metadata not text": ({"__metadata__": {"a": 1}}, b"", r"__metadata__\['a'\] is not a string"),
}


READ_BY_THE_LIBRARY = {"33 axes", "leading space", "unknown field", "key twice", "metadata key twice"}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_header_is_refused_and_the_file_named(tmp_path: Path, case: str, spelling: str) -> None:
    document, data, message = MALFORMED[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(header_bytes(document, spelling) + data)
    with pytest.raises(FormatError, match=message) as caught:
        read_header(path)
    assert "bad.safetensors" in caught.value.what
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd) == str(path)]
    if case not in READ_BY_THE_LIBRARY:
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(path.read_bytes())


def test_a_header_in_the_usual_spelling_takes_the_fast_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.numpy import save_file

    arrays = {"zwei ü": np.zeros((2, 3), np.float32), 'a"\\\n\x7f': np.zeros(3, np.int8), "none": np.zeros((0, 4))}
    metadata = {"format": "np", "nested": json.dumps({"a": ["\t", {"},": None}]})}
    save_file(arrays, tmp_path / "library", metadata=metadata)
    entries = [(name, to_safetensors(array.dtype.name), array.shape) for name, array in arrays.items()]
    write_tensors(tmp_path / "own", entries, arrays, metadata)
    examined = {file: read_header(tmp_path / file) for file in ("library", "own")}
    monkeypatch.setattr(ours, "_decode_any", None)
    for file, header in examined.items():
        assert read_header(tmp_path / file) == header
        assert header.metadata == metadata
        assert header.tensors.keys() == arrays.keys()


def test_the_well_formed_neighbour_of_the_malformed_headers_is_read(tmp_path: Path) -> None:
    document = {"__metadata__": {"a": "b"}, "t": tensor(offsets=[4, 8]), "s": tensor(), "e": tensor("I8", [0], [4, 4])}
    document |= {"axes": tensor("U8", [1] * 32, [8, 9]), "extent": tensor("U8", [2**64 - 1, 0], [9, 9])}
    raw = header_bytes(json.dumps(document).encode() + b"  ")
    (tmp_path / "x").write_bytes(raw + b"123456789")
    header = read_header(tmp_path / "x")
    begin = len(raw)
    assert list(header.tensors.items()) == [
        ("s", TensorEntry("F32", (1,), begin, begin + 4)),
        ("e", TensorEntry("I8", (0,), begin + 4, begin + 4)),
        ("t", TensorEntry("F32", (1,), begin + 4, begin + 8)),
        ("axes", TensorEntry("U8", (1,) * 32, begin + 8, begin + 9)),
        ("extent", TensorEntry("U8", (2**64 - 1, 0), begin + 9, begin + 9)),
    ]


def test_a_header_longer_than_the_bound_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "x", "wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(FormatError, match="100000001 bytes, and at most 100000000"):
        read_header(tmp_path / "x")
    entries = [("a", "U8", (1,))]
    header = layout_file(tmp_path / "y", entries, {}).header
    (tmp_path / "y").write_bytes(header + b"1")
    for bound in (len(header) - 8, len(header) - 9):
        monkeypatch.setattr("paddleformers_fc.storage.safetensors.MAX_HEADER_BYTES", bound)
        if bound == len(header) - 8:
            assert read_header(tmp_path / "y").tensors.keys() == {"a"}
            assert layout_file(tmp_path / "y", entries, {}).header == header
            continue
        for use in (lambda: read_header(tmp_path / "y"), lambda: layout_file(tmp_path / "y", entries, {})):
            with pytest.raises(FormatError, match="bytes, and at most"):
                use()


def test_a_file_truncated_anywhere_is_corrupt(tmp_path: Path) -> None:
    whole = header_bytes({"t": tensor()}) + b"1234"
    for length in range(len(whole)):
        (tmp_path / "cut.safetensors").write_bytes(whole[:length])
        with pytest.raises(Corrupt, match=r"cut\.safetensors is truncated"):
            read_header(tmp_path / "cut.safetensors")


def test_the_tensors_that_a_truncation_cut_are_named(tmp_path: Path) -> None:
    document = {"s": tensor(), "t": tensor(offsets=[4, 8]), "u": tensor(offsets=[8, 12])}
    (tmp_path / "x").write_bytes(header_bytes(document) + b"123456")
    with pytest.raises(Corrupt, match="2 tensors cut off, 't' first"):
        read_header(tmp_path / "x")


def test_a_file_that_is_too_long_missing_or_not_a_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(header_bytes({"t": tensor()}) + b"12345")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for name, error, message in (
        ("long", Corrupt, "longer than its header says"),
        ("gone", Corrupt, "gone is missing"),
        ("loop", Corrupt, "loop is missing"),
        ("pipe", FormatError, "not a regular file"),
        ("", FormatError, "not a regular file"),
    ):
        with pytest.raises(error, match=message):
            read_header(tmp_path / name)


def test_a_refusal_of_the_operating_system_names_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", mock.Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(StorageError, match=r"(?s)private.*EACCES"):
        read_header(tmp_path / "private")


SOUND = {"__metadata__": {"k": "v"}, "a": tensor("F32", [2], [0, 8]), "b": tensor("BF16", [3], [8, 14])}
VALID = [header_bytes(SOUND, spelling) for spelling in SPELLINGS]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**65) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
TENSORS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "F64", "F8_E4M3", "F4", 1]),
        "shape": st.lists(st.integers(0, 3) | st.just(2**63), max_size=3) | VALUES,
        "data_offsets": st.lists(st.integers(0, 12), min_size=2, max_size=2) | VALUES,
    }
)
DOCUMENTS = st.dictionaries(st.sampled_from(["a", "b", "c", "__metadata__"]), TENSORS | VALUES, max_size=3)


def refused_or_as_the_library_reads_it(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with contextlib.suppress(FormatError, Corrupt):
        as_the_library_reads_it(path)


@st.composite
def changed(draw: st.DrawFn) -> bytes:
    """A valid file in which a few bytes are replaced, added or removed."""
    whole = draw(st.sampled_from(VALID)) + bytes(14)
    position = draw(st.integers(0, len(whole)))
    return whole[:position] + draw(st.binary(max_size=3)) + whole[position + draw(st.integers(0, 3)) :]


@st.composite
def random_parts(draw: st.DrawFn) -> bytes:
    """A header of random bytes or fields, and a few bytes behind it."""
    noise = st.binary(max_size=64)
    document = draw(DOCUMENTS | noise | noise.map(b"{".__add__))
    return header_bytes(document, draw(st.sampled_from(list(SPELLINGS)))) + bytes(draw(st.integers(0, 12)))


@thorough(1000, derandomize=True)
@given(data=changed() | random_parts() | st.binary(max_size=64))
@example(data=header_bytes(b'{"t":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'))
def test_any_bytes_are_refused_or_read_as_the_library_does(scratch: Path, data: bytes) -> None:
    refused_or_as_the_library_reads_it(scratch, data)


def test_a_header_of_very_many_shapes_without_an_element_is_refused(tmp_path: Path) -> None:
    entries = {f"t{n}": tensor(shape=[0, n], offsets=[0, 0]) for n in range(1024)}
    path = tmp_path / "model.safetensors"
    path.write_bytes(header_bytes(entries))
    assert len(read_header(path).tensors) == 1024
    path.write_bytes(header_bytes({**entries, "another": tensor(shape=[0, 2**61], offsets=[0, 0])}))
    with pytest.raises(FormatError, match="tensors of more than 1024 shapes without an element"):
        read_header(path)
