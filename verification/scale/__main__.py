"""Write ``docs/results/scale.md``: what a rank of a large job does, before a change of the code and after it.

``make scale`` compares with the counts in ``before.json``; ``--before`` replaces them. Every job has a process of its
own, so that no memory of an earlier one is counted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator, Mapping
from pathlib import Path

from paddleformers_fc.text import size_text
from verification import exit_code
from verification.scale import counting, operations, ranks, reading, streaming
from verification.scale.operations import Key, Table

BEFORE = Path(__file__).with_name("before.json")
PAGE = Path("docs/results/scale.md")
_BYTES = frozenset({ranks.SENT, ranks.RECEIVED, ranks.LARGEST, counting.READ, counting.MEMORY})
_NOISE = {
    ranks.WAITING: 200,
    counting.PROCESSOR: 0.5,
    counting.MEMORY: 10e6,
    ranks.BLOCKED: 0.5,
    ranks.LATENCY: 2.0,
}
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


def _reads(reads: Mapping[tuple[str, int, str], reading.Reads]) -> Iterator[str]:
    """Yield the lines of what all ranks of a job read together."""
    yield "## Bytes that a job reads in a resume\n"
    yield "Nodes have eight ranks, and read a file once for each rank that needs it. *shared* is `flex_read: auto`.\n"
    yield "| saved on | resumed on | `each` | shared | the rank that reads most |\n|---|---|---|---|---|"
    for (name, saved, grid), found in reads.items():
        sizes = " | ".join(size_text(size) for size in (found.each, found.shared, found.most))
        yield f"| {name}, {saved} ranks | `{grid}` | {sizes} |"
    yield ""


def _streams(streams: Mapping[tuple[str, int, str], streaming.Streams]) -> Iterator[str]:
    """Yield the lines of what a stream of live weights costs."""
    yield "## Streams of live weights\n"
    yield "Descriptions and the plan are sent once for all streams of a model under a layout. *Words* are the exchanges"
    yield "of a later stream without weights: one at its begin, one before every batch, and two at its end. *Sent*"
    yield "is the most that the first, a middle or the last rank sends of its own tensors; if all ranks receive, each"
    yield "also passes on what others send.\n"
    yield "| model, ranks | to | description | plan | made in | a rank's part in | words | rounds | sent | received |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for (name, world, to), one in streams.items():
        sizes = [size_text(size) for size in (one.described, one.plan, one.sent, one.received)]
        seconds = f"{one.coordinator:.1f} s | {one.planning:.1f} s"
        counts = f"{one.words:,} | {one.rounds:,}"
        row = f"{sizes[0]} | {sizes[1]} | {seconds} | {counts} | {sizes[2]} | {sizes[3]}"
        yield f"| {name}, {world:,} | `{to}` | {row} |"
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
    parser.add_argument(
        "--models", nargs="+", default=[one for one, model in operations.MODELS.items() if model["ranks"]]
    )
    parser.add_argument("--ranks", type=int, nargs="*", help="sizes of jobs; by default those of each model")
    options = parser.parse_args()
    before = now = _read(BEFORE) if BEFORE.exists() else {}
    jobs = [
        (name, world)
        for name in options.models
        for world in (operations.MODELS[name]["ranks"] if options.ranks is None else options.ranks)
    ]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for found in pool.imap(operations.count_job, jobs):
            now = {**now, **found}
            print(*next(iter(found))[:2], flush=True)
            if options.before:
                _write(BEFORE, now)
        reads = dict(zip(reading.JOBS, pool.imap(reading.count_reads, reading.JOBS), strict=True))
        streams = dict(zip(streaming.JOBS, pool.imap(streaming.count_stream, streaming.JOBS), strict=True))
    page = [*_page(now if options.before else before, now), *_reads(reads), *_streams(streams)]
    PAGE.write_text("\n".join(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
