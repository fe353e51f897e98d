"""Checkpoints that were saved before a description of the model was stored, as that version wrote them.

``tests/cli/stripped`` holds what was saved then. The mapping of each was derived from ``config.json``, which lacks
empty layers, the fusion of experts and the class of the model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddleformers_fc.distributed.channel import ALONE
from paddleformers_fc.errors import MappingError
from paddleformers_fc.execute.digest import canonical_digests
from paddleformers_fc.execute.load import load_checkpoint
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.families import Family, ModelDescription, ModelTensor, family_for
from paddleformers_fc.families.changes import config_changes
from paddleformers_fc.families.declarations import declared, linear, only, same
from paddleformers_fc.families.mapping_document import completed
from paddleformers_fc.formats.flex import open_flex
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.plan.simulate import declared_model
from paddleformers_fc.plan.sources import described_model, stored_mapping
from paddleformers_fc.storage import leftovers
from paddleformers_fc.storage.manifest import read_manifest, verify_files
from tests.cli.support import run, seal
from verification import simulate_ranks

STRIPPED = Path(__file__).parent / "stripped"
TRAINED = Path(__file__).parents[1] / "trainer/older/checkpoint-3"
"""A checkpoint that a Trainer saved, with the description of its live model."""
RIGHT = ("glm4_moe", "llama", "minimax_m2_fused", "qwen2_moe_plain")
WRONG = ("glm4_moe_one_empty_layer", "qwen2_moe_plain_square_router")


def copied(name: str, directory: Path) -> Path:
    """A checkpoint of its own for a test, under a name that checkpoints have."""
    target = directory / "checkpoint-3"
    shutil.copytree(STRIPPED / name, target)
    return target


def live(checkpoint: Path, is_fleet: bool, changes: Mapping[str, Any]) -> simulate_ranks.Roles:
    """The weights of a model of the checkpoint's configuration on one rank, filled from it."""
    config = {**json.loads((checkpoint / "config.json").read_text()), **changes}
    model = ModelDescription(config, is_fleet)
    roles = {"model_state": declared_model(family_for(config), model, parse_grid("dp=1")).weights(0)}
    held = simulate_ranks.filled(roles, lambda role, shard: np.zeros(shard.global_shape, np.float32))
    load_checkpoint(open_on_all_ranks(checkpoint, ALONE), held, model, ALONE)
    return held


@pytest.mark.parametrize("name", RIGHT)
def test_a_mapping_that_does_not_depend_on_the_absent_keys_is_used_as_it_is(name: str) -> None:
    checkpoint = open_flex(STRIPPED / name, "full")
    assert checkpoint.model is None
    stored_mapping(checkpoint)
    found = described_model(checkpoint)
    assert found.is_fleet is {"llama": None, "qwen2_moe_plain": False}.get(name, name != "minimax_m2_fused" or None)
    assert found.config.get("moe_expert_fusion", False) is (name == "minimax_m2_fused")
    assert list(canonical_digests(STRIPPED / name))


@pytest.mark.parametrize(
    ("name", "is_fleet", "changes"),
    [
        ("glm4_moe", True, {}),
        ("glm4_moe", True, {"num_empty_layers_add_in_head": 2}),
        ("qwen2_moe_plain", False, {}),
        ("qwen2_moe_plain", True, {}),
        ("minimax_m2_fused", True, {"moe_expert_fusion": True}),
        ("minimax_m2_fused", True, {"moe_expert_fusion": False}),
        ("minimax_m2_fused", True, {"using_sonic_moe": True}),
    ],
    ids=str,
)
def test_such_a_checkpoint_fills_a_model_of_any_class_and_layout(
    name: str, is_fleet: bool, changes: dict[str, Any], tmp_path: Path
) -> None:
    held = live(STRIPPED / name, is_fleet, changes)
    config = {**json.loads((STRIPPED / name / "config.json").read_text()), **changes}
    model = declared_model(family_for(config), ModelDescription(config, is_fleet), parse_grid("dp=1"))
    simulate_ranks.save(tmp_path / "checkpoint-4", [held], model)
    assert list(canonical_digests(tmp_path / "checkpoint-4")) == list(canonical_digests(STRIPPED / name))


@pytest.mark.parametrize("name", WRONG)
def test_a_mapping_that_the_absent_keys_made_wrong_is_refused_everywhere_with_the_command(
    name: str, tmp_path: Path
) -> None:
    checkpoint = copied(name, tmp_path)
    command = f"paddleformers-fc rederive {checkpoint}"
    empty = {"num_empty_layers_add_in_head": 1} if "empty" in name else {}
    with pytest.raises(MappingError) as raised:
        live(checkpoint, "glm" in name, empty)
    assert command in raised.value.next_step
    assert str(checkpoint) in raised.value.what
    assert ("num_empty_layers_add_in_head" if empty else "the class of the model") in raised.value.what
    for arguments in (
        ("verify", checkpoint),
        ("export", checkpoint, tmp_path / "hf"),
        ("diff", checkpoint, STRIPPED / "glm4_moe"),
        ("plan", checkpoint, "--to", "tp=1"),
    ):
        outcome = run(*map(str, arguments))
        assert outcome.code == 1, arguments
        assert command in outcome.out + outcome.err, arguments
    assert not (tmp_path / "hf").exists()


def test_the_command_stores_a_mapping_that_fits_the_tensors_and_touches_nothing_else(tmp_path: Path) -> None:
    checkpoint = copied("glm4_moe_one_empty_layer", tmp_path)
    (checkpoint / "notes.txt").write_text("mine")
    before = {path: path.stat().st_ino for path in checkpoint.rglob("*.safetensors")}
    outcome = run("rederive", str(checkpoint))
    assert outcome.code == 0, outcome.err
    assert "is_fleet=true, moe_expert_fusion=false, num_empty_layers_add_in_head=1" in outcome.out
    assert {path: path.stat().st_ino for path in checkpoint.rglob("*.safetensors")} == before
    assert (checkpoint / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    (checkpoint / "notes.txt").unlink()
    verify_files(checkpoint, read_manifest(checkpoint), "full")
    opened = open_flex(checkpoint)
    assert opened.model is not None
    assert opened.model.config["num_empty_layers_add_in_head"] == 1
    # Its numbers are those that the live model had: layer 1 of the model is canonical layer 0.
    stored = load_file(next((checkpoint / "model_state").iterdir()))
    run("export", str(checkpoint), str(tmp_path / "hf"))
    exported = load_file(tmp_path / "hf/model.safetensors")
    down = "mlp.down_proj.weight"
    assert np.array_equal(exported[f"model.layers.0.{down}"], stored[f"model.layers.1.{down}"].T)
    held = live(checkpoint, True, {"num_empty_layers_add_in_head": 0})["model_state"]
    assert np.array_equal(held[f"model.layers.0.{down}"].local_tensor.array, stored[f"model.layers.1.{down}"])
    assert run("rederive", str(checkpoint)).code == 0


def test_a_checkpoint_with_a_description_that_fits_is_left_as_it_is(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-3"
    shutil.copytree(TRAINED, checkpoint)
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in checkpoint.rglob("*") if path.is_file()}
    for settings in ((), ("is_fleet=false",)):
        outcome = run("rederive", str(checkpoint), *settings)
        assert (outcome.code, "nothing to change" in outcome.out) == (0, True), outcome
        assert run("rederive", str(checkpoint), *settings, "--json").document["written"] is False
    assert {path: (path.stat().st_ino, path.read_bytes()) for path in before} == before


def test_a_description_keeps_its_keys_beside_the_ones_that_are_set(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-3"
    shutil.copytree(TRAINED, checkpoint)
    outcome = run("rederive", str(checkpoint), "moe_expert_fusion=true")
    assert (outcome.code, "nothing to change" in outcome.out) == (0, False), outcome
    saved, found = open_flex(TRAINED).model, open_flex(checkpoint).model
    assert saved is not None
    assert found == replace(saved, config={**saved.config, "moe_expert_fusion": True})
    assert config_changes(found, saved, complete=True) == []


def test_a_description_that_is_made_of_a_file_is_not_taken_for_a_complete_one(tmp_path: Path) -> None:
    checkpoint = copied("llama", tmp_path)
    assert run("rederive", str(checkpoint), "--json").document["written"] is True
    found = open_flex(checkpoint).model
    assert found is not None
    assert found.partial
    held = live(checkpoint, False, {"gated_linear_unit": True, "softmax_type": "vanilla"})
    assert sorted(held) == ["model_state"]


def test_a_plain_model_with_as_many_experts_as_hidden_units_has_its_router_turned_again(tmp_path: Path) -> None:
    checkpoint = copied("qwen2_moe_plain_square_router", tmp_path)
    assert run("rederive", str(checkpoint)).code == 0
    stored = load_file(next((checkpoint / "model_state").iterdir()))
    run("export", str(checkpoint), str(tmp_path / "hf"))
    exported = load_file(tmp_path / "hf/model.safetensors")
    gate = "model.layers.1.mlp.gate.weight"
    assert np.array_equal(exported[gate], stored[gate].T)


def test_a_value_that_contradicts_the_tensors_and_a_key_that_is_not_absent_are_refused(tmp_path: Path) -> None:
    checkpoint = copied("glm4_moe_one_empty_layer", tmp_path)
    before = (checkpoint / "mapping.json").read_bytes()
    for settings, message in (
        ("num_empty_layers_add_in_head=0", "is the canonical"),
        ("is_fleet=false", "has no such tensor"),
        ("moe_expert_fusion=true", "has no such tensor"),
        ("hidden_size=16", "is not KEY=VALUE with a key that config.json lacks"),
        ("is_fleet=perhaps", "neither true, false nor a number"),
    ):
        outcome = run("rederive", str(checkpoint), settings)
        assert outcome.code != 0, settings
        assert message in outcome.err, settings
    assert (checkpoint / "mapping.json").read_bytes() == before


def test_square_experts_are_recognised_by_a_layer_that_is_not_square(tmp_path: Path) -> None:
    for switches in ({"moe_expert_fusion": True}, {"using_sonic_moe": True}):
        config = json.loads((STRIPPED / "minimax_m2_fused/config.json").read_text())
        square = ModelDescription({**config, "moe_intermediate_size": 4, **switches}, True)
        model = declared_model(family_for(config), square, parse_grid("dp=1"))
        older = tmp_path / f"{'-'.join(switches)}/checkpoint-5"
        older.parent.mkdir()
        simulate_ranks.save(
            older, [simulate_ranks.filled({"model_state": model.weights(0)}, simulate_ranks.value_of)], model
        )
        right = list(canonical_digests(older))
        make_older(older, ("moe_expert_fusion", "using_sonic_moe"))
        assert list(canonical_digests(older)) == right
        assert described_model(open_flex(older)).config["using_sonic_moe"] is ("using_sonic_moe" in switches)


def test_tensors_that_leave_a_key_open_are_refused_with_the_values_that_would_settle_it() -> None:
    weight = "model.weight"
    family = Family(
        "probe",
        ("probe",),
        declared(
            only("moe_expert_fusion", linear(weight, shape=("hidden", "hidden"))),
            only("not moe_expert_fusion", same(weight, shape=("hidden", "hidden"))),
        ),
    )
    tensors = [ModelTensor(weight, (4, 4), "float32", (1, 1))]
    with pytest.raises(MappingError) as raised:
        completed(family, ModelDescription({"hidden_size": 4}), tensors)
    assert raised.value.evidence == ("moe_expert_fusion=false", "moe_expert_fusion=true")
    known = ModelDescription({"hidden_size": 4, "moe_expert_fusion": True})
    assert completed(family, known, tensors)[1].rules[0].axes == (1, 0)


def make_older(checkpoint: Path, keys: tuple[str, ...]) -> None:
    """Turn a checkpoint into one of the older format, whose configuration file lacks some keys."""
    document = json.loads((checkpoint / "mapping.json").read_text())
    (checkpoint / "mapping.json").write_text(json.dumps(document["rules"]))
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in keys}))
    seal(checkpoint)


def test_an_interrupted_command_leaves_the_checkpoint_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = copied("glm4_moe_one_empty_layer", tmp_path)
    before = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}

    def refuse(*_: object) -> None:
        raise OSError(5, "input/output error")

    for name in ("link", "rename"):
        with monkeypatch.context() as broken:
            broken.setattr(os, name, refuse)
            assert run("rederive", str(checkpoint)).code == 2
        after = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
        assert after == before
        assert all(one.disposable or one.why for one in leftovers.unfinished(tmp_path))
