"""The arithmetic of pipelines and sharding, held against Paddle's own functions on the same numbers."""

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

from paddleformers_fc.layout.grid import (
    fused_groups,
    fused_shares,
    layer_bounds,
    slice_range,
    uniform_bounds,
    whole_shares,
)


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
def test_whole_states_are_distributed_as_by_paddle(sizes: list[int], ranks: int) -> None:
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
        found = sorted(ranges[index])
        assert found[0][0] == 0
        assert found[-1][1] == size
        assert all(one[1] == other[0] for one, other in zip(found, found[1:], strict=False))


def test_a_range_ends_where_the_padding_begins() -> None:
    assert fused_shares([100, 28], [4, 4], 2, 1 << 20) == [[(0, (0, 100))], [(1, (0, 28))]]


@given(st.integers(1, 10000), st.sampled_from([2, 4]), st.integers(1, 7), st.sampled_from([256, 4096]))
def test_slices_are_all_of_a_parameter_once(size: int, width: int, ranks: int, alignment: int) -> None:
    found = [part for rank in range(ranks) if (part := slice_range(size, width, rank, ranks, alignment)) is not None]
    assert found[0][0] == 0
    assert found[-1][1] == size
    assert all(one[1] == other[0] for one, other in zip(found, found[1:], strict=False))
    assert all(end - begin == found[0][1] - found[0][0] for begin, end in found[:-1])
