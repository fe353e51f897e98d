"""``diff`` compares numbers, not layouts, and names what differs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from paddleformers_fc.storage import executor
from paddleformers_fc.storage.executor import Window
from tests.cli.support import run, save
from tests.execute.simulated import canonical

CHANGED = "model.layers.1.self_attn.v_proj.weight"


def test_two_layouts_of_the_same_weights_are_equal(one: Path, four: Path) -> None:
    outcome = run("diff", one, four, "--json")
    document = outcome.document
    tensors = len(canonical())
    assert outcome.code == 0
    assert document["equal"]
    assert document["not_compared"] == []
    assert {role: found["equal"] for role, found in document["roles"].items()} == {
        "model_state": tensors,
        "optimizer_state": 4 * tensors,
    }


def changed(directory: Path) -> Path:
    """A checkpoint in which one number of one part of a fused tensor is another."""
    arrays = canonical()
    arrays[CHANGED][3, 5] += 1
    return save(directory, arrays)


def test_a_differing_tensor_is_listed_by_its_canonical_name(four: Path, tmp_path: Path) -> None:
    other = changed(tmp_path / "changed")
    outcome = run("diff", four, other, "--json")
    assert outcome.code == 1
    assert not outcome.document["equal"]
    weights, states = (outcome.document["roles"][role] for role in ("model_state", "optimizer_state"))
    (different,) = weights["different"]
    assert different["name"] == CHANGED
    assert different["a"]["shape"] == different["b"]["shape"] == [8, 16]
    assert different["a"]["md5"] != different["b"]["md5"]
    assert [item["name"] for item in states["different"]] == [f"{CHANGED}.moment{n}_0" for n in (1, 2)]
    assert weights["only_in_a"] == weights["only_in_b"] == []
    text = run("diff", four, other)
    assert text.code == 1
    assert "model_state: different (1)" in text.out
    assert f"{CHANGED}: values" in text.out
    assert f"{CHANGED} (moment1_0, moment2_0): values" in text.out
    assert f"not equal: 3 different, of {5 * len(canonical())} tensors" in text.out.splitlines()[-1]
    for role in ("model_state", "optimizer_state"):
        alone = run("diff", four, other, "--role", role, "--json").document
        assert (list(alone["roles"]), alone["not_compared"]) == ([role], [])


def test_a_difference_has_its_largest_absolute_and_ulp_value_and_its_first_index(four: Path, tmp_path: Path) -> None:
    arrays = canonical()
    weight = arrays[CHANGED]
    weight[2, 1] = np.nextafter(weight[2, 1], np.float32(np.inf))
    weight[3, 5] += 1
    outcome = run("diff", four, save(tmp_path / "changed", arrays), "--role", "model_state", "--json")
    (different,) = outcome.document["roles"]["model_state"]["different"]
    gone = abs(float(canonical()[CHANGED][3, 5]) - float(weight[3, 5]))
    found = different["deviation"]
    assert (found["elements"], found["first"], found["absolute"]) == (2, [2, 1], gone)
    assert found["ulp"] > 1
    lines = run("diff", four, tmp_path / "changed").out.splitlines()
    (row,) = [line for line in lines if f"model_state {CHANGED}" in line]
    assert row.split()[2:] == [f"{gone:.3g}", f"{found['ulp']:,}", "2", "of", "128", "[2,", "1]"]


@pytest.mark.parametrize(("value", "is_explained"), [(1e-12, True), (None, False)], ids=["near zero", "neighbour"])
def test_a_large_difference_in_ulps_is_explained(
    four: Path, tmp_path: Path, value: float | None, is_explained: bool
) -> None:
    arrays = canonical()
    weight = arrays[CHANGED]
    weight[2, 1] = np.nextafter(weight[2, 1], np.float32(np.inf)) if value is None else 0
    one = save(tmp_path / "one", arrays)
    if value is not None:
        weight[2, 1] = value
    other = save(tmp_path / "other", arrays) if value is not None else four
    lines = run("diff", one, other, "--role", "model_state").out.splitlines()
    assert ("Near zero numbers are dense" in lines[-2]) is is_explained


def test_compared_with_open_weights_only_weights_count(four: Path, weights: Path) -> None:
    for pair in ((four, weights), (weights, four)):
        outcome = run("diff", *pair, "--json")
        assert outcome.code == 0
        assert outcome.document["roles"]["model_state"]["equal"] == len(canonical())
        assert list(outcome.document["roles"]) == ["model_state"]
        assert outcome.document["not_compared"] == ["optimizer_state"]
    assert "the format of one side cannot contain it: optimizer_state" in run("diff", four, weights).out


def test_compared_with_open_weights_optimizer_states_are_not_read(
    four: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    read = executor._Worker.read

    def record(worker: Any, window: Window) -> int:
        count = read(worker, window)
        counts[window.path.parent.name] += count
        return count

    monkeypatch.setattr(executor._Worker, "read", record)
    assert run("diff", four, weights).code == 0
    size = sum(array.nbytes for array in canonical().values())
    largest = max(array.nbytes for array in canonical().values())
    assert counts["model_state"] >= size
    assert counts["optimizer_state"] <= largest


def test_names_on_one_side_only_are_listed_and_folded(four: Path, tmp_path: Path) -> None:
    shallow = save(tmp_path / "shallow", canonical(layers=1))
    deep = save(tmp_path / "deep", canonical(layers=3))
    document = run("diff", shallow, deep, "--role", "model_state", "--json").document
    only = document["roles"]["model_state"]["only_in_b"]
    assert {name.split(".")[2] for name in only} == {"1", "2"}
    assert document["roles"]["model_state"]["only_in_a"] == []
    assert "model.layers.{1...2}.mlp.down_proj.weight" in run("diff", shallow, deep).out
    assert "model_state: only in A" in run("diff", deep, shallow).out


def test_a_checkpoint_without_optimizer_states_is_different(four: Path, tmp_path: Path) -> None:
    bare = save(tmp_path / "bare", canonical(), roles=("model_state",))
    outcome = run("diff", bare, four, "--json")
    assert outcome.code == 1
    assert outcome.document["roles"]["model_state"]["different"] == []
    only = 4 * len(canonical())
    assert len(outcome.document["roles"]["optimizer_state"]["only_in_b"]) == only
    last = run("diff", bare, four).out.splitlines()[-1]
    assert last.startswith(f"not equal: 0 different, {only} only in B, of {only + len(canonical())} tensors, ")


def test_another_shape_or_dtype_of_the_same_bytes_is_a_difference(tmp_path: Path) -> None:
    zeros = np.zeros((4, 2), np.float32)
    forms = {"a": zeros, "shape": zeros.reshape(2, 4), "dtype": zeros.astype(np.int32)}
    for name, array in forms.items():
        (tmp_path / name).mkdir()
        save_file({"w": array}, tmp_path / name / "model.safetensors")
    assert "w: shape [4, 2] and [2, 4]" in run("diff", tmp_path / "a", tmp_path / "shape").out
    outcome = run("diff", tmp_path / "a", tmp_path / "dtype")
    assert outcome.code == 1
    assert "w: dtype float32 and int32" in outcome.out


def test_different_model_families_are_reported(tmp_path: Path) -> None:
    for name, family in (("a", "llama"), ("b", "qwen3")):
        (tmp_path / name).mkdir()
        save_file({f"{name}.weight": np.zeros(2, np.float32)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": family}))
    outcome = run("diff", tmp_path / "a", tmp_path / "b")
    assert outcome.code == 1
    assert "A is a model of family llama, B of qwen3.\n" in outcome.out
    assert "family" not in run("diff", tmp_path / "a", tmp_path / "a").out


@pytest.mark.parametrize(
    ("role", "text"),
    [
        ("moments", "Unknown role 'moments'"),
        ("ema_state", "Neither side holds a tensor of ema_state"),
        ("optimizer_state", "open contains open weights and has no optimizer_state."),
    ],
)
def test_an_unknown_role_is_invalid_usage(one: Path, four: Path, weights: Path, role: str, text: str) -> None:
    outcome = run("diff", four, weights if role == "optimizer_state" else one, "--role", role)
    assert outcome.code == 2
    assert text in outcome.err
    assert "next: " in outcome.err


def test_a_side_that_cannot_be_read_is_not_reported_as_different(four: Path, copy: Path, tmp_path: Path) -> None:
    path = copy / "model_state/rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for side, code, error in ((copy, 1, "Corrupt"), (tmp_path, 2, "NotACheckpoint")):
        outcome = run("diff", four, side, "--json")
        assert (outcome.code, outcome.document["error"]) == (code, error)


def test_two_runs_print_the_same_document(four: Path, one: Path) -> None:
    texts = [json.dumps({**run("diff", one, four, "--json").document, "seconds": 0}) for _ in range(2)]
    assert texts[0] == texts[1]
