"""Where the best checkpoint of a resumed run is, on ranks that do not all see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddleformers_fc.trainer.resume import locate_best
from tests.execute.simulated import succeed
from tests.trainer.test_rotation import make_checkpoint


@pytest.mark.parametrize("seers", [{0}, {2}, {0, 1, 2}])
def test_a_best_checkpoint_is_known_to_all_ranks_if_one_of_them_sees_it(tmp_path: Path, seers: set[int]) -> None:
    places = [tmp_path / f"disk-{rank}" for rank in range(3)]
    for rank in seers:
        places[rank].mkdir()
        make_checkpoint(places[rank], 3)
    best = [str(place / "checkpoint-3") for place in places]
    found = succeed(3, lambda one: locate_best(best[one.rank], places[one.rank] / "checkpoint-6", one))
    assert found == best


def test_a_best_checkpoint_is_found_beside_the_one_that_is_resumed_and_where_it_was_before_that(tmp_path: Path) -> None:
    for name in ("moved", "before"):
        (tmp_path / name).mkdir()
    make_checkpoint(tmp_path / "moved", 3)
    resumed = tmp_path / "moved" / "checkpoint-6"
    for there, expected in ((False, "moved"), (True, "before")):
        if there:
            make_checkpoint(tmp_path / "before", 3)
        found = succeed(2, lambda one: locate_best(str(tmp_path / "before" / "checkpoint-3"), resumed, one))
        assert found == [str(tmp_path / expected / "checkpoint-3")] * 2


def test_a_best_checkpoint_that_no_rank_sees_is_gone(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    gone = str(tmp_path / "checkpoint-3")
    assert succeed(2, lambda one: locate_best(gone, tmp_path / "checkpoint-6", one)) == [None, None]
