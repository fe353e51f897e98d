"""Disks of hosts, and local tiers: which checkpoint is resumed, what is lost with a disk, and whose a tier is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddleformers_fc.distributed.channel import LocalChannel, all_gather_checked
from paddleformers_fc.errors import FlexError, NotACheckpoint, OptionError
from paddleformers_fc.storage.manifest import read_manifest, verify_files
from paddleformers_fc.trainer import tiers
from paddleformers_fc.trainer.resume import Choice, Search, newest_or_begin, require_newest
from tests.cli.support import alter
from tests.crash.jobs import run_and_die
from tests.execute.simulated import ThreadChannel, job, succeed
from tests.harness.on_ranks import job_on_ranks, on_ranks, run_on_ranks
from tests.harness.tiny import DP2, SD2V2, SINGLE, TP2, TP2SD2V2, MatrixLayout
from tests.trainer.jobs import TO_BEST, callback, few_samples, flex_trainer, refused, run, trained
from tests.trainer.test_async_save import contents
from tests.trainer.test_rotation import left, make_checkpoint
from tests.trainer.test_save_on_signal import run_signalled
from tests.trainer.test_trainer import SIX_STEPS, Saved, settings
from verification.digests import canonical_digests
from verification.forkserver import ForkServer, JobResult

SIX = {"max_steps": 6, "save_steps": 3, "flex_local_steps": 1}


# ---- The choice.


def choose(outputs: Sequence[Path], locals: Sequence[Path], job_of: Any = require_newest) -> tuple[list[Any], Any]:
    """What every rank chooses, its warnings, and the number of exchanges."""

    def work(channel: ThreadChannel) -> tuple[Choice | None, list[str], int]:
        warnings: list[str] = []
        search = Search(outputs[channel.rank], channel, warnings.append, local_dir=locals[channel.rank])
        return job_of(search), warnings, channel.exchanges

    choices, warnings, exchanges = zip(*succeed(len(outputs), work), strict=True)
    assert len(set(exchanges)) == 1
    return [choice and choice.path for choice in choices], (warnings, exchanges[0])


def places(tmp_path: Path, *names: str) -> list[Path]:
    for name in names:
        (tmp_path / name).mkdir(exist_ok=True)
    return [tmp_path / name for name in names]


@pytest.mark.parametrize(
    ("output", "locals", "newest", "exchanges"),
    [
        ([3], [[4, 5]], 5, 2),
        ([6], [[4, 5]], 6, 2),
        ([6], [[]], 6, 2),
        ([3], [[5], [5]], 5, 3),
        ([3], [[], [5]], 5, None),
    ],
    ids=["local", "output_dir", "no local one", "local tiers of nodes opened together", "a fresh node came first"],
)
def test_the_newest_of_both_tiers_is_resumed(
    tmp_path: Path, output: list[int], locals: list[list[int]], newest: int, exchanges: int | None
) -> None:
    """By three ranks of a node, or one rank of each of several."""
    (shared,), nodes = places(tmp_path, "output"), places(tmp_path, *(f"node-{at}" for at in range(len(locals))))
    for directory, steps in zip((shared, *nodes), (output, *locals), strict=True):
        for step in steps:
            make_checkpoint(directory, step)
    ranks = nodes * 3 if len(nodes) == 1 else nodes
    found, (warnings, count) = choose([shared] * len(ranks), ranks)
    expected = [shared] * len(ranks) if newest in output else ranks
    assert found == [directory / f"checkpoint-{newest}" for directory in expected]
    assert exchanges is None or (list(warnings), count) == ([[]] * len(ranks), exchanges)


def test_a_lost_disk_is_reported_once_and_alike_on_all_ranks(tmp_path: Path) -> None:
    (output,), nodes = places(tmp_path, "output"), places(tmp_path, "a", "b")
    make_checkpoint(output, 3)
    for step in (4, 5):
        weights = make_checkpoint(nodes[0], step) / "model_state" / "rank-00000.safetensors"
        weights.unlink()  # It belongs to the other node.
    found, (warnings, _) = choose([output] * 2, [nodes[0], nodes[0].parent / "b"])
    assert found == [output / "checkpoint-3"] * 2
    said = [[line.replace(str(node), "") for line in lines] for node, lines in zip(nodes, warnings, strict=True)]
    assert said[0] == said[1]
    (line,) = said[0]
    assert line.startswith("/checkpoint-5, checkpoint-4 cannot be resumed and are skipped: ")
    assert "visible to no rank" in line


def test_a_damaged_local_tier_does_not_keep_a_run_from_the_beginning(tmp_path: Path) -> None:
    output, local = places(tmp_path, "output", "local")
    (make_checkpoint(local, 5) / "config.json").unlink()
    assert choose([output], [local], newest_or_begin)[0] == [None]
    with pytest.raises(NotACheckpoint) as caught:
        require_newest(Search(output, LocalChannel(), lambda _: None, local_dir=local))
    assert f"{local}/checkpoint-5: " in caught.value.evidence[0]


# ---- Whose a local tier is.


def claimed(arguments: Sequence[Any]) -> list[Exception | str]:
    """What every rank gets when it claims its local tier: the id, or an error."""

    def work(channel: ThreadChannel) -> str:
        args = arguments[channel.rank]
        known = all_gather_checked(channel, "looking", lambda: tiers.known_tier(args, channel.rank), tiers.Known)
        own = tiers.claim(args, channel, known)
        assert channel.exchanges == (1 if all(one.is_claimed for one in known) else 3)
        return own

    return job(len(arguments), work)


def arguments(output: Path, local: Path) -> Any:
    return SimpleNamespace(output_dir=str(output), flex_local_dir=str(local), flex_checkpoint=True)


def test_all_disks_of_a_run_get_one_id_which_stays(tmp_path: Path) -> None:
    outputs, locals = places(tmp_path, "out-a", "out-b"), places(tmp_path, "local-a", "local-b")
    both = [arguments(*pair) for pair in zip(outputs, locals, strict=True)]
    first = claimed(both)
    assert len(set(first)) == 1
    assert [tiers.known_tier(one, rank).is_claimed for rank, one in enumerate(both)] == [True, True]
    assert claimed(both) == first
    assert {tiers.read_record(place).id for place in (*outputs, *locals)} == set(first)  # type: ignore[union-attr]
    # Nodes in another order, one with empty disks.
    fresh = arguments(*places(tmp_path, "out-c", "local-c"))
    assert claimed([fresh, both[1]]) == first
    # Moved together.
    moved = [path.rename(path.with_name(f"moved-{path.name}")) for path in (outputs[0], locals[0])]
    assert claimed([arguments(*moved)]) == first[:1]
    assert not list(tmp_path.rglob(".*"))


def test_a_local_tier_of_another_run_or_without_a_record_is_refused_and_stays(tmp_path: Path) -> None:
    mine, other, local, free, unknown = places(tmp_path, "mine", "other", "local", "free", "unknown")
    (own,) = claimed([arguments(mine, local)])
    for directory in (local, unknown):
        make_checkpoint(directory, 5)
    before = contents(local)
    evidence = f"output_dir: {mine} with the id {own}"
    errors = claimed([arguments(other, free), arguments(other, local)])
    for error, text in (*((one, evidence) for one in errors), (claimed([arguments(other, unknown)])[0], "")):
        assert isinstance(error, OptionError)
        assert text in error.render()
        assert "checkpoints: checkpoint-5" in error.render()
    assert contents(local) == before
    assert claimed([arguments(mine, local)]) == [own]


def test_a_record_that_is_lost_while_a_run_saves_comes_back_and_another_one_ends_the_run(tmp_path: Path) -> None:
    output, local, other = places(tmp_path, "output", "local", "other")
    (own,) = claimed([arguments(output, local)])
    assert isinstance(own, str)
    shutil.rmtree(local)
    tiers.keep(local, output, own)
    assert tiers.local_tier_of(output) == local
    shutil.rmtree(local)
    claimed([arguments(other, local)])
    with pytest.raises(OptionError, match="another run"):
        tiers.keep(local, output, own)


# ---- Trainings.


def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


def train(
    ranks: ForkServer,
    tmp_path: Path,
    layout: MatrixLayout = DP2,
    resume: bool | None = None,
    **given: Any,
) -> JobResult:
    """Train with both tiers below a directory."""
    tier = {"flex_local_dir": str(local(tmp_path))} if given.get("flex_local_steps", 1) else {}
    given = {**SIX, **tier, **given}
    return job_on_ranks(ranks.run, layout.nproc, run, **settings(layout, tmp_path / "out", resume, **given))


@pytest.fixture(scope="module")
def whole(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Six steps without a local tier, saved at the fifth."""
    directory = tmp_path_factory.mktemp("whole")
    result = train(ranks, directory, flex_local_steps=0, save_steps=5)
    assert "disks" not in result.logs[0].read_text()
    return Saved(directory / "out", result.values[0]["losses"])


@pytest.mark.parametrize(
    "given", [{}, {"flex_async_save": True, "flex_ema_decay": 0.5}], ids=["in steps", "beside steps, average"]
)
def test_a_run_saves_in_both_tiers_and_resumes(
    ranks: ForkServer, tmp_path: Path, whole: Saved, given: dict[str, Any]
) -> None:
    result = train(ranks, tmp_path, **given)
    assert result.values[0]["losses"] == whole.losses
    names = [path.name for path in sorted((tmp_path / "out").glob("*checkpoint*"))]
    assert names == ["checkpoint-3", "checkpoint-6"]
    assert left(local(tmp_path)) == ["checkpoint-4", "checkpoint-5", tiers.RECORD_NAME]
    fifth = local(tmp_path) / "checkpoint-5"
    if given:
        assert "ema_state" in {digest.role for digest in canonical_digests(fifth)}
    else:
        assert contents(fifth) == contents(whole.output_dir / "checkpoint-5") != {}
    saved_by = read_manifest(fifth).saved_by
    assert saved_by == read_manifest(tmp_path / "out" / "checkpoint-6").saved_by
    shutil.rmtree(tmp_path / "out" / "checkpoint-6")
    resumed = train(ranks, tmp_path, resume=True, **given)
    assert resumed.values[0]["losses"] == whole.losses[5:]
    assert f"Resumed step 5 (saved as dp=2, now dp=2) from {fifth}" in resumed.logs[0].read_text()
    again = read_manifest(tmp_path / "out" / "checkpoint-6")
    assert again.saved_by == saved_by  # The run continues.


def flex_trainer_of_tiers(directory: Path, arguments: dict[str, Any], **trainer: Any) -> Any:
    given = {**SIX, "flex_local_dir": str(local(directory)), **arguments}
    return flex_trainer(SINGLE, directory / "out", given, **trainer)


@on_ranks(1)
def test_steps_that_output_dir_saves_are_not_saved_twice_and_on_save_is_theirs(tmp_path: Path) -> None:
    events: list[int] = []
    saved: list[str] = []
    note = callback(
        on_save=lambda args, state, *_, **__: events.append(state.global_step),
        on_checkpoint_saved=lambda _, report: saved.append(f"{report.directory.parent.name}/{report.directory.name}"),
    )
    flex_trainer_of_tiers(tmp_path, {"max_steps": 4, "flex_local_steps": 2}, callbacks=[note]).train()
    assert events == [3]
    assert saved == ["local/checkpoint-2", "out/checkpoint-3", "local/checkpoint-4"]


@on_ranks(1)
def test_the_best_checkpoint_is_one_of_output_dir_also_after_a_resume_from_the_local_tier(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    found = flex_trainer_of_tiers(before, {**TO_BEST, "max_steps": 5, "save_steps": 2}, eval_dataset=few_samples())
    found.train()
    assert found.state.best_model_checkpoint == str(before / "out" / "checkpoint-2")
    assert left(local(before))[:2] == ["checkpoint-3", "checkpoint-5"]
    before.rename(after)
    resumed = flex_trainer_of_tiers(after, {**TO_BEST, "max_steps": 6, "save_steps": 100}, eval_dataset=few_samples())
    resumed.train(resume_from_checkpoint=True)
    assert len(resumed.losses) == 1
    assert resumed.state.best_model_checkpoint == str(after / "out" / "checkpoint-2")


KILLS = {
    "a local save begins": ([0], "mkdir", "local/.checkpoint-5.unfinished-", False, 4),
    "one rank writes locally": ([1], "write", "local/.checkpoint-5", False, 4),
    "the local name is next beside steps": ([0], "rename", "local/checkpoint-5", True, 4),
    "an old local one is deleted": ([0], "unlink", "local/.checkpoint-2.removed-", False, 5),
    "output_dir is written": ([0, 1], "write", "out/.checkpoint-6", False, 5),
}


@pytest.mark.parametrize("instant", KILLS)
def test_killed_ranks_lose_no_checkpoint(patient_ranks: ForkServer, tmp_path: Path, whole: Saved, instant: str) -> None:
    victims, kind, part, beside, newest = KILLS[instant]
    given = {**SIX, "flex_local_dir": str(local(tmp_path)), "flex_async_save": beside}
    (tmp_path / "out").mkdir()
    killed = {"victims": victims, "kind": kind, "part": part, **settings(SD2V2, tmp_path / "out", None, **given)}
    result = job_on_ranks(patient_ranks.attempt, 2, run_and_die, **killed)
    assert [result.returncodes[rank] for rank in victims] == [-9] * len(victims)
    for path in (*local(tmp_path).glob("checkpoint-*"), *(tmp_path / "out").glob("checkpoint-*")):
        verify_files(path, read_manifest(path), "full")
    resumed = train(patient_ranks, tmp_path, SINGLE, True)
    assert resumed.values[0]["losses"] == pytest.approx(whole.losses[newest:], abs=1e-5)
    assert sorted(path.name for path in local(tmp_path).glob("checkpoint-*"))[-1] == "checkpoint-5"


def on_local_disks(ranks: ForkServer, directory: Path, numbers: tuple[int, int], **given: Any) -> JobResult:
    """A run whose ranks share ``output_dir``, and have local disks of these numbers."""
    tier = {**SIX, "flex_local_dir": "local", "output_dir": directory / "out", **given}
    return run_on_disks(ranks, run, DP2, disks(directory, *numbers), **tier)


def test_a_run_resumes_wherever_its_local_disks_come_back(ranks: ForkServer, tmp_path: Path, whole: Saved) -> None:
    saved = tmp_path / "saved"
    on_local_disks(ranks, saved, (0, 1))
    for disk in disks(saved, 0, 1):
        assert left(disk / "local")[:2] == ["checkpoint-4", "checkpoint-5"]
    shutil.rmtree(saved / "out" / "checkpoint-6")
    for numbers, begun in (((1, 0), 5), ((0, 2), 3)):
        there = Path(shutil.copytree(saved, tmp_path / f"{numbers}"))
        resumed = on_local_disks(ranks, there, numbers, resume=True)
        assert resumed.values[0]["losses"] == whole.losses[begun:]
        lines = [line for line in resumed.logs[0].read_text().splitlines() if "cannot be resumed" in line]
        assert len(lines) == (begun == 3)


def test_a_save_on_a_signal_is_one_of_output_dir(ranks: ForkServer, tmp_path: Path) -> None:
    arguments = {**SIX, "max_steps": 50, "save_steps": 100, "flex_local_dir": str(local(tmp_path))}
    given = settings(SINGLE, tmp_path / "out", **arguments)
    (found,) = run_on_ranks(ranks, 1, run_signalled, **given, signalled=[0])
    assert found["code"] == 85
    step = found["step"]
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == [f"checkpoint-{step}"]
    assert left(local(tmp_path))[:-1] == [f"checkpoint-{step - 2}", f"checkpoint-{step - 1}"]


@on_ranks(1)
def test_an_unwritable_or_bypassed_local_tier_stops_the_training(tmp_path: Path) -> None:
    from paddleformers_fc import FlexTrainer

    class Around(FlexTrainer):
        def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing."""

    around = flex_trainer_of_tiers(tmp_path, {}, cls=Around)
    with pytest.raises(FlexError, match="_maybe_log_save_evaluate of paddleformers_fc did not run"):
        around.train()
    assert around.state.global_step == 2
    unwritable = flex_trainer_of_tiers(tmp_path / "other", {"flex_local_dir": "/proc/local"})
    with pytest.raises(FlexError, match="/proc/local"):
        unwritable.train()
    assert unwritable.state.global_step == 0


# ---- Output directories on disks of single hosts.


def run_on_disks(
    ranks: ForkServer,
    job: Callable[..., Any],
    layout: MatrixLayout,
    places: list[Path],
    resume: str | bool | None = None,
    output_dir: str | Path = "out",
    **given: Any,
) -> JobResult:
    """A job on ranks that each start in a place."""
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
    placed = {**settings(layout, Path(output_dir), resume, **given), "places": places, "job": job}
    return job_on_ranks(ranks.run, layout.nproc, run_in_own_place, **placed)


def run_in_own_place(places: list[Path], job: Callable[..., Any], **given: Any) -> Any:
    os.chdir(places[int(os.environ["PADDLE_TRAINER_ID"])])
    return job(**given)


def disks(directory: Path, *numbers: int) -> list[Path]:
    """The place of every rank."""
    return [directory / f"disk-{number}" for number in numbers]


@pytest.fixture(scope="module")
def on_disks(ranks: ForkServer, whole: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run on two ranks, each with a disk of its own, that saved at 3 and 6."""
    directory = tmp_path_factory.mktemp("disks")
    result = run_on_disks(ranks, run, DP2, disks(directory, 0, 1), **SIX_STEPS)
    assert result.values[0]["losses"] == whole.losses
    (line,) = [line for line in result.logs[0].read_text().splitlines() if "is on 2 disks" in line]
    assert "rank 0; rank 1" in line
    return directory


@pytest.fixture
def copied(on_disks: Path, tmp_path: Path) -> Path:
    """The directory of a test, with the disks of the run."""
    return Path(shutil.copytree(on_disks, tmp_path, dirs_exist_ok=True))


@pytest.mark.parametrize(
    ("layout", "numbers", "way"),
    [
        (SD2V2, (1, 0), "once"),
        (TP2, (0, 1), "each"),
        (TP2SD2V2, (2, 1, 0, 3), "each"),
        (TP2SD2V2, (2, 1, 0, 3), "once"),
    ],
    ids=["swapped", "tp2", "with new hosts", "with new hosts, once"],
)
def test_a_run_resumes_wherever_all_disks_are_seen(
    ranks: ForkServer,
    whole: Saved,
    copied: Path,
    layout: MatrixLayout,
    numbers: tuple[int, ...],
    way: str,
) -> None:
    places = disks(copied, *numbers)
    given = {**SIX_STEPS, "flex_read": way, "save_total_limit": 1}
    result = run_on_disks(ranks, run, layout, places, "out/checkpoint-3", **given)
    assert result.values[0]["losses"] == pytest.approx(whole.losses[3:], abs=1e-6)
    assert not any((place / "out/checkpoint-3").exists() for place in places)
    manifests = [read_manifest(place / "out/checkpoint-6") for place in places]
    assert manifests == [manifests[0]] * len(places)
    assert manifests[0].world_size == layout.nproc


def draw_after_resume(resume: str | None = None, **settings: Any) -> list[float]:
    """Train; two random numbers afterwards, which depend on where the generators began."""
    import paddle

    trained(resume=resume, **settings)
    drawn: list[float] = paddle.rand([2]).tolist()
    return drawn


def test_random_generators_find_their_process_on_another_disk_unless_damaged(ranks: ForkServer, copied: Path) -> None:
    whole = run_on_disks(ranks, draw_after_resume, DP2, disks(copied / "whole", 0, 1), max_steps=4).values
    for numbers in ((0, 1), (1, 0)):
        result = run_on_disks(ranks, draw_after_resume, DP2, disks(copied, *numbers), "out/checkpoint-3", max_steps=4)
        assert result.values == whole
        assert not any("Random generators are not restored" in log.read_text() for log in result.logs)
    alter(copied / "disk-1/out/checkpoint-3/trainer/rng-00001.json")
    damaged = run_on_disks(ranks, refused, DP2, disks(copied, 1, 0), "out/checkpoint-3", **SIX_STEPS, flex_verify="off")
    for found in damaged.values:
        assert (found["error"], found["changed"]) == ("Corrupt", False)
        assert "trainer/rng-00001.json does not match its checksum" in found["text"]


def test_a_disk_that_cannot_be_written_stops_every_node_before_the_first_step(
    ranks: ForkServer, tmp_path: Path
) -> None:
    places = disks(tmp_path, 0, 1)
    places[1].mkdir()
    (places[1] / "out").symlink_to("/proc")  # A directory in which not even root makes one.
    for found in run_on_disks(ranks, refused, DP2, places, False, **SIX_STEPS).values:
        assert (found["error"], found["changed"]) == ("StorageError", False)
        assert "on rank 1" in found["text"]
