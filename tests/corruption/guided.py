"""Hostile documents found by coverage: ``python -m tests.corruption.guided``, where atheris is installed.

The documents, the readers and the verdict are those of :mod:`tests.corruption.hostile`: nothing but an error of ours,
in little memory and time. What is different is the choice: libFuzzer sees which lines of the package a document has
reached, keeps those that reached new ones, and changes them further, in half of the cases by nodes (:mod:`.nodes`) and
else by bytes. A number of runs ends it, not a clock, so that the count can be written down.

Each kind has a process of its own, because libFuzzer ends its process. ``pip install ".[fuzz]"`` installs atheris,
which has no release for every Python; ``make soak`` goes on without it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

PICKLES = "pickles"
KINDS = (
    *("manifests", "safetensors headers", "shard descriptions", "mappings", "indices of open weights"),
    *("configurations", "aoa_configs", "errors of other ranks", PICKLES),
)
"""What is fuzzed; all but pickles are of :data:`tests.corruption.hostile.KINDS`."""
RUNS, SEED = 10_000, 1
LONGEST = 1 << 16
"""Bytes of a document that libFuzzer makes."""
SLOWEST = 10.0
"""Seconds of the processor that a document may take."""


def fuzz(kind: str, place: Path) -> NoReturn:
    """Fuzz one kind, print as JSON what was seen, and end this process."""
    import atheris

    with atheris.instrument_imports(include=["paddleformers_fc"]):
        from tests.corruption import hostile, mutations, nodes

        directory = place / "checkpoint-3"
        mutations.checkpoint(directory, 0)
        target = _pickles(place) if kind == PICKLES else hostile.KINDS[kind](directory)
        outcome = hostile.Outcome()
        seeds = [one if kind == PICKLES else nodes.written(one).encode() for one in target.documents]
        for raw in seeds:
            hostile.judge(outcome, lambda raw=raw: target.use(raw))  # What is imported late is instrumented too.
    corpus = place / "corpus"
    corpus.mkdir()
    for number, raw in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(raw)
    hostile.bound_memory(2 * hostile.SPARE_BYTES)
    outcome = hostile.Outcome(strange=outcome.strange)

    def one(raw: bytes) -> None:
        hostile.judge(outcome, lambda: target.use(raw))
        if outcome.tried >= RUNS:
            kept = sum(1 for _ in corpus.iterdir()) - len(seeds)
            print(json.dumps({"kept": kept, "strange": outcome.strange, "slowest": outcome.slowest}), flush=True)
            os._exit(0)

    def another(raw: bytes, most: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if kind != PICKLES and chance.random() < 0.5:
            with contextlib.suppress(ValueError, RecursionError):
                made = target.change(json.loads(raw), chance)
                if len(made) <= most:
                    return made
        return bytes(atheris.Mutate(raw, most))

    flags = [f"-seed={SEED}", f"-max_len={LONGEST}", "-len_control=0", f"-timeout={6 * SLOWEST:.0f}"]
    atheris.Setup([sys.argv[0], *flags, "-rss_limit_mb=0", str(corpus)], one, custom_mutator=another)
    atheris.Fuzz()
    raise AssertionError("libFuzzer has ended early")


def _pickles(place: Path) -> Any:
    """Real and hostile pickles, of which only the bytes are changed; one that ran something would leave a file."""
    import numpy as np

    from paddleformers_fc.storage.pickles import read_pickle
    from tests.corruption.hostile import Target
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

    return Target(tuple(seeds), use)


def main() -> int:
    """Fuzz every kind in a process of its own, and write the counts down; 1 if anything went wrong."""
    if importlib.util.find_spec("atheris") is None:
        print('atheris is not installed, so no document is chosen by coverage; see pip install ".[fuzz]"')
        return 0
    from tests.crash import soaked

    counts, wrong, slowest = [], [], 0.0
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="guided-") as place:
            command = [sys.executable, "-m", __spec__.name, kind, place]
            seen = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])
        counts.append(f"{RUNS:,} {kind} ({seen['kept']} reached something new)")
        wrong += [f"{kind}: {line}" for line in seen["strange"]]
        slowest = max(slowest, seen["slowest"])
    print("\n".join(wrong))
    soaked.write(
        "guided",
        f"{RUNS * len(KINDS):,} documents chosen by the lines that they reach (atheris, seed {SEED}), "
        f"{f'{len(wrong)} other errors' if wrong else 'nothing but errors of ours'}, "
        f"none in more than {max(1, round(slowest + 0.5))} s: {', '.join(counts)}.",
    )
    return int(bool(wrong) or slowest > SLOWEST)


if __name__ == "__main__":
    if sys.argv[1:]:
        fuzz(sys.argv[1], Path(sys.argv[2]))
    sys.exit(main())
