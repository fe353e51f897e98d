"""Output of a command: one JSON document, or text; errors on the error stream.

Under ``--json`` a command prints exactly one JSON document on standard output; an error is the document
of :meth:`~paddleformers_fc.errors.FlexError.to_wire`. Otherwise results go to standard output as text and errors to the
error stream. Rich is imported when text is shown, never for JSON.

A terminal sets the width of the text. A file or a pipe has no width, so lines are not wrapped there.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from paddleformers_fc.errors import FlexError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNWRAPPED = 1000


def escape_invalid_text() -> None:
    """Let both streams escape invalid text, such as file names that are not UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def closed_pipe_ignored() -> Iterator[None]:
    """Continue after a block whose output stream was closed, as under ``| head``; later output is discarded.

    Rich and typer turn the system's error into an exit with code 1, which means a fault of a checkpoint.
    """
    try:
        yield
        sys.stdout.flush()
        sys.stderr.flush()
    except (BrokenPipeError, SystemExit) as error:
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _discard_closed()


def _discard_closed() -> None:
    """Redirect closed streams to the null device, so that the interpreter does not fail on them at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def print_json(document: Any) -> None:
    """Print the document of a command.

    Args:
        document: a msgspec Struct, or a value that JSON can represent.
    """
    try:
        text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
    except UnicodeEncodeError:  # A file name that is not UTF-8: Python's own encoder escapes it.
        text = json.dumps(msgspec.to_builtins(document), indent=2)
    sys.stdout.write(text + "\n")


def print_error(error: FlexError, as_json: bool) -> None:
    """Print an error: as JSON on standard output, as text on the error stream.

    Args:
        error: the error.
        as_json: whether the command was called with ``--json``.
    """
    if as_json:
        print_json(json.loads(error.to_wire()))
    else:
        sys.stderr.write(error.render() + "\n")


def console(*, stderr: bool = False) -> Console:
    """Return a console for text without markup, emoji and guessed colours."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _UNWRAPPED
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


def warn_unverified(source: object, level: str) -> None:
    """State on the error stream that damage of a source would be copied, unless every byte was compared."""
    if level != "full":
        sys.stderr.write(
            f"The bytes of {source} were not compared with their checksums (--verify {level}): damage would be copied, "
            "and the copy has checksums of its own.\n"
        )


def table_of(first: str, headings: Iterable[str], left: Collection[str] = ()) -> Table:
    """Return a table without rows.

    Args:
        first: the heading of the first column.
        headings: of the others, whose cells are numbers.
        left: headings of cells that are text.
    """
    from rich import box
    from rich.table import Table

    found = Table(box=box.SIMPLE_HEAD)
    found.add_column(first, style="cyan")
    for heading in headings:
        found.add_column(heading, justify="left" if heading in left else "right")
    return found


def facts_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of facts, each with its label."""
    from rich.table import Table

    found = Table.grid(padding=(0, 2))
    found.add_column(style="dim")
    found.add_column()
    for label, value in rows:
        found.add_row(f"  {label}", value)
    return found
