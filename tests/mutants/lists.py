"""All mutants: the lists beside this module, package by package.

A list is a text of blocks, with an empty line between two of them. A block is one mutant: ``why:`` it matters, the
lines that it takes out of the source behind ``-``, and those that it puts there behind ``+``. Whatever is not whole
lines is a part of one line. Before ``why:``, ``file:`` and ``test:`` name the source and the tests that should notice,
one a line; they hold for the blocks that follow until others are named. ``equivalent:`` at the end says why no test
can notice. A line that begins with ``#`` is a remark.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.mutants.mutant import Mutant

LISTS = ("storage", "execute", "plan", "formats", "layout", "families", "trainer")


def read_list(text: str) -> Iterator[Mutant]:
    """Return the mutants of a list, in its order."""
    file, tests = "", ()
    for block in text.removesuffix("\n").split("\n\n"):
        lines = block.split("\n")

        def behind(mark: str, lines: list[str] = lines) -> tuple[str, ...]:
            return tuple(line.removeprefix(mark) for line in lines if line.startswith(mark))

        (file,), tests = behind("file: ") or (file,), behind("test: ") or tests
        (why,), removed, added = behind("why: "), "\n".join(behind("-")), "\n".join(behind("+"))
        yield Mutant(file, removed, added, tests, why, "".join(behind("equivalent: ")))


MUTANTS = tuple(
    mutant for name in LISTS for mutant in read_list(Path(__file__).with_name(f"{name}.txt").read_text("utf-8"))
)
