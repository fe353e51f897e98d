"""Copies of a tied tensor that differ are found by a save, recorded, refused, and read where a user chooses one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from paddleformers_fc.distributed.channel import ALONE, LocalChannel
from paddleformers_fc.errors import MismatchError, NotACheckpoint
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.load import load_checkpoint
from paddleformers_fc.execute.memory import HostPieces, view_of
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.replicas import Ties, Writers, hash_ties, ties_of
from paddleformers_fc.layout.roles import OPTIMIZER_STATE
from paddleformers_fc.layout.shard_messages import decode_shards, encode_rank_shards
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import Box, whole
from paddleformers_fc.plan.simulate import SimulatedModel
from paddleformers_fc.storage.manifest import read_manifest, write_manifest
from paddleformers_fc.trainer.resume import Search, require_newest
from tests.cli.support import run
from tests.execute.simulated import Outcomes, attempt_save, succeed
from verification import simulate_ranks

EMBEDDING, LM_HEAD = "model.embedding.embed_tokens.weight", "model.lm_head.weight"
TIED = structs.replace(
    simulate_ranks.QWEN3_MOE,
    config={
        **simulate_ranks.QWEN3_MOE.config,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
        "decoder_sparse_step": 1,
    },
)
GRIDS = ["pp=2", "pp=3", "pp=4", "dp=2,pp=2", "tp=2,pp=2", "sharding=2,split=true,pp=2", "sharding=2,pp=2"]
Change = Callable[[int, simulate_ranks.Roles], object]


def tied_value(role: str, shard: Shard) -> Any:
    """A tensor's values; the same under both names of a tied one."""
    name = shard.name.replace(LM_HEAD, EMBEDDING)
    return simulate_ranks.value_of(role, structs.replace(shard, name=name))


def model_of(grid: str) -> SimulatedModel:
    return simulate_ranks.laid_out(TIED, grid)


def save(
    directory: Path | Sequence[Path],
    grid: str,
    change: Change | None = None,
    way: str = "warn",
    step: int = 3,
    value: Callable[[str, Shard], Any] = tied_value,
) -> Outcomes:
    """Save a tied model into one directory, or one of each rank, after a change of some weights; the outcomes."""
    model = model_of(grid)

    def held(rank: int) -> simulate_ranks.Roles:
        roles = simulate_ranks.filled(model.roles(rank), value)
        if change is not None:
            change(rank, roles)
        return roles

    return attempt_save(directory, held, model.grid.world_size, described=TIED, step=step, replicas=way)


def flip(name: str, role: str = "model_state", at: int = -1) -> Change:
    """Change the last bit of an element of a weight or state on every rank that holds it."""

    def change(_: int, roles: simulate_ranks.Roles) -> None:
        weight = roles.get(role, {}).get(name)
        if weight is not None:
            bits = weight.local_tensor.array.reshape(-1).view(f"u{weight.local_tensor.array.itemsize}")
            bits[at] ^= 1

    return change


def lines(checkpoint: Path) -> list[str]:
    return [line for tie in read_manifest(checkpoint).ties for line in tie.differences]


def load(checkpoint: Path, grid: str = "dp=1") -> list[simulate_ranks.Roles]:
    return simulate_ranks.load(checkpoint, model_of(grid))


@pytest.mark.sampled
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("way", ["off", "refuse"])
def test_equal_copies_are_saved_silently_and_loaded(tmp_path: Path, grid: str, way: str) -> None:
    for report in save(tmp_path / "checkpoint-3", grid, way=way).results():
        assert (report.differences, report.diverged_ties) == ((), ())
    assert b"diverged_ties" not in (tmp_path / "checkpoint-3/flex_checkpoint.json").read_bytes()
    (held,) = load(tmp_path / "checkpoint-3")
    assert differing_copies(held, simulate_ranks.filled(model_of("dp=1").roles(0), tied_value)) == []


@pytest.mark.sampled
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(
    ("role", "suffix"),
    [
        ("model_state", ""),
        ("master_weight", ".w_0"),
        ("optimizer_state", ".moment2_0"),
        ("optimizer_state", ".beta1_pow_acc_0"),
    ],
)
def test_one_bit_of_any_weight_or_state_of_a_copy_is_recorded_under_every_option_and_not_loaded(
    tmp_path: Path, grid: str, role: str, suffix: str
) -> None:
    first, *others = save(tmp_path / "checkpoint-3", grid, flip(LM_HEAD + suffix, role), "off").results()
    (tie,) = first.diverged_ties
    (line,) = tie.differences
    assert line.startswith(f"{role} {LM_HEAD}{suffix} on ")
    assert tie.copies == [EMBEDDING, LM_HEAD]
    assert all(report.diverged_ties == first.diverged_ties for report in others)
    assert read_manifest(tmp_path / "checkpoint-3").ties == [tie]
    with pytest.raises(MismatchError):
        load(tmp_path / "checkpoint-3")


@pytest.mark.parametrize(("ranks", "counted"), [((2, 3), ""), ((3,), ": 1 of 2 parts differ")])
def test_the_report_names_the_ranks_of_both_copies_and_counts_the_parts_that_differ(
    tmp_path: Path, ranks: tuple[int, ...], counted: str
) -> None:
    save(tmp_path / "checkpoint-2", "tp=2,pp=2")  # The second save of a plan compares as well.
    save(tmp_path / "checkpoint-3", "tp=2,pp=2", lambda rank, roles: rank in ranks and flip(LM_HEAD)(rank, roles))
    assert lines(tmp_path / "checkpoint-2") == []
    named = f"model_state {LM_HEAD} on ranks 2-3, {EMBEDDING} on ranks 0-1"
    assert lines(tmp_path / "checkpoint-3") == [named + counted]


def test_a_save_that_is_to_refuse_saves_nothing(tmp_path: Path) -> None:
    error = save(tmp_path / "checkpoint-3", "pp=3", flip(LM_HEAD), "refuse").error(MismatchError)
    assert f"model_state {LM_HEAD} on rank 2, {EMBEDDING} on rank 0" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_replicas_of_one_copy_are_a_matter_of_the_option_alone(tmp_path: Path) -> None:
    """What is written of both copies is equal, whatever another data-parallel rank holds."""

    def change(rank: int, roles: simulate_ranks.Roles) -> None:
        if rank in (2, 3):
            flip(LM_HEAD)(rank, roles)
            flip(EMBEDDING)(rank, roles)

    for report in save(tmp_path / "checkpoint-3", "dp=2,pp=2", change).results():
        assert len(report.differences) == 2
        assert len(report.diverged_ties) == len(lines(tmp_path / "checkpoint-3"))
    with pytest.raises(MismatchError) if lines(tmp_path / "checkpoint-3") else nullcontext():
        load(tmp_path / "checkpoint-3")


@pytest.mark.sampled
@pytest.mark.parametrize(("grid", "recorded"), [*((grid, True) for grid in GRIDS), ("pp=2", False)])
@pytest.mark.parametrize(("tied", "copy"), [("first", EMBEDDING), ("last", LM_HEAD)])
def test_a_chosen_copy_is_read_with_all_of_its_states(
    tmp_path: Path, grid: str, recorded: bool, tied: str, copy: str
) -> None:
    """The manifest of an earlier version has no record of copies that differ; there the declared order counts."""
    checkpoint = tmp_path / "checkpoint-3"
    save(checkpoint, grid, value=simulate_ranks.value_of)
    if not recorded:
        write_manifest(checkpoint, structs.replace(read_manifest(checkpoint), ties=[]))
    model = model_of("tp=2")
    held = [simulate_ranks.filled(model.roles(rank), nothing) for rank in range(2)]

    def work(channel: Any) -> None:
        opened = structs.replace(open_on_all_ranks(checkpoint, channel), tied=tied)
        load_checkpoint(opened, held[channel.rank], TIED, channel)

    succeed(2, work)
    for rank, roles in enumerate(held):
        assert differing_copies(roles, simulate_ranks.filled(model.roles(rank), of_copy(copy))) == []


def nothing(role: str, shard: Shard) -> Any:
    return 0 * simulate_ranks.value_of(role, shard)


def of_copy(copy: str) -> Callable[[str, Shard], Any]:
    """The values of a tensor; under both names of a tied one those of one copy."""

    def value(role: str, shard: Shard) -> Any:
        name = shard.name.replace(LM_HEAD, copy).replace(EMBEDDING, copy)
        return simulate_ranks.value_of(role, structs.replace(shard, name=name))

    return value


def differing(one: simulate_ranks.Roles, other: simulate_ranks.Roles) -> list[str]:
    return [
        f"{role} {name}"
        for role, names in other.items()
        for name, weight in names.items()
        if not np.array_equal(one[role][name].local_tensor.array, weight.local_tensor.array)
    ]


def differing_copies(one: simulate_ranks.Roles, other: simulate_ranks.Roles) -> list[str]:
    """Of tied tensors alone, as fused layers lie in another order under tensor parallelism."""
    return [name for name in differing(one, other) if name.split()[1].startswith((EMBEDDING, LM_HEAD))]


def ties_between(everyone: Sequence[dict[str, dict[str, Shard]]], owners: dict[str, str]) -> Ties:
    job_shards = decode_shards([encode_rank_shards(roles) for roles in everyone])
    return ties_of(job_shards, map(Writers(job_shards).share_of, range(len(everyone))), owners)


def hashed(tensors: Mapping[str, Mapping[str, HostPieces]], ties: Ties, rank: int) -> list[bytes]:
    return hash_ties(tensors, [side for side in ties.sides if side.rank == rank])


def test_the_stages_of_copies_are_those_of_the_ranks_that_hold_them(tmp_path: Path) -> None:
    """An owner on the last stage is the last copy, whatever the family declares first."""
    owner, one, two = (Shard(name, "float32", (4, 2), whole((4, 2))) for name in ("owner", "one", "two"))
    everyone = [{"model_state": {shard.name: shard}} for shard in (two, one, owner)]
    ties = ties_between(everyone, {"one": "owner", "two": "owner"})
    assert ties.stages == {"owner": ("two", "one", "owner")}
    held = [dict.fromkeys(everyone[rank]["model_state"], live(np.arange(8.0))) for rank in range(3)]
    held[0]["two"] = live(np.arange(8.0) + 1)
    digests = [hashed({"model_state": names}, ties, rank) for rank, names in enumerate(held)]
    (tie,) = ties.diverged(digests)
    assert tie.copies == ["two", "one", "owner"]
    assert tie.differences == ["model_state two on rank 0, owner on rank 2"]


def live(array: Any) -> HostPieces:
    return view_of(simulate_ranks.HostTensor(array.astype(np.float32)))


def test_copies_that_are_cut_along_different_axes_are_compared_element_by_element() -> None:
    """One stage holds rows, the other columns, and a third flattened ranges."""
    array = np.arange(24.0).reshape(6, 4)
    shape = array.shape
    rows = [Shard("owner", "float32", shape, Box((low, 0), (low + 3, 4))) for low in (0, 3)]
    columns = [Shard("one", "float32", shape, Box((0, low), (6, low + 2))) for low in (0, 2)]
    ranges = [Shard("two", "float32", shape, whole(shape), flat) for flat in ((0, 7), (7, 24))]
    everyone = [{"model_state": {shard.name: shard}} for shard in (*rows, *columns, *ranges)]
    parts = [array[:3], array[3:], array[:, :2], array[:, 2:], array.ravel()[:7], array.ravel()[7:]]
    ties = ties_between(everyone, {"one": "owner", "two": "owner"})
    for rank in range(-1, 6):
        held = [part.copy() for part in parts]
        if rank >= 0:
            held[rank].reshape(-1)[-2] += 1
        roles = [
            {"model_state": {next(iter(one["model_state"])): live(part)}}
            for one, part in zip(everyone, held, strict=True)
        ]
        found = ties.diverged([hashed(own, ties, index) for index, own in enumerate(roles)])
        assert bool(found) == (rank >= 0)


@pytest.mark.parametrize("size", [5, 24])
def test_copies_on_a_device_are_hashed_although_their_pieces_share_memory(size: int) -> None:
    array, buffer = np.arange(24, dtype=np.float32), np.zeros(size, np.float32)

    def staged(start: int, stop: int) -> Iterator[np.ndarray[Any, Any]]:
        for low in range(start, stop, size):
            piece = buffer[: min(size, stop - low)]
            piece[:] = array[low : low + piece.size]
            yield piece
        buffer[:] = np.nan  # Another thread has it now.

    shards = [Shard(name, "float32", (6, 4), whole((6, 4))) for name in ("owner", "one")]
    everyone = [{"model_state": {shard.name: shard}} for shard in shards]
    ties = ties_between(everyone, {"one": "owner"})
    found = [hashed({"model_state": {name: staged}}, ties, rank) for rank, name in enumerate(("owner", "one"))]
    assert found[0] == found[1] == hashed({"model_state": {"owner": live(array)}}, ties, 0)


def test_copies_of_another_shape_or_dtype_are_diverged() -> None:
    shards = [Shard("owner", "float32", (4, 2), whole((4, 2))), Shard("one", "bfloat16", (4, 2), whole((4, 2)))]
    everyone = [{"model_state": {shard.name: shard}} for shard in shards]
    (tie,) = ties_between(everyone, {"one": "owner"}).diverged([[], []])
    assert tie.differences == ["model_state one: bfloat16 [4, 2], owner: float32 [4, 2]"]


def test_if_all_checkpoints_are_diverged_an_automatic_resume_takes_none(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", "pp=2", flip(LM_HEAD))
    with pytest.raises(NotACheckpoint):
        require_newest(Search(tmp_path, LocalChannel(), lambda _: None))


@pytest.mark.parametrize("grid", ["pp=2", "pp=4"])
def test_an_export_takes_the_copy_that_is_chosen(tmp_path: Path, grid: str) -> None:
    source = tmp_path / "checkpoint-3"
    save(source, grid, value=simulate_ranks.value_of)
    for copy in (EMBEDDING, LM_HEAD):
        save(tmp_path / copy, "pp=2", value=of_copy(copy))
        export_checkpoint(tmp_path / copy, tmp_path / f"export-{copy}")
    refused = run("export", source, tmp_path / "export", "--json")
    assert refused.code == 1
    assert "--tied" in refused.document["next_step"]
    for tied, copy in (("first", EMBEDDING), ("last", LM_HEAD)):
        assert run("export", source, tmp_path / tied, "--tied", tied).code == 0
        name = "model.safetensors"
        assert (tmp_path / tied / name).read_bytes() == (tmp_path / f"export-{copy}" / name).read_bytes()


def test_a_conversion_compares_the_copies_of_every_tensor_that_it_writes(tmp_path: Path) -> None:
    """States alone differ, and the manifest has no record of it, as where another program has saved."""
    source = tmp_path / "checkpoint-3"
    save(source, "pp=2", flip(f"{LM_HEAD}.moment1_0", "optimizer_state"))
    write_manifest(source, structs.replace(read_manifest(source), ties=[]))
    for format_ in ("flex", "distcp"):
        refused = run("convert", source, tmp_path / format_, "--format", format_, "--json")
        assert refused.code == 1
        assert f"{LM_HEAD}.moment1_0 = {EMBEDDING}.moment1_0" in refused.document["evidence"][0]
        assert not (tmp_path / format_).exists()
    assert run("convert", source, tmp_path / "hf", "--format", "hf").code == 0


@pytest.mark.parametrize("level", ["off", "size", "full"])
def test_verify_and_inspect_report_a_diverged_checkpoint(tmp_path: Path, level: str) -> None:
    save(tmp_path / "checkpoint-3", "pp=2", flip(LM_HEAD), "off")
    outcome = run("verify", tmp_path / "checkpoint-3", "--level", level, "--json")
    assert outcome.code == 1
    (failed,) = [check["name"] for check in outcome.document["checks"] if not check["passed"]]
    assert failed == "equal values"
    assert outcome.document["evidence"] == lines(tmp_path / "checkpoint-3")
    inspected = run("inspect", tmp_path / "checkpoint-3", "--json")
    assert inspected.document["job"]["diverged_ties"] == lines(tmp_path / "checkpoint-3")
    assert lines(tmp_path / "checkpoint-3")[0] in run("inspect", tmp_path / "checkpoint-3").out
    (listed,) = run("inspect", tmp_path, "--json").document["output"]["checkpoints"]
    assert "diverged" in listed["fault"]


# ---- Numbers that fill the same memory: parameters in one fused buffer share the powers of beta.


POWER = ".beta1_pow_acc_0"


@pytest.mark.parametrize("equal", [True, False])
def test_unequal_numbers_are_not_loaded_into_the_same_memory(tmp_path: Path, equal: bool) -> None:
    laid = simulate_ranks.laid_out(simulate_ranks.QWEN3_MOE, "dp=1", "float32")
    one, other, *_ = (name for name in laid.roles(0)[OPTIMIZER_STATE] if name.endswith(POWER))

    def numbers(role: str, shard: Shard) -> np.ndarray:  # type: ignore[type-arg]
        value = 0.5 if equal or shard.name != other else 0.25
        return np.full(shard.global_shape, value, np.float32)

    simulate_ranks.save_model(tmp_path / "checkpoint-3", laid, numbers)
    live = simulate_ranks.filled(laid.roles(0), lambda role, shard: np.zeros(shard.global_shape, np.float32))
    states = live[OPTIMIZER_STATE]
    live[OPTIMIZER_STATE] = {**states, other: replace(states[other], local_tensor=states[one].local_tensor)}
    checkpoint = open_on_all_ranks(tmp_path / "checkpoint-3", ALONE)
    if equal:
        load_checkpoint(checkpoint, live, laid.model, ALONE)
        return
    with pytest.raises(MismatchError, match=r"differ|equal"):
        load_checkpoint(checkpoint, live, laid.model, ALONE)
