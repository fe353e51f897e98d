"""Write ``docs/results/scale.md``: what a rank of a large job does.

Every job has a process of its own, so that no memory of an earlier one is counted.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from pathlib import Path

from paddleformers_fc.text import size_text
from verification import exit_code
from verification.scale import counting, operations, plans, ranks
from verification.scale.operations import Table

PAGE = Path("docs/results/scale.md")
_BYTES = frozenset({ranks.SENT, ranks.RECEIVED, ranks.LARGEST, counting.READ, counting.MEMORY})

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
* *Bytes received* and *largest message* count the collectives of the package.
* *Requests while waiting* depend on how long ranks wait for each other on the machine that ran this. Rows without a
  count are left out.
* On one file system, as here, only the coordinator deletes old checkpoints.
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


def _page(table: Table) -> Iterator[str]:
    yield _INTRODUCTION
    for name in dict.fromkeys(key[0] for key in table):
        worlds = sorted({key[1] for key in table if key[0] == name})
        grids = ", ".join(f"`{operations.grid_of(name, world)}`" for world in worlds)
        yield f"## {name}\n\nGrids: {grids}.\n"
        for operation in dict.fromkeys(key[2] for key in table):
            yield f"### {name}: {operation}\n\n| | " + " | ".join(f"{world:,} ranks" for world in worlds) + " |"
            yield "|---|" + "---|" * len(worlds)
            for count in _ROWS:
                others, coordinator = (
                    [_cell(table.get((name, world, operation, who)), count) for world in worlds]
                    for who in ("others", "coordinator")
                )
                if set(others) | set(coordinator) <= {"", _cell({}, count)}:
                    continue
                yield f"| {count} | " + " | ".join(others) + " |"
                if others != coordinator and count != ranks.WAITING:
                    yield f"| {count}, coordinator | " + " | ".join(coordinator) + " |"
            yield ""


def _cell(counts: Mapping[str, float] | None, count: str) -> str:
    if counts is None:
        return ""
    value = counts.get(count, 0)
    if count in operations.SECONDS:
        return f"{value:.2f}"
    return size_text(int(value)) if count in _BYTES else f"{int(value):,}"


def main() -> int:
    """Count all jobs and write the page."""
    table: Table = {}
    jobs = [(name, world) for name, model in operations.MODELS.items() for world in model["ranks"]]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for found in pool.imap(operations.count_job, jobs):
            table |= found
            print(*next(iter(found))[:2], flush=True)
        parts = [
            *_page(table),
            *(plans.RESUMES_HEAD, *pool.imap(plans.count_reads, plans.RESUMES), ""),
            *(plans.STREAMS_HEAD, *pool.imap(plans.count_stream, plans.STREAMS), ""),
        ]
    PAGE.write_text("\n".join(parts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
