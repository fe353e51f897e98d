"""Paddle's own flex checkpoint and ours: dtypes, shapes, names, layouts, and what a load or save leaves to the next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from safetensors.numpy import load_file, save_file

from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.plan.simulate import declared_model
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME
from tests.corruption import ours, stock
from tests.corruption.guarantees import Seen, fault, raised
from tests.corruption.stock import outcomes, tensor, unset
from tests.execute.simulated import CONFIG, Arrays, Roles, live
from tests.families.spaces import BY_NAME, model_of, settings, spaces
from tests.harness.on_ranks import run_on_ranks
from tests.storage.support import flip
from verification import simulate_ranks
from verification.forkserver import ForkServer

VALUES = [0.417, 1.0, 2.0, 3.0]
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
CAST = {"aoa_statements": [f"{NORM} -> {NORM}, dtype='bfloat16'"]}


def rounded(values: list[float]) -> str:
    """Numbers as the table shows them."""
    return "[" + ", ".join(f"{value:.4g}" for value in values) + "]"


@fault("S1")
def test_s1_a_different_dtype_is_rejected_when_the_load_reshards(ranks: ForkServer, tmp_path: Path) -> Seen:
    found = []
    for stored, wanted in (("bfloat16", "float32"), ("float32", "bfloat16")):
        given = {"a": tensor(VALUES, stored)}, {"a": unset(4, dtype=wanted)}
        found.append(stock.loaded(ranks, tmp_path / stored, *given, safetensors=True)["a"]["values"])
    reinterpreted, ignored = found
    assert ignored == [-1.0] * 4
    ours.save(tmp_path / "checkpoint-3", tp=2)
    error = ours.refusal(ours.load(tmp_path / "checkpoint-3", ours.cast(ours.empty(), "bfloat16")))
    assert len(error.evidence) > 2
    return {"found": rounded(reinterpreted), "raised": raised(error, NORM)}


@fault("S2")
def test_s2_a_different_dtype_is_rejected_under_the_same_layout(ranks: ForkServer, tmp_path: Path) -> Seen:
    found = stock.loaded(ranks, tmp_path / "stock", {"a": tensor(VALUES)}, {"a": unset(4, dtype="bfloat16")})["a"]
    ours.save(tmp_path / "checkpoint-3")
    error = ours.refusal(ours.load(tmp_path / "checkpoint-3", ours.cast(ours.empty(), "bfloat16")))
    return {"dtype": found["dtype"], "raised": raised(error, NORM)}


@fault("S4")
def test_s4_a_larger_or_smaller_shape_is_rejected(ranks: ForkServer, tmp_path: Path) -> Seen:
    rows = np.arange(1.0, 17.0).reshape(4, 4)
    larger, smaller = (
        stock.loaded(ranks, tmp_path / f"stock-{size}", {"a": tensor(rows)}, {"a": unset(size, 4)})["a"]["values"]
        for size in (6, 2)
    )
    assert larger == [*rows.tolist(), *[[-1.0] * 4] * 2]
    assert smaller == rows[:2].tolist()
    ours.save(tmp_path / "checkpoint-3")
    said = []
    for size in (48, 24):
        arrays = {**ours.ARRAYS, EMBEDDING: np.zeros((size, ours.ARRAYS[EMBEDDING].shape[1]), np.float32)}
        error = ours.refusal(ours.load(tmp_path / "checkpoint-3", ours.empty(arrays)))
        said.append(raised(error, f"stored [32, 16], expected [{size}, 16]"))
    return {"raised": said[0]}


@fault("S9")
def test_s9_casting_a_parameter_keeps_its_master_weight(ranks: ForkServer, tmp_path: Path) -> Seen:
    given = {"a": tensor(VALUES), "a.w_0": tensor(VALUES)}, {"a": unset(4, dtype="bfloat16"), "a.w_0": unset(4)}
    aoa = {"aoa_statements": ["a -> a, dtype='bfloat16'"]}
    master = stock.loaded(ranks, tmp_path / "stock", *given, aoa_config=aoa)["a.w_0"]["values"]
    ours.save(tmp_path / "checkpoint-3", held=lambda rank: ours.with_masters(live(ours.ARRAYS, 1, rank)))
    target = ours.cast(ours.with_masters(ours.empty()), "bfloat16", NORM)
    expected = ours.cast(ours.with_masters(live(ours.ARRAYS, 1, 0)), "bfloat16", NORM)
    assert ours.right(ours.load(tmp_path / "checkpoint-3", target, aoa=CAST), expected)
    assert target["master_weight"][f"{NORM}.w_0"].local_tensor.dtype == paddle.float32
    return {"master": rounded(master)}


@fault("S10")
def test_s10_a_cast_to_a_dtype_other_than_the_models_is_rejected(ranks: ForkServer, tmp_path: Path) -> Seen:
    given = {"a": tensor(VALUES)}, {"b": unset(4, dtype="float16")}
    aoa = {"aoa_statements": ["a -> b, dtype='bfloat16'"]}
    values = stock.loaded(ranks, tmp_path / "stock", *given, aoa_config=aoa)["b"]["values"]
    ours.save(tmp_path / "checkpoint-3")
    error = ours.refusal(ours.load(tmp_path / "checkpoint-3", ours.cast(ours.empty(), "float16", NORM), aoa=CAST))
    return {"found": rounded(values), "raised": raised(error, "is float16")}


def exported_right(directory: Path, expected: Arrays) -> bool:
    """Whether a checkpoint exports open weights of these names and bits."""
    export_checkpoint(directory, directory.with_name("hf"))
    found = load_file(directory.with_name("hf") / "model.safetensors")
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


def taken_apart(
    ranks: ForkServer, directory: Path, fused: np.ndarray[Any, Any], parts: str, statement: str, **reverse: bool
) -> dict[str, Any]:
    """The first row of each part that stock takes out of a tensor ``f``, which two ranks hold by columns."""
    rows, columns = fused.shape
    halves = np.split(fused, 2, axis=1)
    held = [{"f": tensor(half, shape=[rows, columns], offset=[0, at * columns // 2])} for at, half in enumerate(halves)]
    outcomes(ranks, stock.save(directory, *held), nproc=2)
    shape = (rows, columns // len(parts))
    wanted = {part: unset(*(shape if reverse else shape[::-1])) for part in parts}
    aoa = {"aoa_statements": [statement], **{f"aoa_config_{name}": value for name, value in reverse.items()}}
    (found,) = outcomes(ranks, stock.load(directory, wanted, aoa_config=aoa))
    return {part: one["values"][0] for part, one in found.items()}


@fault("S3")
def test_s3_both_tied_tensors_are_loaded(ranks: ForkServer, tmp_path: Path) -> None:
    values = [1.0, 2.0, 3.0, 4.0]
    given = {"embed": tensor(values)}, {"embed": unset(4), "head": unset(4)}
    found = stock.loaded(ranks, tmp_path / "stock", *given, aoa_config={"aoa_statements": ["embed -> head"]})
    assert (found["head"]["values"], found["embed"]["values"]) == (values, [-1.0] * 4)

    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    described = ModelDescription({**CONFIG, "tie_word_embeddings": True})
    tied = {**ours.ARRAYS, head: ours.ARRAYS[embedding]}
    model = ours.model_of(tied)
    model["model_state"][head].local_tensor = model["model_state"][embedding].local_tensor
    ours.save(tmp_path / "checkpoint-3", described=described, held=lambda rank: model)
    stored = load_file(tmp_path / "checkpoint-3/model_state/rank-00000.safetensors")
    assert (embedding in stored, head in stored) == (True, False)
    target = {"model_state": ours.empty(tied)["model_state"]}
    assert ours.right(ours.load(tmp_path / "checkpoint-3", target, described=described), ours.model_of(tied))


@fault("S5")
def test_s5_gate_and_up_of_two_ranks_are_split_rank_by_rank(ranks: ForkServer, tmp_path: Path) -> Seen:
    fused = np.arange(24.0).reshape(3, 8)
    found = taken_apart(ranks, tmp_path / "stock", fused, "gu", "g, u -> f, fused_ffn", reverse=True)["g"]
    right = fused[0, [0, 1, 4, 5]].tolist()
    assert exported_right(ours.save(tmp_path / "checkpoint-3", tp=2), ours.ARRAYS)
    return {"found": found, "right": right}


PHI3 = settings(BY_NAME["phi3"], tie_word_embeddings=False)


def phi3(tp: int, rank: int, empty: bool = False) -> Roles:
    """One rank's live weights of a tiny Phi-3: fused tensors hold, rank after rank, that rank's share of every part."""
    model = declared_model(BY_NAME["phi3"], model_of(PHI3), parse_grid(f"tp={tp}"), "float32")
    _, _, arrays = spaces(BY_NAME["phi3"], PHI3, tp)
    roles = {MODEL_STATE: model.weights(rank)}
    held = simulate_ranks.filled(roles, lambda _, shard: arrays[shard.name].astype("float32") * (not empty))
    tensors = {name: paddle.to_tensor(one.local_tensor.array) for name, one in held[MODEL_STATE].items()}
    return {MODEL_STATE: {name: replace(one, local_tensor=tensors[name]) for name, one in held[MODEL_STATE].items()}}


def phi3_is_exported_right(directory: Path) -> bool:
    """Whether a checkpoint of two ranks exports the weights of that Phi-3."""
    ours.save(directory, tp=2, described=model_of(PHI3), held=lambda rank: phi3(2, rank))
    return exported_right(directory, spaces(BY_NAME["phi3"], PHI3)[1])


@fault("S6")
def test_s6_query_key_and_value_of_two_ranks_are_split_rank_by_rank(ranks: ForkServer, tmp_path: Path) -> Seen:
    fused = np.arange(36.0).reshape(3, 12)
    statement = "q, k, v -> f, fused_qkv_old, num_heads=2, num_key_value_groups=2"
    found = taken_apart(ranks, tmp_path / "stock", fused, "qkv", statement, reverse=True)["k"]
    right = fused[0, [2, 3, 8, 9]].tolist()
    assert phi3_is_exported_right(tmp_path / "checkpoint-3")
    target, expected = (phi3(1, 0, empty) for empty in (True, False))
    assert ours.right(ours.load(tmp_path / "checkpoint-3", target, described=model_of(PHI3)), expected)
    return {"found": found, "right": right}


@fault("S7")
def test_s7_unequal_parts_are_split_where_they_were_joined(ranks: ForkServer, tmp_path: Path) -> None:
    joined = np.arange(12.0).reshape(6, 2)
    given = {"c": tensor(joined)}, {"a": unset(2, 2), "b": unset(4, 2)}
    reverse = {"aoa_statements": ["a, b -> c, axis=0"], "aoa_config_reverse": True}
    found = stock.loaded(ranks, tmp_path / "stock", *given, aoa_config=reverse)["b"]["values"]
    assert found == [*joined[3:].tolist(), [-1.0, -1.0]]
    rows = {part: ours.ARRAYS[f"model.layers.0.self_attn.{part}_proj.weight"].shape[0] for part in "qkv"}
    assert rows == {"q": 16, "k": 8, "v": 8}
    assert exported_right(ours.save(tmp_path / "checkpoint-3"), ours.ARRAYS)


@fault("S8")
def test_s8_a_transposed_fused_tensor_of_two_ranks_is_split_rank_by_rank(ranks: ForkServer, tmp_path: Path) -> Seen:
    fused = np.arange(24.0).reshape(3, 8)
    found = taken_apart(ranks, tmp_path / "stock", fused, "gu", "f^T -> g, u, fused_ffn, axis=0")["u"]
    right = fused.T[2].tolist()
    assert phi3_is_exported_right(tmp_path / "checkpoint-3")
    return {"found": found, "right": right}


@fault("S16")
def test_s16_invalid_statements_are_rejected(ranks: ForkServer, tmp_path: Path) -> Seen:
    nonsense = {"aoa_statements": ["this is >> nothing"]}
    given = {"a": tensor([1.0, 2.0], plain=True)}, {"a": unset(2, plain=True)}
    found = stock.loaded(ranks, tmp_path / "stock", *given, aoa_config=nonsense)
    assert found == {"a": {"values": [1.0, 2.0], "dtype": "float32"}}
    ours.save(tmp_path / "checkpoint-3")
    error = ours.refusal(ours.load(tmp_path / "checkpoint-3", ours.empty(), aoa=nonsense))
    return {"raised": raised(error, "statement 1")}


@fault("S17")
def test_s17_a_parameter_that_is_not_stored_is_not_filled(ranks: ForkServer, tmp_path: Path) -> Seen:
    stored = {"m.w": tensor([1.0, 1.0]), "m.w_fp32_master_0": tensor([9.0, 9.0])}
    outcomes(ranks, stock.save(tmp_path / "stock", stored, unique_id=1))
    received: set[tuple[float, ...]] = set()
    # Paddle visits the two missing names in random order, and raises if it visits the other one first.
    for name in (f"m.b{index}" for index in range(40)):
        wanted = {"m.w": unset(2), "m.master_weights.w": unset(2), name: unset(2)}
        (found,) = outcomes(ranks, stock.load(tmp_path / "stock", wanted))
        if "error" not in found:
            received.add(tuple(found[name]["values"]))
            break
    assert received == {(9.0, 9.0)}

    ours.save(tmp_path / "checkpoint-3", held=lambda rank: ours.with_masters(live(ours.ARRAYS, 1, rank)))
    second = {name: array for name, array in ours.ARRAYS.items() if ".layers.1." in name}
    deeper = {**ours.ARRAYS, **{name.replace(".1.", ".2."): array for name, array in second.items()}}
    error = ours.refusal(ours.load(tmp_path / "checkpoint-3", ours.with_masters(ours.empty(deeper))))
    return {"raised": raised(error, "model.layers.2.mlp.down_proj.weight")}


def load_without_strided_kernels(directory: Path) -> None:
    """Load while Paddle's strided kernels are off, in a process of its own."""
    paddle.set_flags({"FLAGS_use_stride_kernel": 0})
    assert ours.right(ours.load(directory, ours.empty()), live(ours.ARRAYS, 1, 0))


@fault("S11")
def test_s11_a_load_does_not_depend_on_paddles_strided_kernels(ranks: ForkServer, tmp_path: Path) -> None:
    off = {"flags": {"FLAGS_use_stride_kernel": 0}}
    steps = (
        stock.save(tmp_path / "stock", {"a": tensor(VALUES)}, unique_id=1),
        stock.load(tmp_path / "stock", {"a": unset(4)}, **off),
    )
    assert outcomes(ranks, *steps)[1]["a"]["values"] == [-1.0] * 4
    run_on_ranks(ranks, 1, load_without_strided_kernels, directory=ours.save(tmp_path / "checkpoint-3", tp=2))


@fault("S12")
def test_s12_a_second_save_replaces_the_first(ranks: ForkServer, tmp_path: Path) -> None:
    old, new = ({name: tensor([value, value]) for name in "ab"} for value in (1.0, 2.0))
    outcomes(ranks, stock.save(tmp_path / "stock", old), nproc=2)
    found = stock.loaded(ranks, tmp_path / "stock", new, {"a": unset(2), "b": unset(2)})
    assert sorted(one["values"][0] for one in found.values()) == [1.0, 2.0]
    ours.save(tmp_path / "checkpoint-3", sharded=2)
    ours.save(tmp_path / "checkpoint-3", ours.OTHER)
    assert ours.right(ours.load(tmp_path / "checkpoint-3", ours.empty(), "full"), live(ours.OTHER, 1, 0))
    files = [path.name for path in (tmp_path / "checkpoint-3").glob("*/*.safetensors")]
    assert files == ["rank-00000.safetensors"] * 2


@fault("S13")
def test_s13_a_failed_load_does_not_affect_the_next(ranks: ForkServer, tmp_path: Path) -> None:
    values = [7.0, 8.0, 9.0, 10.0, 11.0, 12.0]
    *_, failed, found = outcomes(
        ranks,
        stock.save(tmp_path / "one", {"a": tensor(VALUES)}, safetensors=True),
        stock.save(tmp_path / "other", {"a": tensor(values)}, safetensors=True),
        stock.load(tmp_path / "one", {"a": unset(4), "z": unset(4)}, safetensors=True),
        stock.load(tmp_path / "other", {"a": unset(6)}, safetensors=True),
    )
    assert failed == {"error": "KeyError: 'z'"}
    assert found["a"]["values"] == [*values[:4], -1.0, -1.0]
    ours.save(tmp_path / "checkpoint-3")
    ours.save(tmp_path / "checkpoint-4", ours.OTHER, tp=2)
    (tmp_path / "checkpoint-3/model_state/rank-00000.safetensors").unlink()
    target = ours.empty()
    ours.refusal(ours.load(tmp_path / "checkpoint-3", target))
    assert ours.right(ours.load(tmp_path / "checkpoint-4", target), live(ours.OTHER, 1, 0))


@fault("S14")
def test_s14_every_load_reads_the_directory_again(ranks: ForkServer, tmp_path: Path) -> None:
    one, other = [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]
    saves = (stock.save(tmp_path / "stock", {"a": tensor(it)}, unique_id=at) for at, it in enumerate((one, other)))
    loads = (stock.load(tmp_path / "stock", {"a": unset(4)}, unique_id=at) for at in range(2))
    assert outcomes(ranks, *saves, *loads)[3]["a"]["values"] == one
    target = ours.empty()
    for arrays in (ours.ARRAYS, ours.OTHER):
        ours.save(tmp_path / "checkpoint-3", arrays)
        assert ours.right(ours.load(tmp_path / "checkpoint-3", target), live(arrays, 1, 0))


@fault("S15")
def test_s15_replaced_open_weights_are_read_by_their_own_header(ranks: ForkServer, tmp_path: Path) -> Seen:
    weights = tmp_path / "stock"
    weights.mkdir()
    found = []
    for dtype in (np.float32, np.float16):
        save_file({"a": np.array(VALUES, dtype)}, weights / "model.safetensors")
        found.append(outcomes(ranks, stock.load(weights, {"a": unset(4)}, safetensors=True))[0]["a"]["values"])
    assert np.allclose(found[0], VALUES)
    assert (weights / "flex-ckpt.auto_generated.metadata").exists()

    path = tmp_path / "hf/model.safetensors"
    export_checkpoint(ours.save(tmp_path / "checkpoint-3"), path.parent)
    (path.parent / CHECKSUMS_NAME).unlink()  # Open weights of other sources have no checksums.
    listed = sorted(one.name for one in path.parent.iterdir())
    target = ours.empty()
    for dtype in (np.float32, np.float16):
        save_file({name: array.astype(dtype) for name, array in load_file(path).items()}, path)
        held = {name: array.astype(dtype).astype(np.float32) for name, array in ours.ARRAYS.items()}
        assert ours.right(ours.load_open_weights(path.parent, target), ours.model_of(held))
    assert sorted(one.name for one in path.parent.iterdir()) == listed
    return {"found": rounded(found[1])}


@fault("S18")
def test_s18_a_flipped_bit_is_detected(ranks: ForkServer, tmp_path: Path) -> Seen:
    found = []
    for suffix in ("distcp", "safetensors"):
        directory, options = tmp_path / suffix, {"safetensors": suffix == "safetensors"}
        outcomes(ranks, stock.save(directory, {"a": tensor(VALUES)}, **options))
        (path,) = directory.glob(f"*.{suffix}")
        flip(path, path.read_bytes().index(np.float32(VALUES[0]).tobytes()) + 3, 0x40)
        found.append(outcomes(ranks, stock.load(directory, {"a": unset(4)}, **options))[0]["a"]["values"])
    assert found[0] == found[1]
    path = ours.save(tmp_path / "checkpoint-3") / "model_state/rank-00000.safetensors"
    flip(path, path.read_bytes().index(ours.ARRAYS[NORM].tobytes()))
    error = ours.load(tmp_path / "checkpoint-3", ours.empty(), "full").error  # Found while tensors are filled.
    assert error is not None
    return {"found": rounded(found[0]), "raised": raised(error, "model_state/rank-00000.safetensors")}
