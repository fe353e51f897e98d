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
_INTRODUCTION = Path(__file__).with_name("introduction.md")


def _page(table: Table) -> Iterator[str]:
    yield _INTRODUCTION.read_text(encoding="utf-8")
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
