"""Faults of AOA statements, shown in the user's text with carets under the invalid characters.

Code that finds a fault raises :class:`Fault`, without knowing the text. The caller that knows the statement adds it to
:class:`Faults`, which raises one :class:`MappingError` for all statements. A statement with placeholders fails once per
layer, so repetitions are only counted. Memory is bounded by the statements.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from paddleformers_fc.errors import MappingError
from paddleformers_fc.text import count_text

_WIDTH = 110
_BEFORE = 40
_MOST = 40
_LONGEST = 600
_NUMBER = re.compile(r"\d+")


class Span(NamedTuple):
    """Characters ``begin <= i < end`` of a line."""

    begin: int
    end: int


class SourceLine(NamedTuple):
    """The text of one statement.

    Args:
        number: its position in the list of statements, from 1.
        text: the text, without surrounding line breaks.
    """

    number: int
    text: str

    @property
    def title(self) -> str:
        """The name in reports."""
        return f"statement {self.number}"


class Fault(Exception):
    """An invalid statement.

    Args:
        cause: the fault, in one sentence.
        accepted: what is valid instead; empty if ``cause`` implies it.
        span: the invalid characters, if known.
    """

    def __init__(self, cause: str, accepted: str = "", span: Span | None = None) -> None:
        self.cause = cause
        self.accepted = accepted
        self.span = span
        super().__init__(cause)


class Faults:
    """All faults of a list of statements."""

    def __init__(self) -> None:
        self.lines: set[SourceLine] = set()
        """The statements with faults."""

        # The text of a fault, and an empty text for every repetition.
        self._found: dict[tuple[int, str], list[str]] = {}

    def add(self, line: SourceLine, fault: Fault, span: Span) -> None:
        """Add a fault of a line.

        Args:
            line: the statement.
            fault: its fault.
            span: the position to mark if ``fault`` has none.
        """
        found = self._found.setdefault((line.number, _NUMBER.sub("0", fault.cause)), [])
        found.append("" if found else _shown(line, fault, fault.span or span))
        self.lines.add(line)

    def add_plain(self, fault: Fault) -> None:
        """Add a fault of tensors that are mapped by equal names, without a statement."""
        text = f"equal names: {fault.cause}" + (f" Accepted: {fault.accepted}" if fault.accepted else "")
        self._found[0, text] = [text]

    def raise_any(self) -> None:
        """Raise all faults as one error, or return if there are none.

        Raises:
            MappingError: with one line of evidence per fault.
        """
        if not self._found:
            return
        evidence = [
            text + (f" ({len(again) + 1} times, for different numbers)" if again else "")
            for _, (text, *again) in sorted(self._found.items(), key=lambda entry: entry[0][0])
        ]
        raise MappingError(
            f"Invalid AOA statements: {count_text(len(evidence), 'fault')}.",
            where="aoa_statements",
            evidence=evidence[:_MOST] + ([f"and {len(evidence) - _MOST} more"] if len(evidence) > _MOST else []),
            next_step="Correct the statements; docs/aoa.md describes every form. No tensor was read or written.",
        )


def _shown(line: SourceLine, fault: Fault, span: Span) -> str:
    text = "".join(char if char.isprintable() else " " for char in line.text)
    begin, end = span.begin, max(span.end, span.begin + 1)
    if len(text) > _WIDTH:
        start = max(0, min(begin - _BEFORE, len(text) - _WIDTH))
        window = text[start : start + _WIDTH]
        head, tail = "..." if start else "", "..." if start + _WIDTH < len(text) else ""
        begin, end = begin - start + len(head), min(end, start + _WIDTH) - start + len(head)
        text = head + window + tail
    title = f"{line.title}: "
    # Error messages indent the first line of evidence by four characters.
    carets = " " * (4 + len(title) + begin) + "^" * max(1, min(end, len(text)) - begin)
    accepted = f" Accepted: {_short(fault.accepted)}" if fault.accepted else ""
    return f"{title}{text}\n{carets}\n      {_short(fault.cause)}{accepted}"


def _short(text: str) -> str:
    """Return a sentence of bounded length: it can contain names of any length."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
