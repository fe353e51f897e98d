"""The records of ranks: what a disk that was full for a while leaves of them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from paddleformers_fc.errors import FormatError
from paddleformers_fc.trainer.rank_records import RECORDS, begin_record, read_error, read_records, update_record


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


def test_the_last_error_of_this_package_in_a_chain_is_recorded_and_python_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RECORDS, str(tmp_path))
    reported: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: reported.append(error))
    begin_record()
    wrapped = ValueError("another library")
    sys.excepthook(ValueError, wrapped, None)
    assert read_error(tmp_path) is None
    wrapped.__cause__ = FormatError("Invalid file.")
    sys.excepthook(ValueError, wrapped, None)
    found = read_error(tmp_path)
    assert isinstance(found, FormatError)
    assert found.what == "Invalid file."
    assert reported == [wrapped, wrapped]
