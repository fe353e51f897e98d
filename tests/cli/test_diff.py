"""``diff`` compares numbers, not layouts, and names what differs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import paddleformers_fc
from paddleformers_fc.execute.diff_checkpoints import DeviationSum
from paddleformers_fc.storage import executor
from paddleformers_fc.storage.executor import Window
from tests.cli.support import document_of, open_weights, run, save
from tests.execute.simulated import canonical

CHANGED = "model.layers.1.self_attn.v_proj.weight"
NORM = "model.norm.weight"


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
        assert any("Near zero numbers are dense" in line for line in lines) is is_explained


def test_differences_are_printed_first_the_largest_at_the_top_and_then_what_is_equal(
    four: Path, tmp_path: Path
) -> None:
    arrays = canonical()
    for number, name in enumerate((CHANGED, "lm_head.weight", "model.norm.weight")):
        arrays[name][0] += (0.5, 2, 1)[number]
    lines = run("diff", four, save(tmp_path / "changed", arrays), "--role", "model_state").out.splitlines()
    places = [next(at for at, line in enumerate(lines) if text in line) for text in ("largest differences", "lm_head")]
    places += [next(at for at, line in enumerate(lines) if f"model_state {name} " in line) for name in (NORM, CHANGED)]
    places += [next(at for at, line in enumerate(lines) if text in line) for text in (": different (3)", "  role ")]
    assert places == sorted(places)
    assert lines[-1].startswith("not equal: 3 different, of ")


def test_tensors_within_a_tolerance_are_equal_and_counted_apart_from_bitwise_equal_ones(
    four: Path, tmp_path: Path
) -> None:
    arrays, tensors = canonical(), len(canonical())
    arrays[CHANGED][2, 1] += np.float32(1e-4)
    arrays[NORM][:] *= np.float32(1.001)
    other = save(tmp_path / "changed", arrays)
    weights = ("diff", four, other, "--role", "model_state")
    assert run(*weights).code == 1
    assert "tolerance" not in run(*weights).out
    done = run(*weights, "--atol", "1e-3", "--rtol", "0.01")
    assert done.code == 0
    last = f"equal: {tensors - 2} tensors bitwise equal, 2 equal within the tolerance (atol 0.001, rtol 0.01), "
    assert done.out.splitlines()[-1].startswith(last)
    assert "largest differences" not in done.out
    arrays[CHANGED][3, 5] += 1
    third = save(tmp_path / "far", arrays)
    found = document_of("diff", four, third, "--role", "model_state", "--atol", "1e-3", "--rtol", "0.01", code=1)
    (different,) = found["roles"]["model_state"]["different"]
    assert (different["name"], different["deviation"]["elements"], different["deviation"]["first"]) == (
        CHANGED,
        1,
        [3, 5],
    )
    counts = found["roles"]["model_state"]
    assert (counts["equal"], counts["within_tolerance"]) == (tensors - 2, 1)
    assert (found["atol"], found["rtol"]) == (0.001, 0.01)
    # The states are the squares and cubes of the weights, and only the changed ones are read.
    both = paddleformers_fc.open(four).diff(paddleformers_fc.open(other), atol=1e-3, rtol=0.01)
    assert both.equal
    assert sum(one.within_tolerance for one in both.roles.values()) > 2


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
        open_weights(tmp_path / name, {"w": array})
    assert "w: shape [4, 2] and [2, 4]" in run("diff", tmp_path / "a", tmp_path / "shape").out
    for tolerance in ((), ("--atol", "1")):
        outcome = run("diff", tmp_path / "a", tmp_path / "dtype", *tolerance)
        assert outcome.code == 1
        assert "w: dtype float32 and int32" in outcome.out


def test_different_model_families_are_reported(tmp_path: Path) -> None:
    for name, family in (("a", "llama"), ("b", "qwen3")):
        open_weights(tmp_path / name, {f"{name}.weight": np.zeros(2, np.float32)}, {"model_type": family})
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


@pytest.mark.parametrize(
    ("one", "other", "absolute", "ulp"),
    [
        (np.array([2**64 - 1], np.uint64), np.array([2**64 - 2], np.uint64), 1.0, None),
        (np.array([2**63 - 1], np.int64), np.array([-(2**63)], np.int64), float(2**64 - 1), None),
        (np.array([1], ml_dtypes.float8_e8m0fnu), np.array([2], ml_dtypes.float8_e8m0fnu), 1.0, 1),
    ],
)
def test_differences_of_integers_and_scales_are_exact(one: Any, other: Any, absolute: float, ulp: int | None) -> None:
    found = DeviationSum(one.shape)
    found.add(one, other)
    assert (found.result().absolute, found.result().ulp) == (absolute, ulp)
