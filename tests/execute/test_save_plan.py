"""What a job keeps from one save to the next, and that it is never used for anything else; saves that go wrong."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from msgspec.structs import replace

from paddleformers_fc.distributed.channel import Payload
from paddleformers_fc.errors import FormatError, MappingError, MismatchError, StorageError
from paddleformers_fc.execute import replicas as copies, save as saving, save_plan
from paddleformers_fc.execute.load import load_checkpoint
from paddleformers_fc.execute.memory import host_pieces
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
from paddleformers_fc.execute.save_plan import MAX_CACHED_PLANS, PlanCache, SavePlan
from paddleformers_fc.families import ModelDescription, ModelTensor
from paddleformers_fc.families.stated import rules_by_name
from paddleformers_fc.layout.live import describe_roles
from paddleformers_fc.storage import files, safetensors
from paddleformers_fc.storage.manifest import MANIFEST_NAME, UNKNOWN_ORIGIN, read_manifest
from paddleformers_fc.storage.safetensors import read_header
from tests.execute.simulated import CONFIG, MODEL, Roles, ThreadChannel, canonical, job, live, same_values, succeed
from verification.digests import canonical_digests

ARRAYS = canonical()


@dataclass
class CountingChannel:
    """A rank's channel that notes what the ranks exchange messages for."""

    inner: ThreadChannel
    rank: int = field(init=False)
    world_size: int = field(init=False)
    given: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rank, self.world_size = self.inner.rank, self.inner.world_size

    def gather(self, doing: str, *arguments: Any) -> list[Payload] | None:
        """Every rank's payload."""
        self.given.append(doing)
        return self.inner.gather(doing, *arguments)


def save(directory: Path, roles_of: Callable[[int], Roles], model: ModelDescription = MODEL, ranks: int = 2) -> bool:
    """Save; whether every rank worked out a plan, or none did."""

    def work(channel: ThreadChannel) -> bool:
        small = {"config.json": config_bytes(model.config)} if channel.rank == 0 else {}
        counting = CountingChannel(channel)
        record = JobRecord(3, 24, {})
        save_checkpoint(directory, roles_of(channel.rank), model, small, record, counting)
        return "planning the save" in counting.given

    (planned,) = set(succeed(ranks, work))
    return bool(planned)


def restored(directory: Path, ranks: int = 1) -> bool:
    """Whether a load gives every value of ``ARRAYS`` back."""

    def work(channel: ThreadChannel) -> Roles:
        roles = live(ARRAYS, ranks, channel.rank, empty=True)
        load_checkpoint(open_on_all_ranks(directory, channel, "full"), roles, MODEL, channel)
        return roles

    return all(same_values(live(ARRAYS, ranks, rank), got) for rank, got in enumerate(succeed(ranks, work)))


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
    assert restored(tmp_path / "b")


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

    def work(channel: ThreadChannel) -> None:
        small = {"config.json": config_bytes(CONFIG)} if channel.rank == 0 else {}
        save_checkpoint(tmp_path / "checkpoint-3", stage(channel.rank), MODEL, small, JobRecord(3, 24, {}), channel)

    limit = safetensors.MAX_HEADER_BYTES
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 5000)
    for outcome in job(2, work):
        assert isinstance(outcome, FormatError)
        assert f"(on rank {failing})" in outcome.render()
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", limit)
    succeed(2, work)
    assert restored(tmp_path / "checkpoint-3")


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("lm_head.weight", "model_state"),
        ("model.embed_tokens.weight", "model_state"),
        ("model.norm.weight.moment1_0", "optimizer_state"),
        ("model.layers.1.mlp.down_proj.weight.beta2_pow_acc_0", "optimizer_state"),
    ],
)
def test_a_plan_is_not_used_when_one_rank_of_several_holds_something_else(tmp_path: Path, name: str, role: str) -> None:
    save(tmp_path / "a", everything)
    assert save(tmp_path / "b", without(name, role))
    assert restored(tmp_path / "b", ranks=2)
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


HALF = "model.layers.1.mlp.down_proj.weight"


def states(rank: int, sharded: int) -> Roles:
    """Weights, their master weights and their states on one of two ranks, each half of a tensor or half of a range."""
    roles = live(ARRAYS, 1 if sharded > 1 else 2, rank, sharded=sharded)
    copies = {
        name.removesuffix(".moment1_0"): weight
        for name, weight in roles["optimizer_state"].items()
        if name.endswith(".moment1_0")
    }
    return {**roles, "master_weight": copies}


def save_part(directory: Path, roles: Roles, channel: ThreadChannel) -> None:
    """Save what one rank holds."""
    small = {"config.json": config_bytes(CONFIG)} if channel.rank == 0 else {}
    save_checkpoint(directory, roles, MODEL, small, JobRecord(3, 24, {}), channel)


@pytest.mark.parametrize("sharded", [1, 2], ids=["boxes", "ranges"])
@pytest.mark.parametrize(
    ("role", "name"),
    [("optimizer_state", f"{HALF}.moment1_0"), ("optimizer_state", f"{HALF}.moment2_0"), ("master_weight", HALF)],
)
def test_a_job_that_lacks_a_part_of_a_state_saves_nothing(tmp_path: Path, role: str, name: str, sharded: int) -> None:
    succeed(2, lambda channel: save_part(tmp_path / "whole", states(channel.rank, sharded), channel))

    def work(channel: ThreadChannel) -> None:
        held = states(channel.rank, sharded)
        if channel.rank == 1:
            del held[role][name]
        save_part(tmp_path / "holes", held, channel)

    errors = job(2, work)
    assert all(isinstance(error, MismatchError) for error in errors)
    assert str(errors[0]) == str(errors[1])
    assert f"{name}: " in str(errors[0])
    assert "is not stored" in str(errors[0])
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_a_state_of_no_parameter_is_never_saved(tmp_path: Path) -> None:
    def work(channel: ThreadChannel) -> None:
        held = everything(channel.rank)
        held["optimizer_state"]["model.ghost.weight.moment1_0"] = held["model_state"]["lm_head.weight"]
        save_part(tmp_path / "a", held, channel)

    for error in job(2, work):
        assert isinstance(error, MismatchError)
        assert error.evidence == ("model.ghost.weight.moment1_0: is a state of no parameter",)
    assert list(tmp_path.iterdir()) == []


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


def test_what_is_not_contiguous_is_copied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_write_that_the_system_refuses_ends_the_save_alike_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save(tmp_path / "checkpoint-2", everything)
    before = contents(tmp_path)
    write, calls = files.os.pwrite, []

    def refuse(descriptor: int, data: Any, offset: int) -> int:
        calls.append(len(data))
        if len(calls) == 20:
            return write(descriptor, data[: len(data) // 2], offset)
        if len(calls) > 20:
            raise OSError(number, "refused")
        return write(descriptor, data, offset)

    def work(channel: ThreadChannel) -> None:
        small = {"config.json": config_bytes(CONFIG)} if channel.rank == 0 else {}
        save_checkpoint(tmp_path / "checkpoint-3", everything(channel.rank), MODEL, small, JobRecord(3, 9, {}), channel)

    threads = set(threading.enumerate())
    monkeypatch.setattr(files.os, "pwrite", refuse)
    outcomes = job(2, work)
    monkeypatch.setattr(files.os, "pwrite", write)
    assert all(isinstance(error, StorageError) for error in outcomes)
    assert str(outcomes[0]) == str(outcomes[1])
    assert f"errno {number} ({errno.errorcode[number]})" in str(outcomes[0])
    assert ", byte " in str(outcomes[0])
    assert contents(tmp_path) == before
    assert set(threading.enumerate()) <= threads
    save(tmp_path / "checkpoint-3", everything)
    assert restored(tmp_path / "checkpoint-3")


@pytest.mark.parametrize("by_name", [False, True], ids=["config.json", "rules"])
def test_a_save_that_its_own_reader_would_refuse_raises_on_every_rank_and_writes_nothing(
    tmp_path: Path, by_name: bool
) -> None:
    def work(channel: ThreadChannel) -> None:
        roles, described, config = live(ARRAYS, 1, channel.rank), MODEL, CONFIG
        if by_name:  # Stated rules of a model whose configuration names a declared family.
            shards = describe_roles(roles)["model_state"].values()
            tensors = [ModelTensor(one.name, one.global_shape, one.dtype, one.cuts) for one in shards]
            described = ModelDescription(CONFIG, rules=rules_by_name(tensors))
        else:
            config = {**CONFIG, "head_dim": 8}
        files = {"config.json": config_bytes(config)} if channel.rank == 0 else {}
        save_checkpoint(tmp_path / "checkpoint-3", roles, described, files, JobRecord(3, 24, {}), channel)

    one, other = job(2, work)
    assert isinstance(one, MappingError)
    assert str(one) == str(other)
    expected = "differs from the declaration of its family" if by_name else "head_dim: 8 in config.json, 4 in mapping"
    assert expected in str(one)
    assert not list(tmp_path.iterdir())
