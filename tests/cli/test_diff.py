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
from tests.cli.support import document_of, run, save
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


def test_a_differing_tensor_is_listed_with_its_states_and_its_largest_difference(four: Path, tmp_path: Path) -> None:
    arrays = canonical()
    weight = arrays[CHANGED]
    weight[2, 1] = np.nextafter(weight[2, 1], np.float32(np.inf))
    weight[3, 5] += 1
    gone = abs(float(canonical()[CHANGED][3, 5]) - float(weight[3, 5]))
    other = save(tmp_path / "changed", arrays)
    outcome = run("diff", four, other, "--json")
    assert (outcome.code, outcome.document["equal"]) == (1, False)
    weights, states = (outcome.document["roles"][role] for role in ("model_state", "optimizer_state"))
    assert weights["only_in_a"] == weights["only_in_b"] == []
    (different,) = weights["different"]
    assert different["name"] == CHANGED
    assert different["a"]["shape"] == different["b"]["shape"] == [8, 16]
    assert different["a"]["md5"] != different["b"]["md5"]
    found = different["deviation"]
    assert (found["elements"], found["first"], found["absolute"]) == (2, [2, 1], gone)
    assert [item["name"] for item in states["different"]] == [f"{CHANGED}.moment{n}_0" for n in (1, 2)]
    text = run("diff", four, other).out
    assert "model_state: different (1)" in text
    assert f"{CHANGED} (moment1_0, moment2_0): values" in text
    assert f"not equal: 3 different, of {5 * len(canonical())} tensors" in text.splitlines()[-1]
    (row,) = [line for line in text.splitlines() if f"model_state {CHANGED}" in line]
    assert row.split()[2:] == [f"{gone:.3g}", f"{found['ulp']:,}", "2", "of", "128", "[2,", "1]"]
    for role in ("model_state", "optimizer_state"):
        alone = run("diff", four, other, "--role", role, "--json").document
        assert (list(alone["roles"]), alone["not_compared"]) == ([role], [])


def test_a_large_difference_in_ulps_is_explained(four: Path, tmp_path: Path) -> None:
    arrays = canonical()
    neighbour = np.nextafter(arrays[CHANGED][2, 1], np.float32(np.inf))
    for name, value, is_explained in (("neighbour", neighbour, False), ("near zero", 1e-12, True)):
        arrays[CHANGED][2, 1] = value
        lines = run("diff", four, save(tmp_path / name, arrays), "--role", "model_state").out.splitlines()
        assert ("Near zero numbers are dense" in lines[-2]) is is_explained


def test_open_weights_are_compared_by_weights_alone(four: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    read = executor._Worker.read

    def record(worker: Any, window: Window) -> int:
        count = read(worker, window)
        counts[window.path.parent.name] += count
        return count

    monkeypatch.setattr(executor._Worker, "read", record)
    for pair in ((four, weights), (weights, four)):
        counts.clear()
        found = run("diff", *pair, "--json").document
        assert {role: one["equal"] for role, one in found["roles"].items()} == {"model_state": len(canonical())}
        assert found["not_compared"] == ["optimizer_state"]
        sizes = [array.nbytes for array in canonical().values()]
        assert counts["model_state"] >= sum(sizes)
        assert counts["optimizer_state"] <= max(sizes)
    assert "the format of one side cannot contain it: optimizer_state" in run("diff", four, weights).out


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
    found = document_of("diff", bare, four, code=1)
    only = 4 * len(canonical())
    assert len(found["roles"]["optimizer_state"]["only_in_b"]) == only
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


def test_a_side_that_cannot_be_read_is_not_reported_as_different(four: Path, copy: Path, tmp_path: Path) -> None:
    path = copy / "model_state/rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for side, code, error in ((copy, 1, "Corrupt"), (tmp_path, 2, "NotACheckpoint")):
        outcome = run("diff", four, side, "--json")
        assert (outcome.code, outcome.document["error"]) == (code, error)


def test_two_runs_print_the_same_document(four: Path, one: Path) -> None:
    texts = [json.dumps({**run("diff", one, four, "--json").document, "seconds": 0}) for _ in range(2)]
    assert texts[0] == texts[1]
