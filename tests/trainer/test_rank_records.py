"""The records of ranks: what a disk that was full for a while leaves of them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from paddleformers_fc.trainer.rank_records import RECORDS, begin_record, read_records, update_record


def test_a_rank_record_lost_to_a_full_disk_is_rewritten_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "records"
    directory.mkdir()
    monkeypatch.setenv(RECORDS, str(directory))
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    begin_record()
    (path,) = directory.iterdir()
    path.write_bytes(b"")
    assert [record.process for record in read_records(directory)] == [None]
    update_record(step=3)
    assert [(record.process, record.step) for record in read_records(directory)] == [(os.getpid(), 3)]
    shutil.rmtree(directory)
    update_record(step=4)
    assert [(record.process, record.step) for record in read_records(directory)] == [(os.getpid(), 4)]
