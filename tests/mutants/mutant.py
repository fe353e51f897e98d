"""What a mutant is, and how it is applied."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paddleformers_fc.errors import OptionError

PACKAGE = "paddleformers_fc"


@dataclass(frozen=True)
class Mutant:
    """One small fault.

    Args:
        file: the source, relative to the package.
        text: what is replaced; it is in the source exactly once.
        instead: what takes its place.
        tests: what should notice, as arguments of pytest: files or node ids.
        why: what would go wrong, one line.
        equivalent: why no test can notice it; empty where one can.
    """

    file: str
    text: str
    instead: str
    tests: tuple[str, ...]
    why: str
    equivalent: str = ""

    def applied(self, source: str) -> str:
        """The source with the fault.

        Raises:
            OptionError: the text is not there exactly once, or the outcome is no Python.
        """
        count = source.count(self.text)
        if count != 1:
            raise OptionError(
                f"A mutant does not apply: its text is in {self.file} {count} times.",
                where=self.file,
                evidence=[self.text],
                next_step="Adapt the mutant to the source of today, or take it out of the list.",
            )
        changed = source.replace(self.text, self.instead)
        try:
            compile(changed, self.file, "exec")
        except SyntaxError as error:
            raise OptionError(f"A mutant is no Python: {error}", where=self.file, evidence=[self.instead]) from error
        return changed

    def path(self, tree: Path) -> Path:
        """Its source in a copy of the repository."""
        return tree / PACKAGE / self.file

    def __str__(self) -> str:
        return f"{self.file}: {self.why}"
