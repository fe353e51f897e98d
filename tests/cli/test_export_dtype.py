"""``export --dtype`` and ``--verify off``: other element types, and checkpoints without optimizer files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
from paddleformers_fc.families import ModelDescription
from tests.cli.support import SIZES, run, save
from tests.execute.simulated import CONFIG, Arrays, canonical, live, succeed

NORM = "model.norm.weight"
ARRAYS = {name: array / np.float32(3) for name, array in canonical().items()}


def save_half(directory: Path, masters: bool, tp: int = 2) -> Path:
    """A bfloat16 checkpoint of two tensor-parallel ranks; the final norm is float32, as a router would be."""

    def work(channel: Any) -> None:
        roles = live(ARRAYS, tp, channel.rank)
        lower = {
            name: one
            if name == NORM
            else SimpleNamespace(**{**vars(one), "local_tensor": one.local_tensor.cast("bfloat16")})
            for name, one in roles["model_state"].items()
        }
        saved = {"model_state": lower}
        if masters:
            whole = {f"{name}.w_0": one for name, one in roles["model_state"].items() if name != NORM}
            saved["master_weight"] = whole
        named = {**CONFIG, "torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}}
        files = {"config.json": config_bytes(named)} if channel.rank == 0 else {}
        save_checkpoint(directory, saved, ModelDescription(CONFIG), files, JobRecord(3, 24, {"tp": tp}), channel)

    succeed(tp, work)
    return directory


def exported(directory: Path, target: Path, *options: str) -> Arrays:
    """The tensors of an export."""
    outcome = run("export", directory, target, *options)
    assert outcome.code == 0, outcome.err
    return dict(load_file(target / "model.safetensors"))


def rounded(name: str) -> np.ndarray[Any, Any]:
    return ARRAYS[name] if name == NORM else ARRAYS[name].astype(ml_dtypes.bfloat16)


def test_float32_is_read_from_master_weights_bit_for_bit(tmp_path: Path) -> None:
    stored = save_half(tmp_path / "checkpoint-3", masters=True)
    found = exported(stored, tmp_path / "hf", "--dtype", "float32")
    assert found.keys() == ARRAYS.keys()
    assert all(np.array_equal(found[name], array) for name, array in ARRAYS.items())
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["torch_dtype"] == config["text_config"]["dtype"] == "float32"
    assert json.loads((stored / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert run("verify", tmp_path / "hf").code == 0


def test_float32_without_master_weights_has_the_stored_numbers(tmp_path: Path) -> None:
    found = exported(save_half(tmp_path / "checkpoint-3", masters=False), tmp_path / "hf", "--dtype", "float32")
    assert all(np.array_equal(found[name], rounded(name).astype(np.float32)) for name in ARRAYS)


def test_bfloat16_rounds_the_weights_of_a_float32_model(tmp_path: Path) -> None:
    one = save(tmp_path / "one", ARRAYS, config=SIZES)
    assert run("export", one, tmp_path / "hf", "--dtype", "bfloat16").code == 0
    found = run("export", one, tmp_path / "plain")
    assert found.code == 0
    rows = run("diff", tmp_path / "plain", tmp_path / "hf", "--json").document["roles"]["model_state"]["different"]
    assert {(row["a"]["dtype"], row["b"]["dtype"]) for row in rows} == {("float32", "bfloat16")}
    listed = run("inspect", tmp_path / "hf", "--json").document["roles"]["model_state"]
    assert listed["dtypes"] == {"bfloat16": len(ARRAYS)}


def test_the_stored_dtype_changes_no_byte(tmp_path: Path) -> None:
    stored = save_half(tmp_path / "checkpoint-3", masters=True)
    exported(stored, tmp_path / "plain")
    exported(stored, tmp_path / "same", "--dtype", "bfloat16")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "same")]
    assert files[0] == files[1]


def test_weights_are_exported_without_the_files_of_the_optimizer(copy: Path, four: Path, tmp_path: Path) -> None:
    shutil.rmtree(copy / "optimizer_state")
    outcome = run("export", copy, tmp_path / "checked", "--json")
    assert (outcome.code, outcome.document["error"]) == (1, "Corrupt")
    assert run("export", copy, tmp_path / "hf", "--verify", "off").code == 0
    assert run("export", four, tmp_path / "whole").code == 0
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "whole")]
    assert files[0] == files[1]


def test_a_missing_file_of_weights_is_refused_without_verification(copy: Path, tmp_path: Path) -> None:
    (copy / "model_state/rank-00001.safetensors").unlink()
    outcome = run("export", copy, tmp_path / "hf", "--verify", "off", "--json")
    assert (outcome.code, outcome.document["error"]) == (1, "Corrupt")
    assert not (tmp_path / "hf").exists()
