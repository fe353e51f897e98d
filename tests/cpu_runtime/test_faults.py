"""Each patch is still needed: without it, the fault that it mends is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import tiny
from tests.harness.tiny import MatrixLayout
from verification.forkserver import ForkServer

JOBS = "tests.cpu_runtime.jobs_faults"


def without(
    ranks: ForkServer, patch: str, model_type: str, layout: MatrixLayout, directory: Path, **model: Any
) -> tuple[dict[str, Any], ...]:
    """By rank: the losses, or the error, of a training without one patch."""
    kwargs = {
        "patch": patch,
        "model_type": model_type,
        "layout": layout.to_json(),
        "output_dir": str(directory),
        "model": model,
    }
    return ranks.run(f"{JOBS}:train_without", layout.nproc, kwargs).values


@pytest.mark.parametrize(
    ("patch", "model_type", "layout", "error"),
    [
        ("clip-fp32", "llama", tiny.TP2, "'AdamW' object has no attribute '_inner_opt'"),
        ("split-fp32", "llama", tiny.SD2V2, "Currently sharding stage1 v2 only support amp_master_grad"),
        ("ernie-experts", "ernie4_5_moe", tiny.SINGLE, "The kernel `expand_modality_expert_id` is not registered"),
        ("expert-groups", "ernie4_5_moe", tiny.TP2EP2PP2, "'Group' object has no attribute 'lower'"),
        ("expert-optimizer", "ernie4_5_moe", tiny.EP2, "isinstance() arg 2 must be a type"),
    ],
    ids=lambda value: value if isinstance(value, str) and "-" in value else "",
)
def test_without_its_patch_training_stops(
    ranks: ForkServer, tmp_path: Path, patch: str, model_type: str, layout: MatrixLayout, error: str
) -> None:
    for seen in without(ranks, patch, model_type, layout, tmp_path):
        assert error in seen["error"]


@pytest.mark.parametrize(
    ("patch", "error"),
    [
        ("ernie-mtp", "TypeError: cannot unpack non-iterable bool object"),
        ("ernie-mtp-loss", "TypeError: 'NoneType' object is not subscriptable"),
    ],
)
def test_without_its_patch_multi_token_prediction_stops(
    ranks: ForkServer, tmp_path: Path, patch: str, error: str
) -> None:
    (seen,) = without(ranks, patch, "ernie4_5_moe", tiny.SINGLE, tmp_path, num_nextn_predict_layers=1)
    assert seen["error"] == error


@pytest.mark.parametrize(
    ("patch", "model_type", "layout"),
    [("sharding-v2", "llama", tiny.SD2V2), ("expert-gradients", "ernie4_5_moe", tiny.EP2)],
    ids=["sharding-v2", "expert-gradients"],
)
def test_without_its_patch_training_goes_wrong_in_silence(
    ranks: ForkServer, tmp_path: Path, patch: str, model_type: str, layout: MatrixLayout
) -> None:
    kwargs = {"model_type": model_type, "layout": tiny.SINGLE.to_json(), "output_dir": str(tmp_path)}
    (right,) = ranks.run("tests.harness.tiny:train", 1, kwargs).values
    for seen in without(ranks, patch, model_type, layout, tmp_path):
        assert seen["error"] == ""
        assert seen["losses"][0] == pytest.approx(right[0], abs=1e-5)
        assert abs(seen["losses"][2] - right[2]) > 1e-3


def test_paddle_still_lacks_what_is_patched(bare_ranks: ForkServer) -> None:
    (errors,) = bare_ranks.run(f"{JOBS}:unmended_paddle", 1).values
    assert "Do not support c_identity for cpu kernel" in errors["c_identity"]
    assert "Do not support c_concat for cpu kernel" in errors["c_concat"]
    assert "Do not support c_split for cpu kernel" in errors["c_split"]
    assert errors["synchronize"].startswith("TypeError")
    assert errors["device_id"].startswith("AttributeError")
    assert "bfloat16" in errors["linear"]
    assert "bfloat16" in errors["matmul"]
    assert "cuda" in errors
