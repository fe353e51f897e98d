"""Forecasts equal the plans of every rank, computed once per shard, and the loads."""

from __future__ import annotations

import math
import resource
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from msgspec import structs

from paddleformers_fc.errors import MappingError, MismatchError, OptionError
from paddleformers_fc.execute.reading import fill_arrays
from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.formats.checkpoint import StoredModel
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.layout.roles import (
    MASTER,
    OPTIMIZER_STATE,
    OPTIMIZERS,
    OptimizerDescriptor,
    StateDescriptor,
    StateShape,
    split_state_name,
)
from paddleformers_fc.mapping.boxes import Box, whole
from paddleformers_fc.plan.build import ReadSource, plan_reads
from paddleformers_fc.plan.forecast import PlannedLoad, cost_of, plan_load
from paddleformers_fc.plan.items import ReadItem, StoredPart
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model
from paddleformers_fc.plan.sources import regrouped, resume_source
from paddleformers_fc.storage.executor import DEFAULT_OPTIONS, IMAGE_BYTES, ReadOptions, ReadPool
from tests.harness.on_ranks import on_ranks
from tests.harness.sampling import thorough
from tests.plan.stored import checkpoint_of

MOE = {
    **family_for({"model_type": "ernie4_5_moe"}).tiny,
    "model_type": "ernie4_5_moe",
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 0,
}
PAIRS = (
    ("dp=2", "tp=2,pp=2"),
    ("tp=2", "sharding=4,split=true"),
    ("sharding=2,split=true,ep=2", "tp=4"),
    ("tp=2,pp=2", "ep=4,sharding=4,split=true"),
    ("sharding=2", "sharding=3,stage=3,slice_above=100"),
)


def laid_out(grid: str, dtype: str = "bfloat16", config: dict[str, Any] = MOE) -> SimulatedModel:
    """The tiny model over a grid."""
    return declared_model(family_for(config), ModelDescription(config), parse_grid(grid), dtype)


@pytest.mark.parametrize(("stored", "wanted"), PAIRS)
def test_a_forecast_counts_what_the_plan_of_every_rank_holds(stored: str, wanted: str) -> None:
    model = laid_out(wanted)
    source, report = resume_source(checkpoint_of(laid_out(stored)), model.rules)
    found = PlannedLoad(source, model, report).plan()
    for rank, one in enumerate(found.ranks):
        roles = model.roles(rank)
        items = plan_reads(source, roles).items
        costs = [cost_of(item, roles[item.role][item.name].dtype) for item in items]
        widths = {"bfloat16": 2, "float32": 4}
        held = sum(shard.size * widths[shard.dtype] for shards in roles.values() for shard in shards.values())
        assert (one.rank, one.bytes, one.items) == (rank, held, len(items))
        assert one.read == sum(read for read, _ in costs) >= held
        assert one.peak == held + DEFAULT_OPTIONS.threads * max(staging for _, staging in costs)
    assert not found.dropped
    assert not found.fresh


@pytest.mark.parametrize(("stored", "wanted"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_forecast_in_another_precision_is_the_plan_of_a_load_that_may_cast(stored: str, wanted: str) -> None:
    checkpoint, model = checkpoint_of(laid_out("dp=1", stored)), laid_out("tp=2", wanted)
    source, _ = resume_source(checkpoint, model.rules)
    found = plan_load(checkpoint, "tp=2", wanted).plan()
    for rank, one in enumerate(found.ranks):
        roles = model.roles(rank)
        plan = plan_reads(structs.replace(source, may_cast=True), roles)
        costs = [cost_of(item, roles[item.role][item.name].dtype) for item in plan.items]
        assert (one.items, one.read, plan.report.lines) == (len(costs), sum(read for read, _ in costs), set())
    assert (found.dtype, found.fresh, found.dropped) == (wanted, [], [])


def test_a_forecast_for_the_same_grid_reads_each_shard_once_without_copies() -> None:
    model = laid_out("tp=2,sharding=2,split=true")
    source, report = resume_source(checkpoint_of(model), model.rules)
    found = PlannedLoad(source, model, report).plan()
    assert found.amplification == 1.0
    assert all(rank.peak == rank.bytes == rank.read for rank in found.ranks)


def test_stored_tensors_that_no_rank_wants_are_dropped_by_permission_alone() -> None:
    config = {**MOE, "num_nextn_predict_layers": 1}
    model = laid_out("pp=2", config=config)
    source, report = resume_source(checkpoint_of(laid_out("dp=1", config=config)), model.rules)
    with pytest.raises(MismatchError, match=r"model\.mtp_"):
        PlannedLoad(source, model, report).plan()
    prediction = [name for name in source.mapping.sources if name.startswith("model.mtp_")]
    found = PlannedLoad(source, model, report, prediction).plan()
    assert {name.split(".")[1] for name in found.dropped} == {
        *("mtp_block", "mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj")
    }


@thorough(150)
@given(st.data())
def test_the_cost_of_an_item_is_what_reading_it_costs(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    shape = (*data.draw(st.lists(st.integers(1, 9), max_size=2)), data.draw(st.sampled_from([1, 5, 300, 1500, 2100])))
    lo = tuple(data.draw(st.integers(0, length - 1)) for length in shape)
    hi = tuple(data.draw(st.integers(low + 1, length)) for low, length in zip(lo, shape, strict=True))
    lo, hi = data.draw(st.sampled_from([((0,) * len(shape), shape), (lo, hi)]))
    axes = tuple(data.draw(st.one_of(st.just(range(len(shape))), st.permutations(range(len(shape))))))
    part = Box(lo, hi)
    filled = whole(tuple(part.shape[axis] for axis in axes))
    target = (*filled.shape[:-1], filled.shape[-1] + data.draw(st.sampled_from([0, 7])))
    stored = StoredPart("file", 0, shape, part, "float32")
    item = ReadItem("model_state", "w", stored, 0, target, filled, axes)
    buffer = np.zeros(int(np.prod(target)), np.float32)
    root = tmp_path_factory.getbasetemp()
    (root / "file").write_bytes(np.arange(np.prod(shape), dtype=np.float32).tobytes())
    with ReadPool(ReadOptions(threads=1)) as pool:
        tracemalloc.start()
        read = fill_arrays(pool, root, [item], {(item.role, item.name): buffer})
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    cost, staged = cost_of(item, "float32")
    assert cost == read
    assert staged in (0, 2 * IMAGE_BYTES)
    assert (peak > IMAGE_BYTES) == (staged > 0)
    expected = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    expected = expected[tuple(slice(*ends) for ends in zip(lo, hi, strict=True))].transpose(axes)
    assert np.array_equal(buffer.reshape(target)[..., : filled.shape[-1]], expected)


LARGE = {
    "model_type": "ernie4_5_moe",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 54,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 103424,
    "moe_num_experts": 64,
    "moe_intermediate_size": 3584,
    "moe_layer_start_index": 3,
    "moe_num_shared_experts": 0,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "num_empty_layers_add_in_tail": 2,
}
"""A model of 300 billion parameters."""


@pytest.mark.slow
@on_ranks(1, server="bare_ranks")
def test_10240_ranks_of_a_large_model_are_planned_in_a_minute_of_one_core() -> None:
    stored = checkpoint_of(laid_out("tp=4,pp=4,sharding=16,ep=64,split=true", config=LARGE))
    started = time.process_time()
    model = laid_out("tp=8,pp=8,sharding=160,ep=64,split=true", config=LARGE)
    source, report = resume_source(stored, model.rules)
    found = PlannedLoad(source, model, report).plan()
    assert time.process_time() - started < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 4 << 30
    assert len(found.ranks) == 10_240
    assert 299e9 < sum(math.prod(tensor.shape) for tensor in model.tensors) < 300e9
    # Each rank has the weights of its stage and experts, and a share of the states; the states are held once.
    assert max(rank.bytes for rank in found.ranks) < 4e9
    assert 1 <= found.amplification < 1.2


@pytest.mark.parametrize("grid", ["dp=1", "tp=2"])
def test_stored_rules_that_differ_from_the_declaration_are_refused_also_if_the_same_model_is_live(grid: str) -> None:
    model = laid_out(grid)
    checkpoint = checkpoint_of(model)
    # Both have one shape, so the swapped rules are proved.
    one, other = (f"model.layers.1.{name}_layernorm.weight" for name in ("input", "post_attention"))
    swapped = {(one,): (other,), (other,): (one,)}
    moved = (structs.replace(rule, sources=swapped.get(rule.sources, rule.sources)) for rule in model.rules.rules)
    rules = structs.replace(model.rules, rules=tuple(moved))
    altered = structs.replace(checkpoint, model=StoredModel(rules, model.model))
    for described in (model.model, None):
        with pytest.raises(MappingError, match="The mapping of simulated"):
            resume_source(altered, model.rules, described)


@pytest.mark.parametrize("stored", ["dp=1", "tp=2"])
def test_a_source_of_the_same_model_is_that_of_one_that_is_bound_again(stored: str) -> None:
    model, checkpoint = laid_out("dp=1"), checkpoint_of(laid_out(stored))
    (one, first), (other, second) = (resume_source(checkpoint, model.rules, given) for given in (model.model, None))
    assert one.mapping.correspondences == other.mapping.correspondences
    assert first == second


# ---- States that nothing declares: planned by names and shapes, numbers of shards only under equal cuts.


CONFIG = {**family_for({"model_type": "llama"}).tiny, "model_type": "llama"}
UNKNOWN = OptimizerDescriptor(
    "somewhere.Unknown",
    (
        StateDescriptor(OPTIMIZER_STATE, ".velocity_of_test_0", dtype="bfloat16"),
        StateDescriptor(OPTIMIZER_STATE, ".count_of_test_0", StateShape.NUMBER, "float32"),
        MASTER,
    ),
)
(MINI,) = (one for one in OPTIMIZERS if one.option == "adamw_mini")


def llama(grid: str, **config: object) -> SimulatedModel:
    return declared_model(family_for(CONFIG), ModelDescription({**CONFIG, **config}), parse_grid(grid), "bfloat16")


def test_states_without_a_declaration_are_planned_under_another_layout() -> None:
    wanted = llama("tp=2,pp=2")
    source, report = resume_source(checkpoint_of(llama("sharding=2,split=true"), UNKNOWN), wanted.rules)
    found = PlannedLoad(source, wanted, report).plan()
    for rank in found.ranks:
        roles = wanted.roles(rank.rank, UNKNOWN)
        plan = plan_reads(source, roles)
        assert not plan.report.lines
        assert rank.items == len(plan.items)
        named = ((one.name, one.global_shape) for one in roles["optimizer_state"].values())
        states = [split_state_name("optimizer_state", *one) for one in named]
        scalars = {(one.suffix, one.scalar) for one in states}
        assert scalars == {(".velocity_of_test_0", False), (".count_of_test_0", True)}
        assert len(states) == 2 * len(roles["master_weight"]) == 2 * len(roles["model_state"])
    assert not found.dropped
    assert not found.fresh


def test_numbers_of_shards_are_planned_under_every_layout_that_cuts_tensors_alike() -> None:
    found = plan_load(checkpoint_of(llama("tp=2,sharding=2"), MINI), "tp=2,pp=2").plan()
    assert not found.dropped
    assert not found.fresh


def test_a_plan_of_too_many_ranks_is_refused_at_once() -> None:
    checkpoint = checkpoint_of(llama("dp=1"))
    assert plan_load(checkpoint, "dp=65536").model.grid.world_size == 65_536
    for ranks in (65_537, 100_000_000):
        with pytest.raises(OptionError, match=f"too many ranks: {ranks}"):
            plan_load(checkpoint, f"dp={ranks}")


def test_numbers_of_shards_are_refused_where_tensors_are_cut_in_another_way() -> None:
    with pytest.raises(MismatchError) as refused:
        plan_load(checkpoint_of(llama("tp=2"), MINI), "tp=1").plan()
    text = refused.value.render()
    assert "moment2_of_shard_0: stored [1, 2], expected [1, 1]" in text
    assert "Resume with the tensor parallel degree of the run that saved it" in text


def under_aliases(source: ReadSource) -> ReadSource:
    """The same states under another name of each parameter."""
    states = {f"another.{name}": one for name, one in source.catalog.roles[OPTIMIZER_STATE].items()}
    catalog = structs.replace(source.catalog, roles={**source.catalog.roles, OPTIMIZER_STATE: states})
    return structs.replace(
        source, catalog=catalog, stored_aliases={f"another.{name}": name for name in source.mapping.sources}
    )


@pytest.mark.parametrize("fused", [True, False])
def test_numbers_of_shards_are_refused_where_tensors_are_fused_in_another_way(fused: bool) -> None:
    stored, wanted = llama("tp=1", fuse_attention_qkv=fused), llama("tp=1", fuse_attention_qkv=not fused)
    source, _ = resume_source(checkpoint_of(stored, MINI), wanted.rules)
    lines = list(regrouped(source))
    assert lines
    assert all("self_attn" in line and "elements are at other positions" in line for line in lines)
    assert list(regrouped(under_aliases(source))) == lines
    same, _ = resume_source(checkpoint_of(stored, MINI), stored.rules)
    assert not list(regrouped(same))


def test_numbers_of_shards_are_refused_where_tensors_are_divided_into_ranges() -> None:
    with pytest.raises(OptionError, match="this grid divides tensors into ranges"):
        plan_load(checkpoint_of(llama("tp=2"), MINI), "tp=2,sharding=2,split=true").plan()
