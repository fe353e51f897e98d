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

from paddleformers_fc.errors import Corrupt, FlexError, MismatchError, StorageError
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME
from tests.cli.support import flip
from tests.corruption import commands, ours
from tests.corruption.guarantees import Observed, fault, refused
from tests.corruption.jobs import no_longer_than
from tests.execute.simulated import live
from verification.forkserver import ForkServer

JOBS = "tests.corruption.jobs"
INDEX = "model.safetensors.index.json"
Sums = dict[str, float]


@pytest.fixture(scope="module")
def stock_weights(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sums]:
    """A Llama that stock has exported in several files, and the sum of every tensor."""
    directory = tmp_path_factory.mktemp("stock")
    (found,) = ranks.run(f"{JOBS}:export", 1, {"directory": str(directory), "seeds": [0]}).values
    return directory, found[0]


@pytest.fixture(scope="module")
def our_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated model, exported by us in several files."""
    directory = tmp_path_factory.mktemp("ours")
    ours.save(directory / "checkpoint-3")
    export_checkpoint(directory / "checkpoint-3", directory / "hf", 4000)
    return directory / "hf"


def loaded(ranks: ForkServer, *directories: Path, **model: Any) -> list[dict[str, Any]]:
    """What stock's ``from_pretrained`` makes of directories, one after the other in one process."""
    kwargs = {"directories": [str(path) for path in directories], "model": model}
    found: list[dict[str, Any]] = ranks.run(f"{JOBS}:pretrained", 1, kwargs).values[0]
    return found


def copy(source: Path, target: Path, damage: Callable[[Path], object]) -> Path:
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


def model_of(arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """What the live model holds after a load of these weights."""
    return {"model_state": live(arrays, 1, 0)["model_state"]}


def states(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a directory, and the directory itself: when it was changed, and its bytes."""
    found = {".": (directory.stat().st_mtime_ns, b"")}
    return found | {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.iterdir()}


def refused_by_the_command(model: Path, output: Path, ranks: ForkServer | None = None) -> FlexError:
    """The error by which ``paddleformers-fc train``, or only its worker on a rank, ends with nothing touched."""
    before = states(model)
    ended = commands.train(model, output) if ranks is None else commands.worker(ranks, model, output)
    assert ended.code == 1, ended.printed
    assert ended.error is not None, ended.printed
    assert ended.error.what in ended.printed
    assert "learning_rate:" not in ended.printed  # No step was made.
    assert list(output.glob("checkpoint-*")) == []
    assert states(model) == before
    return ended.error


def trained_from(ranks: ForkServer, model: Path, output: Path, expected: dict[str, np.ndarray[Any, Any]]) -> bool:
    """Whether the command's worker begins with these bits: a step without a learning rate keeps them."""
    before = states(model)
    ended = commands.worker(ranks, model, output, max_steps=1, learning_rate=0.0)
    assert ended.code == 0, ended.printed
    assert states(model) == before
    held = {name: array for path in output.glob("*.safetensors") for name, array in load_file(path).items()}
    return held.keys() == expected.keys() and all(
        array.tobytes() == expected[name].tobytes() for name, array in held.items()
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The weights of a tiny Llama in one file, with a corpus beside the directory."""
    return commands.assets(tmp_path / "assets")


def in_several_files(directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Divide a directory's ``model.safetensors`` among files with an index; the tensors."""
    held = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(held)
    files = {f"model-0000{part + 1}-of-00003.safetensors": names[part::3] for part in range(3)}
    for file, part in files.items():
        save_file({name: held[name] for name in part}, directory / file, metadata={"format": "pt"})
    listed = {name: file for file, part in files.items() for name in part}
    size = sum(array.nbytes for array in held.values())
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": listed}))
    return held


Stock = tuple[Path, Sums]


@pytest.mark.slow
@fault("T9", "open weights of another shape: another `intermediate_size`")
def test_t9_open_weights_of_another_shape_are_refused(
    ranks: ForkServer, stock_weights: Stock, model: Path, tmp_path: Path
) -> Observed:
    directory = copy(stock_weights[0], tmp_path / "stock", lambda path: None)
    (found,) = loaded(ranks, directory, intermediate_size=160)
    assert "error" not in found
    differ = {name for name, value in found.items() if value != stock_weights[1][name]}
    assert differ == {name for name in found if ".mlp." in name}
    error = refused_by_the_command(commands.edit_config(model, intermediate_size=96), tmp_path / "out")
    assert isinstance(error, MismatchError)
    return Observed(
        "the tensors of that size hold something beside what is stored; no error", refused(error, "gate_proj")
    )


@fault("T10", "tensors are missing from a file of open weights, and a whole directory is loaded next")
def test_t10_missing_tensors_come_in_one_report_and_the_next_load_is_right(
    ranks: ForkServer, stock_weights: Stock, our_weights: Path, model: Path, tmp_path: Path
) -> Observed:
    whole = copy(stock_weights[0], tmp_path / "whole", lambda path: None)
    broken = copy(stock_weights[0], tmp_path / "broken", lambda path: without_tensors(weights(path)[0], 2))
    first, second = loaded(ranks, broken, whole)
    assert first == second
    assert "should be assigned before" in second["error"]
    in_several_files(model)
    taken = without_tensors(weights(model)[1], 2)
    error = refused_by_the_command(model, tmp_path / "out", ranks)
    assert isinstance(error, Corrupt)
    assert all(f"{name}: the index lists it in {weights(model)[1].name}" in str(error) for name in taken)
    # Next in the same process.
    target = ours.empty()
    damaged = copy(our_weights, tmp_path / "ours", lambda path: without_tensors(weights(path)[1], 2))
    assert isinstance(ours.refusal(ours.load_open_weights(damaged, target)), Corrupt)
    assert ours.right(ours.load_open_weights(our_weights, target), model_of(ours.ARRAYS))
    return Observed(
        f"`{first['error']}`: one name, no file; then the same error for the whole directory",
        f"{refused(error, taken[0])}; every missing tensor is in the report, and the next load is right",
    )


@fault("T11", "a file of open weights is missing, and the index lists it")
def test_t11_a_missing_file_is_named(ranks: ForkServer, stock_weights: Stock, model: Path, tmp_path: Path) -> Observed:
    broken = copy(stock_weights[0], tmp_path / "stock", lambda path: weights(path)[1].unlink())
    missing = weights(stock_weights[0])[1].name
    (found,) = loaded(ranks, broken)
    assert missing not in found["error"]
    in_several_files(model)
    gone = weights(model)[1]
    gone.unlink()
    error = refused_by_the_command(model, tmp_path / "out", ranks)
    assert isinstance(error, Corrupt)
    return Observed(f"`{found['error']}`: the missing file is not named", refused(error, gone.name))


@pytest.mark.slow
@fault("T12", "an extra `original.safetensors` with the same names")
def test_t12_a_file_that_the_index_does_not_list_is_ignored(
    ranks: ForkServer, stock_weights: Stock, model: Path, tmp_path: Path
) -> Observed:
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
    return Observed(
        "its tensors win over those of the index; no error", "loads right: the index lists the files that count"
    )


@pytest.mark.slow
@fault("T13", "loading from a directory of open weights that is not ours to write to")
def test_t13_the_source_is_not_written_to(
    ranks: ForkServer, stock_weights: Stock, model: Path, tmp_path: Path
) -> Observed:
    directory = copy(stock_weights[0], tmp_path / "stock", lambda path: None)
    before = {path.name for path in directory.iterdir()}
    loaded(ranks, directory)
    added = {path.name for path in directory.iterdir()} - before
    assert added == {"flex-ckpt.auto_generated.metadata"}
    # Paddle also deletes files of other programs under this name.
    (model / "flex-ckpt.auto_generated.metadata").write_text("of somebody")
    assert trained_from(ranks, model, tmp_path / "out", load_file(model / "model.safetensors"))
    return Observed(f"writes `{added.pop()}` into it", "loads right, and nothing in the directory is touched")


@fault("T14", "an export fails: the disk is full")
def test_t14_an_export_that_fails_leaves_the_older_one(
    ranks: ForkServer, stock_weights: Stock, our_weights: Path, tmp_path: Path
) -> Observed:
    kwargs = {"directory": str(tmp_path / "stock"), "seeds": [0, 1], "room": 100_000}
    (found,) = ranks.run(f"{JOBS}:export", 1, kwargs).values
    assert "error" in found[1]
    assert weights(tmp_path / "stock") == []

    ours.save(tmp_path / "checkpoint-4", ours.OTHER)
    target = copy(our_weights, tmp_path / "hf", lambda path: None)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with no_longer_than(2000), pytest.raises(StorageError) as caught:
        export_checkpoint(tmp_path / "checkpoint-4", target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "hf", "stock"]
    return Observed(
        "the older export has been deleted already, and there is none",
        f"`{type(caught.value).__name__}`; the older export is there, byte for byte, and nothing else is left",
    )


@fault("T15", "an export into a directory that holds `model.safetensors`")
def test_t15_an_export_takes_the_place_of_an_older_one(
    ranks: ForkServer, stock_weights: Stock, tmp_path: Path
) -> Observed:
    directory = tmp_path / "stock"
    directory.mkdir()
    held = {name: array for path in weights(stock_weights[0]) for name, array in load_file(path).items()}
    old = {name: np.ones_like(array) for name, array in held.items()}
    save_file(old, directory / "model.safetensors")
    ranks.run(f"{JOBS}:export", 1, {"directory": str(directory), "seeds": [0]})
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
    assert ours.right(ours.load_open_weights(target, ours.empty()), model_of(ours.ARRAYS))
    return Observed(
        "the old file becomes one of the files of the new export, so that every tensor is there twice, and the index "
        "goes by the order of the directory; no error",
        "the old file is removed; what is loaded from the directory is the new export",
    )


@fault("T16", "the header of an exported file, and what lies beside it")
def test_t16_an_export_has_a_format_in_its_headers_and_nothing_beside(
    stock_weights: Stock, our_weights: Path
) -> Observed:
    with safe_open(weights(stock_weights[0])[0], "np") as file:
        assert file.metadata() is None
    assert (stock_weights[0] / "saved_signal_0").exists()
    for path in weights(our_weights):
        with safe_open(path, "np") as file:
            assert file.metadata() == {"format": "pt"}
    names = {path.name for path in our_weights.iterdir()}
    assert names == {"config.json", INDEX, CHECKSUMS_NAME, *(path.name for path in weights(our_weights))}
    return Observed(
        "no `__metadata__`; `saved_signal_0` is left",
        "`format: pt`; only the configuration, the index, the weights, and the checksums of these",
    )


@pytest.mark.slow
@fault("G20", "a `config.json` that does not describe the weights beside it, in every way in")
def test_g20_weights_that_do_not_fit_stop_every_way_in(model: Path, tmp_path: Path) -> Observed:
    commands.edit_config(model, intermediate_size=96)
    (tmp_path / "stock").mkdir()
    untouched = copy(model, tmp_path / "stock/llama", lambda path: None)
    corpus = model.parent / "corpus.jsonl"
    stock = commands.stock_command(untouched, tmp_path / "of-stock", corpus, flex_checkpoint=False)
    assert stock.code == 0, stock.printed
    before = states(model)
    ways = {
        "`paddleformers-fc train`": commands.train(model, tmp_path / "ours"),
        "`paddleformers-cli train`": commands.stock_command(model, tmp_path / "cli"),
        "a script": commands.script(model, tmp_path / "script"),
    }
    for name, ended in ways.items():
        assert ended.code != 0, name
        assert "The open weights and the model do not fit: 12 differences. No weight was changed." in ended.printed, (
            name
        )
        assert list(ended.output.glob("checkpoint-*")) == []
    assert states(model) == before
    error = ways["`paddleformers-cli train`"].error
    assert isinstance(error, MismatchError)
    return Observed(
        "`paddleformers-cli train` ends with code 0; what is longer than the model's tensors is cut off",
        f"{refused(error, 'up_proj')}; the same by {', '.join(ways)}",
    )


@pytest.mark.parametrize(
    ("stage", "changed", "message"),
    [
        ("SFT", {"intermediate_size": 96}, "SHAPE: stored and target shapes differ (12)"),
        ("DPO", {"intermediate_size": 96}, "SHAPE: stored and target shapes differ (12)"),
        ("VL-SFT", {}, "visual.patch_embed.proj.weight"),
    ],
)
def test_every_stage_of_the_command_line_reads_open_weights_alike(
    ranks: ForkServer, model: Path, tmp_path: Path, stage: str, changed: dict[str, Any], message: str
) -> None:
    if stage == "VL-SFT":
        commands.as_vision_language(model)
    path = commands.recipe_of(commands.edit_config(model, **changed), tmp_path / "out", stage=stage)
    before = states(model)
    result = ranks.attempt("tests.trainer.entry_jobs:run_command_line", 1, {"yaml": str(path)})
    assert not result.ok
    assert message in result.logs[0].read_text()
    assert states(model) == before


@fault("G51", "a byte of a tensor in an export has changed; then another tool writes other weights over the export")
def test_g51_altered_weights_of_an_export_are_refused(
    ranks: ForkServer, stock_weights: Stock, our_weights: Path, tmp_path: Path
) -> Observed:
    altered = copy(stock_weights[0], tmp_path / "stock", lambda path: flip(weights(path)[0], -1))
    (found,) = loaded(ranks, altered)
    assert "error" not in found
    assert found != stock_weights[1]
    directory = Path(shutil.copytree(our_weights, tmp_path / "ours"))
    flip(weights(directory)[0], -1)
    error = ours.refusal(ours.load_open_weights(directory, ours.empty()))
    assert isinstance(error, Corrupt)
    shutil.rmtree(directory)
    shutil.copytree(our_weights, directory)
    for path in weights(directory):
        save_file({name: array + 1 for name, array in load_file(path).items()}, path)
    stale = ours.refusal(ours.load_open_weights(directory, ours.empty()))
    assert f"delete {directory / CHECKSUMS_NAME}" in stale.next_step
    (directory / CHECKSUMS_NAME).unlink()
    plus_one = {name: array + 1 for name, array in ours.ARRAYS.items()}
    assert ours.right(ours.load_open_weights(directory, ours.empty()), model_of(plus_one))
    return Observed(
        "loaded; no error",
        f"{refused(error, 'does not match its checksum')}; for weights of another tool the error names "
        f"`{CHECKSUMS_NAME}` to delete, and without it they are loaded",
    )
