"""Save, load and export between layouts, with every rank in one process; every equality is bitwise."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddleformers_fc.distributed.channel import ALONE
from paddleformers_fc.errors import Corrupt, FormatError, MappingError, MismatchError
from paddleformers_fc.execute.live_export import save_weights
from paddleformers_fc.execute.load import load_checkpoint
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.phases import Phases, PhaseTimer, Slowest, rounded, slowest_of
from paddleformers_fc.execute.save import _write_tensors, config_bytes
from paddleformers_fc.execute.save_plan import PlannedFile, PlannedWrite
from paddleformers_fc.families import ModelDescription
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
