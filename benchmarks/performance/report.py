"""The tables and the picture of a run."""

from __future__ import annotations

import os
import platform
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.performance.cases import LEVELS, MOST_AMPLIFICATION, MOST_MEMORY, Target, targets
from benchmarks.performance.models import MODELS
from benchmarks.performance.running import Outcome, Timing

GIB = 1 << 30
MIB = 1 << 20
BY_HAND = "## Where the time goes"
TITLES = {
    "raw": "raw copy",
    "ours": "this package",
    "ours size": "this package, `size`",
    "ours off": "this package, `off`",
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
    """Return the text below the tables of an older report, from its heading on; it is not generated."""
    if not path.exists():
        return ""
    _, heading, text = path.read_text(encoding="utf-8").partition(f"\n{BY_HAND}\n")
    return f"\n{heading.strip()}\n{text}" if heading else ""


def _head(rounds: int) -> Iterator[str]:
    yield "# Performance"
    yield ""
    yield (
        f"Written by `make bench` on {os.cpu_count()} cores of a {platform.machine()} machine without an accelerator, "
        f"on a file system in memory: medians of {rounds} interleaved rounds. The warm-up checks every load bit by "
        "bit. A rate is the bytes of the tensors of all ranks, divided by the time from the command to the last rank's "
        "answer. A ratio is the median of the ratios within one round. The contenders are in "
        "`benchmarks/performance/contenders.py` and `with_torch.py`."
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
        text = "not measured" if reached is None else f"{reached:.2f}"
        met = "" if reached is None else ("met" if reached >= target.at_least else "**missed**")
        yield f"| {target.case} | {against} | {target.at_least:.2f} | {text} | {met} |"
    yield ""


def _memory(outcomes: Mapping[str, Outcome], exports: Mapping[str, int]) -> Iterator[str]:
    yield "## Bytes and memory of this package"
    yield ""
    yield (
        f"Amplification is bytes read by bytes needed; limit {MOST_AMPLIFICATION} under `flex_verify: off`. Under "
        "`full` one rank also reads the rest of a block that ranks read in part. Memory is resident memory of a rank "
        f"above its tensors; limit {MOST_MEMORY // MIB} MiB beside the largest single read for a load, 5 % of the "
        "shard for a save. The first call of a process also imports, connects and fills caches of geometry; the other "
        "tables time later calls, which plan again."
    )
    yield ""
    yield "| case | amplification | under `off` | memory, MiB | of the rank's tensors | first call, s | later, s |"
    yield "|---|---|---|---|---|---|---|"
    for name, outcome in outcomes.items():
        timing = outcome.timings.get("ours", Timing())
        if not timing.seconds:
            continue
        read, off = (_amplification(outcome, one) for one in ("ours", "ours off"))
        share = timing.peak / (outcome.nbytes / outcome.case.ranks)
        later = statistics.median(timing.seconds)
        yield f"| {name} | {read} | {off} | {timing.peak / MIB:.0f} | {share:.1%} | {timing.first:.2f} | {later:.2f} |"
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


def _cases(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    contenders = [one for one in TITLES if any(one in outcome.case.contenders for outcome in outcomes.values())]
    yield "## Every case"
    yield ""
    yield (
        "Median rate in GiB/s, and in parentheses its ratio to that of a raw copy (export: to that of safetensors). "
        f"A round of this package differs from its median by {_spread(outcomes):.0%} at most."
    )
    yield ""
    yield from _grid(contenders, outcomes, _rate_cell)
    yield ""
    yield "Memory of the others above the tensors of a rank, in MiB:"
    yield ""
    yield from _grid([one for one in contenders if one not in ("raw", *LEVELS)], outcomes, _memory_cell)
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


def _grid(
    contenders: list[str], outcomes: Mapping[str, Outcome], cell: Callable[[Outcome, str, Timing], str]
) -> Iterator[str]:
    """Yield a table with a row per case and a column per contender."""
    yield f"| case | {' | '.join(TITLES[one] for one in contenders)} |"
    yield "|---" * (len(contenders) + 1) + "|"
    for name, outcome in outcomes.items():
        cells = []
        for one in contenders:
            timing = outcome.timings.get(one)
            measured = timing is not None and timing.seconds and not timing.failure
            cells.append(cell(outcome, one, timing) if measured and timing is not None else "")
        yield f"| {name} | {' | '.join(cells)} |"


def _rate_cell(outcome: Outcome, contender: str, timing: Timing) -> str:
    median = outcome.nbytes / statistics.median(timing.seconds) / GIB
    base = baseline(outcome)
    return f"{median:.2f}" if contender == base else f"{median:.2f} ({ratio(outcome, contender, base) or 0.0:.2f})"


def _memory_cell(outcome: Outcome, contender: str, timing: Timing) -> str:
    return f"{timing.peak / MIB:.0f}"


def _spread(outcomes: Mapping[str, Outcome]) -> float:
    """Return the largest relative difference between the rate of this package in a round and its median."""
    measured = [outcome.timings.get("ours", Timing()).seconds for outcome in outcomes.values()]
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
