"""What a sweep has counted, in words, and ``docs/results/soak.md``, which holds what the last soak has counted."""

from __future__ import annotations

from pathlib import Path

from tests.crash.sweep import Tally

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "results" / "soak.md"
_HEAD = "# The last soak\n\nWritten by `make soak`: every instant, where the ordinary tests try some.\n"
_WHAT = {
    "kills": "SIGKILL of one rank, or of all ranks, of a save at an operation on files",
    "exports": "SIGKILL of one rank, or of all ranks, of an export at an operation on files",
    "power": "losses of power at an instant of a run, each with another part of what was not synced",
    "refusals": "refusals of an operation by the system: no room, a broken device, a read-only mount",
}


def sentence(kind: str, tally: Tally) -> str:
    """The count of a sweep."""
    lost = "none lost a checkpoint" if not tally.lost else f"{len(tally.lost)} went wrong"
    return f"{tally.tried:,} {_WHAT[kind]}, of {tally.instants:,} in {tally.scenarios} scenarios; {lost}."


def usual(kind: str, tally: Tally) -> str:
    """The count of a sample, without the numbers that change with every line of the package."""
    lost = "none lost a checkpoint" if not tally.lost else f"{len(tally.lost)} went wrong"
    return f"- {tally.tried:,} {_WHAT[kind]}, in {tally.scenarios} scenarios; {lost}."


def write(key: str, text: str) -> None:
    """Put the last count of one kind into the document, in place of the one before."""
    old = DOCUMENT.read_text(encoding="utf-8").splitlines() if DOCUMENT.exists() else []
    lines = {line[2:].partition(": ")[0]: line for line in old if line.startswith("- ")}
    lines[key] = f"- {key}: {text}"
    DOCUMENT.write_text(_HEAD + "\n" + "\n".join(lines[one] for one in sorted(lines)) + "\n", encoding="utf-8")
