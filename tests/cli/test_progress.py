"""Progress of commands: bytes that are expected and done, a bar on a terminal, two lines elsewhere."""

from __future__ import annotations

import io
import re
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from rich.console import Console

from paddleformers_fc import progress_display as progress
from paddleformers_fc.storage.progress import Meter, advance, expect
from tests.cli.support import run, save
from tests.execute.simulated import canonical
from tests.harness.limits import LIMIT
from tests.harness.waiting import pause


def test_all_expected_bytes_are_done_at_the_end(four: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Meter] = []

    class Kept(Meter):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(progress, "Meter", Kept)
    arrays = canonical()
    arrays["model.norm.weight"] += 1
    other = save(tmp_path / "other", arrays)
    weights = sum(array.nbytes for array in arrays.values())
    # The index and the documents were compared when the checkpoint was opened.
    stored = sum(path.stat().st_size for path in four.glob("*/*.safetensors"))
    for command, code, least in (
        (("export", four, tmp_path / "hf"), 0, stored),
        (("diff", four, other), 1, 2 * weights),
    ):
        made.clear()
        assert run(*command).code == code
        (found,) = made
        assert found.done == found.expected >= least


@pytest.mark.parametrize("has_ends", [True, False])
def test_without_a_terminal_there_is_a_line_every_interval_also_in_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_ends: bool
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    monkeypatch.setattr(progress, "_REFRESH", 0.01)
    written, seen = threading.Event(), sys.stderr.write
    monkeypatch.setattr(sys.stderr, "write", lambda text: ("1.07 GB of " in text and written.set(), seen(text))[1])
    with progress.shown("saving x", None, has_ends):
        expect(4 << 30)
        advance(1 << 30)
        assert written.wait(LIMIT)
    lines = capsys.readouterr().err.splitlines()
    middle = [line for line in lines if " of " in line]
    assert re.fullmatch(r"saving x: 1\.07 GB of 4\.29 GB in \d+\.\d\d s, [\d.]+ [GTP]B/s", middle[-1])
    ends = [line for line in lines if line not in middle]
    if has_ends:
        assert ends[0] == "saving x: 4.29 GB"
        assert re.fullmatch(r"saving x: 1\.07 GB in \d+\.\d\d s, [\d.]+ [GTP]B/s", ends[1])
    assert len(ends) == (2 if has_ends else 0)


def test_short_operations_print_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.shown("exporting x", None):
        expect(1 << 30)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with progress.shown("exporting x", None):
        expect(progress.LEAST_BYTES - 1)
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_a_bar_with_bytes_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "_REFRESH", 0.01)
    stream, shown = io.StringIO(), threading.Event()
    write = stream.write

    def record(text: str) -> int:
        if "GB" in text and "/s" in text and "0:00:" in text:
            shown.set()
        return write(text)

    monkeypatch.setattr(stream, "write", record)
    with progress.shown("exporting [x]", Console(file=stream, force_terminal=True, width=120)):
        expect(4 << 30)
        while not shown.is_set():
            advance(1 << 22)
            pause()
    assert "exporting [x] …" in stream.getvalue()


def test_an_error_ends_the_display_and_the_count() -> None:
    with pytest.raises(KeyboardInterrupt), progress.shown("x", None) as found:
        raise KeyboardInterrupt
    expect(5)
    advance(5)
    assert (found.expected, found.done) == (0, 0)
    assert "flex-progress" not in {thread.name for thread in threading.enumerate()}


def test_the_display_of_commands_is_chosen_by_the_error_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[bool] = []
    shown = progress.shown

    def choose(doing: str, console: Console | None) -> AbstractContextManager[Meter]:
        chosen.append(console is not None)
        return shown(doing, None)

    monkeypatch.setattr(progress, "shown", choose)
    for is_terminal in (True, False):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        with progress.working("reading"):
            pass
        assert stream.getvalue() == ""
    assert chosen == [True, False]
