"""A load from an S3 store: the same bits as from a directory, few bytes too many, and nothing that was replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddleformers_fc.errors import Corrupt
from paddleformers_fc.execute.load import load_checkpoint
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.reading import ArraySlot, execute_reads
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.plan import LoadPlan, ReadItem, Report
from paddleformers_fc.plan.items import StoredPart
from tests.execute.simulated import MODEL, Roles, canonical, job, live, same_values, succeed
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


def test_a_number_that_is_damaged_in_the_bucket_stops_a_load_that_verifies_in_full(
    bucket: Bucket, tmp_path: Path
) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, 2, 1)
    path = next((tmp_path / "checkpoint-3/model_state").iterdir())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    directory = bucket.upload(tmp_path / "checkpoint-3")

    def work(channel: Any) -> None:
        roles = live(ARRAYS, 1, channel.rank, empty=True)
        load_checkpoint(open_on_all_ranks(directory, channel, "full"), roles, MODEL, channel)

    (outcome,) = job(1, work)
    assert isinstance(outcome, Corrupt), outcome
    assert path.name in outcome.render()


def test_an_object_that_is_replaced_between_opening_and_reading_stops_every_rank(
    bucket: Bucket, tmp_path: Path
) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, 2, 1)
    directory = bucket.upload(tmp_path / "checkpoint-3")
    path = next((tmp_path / "checkpoint-3/model_state").iterdir())

    def work(channel: Any) -> None:
        checkpoint = open_on_all_ranks(directory, channel)
        channel.all_gather(b"")
        if channel.rank == 0:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            bucket.put(path.relative_to(tmp_path).as_posix(), bytes(data))
        channel.all_gather(b"")
        load_checkpoint(checkpoint, live(ARRAYS, 2, channel.rank, empty=True), MODEL, channel)

    outcomes = job(2, work)
    assert all(isinstance(outcome, Corrupt) for outcome in outcomes), outcomes
    assert {outcome.render() for outcome in outcomes} == {outcomes[0].render()}
    assert "was replaced or changed" in outcomes[0].what
    assert path.name in outcomes[0].what


HEIGHT, WIDTH = 12, 256 * 1024


def test_a_tensor_parallel_slice_of_long_rows_is_sent_its_bytes_in_one_request_per_row(bucket: Bucket) -> None:
    """Rows of one MiB each, cut in two: what the store sends to one of two ranks, and how often."""
    long = np.arange(HEIGHT * WIDTH, dtype=np.float32).reshape(HEIGHT, WIDTH)
    bucket.put("data", long.tobytes())
    half = WIDTH // 2
    box, own = Box((0, half), (HEIGHT, WIDTH)), Box((0, 0), (HEIGHT, half))
    item = ReadItem("r", "n", StoredPart("data", 0, (HEIGHT, WIDTH), box, "float32"), 0, (HEIGHT, half), own, (0, 1))
    out = np.zeros(HEIGHT * half, np.float32)
    execute_reads(LoadPlan((item,), (), {}, Report()), bucket.path, {("r", "n"): ArraySlot(out)})
    assert np.array_equal(out.reshape(HEIGHT, half), long[:, half:])
    assert out.nbytes <= bucket.store.bytes <= 1.05 * out.nbytes
    assert len(bucket.store.answers) <= HEIGHT
