"""Grids: read from text or refused, the place of every rank, and how layers and states are divided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import paddle
import pytest
from hypothesis import example, given, settings, strategies as st
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizer,
)
from paddle.distributed.fleet.meta_parallel.parallel_layers.pp_layers import LayerDesc, SegmentLayers

from paddleformers_fc.errors import OptionError
from paddleformers_fc.layout.grid import (
    Coordinates,
    ParallelGrid,
    fused_groups,
    fused_shares,
    layer_bounds,
    parse_grid,
    slice_range,
    uniform_bounds,
    whole_shares,
)


@pytest.mark.parametrize(
    "text", ["dp=1", "tp=2,pp=2,sharding=2,split=true", "pp=4,vpp=2,buffer=8", "tp=2,ep=4,sharding=4,split=true"]
)
def test_a_grid_is_written_as_it_is_read(text: str) -> None:
    assert parse_grid(text) == parse_grid(str(parse_grid(text)))
    assert parse_grid(str(parse_grid(text.upper().lower()))) == parse_grid(text)


def test_unnamed_degrees_have_their_defaults() -> None:
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
        ("slice_above=-1", "slice_above: must be at least 0"),
        ("tp=2.0", "tp: '2.0' is not an integer"),
        ("split=maybe", "split: 'maybe' is neither true nor false"),
        ("tp=0", "tp: must be at least 1"),
        ("sharding=2,stage=4", "stage=4: the sharding stages are 1, 2 and 3"),
        ("split=true", "split=true with sharding=1, stage=1"),
        ("sharding=2,stage=2,split=true", "split=true with sharding=2, stage=2"),
        ("stage=3", "stage=3 with sharding=1"),
        ("sharding=2,stage=3,pp=2", "support neither pipeline"),
        ("sharding=2,stage=3,tp=2", "stage=3 with tp=2"),
        ("vpp=2", "vpp=2 with pp=1"),
        ("pp=2,vpp=2", "vpp=2 with pp=2: virtual stages need more than 2 pipeline stages"),
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


def test_stage_3_may_cut_every_parameter() -> None:
    assert parse_grid("sharding=2,stage=3,slice_above=0").slice_above == 0


# ---- The arithmetic of pipelines and sharding, against Paddle's own functions on the same numbers.


def assert_tiled(ranges: list[tuple[int, int]], size: int) -> None:
    ends = [0, *(end for _, end in ranges)]
    assert ends[-1] == size
    assert [begin for begin, _ in ranges] == ends[:-1]


class DecoderLayer(paddle.nn.Layer):
    """A layer that is counted."""


class Other(paddle.nn.Layer):
    """An item that is not."""


@pytest.mark.parametrize(("layers", "stages", "virtual"), [(4, 2, 1), (8, 4, 2), (6, 3, 2), (12, 2, 3), (5, 1, 1)])
def test_layers_are_distributed_to_parts_as_by_paddle(layers: int, stages: int, virtual: int) -> None:
    is_layer = [False, *[True] * layers, False, False]
    items = [LayerDesc(DecoderLayer if counted else Other) for counted in is_layer]
    theirs = SegmentLayers(items, stages, "layer:DecoderLayer|EmptyLayer", virtual if virtual > 1 else None)
    assert layer_bounds(is_layer, stages * virtual) == theirs.do_segment()


@pytest.mark.parametrize(("items", "parts"), [(6, 2), (6, 4), (7, 3), (57, 8), (5, 5)])
def test_items_are_distributed_to_stages_as_by_paddle(items: int, parts: int) -> None:
    assert uniform_bounds(items, parts) == SegmentLayers([None] * items, parts, "uniform").do_segment()


@given(st.lists(st.integers(1, 64), min_size=1, max_size=40), st.integers(1, 5))
def test_unsliced_states_are_distributed_as_by_paddle(sizes: list[int], ranks: int) -> None:
    parameters = [SimpleNamespace(name=str(index), shape=[size]) for index, size in enumerate(sizes)]
    optimizer: Any = SimpleNamespace(_sharding_world_size=ranks, _parameter_list=parameters)
    theirs = DygraphShardingOptimizer._partition_parameters(optimizer)
    ours = whole_shares(sizes, ranks, largest_first=True)
    assert {rank: sorted((int(one.name), None) for one in held) for rank, held in theirs.items()} == dict(
        enumerate(ours)
    )


@settings(max_examples=30)
@example([(10, True), (7, True)], 40)
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=20), st.integers(1, 200))
def test_buffers_are_closed_where_paddle_closes_them(parameters: list[tuple[int, bool]], limit: int) -> None:
    parameters.sort(key=lambda one: one[1])  # Paddle sorts by dtype before it cuts.
    tensors = [paddle.zeros([size], "float32" if wide else "bfloat16") for size, wide in parameters]
    theirs = paddle.base.core.eager_assign_group_by_size(tensors, [False] * len(tensors), [limit, limit])
    widths = [4 if wide else 2 for _, wide in parameters]
    assert fused_groups([size for size, _ in parameters], widths, limit) == theirs


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    st.integers(1, 6),
    st.integers(1, 40000),
    st.sampled_from([2, 4]),
)
def test_ranges_of_a_buffer_are_all_of_every_parameter_once(
    sizes: list[int], ranks: int, limit: int, width: int
) -> None:
    ranges: dict[int, list[tuple[int, int]]] = {}
    for share in fused_shares(sizes, [width] * len(sizes), ranks, limit):
        for index, part in share:
            assert part is not None
            ranges.setdefault(index, []).append(part)
    for index, size in enumerate(sizes):
        assert_tiled(sorted(ranges[index]), size)


def test_a_range_ends_where_the_padding_begins() -> None:
    assert fused_shares([100, 28], [4, 4], 2, 1 << 20) == [[(0, (0, 100))], [(1, (0, 28))]]


@given(st.integers(1, 10000), st.sampled_from([2, 4]), st.integers(1, 7), st.sampled_from([256, 4096]))
def test_slices_are_all_of_a_parameter_once(size: int, width: int, ranks: int, alignment: int) -> None:
    found = [part for rank in range(ranks) if (part := slice_range(size, width, rank, ranks, alignment)) is not None]
    assert_tiled(found, size)
    assert all(end - begin == found[0][1] - found[0][0] for begin, end in found[:-1])
