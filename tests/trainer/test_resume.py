"""Which checkpoint is resumed, which run it belongs to, and where the best checkpoint is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from paddleformers_fc.cli.start_checks import checkpoint_to_resume
from paddleformers_fc.distributed.channel import ALONE, LocalChannel
from paddleformers_fc.errors import NotACheckpoint
from paddleformers_fc.storage.manifest import Branch, Manifest, RunRecord, read_manifest, write_manifest
from paddleformers_fc.trainer import loading, resume
from paddleformers_fc.trainer.resume import (
    Choice,
    Saved,
    Search,
    continue_or_branch,
    find_newest,
    locate_best,
    new_run,
    new_run_warning,
    newest_or_begin,
    open_named,
    require_newest,
    saved_in,
)
from tests.execute.simulated import ThreadChannel, job, succeed
from tests.trainer.test_rotation import WEIGHTS, make_checkpoint


@pytest.mark.parametrize("what", ["", "config.json", "flex_checkpoint.json"])
def test_a_symlink_loop_is_skipped_with_a_warning_that_names_the_step(tmp_path: Path, what: str) -> None:
    make_checkpoint(tmp_path, 2)
    circle = make_checkpoint(tmp_path, 4) / what
    circle.rename(tmp_path / "elsewhere")
    circle.symlink_to(circle)
    found, passed_over = find_newest(tmp_path, LocalChannel())
    assert found == tmp_path / "checkpoint-2"
    assert [path for path, _ in passed_over] == [tmp_path / "checkpoint-4"]


def test_a_run_starts_from_the_beginning_where_nothing_was_saved_and_resumes_where_something_was(
    tmp_path: Path,
) -> None:
    assert newest_or_begin(Search(tmp_path / "absent", LocalChannel(), pytest.fail)) is None
    with pytest.raises(NotACheckpoint) as caught:
        require_newest(Search(tmp_path, LocalChannel(), pytest.fail))
    assert caught.value.where == str(tmp_path)
    (tmp_path / "checkpoint-4").mkdir()  # An empty directory is no checkpoint.
    warnings: list[str] = []
    search = Search(tmp_path, LocalChannel(), warnings.append)
    assert newest_or_begin(search) is None
    assert "checkpoint-4" in warnings[0]
    make_checkpoint(tmp_path, 2)
    found = newest_or_begin(search)
    assert found is not None
    assert found.path == tmp_path / "checkpoint-2"


def test_a_run_does_not_start_over_repairable_checkpoints(tmp_path: Path) -> None:
    """On any rank: another one may not see them."""
    (tmp_path / "rank-1").mkdir()
    config = make_checkpoint(tmp_path / "rank-1", 6) / "config.json"
    config.rename(tmp_path / "elsewhere")

    def work(channel: ThreadChannel) -> None:
        newest_or_begin(Search(tmp_path / f"rank-{channel.rank}", channel, lambda _: None))

    for error in job(2, work):
        assert isinstance(error, NotACheckpoint)
        assert "checkpoint-6 is damaged" in "".join(error.evidence)
        assert "overwrite_output_dir" in error.next_step
    (tmp_path / "elsewhere").rename(config)
    succeed(2, work)


def test_a_renamed_checkpoint_that_stops_a_run_is_listed_once(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 6).rename(tmp_path / "checkpoint-9")
    with pytest.raises(NotACheckpoint) as caught:
        newest_or_begin(Search(tmp_path, LocalChannel(), lambda _: None))
    (line,) = caught.value.evidence
    assert line.startswith("checkpoint-9 is damaged: ")
    assert "6" in line


def disks(root: Path, *names: str, step: int = 5) -> list[Path]:
    """The output directory of every rank, each with a checkpoint."""
    for name in {*names}:
        (root / name).mkdir()
        make_checkpoint(root / name, step)
    return [root / name for name in names]


def together(outputs: list[Path], step: int) -> str:
    """Assert which step every rank finds and opens, and return why others are passed over, with their directories."""
    expected = [output / f"checkpoint-{step}" for output in outputs]
    found = succeed(len(outputs), lambda channel: find_newest(outputs[channel.rank], channel))
    assert [checkpoint for checkpoint, _ in found] == expected
    assert len({tuple(why for _, why in passed_over) for _, passed_over in found}) == 1
    assert [choice.path for choice in opened(outputs)[0]] == expected
    return "\n".join(f"{path}: {why}" for path, why in found[0][1])


def opened(outputs: list[Path]) -> tuple[list[Choice], list[str], int]:
    """What every rank opens, the warnings of the first, and the number of exchanges."""
    warnings: list[str] = []

    def work(channel: ThreadChannel) -> tuple[Choice, int]:
        warn = (lambda _: None) if channel.rank else warnings.append
        return require_newest(Search(outputs[channel.rank], channel, warn)), channel.exchanges

    choices, exchanges = zip(*succeed(len(outputs), work), strict=True)
    assert len(set(exchanges)) == 1
    return [*choices], warnings, exchanges[0]


def test_only_the_coordinator_lists_the_directory_if_all_ranks_see_its_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, 2)
    make_checkpoint(tmp_path, 4)
    listings: list[Path] = []
    listed = resume.names_in

    def counted(places: Mapping[str, Path]) -> list[str]:
        listings.extend(places.values())
        return listed(places)

    monkeypatch.setattr(resume, "names_in", counted)
    choices, warnings, exchanges = opened([tmp_path] * 3)
    assert [choice.path for choice in choices] == [tmp_path / "checkpoint-4"] * 3
    assert (warnings, len(listings), exchanges) == ([], 1, 2)


def test_a_checkpoint_that_only_another_disk_has_is_newer(tmp_path: Path) -> None:
    outputs = disks(tmp_path, "first", "second")
    make_checkpoint(outputs[1], 7)
    choices, _, _ = opened(outputs)
    assert [choice.path for choice in choices] == [output / "checkpoint-7" for output in outputs]
    # The metadata of the coordinator's newest one is received once.
    (outputs[1] / "checkpoint-7" / "config.json").unlink()
    choices, warnings, exchanges = opened(outputs)
    assert [choice.path for choice in choices] == [output / "checkpoint-5" for output in outputs]
    assert len(warnings) == 1
    # Two listings, the first with the metadata of step 5, and two exchanges for each checkpoint. Two more ask for the
    # metadata of step 7: the coordinator has none. The other disk reads who saved it.
    assert exchanges == 2 + 2 + 2 + 2 + 1
    shutil.rmtree(outputs[0])  # The disk is replaced by an empty one.
    together(outputs, 5)


def test_a_step_that_is_complete_on_some_disks_only_is_skipped_and_named(tmp_path: Path) -> None:
    outputs = disks(tmp_path, "first", "second")
    newer = make_checkpoint(outputs[0], 9)
    (newer / "config.json").unlink()
    warning = together(outputs, 5)
    assert warning.startswith(f"{newer}: ")
    assert "config.json is visible to no rank" in warning
    assert "rank 1: no checkpoint of this name is there" in warning


def test_a_step_that_was_replaced_on_some_disks_only_is_skipped_and_named(tmp_path: Path) -> None:
    outputs = disks(tmp_path, "first", "second", "second")
    first, _ = (make_checkpoint(output, 9) for output in outputs[:2])
    write_manifest(first, replace(read_manifest(first), world_size=3))
    warning = together(outputs, 5)
    assert "different checkpoints under one name: rank 0: step 9, 3 ranks" in warning
    assert "ranks 1-2: step 9, 1 rank," in warning


ASIDE = ".checkpoint-9.aside-0123456789ab"


def test_an_interrupted_replacement_is_finished_on_the_disk_that_has_it(tmp_path: Path) -> None:
    outputs = disks(tmp_path, "first", "second", "second", step=9)
    (outputs[1] / "checkpoint-9").rename(outputs[1] / ASIDE)
    shutil.rmtree(outputs[0] / "checkpoint-9")
    assert together(outputs, 9) == ""
    assert [path.name for path in outputs[1].iterdir()] == ["checkpoint-9"]
    # Also where all ranks share the disk, and see the older checkpoint under its hidden name.
    (outputs[1] / "checkpoint-9").rename(outputs[1] / ASIDE)
    assert [choice.path for choice in opened(outputs[1:])[0]] == [outputs[1] / "checkpoint-9"] * 2


def named(given: list[Path]) -> list[Any]:
    """The paths of what every rank opens, each with a path of its own."""

    def work(channel: ThreadChannel) -> Choice:
        path = given[channel.rank]
        choice = open_named(path, "size", Search(path.parent, channel, pytest.fail))
        assert choice.named
        assert choice.opened is not None
        return choice

    return [choice.path for choice in succeed(len(given), work)]


def test_a_named_checkpoint_is_resumed_if_any_rank_sees_it(tmp_path: Path) -> None:
    given = [tmp_path / "elsewhere" / "checkpoint-2", make_checkpoint(tmp_path, 2)]
    assert named(given) == given


def test_a_named_checkpoint_is_restored_after_an_interrupted_replacement(tmp_path: Path) -> None:
    given = [output / "checkpoint-9" for output in disks(tmp_path, "first", "second", "second", step=9)]
    (given[0] / WEIGHTS).unlink()
    given[1].rename(given[1].with_name(ASIDE))
    assert named(given) == given
    assert given[1].is_dir()
    (given[0] / WEIGHTS).write_bytes(b"{}")
    given[0].rename(given[0].with_name(ASIDE))
    assert named(given[:1]) == given[:1]
    assert given[0].is_dir()


def test_a_named_path_that_is_no_checkpoint_is_rejected_with_the_reason(tmp_path: Path) -> None:
    finished = make_checkpoint(tmp_path, 2)
    assert named([finished]) == [finished]
    for directory, file in (("weights", "model.safetensors"), ("checkpoint-4", "mapping.json"), ("notes", "a.txt")):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / file).touch()
    for directory, what, advice in (
        ("checkpoint-3", "does not exist", "resume_from_checkpoint: true"),
        ("weights", "contains open weights", "model_name_or_path"),
        ("checkpoint-4", "is an unfinished checkpoint", "newest finished"),
        ("notes", "is not a flex checkpoint", "newest finished"),
        ("", "is not a flex checkpoint", "checkpoint-2"),
    ):
        with pytest.raises(NotACheckpoint, match=what) as caught:
            open_named(tmp_path / directory, "size", Search(tmp_path, LocalChannel(), pytest.fail))
        assert advice in caught.value.next_step


A, UNKNOWN = RunRecord("A", []), RunRecord("", [])
B = RunRecord("B", [Branch("A", 3)])


def manifest(step: int, run: RunRecord) -> Manifest:
    fields = {"consumed_samples": 0, "world_size": 1, "parallel": {}, "family": "", "files": []}
    return Manifest(written_by="test", step=step, saved_by=run, **fields)


def saved(*steps: int, run: RunRecord = A) -> list[Saved]:
    return [Saved(step, run) for step in steps]


def test_two_runs_have_two_ids() -> None:
    assert new_run().id != new_run().id


AFTER_BRANCH = [*saved(3), *saved(4, 5, run=B), *saved(6)]


@pytest.mark.parametrize(
    ("step", "own", "others", "named", "branches", "warnings"),
    [
        pytest.param(6, A, saved(3, 6), False, None, [], id="a restart continues"),
        pytest.param(6, A, saved(3, 6), True, None, [], id="a restart from the named last one continues"),
        pytest.param(5, B, [*saved(1, 3), *saved(4, 5, run=B)], False, None, [], id="a restart of a branch continues"),
        pytest.param(3, A, saved(3, 6), True, [Branch("A", 3)], ["step 3", "checkpoint-6", "run A"], id="a branch"),
        pytest.param(
            *(3, UNKNOWN, saved(3, 6, run=UNKNOWN), True, [Branch("", 3)]),
            ["step 3", "checkpoint-6", "a run without an id"],
            id="a branch of an unknown run",
        ),
        pytest.param(
            *(4, B, AFTER_BRANCH[:3], True, [Branch("A", 3), Branch("B", 4)]),
            ["step 4", "checkpoint-5"],
            id="a branch of a branch keeps the runs before it",
        ),
        pytest.param(
            *(6, A, AFTER_BRANCH, False, None),
            ["checkpoint-4, checkpoint-5 of run B (from step 3 of A) next to checkpoint-6 of run A"],
            id="the run beside its branch",
        ),
        pytest.param(
            *(7, B, [*AFTER_BRANCH, Saved(7, B)], False, None),
            ["checkpoint-6 of run A next to checkpoint-7 of run B"],
            id="the branch beside its run",
        ),
        pytest.param(3, A, [], True, [Branch("A", 3)], [], id="another output directory"),
        pytest.param(3, A, saved(3, 6), False, [Branch("A", 3)], [], id="newer ones that are skipped"),
    ],
)
def test_a_resume_continues_a_run_or_branches_from_it(
    step: int, own: RunRecord, others: list[Saved], named: bool, branches: list[Branch] | None, warnings: list[str]
) -> None:
    run, warning = continue_or_branch(manifest(step, own), others, here=bool(others), named=named)
    if branches is None:
        assert run == own
    else:
        assert run.branches == branches
        assert run.id not in (own.id, "")
        assert not warning or f"run {run.id} " in warning
    assert bool(warning) == bool(warnings)
    assert [text for text in warnings if text not in warning] == []


def test_a_run_from_the_beginning_warns_of_other_runs_in_its_directory(tmp_path: Path) -> None:
    assert new_run_warning(A, [], tmp_path) == ""
    assert "checkpoint-6 of run B" in new_run_warning(A, saved(4, 6, run=B), tmp_path)


def test_the_checkpoints_of_all_disks_are_known_to_every_rank(tmp_path: Path) -> None:
    disks = [tmp_path / "first", tmp_path / "second"]
    for disk, step in zip(disks, (3, 6), strict=True):
        disk.mkdir()
        path = make_checkpoint(disk, step)
        write_manifest(path, replace(read_manifest(path), saved_by=A))
    found = succeed(2, lambda channel: saved_in({"": disks[channel.rank]}, channel))
    assert found == [saved(3, 6)] * 2


def test_a_directory_that_is_no_checkpoint_of_its_step_belongs_to_no_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-9").mkdir()
    make_checkpoint(tmp_path, 3).rename(tmp_path / "checkpoint-8")
    make_checkpoint(tmp_path, 4)
    assert saved_in({"": tmp_path}, LocalChannel()) == saved(4, run=UNKNOWN)
    assert saved_in({"": tmp_path / "absent"}, LocalChannel()) == []


# ---- The best checkpoint of a resumed run, on ranks that do not all see it.


@pytest.mark.parametrize("seers", [{0}, {2}, {0, 1, 2}, set()])
def test_a_best_checkpoint_is_known_to_all_ranks_if_one_of_them_sees_it(tmp_path: Path, seers: set[int]) -> None:
    places = [tmp_path / f"disk-{rank}" for rank in range(3)]
    for rank, place in enumerate(places):
        (place / "checkpoint-3").mkdir(parents=True)
        if rank in seers:
            (place / "checkpoint-3").rmdir()
            make_checkpoint(place, 3)
    best = [str(place / "checkpoint-3") for place in places]
    found = succeed(3, lambda one: locate_best(best[one.rank], places[one.rank] / "checkpoint-6", one))
    assert found == (best if seers else [None] * 3)


def test_the_best_checkpoint_is_found_next_to_the_resumed_one_and_at_its_recorded_path(tmp_path: Path) -> None:
    for name in ("moved", "before"):
        (tmp_path / name).mkdir()
    make_checkpoint(tmp_path / "moved", 3)
    resumed = tmp_path / "moved" / "checkpoint-6"
    for there, expected in ((False, "moved"), (True, "before")):
        if there:
            make_checkpoint(tmp_path / "before", 3)
        found = succeed(2, lambda one: locate_best(str(tmp_path / "before" / "checkpoint-3"), resumed, one))
        assert found == [str(tmp_path / expected / "checkpoint-3")] * 2


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with two checkpoints of a run, and another directory to work in."""
    for name in ("home/run", "work"):
        (tmp_path / name).mkdir(parents=True)
    for step in (3, 6):
        make_checkpoint(tmp_path / "home/run", step)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def chosen(args: Any, asked: bool | str) -> Any:
    """The path of the checkpoint that is resumed."""
    choice = loading._choose(args, asked, Search(Path(args.output_dir), ALONE, pytest.fail))
    assert choice is not None
    return choice.path


def test_a_run_in_the_home_directory_is_resumed_from_there_by_scripts_and_the_command(home: Path) -> None:
    from paddleformers_fc import FlexTrainingArguments

    args = FlexTrainingArguments(output_dir="~/run", flex_checkpoint=True, device="cpu", amp_master_grad=False)
    assert args.output_dir == str(home / "run")
    third = "~/run/checkpoint-3"
    assert (chosen(args, True), chosen(args, third)) == (home / "run/checkpoint-6", home / "run/checkpoint-3")
    assert os.listdir() == []
    given = {"flex_checkpoint": True, "resume_from_checkpoint": third}
    assert checkpoint_to_resume(given, 1) == home / "run/checkpoint-3"
    assert chosen(SimpleNamespace(output_dir="out", flex_verify="size"), third) == home / "run/checkpoint-3"
