"""Save, load and export between layouts, with every rank in one process; every equality is bitwise."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddleformers_fc.distributed.channel import ALONE, Channel
from paddleformers_fc.errors import Corrupt, FormatError, MappingError, MismatchError
from paddleformers_fc.execute.live_export import save_weights
from paddleformers_fc.execute.load import load_checkpoint
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.phases import Phases, PhaseTimer, Slowest, rounded, slowest_of
from paddleformers_fc.execute.save import _write_tensors, config_bytes
from paddleformers_fc.execute.save_plan import PlannedFile, PlannedWrite
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.plan.simulate import SimulatedModel
from paddleformers_fc.storage.paths import LOCK_NAME
from paddleformers_fc.storage.safetensors import layout_file
from tests.execute.simulated import (
    ARRAYS,
    CONFIG,
    HIDDEN,
    MODEL,
    attempt,
    attempt_save,
    canonical,
    flex,
    job,
    live,
    load,
    same_values,
    save,
    succeed,
)
from tests.families.spaces import model_of
from verification import simulate_ranks
from verification.simulate_ranks import save_model

# Tensor-parallel degree and sharding degree of the optimizer; ranks are their product.
PAIRS = [
    ((1, 1), (2, 1)),
    ((2, 1), (1, 2)),
    ((1, 2), (2, 2)),
    ((2, 2), (1, 3)),
    ((1, 3), (1, 1)),
    ((2, 2), (2, 2)),
    ((1, 3), (2, 1)),
]


@pytest.mark.parametrize(("stored", "wanted"), PAIRS)
def test_a_resume_restores_every_bit_under_any_layout(
    tmp_path: Path, stored: tuple[int, int], wanted: tuple[int, int]
) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, *stored)
    load(tmp_path / "checkpoint-3", *wanted)


BESIDE_A_CHECKPOINT = ["checkpoint-3", "config.json", "flex_checksums.json", "model.safetensors"]


def export_live(target: Path) -> None:
    """Export a live model of two ranks."""

    def work(channel: Any) -> None:
        files = {"config.json": config_bytes(CONFIG)} if channel.rank == 0 else {}
        save_weights(live(ARRAYS, 2, channel.rank)["model_state"], MODEL, files, target, 10**9, channel)

    succeed(2, work)


def test_a_live_model_is_exported_into_the_output_directory_where_that_is_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "output"
    save(output / "checkpoint-3")
    rename = os.rename

    def refuse(source: Any, new: Any) -> None:
        if output in Path(new).parents and output not in Path(source).parents:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, new)

    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(os.path, "ismount", lambda path: os.fspath(path) == str(output))
    for _ in range(2):
        export_live(output)
    loaded = load_file(output / "model.safetensors")
    assert all(np.array_equal(loaded[key], ARRAYS[key]) for key in ARRAYS)
    assert sorted(path.name for path in output.iterdir()) == BESIDE_A_CHECKPOINT
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_an_export_that_is_there_does_not_fail_by_what_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "hf" / "checkpoint-3")  # The export writes into this directory, because it contains another one.
    unlink = os.unlink

    def refuse(path: Any) -> None:
        if ".removed-" in Path(path).parent.name and Path(path).name == LOCK_NAME:
            raise OSError(errno.EBUSY, "Device or resource busy")
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        export_live(tmp_path / "hf")
    assert any(".removed-" in path.name for path in (tmp_path / "hf").iterdir())
    export_live(tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == BESIDE_A_CHECKPOINT


@pytest.mark.parametrize("tp", [1, 2])
def test_other_files_of_a_checkpoint_may_have_names_that_are_not_utf8(tmp_path: Path, tp: int) -> None:
    output = tmp_path / os.fsdecode(b"out\xff")
    try:
        (output / "checkpoint-3").mkdir(parents=True)
    except OSError:
        pytest.skip("names are text on this file system")
    (output / "checkpoint-3" / "notes").write_text("theirs")
    ((kept,),) = {tuple(report.set_aside) for report in save(output / "checkpoint-3", ARRAYS, tp)}
    assert [path.name for path in kept.iterdir()] == ["notes"]
    load(output / "checkpoint-3", tp)


@pytest.mark.parametrize("verify", ["off", "size", "full"])
@pytest.mark.parametrize("what", ["", "model_state/rank-00000.safetensors"], ids=["checkpoint", "file"])
def test_a_file_replaced_between_check_and_read_is_rejected(tmp_path: Path, verify: str, what: str) -> None:
    place = tmp_path / "checkpoint-3"
    save(place)
    save(tmp_path / "checkpoint-4", canonical(seed=1))

    def work(channel: Any) -> None:
        checkpoint = open_on_all_ranks(place, channel, verify)
        if verify == "off" and what:
            checkpoint.catalog.identities[place / what]  # Its header is compared.
        (place / what).rename(tmp_path / "away")
        (tmp_path / "checkpoint-4" / what).rename(place / what)
        load_checkpoint(checkpoint, live(ARRAYS, 1, 0, empty=True), MODEL, channel)

    error = job(1, work).error(Corrupt)
    assert f"{what or 'flex_checkpoint.json'} was replaced or changed after it was checked" in str(error)


@pytest.mark.parametrize(
    ("layers", "of_the_model", "config", "lines"),
    [
        pytest.param(
            *(2, "model.embed_tokens.", {"model_type": "qwen2"}),
            ["the checkpoint is of family ernie4_5, the model is qwen2", "UNEXPECTED"],
            id="of another family, which is named before its consequences",
        ),
        pytest.param(
            *(2, "", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}),
            ["num_attention_heads: stored 4, expected 2", "num_key_value_heads: stored 2, expected 1"],
            id="of other heads, though every tensor has its shape",
        ),
        pytest.param(3, "", {}, ["UNEXPECTED", "model.layers.2.self_attn.qkv_proj.weight"], id="of fewer layers"),
        pytest.param(
            *(1, "", {}),
            ["MISSING", "model.layers.1.mlp.up_gate_proj.weight (itself, beta1_pow_acc_0"],
            id="of more layers",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_on_every_rank_before_a_weight_changes(
    tmp_path: Path, layers: int, of_the_model: str, config: dict[str, Any], lines: list[str]
) -> None:
    save(tmp_path / "checkpoint-3", canonical(layers=layers))
    arrays = {name: array for name, array in ARRAYS.items() if name.startswith(of_the_model)}
    described = ModelDescription({**CONFIG, **config})
    text = str(attempt(tmp_path / "checkpoint-3", 2, arrays=arrays, described=described).error(MismatchError))
    places = [text.find(line) for line in lines]
    assert -1 < places[0] < places[1], text


FUSED_NAMES = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.qkv_proj",
    "self_attn.o_proj",
    "mlp.up_gate_proj",
    "mlp.down_proj",
)


@pytest.mark.parametrize(("stored", "tp"), [(1, 1), (1, 2), (2, 1)])
def test_user_statements_move_a_layer_with_its_moments_and_leave_a_new_one_uninitialized(
    tmp_path: Path, stored: int, tp: int
) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, stored)
    names = [(f"model.layers.1.{name}.weight", f"model.layers.2.{name}.weight") for name in FUSED_NAMES]
    statements = [text for one, other in names for text in (f"{one} -> {other}", f"_ -> {one}")]
    moved = {name.replace("layers.1.", "layers.2."): array for name, array in ARRAYS.items()}
    new = {name: np.zeros_like(array) for name, array in ARRAYS.items() if "layers.1." in name}
    fill = flex(statements=statements)

    def work(channel: Any) -> None:
        roles, expected = (live({**moved, **new}, tp, channel.rank, empty) for empty in (True, False))
        fill(tmp_path / "checkpoint-3", roles, channel)
        for held in (roles, expected):  # The powers of the new layer are zero, not those of an optimizer.
            for name in [one for one in held["optimizer_state"] if "layers.1." in one and "pow_acc" in one]:
                del held["optimizer_state"][name]
        assert same_values(expected, roles)

    succeed(tp, work)


@pytest.mark.parametrize("joined", ["axis=0", "axis=1", "fused_ffn"])
@pytest.mark.parametrize(("stored", "tp"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_statements_that_split_a_fused_tensor_move_complete_parts_or_are_rejected(
    tmp_path: Path, stored: int, tp: int, joined: str
) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, stored)
    fused = "model.layers.1.mlp.up_gate_proj.weight"
    gate, up = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
    statements = [f"{fused} -> one, other, {joined}", f"other, one -> {fused}, {joined}"]
    if joined == "axis=1" and (stored, tp) != (1, 1):
        error = attempt(tmp_path / "checkpoint-3", tp, statements=statements).error(MappingError)
        assert "cut or join fused tensors across the groups" in error.what
        assert error.evidence[0].startswith(f"{fused}: ")
        assert " 2" in error.evidence[0]
        return
    beside = {name: np.roll(ARRAYS[name], HIDDEN // 2, axis=1) for name in (gate, up)}
    changed = beside if joined == "axis=0" else {gate: ARRAYS[up], up: ARRAYS[gate]}
    load(tmp_path / "checkpoint-3", tp, expected={**ARRAYS, **changed}, statements=statements)


def test_the_states_of_a_tied_parameter_are_saved_under_its_owner(tmp_path: Path) -> None:
    """Of two names of one memory the optimizer names the states after the one that sorts first."""
    owner, alias = "model.embed_tokens.weight", "lm_head.weight"
    held = live(ARRAYS, 1, 0)
    held["model_state"][alias] = held["model_state"][owner]
    states = held["optimizer_state"]
    held["optimizer_state"] = {name: state for name, state in states.items() if not name.startswith(owner)}
    tied = ModelDescription({**CONFIG, "tie_word_embeddings": True})
    attempt_save(tmp_path / "checkpoint-3", lambda _: held, 1, described=tied).results()
    stored = open_on_all_ranks(tmp_path / "checkpoint-3", ALONE).catalog.roles
    assert owner in stored["model_state"]
    assert f"{owner}.moment1_0" in stored["optimizer_state"]
    assert not [name for names in stored.values() for name in names if name.startswith(alias)]


def test_a_tensor_whose_size_changes_after_the_plan_is_not_saved(tmp_path: Path) -> None:
    layout = layout_file(tmp_path / "x", [("a", "F32", (4,)), ("b", "F32", (4,))], {})
    planned = PlannedFile("x", "model_state", layout, (PlannedWrite("a", 0, 4), PlannedWrite("b", 0, 4)))
    arrays = {"a": np.zeros(3, np.float32), "b": np.zeros(5, np.float32)}
    tensors = {name: lambda start, stop, array=array: iter([array]) for name, array in arrays.items()}
    with pytest.raises(FormatError, match=r"'a' was given 12 bytes, not 16"):
        _write_tensors(tmp_path, planned, tensors)


# ---- Where the time of a save or load went, and which rank took longest.


def test_the_coordinator_of_a_save_and_every_rank_of_a_load_know_the_rank_that_took_longest(tmp_path: Path) -> None:
    reports = save(tmp_path / "checkpoint-3", ARRAYS, 1, 3)
    assert {(*report.phases.seconds,) for report in reports} == {("plan", "capture", "write", "agree", "commit")}
    slowest = slowest_of("write", [one.phases.seconds["write"] for one in reports])
    assert [one.phases.slowest for one in reports] == [slowest, None, None]
    loads = load(tmp_path / "checkpoint-3", 1, 3)
    assert {(*report.phases.seconds,) for report in loads} == {("plan", "agree", "read", "finish")}
    slowest = slowest_of("read", [rounded(one.phases.seconds["read"]) for one in loads])
    assert {one.phases.slowest for one in loads} == {slowest}
    assert all(sum(one.phases.seconds.values()) <= one.seconds for one in loads)


def test_the_slowest_rank_is_the_first_with_most_seconds() -> None:
    assert slowest_of("write", [1.0, 3.0, 2.0, 3.0]) == Slowest("write", 1, 3.0)


@pytest.mark.parametrize(
    ("slowest", "text"),
    [
        (None, "plan 0.25 s, write 2.00 s"),
        (Slowest("write", 37, 4.4), "plan 0.25 s, write 2.00 s"),
        (Slowest("write", 37, 4.6), "plan 0.25 s, write 2.00 s (write on rank 37: 4.60 s)"),
    ],
)
def test_the_slowest_rank_is_shown_if_it_took_much_longer(slowest: Slowest | None, text: str) -> None:
    assert str(Phases({"plan": 0.25, "write": 2.0}, slowest)) == text


def test_a_phase_that_is_repeated_adds_up_and_earlier_seconds_count() -> None:
    timer = PhaseTimer({"open": 100.0})
    first, again, plan = timer.end("open"), timer.end("open"), timer.end("plan")
    assert 100 <= first <= again
    assert timer.phases() == Phases({"open": again, "plan": plan})
    assert again + plan <= timer.elapsed


# ---- A user's statements between models that were declared, over simulated ranks.


TINY = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "vocab_size": 32,
    "tie_word_embeddings": False,
}
LLAMA = {**TINY, "model_type": "llama"}
FUSED = {"fuse_attention_qkv": True, "fuse_attention_ffn": True}
GLM = {
    **TINY,
    "model_type": "glm4_moe",
    "is_fleet": True,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "num_nextn_predict_layers": 0,
}
NORM = "model.norm.weight"


def laid_out(grid: str, config: Mapping[str, Any]) -> SimulatedModel:
    """A tiny model in bfloat16 over a grid."""
    return simulate_ranks.laid_out(model_of(config), grid)


def load_with(
    directory: Path, model: SimulatedModel, statements: Sequence[str], reverse: bool = False, **options: Any
) -> list[simulate_ranks.Roles]:
    """What every rank holds after a load with statements; what is not loaded stays 7."""

    def sevens(role: str, shard: Shard) -> simulate_ranks.Array:
        return np.full_like(simulate_ranks.value_of(role, shard), 7)

    def work(channel: Channel) -> simulate_ranks.Roles:
        held = simulate_ranks.filled(model.roles(channel.rank), sevens)
        stated = {"aoa_statements": list(statements), "aoa_config_reverse": reverse}
        opened = open_on_all_ranks(directory, channel)
        load_checkpoint(opened, held, model.model, channel, aoa_config=stated, **options)
        return held

    return succeed(model.grid.world_size, work)


def bits(held: Sequence[simulate_ranks.Roles]) -> list[tuple[str, str, bytes]]:
    """The bits of every weight and state, rank by rank."""
    ranks = [(role, names) for roles in held for role, names in roles.items()]
    return [(role, name, one.local_tensor.array.tobytes()) for role, names in ranks for name, one in names.items()]


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        pytest.param({**LLAMA, **FUSED}, LLAMA, id="fused layers for single ones"),
        pytest.param(LLAMA, {**LLAMA, **FUSED}, id="single layers for fused ones"),
        pytest.param(GLM, {**GLM, "num_empty_layers_add_in_head": 1}, id="layers counted from another one"),
    ],
)
@pytest.mark.parametrize(("before", "after"), [("tp=2", "pp=2"), ("sharding=2,stage=3", "tp=2")])
def test_mappings_without_a_statement_are_derived_if_the_models_names_differ(
    tmp_path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any], before: str, after: str
) -> None:
    checkpoint, model = (
        save_model(tmp_path / "checkpoint-1", laid_out(before, stored)),
        laid_out(after, wanted),
    )
    found = load_with(checkpoint, model, [f"{NORM} -> {NORM}"])
    assert bits(found) == bits(simulate_ranks.load(checkpoint, model))


def test_a_tensor_that_a_statement_removes_is_not_derived(tmp_path: Path) -> None:
    checkpoint, model = (
        save_model(tmp_path / "checkpoint-1", laid_out("tp=2", {**LLAMA, **FUSED})),
        laid_out("tp=2", LLAMA),
    )
    with pytest.raises(MappingError, match=r"layers.0.mlp.gate_proj.weight: \[0:16, 0:32\] is not written") as caught:
        load_with(checkpoint, model, ["model.layers.0.mlp.gate_up_fused_proj.weight -> _"])
    assert caught.value.next_step.startswith("Correct the statements")


@pytest.mark.parametrize(
    ("attribute", "is_right"),
    [
        ("fused_qkv, num_heads=8, num_key_value_groups=4", True),
        # Query heads per kv head, which the attribute's name says.
        ("fused_qkv, num_heads=8, num_key_value_groups=2", False),
        ("fused_qkv, num_heads=16, num_key_value_groups=8", False),
        ("axis=1", False),
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_heads_that_would_mix_queries_with_keys_are_refused(
    tmp_path: Path, attribute: str, is_right: bool, reverse: bool
) -> None:
    fused, single = {**LLAMA, **FUSED}, LLAMA
    stored, wanted = (fused, single) if reverse else (single, fused)
    checkpoint, model = (
        save_model(tmp_path / "checkpoint-1", laid_out("tp=2", stored)),
        laid_out("pp=2", wanted),
    )
    layer = "model.layers.$LAYER_ID.self_attn."
    statement = (
        f"{layer}q_proj.weight, {layer}k_proj.weight, {layer}v_proj.weight -> {layer}qkv_proj.weight, {attribute}"
    )
    if is_right:
        found = load_with(checkpoint, model, [statement], reverse)
        assert bits(found) == bits(simulate_ranks.load(checkpoint, model))
        return
    with pytest.raises(MappingError, match="mix the parts of fused tensors") as refusal:
        load_with(checkpoint, model, [statement], reverse)
    assert refusal.value.evidence[0].startswith(
        "model.layers.{0...1}.self_attn.q_proj.weight: would contain parts of k_proj"
    )


def test_a_model_of_other_heads_is_refused_unless_statements_leave_all_attention_out(tmp_path: Path) -> None:
    checkpoint = save_model(tmp_path / "checkpoint-1", laid_out("tp=2", LLAMA))
    other = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = laid_out("tp=2", {**LLAMA, **other})
    with pytest.raises(MismatchError, match="num_attention_heads: stored 8, expected 4"):
        load_with(checkpoint, model, [f"{NORM} -> {NORM}"])
    attention = [name for name in (tensor.name for tensor in model.tensors) if "self_attn" in name]
    assert len(attention) == 8
    left_out = [statement for name in attention for statement in (f"{name} -> _", f"_ -> {name}")]
    with pytest.raises(MismatchError, match="num_key_value_heads: stored 4, expected 2"):
        load_with(checkpoint, model, left_out[2:])
    with pytest.raises(MismatchError, match="attention is computed differently"):
        load_with(checkpoint, model, left_out)
    weights = load_with(checkpoint, model, left_out, may_change=list(other))[1]["model_state"]
    untouched = {name for name, weight in weights.items() if np.all(weight.local_tensor.array == 7)}
    assert untouched == set(attention)
