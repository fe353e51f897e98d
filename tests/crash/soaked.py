"""``docs/results/soak.md``, which holds what the last soak has counted."""

from __future__ import annotations

from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "results" / "soak.md"
_HEAD = "# The last soak\n\nWritten by `make soak`: every instant, where the ordinary tests try some.\n"


def write(key: str, text: str) -> None:
    """Put the last count of one kind into the document, in place of the one before."""
    old = DOCUMENT.read_text(encoding="utf-8").splitlines() if DOCUMENT.exists() else []
    lines = {line[2:].partition(": ")[0]: line for line in old if line.startswith("- ")}
    lines[key] = f"- {key}: {text}"
    DOCUMENT.write_text(_HEAD + "\n" + "\n".join(lines[one] for one in sorted(lines)) + "\n", encoding="utf-8")
