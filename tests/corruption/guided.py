"""Hostile documents found by coverage: ``python -m tests.corruption.guided``, where atheris is installed.

The documents, the readers and the verdict are those of :mod:`tests.corruption.hostile`: nothing but an error of ours,
in little memory and time. What is different is the choice: libFuzzer sees which lines of the package a document has
reached, keeps those that reached new ones, and changes them further, in half of the cases by nodes (:mod:`.nodes`) and
else by bytes. A number of runs ends it, not a clock, so that the count can be written down.

Each kind has a process of its own, because libFuzzer ends its process. ``pip install ".[fuzz]"`` installs atheris,
which has no release for every Python; ``make soak`` goes on without it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

PICKLES = "pickles"
KINDS = (
    *("manifests", "safetensors headers", "shard descriptions", "mappings", "indices of open weights"),
    *("configurations", "aoa_configs", "errors of other ranks", PICKLES),
)
"""What is fuzzed; all but pickles are of :data:`tests.corruption.hostile.KINDS`."""
RUNS = 10_000
LONGEST = 1 << 16
"""Bytes of a document that libFuzzer makes."""
SLOWEST = 10.0
"""Seconds of the processor that a document may take."""
_DEADLINE = 3600.0


class Seen(msgspec.Struct):
    """What a process saw.

    Attributes:
        tried: how many documents.
        refused: how many of them with an error of ours.
        kept: how many reached something new.
        strange: every other error with its place, each once.
        slowest: seconds of the processor for the slowest document.
    """

    tried: int
    refused: int
    kept: int
    strange: list[str]
    slowest: float


def run(kind: str, runs: int, seed: int) -> Seen:
    """Fuzz one kind in a process of its own.

    Raises:
        RuntimeError: the process ended in another way than by the number of runs.
    """
    with tempfile.TemporaryDirectory(prefix="guided-") as place:
        command = [sys.executable, "-m", __spec__.name, "--kind", kind, "--runs", str(runs), "--seed", str(seed)]
        done = subprocess.run(
            [*command, "--place", place], capture_output=True, timeout=_DEADLINE, check=False, errors="replace"
        )
        report = Path(place) / "seen.json"
        if done.returncode or not report.exists():
            raise RuntimeError(f"{kind}: code {done.returncode}\n{done.stderr[-4000:]}")
        return msgspec.json.decode(report.read_bytes(), type=Seen)


def sentence(seen: dict[str, Seen], seed: int) -> str:
    """The counts, for people."""
    total = sum(one.tried for one in seen.values())
    wrong = sum(len(one.strange) for one in seen.values())
    kinds = ", ".join(f"{one.tried:,} {kind} ({one.kept} reached something new)" for kind, one in seen.items())
    slowest = max(one.slowest for one in seen.values())
    return (
        f"{total:,} documents chosen by the lines that they reach (atheris, seed {seed}), "
        f"{'nothing but errors of ours' if not wrong else f'{wrong} other errors'}, "
        f"none in more than {max(1, round(slowest + 0.5))} s: {kinds}."
    )


# ---- The process that fuzzes.


def fuzz(kind: str, runs: int, seed: int, place: Path) -> None:
    """Fuzz one kind, write what was seen to ``seen.json``, and end this process."""
    import atheris

    with atheris.instrument_imports(include=["paddleformers_fc"]):
        from tests.corruption import hostile, mutations

        directory = place / "checkpoint-3"
        mutations.checkpoint(directory, 0)
        seeds, use, change = _pickles(place) if kind == PICKLES else _documents(hostile.KINDS[kind](directory))
        outcome = hostile.Outcome()
        for raw in seeds:
            hostile.judge(outcome, lambda raw=raw: use(raw))  # What is imported late is instrumented too.
    corpus = place / "corpus"
    corpus.mkdir()
    for number, raw in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(raw)
    hostile.bound_memory(2 * hostile.SPARE_BYTES)
    outcome = hostile.Outcome(strange=outcome.strange)

    def one(raw: bytes) -> None:
        hostile.judge(outcome, lambda: use(raw))
        if outcome.tried >= runs:
            kept = sum(1 for _ in corpus.iterdir()) - len(seeds)
            seen = Seen(outcome.tried, outcome.refused, kept, outcome.strange, outcome.slowest)
            (place / "seen.json").write_bytes(msgspec.json.encode(seen))
            os._exit(0)

    def another(raw: bytes, most: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.5:
            with contextlib.suppress(ValueError, RecursionError):
                made = change(json.loads(raw), chance)
                if len(made) <= most:
                    return made
        return atheris.Mutate(raw, most)

    flags = [
        f"-seed={seed}",
        f"-max_len={LONGEST}",
        "-len_control=0",
        f"-timeout={int(6 * SLOWEST)}",
        "-rss_limit_mb=0",
    ]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], one, custom_mutator=another)
    atheris.Fuzz()


Fuzzed = tuple[list[bytes], Callable[[bytes], object], Callable[[Any, random.Random], bytes]]


def _documents(target: Any) -> Fuzzed:
    from tests.corruption.nodes import written

    return [written(document).encode() for document in target.documents], target.use, target.change


def _pickles(place: Path) -> Fuzzed:
    """Real and hostile pickles, of which only the bytes are changed; one that ran something would leave a file."""
    import pickle

    import numpy as np

    from paddleformers_fc.storage.pickles import read_pickle
    from tests.storage.test_pickles import hostile

    canary, path = place / "canary", place / "x"
    value = {"a": np.arange(6, dtype=np.float32), "b": [(1, "x", None, 2.5)], "c": {"d": True}}
    seeds = [*(raw for raw in hostile(canary).values() if len(raw) < LONGEST)]
    seeds += [pickle.dumps(value, protocol) for protocol in (2, 3, 4)]

    def use(raw: bytes) -> None:
        path.write_bytes(raw)
        try:
            read_pickle(path)
        finally:
            if canary.exists():
                raise AssertionError("a pickle was run")

    def change(document: Any, chance: random.Random) -> bytes:
        raise ValueError("a pickle is no document")

    return seeds, use, change


def main() -> int:
    """Fuzz every kind, print the counts and put them into ``docs/results/soak.md``; 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--place", type=Path)
    given = parser.parse_args()
    if given.place is not None:
        fuzz(given.kind, given.runs, given.seed, given.place)
    if importlib.util.find_spec("atheris") is None:
        print('atheris is not installed, so no document is chosen by coverage; see pip install ".[fuzz]"')
        return 0
    from tests.crash import soaked

    seen: dict[str, Seen] = {}
    for kind in (given.kind,) if given.kind else KINDS:
        one = seen[kind] = run(kind, given.runs, given.seed)
        print(f"{one.tried:,} {kind}, {one.refused:,} refused, {one.kept} new, slowest {one.slowest:.2f} s", flush=True)
        for line in one.strange:
            print(f"  {line}")
    if not given.kind:
        soaked.write("guided", sentence(seen, given.seed))
    return int(any(one.strange or one.slowest > SLOWEST for one in seen.values()))


if __name__ == "__main__":
    sys.exit(main())
