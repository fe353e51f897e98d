"""Which checkpoint is resumed when the newest one is asked for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from paddleformers_fc.errors import NotACheckpoint
from paddleformers_fc.execute.channel import LocalChannel
from paddleformers_fc.trainer.resume import named, newest, newest_or_refuse
from tests.trainer.test_rotation import make_checkpoint


class Meeting:
    """Two ranks in two threads that hand each other what they say."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=30)
        self._said = [b"", b""]

    def hand_over(self, rank: int, payload: bytes) -> list[bytes]:
        self._said[rank] = payload
        self._barrier.wait()
        heard = list(self._said)
        self._barrier.wait()
        return heard


@dataclass(frozen=True)
class ThreadChannel:
    """One rank's way to the other."""

    rank: int
    meeting: Meeting
    world_size: int = 2

    def exchange(self, payload: bytes) -> list[bytes]:
        return self.meeting.hand_over(self.rank, payload)


def test_the_newest_finished_one_is_taken(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        make_checkpoint(tmp_path, step)
    assert newest(tmp_path, LocalChannel(), pytest.fail) == tmp_path / "checkpoint-10"


def test_an_empty_newest_directory_is_passed_over_with_a_warning_that_names_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2)
    (tmp_path / "checkpoint-4").mkdir()
    warnings: list[str] = []
    assert newest(tmp_path, LocalChannel(), warnings.append) == tmp_path / "checkpoint-2"
    (warning,) = warnings
    assert str(tmp_path / "checkpoint-4") in warning


def test_a_truncated_newest_checkpoint_is_passed_over(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2)
    (make_checkpoint(tmp_path, 4) / "config.json").write_bytes(b"")
    warnings: list[str] = []
    assert newest(tmp_path, LocalChannel(), warnings.append) == tmp_path / "checkpoint-2"
    assert "config.json" in warnings[0]


def test_nothing_to_resume_from_is_an_error_that_names_the_directory(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint) as caught:
        newest_or_refuse(tmp_path, LocalChannel(), pytest.fail)
    assert caught.value.where == str(tmp_path)


def test_a_missing_output_directory_holds_nothing(tmp_path: Path) -> None:
    assert newest(tmp_path / "absent", LocalChannel(), pytest.fail) is None


def test_every_rank_takes_the_first_ranks_answer(tmp_path: Path) -> None:
    seen = [tmp_path / "first", tmp_path / "second"]
    for directory, step in zip(seen, (5, 9), strict=True):
        directory.mkdir()
        make_checkpoint(directory, step)
    meeting = Meeting()
    with ThreadPoolExecutor(2) as pool:
        answers = list(
            pool.map(lambda rank: newest(seen[rank], ThreadChannel(rank, meeting), pytest.fail), range(2), timeout=60)
        )
    assert answers == [seen[0] / "checkpoint-5"] * 2


def test_what_was_named_and_is_no_checkpoint_is_called_what_it_is(tmp_path: Path) -> None:
    finished = make_checkpoint(tmp_path, 2)
    assert named(finished, LocalChannel()) == finished
    for directory, file in (("weights", "model.safetensors"), ("checkpoint-4", "mapping.json"), ("notes", "a.txt")):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / file).touch()
    for directory, what, advice in (
        ("checkpoint-3", "does not exist", "resume_from_checkpoint: true"),
        ("weights", "holds open weights", "model_name_or_path"),
        ("checkpoint-4", "is an unfinished checkpoint", "newest finished"),
        ("notes", "is not a flex checkpoint", "newest finished"),
        ("", "is not a flex checkpoint", "checkpoint-2"),
    ):
        with pytest.raises(NotACheckpoint, match=what) as caught:
            named(tmp_path / directory, LocalChannel())
        assert advice in caught.value.next_step
