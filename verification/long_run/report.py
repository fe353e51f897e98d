"""The page of the longer proof and its picture: functions of the findings, without date or duration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from paddleformers_fc.upstream import VERSIONS
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
    whole = found.whole.losses
    yield f"## {found.title}, saved by {found.source}\n"
    yield (
        f"Losses of the uninterrupted run: {whole[1]:.4f} at step 1, {whole[SAVED_AT]:.4f} at step {SAVED_AT}, "
        f"{whole[LAST_STEP]:.4f} at step {LAST_STEP}.\n"
    )
    yield "| resumed as | largest difference of a loss | at step | at the first step | at the last step |"
    yield "|---|---|---|---|---|"
    for layout, run in found.resumed.items():
        largest, step = found.difference(layout)
        first, last = (_difference(abs(run.losses[at] - whole[at])) for at in (SAVED_AT + 1, LAST_STEP))
        yield f"| {layout} | {_difference(largest)} | {-step} | {first} | {last} |"
    yield f"\nWeights of step {LAST_STEP} of the uninterrupted run, md5 over names and bytes of all tensors:\n"
    yield "| written by | md5 |"
    yield "|---|---|"
    yield f"| export of this package | `{found.whole.export_md5}` |"
    expected, what = found.whole.export_md5, "equal"
    if found.whole.fused_md5:
        expected, what = found.whole.fused_md5, "equal to the fused ones"
        yield f"| the same, with projections fused by numpy as PaddleFormers leaves them | `{expected}` |"
    for one in found.unified:
        equal = what if one.md5 == expected else f"**`{one.md5}`**"
        yield f"| unified checkpoint of PaddleFormers under {one.layout} | {equal if one.md5 else one.error} |"
    yield ""


def _difference(value: float) -> str:
    return f"{value:.1e}" if value else "equal"


def draw(findings: Sequence[Findings], path: Path) -> None:
    """Draw the curves of loss above, and their differences below; a column per model."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(findings), figsize=(6.2 * len(findings), 6.4), sharex=True, squeeze=False)
    for column, found in enumerate(findings):
        above, below = axes[0][column], axes[1][column]
        steps = sorted(found.whole.losses)
        label = f"{found.source}, uninterrupted"
        above.plot(steps, [found.whole.losses[step] for step in steps], color="0.75", linewidth=5, label=label)
        for layout, run in found.resumed.items():
            after = sorted(run.losses)
            above.plot(after, [run.losses[step] for step in after], linewidth=1, label=f"resumed as {layout}")
            apart = [max(abs(run.losses[step] - found.whole.losses[step]), _LOWEST) for step in after]
            below.plot(after, apart, linewidth=1, label=f"resumed as {layout}")
        for one in (above, below):
            one.axvline(SAVED_AT, color="0.4", linestyle="--", linewidth=0.8)
        above.set(title=found.title, ylabel="loss")
        below.set(xlabel="step", ylabel="difference", yscale="log")
        above.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


_LOWEST = 1e-8
"""Drawn for losses that are equal; zero has no logarithm."""
