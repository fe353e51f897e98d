"""A stored tensor that does not have the dtype or the shape of what it is to fill."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle

from paddleformers_fc.errors import MappingError, MismatchError
from tests.corruption import ours, stock
from tests.corruption.guarantees import Observed, fault, refused
from tests.corruption.stock import outcomes, tensor, unset
from tests.execute.simulated import live
from verification.forkserver import ForkServer

VALUES = [0.417, 1.0, 2.0, 3.0]
NORM = "model.norm.weight"


def rounded(values: list[float]) -> str:
    """Numbers as the table shows them."""
    return "[" + ", ".join(f"{value:.4g}" for value in values) + "]"


@fault("S1", "the checkpoint has another dtype than the model, and the load reshards")
def test_s1_another_dtype_under_another_layout_is_refused(ranks: ForkServer, tmp_path: Path) -> Observed:
    found = []
    for stored, wanted in (("bfloat16", "float32"), ("float32", "bfloat16")):
        directory = tmp_path / f"stock-{stored}"
        steps = [
            stock.save(directory, {"a": tensor(VALUES, stored)}, safetensors=True),
            stock.load(directory, {"a": unset(4, dtype=wanted)}, safetensors=True),
        ]
        found.append(outcomes(ranks, steps)[1]["a"])
    reinterpreted, ignored = (one["values"] for one in found)
    assert not np.allclose(reinterpreted, VALUES, atol=0.01)
    assert ignored == [-1.0] * 4

    ours.save(tmp_path / "checkpoint-3", tp=2)
    error = ours.refusal(ours.load(tmp_path / "checkpoint-3", ours.cast(ours.empty(), "bfloat16")))
    assert isinstance(error, MismatchError)
    assert len(error.evidence) > 2
    return Observed(
        f"bfloat16 {rounded(VALUES)} is loaded into float32 as {rounded(reinterpreted)}; float32 into bfloat16 is not "
        "loaded at all; no error",
        refused(error, NORM),
    )


@fault("S2", "the checkpoint has another dtype than the model, and each rank finds its own file")
def test_s2_another_dtype_under_the_same_layout_is_refused(ranks: ForkServer, tmp_path: Path) -> Observed:
    steps = [
        stock.save(tmp_path / "stock", {"a": tensor(VALUES)}),
        stock.load(tmp_path / "stock", {"a": unset(4, dtype="bfloat16")}),
    ]
    found = outcomes(ranks, steps)[1]["a"]
    assert found["dtype"] == "float32"

    ours.save(tmp_path / "checkpoint-3")
    error = ours.refusal(ours.load(tmp_path / "checkpoint-3", ours.cast(ours.empty(), "bfloat16")))
    assert isinstance(error, MismatchError)
    return Observed(f"the model's bfloat16 parameter has become {found['dtype']}; no error", refused(error, NORM))


@fault("S4", "a stored tensor of another shape, such as another vocabulary")
def test_s4_another_shape_is_refused_in_both_directions(ranks: ForkServer, tmp_path: Path) -> Observed:
    rows = np.arange(1.0, 17.0).reshape(4, 4)
    steps = [
        stock.save(tmp_path / "stock", {"a": tensor(rows)}),
        stock.load(tmp_path / "stock", {"a": unset(6, 4)}),
        stock.load(tmp_path / "stock", {"a": unset(2, 4)}),
    ]
    _, larger, smaller = outcomes(ranks, steps)
    assert larger["a"]["values"] == [*rows.tolist(), *[[-1.0] * 4] * 2]
    assert smaller["a"]["values"] == rows[:2].tolist()

    embedding = "model.embed_tokens.weight"
    ours.save(tmp_path / "checkpoint-3")
    errors = []
    for size in (48, 24):
        arrays = {name: array for name, array in ours.ARRAYS.items() if name != embedding}
        arrays[embedding] = np.zeros((size, ours.ARRAYS[embedding].shape[1]), np.float32)
        errors.append(ours.refusal(ours.load(tmp_path / "checkpoint-3", ours.empty(arrays=arrays))))
    assert all(isinstance(error, MismatchError) for error in errors)
    refused(errors[1], "stored [32, 16], expected [24, 16]")
    return Observed(
        "4 rows into 6: the last 2 keep their initial values; 4 rows into 2: the rest is cut off; no error",
        refused(errors[0], "stored [32, 16], expected [48, 16]"),
    )


@fault("S9", "a statement casts a parameter that has a float32 master weight")
def test_s9_a_cast_of_a_parameter_leaves_its_master_weight_alone(ranks: ForkServer, tmp_path: Path) -> Observed:
    statements = {"aoa_statements": ["a -> a, dtype='bfloat16'"]}
    steps = [
        stock.save(tmp_path / "stock", {"a": tensor(VALUES), "a.w_0": tensor(VALUES)}),
        stock.load(tmp_path / "stock", {"a": unset(4, dtype="bfloat16"), "a.w_0": unset(4)}, aoa_config=statements),
    ]
    master = outcomes(ranks, steps)[1]["a.w_0"]["values"]
    assert not np.allclose(master, VALUES, atol=0.01)

    ours.save(tmp_path / "checkpoint-3", roles=ours.with_masters(live(ours.ARRAYS, 1, 0)))
    statements = {"aoa_statements": [f"{NORM} -> {NORM}, dtype='bfloat16'"]}
    target = ours.cast(ours.with_masters(ours.empty()), "bfloat16", NORM)
    expected = ours.cast(ours.with_masters(live(ours.ARRAYS, 1, 0)), "bfloat16", NORM)
    assert ours.right(ours.load(tmp_path / "checkpoint-3", target, aoa=statements), expected)
    assert target["master_weight"][f"{NORM}.w_0"].local_tensor.dtype == paddle.float32
    return Observed(
        f"the master weight {rounded(VALUES)} is cast too and loaded as {rounded(master)}; no error",
        "loads right: the parameter is cast, its master weight and moments are bit for bit as saved",
    )


@fault("S10", "a statement casts to bfloat16, and the model's tensor is float16")
def test_s10_a_cast_to_another_dtype_than_the_models_is_refused(ranks: ForkServer, tmp_path: Path) -> Observed:
    steps = [
        stock.save(tmp_path / "stock", {"a": tensor(VALUES)}),
        stock.load(
            tmp_path / "stock",
            {"b": unset(4, dtype="float16")},
            aoa_config={"aoa_statements": ["a -> b, dtype='bfloat16'"]},
        ),
    ]
    values = outcomes(ranks, steps)[1]["b"]["values"]
    assert not np.allclose(values, VALUES, atol=0.01)

    ours.save(tmp_path / "checkpoint-3")
    statements = {"aoa_statements": [f"{NORM} -> {NORM}, dtype='bfloat16'"]}
    error = ours.refusal(ours.load(tmp_path / "checkpoint-3", ours.cast(ours.empty(), "float16", NORM), aoa=statements))
    assert isinstance(error, MappingError)
    return Observed(f"{rounded(VALUES)} is loaded as {rounded(values)}; no error", refused(error, "is float16"))
