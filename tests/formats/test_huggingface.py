"""Directories of open weights: the index is the truth, and the directory is never written to."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from paddleformers_fc.errors import Corrupt, FormatError, NotACheckpoint
from paddleformers_fc.execute.verify import verify_checkpoint
from paddleformers_fc.formats.huggingface import HUGGINGFACE, open_huggingface


def weights(*names: str, fill: float = 1.0) -> dict[str, np.ndarray]:
    return {name: np.full((2, 3), fill, np.float32) for name in names}


def indexed(directory: Path, **files: list[str]) -> None:
    for stem, names in files.items():
        save_file(weights(*names), directory / f"{stem}.safetensors")
    weight_map = {name: f"{stem}.safetensors" for stem, names in files.items() for name in names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_the_index_decides_which_files_count_and_all_that_they_hold_is_stored(tmp_path: Path) -> None:
    indexed(tmp_path, one=["a"], two=["b"])
    save_file(weights("a", "a_scale"), tmp_path / "one.safetensors")
    save_file(weights("b", "a", fill=9), tmp_path / "two.safetensors")
    save_file(weights("a", "b", fill=9), tmp_path / "original.safetensors")
    save_file(weights("a", fill=9), tmp_path / "model.safetensors")
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    tensors = open_huggingface(tmp_path).catalog.roles["model_state"]
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert {name: [part.file for part in tensor.fragments] for name, tensor in tensors.items()} == {
        "a": ["one.safetensors"],
        "a_scale": ["one.safetensors"],
        "b": ["two.safetensors"],
    }


@pytest.mark.parametrize(
    ("held", "evidence"),
    [("ac", r"c: in one\.safetensors and two\.safetensors"), ("b", r"a: the index lists it in one\.safetensors")],
    ids=["a tensor of two files that the index does not name", "a tensor that its file does not hold"],
)
def test_files_that_contradict_their_index_are_refused(tmp_path: Path, held: str, evidence: str) -> None:
    indexed(tmp_path, one=["a"], two=["b"])
    save_file(weights(*held), tmp_path / "one.safetensors")
    save_file(weights("b", "c", fill=9), tmp_path / "two.safetensors")
    with pytest.raises(Corrupt, match=evidence):
        open_huggingface(tmp_path)


def test_weights_of_a_trainer_in_its_own_orientation_are_refused(tmp_path: Path) -> None:
    """A square layer has the same shape in both orientations."""
    save_file({"q": np.eye(4, k=1, dtype=np.float32)}, tmp_path / "model.safetensors", {"format": "np"})
    assert open_huggingface(tmp_path).catalog.count == 1
    (tmp_path / "trainer_state.json").write_text("{}")
    with pytest.raises(FormatError, match="orientation of PaddleFormers"):
        open_huggingface(tmp_path)


def test_missing_files_of_numbered_ones_are_named(tmp_path: Path) -> None:
    for number in (1, 3):
        save_file(weights(f"t{number}"), tmp_path / f"model-0000{number}-of-00004.safetensors")
    assert HUGGINGFACE.recognises(tmp_path)
    with pytest.raises(Corrupt, match="2 weight files") as caught:
        open_huggingface(tmp_path)
    assert caught.value.evidence == (
        "model-00002-of-00004.safetensors is missing",
        "model-00004-of-00004.safetensors is missing",
    )
    outcome, problem = verify_checkpoint(tmp_path, "full")
    assert not outcome.passed
    assert problem is not None
    assert "model-00002-of-00004.safetensors is missing" in problem.evidence


@pytest.mark.parametrize("names", [("00001-of-00001", "00001-of-00002"), ("00000-of-00001", "00001-of-00001")])
def test_numbers_of_two_models_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        save_file(weights("t"), tmp_path / f"model-{name}.safetensors")
    with pytest.raises(FormatError, match="are not numbered as one model"):
        open_huggingface(tmp_path)


def test_numbers_of_many_models_are_refused_in_the_memory_of_one(tmp_path: Path) -> None:
    for count in range(20):
        (tmp_path / f"model-00001-of-{99_900 + count}.safetensors").touch()
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="are not numbered as one model") as caught:
            open_huggingface(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(caught.value.evidence) == 20
    assert peak < 64_000_000


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": [1]}', '{"weight_map": {"a": 3}}']
)
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(FormatError, match="index is malformed"):
        open_huggingface(tmp_path)


@pytest.mark.parametrize("index", ['{"weight_map": {}}', None])
def test_a_directory_without_a_tensor_is_refused(tmp_path: Path, index: str | None) -> None:
    with pytest.raises(NotACheckpoint, match="no open weights"):
        open_huggingface(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(Corrupt, match="contains no tensor"):
        open_huggingface(tmp_path)


def test_weights_in_pickles_of_pytorch_are_refused_by_name(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"pytorch_model-0000{number}-of-00002.bin").write_bytes(b"PK")
    with pytest.raises(NotACheckpoint) as caught:
        verify_checkpoint(tmp_path, "full")
    assert "pytorch_model-00001-of-00002.bin and 1 more: a pickle of PyTorch" in caught.value.evidence
    assert caught.value.next_step.startswith("Convert the weights with Transformers")
