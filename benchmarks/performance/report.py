"""The tables and the picture of a run."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.performance.cases import MOST_AMPLIFICATION, MOST_MEMORY, Target, targets
from benchmarks.performance.models import MODELS
from benchmarks.performance.running import Outcome, Timing

GIB = 1 << 30
MIB = 1 << 20
BY_HAND = "## Where the time goes"
TITLES = {
    "raw": "raw copy",
    "ours": "this package",
    "safetensors": "safetensors",
    "stock": "Paddle, .distcp",
    "stock safetensors": "Paddle, safetensors",
    "dcp": "PyTorch DCP",
}


def baseline(outcome: Outcome) -> str:
    """Who is 1 in a case: the first contender."""
    return outcome.case.contenders[0]


def ratio(outcome: Outcome, contender: str, against: str) -> float | None:
    """How many times as fast as another: the median over rounds of what one round says."""
    one, other = outcome.timings.get(contender, Timing()), outcome.timings.get(against, Timing())
    if not one.seconds or not other.seconds:
        return None
    return statistics.median(theirs / own for own, theirs in zip(one.seconds, other.seconds, strict=True))


def rate(outcome: Outcome, contender: str) -> float | None:
    """GiB/s, the median over rounds."""
    seconds = outcome.timings.get(contender, Timing()).seconds
    return outcome.nbytes / statistics.median(seconds) / GIB if seconds else None


def verdict(target: Target, outcomes: Mapping[str, Outcome]) -> float | None:
    """What was reached of a target; None where a case or contender is missing."""
    outcome = outcomes.get(target.case)
    if outcome is None:
        return None
    if target.against not in outcomes:
        return ratio(outcome, "ours", target.against)
    own, other = rate(outcome, "ours"), rate(outcomes[target.against], "ours")
    return None if own is None or other is None else own / other


def tables(outcomes: Mapping[str, Outcome], exports: Mapping[str, int], rounds: int) -> str:
    """The whole report as Markdown."""
    return "\n".join([*_head(rounds), *_targets(outcomes), *_memory(outcomes, exports), *_cases(outcomes)]) + "\n"


def kept(path: Path) -> str:
    """What people have written below the tables of an older report, from its heading on; it is not made anew."""
    if not path.exists():
        return ""
    _, heading, text = path.read_text(encoding="utf-8").partition(f"\n{BY_HAND}\n")
    return f"\n{heading.strip()}\n{text}" if heading else ""


def _head(rounds: int) -> Iterator[str]:
    yield "# Performance"
    yield ""
    yield (
        f"Written by `make bench` on {os.cpu_count()} cores of a {platform.machine()} machine without an accelerator, "
        f"on a file system in memory: medians of {rounds} interleaved rounds after a warm-up in which every load is "
        "checked bit by bit. A rate is the bytes of the tensors that all ranks hold or want, by the time from the "
        "command to the last rank's answer. A ratio is the median of the ratios within one round. What a contender "
        "does is in `benchmarks/performance/contenders.py` and `with_torch.py`."
    )
    yield ""
    yield "![rates of every contender](performance.png)"
    yield ""


def _targets(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    yield "## Targets"
    yield ""
    yield "| case | this package, compared with | target | measured | |"
    yield "|---|---|---|---|---|"
    for target in targets():
        reached = verdict(target, outcomes)
        against = TITLES.get(target.against, f"“{target.against}”")
        said = "not measured" if reached is None else f"{reached:.2f}"
        met = "" if reached is None else ("met" if reached >= target.at_least else "**missed**")
        yield f"| {target.case} | {against} | {target.at_least:.2f} | {said} | {met} |"
    yield ""


def _memory(outcomes: Mapping[str, Outcome], exports: Mapping[str, int]) -> Iterator[str]:
    yield "## Bytes and memory of this package"
    yield ""
    yield (
        f"Amplification is bytes read from storage by bytes needed, at most {MOST_AMPLIFICATION}. Memory is how far "
        f"the resident memory of a rank rose above its tensors, at most {MOST_MEMORY // MIB} MiB for a load beside its "
        "largest single read, and 5 % of the shard for a save. The first call of a process plans and proves; "
        "later ones of the same job find the plan made, and are what the tables time."
    )
    yield ""
    yield "| case | amplification | memory, MiB | of the rank's tensors | first call, s | later, s |"
    yield "|---|---|---|---|---|---|"
    for name, outcome in outcomes.items():
        timing = outcome.timings.get("ours", Timing())
        if not timing.seconds:
            continue
        read = f"{timing.read / outcome.nbytes:.3f}" if timing.read >= 0 else ""
        share = timing.peak / (outcome.nbytes / outcome.case.ranks)
        later = statistics.median(timing.seconds)
        yield f"| {name} | {read} | {timing.peak / MIB:.0f} | {share:.1%} | {timing.first:.2f} | {later:.2f} |"
    yield ""
    if exports:
        yield "| export in a process of its own | memory, MiB |"
        yield "|---|---|"
        for name, peak in exports.items():
            yield f"| {name} | {peak / MIB:.0f} |"
        yield ""


def _cases(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    yield "## Every case"
    for name, outcome in outcomes.items():
        base = baseline(outcome)
        yield ""
        yield f"### {name}"
        yield ""
        yield f"{MODELS[outcome.case.model].title}; {outcome.nbytes / MIB:.0f} MiB on {outcome.case.ranks} ranks."
        yield ""
        yield f"| | GiB/s | slowest to fastest round | by {TITLES[base]} | memory, MiB |"
        yield "|---|---|---|---|---|"
        for contender in outcome.case.contenders:
            yield _line(outcome, contender, base)


def _line(outcome: Outcome, contender: str, base: str) -> str:
    timing = outcome.timings.get(contender)
    if timing is None:
        return f"| {TITLES[contender]} | not installed | | | |"
    if timing.failure:
        return f"| {TITLES[contender]} | cannot: {timing.failure.replace('|', '/')[:140]} | | | |"
    rates = [outcome.nbytes / seconds / GIB for seconds in timing.seconds]
    compared = ratio(outcome, contender, base) or 0.0
    return (
        f"| {TITLES[contender]} | {statistics.median(rates):.2f} | {min(rates):.2f} to {max(rates):.2f} "
        f"| {compared:.2f} | {timing.peak / MIB:.0f} |"
    )


def draw(outcomes: Mapping[str, Outcome], path: Path) -> None:
    """A picture: the ratio to the baseline of every contender in every case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [name for name in TITLES if name != "raw"]
    figure, axes = pyplot.subplots(figsize=(11, 0.62 * len(outcomes) + 1.5), layout="constrained")
    height = 0.8 / len(shown)
    for index, contender in enumerate(shown):
        found = [ratio(outcome, contender, baseline(outcome)) or 0.0 for outcome in outcomes.values()]
        places = [row + index * height for row in range(len(outcomes))]
        axes.barh(places, found, height, label=TITLES[contender])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(outcomes))], list(outcomes))
    axes.invert_yaxis()
    axes.set_xlabel("rate by that of a raw copy of the same bytes (export: by safetensors.save_file)")
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
