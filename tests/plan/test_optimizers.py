"""States that nothing declares are planned by their names and shapes; numbers of shards only under equal cuts."""

from __future__ import annotations

import pytest
from msgspec import structs

from paddleformers_fc.errors import MismatchError, OptionError
from paddleformers_fc.families import ModelDescription, family_for
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
from paddleformers_fc.plan.build import ReadSource, plan_reads
from paddleformers_fc.plan.forecast import PlannedLoad, plan_load
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model
from paddleformers_fc.plan.sources import regrouped, resume_source
from tests.plan.stored import checkpoint_of

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


def laid_out(grid: str, **config: object) -> SimulatedModel:
    return declared_model(family_for(CONFIG), ModelDescription({**CONFIG, **config}), parse_grid(grid), "bfloat16")


def test_states_without_a_declaration_are_planned_under_another_layout() -> None:
    wanted = laid_out("tp=2,pp=2")
    source, report = resume_source(checkpoint_of(laid_out("sharding=2,split=true"), UNKNOWN), wanted.rules)
    found = PlannedLoad(source, wanted, report).plan()
    for rank in found.ranks:
        roles = wanted.roles(rank.rank, UNKNOWN)
        plan = plan_reads(source, roles)
        assert not plan.report.lines
        assert rank.items == len(plan.items)
        states = [split_state_name("optimizer_state", *one) for one in _shapes(roles["optimizer_state"])]
        assert {(one.suffix, one.scalar) for one in states} == {
            (".velocity_of_test_0", False),
            (".count_of_test_0", True),
        }
        assert len(states) == 2 * len(roles["master_weight"]) == 2 * len(roles["model_state"])
    assert not found.dropped
    assert not found.fresh


def _shapes(shards: object) -> list[tuple[str, tuple[int, ...]]]:
    assert isinstance(shards, dict)
    return [(shard.name, shard.global_shape) for shard in shards.values()]


def test_numbers_of_shards_are_planned_under_every_layout_that_cuts_tensors_alike() -> None:
    checkpoint = checkpoint_of(laid_out("tp=2,sharding=2"), MINI)
    found = plan_load(checkpoint, "tp=2,pp=2").plan()
    assert not found.dropped
    assert not found.fresh


def test_numbers_of_shards_are_refused_where_tensors_are_cut_in_another_way() -> None:
    with pytest.raises(MismatchError) as refused:
        plan_load(checkpoint_of(laid_out("tp=2"), MINI), "tp=1").plan()
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
    stored, wanted = laid_out("tp=1", fuse_attention_qkv=fused), laid_out("tp=1", fuse_attention_qkv=not fused)
    source, _ = resume_source(checkpoint_of(stored, MINI), wanted.rules)
    lines = list(regrouped(source))
    assert lines
    assert all("self_attn" in line and "elements are at other positions" in line for line in lines)
    assert list(regrouped(under_aliases(source))) == lines
    same, _ = resume_source(checkpoint_of(stored, MINI), stored.rules)
    assert not list(regrouped(same))


def test_numbers_of_shards_are_refused_where_tensors_are_divided_into_ranges() -> None:
    with pytest.raises(OptionError, match="this grid divides tensors into ranges"):
        plan_load(checkpoint_of(laid_out("tp=2"), MINI), "tp=2,sharding=2,split=true").plan()
