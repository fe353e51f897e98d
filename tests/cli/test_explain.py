"""``explain`` shows where the elements of a tensor are stored, and what reads a stored tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddleformers_fc.cli.explaining import show
from paddleformers_fc.mapping import Rule
from paddleformers_fc.output import console
from paddleformers_fc.plan.explain import ExplainedTensor, Explanation
from tests.cli.support import run
from tests.execute.simulated import canonical

KEYS = "model.layers.1.self_attn.k_proj.weight"
FUSED = "model.layers.1.self_attn.qkv_proj.weight"


def explained(directory: Path, name: str) -> list[dict[str, Any]]:
    """The explained tensors of a name."""
    outcome = run("explain", directory, name, "--json")
    assert outcome.code == 0, outcome.out
    return list(outcome.document["tensors"])


def region(box: list[list[int]]) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(*box, strict=True))


def numbers(directory: Path, box: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The numbers of a box, read from the file and offset that the explanation names."""
    low, high = box["shard"]
    shape = [b - a for a, b in zip(low, high, strict=True)]
    data = (directory / box["file"]).read_bytes()[box["begin"] :]
    shard = np.frombuffer(data[: 4 * int(np.prod(shape))], np.float32).reshape(shape)
    inside = [[at - start for at, start in zip(side, low, strict=True)] for side in box["stored_box"]]
    return shard[region(inside)].transpose(box["axes"])


@pytest.mark.parametrize("name", [KEYS, "model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_the_boxes_of_a_canonical_tensor_contain_its_numbers(four: Path, name: str) -> None:
    tensor = next(one for one in explained(four, name) if one["side"] == "canonical")
    found = np.full(tensor["shape"], np.nan, np.float32)
    for box in tensor["boxes"]:
        found[region(box["canonical_box"])] = numbers(four, box)
    assert np.array_equal(found, canonical()[name])


def test_a_stored_tensor_is_explained_by_the_canonical_boxes_that_read_it(four: Path) -> None:
    (tensor,) = explained(four, FUSED)
    assert (tensor["side"], tensor["role"]) == ("stored", "model_state")
    assert {box["canonical"].split(".")[-2] for box in tensor["boxes"]} == {"q_proj", "k_proj", "v_proj"}
    for box in tensor["boxes"]:
        wanted = canonical()[box["canonical"]][region(box["canonical_box"])]
        assert np.array_equal(numbers(four, box), wanted)
    covered = sum(int(np.prod(np.subtract(*box["stored_box"][::-1]))) for box in tensor["boxes"])
    assert covered == np.prod(tensor["shape"])
    (rule,) = tensor["rules"]
    assert (rule["targets"], rule["axes"]) == ([FUSED], [1, 0])
    assert KEYS in rule["sources"]


def test_a_state_follows_its_parameter(four: Path) -> None:
    (tensor,) = explained(four, f"{KEYS}.moment1_0")
    assert tensor["role"] == "optimizer_state"
    assert {box["stored"] for box in tensor["boxes"]} == {f"{FUSED}.moment1_0"}
    assert tensor["rules"][0]["targets"] == [FUSED]


def test_the_text_names_files_offsets_and_the_rule(four: Path) -> None:
    text = run("explain", four, KEYS).out
    assert f"    [0:4, 0:16] (canonical) = {FUSED} [0:16, 8:12] (stored), axes [1, 0]  (model_state/rank-0000" in text
    assert ", in the shard [0:16, 0:16])" in text
    assert f"{KEYS}, " in text
    assert f" (canonical) = {FUSED} (stored): parts [16, 8, 8]" in text
    assert "parts [16, 8, 8] along axis 1; axes [1, 0]; stored side interleaved in 2 groups" in text


def test_several_parts_that_one_tensor_holds_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rule = Rule(("gates",), ("stored",), ((4, 2),), 0, (0, 1), target_blocks=2)
    tensor = ExplainedTensor("canonical", "model_state", "float32", (6, 8), [], [rule], [])
    show(Explanation("here", "flex_checkpoint", "gates", [tensor]), console())
    assert "parts [(4, 2)] along axis 0; stored side interleaved in 2 groups" in capsys.readouterr().out


def test_open_weights_have_no_rules(weights: Path) -> None:
    (tensor,) = explained(weights, KEYS)
    assert (tensor["rules"], len(tensor["boxes"])) == ([], 1)


def test_an_unknown_name_is_refused_with_similar_ones(four: Path) -> None:
    outcome = run("explain", four, KEYS.replace("k_proj", "kproj"), "--json")
    assert outcome.code == 2
    assert KEYS in outcome.document["evidence"]
    assert outcome.document["next_step"].endswith(f"inspect {four} --tensors")
