"""Filter the log of a running training for a terminal.

PaddleFormers writes a thousand lines before the first step. The log file alone has messages of level DEBUG, further
lines of messages of level INFO (tables, configurations), messages of level INFO of Paddle's C++ code, and warnings of
installed Python packages. Python tracebacks are reduced to the line of the exception. Errors of this package are
omitted, because the command prints them at the end. Colours are used on terminals only. Memory is one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import IO

from paddleformers_fc.errors import FlexError

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
DEBUG = re.compile(r"\[ *DEBUG\]")
_RECORD = re.compile(r"\[[\d-]{10} [\d:,]+\] \[ *(\w+)\]")
"""The beginning of a message of PaddleFormers' logger."""
_DETAILED = ("DEBUG", "INFO")
_DETAIL = re.compile(r"[ \t|+},\n](?!.*\r)")
"""The beginning of a further line of a message; progress bars, which end in a carriage return, are none."""
_GLOG_INFO = re.compile(r"I\d{4} [\d:.]+ +\d+ ")
_LIBRARY_WARNING = re.compile(r"\S+/site-packages/\S+:\d+: \w+Warning: ")
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
        self._in_traceback = self._in_details = False

    def write(self, text: str) -> int:
        """Take text of any length; whole lines are forwarded."""
        *lines, self._rest = re.split(r"(?<=[\n\r])", self._rest + text)
        self._forward(lines)
        return len(text)

    def flush(self) -> None:
        """Do nothing: whole lines are flushed."""

    def close(self) -> None:
        """Forward the last line, which may have no end. The stream stays open."""
        self._forward([self._rest])

    def _forward(self, lines: Iterable[str]) -> None:
        for line in lines:
            plain = COLOUR.sub("", line)
            if self._is_shown(plain) and self._stream is not None:
                try:
                    self._stream.write(line if self._colours else plain)
                    self._stream.flush()
                except BrokenPipeError:
                    self._stream = None

    def _is_shown(self, plain: str) -> bool:
        if plain.startswith(_TRACEBACK):
            self._in_traceback = True
        elif self._in_traceback and plain.strip() and not plain.startswith(_OF_TRACEBACK):
            self._in_traceback = False
        is_detail = self._is_detail(plain)
        return not self._in_traceback and not is_detail and not DEBUG.search(plain)

    def _is_detail(self, plain: str) -> bool:
        """Return whether only the log file has a line that follows the lines before it."""
        is_warning = _LIBRARY_WARNING.match(plain) is not None
        if is_warning or not _DETAIL.match(plain):
            record = _RECORD.match(plain)
            self._in_details = is_warning or (record is not None and record[1] in _DETAILED)
            return is_warning or _GLOG_INFO.match(plain) is not None
        return self._in_details
