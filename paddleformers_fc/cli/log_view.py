"""Filter the log of a running training for a terminal, and keep its progress.

PaddleFormers writes a thousand lines before the first step, most of them of level DEBUG; those stay in the log file.
Python tracebacks are reduced to the line of the exception. Errors of this package are omitted, because the command
prints them at the end. Colours are used on terminals only.

The few lines that contain the progress of the training are kept, shown or not. Memory is one line.
"""

from __future__ import annotations

import re
from typing import IO

from paddleformers_fc.errors import FlexError

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
DEBUG = re.compile(r"\[ *DEBUG\]")
_TRACEBACK = "Traceback (most recent call last):"
_OF_TRACEBACK = (" ", "During handling of ", "The above exception ", f"{FlexError.__module__}.")
_STEP = re.compile(r"\bloss: ([-+.\w]+), .*?\bglobal_step: (\d+),")
_SAVED = re.compile(r"\bSaved step (\d+) to (.+): [^:]+ in [0-9.]+ s$")
_RESUMED = re.compile(r"\bResumed step (\d+) (?:\(saved as [^)]*\) )?from ")


class LogView:
    """A stream that passes on what is worth reading of a training's log.

    Args:
        stream: where it goes; None remembers only.

    Attributes:
        resumed: the step that was resumed from; None in a run from the beginning.
        step: the last step that was logged or saved; None before the first.
        loss: as it was last logged; empty before the first.
        checkpoint: the last one that was saved; empty before the first.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream
        self._colours = stream is not None and stream.isatty()
        self._rest = ""
        self._in_traceback = False
        self.resumed: int | None = None
        self.step: int | None = None
        self.loss = self.checkpoint = ""

    def write(self, text: str) -> int:
        """Take text as it comes; whole lines are passed on."""
        *lines, self._rest = re.split(r"(?<=[\n\r])", self._rest + text)
        for line in lines:
            self._line(line)
        return len(text)

    def flush(self) -> None:
        """Let the stream show what it was given."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except BrokenPipeError:
                self._stream = None  # The reader is gone, as under | head; the training continues.

    def close(self) -> None:
        """Pass on the last line, which may have no end. The stream stays open."""
        if self._rest:
            self._line(self._rest)
            self._rest = ""
        self.flush()

    def _line(self, line: str) -> None:
        plain = COLOUR.sub("", line)
        self._remember(plain.rstrip())
        if self._is_shown(plain) and self._stream is not None:
            try:
                self._stream.write(line if self._colours else plain)
            except BrokenPipeError:
                self._stream = None

    def _is_shown(self, plain: str) -> bool:
        if plain.startswith(_TRACEBACK):
            self._in_traceback = True
        elif self._in_traceback and plain.strip() and not plain.startswith(_OF_TRACEBACK):
            self._in_traceback = False
        return not self._in_traceback and not DEBUG.search(plain)

    def _remember(self, plain: str) -> None:
        if found := _STEP.search(plain):
            self.loss, self.step = found[1], int(found[2])
        elif found := _SAVED.search(plain):
            self.step, self.checkpoint = int(found[1]), found[2]
        elif found := _RESUMED.search(plain):
            self.resumed = int(found[1])
