"""Simulated layouts: equal to the live ones tensor by tensor, whole and once, refused with the numbers."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import paddle
import pytest

from paddleformers_fc.errors import MappingError, OptionError
from paddleformers_fc.families import family_for
from paddleformers_fc.formats.catalog import gather_shards
from paddleformers_fc.layout.grid import ParallelGrid, parse_grid
from paddleformers_fc.layout.live import describe_roles
from paddleformers_fc.layout.roles import split_state_name
from paddleformers_fc.mapping import TensorSpec, prove
from paddleformers_fc.plan.simulate import declared_model, stored_model
from tests.families.spaces import BY_NAME, model_of, settings
from tests.harness import tiny
from tests.harness.on_ranks import on_ranks, run_on_ranks
from tests.harness.tiny import MatrixLayout
from verification.forkserver import ForkServer

TIED = {"tie_word_embeddings": True}
ERNIE = "ernie4_5_moe"
LLAMA_LAYOUTS = [
    *(tiny.DP2, tiny.SD2V1, tiny.SD2V2, tiny.TP2PP2, tiny.SD2S2, tiny.SD2S3, tiny.TP2SD2V2),
    *(replace(layout, bf16=True) for layout in (tiny.SD2V2, tiny.SD2V1, tiny.SD2S3)),
    MatrixLayout("tp2sd2v1", nproc=4, tp=2, sharding=2),
    MatrixLayout("tp2pp2sd2v2", nproc=8, tp=2, pp=2, sharding=2, split_param=True),
]
ERNIE_LAYOUTS = [
    *(tiny.SD2V1, tiny.EP2, tiny.SD2S2, tiny.TP2EP2PP2, replace(tiny.SD2V2, bf16=True)),
    MatrixLayout("tp2ep2", nproc=2, tp=2, ep=2),
    MatrixLayout("sd4ep2", nproc=4, sharding=4, split_param=True, ep=2),
    MatrixLayout("sd2tp2ep2", nproc=4, tp=2, sharding=2, split_param=True, ep=2),
    MatrixLayout("pp2sd4ep2", nproc=8, pp=2, sharding=4, split_param=True, ep=2),
]
CASES: list[tuple[str, MatrixLayout, dict[str, Any]]] = [
    *(("llama", layout, {}) for layout in LLAMA_LAYOUTS),
    *((ERNIE, layout, {"moe_use_aux_free": True}) for layout in ERNIE_LAYOUTS),
    (ERNIE, tiny.SD2V2, {"num_nextn_predict_layers": 1}),
    ("llama", tiny.PP4VPP2, {"num_hidden_layers": 8}),
    ("llama", tiny.PP4VPP2, {"num_hidden_layers": 6, "num_empty_layers_add_in_tail": 2}),
    ("llama", MatrixLayout("pp4", nproc=4, pp=4), {"num_hidden_layers": 2}),
    ("llama", tiny.PP2, {"num_hidden_layers": 3}),
    *(("llama", layout, TIED) for layout in (tiny.PP2, tiny.SD2V1, tiny.SD2V2)),
    (ERNIE, tiny.SINGLE, TIED),
]


def grid_of(layout: MatrixLayout) -> ParallelGrid:
    """The grid of a live layout, with the segments and alignment that the live ranks have."""
    # Stage 3 asks what the device wants, and the others take it for an accelerator.
    return replace(layout.grid, slice_above=tiny.SEGMENT, alignment=4096 if layout.stage == 3 else 256)


@pytest.mark.parametrize(
    ("model_type", "layout", "model"),
    CASES,
    ids=lambda value: value.name + ("-bf16" if value.bf16 else "") if isinstance(value, MatrixLayout) else None,
)
def test_a_simulated_layout_is_the_live_one(
    ranks: ForkServer, tmp_path: Path, model_type: str, layout: MatrixLayout, model: dict[str, Any]
) -> None:
    given = {"model_type": model_type, "layout": layout, "model": model, "output_dir": tmp_path}
    run_on_ranks(ranks, layout.nproc, compare_with_live, **given)


def compare_with_live(model_type: str, layout: MatrixLayout, model: dict[str, Any], output_dir: Path) -> None:
    """Train one step under a layout on this rank, and compare its shards with those of the simulated rank."""
    from paddleformers_fc.trainer import optimizers

    # Multi-token prediction with its packing offsets takes one sample at a time.
    micro_batch = 1 if model.get("num_nextn_predict_layers") else None
    args = tiny.training_arguments(layout, output_dir, micro_batch, max_steps=1)
    built = tiny.build(model_type, layout, args, **model)
    trainer = tiny.trainer(built, args)
    trainer.train()
    weights = built.sharded_state_dict()
    if layout.stage == 3:
        states = optimizers.sharded_states(trainer.optimizer, weights)
        weights = optimizers.cut(weights)
    else:
        states = trainer.optimizer.sharded_state_dict(weights)
    plain = (str, int, float, bool, type(None))
    config = {key: value for key, value in built.config.to_dict().items() if isinstance(value, plain)}
    config = {"model_type": model_type, **config}
    dtype = "bfloat16" if layout.bf16 else "float32"
    simulated = declared_model(family_for(config), model_of(config), grid_of(layout), dtype)
    assert simulated.roles(paddle.distributed.get_rank()) == describe_roles(tiny.by_role(weights, states))


@on_ranks(2)
def test_experts_of_both_modalities_are_on_the_live_ranks_of_the_simulated_ones(tmp_path: Path) -> None:
    from tests.families import jobs

    family = family_for({"model_type": "ernie4_5_moe_vl"})
    config = settings(family)
    values = {key: value for key, value in config.items() if key != "model_type"}
    values |= {"moe_group": "world", "fuse_rms_norm": False, "moe_k": 2, "pixel_hidden_size": 16}
    values["tie_word_embeddings"] = False
    tiny.training_arguments(tiny.DP2, tmp_path)  # It starts the groups of ranks.
    live = describe_roles({"model_state": jobs.plain_model(family.name, values).sharded_state_dict()})["model_state"]
    simulated = declared_model(family, model_of(config), parse_grid("sharding=2,split=true,ep=2"))
    rank = paddle.distributed.get_rank()
    expected = {name: one.box.shape for name, one in simulated.weights(rank).items()}
    assert {name: one.global_shape for name, one in live.items()} == expected
    numbers = {name.split(".")[5] for name in live if ".layers.1.mlp.experts." in name}
    assert numbers == ({"0", "1", "4", "5"} if rank == 0 else {"2", "3", "6", "7"})


GRIDS = (
    "dp=3",
    "tp=2,pp=2,dp=2",
    "pp=4,sharding=3",
    "sharding=4",
    "sharding=4,split=true,tp=2",
    "sharding=3,split=true,pp=4,buffer=1",
    "sharding=3,stage=2",
    "sharding=4,stage=3,slice_above=100",
    "ep=4,sharding=4,split=true",
    "ep=4,tp=2,sharding=4,split=true,pp=2",
    "tp=2,ep=2,pp=2,pp_first=true",
)


@pytest.mark.sampled
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["llama", ERNIE, "qwen3_moe", "ernie4_5_moe_vl"])
def test_every_tensor_element_is_held_exactly_once(model_type: str, dtype: str, grid: str) -> None:
    if "ep=" in grid and model_type == "llama":
        model_type = "qwen2_moe"
    family = family_for({"model_type": model_type})
    config = settings(family, num_hidden_layers=4)
    model = declared_model(family, model_of(config), parse_grid(grid), dtype)
    prove(model.rules.mapping(), "The simulated model's mapping")
    everyone = [model.roles(rank) for rank in range(model.grid.world_size)]
    for role in {role for roles in everyone for role in roles}:
        distinct = {shard for roles in everyone for shard in roles.get(role, {}).values()}
        assert not [shard for shard in distinct if shard.flat and shard.flat[1] > prod(shard.box.shape)]
        tensors, contradictions = gather_shards((shard, "here", 0, 4) for shard in distinct)
        assert not contradictions
        assert not [fault for tensor in tensors.values() for fault in tensor.faults()]
        assert {split_state_name(role, name).parameter for name in tensors} <= set(model.rules.targets)


@pytest.mark.parametrize("family", BY_NAME.values(), ids=lambda family: family.name)
def test_every_family_is_laid_out(family: Any) -> None:
    model = declared_model(family, model_of(settings(family)), parse_grid("tp=2,pp=2"))
    everything = {name for rank in range(4) for name in model.weights(rank)}
    assert everything == {tensor.name for tensor in model.tensors}
    alone = declared_model(family, model_of(settings(family)), ParallelGrid())
    left = {tensor.name for tensor in alone.tensors} - everything
    assert all(name.startswith("model.mtp_") for name in left)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 60,
    "intermediate_size": 90,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "vocab_size": 64,
}
MOE = {**family_for({"model_type": ERNIE}).tiny, "model_type": ERNIE}
VISION_MOE = settings(family_for({"model_type": "ernie4_5_moe_vl"}))


@pytest.mark.parametrize(
    ("config", "grid", "message"),
    [
        (LLAMA, "tp=2", "num_key_value_heads=3 is not divisible by tp=2"),
        (LLAMA, "tp=4", "num_attention_heads=6 is not divisible by tp=4"),
        (LLAMA, "tp=3", "vocab_size=64 is not divisible by tp=3"),
        (LLAMA, "tp=4", "mlp.gate_proj.weight: 90 on axis 1 is not divisible by tp=4"),
        (LLAMA, "pp=10", "6 layers, embedding, norm and head are 9 items, fewer than pp=10"),
        (LLAMA, "pp=4,vpp=2", "6 layers, empty ones included, are not divisible by pp x vpp = 4 x 2 = 8"),
        ({**LLAMA, "pp_seg_method": "layer:Own"}, "pp=4", "6 layers, empty ones included, are not divisible"),
        ({**LLAMA, "pp_seg_method": "[0, 9, 3]"}, "pp=2", "[0, 9, 3] does not distribute 9 items to 2 parts"),
        ({**LLAMA, "pp_seg_method": "[0, 3.5, 9]"}, "pp=2", "[0, 3.5, 9] is not a list of integers"),
        ({**LLAMA, "pp_seg_method": "[1,"}, "pp=2", "[1, is not a list of integers"),
        ({**LLAMA, "num_empty_layers_add_in_head": -5}, "pp=2", "num_empty_layers_add_in_head=-5 is not a number"),
        (LLAMA, "ep=2,sharding=2,split=true", "ep=2: the model has no experts"),
        (MOE, "ep=3,sharding=3,split=true", "the number of experts=4 is not divisible by ep=3"),
        (VISION_MOE, "ep=8,sharding=8,split=true", "the number of experts=4 is not divisible by ep=8"),
        ({**MOE, "intermediate_size": 15}, "tp=2", "mlp.down_proj.weight: 15 on axis 0 is not divisible by tp=2"),
    ],
)
def test_a_grid_that_the_model_cannot_have_is_refused_with_the_numbers(
    config: dict[str, Any], grid: str, message: str
) -> None:
    with pytest.raises(OptionError) as raised:
        declared_model(family_for(config), model_of(config), parse_grid(grid))
    assert any(message in line for line in raised.value.evidence)


def test_a_layout_is_the_boxes_of_its_ranks_and_not_its_name() -> None:
    def ranks(config: dict[str, Any], grid: str) -> list[Any]:
        model = declared_model(family_for(config), model_of(config), parse_grid(grid))
        return [model.roles(rank) for rank in range(model.grid.world_size)]

    large, even = {**LLAMA, "hidden_size": 512, "vocab_size": 4096}, {**LLAMA, "num_key_value_heads": 6}
    assert ranks(large, "sharding=2,split=true") != ranks(large, "sharding=2,split=true,buffer=1")
    assert ranks(LLAMA, "sharding=2,split=true") == ranks(LLAMA, "sharding=2,split=true,buffer=512")
    assert ranks(LLAMA, "pp=2") != ranks({**LLAMA, "pp_seg_method": "[0, 3, 9]"}, "pp=2")
    assert ranks(LLAMA, "pp=2") == ranks({**LLAMA, "pp_seg_method": "[0, 4, 9]"}, "pp=2")
    assert ranks(LLAMA, "dp=2") != ranks(LLAMA, "sharding=2")
    assert ranks(even, "dp=2") != ranks(even, "tp=2")
    assert ranks(LLAMA, "dp=2") == ranks({**LLAMA, "rms_norm_eps": 1}, "dp=2,pp_first=true")


def test_a_saved_model_is_laid_out_by_its_own_tensors_whatever_its_configuration() -> None:
    built = declared_model(family_for(LLAMA), model_of(LLAMA), ParallelGrid())
    config = {**LLAMA, "fuse_attention_qkv": True, "fuse_attention_ffn": True}
    model = stored_model(family_for(LLAMA), model_of(config), parse_grid("pp=2"), built.rules.targets)
    assert {name for rank in range(2) for name in model.weights(rank)} == set(built.weights(0))


def test_a_saved_tensor_that_no_family_declares_is_named() -> None:
    specs = {
        **declared_model(family_for(LLAMA), model_of(LLAMA), ParallelGrid()).rules.targets,
        "model.odd": TensorSpec((1,), "float32"),
    }
    with pytest.raises(MappingError) as raised:
        stored_model(family_for(LLAMA), model_of(LLAMA), ParallelGrid(), specs)
    assert raised.value.evidence == ("model.odd",)


def test_a_pipeline_does_not_build_prediction_blocks_and_one_rank_does() -> None:
    config = {**MOE, "num_nextn_predict_layers": 1}
    piped = declared_model(family_for(MOE), model_of(config), parse_grid("pp=2"))
    alone = stored_model(family_for(MOE), model_of(config), ParallelGrid(), piped.rules.targets)
    assert not [name for name in piped.rules.targets if "mtp" in name]
    assert [name for name in alone.weights(0) if "mtp" in name]
