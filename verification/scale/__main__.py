"""Write ``docs/results/scale.md``: what a rank of a large job does, before a change of the code and after it.

``make scale`` compares with the counts in ``before.json``; ``--before`` replaces them. Every job has a process of its
own, so that no memory of an earlier one is counted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

from paddleformers_fc.text import size_text
from verification import exit_code
from verification.scale import counting, operations, plans, ranks
from verification.scale.operations import Key, Table

BEFORE = Path(__file__).with_name("before.json")
PAGE = Path("docs/results/scale.md")
_BYTES = frozenset({ranks.SENT, ranks.RECEIVED, ranks.LARGEST, counting.READ, counting.MEMORY})
_NOISE = {ranks.WAITING: 200, counting.PROCESSOR: 0.5, counting.MEMORY: 10e6, ranks.BLOCKED: 0.5, ranks.LATENCY: 2.0}
"""Counts that depend on the machine, and amounts that do not matter; a change is shown if it is more than twice."""

_ROWS = (
    *(ranks.EXCHANGES, ranks.SENT, ranks.RECEIVED, ranks.LARGEST, ranks.REQUESTS, ranks.WAITING),
    *(counting.CONNECTIONS, counting.OPENS, counting.STATS, counting.LISTINGS, counting.READ),
    *(ranks.BLOCKED, ranks.AGREEMENTS, ranks.LATENCY, counting.PROCESSOR, counting.MEMORY),
)
_INTRODUCTION = """# What a rank does in large jobs

Written by `make scale`, which runs the package's own code on some ranks of a job: the coordinator, the first rank of
the second node, a middle and the last rank; of the largest jobs of the MoE the first and the last. Of the other ranks
the messages exist: the package's encoders create them from simulated layouts. All ranks see one file system. Weights,
master weights and two moments are saved, in at least three files per rank, and the random states of every rank. Tensors
are holes in sparse files. The store is Paddle's, with one client per node of eight ranks and one per rank that runs.

* A row is the highest count of a rank. The coordinator has a row of its own where its count differs.
* *Bytes received* and *largest message* count the collectives of the package. Before, messages were padded to the
  longest; the padding is counted but was not allocated, so *peak memory* excludes it.
* *Requests while waiting* depend on how long ranks wait for each other on the machine that ran this. Rows without a
  count are left out.
* On one file system, as here, the coordinator rotates alone. Before, all ranks read the newest checkpoint for it.
* An *automatic resume* looks for the newest checkpoint and opens it; *opening* is that of a checkpoint that a user
  names, and carries the same metadata. Both are followed by *planning*, and reading adds an exchange.
* *Peak memory* is the growth of resident memory during the operation, with the messages of all ranks, divided by the
  number of ranks that run.
* Of the dense model at 10,240 ranks a first save, opening and planning are counted; the MoE stays at 4,096 ranks.
* An asynchronous save runs beside steps of 0.25 s. All its exchanges are made on the training thread, and block it, as
  do the planning and the requests of the step ends; the copy of the tensors, which are holes, is not counted. Waits for
  ranks that do not run are counted: these arrive at a barrier one after the other, over one connection per node.
  *Agreements* are those that all ranks have written, that the checkpoint is committed, and that old ones are deleted.
"""


def _page(before: Table, now: Table) -> Iterator[str]:
    yield _INTRODUCTION
    if before != now:
        yield "Where a count has changed, the first number is from before.\n"
    for name in dict.fromkeys(key[0] for key in now):
        worlds = sorted({key[1] for key in now if key[0] == name})
        grids = ", ".join(f"`{operations.grid_of(name, world)}`" for world in worlds)
        yield f"## {name}\n\nGrids: {grids}.\n"
        for operation in dict.fromkeys(key[2] for key in now):
            yield f"### {name}: {operation}\n\n| | " + " | ".join(f"{world:,} ranks" for world in worlds) + " |"
            yield "|---|" + "---|" * len(worlds)
            for count in _ROWS:
                others, coordinator = (
                    [_cell(before, now, (name, world, operation, who), count) for world in worlds]
                    for who in ("others", "coordinator")
                )
                if set(others) | set(coordinator) <= {"", _text(count, 0)}:
                    continue
                yield f"| {count} | " + " | ".join(others) + " |"
                if others != coordinator and count != ranks.WAITING:
                    yield f"| {count}, coordinator | " + " | ".join(coordinator) + " |"
            yield ""


def _cell(before: Table, now: Table, key: Key, count: str) -> str:
    if key not in now:
        return ""
    values = [table[key].get(count, 0) for table in (before, now) if key in table]
    if count in _NOISE and max(values) < 2 * min(values) + _NOISE[count]:
        values = values[-1:]
    return " → ".join(dict.fromkeys(_text(count, value) for value in values))


def _text(count: str, value: float) -> str:
    if count in operations.SECONDS:
        return f"{value:.2f}"
    return size_text(int(value)) if count in _BYTES else f"{int(value):,}"


def _write(path: Path, table: Table) -> None:
    lines = [json.dumps([*key, counts]) for key, counts in table.items()]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def _read(path: Path) -> Table:
    return {tuple(key): counts for *key, counts in json.loads(path.read_text(encoding="utf-8"))}


def main() -> int:
    """Count all jobs and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", action="store_true", help="keep these counts, to compare later ones with")
    options = parser.parse_args()
    before = now = _read(BEFORE) if BEFORE.exists() else {}
    jobs = [(name, world) for name, model in operations.MODELS.items() for world in model["ranks"]]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for found in pool.imap(operations.count_job, jobs):
            now = {**now, **found}
            print(*next(iter(found))[:2], flush=True)
            if options.before:
                _write(BEFORE, now)
        parts = [
            *_page(now if options.before else before, now),
            *(plans.RESUMES_HEAD, *pool.imap(plans.count_reads, plans.RESUMES), ""),
            *(plans.STREAMS_HEAD, *pool.imap(plans.count_stream, plans.STREAMS), ""),
        ]
    PAGE.write_text("\n".join(parts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
