"""Output of a command: one JSON document, or text.

Under ``--json`` a command prints exactly one JSON document on standard output, also for an error
(:meth:`~paddleformers_fc.errors.FlexError.to_wire`). Otherwise it prints results on standard output and errors on the
error stream. Text is wrapped at the width of a terminal, and not wrapped in a file or a pipe. Rich is imported only for
text.
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

from paddleformers_fc.errors import FlexError, cut
from paddleformers_fc.text import LONGEST_SHOWN

if TYPE_CHECKING:
    from rich.console import Console as Console
    from rich.table import Table as Table

_UNWRAPPED = 1000


def escape_invalid_text() -> None:
    """Make both streams escape invalid text, such as file names that are not UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def closed_pipe_ignored() -> Iterator[None]:
    """Context manager that ignores a closed output stream, as with ``| head``, and discards later output.

    Rich and typer turn the system's error into exit code 1, which means that a checkpoint is damaged.
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
    """Print a document as JSON.

    Args:
        document: a msgspec Struct, or a value that JSON can represent.
    """
    try:
        text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
    except UnicodeEncodeError:  # Python's encoder escapes file names that are not UTF-8.
        text = json.dumps(msgspec.to_builtins(document), indent=2)
    sys.stdout.write(text + "\n")


def print_error(error: FlexError, as_json: bool) -> None:
    """Print an error: JSON on standard output if ``as_json``, else text on the error stream."""
    if as_json:
        print_json(json.loads(error.to_wire()))
    else:
        sys.stderr.write(error.render() + "\n")


def console(*, stderr: bool = False) -> Console:
    """Return a console without markup, emoji or automatic highlighting."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _UNWRAPPED
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


def print_styled(console: Console, *parts: str | tuple[str, str]) -> None:
    """Print a line of several parts, texts or texts with styles; long parts keep their beginning and end."""
    from rich.text import Text

    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    console.print(Text.assemble(*((cut(text, LONGEST_SHOWN), style) for text, style in pairs)))


def warn_unverified(source: object, level: str) -> None:
    """Warn that damaged bytes would be copied, unless every byte was verified."""
    if level != "full":
        sys.stderr.write(
            f"The bytes of {source} were not compared with their checksums (--verify {level}): damage would be copied, "
            "and the copy gets new checksums.\n"
        )


def table_of(first: str, headings: Iterable[str], left: Collection[str] = ()) -> Table:
    """Return a table without rows.

    Args:
        first: the heading of the first column.
        headings: headings of the other columns, which contain numbers.
        left: headings of columns that contain text instead.
    """
    from rich import box
    from rich.table import Table

    found = Table(box=box.SIMPLE_HEAD)
    found.add_column(first, style="cyan")
    for heading in headings:
        found.add_column(heading, justify="left" if heading in left else "right")
    return found


def facts_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of labels and values; long lines of values keep their beginning and end."""
    from rich.table import Table

    found = Table.grid(padding=(0, 2))
    found.add_column(style="dim")
    found.add_column()
    for label, value in rows:
        found.add_row(f"  {label}", "\n".join(cut(line, LONGEST_SHOWN) for line in value.split("\n")))
    return found
