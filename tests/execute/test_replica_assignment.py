"""Who writes what: every element once, bytes even, files bounded."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from paddleformers_fc.execute import replicas
from paddleformers_fc.execute.replicas import Assignment, ShardPart, Writers, files_of
from paddleformers_fc.layout.shard_messages import JobShards, decode_shards, encode_rank_shards
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import shifted, whole
from tests.harness.sampling import thorough

MEBI = 1024 * 1024
RankShards = dict[str, dict[str, Shard]]


def held(*shards: Shard) -> RankShards:
    return {"model_state": {shard.name: shard for shard in shards}}


def job_of(everyone: Sequence[RankShards]) -> JobShards:
    return decode_shards([encode_rank_shards(roles) for roles in everyone])


def assign_writers(everyone: Sequence[RankShards]) -> list[list[ShardPart]]:
    """What each rank writes: as the coordinator knows it, and as the rank finds out from what it is told."""
    writers = Writers(job_of(everyone))
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(writers.assignment), type=Assignment)
    shares = [told.share_of(rank, roles)[0] for rank, roles in enumerate(everyone)]
    assert [sorted(map(repr, share)) for share in shares] == [
        sorted(map(repr, writers.share_of(rank))) for rank in range(len(everyone))
    ]
    return shares


def tensor(name: str, *shape: int, dtype: str = "float32") -> Shard:
    return Shard(name, dtype, shape, whole(shape))


def loads(given: Sequence[Sequence[ShardPart]]) -> list[int]:
    return [sum(piece.nbytes for piece in pieces) for pieces in given]


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_one_big_tensor_that_every_rank_holds_is_written_by_all_of_them(ranks: int) -> None:
    everyone = [held(tensor("embed", 64 * MEBI // 4, 4), tensor("small", 100))] * ranks
    found = loads(assign_writers(everyone))
    assert max(found) <= 1.01 * sum(found) / ranks


def test_a_big_tensor_levels_out_what_its_holders_write_besides() -> None:
    own, shared = tensor("own", 5 * MEBI), tensor("shared", 15 * MEBI // 4, 4)
    assert loads(assign_writers([held(own, shared), held(shared)])) == [40 * MEBI, 40 * MEBI]


def test_a_big_tensor_is_not_cut_for_slivers() -> None:
    big, own, nearly = tensor("big", 6 * MEBI // 4, 4), tensor("own", 5 * MEBI), tensor("nearly", 5 * MEBI + 100)
    given = assign_writers([held(big, own), held(big, nearly), held(big)])
    assert [[piece.shard.name for piece in pieces] for pieces in given] == [["own"], ["nearly"], ["big"]]


def test_the_shards_of_a_job_are_numbered_by_role_and_name_and_decoded_as_they_were() -> None:
    one = held(tensor("a", 3 * MEBI, 4), tensor("b", 7), tensor("c", 5 * MEBI, 3))
    flat = Shard("a.moment", "float32", (3, 4), whole((3, 4)), (2, 7))
    other: RankShards = {**held(tensor("b", 7), tensor("a", 2)), "optimizer_state": {"a.moment": flat}, "empty": {}}
    job = job_of([one, other, one, {}])
    assert [[job[number] for number in numbers] for numbers in job.held] == [
        [(role, shard) for role, shards in roles.items() for shard in shards.values()]
        for roles in (one, other, one, {})
    ]
    assert job.held[0] is job.held[2]
    assert {
        role: {name: [job[number][1] for number in numbers] for name, numbers in job.tensors(role)}
        for role in ("model_state", "optimizer_state", "empty")
    } == {
        "model_state": {
            "a": [tensor("a", 3 * MEBI, 4), tensor("a", 2)],
            "b": [tensor("b", 7)],
            "c": [tensor("c", 5 * MEBI, 3)],
        },
        "optimizer_state": {"a.moment": [flat]},
        "empty": {},
    }
    assert [job.holders("model_state", name) for name in "abcd"] == [[0, 1, 2], [0, 1, 2], [0, 2], []]
    assert job.holders("optimizer_state", "a") == []


def test_what_a_rank_is_told_of_writers_does_not_grow_with_equal_ranks() -> None:
    one = held(*(tensor(f"layers.{number}", 3 * MEBI, 4) for number in range(100)))
    few, many = (msgspec.msgpack.encode(Writers(job_of([one] * ranks)).assignment) for ranks in (8, 64))
    # Of each rank: a difference, its load and the number of a pattern.
    assert len(many) - len(few) == 3 * (64 - 8) + 6


@pytest.mark.parametrize("holders", range(3, 9))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_a_large_range_is_written_to_its_last_element_whatever_its_length(holders: int, dtype: str) -> None:
    for spare in range(holders + 1):
        begin, end = 3, 3 + 10 * holders * MEBI + spare
        one = Shard("flat", dtype, (end + 5,), whole((end + 5,)), (begin, end))
        given = assign_writers([held(one)] * holders)
        ranges = sorted((piece.shard.flat, piece.start) for pieces in given for piece in pieces)
        assert len(ranges) == holders
        edges = [begin, *(flat[1] for flat, _ in ranges)]
        assert [(flat, start) for flat, start in ranges] == [
            ((low, high), low - begin) for low, high in zip(edges[:-1], [*edges[1:-1], end], strict=True)
        ]


@pytest.mark.parametrize("holders", [3, 5, 7])
def test_a_large_tensor_is_written_to_its_last_row(holders: int) -> None:
    for rows in range(4 * holders * MEBI // 1024, 4 * holders * MEBI // 1024 + holders):
        given = assign_writers([held(tensor("rows", rows, 1023))] * holders)
        cuts = sorted((piece.shard.box.lo[0], piece.shard.box.hi[0]) for pieces in given for piece in pieces)
        edges = [0, *(high for _, high in cuts)]
        assert cuts == list(zip(edges[:-1], [*edges[1:-1], rows], strict=True))


SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


@st.composite
def shards(draw: st.DrawFn, name: str) -> Shard:
    """A whole tensor, or a half of one; or a flattened range of either."""
    shape = draw(SHAPES)
    place, whole_shape = whole(shape), shape
    if shape and draw(st.booleans()):
        whole_shape = (2 * shape[0], *shape[1:])
        place = shifted(shape, (shape[0], *[0] * (len(shape) - 1)))
    flat = None
    if draw(st.booleans()):
        begin = draw(st.integers(0, place.volume))
        flat = (begin, draw(st.integers(begin, place.volume)))
    return Shard(name, draw(st.sampled_from(["float32", "bfloat16"])), whole_shape, place, flat)


@st.composite
def jobs(draw: st.DrawFn) -> list[RankShards]:
    """Ranks that hold shards, each held by one rank or by several."""
    ranks = draw(st.integers(1, 4))
    everyone: list[RankShards] = [{"model_state": {}} for _ in range(ranks)]
    for number in range(draw(st.integers(1, 5))):
        shard = draw(shards(f"t{number}"))
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            everyone[rank]["model_state"][shard.name] = shard
    return everyone


def elements(shard: Shard) -> np.ndarray:
    """The numbers of a shard's elements in its whole tensor, in the order of its memory."""
    numbers = np.arange(int(np.prod(shard.global_shape, dtype=int))).reshape(shard.global_shape)
    part = numbers[tuple(slice(a, b) for a, b in zip(shard.box.lo, shard.box.hi, strict=True))].ravel()
    return part if shard.flat is None else part[shard.flat[0] : shard.flat[1]]


@thorough(300)
@given(jobs(), st.integers(1, 40), st.integers(1, 60))
def test_every_element_is_written_once_by_a_rank_that_holds_it(
    everyone: list[RankShards], least: int, most: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(replicas, "MIN_PART_BYTES", least)
        given = assign_writers(everyone)
    written: dict[str, list[np.ndarray]] = {}
    for rank, pieces in enumerate(given):
        assert len({piece.shard.name for piece in pieces}) == len(pieces)
        for file in files_of(pieces, most):
            assert len({piece.shard.name for piece in file}) == len(file)
            assert sum(piece.nbytes for piece in file) <= most or len(file) == 1
            for piece in file:
                own = elements(everyone[rank]["model_state"][piece.shard.name])
                part = elements(piece.shard)
                assert not list(piece.shard.faults())
                assert (own[piece.start : piece.start + piece.shard.size] == part).all()
                written.setdefault(piece.shard.name, []).append(part)
    for held_by_one in everyone:
        for name, shard in held_by_one["model_state"].items():
            assert sorted(np.concatenate(written[name])) == sorted(elements(shard))


def test_a_tensor_is_cut_between_rows_where_a_file_ends() -> None:
    pieces = [
        ShardPart("model_state", shard, 0) for shard in (tensor("a", 10, 5), tensor("b", 1, 3, 50, dtype="bfloat16"))
    ]
    files = files_of(pieces, 80)
    assert [[(one.shard.name, str(one.shard.box)) for one in file] for file in files][:4] == [
        [("a", "[0:4, 0:5]")],
        [("a", "[4:8, 0:5]")],
        [("a", "[8:10, 0:5]")],
        [("b", "[0:1, 0:1, 0:50]")],
    ]
    assert [file[0].nbytes for file in files] == [80, 80, 40, 100, 100, 100]


def test_wide_dtypes_come_first_and_files_hold_no_more_tensors_than_a_header_should(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicas, "MAX_TENSORS", 2)
    dtypes = {"a": "bfloat16", "b": "float32", "c": "bfloat16", "d": "float32", "e": "bfloat16"}
    pieces = [ShardPart("r", tensor(name, 1, dtype=dtype), 0) for name, dtype in dtypes.items()]
    files = files_of(pieces, 10**9)
    assert [[one.shard.name for one in file] for file in files] == [["b", "d"], ["a", "c"], ["e"]]
