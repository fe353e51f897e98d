"""What a job keeps from one save to the next, and that it is never used for anything else; saves that go wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from msgspec.structs import replace

from paddleformers_fc.errors import FlexError, FormatError, MappingError, MismatchError
from paddleformers_fc.execute import replicas as copies, save as saving, save_plan
from paddleformers_fc.execute.memory import host_pieces
from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
from paddleformers_fc.execute.save_plan import MAX_CACHED_PLANS, PlanCache, SavePlan
from paddleformers_fc.families import ModelDescription, ModelTensor
from paddleformers_fc.families.stated import rules_by_name
from paddleformers_fc.layout.live import describe_roles
from paddleformers_fc.storage import safetensors
from paddleformers_fc.storage.manifest import MANIFEST_NAME, UNKNOWN_ORIGIN, read_manifest
from paddleformers_fc.storage.safetensors import read_header
from tests.execute.simulated import (
    ARRAYS,
    CONFIG,
    MODEL,
    Roles,
    ThreadChannel,
    attempt_save,
    canonical,
    live,
    load,
    succeed,
)
from verification.digests import canonical_digests

HALF = "model.layers.1.mlp.down_proj.weight"
Held = Callable[[int], Roles]


def save(directory: Path, held: Held, model: ModelDescription = MODEL, ranks: int = 2) -> bool:
    """Save; whether every rank worked out a plan, or none did."""

    def work(channel: ThreadChannel) -> bool:
        small = {"config.json": config_bytes(model.config)} if channel.rank == 0 else {}
        save_checkpoint(directory, held(channel.rank), model, small, JobRecord(3, 24, {}), channel)
        return "planning the save" in channel.purposes

    (planned,) = set(succeed(ranks, work))
    return bool(planned)


def everything(rank: int) -> Roles:
    return live(ARRAYS, 1, rank)


def without(name: str, role: str) -> Callable[[int], Roles]:
    """Two ranks that hold everything, but the second does not hold this one."""

    def roles(rank: int) -> Roles:
        held = everything(rank)
        if rank == 1:
            del held[role][name]
        return held

    return roles


def contents(directory: Path) -> dict[str, object]:
    """Every file of a directory; the manifest without the time of the save."""
    found: dict[str, object] = {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }
    if MANIFEST_NAME in found:
        found[MANIFEST_NAME] = replace(read_manifest(directory), saved_at=UNKNOWN_ORIGIN)
    return found


def test_a_second_save_of_the_same_shards_exchanges_digests_alone_and_writes_the_same(tmp_path: Path) -> None:
    arrays = canonical(seed=7)
    mine = {name: array for name, array in arrays.items() if "layers.1" not in name}
    assert save(tmp_path / "first", lambda rank: live(mine, 1, rank))
    save(tmp_path / "a", everything)
    assert not save(tmp_path / "b", everything)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    load(tmp_path / "b", verify="full")


@pytest.mark.parametrize("failing", [0, 1])
def test_files_that_one_rank_alone_cannot_write_are_refused_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    def stage(rank: int) -> Roles:
        """One parameter on one rank, all others on the one whose headers are longer."""
        return {
            role: {name: one for name, one in names.items() if name.startswith("lm_head.weight") == (rank != failing)}
            for role, names in everything(rank).items()
        }

    limit = safetensors.MAX_HEADER_BYTES
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 5000)
    error = attempt_save(tmp_path / "checkpoint-3", stage).error(FormatError)
    assert f"(on rank {failing})" in error.render()
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", limit)
    attempt_save(tmp_path / "checkpoint-3", stage).results()
    load(tmp_path / "checkpoint-3", verify="full")


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.embed_tokens.weight", "model_state"),
        ("model.layers.1.mlp.down_proj.weight.beta2_pow_acc_0", "optimizer_state"),
    ],
)
def test_a_plan_is_not_used_when_one_rank_of_several_holds_something_else(tmp_path: Path, name: str, role: str) -> None:
    save(tmp_path / "a", everything)
    assert save(tmp_path / "b", without(name, role))
    load(tmp_path / "b", 2, verify="full")
    assert not save(tmp_path / "c", without(name, role))
    assert contents(tmp_path / "b") == contents(tmp_path / "c")


def test_a_plan_is_not_used_for_another_dtype_shape_or_configuration(tmp_path: Path) -> None:
    save(tmp_path / "a", everything)

    def planned(number: int, roles: Callable[[int], Roles], **options: Any) -> bool:
        return save(tmp_path / str(number), roles, **options)

    def half(rank: int) -> Roles:
        held = everything(rank)
        norm = held["model_state"]["model.norm.weight"]
        norm.local_tensor = norm.local_tensor.astype("float16")
        return held

    assert planned(1, half)
    assert planned(2, everything, model=ModelDescription({**CONFIG, "remark": "x"}))
    larger = canonical(layers=3)
    assert planned(4, lambda rank: live(larger, 1, rank))
    assert not planned(5, lambda rank: live(larger, 1, rank))


def test_a_rank_that_has_forgotten_a_plan_makes_all_ranks_work_it_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a", everything)
    known = PlanCache.known
    monkeypatch.setattr(PlanCache, "known", lambda self, rank, facts: known(self, rank, facts) if rank == 0 else {})
    assert save(tmp_path / "b", everything)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_only_the_last_plans_are_kept_and_every_rank_has_its_own() -> None:
    keeper, plan = PlanCache(), SavePlan((), None)
    for number in range(MAX_CACHED_PLANS):
        keeper.keep(0, b"a", bytes([number]), plan)
    keeper.keep(0, b"a", b"\0", plan)
    keeper.keep(1, b"b", b"x", plan)
    assert list(keeper.known(1, b"b")) == [b"x"]
    assert keeper.known(1, b"a") == {}
    assert b"\0" in keeper.known(0, b"a")
    assert b"\1" not in keeper.known(0, b"a")
    assert len(keeper.known(0, b"a")) == MAX_CACHED_PLANS - 1


def lacking(role: str, name: str, sharded: int) -> Held:
    """Weights, their master weights and their states on two ranks, the second of which lacks its half of one."""

    def held(rank: int) -> Roles:
        roles = live(ARRAYS, 1 if sharded > 1 else 2, rank, sharded=sharded)
        moments = {name: one for name, one in roles["optimizer_state"].items() if name.endswith(".moment1_0")}
        roles["master_weight"] = {name.removesuffix(".moment1_0"): one for name, one in moments.items()}
        if rank == 1:
            del roles[role][name]
        return roles

    return held


def with_a_state_of_no_parameter(rank: int) -> Roles:
    held = everything(rank)
    held["optimizer_state"]["model.ghost.weight.moment1_0"] = held["model_state"]["lm_head.weight"]
    return held


def that_one_rank_cannot_describe(rank: int) -> Roles:
    held = everything(rank)
    if rank == 1:
        held["model_state"]["model.norm.weight"].local_shape = (99,)
    return held


def under_rules_by_name() -> ModelDescription:
    """Stated rules of a model whose configuration names a declared family."""
    shards = describe_roles(everything(0))["model_state"].values()
    return ModelDescription(
        CONFIG, rules=rules_by_name([ModelTensor(one.name, one.global_shape, one.dtype, one.cuts) for one in shards])
    )


OTHER_CONFIG = {"files": lambda rank: {"config.json": config_bytes({**CONFIG, "head_dim": 8})} if rank == 0 else {}}
STATES = [("optimizer_state", f"{HALF}.moment1_0"), ("optimizer_state", f"{HALF}.moment2_0"), ("master_weight", HALF)]
REFUSED: dict[str, tuple[Held, dict[str, Any], type[FlexError], str]] = {
    **{
        f"half of {name} in {role} is missing, {kind}": (lacking(role, name, ranks), {}, MismatchError, f"{name}: ")
        for role, name in STATES
        for ranks, kind in ((1, "a box"), (2, "a range"))
    },
    "a state of no parameter": (
        *(with_a_state_of_no_parameter, {}, MismatchError),
        "model.ghost.weight.moment1_0: is a state of no parameter",
    ),
    "an impossible shard": (that_one_rank_cannot_describe, {}, MismatchError, "rank 1"),
    "another config.json": (everything, OTHER_CONFIG, MappingError, "head_dim: 8 in config.json, 4 in mapping"),
    "other rules": (
        *(everything, {"described": under_rules_by_name()}, MappingError),
        "differs from the declaration of its family",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_save_that_is_refused_leaves_nothing_and_raises_the_same_error_on_every_rank(
    tmp_path: Path, why: str
) -> None:
    held, options, kind, text = REFUSED[why]
    error = attempt_save(tmp_path / "checkpoint-3", held, **options).error(kind)
    assert text in str(error)
    assert ("is not stored" in str(error)) == ("missing" in why)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ranks", [2, 4])
def test_files_are_bounded_and_tensors_that_do_not_fit_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    big = {**ARRAYS, "model.embed_tokens.weight": np.arange(3200 * 16, dtype=np.float32).reshape(3200, 16)}
    with monkeypatch.context() as small:
        small.setattr(save_plan, "MAX_FILE_BYTES", 7000)
        small.setattr(copies, "MIN_PART_BYTES", 16)
        small.setattr(saving, "_PLANS", PlanCache())
        save(tmp_path / "a", lambda rank: live(big, 1, rank), ranks=ranks)
    found = list((tmp_path / "a").glob("*/*.safetensors"))
    stored = [read_header(path).tensors.values() for path in found]
    assert max(sum(one.end - one.begin for one in tensors) for tensors in stored) <= 7000
    assert {path.name for path in found} >= {"rank-00000-00001.safetensors", "rank-00001-00002.safetensors"}
    written = [
        {name for path in found if path.name.startswith(f"rank-{rank:05d}") for name in read_header(path).tensors}
        for rank in range(ranks)
    ]
    assert sum(map(len, written)) > len(set.union(*written)), "several ranks write parts of a tensor"
    whole = {digest.md5 for digest in canonical_digests(tmp_path / "a")}
    save(tmp_path / "b", lambda rank: live(big, 1, rank), ranks=1)
    assert whole == {digest.md5 for digest in canonical_digests(tmp_path / "b")}


def test_a_noncontiguous_tensor_is_copied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddleformers_fc.execute.memory._PIECE_BYTES", 100)
    numbers = np.arange(7 * 5 * 4, dtype=np.float32).reshape(7, 5, 4)
    turned = paddle.to_tensor(numbers).transpose([2, 0, 1])
    assert not turned.is_contiguous()
    expected = numbers.transpose(2, 0, 1).ravel()
    parts = list(host_pieces(turned, 35, 140))
    assert len(parts) == 3
    assert (np.concatenate(parts) == expected[35:140]).all()
    ones = turned.unsqueeze(0)
    assert (np.concatenate(list(host_pieces(ones, 0, 140))) == expected).all()
    half = turned.astype("bfloat16").transpose([1, 0, 2])
    assert str(next(host_pieces(half, 0, 140)).dtype) == "bfloat16"
