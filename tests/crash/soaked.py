"""``docs/results/soak.md``: the counts of the last `make soak`."""

from __future__ import annotations

from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "results" / "soak.md"
_HEAD = "# Soak test\n\n`make soak` tries every instant of every accident; the ordinary tests try a sample.\n"


def write(key: str, text: str) -> None:
    """Replace the count of one kind in the page."""
    old = DOCUMENT.read_text(encoding="utf-8").splitlines() if DOCUMENT.exists() else []
    lines = {line[2:].partition(": ")[0]: line for line in old if line.startswith("- ")}
    lines[key] = f"- {key}: {text}"
    DOCUMENT.write_text(_HEAD + "\n" + "\n".join(lines[one] for one in sorted(lines)) + "\n", encoding="utf-8")
