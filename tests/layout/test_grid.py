"""Grids: read from text, refused where no job can have them, and the place of every rank."""

from __future__ import annotations

import pytest

from paddleformers_fc.errors import OptionError
from paddleformers_fc.layout.grid import Coordinates, ParallelGrid, parse_grid


@pytest.mark.parametrize(
    "text", ["dp=1", "tp=2,pp=2,sharding=2,split=true", "pp=4,vpp=2,buffer=8", "tp=2,ep=4,sharding=4,split=true"]
)
def test_a_grid_is_written_as_it_is_read(text: str) -> None:
    assert parse_grid(text) == parse_grid(str(parse_grid(text)))
    assert parse_grid(str(parse_grid(text.upper().lower()))) == parse_grid(text)


def test_what_is_not_named_is_as_by_default() -> None:
    assert parse_grid("tp=2, pp=2,stage=1,split=FALSE") == ParallelGrid(tp=2, pp=2)
    assert parse_grid("") == ParallelGrid()
    assert parse_grid("dp=2,sep=1,cp=1") == ParallelGrid(dp=2)
    assert str(ParallelGrid(dp=3, tp=2)) == "dp=3,tp=2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=2,qp=2", "qp: unknown axis; known are dp, tp, pp"),
        ("tensor_model_parallel_size=2", "tensor_model_parallel_size: unknown axis; write tp; known are dp"),
        ("tp=2,sep=2", "sep=2: segment parallelism is not supported"),
        ("cp=2", "cp=2: context parallelism is not supported"),
        ("tp=2,tp=2", "tp: is given twice"),
        ("tp=two", "tp: 'two' is not an integer"),
        ("tp=-1", "tp: must be at least 1"),
        ("slice_above=-1", "slice_above: must be at least 0"),
        ("tp=2.0", "tp: '2.0' is not an integer"),
        ("tp=1e1", "tp: '1e1' is not an integer"),
        ("tp", "tp: '' is not an integer"),
        ("split=maybe", "split: 'maybe' is neither true nor false"),
        ("tp=0", "tp: must be at least 1"),
        ("sharding=2,stage=4", "stage=4: the sharding stages are 1, 2 and 3"),
        ("split=true", "split=true with sharding=1, stage=1"),
        ("sharding=2,stage=2,split=true", "split=true with sharding=2, stage=2"),
        ("stage=3", "stage=3 with sharding=1"),
        ("sharding=2,stage=3,pp=2", "support neither pipeline"),
        ("sharding=2,stage=3,tp=2", "stage=3 with tp=2"),
        ("vpp=2", "vpp=2 with pp=1"),
        ("ep=2,dp=2", "ep=2 with dp=2"),
        ("ep=3,sharding=4,split=true", "divides tp x sharding = 4"),
        ("ep=2,tp=4,sharding=2,split=true", "must be a multiple of tp"),
        ("ep=2,sharding=2", "add split=true"),
    ],
)
def test_an_impossible_grid_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(OptionError) as raised:
        parse_grid(text)
    assert any(message in line for line in raised.value.evidence)


@pytest.mark.parametrize("pp_first", [False, True])
@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_every_rank_has_a_place_of_its_own(ep: int, pp_first: bool) -> None:
    grid = ParallelGrid(tp=2, pp=3, sharding=4, split=True, ep=ep, pp_first=pp_first)
    places = [grid.coordinates(rank) for rank in range(grid.world_size)]
    assert len({(place.dp, place.sharding, place.pp, place.tp) for place in places}) == grid.world_size == 24
    holders: dict[tuple[int, int], set[int]] = {}
    for place in places:
        if ep > 1:
            holders.setdefault((place.pp, place.ep), set()).add(place.moe_sharding)
    assert all(found == set(range(grid.moe_sharding)) for found in holders.values())
    assert len(holders) == (0 if ep == 1 else 3 * ep)


def test_tensor_parallel_ranks_are_neighbours_and_the_topology_orders_the_rest() -> None:
    grid = ParallelGrid(dp=2, tp=2, pp=2, sharding=2)
    assert [grid.coordinates(rank).tp for rank in range(4)] == [0, 1, 0, 1]
    assert grid.coordinates(2) == Coordinates(dp=0, sharding=0, pp=1, tp=0, ep=0, moe_sharding=0)
    first = ParallelGrid(dp=2, tp=2, pp=2, sharding=2, pp_first=True)
    assert first.coordinates(2) == Coordinates(dp=0, sharding=1, pp=0, tp=0, ep=0, moe_sharding=1)


def test_a_pipeline_is_between_the_two_parts_of_the_sharding_axis() -> None:
    grid = ParallelGrid(pp=2, sharding=4, split=True, ep=2)
    assert [grid.coordinates(rank).sharding for rank in range(8)] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert [grid.coordinates(rank).pp for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [grid.coordinates(rank).ep for rank in range(8)] == [0, 1] * 4


def test_stage_3_may_cut_every_parameter() -> None:
    assert parse_grid("sharding=2,stage=3,slice_above=0").slice_above == 0
