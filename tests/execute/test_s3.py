"""A load from an S3 store: the same bits as from a directory, few bytes too many, and nothing that was replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.execute.load import load_checkpoint
from paddleformers_fc.execute.opening import open_on_all_ranks
from tests.execute.simulated import MODEL, Roles, canonical, live, same_values, succeed
from tests.execute.test_save_and_load import save
from tests.storage.buckets import Bucket

ARRAYS = canonical()


@pytest.mark.parametrize("layout", [(1, 1), (1, 3)])
def test_a_checkpoint_is_verified_in_full_and_loaded_under_another_layout_from_s3(
    bucket: Bucket, tmp_path: Path, layout: tuple[int, int]
) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, 2, 2)
    directory = bucket.upload(tmp_path / "checkpoint-3")
    tp, sharded = layout

    def work(channel: Any) -> Roles:
        roles = live(ARRAYS, tp, channel.rank, empty=True, sharded=sharded)
        load_checkpoint(open_on_all_ranks(directory, channel, "full"), roles, MODEL, channel)
        return roles

    for rank, got in enumerate(succeed(tp * sharded, work)):
        assert same_values(live(ARRAYS, tp, rank, sharded=sharded), got)
