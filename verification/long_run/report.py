"""The page of the longer proof and its picture: functions of the findings, without date or duration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from paddleformers_fc.upstream import VERSIONS
from verification import curves
from verification.long_run.running import LAST_STEP, SAVED_AT, Findings

PAGE = "long_run.md"
PICTURE = "long_run.png"


def page(findings: Sequence[Findings]) -> str:
    """Return the page as Markdown."""
    versions = f"Paddle {VERSIONS['paddle']} and PaddleFormers {VERSIONS['paddleformers']}"
    head = (
        f"# {SAVED_AT} steps, then {LAST_STEP - SAVED_AT} under another layout\n\n"
        f"A run is saved at step {SAVED_AT} and resumed under other layouts up to step {LAST_STEP}. The losses of\n"
        "every step are compared with those of the run that was not interrupted. The models are the tiny ones of\n"
        f"the verification matrices, in float32, on gloo ranks, with {versions}.\n"
        "`make verification-long` writes this page.\n\n"
        f"![Losses and their differences]({PICTURE})\n"
    )
    return "\n".join([head, *(section for one in findings for section in _sections(one))])


def _sections(found: Findings) -> Iterator[str]:
    whole = found.whole
    yield f"## {found.title}, saved by {found.source}\n"
    yield (
        f"Losses of the uninterrupted run: {whole[1]:.4f} at step 1, {whole[SAVED_AT]:.4f} at step {SAVED_AT}, "
        f"{whole[LAST_STEP]:.4f} at step {LAST_STEP}.\n"
    )
    yield "| resumed as | largest difference of a loss | at step | at the first step | at the last step |"
    yield "|---|---|---|---|---|"
    for layout, losses in found.resumed.items():
        largest, step = found.difference(layout)
        first, last = (_difference(abs(losses[at] - whole[at])) for at in (SAVED_AT + 1, LAST_STEP))
        yield f"| {layout} | {_difference(largest)} | {-step} | {first} | {last} |"
    yield ""


def _difference(value: float) -> str:
    return f"{value:.1e}" if value else "equal"


def draw(findings: Sequence[Findings], path: Path) -> None:
    """Draw the losses above, and their differences below; a column per model."""
    columns = []
    for one in findings:
        resumed = {f"resumed as {name}": losses for name, losses in one.resumed.items()}
        columns.append(curves.Curves(one.title, one.source, one.whole, resumed, SAVED_AT))
    curves.draw(columns, path)
