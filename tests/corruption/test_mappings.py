"""Names and layouts that do not lead one to one from what is stored to what is wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from paddleformers_fc.errors import MappingError, MismatchError
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
from paddleformers_fc.families import ModelDescription
from tests.corruption import ours, phi3, stock
from tests.corruption.guarantees import Observed, fault, refused
from tests.corruption.stock import outcomes, tensor, unset
from tests.execute.simulated import CONFIG, Arrays, live, succeed
from verification.forkserver import ForkServer


def exported(directory: Path, target: Path) -> Arrays:
    """The open weights that a checkpoint exports."""
    export_checkpoint(directory, target)
    return dict(load_file(target / "model.safetensors"))


def same(found: Arrays, expected: Arrays) -> bool:
    """Whether two sets of arrays have the same names and bits."""
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


def two_ranks(name: str, array: np.ndarray[Any, Any]) -> list[dict[str, stock.Tensor]]:
    """A tensor that two ranks hold by columns, for stock."""
    rows, columns = array.shape
    half = columns // 2
    return [
        {name: tensor(array[:, half * at : half * (at + 1)], shape=[rows, columns], offset=[0, half * at])}
        for at in range(2)
    ]


@fault("S3", "tied weights: one stored tensor for two of the model's")
def test_s3_both_of_two_tied_tensors_are_loaded(ranks: ForkServer, tmp_path: Path) -> Observed:
    values = [1.0, 2.0, 3.0, 4.0]
    steps = [
        stock.save(tmp_path / "stock", {"embed": tensor(values)}),
        stock.load(
            tmp_path / "stock",
            {"embed": unset(4), "head": unset(4)},
            aoa_config={"aoa_statements": ["embed -> head"]},
        ),
    ]
    found = outcomes(ranks, steps)[1]
    assert found["head"]["values"] == values
    assert found["embed"]["values"] == [-1.0] * 4

    config = {**CONFIG, "tie_word_embeddings": True}
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    tied = {**ours.ARRAYS, head: ours.ARRAYS[embedding]}

    def save(channel: Any) -> None:
        weights = live(tied, 1, 0)["model_state"]
        weights[head].local_tensor = weights[embedding].local_tensor
        files = {"config.json": config_bytes(config)}
        roles = {"model_state": weights}
        save_checkpoint(
            tmp_path / "checkpoint-3", roles, ModelDescription(config), files, JobRecord(3, 24, {}), channel
        )

    succeed(1, save)
    stored = load_file(tmp_path / "checkpoint-3/model_state/rank-00000.safetensors")
    assert embedding in stored
    assert head not in stored
    target = {"model_state": ours.empty(arrays=tied)["model_state"]}
    expected = {"model_state": live(tied, 1, 0)["model_state"]}
    assert ours.right(ours.load(tmp_path / "checkpoint-3", target, described=ModelDescription(config)), expected)
    return Observed(
        "`head` is loaded, `embed` keeps its initial values; no error",
        "loads right: stored once, loaded into both, also where each has memory of its own",
    )


@fault("S5", "[gate \\| up] fused by two tensor-parallel ranks, taken apart")
def test_s5_gate_and_up_of_two_ranks_are_taken_apart_rank_by_rank(ranks: ForkServer, tmp_path: Path) -> Observed:
    fused = np.arange(24.0).reshape(3, 8)
    reverse = {"aoa_statements": ["g, u -> gu, fused_ffn"], "aoa_config_reverse": True}
    outcomes(ranks, [stock.save(tmp_path / "stock", *two_ranks("gu", fused))], 2)
    (found,) = outcomes(
        ranks, [stock.load(tmp_path / "stock", {"g": unset(3, 4), "u": unset(3, 4)}, aoa_config=reverse)]
    )
    assert "error" not in found
    right = fused[0, [0, 1, 4, 5]].tolist()
    first = found["g"]["values"][0]
    assert first != right

    ours.save(tmp_path / "checkpoint-3", tp=2)
    assert same(exported(tmp_path / "checkpoint-3", tmp_path / "hf"), ours.ARRAYS)
    return Observed(
        f"a row of gate becomes {first} instead of {right}; no error",
        "loads right: gate and up of a two-rank checkpoint are exported bit for bit",
    )


def save_phi3(directory: Path, arrays: Arrays, tp: int) -> None:
    """Save a Phi-3 whose fused tensors are laid out for ``tp`` ranks."""

    def work(channel: Any) -> None:
        files = {"config.json": config_bytes(phi3.CONFIG)} if channel.rank == 0 else {}
        roles = phi3.live(arrays, tp, channel.rank)
        save_checkpoint(directory, roles, phi3.MODEL, files, JobRecord(3, 24, {"tp": tp}), channel)

    succeed(tp, work)


@fault("S6", "[Q \\| K \\| V] fused by two tensor-parallel ranks, taken apart")
def test_s6_query_key_and_value_of_two_ranks_are_taken_apart_rank_by_rank(
    ranks: ForkServer, tmp_path: Path
) -> Observed:
    fused = np.arange(36.0).reshape(3, 12)
    statement = "q, k, v -> qkv, fused_qkv_old, num_heads=2, num_key_value_groups=2"
    reverse = {"aoa_statements": [statement], "aoa_config_reverse": True}
    outcomes(ranks, [stock.save(tmp_path / "stock", *two_ranks("qkv", fused))], 2)
    wanted = {name: unset(3, 4) for name in "qkv"}
    (found,) = outcomes(ranks, [stock.load(tmp_path / "stock", wanted, aoa_config=reverse)])
    assert "error" not in found
    right = fused[0, [2, 3, 8, 9]].tolist()
    first = found["k"]["values"][0]
    assert first != right

    arrays = phi3.canonical()
    save_phi3(tmp_path / "checkpoint-3", arrays, 2)
    weights = exported(tmp_path / "checkpoint-3", tmp_path / "hf")
    assert np.array_equal(weights[phi3.QKV], arrays[phi3.QKV])
    target, expected = phi3.live(arrays, 1, 0, empty=True), phi3.live(arrays, 1, 0)
    assert ours.right(ours.load(tmp_path / "checkpoint-3", target, described=phi3.MODEL), expected)
    return Observed(
        f"a row of key becomes {first} instead of {right}; no error",
        "loads right: a two-rank checkpoint of Phi-3 is exported, and loaded on one rank, bit for bit",
    )


@fault("S7", "a fused tensor of uneven parts, taken apart")
def test_s7_uneven_parts_are_taken_apart_where_they_were_joined(ranks: ForkServer, tmp_path: Path) -> Observed:
    joined = np.arange(12.0).reshape(6, 2)
    reverse = {"aoa_statements": ["a, b -> c, axis=0"], "aoa_config_reverse": True}
    steps = [
        stock.save(tmp_path / "stock", {"c": tensor(joined)}),
        stock.load(tmp_path / "stock", {"a": unset(2, 2), "b": unset(4, 2)}, aoa_config=reverse),
    ]
    found = outcomes(ranks, steps)[1]["b"]["values"]
    assert found == [*joined[3:].tolist(), [-1.0, -1.0]]

    rows = {part: ours.ARRAYS[f"model.layers.0.self_attn.{part}_proj.weight"].shape[0] for part in "qkv"}
    assert rows == {"q": 16, "k": 8, "v": 8}
    ours.save(tmp_path / "checkpoint-3")
    assert same(exported(tmp_path / "checkpoint-3", tmp_path / "hf"), ours.ARRAYS)
    return Observed(
        "6 rows joined of 2 and 4 are split 3 and 3: the second part begins one row late and its last row keeps its "
        "initial value; no error",
        "loads right: qkv of 16, 8 and 8 columns is exported bit for bit",
    )


@fault("S8", "a fused tensor of two tensor-parallel ranks, transposed and taken apart (Phi-3's own export)")
def test_s8_a_transposed_fused_tensor_of_two_ranks_is_taken_apart_rank_by_rank(
    ranks: ForkServer, tmp_path: Path
) -> Observed:
    fused = np.arange(24.0).reshape(3, 8)
    statements = {"aoa_statements": ["gu^T -> g, u, fused_ffn, axis=0"]}
    outcomes(ranks, [stock.save(tmp_path / "stock", *two_ranks("gu", fused))], 2)
    wanted = {"g": unset(4, 3), "u": unset(4, 3)}
    (found,) = outcomes(ranks, [stock.load(tmp_path / "stock", wanted, aoa_config=statements)])
    assert "error" not in found
    right = fused.T[2].tolist()
    first = found["u"]["values"][0]
    assert first != right

    arrays = phi3.canonical()
    save_phi3(tmp_path / "checkpoint-3", arrays, 2)
    assert same(exported(tmp_path / "checkpoint-3", tmp_path / "hf"), arrays)
    return Observed(
        f"a row of up becomes {first} instead of {right}; no error",
        "loads right: a two-rank checkpoint of Phi-3 is exported bit for bit",
    )


@fault("S16", "statements with a state dict of plain tensors")
def test_s16_statements_that_cannot_be_read_are_refused(ranks: ForkServer, tmp_path: Path) -> Observed:
    nonsense = {"aoa_statements": ["this is >> nothing"]}
    steps = [
        stock.save(tmp_path / "stock", {"a": tensor([1.0, 2.0], plain=True)}),
        stock.load(tmp_path / "stock", {"a": unset(2, plain=True)}, aoa_config=nonsense),
    ]
    assert outcomes(ranks, steps)[1] == {"a": {"values": [1.0, 2.0], "dtype": "float32"}}

    ours.save(tmp_path / "checkpoint-3")
    error = ours.refusal(ours.load(tmp_path / "checkpoint-3", ours.empty(), aoa=nonsense))
    assert isinstance(error, MappingError)
    return Observed(
        f"the statement `{nonsense['aoa_statements'][0]}` is never read, and the load continues; no error",
        refused(error, "statement 1"),
    )


@fault("S17", "a parameter that is not stored, beside a master weight under an older name")
def test_s17_a_parameter_that_is_not_stored_receives_nothing(ranks: ForkServer, tmp_path: Path) -> Observed:
    stored = {"m.w": tensor([1.0, 1.0]), "m.w_fp32_master_0": tensor([9.0, 9.0])}
    outcomes(ranks, [stock.save(tmp_path / "stock", stored, unique_id=1)])
    received: set[tuple[float, ...]] = set()
    # Which of two missing names Paddle looks at first is a matter of chance; looking at the other one it raises.
    for name in (f"m.b{index}" for index in range(40)):
        wanted = {"m.w": unset(2), "m.master_weights.w": unset(2), name: unset(2)}
        (found,) = outcomes(ranks, [stock.load(tmp_path / "stock", wanted)])
        if "error" not in found:
            received.add(tuple(found[name]["values"]))
            break
    assert received == {(9.0, 9.0)}

    ours.save(tmp_path / "checkpoint-3", roles=ours.with_masters(live(ours.ARRAYS, 1, 0)))
    deeper = {
        **ours.ARRAYS,
        **{name.replace(".1.", ".2."): array for name, array in ours.ARRAYS.items() if ".layers.1." in name},
    }
    target = ours.with_masters(ours.empty(arrays=deeper))
    error = ours.refusal(ours.load(tmp_path / "checkpoint-3", target))
    assert isinstance(error, MismatchError)
    return Observed(
        "the parameter is filled with the master weight of another; no error",
        refused(error, "model.layers.2.mlp.down_proj.weight"),
    )


def test_a_two_rank_phi3_is_laid_out_as_the_family_declares(tmp_path: Path) -> None:
    arrays = phi3.canonical()
    save_phi3(tmp_path / "checkpoint-3", arrays, 2)

    def work(channel: Any) -> bool:
        target, expected = (phi3.live(arrays, 2, channel.rank, empty=flag) for flag in (True, False))
        return ours.right(ours.load(tmp_path / "checkpoint-3", target, described=phi3.MODEL, channel=channel), expected)

    assert succeed(2, work) == [True, True]
