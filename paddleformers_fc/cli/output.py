"""How a verb speaks: one JSON document, or text for a person; errors on the error stream.

Under ``--json`` a verb prints exactly one JSON document on standard output, whatever happens; an error is the document
of :meth:`~paddleformers_fc.errors.FlexError.to_wire`. Otherwise results go to standard output as text and errors to the
error stream. Rich is imported when text is shown, never for JSON.

A terminal sets the width of the text. A file or a pipe has no width, so lines are not wrapped there.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from paddleformers_fc.errors import FlexError

if TYPE_CHECKING:
    from rich.console import Console

_UNWRAPPED = 1000


def escape_what_is_no_text() -> None:
    """Let both streams escape what they cannot write, such as the name of a file that is just bytes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def closed_pipe_ignored() -> Iterator[None]:
    """Go on after a block whose output nobody reads any more, as under ``| head``; what follows is discarded.

    Rich and typer turn the system's error into an exit with code 1, which would say that a checkpoint is wrong.
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
    """Let streams whose reader is gone lead nowhere, so that the interpreter does not fail on them at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def print_json(document: Any) -> None:
    """Print the one document of a verb.

    Args:
        document: a msgspec Struct, or anything JSON can hold.
    """
    try:
        text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
    except UnicodeEncodeError:  # The name of a file that is no text: Python's own encoder escapes what is none.
        text = json.dumps(msgspec.to_builtins(document), indent=2)
    sys.stdout.write(text + "\n")


def print_error(error: FlexError, as_json: bool) -> None:
    """Say what is wrong, where whoever asked looks for it.

    Args:
        error: what is wrong.
        as_json: whether the verb was called with ``--json``.
    """
    if as_json:
        print_json(json.loads(error.to_wire()))
    else:
        sys.stderr.write(error.render() + "\n")


def console(*, stderr: bool = False) -> Console:
    """Where a person reads. Text is taken as it is: neither markup nor emoji nor guessed colours."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _UNWRAPPED
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


@contextmanager
def working(doing: str) -> Iterator[None]:
    """Show on the error stream that something takes its time; nothing where that is no terminal.

    Args:
        doing: what is being done, such as ``reading checkpoint-3``.
    """
    if not sys.stderr.isatty():
        yield
        return
    with console(stderr=True).status(f"{doing} …"):
        yield
