"""``export`` writes Hugging Face files of any element type, and one md5 that no layout changes."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
from paddleformers_fc.families import ModelDescription
from tests.cli.support import SIZES, document_of, flip, md5_of, run, save
from tests.execute.simulated import CONFIG, Arrays, canonical, live, succeed

ARRAYS = canonical()


def md5_of_arrays() -> str:
    """The documented definition, over the weights that were saved."""
    lines = [f"{name} {hashlib.md5(ARRAYS[name].tobytes()).hexdigest()}\n" for name in sorted(ARRAYS)]
    return hashlib.md5("".join(lines).encode()).hexdigest()


@pytest.mark.parametrize(("layout", "size"), [((2, 2), "1GB"), ((1, 3), "8kB")])
def test_the_md5_is_the_same_for_every_layout_and_file_size(tmp_path: Path, layout: tuple[int, int], size: str) -> None:
    checkpoint = save(tmp_path / "checkpoint-3", ARRAYS, *layout)
    target = tmp_path / "export"
    document = run("export", checkpoint, target, "--max-shard-size", size, "--json").document
    assert document["md5"] == md5_of_arrays()
    written = {path.name: path.stat().st_size for path in target.glob("*.safetensors")}
    assert (len(written) > 1) is (size == "8kB")
    assert {file["name"]: file["bytes"] for file in document["files"]} == written
    assert document["tensors"] == len(ARRAYS)
    assert document["bytes"] == sum(array.nbytes for array in ARRAYS.values())
    text = run("export", checkpoint, tmp_path / "again", "--max-shard-size", size).out
    assert all(part in text for part in (*written, document["md5"]))


def test_weights_and_a_foreign_configuration_are_replaced_with_the_option(four: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    (tmp_path / "config.json").write_text('{"mine": 1}')
    assert run("export", four, tmp_path, "--replace").code == 0
    assert (tmp_path / "config.json").read_bytes() == (four / "config.json").read_bytes()
    assert run("diff", four, tmp_path).code == 0


def test_a_damaged_checkpoint_is_not_exported(copy: Path, tmp_path: Path) -> None:
    flip(copy / "model_state/rank-00000.safetensors", -1)
    target = tmp_path / "export"
    found = document_of("export", copy, target, code=1)
    assert found["error"] == "Corrupt"
    assert not target.exists()
    assert [path.name for path in tmp_path.iterdir()] == [copy.name]
    assert run("export", copy, tmp_path / "unchecked", "--verify", "size").code == 0


NORM = "model.norm.weight"
THIRDS = {name: array / np.float32(3) for name, array in canonical().items()}


def save_half(directory: Path, masters: bool, tp: int = 2) -> Path:
    """A bfloat16 checkpoint of two tensor-parallel ranks; the final norm is float32, as a router would be."""

    def work(channel: Any) -> None:
        roles = live(THIRDS, tp, channel.rank)
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
    outcome = run("export", directory, target, *options, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["md5"] == md5_of([(target / "model.safetensors").read_bytes()])
    return dict(load_file(target / "model.safetensors"))


def rounded(name: str) -> np.ndarray[Any, Any]:
    return THIRDS[name] if name == NORM else THIRDS[name].astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("masters", [True, False])
def test_float32_is_read_from_master_weights_or_has_the_stored_numbers(tmp_path: Path, masters: bool) -> None:
    stored = save_half(tmp_path / "checkpoint-3", masters)
    found = exported(stored, tmp_path / "hf", "--dtype", "float32")
    assert found.keys() == THIRDS.keys()
    for name, array in THIRDS.items():
        assert np.array_equal(found[name], array if masters else rounded(name).astype(np.float32))
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["torch_dtype"] == config["text_config"]["dtype"] == "float32"
    assert json.loads((stored / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert run("verify", tmp_path / "hf").code == 0


@pytest.mark.parametrize("spelling", ["bfloat16", "BF16", "torch.bfloat16", "paddle.bfloat16"])
def test_bfloat16_rounds_the_weights_of_a_float32_model(tmp_path: Path, spelling: str) -> None:
    one = save(tmp_path / "one", THIRDS, config=SIZES)
    found = exported(one, tmp_path / "hf", "--dtype", spelling)
    for name, array in THIRDS.items():
        wanted = array.astype(ml_dtypes.bfloat16)
        assert (found[name].dtype, found[name].tobytes()) == (wanted.dtype, wanted.tobytes())


def test_a_float16_model_is_exported_in_its_own_dtype_only(tmp_path: Path) -> None:
    half = {name: array.astype(np.float16) for name, array in THIRDS.items()}
    one = save(tmp_path / "one", half, config=SIZES)
    assert exported(one, tmp_path / "hf").keys() == half.keys()
    refused = run("export", one, tmp_path / "cast", "--dtype", "bf16")
    assert (refused.code, refused.err.splitlines()[0]) == (
        2,
        "The model's dtype float16 cannot be converted to bfloat16.",
    )


def test_the_stored_dtype_changes_no_byte(tmp_path: Path) -> None:
    stored = save_half(tmp_path / "checkpoint-3", masters=True)
    exported(stored, tmp_path / "plain")
    exported(stored, tmp_path / "same", "--dtype", "bfloat16")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "same")]
    assert files[0] == files[1]


def test_weights_need_their_own_files_and_none_of_the_optimizer(copy: Path, four: Path, tmp_path: Path) -> None:
    shutil.rmtree(copy / "optimizer_state")
    assert document_of("export", copy, tmp_path / "checked", code=1)["error"] == "Corrupt"
    exported(copy, tmp_path / "hf", "--verify", "off")
    exported(four, tmp_path / "whole")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "whole")]
    assert files[0] == files[1]
    (copy / "model_state/rank-00001.safetensors").unlink()
    assert document_of("export", copy, tmp_path / "none", "--verify", "off", code=1)["error"] == "Corrupt"
    assert not (tmp_path / "none").exists()
