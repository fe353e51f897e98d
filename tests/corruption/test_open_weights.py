"""Directories of open weights: read when they are not whole, and written where others lie."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from paddleformers_fc.errors import FlexError, StorageError
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME
from tests.corruption import commands, jobs, ours
from tests.corruption.guarantees import Seen, fault, raised
from tests.execute.simulated import Arrays
from tests.harness.on_ranks import run_on_ranks
from tests.storage.support import flip
from verification.demo.assets import prepare
from verification.forkserver import ForkServer

INDEX = "model.safetensors.index.json"
Stock = tuple[Path, dict[str, float]]


@pytest.fixture(scope="module")
def stock_weights(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """A Llama that stock has exported in several files, and the sum of every tensor."""
    directory = tmp_path_factory.mktemp("stock")
    return directory, run_on_ranks(ranks, 1, jobs.export, directory=directory, seeds=[0])[0][0]


@pytest.fixture(scope="module")
def our_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated model, exported by us in several files."""
    directory = tmp_path_factory.mktemp("ours")
    export_checkpoint(ours.save(directory / "checkpoint-3"), directory / "hf", 4000)
    return directory / "hf"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The weights of a tiny Llama in one file, with a corpus beside the directory."""
    return prepare(tmp_path / "assets").models["llama"]


def edit_config(directory: Path, **keys: Any) -> None:
    """Change keys of a ``config.json``."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def loaded(ranks: ForkServer, *directories: Path, **model: Any) -> list[dict[str, Any]]:
    """What stock's ``from_pretrained`` makes of directories, one after the other in one process."""
    found = run_on_ranks(ranks, 1, jobs.pretrained, directories=list(map(str, directories)), model=model)
    return list(found[0])


def copy(source: Path, target: Path, damage: Callable[[Path], object] = lambda path: None) -> Path:
    """A copy with something changed, and without checksums, as open weights of another source are."""
    shutil.copytree(source, target)
    (target / CHECKSUMS_NAME).unlink(missing_ok=True)
    damage(target)
    return target


def weights(directory: Path) -> list[Path]:
    """The files of weights, by name."""
    return sorted(directory.glob("model-*.safetensors"))


def without_tensors(path: Path, count: int) -> list[str]:
    """Take tensors out of a file; their names."""
    held = load_file(path)
    names = sorted(held)[:count]
    save_file({name: array for name, array in held.items() if name not in names}, path)
    return names


def states(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a directory, and the directory itself: when it was changed, and its bytes."""
    found = {".": (directory.stat().st_mtime_ns, b"")}
    return found | {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.iterdir()}


def error_of_the_command(ranks: ForkServer, model: Path, output: Path, **keys: Any) -> FlexError:
    """Return the error with which the worker of ``train`` exits; no file may change and no step be trained."""
    before = states(model)
    ended = commands.worker(ranks, model, output, **keys)
    assert ended.code == 1, ended.printed
    assert ended.error is not None, ended.printed
    assert ended.error.what in ended.printed
    assert "learning_rate:" not in ended.printed  # No step was trained.
    assert list(output.glob("checkpoint-*")) == []
    assert states(model) == before
    return ended.error


def trained_from(ranks: ForkServer, model: Path, output: Path, expected: Arrays) -> bool:
    """Whether the command's worker begins with these bits: a step without a learning rate keeps them."""
    before = states(model)
    ended = commands.worker(ranks, model, output, max_steps=1, learning_rate=0.0)
    assert ended.code == 0, ended.printed
    assert states(model) == before
    held = {name: array for path in output.glob("*.safetensors") for name, array in load_file(path).items()}
    return held.keys() == expected.keys() and all(held[name].tobytes() == expected[name].tobytes() for name in held)


def in_several_files(directory: Path) -> Arrays:
    """Divide a directory's ``model.safetensors`` among files with an index; the tensors."""
    held = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    files = {name: f"model-0000{at % 3 + 1}-of-00003.safetensors" for at, name in enumerate(sorted(held))}
    for file in set(files.values()):
        part = {name: held[name] for name in held if files[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    size = sum(array.nbytes for array in held.values())
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": files}))
    return held


@pytest.mark.slow
@fault("T9")
def test_t9_open_weights_of_another_shape_are_rejected(
    ranks: ForkServer, stock_weights: Stock, model: Path, tmp_path: Path
) -> Seen:
    directory = copy(stock_weights[0], tmp_path / "stock")
    (found,) = loaded(ranks, directory, intermediate_size=160)
    assert "error" not in found
    differ = {name for name, value in found.items() if value != stock_weights[1][name]}
    assert differ == {name for name in found if ".mlp." in name}
    edit_config(model, intermediate_size=96)
    error = error_of_the_command(ranks, model, tmp_path / "out")
    return {"raised": raised(error, "gate_proj")}


@fault("T10")
def test_t10_one_report_lists_all_missing_tensors_and_the_next_load_is_correct(
    ranks: ForkServer, stock_weights: Stock, our_weights: Path, model: Path, tmp_path: Path
) -> Seen:
    whole = copy(stock_weights[0], tmp_path / "whole")
    broken = copy(stock_weights[0], tmp_path / "broken", lambda path: without_tensors(weights(path)[0], 2))
    first, second = loaded(ranks, broken, whole)
    assert first == second
    assert "should be assigned before" in second["error"]
    in_several_files(model)
    taken = without_tensors(weights(model)[1], 2)
    error = error_of_the_command(ranks, model, tmp_path / "out")
    assert all(f"{name}: the index lists it in {weights(model)[1].name}" in str(error) for name in taken)
    # Next in the same process.
    target = ours.empty()
    damaged = copy(our_weights, tmp_path / "ours", lambda path: without_tensors(weights(path)[1], 2))
    ours.refusal(ours.load_open_weights(damaged, target))
    assert ours.right(ours.load_open_weights(our_weights, target), ours.model_of(ours.ARRAYS))
    return {"stock": first["error"], "raised": raised(error, taken[0])}


@fault("T11")
def test_t11_a_missing_file_is_named(ranks: ForkServer, stock_weights: Stock, model: Path, tmp_path: Path) -> Seen:
    broken = copy(stock_weights[0], tmp_path / "stock", lambda path: weights(path)[1].unlink())
    missing = weights(stock_weights[0])[1].name
    (found,) = loaded(ranks, broken)
    assert missing not in found["error"]
    in_several_files(model)
    gone = weights(model)[1]
    gone.unlink()
    error = error_of_the_command(ranks, model, tmp_path / "out")
    return {"stock": found["error"], "raised": raised(error, gone.name)}


@pytest.mark.slow
@fault("T12")
def test_t12_a_file_that_the_index_does_not_list_is_ignored(
    ranks: ForkServer, stock_weights: Stock, model: Path, tmp_path: Path
) -> None:
    def add(path: Path) -> None:
        held = load_file(weights(path)[0])
        save_file({name: np.ones_like(array) for name, array in held.items()}, path / "original.safetensors")

    (found,) = loaded(ranks, copy(stock_weights[0], tmp_path / "stock", add))
    other = [name for name, value in found.items() if value != stock_weights[1][name]]
    held = list(load_file(weights(stock_weights[0])[0]))
    assert sorted(other) == sorted(name for name in held if "norm" not in name)
    expected = in_several_files(model)
    add(model)
    assert trained_from(ranks, model, tmp_path / "out", expected)


@pytest.mark.slow
@fault("T13")
def test_t13_the_source_directory_is_not_changed(
    ranks: ForkServer, stock_weights: Stock, model: Path, tmp_path: Path
) -> None:
    directory = copy(stock_weights[0], tmp_path / "stock")
    before = {path.name for path in directory.iterdir()}
    loaded(ranks, directory)
    added = {path.name for path in directory.iterdir()} - before
    assert added == {"flex-ckpt.auto_generated.metadata"}
    # Paddle also deletes files of other programs under this name.
    (model / "flex-ckpt.auto_generated.metadata").write_text("of somebody")
    assert trained_from(ranks, model, tmp_path / "out", load_file(model / "model.safetensors"))


@fault("T14")
def test_t14_a_failed_export_keeps_the_older_one(
    ranks: ForkServer, stock_weights: Stock, our_weights: Path, tmp_path: Path
) -> Seen:
    (found,) = run_on_ranks(ranks, 1, jobs.export, directory=tmp_path / "stock", seeds=[0, 1], room=100_000)
    assert "error" in found[1]
    assert weights(tmp_path / "stock") == []

    ours.save(tmp_path / "checkpoint-4", ours.OTHER)
    target = copy(our_weights, tmp_path / "hf")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with jobs.no_longer_than(2000), pytest.raises(StorageError) as caught:
        export_checkpoint(tmp_path / "checkpoint-4", target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "hf", "stock"]
    return {"error": type(caught.value).__name__}


@fault("T15")
def test_t15_an_export_replaces_an_older_one(ranks: ForkServer, stock_weights: Stock, tmp_path: Path) -> None:
    directory = tmp_path / "stock"
    directory.mkdir()
    held = {name: array for path in weights(stock_weights[0]) for name, array in load_file(path).items()}
    old = {name: np.ones_like(array) for name, array in held.items()}
    save_file(old, directory / "model.safetensors")
    run_on_ranks(ranks, 1, jobs.export, directory=directory, seeds=[0])
    assert len(weights(directory)) == len(weights(stock_weights[0])) + 1
    (stale,) = [path for path in weights(directory) if load_file(path).keys() == old.keys()]
    assert all((array == 1).all() for array in load_file(stale).values())
    listed = json.loads((directory / INDEX).read_text())["weight_map"]
    assert listed.keys() == old.keys()

    ours.save(tmp_path / "checkpoint-3")
    target = tmp_path / "ours"
    target.mkdir()
    arrays = {name: np.ones_like(array) for name, array in ours.ARRAYS.items()}
    save_file(arrays, target / "model.safetensors")
    export_checkpoint(tmp_path / "checkpoint-3", target, 4000)
    assert not (target / "model.safetensors").exists()
    assert ours.right(ours.load_open_weights(target, ours.empty()), ours.model_of(ours.ARRAYS))


@fault("T16")
def test_t16_an_export_has_format_headers_and_no_stray_files(stock_weights: Stock, our_weights: Path) -> None:
    with safe_open(weights(stock_weights[0])[0], "np") as file:
        assert file.metadata() is None
    assert (stock_weights[0] / "saved_signal_0").exists()
    for path in weights(our_weights):
        with safe_open(path, "np") as file:
            assert file.metadata() == {"format": "pt"}
    names = {path.name for path in our_weights.iterdir()}
    assert names == {"config.json", INDEX, CHECKSUMS_NAME, *(path.name for path in weights(our_weights))}


@pytest.mark.slow
@fault("G20")
def test_g20_weights_that_do_not_fit_stop_every_entry_point(model: Path, tmp_path: Path) -> Seen:
    edit_config(model, intermediate_size=96)
    of_stock = copy(model, model.with_name("of-stock"))
    stock = commands.stock_command(of_stock, tmp_path / "of-stock", flex_checkpoint=False)
    assert stock.code == 0, stock.printed
    before = states(model)
    ways = {
        "`paddleformers-fc train`": commands.train(model, tmp_path / "ours"),
        "`paddleformers-cli train`": commands.stock_command(model, tmp_path / "cli"),
        "a script": commands.script(model, tmp_path / "script"),
    }
    for name, ended in ways.items():
        assert ended.code != 0, name
        assert "The open weights and the model do not fit: 12 differences. No weight was changed." in ended.printed
        assert list(ended.output.glob("checkpoint-*")) == []
    assert states(model) == before
    error = ways["`paddleformers-cli train`"].error
    assert error is not None
    return {"raised": raised(error, "up_proj")}


TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
"""The vision model of a tiny vision-language model of another family."""


@pytest.mark.parametrize("stage", ["DPO", "VL-SFT"])
def test_every_training_stage_rejects_open_weights_that_do_not_fit(
    ranks: ForkServer, model: Path, tmp_path: Path, stage: str
) -> None:
    if stage == "VL-SFT":
        text = {**json.loads((model / "config.json").read_text()), "model_type": "qwen2_5_vl_text"}
        kind = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
        edit_config(model, **kind, text_config=text, vision_config={**TOWER, "model_type": "qwen2_5_vl"})
    else:
        edit_config(model, intermediate_size=96)
    error = error_of_the_command(ranks, model, tmp_path / "out", stage=stage)
    expected = "visual.patch_embed.proj.weight" if stage == "VL-SFT" else "stored and target shapes differ (12)"
    assert expected in error.render()


@fault("G51")
def test_g51_changed_weights_of_an_export_are_rejected(
    ranks: ForkServer, stock_weights: Stock, our_weights: Path, tmp_path: Path
) -> Seen:
    altered = copy(stock_weights[0], tmp_path / "stock", lambda path: flip(weights(path)[0], -1))
    (found,) = loaded(ranks, altered)
    assert "error" not in found
    assert found != stock_weights[1]
    directory = Path(shutil.copytree(our_weights, tmp_path / "ours"))
    flip(weights(directory)[0], -1)
    error = ours.refusal(ours.load_open_weights(directory, ours.empty()))
    shutil.rmtree(directory)
    shutil.copytree(our_weights, directory)
    for path in weights(directory):
        save_file({name: array + 1 for name, array in load_file(path).items()}, path)
    stale = ours.refusal(ours.load_open_weights(directory, ours.empty()))
    assert f"delete {directory / CHECKSUMS_NAME}" in stale.next_step
    (directory / CHECKSUMS_NAME).unlink()
    plus_one = {name: array + 1 for name, array in ours.ARRAYS.items()}
    assert ours.right(ours.load_open_weights(directory, ours.empty()), ours.model_of(plus_one))
    return {"raised": raised(error, "does not match its checksum")}
