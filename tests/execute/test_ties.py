"""Copies of a tied tensor that differ are found by a save, recorded, refused, and read where a user chooses one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from paddleformers_fc.distributed.channel import LocalChannel
from paddleformers_fc.errors import MismatchError, NotACheckpoint
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.load import load_checkpoint
from paddleformers_fc.execute.memory import HostPieces, view_of
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.replicas import Ties, Writers, hash_ties, ties_of
from paddleformers_fc.execute.save import JobRecord, SaveReport, config_bytes, save_checkpoint
from paddleformers_fc.families import family_for
from paddleformers_fc.formats.flex import open_flex
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.layout.shard_messages import decode_shards, encode_rank_shards
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import Box, whole
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model
from paddleformers_fc.storage.manifest import newest_checkpoint, read_manifest, write_manifest
from paddleformers_fc.trainer.resume import Search, require_newest
from tests.cli.support import run
from tests.execute.simulated import job, succeed
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
Change = Callable[[int, simulate_ranks.Roles], None]


def tied_value(role: str, shard: Shard) -> Any:
    """A tensor's values; the same under both names of a tied one."""
    name = shard.name.replace(LM_HEAD, EMBEDDING)
    return simulate_ranks.value_of(role, structs.replace(shard, name=name))


def model_of(grid: str, dtype: str = "bfloat16") -> SimulatedModel:
    return declared_model(family_for(TIED.config), TIED, parse_grid(grid), dtype)


def save(
    directory: Path | Sequence[Path],
    grid: str,
    change: Change | None = None,
    way: str = "warn",
    step: int = 3,
    value: Callable[[str, Shard], Any] = tied_value,
) -> list[SaveReport | Exception]:
    """Save a tied model into one directory, or one of each rank, after a change of some weights; the outcomes."""
    model = model_of(grid)

    def work(channel: Any) -> SaveReport:
        roles = simulate_ranks.filled(model.roles(channel.rank), value)
        if change is not None:
            change(channel.rank, roles)
        files = {"config.json": config_bytes(TIED.config)} if channel.rank == 0 else {}
        place = directory if isinstance(directory, Path) else directory[channel.rank]
        return save_checkpoint(place, roles, TIED, files, JobRecord(step, 24, {}), channel, replicas=way)

    return job(model.grid.world_size, work)


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


def reports(outcomes: list[SaveReport | Exception]) -> list[SaveReport]:
    assert all(isinstance(one, SaveReport) for one in outcomes), outcomes
    return [one for one in outcomes if isinstance(one, SaveReport)]


@pytest.mark.sampled
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("way", ["off", "refuse"])
def test_equal_copies_are_saved_without_a_word(tmp_path: Path, grid: str, way: str) -> None:
    for report in reports(save(tmp_path / "checkpoint-3", grid, way=way)):
        assert (report.differences, report.diverged_ties) == ((), ())
    assert b"diverged_ties" not in (tmp_path / "checkpoint-3/flex_checkpoint.json").read_bytes()


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
def test_one_bit_of_any_weight_or_state_of_a_copy_is_recorded_under_every_option(
    tmp_path: Path, grid: str, role: str, suffix: str
) -> None:
    first, *others = reports(save(tmp_path / "checkpoint-3", grid, flip(LM_HEAD + suffix, role), "off"))
    (tie,) = first.diverged_ties
    (line,) = tie.differences
    assert line.startswith(f"{role} {LM_HEAD}{suffix} on ")
    assert tie.copies == [EMBEDDING, LM_HEAD]
    assert all(report.diverged_ties == first.diverged_ties for report in others)
    assert read_manifest(tmp_path / "checkpoint-3").ties == [tie]


def test_the_report_names_the_ranks_of_both_copies(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", "tp=2,pp=2", flip(LM_HEAD))
    assert lines(tmp_path / "checkpoint-3") == [f"model_state {LM_HEAD} on ranks 2-3, {EMBEDDING} on ranks 0-1"]


def test_a_part_of_a_copy_that_differs_is_counted(tmp_path: Path) -> None:
    def change(rank: int, roles: simulate_ranks.Roles) -> None:
        if rank == 3:
            flip(LM_HEAD)(rank, roles)

    save(tmp_path / "checkpoint-3", "tp=2,pp=2", change)
    (line,) = lines(tmp_path / "checkpoint-3")
    assert line.endswith(": 1 of 2 parts differ")


@pytest.mark.parametrize("at", [0, 1, 20_001, 32_767])
def test_any_element_is_compared_where_the_stages_share_states_differently(tmp_path: Path, at: int) -> None:
    """Flattened ranges of the two copies begin and end at different elements."""
    name, role = f"{EMBEDDING}.moment1_0", "optimizer_state"
    held = [model_of("sharding=3,split=true,pp=2").roles(rank).get(role, {}) for rank in range(6)]
    ends = {copy: sorted(one[copy].flat for one in held if copy in one) for copy in (name, f"{LM_HEAD}.moment1_0")}
    assert len({str(flat) for flat in ends.values()}) == 2

    def change(_: int, roles: simulate_ranks.Roles) -> None:
        weight = roles.get(role, {}).get(name)
        if weight is not None and weight.flattened_range.start <= at < weight.flattened_range.stop:
            weight.local_tensor.array[at - weight.flattened_range.start] += 1

    save(tmp_path / "checkpoint-3", "sharding=3,split=true,pp=2", change)
    (line,) = lines(tmp_path / "checkpoint-3")
    assert line.startswith(f"optimizer_state {LM_HEAD}.moment1_0 on ")


def test_a_save_that_is_to_refuse_saves_nothing(tmp_path: Path) -> None:
    outcomes = save(tmp_path / "checkpoint-3", "pp=3", flip(LM_HEAD), "refuse")
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert isinstance(outcomes[0], MismatchError)
    assert f"model_state {LM_HEAD} on rank 2, {EMBEDDING} on rank 0" in str(outcomes[0])
    assert list(tmp_path.iterdir()) == []


def test_the_second_save_of_a_plan_compares_as_well(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", "pp=2")
    save(tmp_path / "checkpoint-4", "pp=2", flip(LM_HEAD))
    assert lines(tmp_path / "checkpoint-3") == []
    assert len(lines(tmp_path / "checkpoint-4")) == 1


def test_replicas_of_one_copy_are_a_matter_of_the_option_alone(tmp_path: Path) -> None:
    """What is written of both copies is equal, whatever another data-parallel rank holds."""

    def change(rank: int, roles: simulate_ranks.Roles) -> None:
        if rank in (2, 3):
            flip(LM_HEAD)(rank, roles)
            flip(EMBEDDING)(rank, roles)

    for report in reports(save(tmp_path / "checkpoint-3", "dp=2,pp=2", change)):
        assert len(report.differences) == 2
        written = len(lines(tmp_path / "checkpoint-3"))
        assert written == len(report.diverged_ties)
    assert (written == 0) == can_be_loaded(tmp_path / "checkpoint-3")


def can_be_loaded(checkpoint: Path) -> bool:
    try:
        simulate_ranks.load(checkpoint, model_of("dp=1"))
    except MismatchError:
        return False
    return True


@pytest.mark.sampled
@pytest.mark.parametrize("grid", GRIDS)
def test_what_a_save_records_is_what_a_load_refuses(tmp_path: Path, grid: str) -> None:
    save(tmp_path / "checkpoint-3", grid, flip(LM_HEAD + ".w_0", "master_weight", 0))
    assert not can_be_loaded(tmp_path / "checkpoint-3")
    save(tmp_path / "checkpoint-4", grid)
    assert can_be_loaded(tmp_path / "checkpoint-4")


@pytest.mark.sampled
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("tied", "copy"), [("first", EMBEDDING), ("last", LM_HEAD)])
def test_a_chosen_copy_is_read_with_all_of_its_states(tmp_path: Path, grid: str, tied: str, copy: str) -> None:
    save(tmp_path / "checkpoint-3", grid, value=simulate_ranks.value_of)
    model = model_of("tp=2")
    held = [simulate_ranks.filled(model.roles(rank), nothing) for rank in range(2)]

    def work(channel: Any) -> None:
        checkpoint = structs.replace(open_on_all_ranks(tmp_path / "checkpoint-3", channel), tied=tied)
        load_checkpoint(checkpoint, held[channel.rank], TIED, channel)

    succeed(2, work)
    for rank, roles in enumerate(held):
        expected = simulate_ranks.filled(model.roles(rank), of_copy(copy))
        # Fused layers lie in another order under tensor parallelism, which is no matter here.
        assert not any(name.split()[1].startswith((EMBEDDING, LM_HEAD)) for name in differing(roles, expected))


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


def test_copies_of_another_shape_or_dtype_are_diverged() -> None:
    shards = [Shard("owner", "float32", (4, 2), whole((4, 2))), Shard("one", "bfloat16", (4, 2), whole((4, 2)))]
    everyone = [{"model_state": {shard.name: shard}} for shard in shards]
    (tie,) = ties_between(everyone, {"one": "owner"}).diverged([[], []])
    assert tie.differences == ["model_state one: bfloat16 [4, 2], owner: float32 [4, 2]"]


def test_a_diverged_checkpoint_is_never_the_newest(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", "pp=2", step=3)
    save(tmp_path / "checkpoint-4", "pp=2", flip(LM_HEAD), "off", step=4)
    found, ((skipped, why),) = newest_checkpoint(tmp_path)
    assert (found, skipped) == (tmp_path / "checkpoint-3", tmp_path / "checkpoint-4")
    assert f"model_state {LM_HEAD} on rank 1, {EMBEDDING} on rank 0" in why
    warnings: list[str] = []
    assert require_newest(Search(tmp_path, LocalChannel(), warnings.append)).path == tmp_path / "checkpoint-3"
    assert "checkpoint-4" in warnings[0]
    assert LM_HEAD in warnings[0]


def test_on_several_disks_a_diverged_checkpoint_is_skipped_by_every_rank(tmp_path: Path) -> None:
    places = [tmp_path / "disk-0", tmp_path / "disk-1"]
    for step, change in ((3, None), (4, flip(LM_HEAD))):
        save([place / f"checkpoint-{step}" for place in places], "pp=2", change, step=step)
    warnings: list[str] = []
    found = succeed(2, lambda channel: require_newest(Search(places[channel.rank], channel, warnings.append)))
    assert [one.path for one in found] == [place / "checkpoint-3" for place in places]
    assert LM_HEAD in warnings[0]


def test_where_all_are_diverged_none_is_resumed_by_itself(tmp_path: Path) -> None:
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


def test_a_checkpoint_of_an_earlier_version_is_read_by_the_declared_order(tmp_path: Path) -> None:
    """Its manifest has no record of copies that differ."""
    checkpoint = tmp_path / "checkpoint-3"
    save(checkpoint, "pp=2", value=simulate_ranks.value_of)
    manifest = read_manifest(checkpoint)
    write_manifest(checkpoint, structs.replace(manifest, ties=[]))
    model = model_of("dp=1")
    for tied, copy in (("first", EMBEDDING), ("last", LM_HEAD)):
        roles = simulate_ranks.filled(model.roles(0), nothing)
        load_checkpoint(structs.replace(open_flex(checkpoint), tied=tied), roles, TIED, LocalChannel())
        assert differing(roles, simulate_ranks.filled(model.roles(0), of_copy(copy))) == []
