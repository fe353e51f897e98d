"""The tables and the picture of a run."""

from __future__ import annotations

import os
import platform
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.performance.cases import (
    CASES,
    LEVELS,
    MOST_AMPLIFICATION,
    MOST_MEMORY,
    STORAGE_LATENCY,
    STORAGE_RATE,
    Target,
    targets,
)
from benchmarks.performance.models import MODELS
from benchmarks.performance.running import Outcome, Timing
from benchmarks.performance.streamed import FIRST_TENSOR

OURS = LEVELS[0]
OWN = ("raw", "ours exported", *LEVELS)
"""Contenders that are no other system."""
GIB = 1 << 30
MIB = 1 << 20
FIRST, LATER = "first", "later"
BY_HAND = "## Where the time goes"
PHASES = ("import", "open", "plan", "read")
TITLES = {
    "raw": "raw copy",
    "ours": "this package",
    "ours size": "this package, `size`",
    "ours off": "this package, `off`",
    "ours exported": "this package, save and export",
    "safetensors": "safetensors",
    "stock": "Paddle, .distcp",
    "stock safetensors": "Paddle, safetensors",
    "dcp": "PyTorch DCP",
}


def baseline(outcome: Outcome) -> str:
    """Who is 1 in a case: the first contender."""
    return outcome.case.contenders[0]


def seconds_of(outcome: Outcome, contender: str, call: str) -> list[float]:
    """Seconds of every round: ``first`` or ``later`` calls; none of a contender that failed or did not take part."""
    timing = outcome.timings.get(contender, Timing())
    found: list[float] = [] if timing.failure else getattr(timing, call)
    return found


def ratio(outcome: Outcome, contender: str, against: str, call: str = LATER) -> float | None:
    """How many times as fast as another: the median over rounds of what one round says."""
    one, other = (seconds_of(outcome, name, call) for name in (contender, against))
    if not one or not other:
        return None
    return statistics.median(theirs / own for own, theirs in zip(one, other, strict=True))


def rate(outcome: Outcome, contender: str, call: str = LATER) -> float | None:
    """GiB/s, the median over rounds."""
    seconds = seconds_of(outcome, contender, call)
    return outcome.nbytes / statistics.median(seconds) / GIB if seconds else None


def verdict(target: Target, outcomes: Mapping[str, Outcome]) -> float | None:
    """What was reached of a target; None where a case or contender is missing."""
    outcome = outcomes.get(target.case)
    if outcome is None:
        return None
    if target.against not in outcomes:
        return ratio(outcome, OURS, target.against)
    own, other = rate(outcome, OURS), rate(outcomes[target.against], OURS)
    return None if own is None or other is None else own / other


def tables(outcomes: Mapping[str, Outcome], exports: Mapping[str, int]) -> str:
    """The whole report as Markdown."""
    parts = (
        _head(outcomes),
        _not_measured(outcomes),
        _losses(outcomes),
        _targets(outcomes),
        _cases(outcomes),
        _phases(outcomes),
        _streams(outcomes),
        _memory(outcomes, exports),
    )
    return "\n".join(line for part in parts for line in part) + "\n"


def kept(path: Path) -> str:
    """Return the text below the tables of an older report, from its heading on; it is not generated."""
    if not path.exists():
        return ""
    _, heading, text = path.read_text(encoding="utf-8").partition(f"\n{BY_HAND}\n")
    return f"\n{heading.strip()}\n{text}" if heading else ""


def _head(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    counts = {len(timing.first) for one in outcomes.values() for timing in one.timings.values() if timing.first}
    rounds = " to ".join(map(str, sorted({min(counts), max(counts)})))
    yield "# Performance"
    yield ""
    yield (
        f"Written by `make bench` on {os.cpu_count()} cores of a {platform.machine()} machine without an accelerator, "
        f"on a file system in memory: medians of {rounds} rounds, in which the contenders take turns. Every turn has a "
        "fresh process per rank, with Paddle (for the peer PyTorch) imported and the tensors built. Its *first call* "
        "begins with the import of the contender and ends with the last rank; a *later call* repeats it. The first "
        "round checks every load bit by bit. A rate is the bytes of the tensors of all ranks by the time. A ratio is "
        "the median of the ratios within one round. “From storage” simulates below the page cache of the machine: "
        f"{STORAGE_RATE / 1e9:.0f} GB/s for all ranks together, and {STORAGE_LATENCY * 1000:.0f} ms for every request. "
        "The contenders are modules of `benchmarks/performance/`."
    )
    yield ""
    yield "![rates of every contender](performance.png)"
    yield ""


def _not_measured(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Yield which cases a run has left out, or has not reached."""
    left = [case.name for case in CASES if case.name not in outcomes]
    if left:
        yield f"Not measured in this run: {'; '.join(left)}."
        yield ""


def _losses(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Yield every case in which another system is faster."""
    yield "## Where others are faster"
    yield ""
    yield "Rates of this package, under the default `full`, by those of a system that is faster in the case."
    yield ""
    yield "| case | faster | first call | later call |"
    yield "|---|---|---|---|"
    for name, outcome in outcomes.items():
        for peer in (one for one in outcome.timings if one not in OWN):
            found = [ratio(outcome, OURS, peer, call) for call in (FIRST, LATER)]
            if any(one is not None and one < 1 for one in found):
                yield f"| {name} | {TITLES[peer]} | {' | '.join(_loss(one) for one in found)} |"
    yield ""


def _loss(found: float | None) -> str:
    return "" if found is None else (f"**{found:.2f}**" if found < 1 else f"{found:.2f}")


def _targets(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    yield "## Targets"
    yield ""
    yield "Ratios of later calls."
    yield ""
    yield "| case | this package, compared with | target | measured | |"
    yield "|---|---|---|---|---|"
    for target in targets():
        reached = verdict(target, outcomes)
        against = TITLES.get(target.against, f"“{target.against}”")
        text = "not measured" if reached is None else f"{reached:.2f}"
        met = "" if reached is None else ("met" if reached >= target.at_least else "**missed**")
        yield f"| {target.case} | {against} | {target.at_least:.2f} | {text} | {met} |"
    yield ""


def _memory(outcomes: Mapping[str, Outcome], exports: Mapping[str, int]) -> Iterator[str]:
    yield "## Bytes and memory of this package"
    yield ""
    yield (
        f"Amplification is bytes read by bytes needed; limit {MOST_AMPLIFICATION} under `flex_verify: off`. Rows "
        "of less than 16 KiB are read with the gaps between them, up to 8 bytes for each that is needed. Under "
        "`full` one rank also reads the rest of a block that ranks read in part. Memory is resident memory of a rank "
        f"above its tensors; limit {MOST_MEMORY // MIB} MiB beside the largest single read for a load, 5 % of the "
        "shard for a save."
    )
    yield ""
    yield "| case | amplification | under `off` | memory, MiB | of the rank's tensors |"
    yield "|---|---|---|---|---|"
    for name, outcome in outcomes.items():
        if not seconds_of(outcome, OURS, LATER):
            continue
        timing = outcome.timings[OURS]
        read, off = (_amplification(outcome, one) for one in ("ours", "ours off"))
        share = timing.peak / (outcome.nbytes / outcome.case.ranks)
        yield f"| {name} | {read} | {off} | {timing.peak / MIB:.0f} | {share:.1%} |"
    yield ""
    if exports:
        yield "| export in a process of its own | memory, MiB |"
        yield "|---|---|"
        for name, peak in exports.items():
            yield f"| {name} | {peak / MIB:.0f} |"
        yield ""


def _amplification(outcome: Outcome, contender: str) -> str:
    read = outcome.timings.get(contender, Timing()).read
    return f"{read / outcome.nbytes:.3f}" if read >= 0 else ""


def _phases(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Yield where the first calls spend their time."""
    yield "## Phases of first calls"
    yield ""
    yield (
        "Seconds, each of the rank that took longest for it; ranks wait for each other in the rest. *Plan* of PyTorch "
        "DCP is what is neither its metadata nor its reads."
    )
    yield ""
    yield f"| case | contender | total | {' | '.join(PHASES)} |"
    yield "|---" * (3 + len(PHASES)) + "|"
    for name, outcome in outcomes.items():
        for one in (OURS, "dcp"):
            seconds = seconds_of(outcome, one, FIRST)
            if seconds:
                found = (outcome.timings[one].phase(phase) for phase in PHASES)
                cells = ("" if value is None else f"{value:.3f}" for value in found)
                yield f"| {name} | {TITLES[one]} | {statistics.median(seconds):.3f} | {' | '.join(cells)} |"
    yield ""


def _streams(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Yield when the tensors of streams come."""
    yield "## Streams"
    yield ""
    yield "Milliseconds of the last rank: until the first tensor, and of the whole call."
    yield ""
    yield "| case | contender | first call: first tensor | all | later call: first tensor | all |"
    yield "|---|---|---|---|---|---|"
    for name, outcome in outcomes.items():
        for one, timing in outcome.timings.items() if outcome.case.verb == "stream" else ():
            calls = ((timing.phases, timing.first), (timing.later_phases, timing.later))
            cells = [cell for phases, seconds in calls for cell in (_first_tensor(phases), _milliseconds(seconds))]
            yield f"| {name} | {TITLES[one]} | {' | '.join(cells)} |"
    yield ""


def _first_tensor(phases: Sequence[Mapping[str, float]]) -> str:
    return _milliseconds([one[FIRST_TENSOR] for one in phases if FIRST_TENSOR in one])


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{1000 * statistics.median(seconds):.0f}" if seconds else ""


def _cases(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    contenders = [one for one in TITLES if any(one in outcome.case.contenders for outcome in outcomes.values())]
    yield "## Every case"
    yield ""
    yield (
        "Median rate in GiB/s, and in parentheses its ratio to that of a raw copy (export: to that of safetensors; "
        "stream: to that of Paddle's `Layer.full`; its raw copy broadcasts the shards and assembles nothing). "
        f"A round of this package differs from its median by {_spread(outcomes):.0%} at most."
    )
    for call in (FIRST, LATER):
        yield ""
        yield f"{call.capitalize()} calls:"
        yield ""
        yield from _grid(contenders, outcomes, partial(_rate_cell, call=call))
    yield ""
    yield "Memory of the others above the tensors of a rank in a later call, in MiB:"
    yield ""
    yield from _grid([one for one in contenders if one not in OWN], outcomes, _memory_cell)
    models = Counter(outcome.case.model for outcome in outcomes.values())
    most = max(models, key=lambda model: models[model])
    others = [f"{name}: {MODELS[one.case.model].title}" for name, one in outcomes.items() if one.case.model != most]
    failures = [
        f"* {name}: {TITLES[one]} failed: {timing.failure[:140]}"
        for name, outcome in outcomes.items()
        for one, timing in outcome.timings.items()
        if timing.failure
    ]
    yield from ("", *failures) if failures else ()
    yield ""
    yield f"All cases have {MODELS[most].title}" + (f", except: {'; '.join(others)}." if others else ".")
    yield ""


def _grid(contenders: list[str], outcomes: Mapping[str, Outcome], cell: Callable[[Outcome, str], str]) -> Iterator[str]:
    """Yield a table with a row per case and a column per contender."""
    yield f"| case | {' | '.join(TITLES[one] for one in contenders)} |"
    yield "|---" * (len(contenders) + 1) + "|"
    for name, outcome in outcomes.items():
        cells = (cell(outcome, one) if seconds_of(outcome, one, LATER) else "" for one in contenders)
        yield f"| {name} | {' | '.join(cells)} |"


def _rate_cell(outcome: Outcome, contender: str, call: str) -> str:
    own, base = f"{rate(outcome, contender, call):.2f}", baseline(outcome)
    compared = None if contender == base else ratio(outcome, contender, base, call)
    return own if compared is None else f"{own} ({compared:.2f})"


def _memory_cell(outcome: Outcome, contender: str) -> str:
    return f"{outcome.timings[contender].peak / MIB:.0f}"


def _spread(outcomes: Mapping[str, Outcome]) -> float:
    """Return the largest relative difference between the rate of this package in a round and its median."""
    measured = [seconds_of(outcome, OURS, call) for outcome in outcomes.values() for call in (FIRST, LATER)]
    return max((abs(statistics.median(one) / each - 1) for one in measured for each in one), default=0.0)


def draw(outcomes: Mapping[str, Outcome], path: Path) -> None:
    """A picture: the ratio to the baseline of every contender in every case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [name for name in TITLES if name != "raw"]
    figure, axes = pyplot.subplots(figsize=(11, 0.62 * len(outcomes) + 1.5), layout="constrained")
    height = 0.8 / len(shown)
    for index, contender in enumerate(shown):
        found = [ratio(outcome, contender, baseline(outcome), FIRST) or 0.0 for outcome in outcomes.values()]
        places = [row + index * height for row in range(len(outcomes))]
        axes.barh(places, found, height, label=TITLES[contender])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(outcomes))], list(outcomes))
    axes.invert_yaxis()
    axes.set_xlabel("rate of first calls by that of a raw copy of the same bytes (export: by safetensors.save_file)")
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
