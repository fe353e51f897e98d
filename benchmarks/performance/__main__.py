"""``python -m benchmarks.performance``: measure, print, and write docs."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.performance.cases import CASES, Case
from benchmarks.performance.exporting import export_peaks
from benchmarks.performance.report import FIRST, LATER, TITLES, draw, kept, seconds_of, tables
from benchmarks.performance.running import Outcome, Servers, measure


def main() -> None:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each with a first and a later call")
    parser.add_argument("--only", default="", help="cases whose name holds one of these texts, with | between")
    parser.add_argument("--contenders", default="", help="only these, with commas between; all by default")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"), help="a file system in memory")
    parser.add_argument("--torch", default="", help="a directory with PyTorch, if it is not in this environment")
    parser.add_argument("--write", type=Path, help="also write the report, and beside it its picture")
    parser.add_argument("--outcomes", type=Path, help="keep the figures in this file, and begin with those that it has")
    options = parser.parse_args()
    found = _kept(options.outcomes)
    root = Path(tempfile.mkdtemp(prefix="flex-bench-", dir=options.scratch))
    try:
        with Servers(root / "logs", options.torch) as servers:
            for case in (one for one in CASES if _is_wanted(one.name, options.only)):
                outcome = measure(_among(case, options.contenders), options.rounds, root, servers)
                found.outcomes[case.name] = outcome
                _print_outcome(outcome)
                if case.verb == "export":
                    found.exports.update(export_peaks(root))
                _write(options, found)  # What is measured stays, however the run ends.
    finally:
        shutil.rmtree(root)
    print(_write(options, found))


@dataclass(frozen=True)
class Found:
    """What has been measured.

    Args:
        outcomes: by case.
        exports: rise of memory by export in a process of its own, in bytes.
    """

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    exports: dict[str, int] = field(default_factory=dict)


def _kept(file: Path | None) -> Found:
    """Return what earlier runs have measured."""
    return msgspec.json.decode(file.read_bytes(), type=Found) if file is not None and file.exists() else Found()


def _write(options: argparse.Namespace, found: Found) -> str:
    """Write the report and the figures, if that was asked for; return the report."""
    outcomes = {case.name: found.outcomes[case.name] for case in CASES if case.name in found.outcomes}
    text = tables(outcomes, found.exports)
    if options.outcomes:
        options.outcomes.write_bytes(msgspec.json.encode(asdict(found)))
    if options.write:
        options.write.write_text(text + kept(options.write), encoding="utf-8")
        draw(outcomes, options.write.with_suffix(".png"))
    return text


def _is_wanted(name: str, only: str) -> bool:
    """Return whether a case is one of those that were asked for."""
    return any(text in name for text in only.split("|"))


def _among(case: Case, contenders: str) -> Case:
    """A case between some of its contenders."""
    chosen = contenders.split(",") if contenders else case.contenders
    return replace(case, contenders=tuple(name for name in case.contenders if name in chosen))


def _print_outcome(outcome: Outcome) -> None:
    """Print the seconds of the first and the later calls of one case."""
    parts = []
    for name, timing in outcome.timings.items():
        seconds = [median(found) for call in (FIRST, LATER) if (found := seconds_of(outcome, name, call))]
        text = " and ".join(f"{one:.2f}" for one in seconds)
        parts.append(f"{TITLES[name]} {text or timing.failure[:60]}")
    print(f"{outcome.case.name}: {', '.join(parts)}", file=sys.stderr)


if __name__ == "__main__":
    main()
