"""Filter the log of a running training for a terminal.

PaddleFormers writes a thousand lines before the first step, most of them of level DEBUG; those stay in the log file.
Python tracebacks are reduced to the line of the exception. Errors of this package are omitted, because the command
prints them at the end. Colours are used on terminals only.
Memory is one line.
"""

from __future__ import annotations

import re
from typing import IO

from paddleformers_fc.errors import FlexError

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
DEBUG = re.compile(r"\[ *DEBUG\]")
_TRACEBACK = "Traceback (most recent call last):"
_OF_TRACEBACK = (" ", "During handling of ", "The above exception ", f"{FlexError.__module__}.")


class LogView:
    """A stream that forwards the lines of a training's log that a person reads.

    Args:
        stream: the target.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream: IO[str] | None = stream  # None after its reader has closed it, as under | head.
        self._colours = stream.isatty()
        self._rest = ""
        self._in_traceback = False

    def write(self, text: str) -> int:
        """Take text of any length; whole lines are forwarded."""
        *lines, self._rest = re.split(r"(?<=[\n\r])", self._rest + text)
        for line in lines:
            self._line(line)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except BrokenPipeError:
                self._stream = None

    def close(self) -> None:
        """Forward the last line, which may have no end. The stream stays open."""
        if self._rest:
            self._line(self._rest)
            self._rest = ""
        self.flush()

    def _line(self, line: str) -> None:
        plain = COLOUR.sub("", line)
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
