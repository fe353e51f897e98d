"""How long it takes from opened files to the first read: a large mixture of experts, saved by 8 ranks, loaded by 8.

The job is everything that a load does before it reads a tensor. A checkpoint of an ERNIE 4.5 MoE is written as a save
would write it, headers, manifest, rules and all, except that its tensors are holes in sparse files. It is opened; its
mapping is proved and held against its family's; the live model is bound, proved and composed with it; and the reads of
each of 8 ranks are planned and checked to cover what the rank wants.

Two layouts: one in which every rank wants a part of every tensor, which is the most there can be to plan, and one with
experts and optimizer states shared. Three sizes show what grows how. Seconds are of one core (CPU time of one thread).

Run with ``make bench-planning``; about two minutes and a GB of memory, and no byte of a tensor on disk.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from paddleformers_fc.api import Checkpoint
from paddleformers_fc.execute.replicas import Writers
from paddleformers_fc.execute.save import config_bytes
from paddleformers_fc.execute.save_plan import model_rules
from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.families.stated import decode_mapping, encode_mapping
from paddleformers_fc.formats.checkpoint import MAPPING_NAME, OpenedCheckpoint
from paddleformers_fc.formats.flex import FLEX_WRITER, open_flex
from paddleformers_fc.formats.index import decode_index, encode_index, shard_columns
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.layout.roles import MODEL_STATE, ROLES
from paddleformers_fc.layout.shard_messages import decode_shards, encode_rank_shards
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.plan.build import plan_reads
from paddleformers_fc.plan.items import LoadPlan
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model
from paddleformers_fc.plan.sources import resume_source, stored_mapping
from paddleformers_fc.storage.checksum import (
    BLOCK_DIGEST_BYTES,
    DEFAULT_BLOCK_BYTES,
    INDEX_NAME,
    FileChecksum,
    digest_of_blocks,
    records_of,
)
from paddleformers_fc.storage.dtypes import dtype_size
from paddleformers_fc.storage.files import write_file
from paddleformers_fc.storage.manifest import Manifest, read_manifest, write_manifest

EXPERTS = 512
READ, LATER_READS = "model.norm.weight", 1000
_T = TypeVar("_T")
Roles = dict[str, dict[str, Shard]]


@dataclass(frozen=True)
class Job:
    """What is saved and loaded.

    Args:
        title: of its table.
        saved: the grid of 8 ranks that saved it.
        loaded: the grid of 8 ranks that loads it.
        roles: what is stored and wanted.
        per_layer: stored tensors of all these roles per layer of the model.
    """

    title: str
    saved: str
    loaded: str
    roles: tuple[str, ...]
    per_layer: int


JOBS = (
    Job(
        "Weights; every rank wants a part of every tensor",
        "tp=2,sharding=4,split=true",
        "tp=8",
        (MODEL_STATE,),
        2 * EXPERTS + 6,
    ),
    Job(
        "Weights, master weights and moments; experts and states are shared",
        "sharding=8,ep=8,split=true",
        "tp=2,sharding=4,ep=4,split=true",
        ROLES,
        6 * (2 * EXPERTS + 6),
    ),
)


def config_of(layers: int) -> dict[str, Any]:
    """A model that is small in bytes and large in number."""
    return {
        "model_type": "ernie4_5_moe",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 512,
        "moe_num_experts": EXPERTS,
        "moe_intermediate_size": 256,
        "moe_layer_start_index": 0,
        "moe_num_shared_experts": 0,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
    }


def held_by(model: SimulatedModel, rank: int, roles: tuple[str, ...]) -> Roles:
    """The shards of one rank, of some roles."""
    return {role: shards for role, shards in model.roles(rank).items() if role in roles}


def write_checkpoint(directory: Path, model: SimulatedModel, roles: tuple[str, ...]) -> None:
    """What a save writes, with holes for the tensors and zeros for their checksums."""
    checksums: list[FileChecksum] = []
    files: dict[str, list[Shard]] = {}
    ranks = range(model.grid.world_size)
    writers = Writers(decode_shards([encode_rank_shards(held_by(model, rank, roles)) for rank in ranks]))
    for rank, pieces in enumerate(map(writers.share_of, ranks)):
        for role in roles:
            shards = {piece.shard.name: piece.shard for piece in pieces if piece.role == role}
            if shards:
                name = f"{role}/rank-{rank:05d}.safetensors"
                files[name] = sorted(shards.values(), key=lambda shard: -dtype_size(shard.dtype))
                checksums.append(_write_holes(directory, name, files[name]))
    for name, data in (
        ("mapping.json", encode_mapping(model.model, model.rules)),
        ("config.json", config_bytes(model.model.config)),
    ):
        checksums.append(write_file(directory / name, data, root=directory))
    index = write_file(directory / INDEX_NAME, encode_index(shard_columns(files.items()), checksums), root=directory)
    manifest = Manifest(
        written_by="benchmark",
        step=1,
        consumed_samples=1,
        world_size=model.grid.world_size,
        parallel={},
        family=model.family.name,
        files=records_of([*checksums, index]),
    )
    write_manifest(directory, manifest)


def _write_holes(directory: Path, name: str, shards: list[Shard]) -> FileChecksum:
    path = directory / name
    layout = FLEX_WRITER.header(path, shards)
    path.parent.mkdir(parents=True, exist_ok=True)
    size = len(layout.header) + sum(layout.sizes)
    with path.open("wb") as file:
        file.write(layout.header)
        file.truncate(size)
    blocks = bytes(-(-size // DEFAULT_BLOCK_BYTES) * BLOCK_DIGEST_BYTES)
    return FileChecksum(name, size, digest_of_blocks(blocks), DEFAULT_BLOCK_BYTES, blocks)


@dataclass
class Timings:
    """Seconds of one core by step, in the order in which the steps were first taken."""

    seconds: dict[str, float] = field(default_factory=dict)

    def of(self, step: str, work: Callable[[], _T]) -> _T:
        """Do some work; the best of several times counts."""
        gc.collect()
        started = time.process_time()
        result = work()
        took = time.process_time() - started
        self.seconds[step] = min(took, self.seconds.get(step, took))
        return result


def measure(directory: Path, job: Job, layers: int, rounds: int) -> tuple[dict[str, float], int, int]:
    """Seconds by step, the number of stored tensors, and the number of read items of all ranks."""
    described = ModelDescription(config_of(layers))
    family = family_for(described.config)
    write_checkpoint(directory, declared_model(family, described, parse_grid(job.saved), "bfloat16"), job.roles)
    model = declared_model(family, described, parse_grid(job.loaded), "bfloat16")
    wanted = [held_by(model, rank, job.roles) for rank in range(model.grid.world_size)]
    # What stands for the model and the job is not ours to look through, at every collection of garbage.
    gc.collect()
    gc.freeze()
    times, items = Timings(), 0
    for _ in range(rounds):
        checkpoint = _open(directory, times)
        items = _plan(checkpoint, model, wanted, times)
        _read(Checkpoint(checkpoint), times)
    stored = sum(len(names) for names in checkpoint.catalog.roles.values())
    return times.seconds, stored, items


def _open(directory: Path, times: Timings) -> OpenedCheckpoint:
    manifest = times.of("manifest", lambda: read_manifest(directory))
    raw = (directory / INDEX_NAME).read_bytes()
    times.of("index", lambda: decode_index(raw, manifest.files, directory / INDEX_NAME))
    mapping = directory / MAPPING_NAME
    times.of("rules", lambda: decode_mapping(mapping.read_bytes(), str(mapping)))
    return times.of("**open**, the above and that every tensor is whole", lambda: open_flex(directory))


def _plan(checkpoint: OpenedCheckpoint, model: SimulatedModel, wanted: list[Roles], times: Timings) -> int:
    times.of("stored mapping: denote, prove, agree with the family", lambda: stored_mapping(checkpoint))
    everything = {name: shard for roles in wanted for name, shard in roles[MODEL_STATE].items()}
    rules = times.of("live model: bind", lambda: model_rules(model.model, everything))
    source, report = times.of(
        "**mapping**: stored and live proved, composed; bound before", lambda: resume_source(checkpoint, rules)
    )
    report.raise_error("benchmark")
    items, each = 0, Timings()
    for rank, roles in enumerate(wanted):
        plan = each.of(str(rank), partial(plan_reads, source, roles))
        plan.report.raise_error("benchmark")
        items += len(plan.items)
    _note(times, "**plans of 8 ranks**", sum(each.seconds.values()))
    _note(times, "the slowest of them", max(each.seconds.values()))

    def alone() -> LoadPlan:
        own, _ = resume_source(checkpoint, model_rules(model.model, wanted[0][MODEL_STATE]))
        return plan_reads(own, wanted[0])

    times.of("one rank in a process of its own: bind, mapping, plan", alone)
    return items


def _read(checkpoint: Checkpoint, times: Timings) -> None:
    times.of("the first `Checkpoint.read` of a tensor", lambda: checkpoint.read(READ))
    times.of(f"{LATER_READS:,} later ones", lambda: [checkpoint.read(READ) for _ in range(LATER_READS)])


def _note(times: Timings, step: str, took: float) -> None:
    times.seconds[step] = min(took, times.seconds.get(step, took))


def table(job: Job, sizes: list[int], rounds: int) -> list[str]:
    """The table of one job, with a column per size."""
    columns, counts = [], []
    for size in sizes:
        with tempfile.TemporaryDirectory() as place:
            found, stored, items = measure(Path(place) / "checkpoint-1", job, max(1, size // job.per_layer), rounds)
        columns.append(found)
        counts.append((stored, items))
    lines = [
        f"## {job.title}",
        "",
        f"Saved under `{job.saved}`, loaded under `{job.loaded}`.",
        "",
        "| | " + " | ".join(f"{stored:,} stored tensors" for stored, _ in counts) + " | growth |",
        "|---|" + "---|" * (len(sizes) + 1),
        "| read items of all ranks | " + " | ".join(f"{items:,}" for _, items in counts) + " | |",
    ]
    for step in columns[0]:
        growth = columns[-1][step] / columns[0][step] / (counts[-1][0] / counts[0][0])
        lines.append(f"| {step} | " + " | ".join(f"{one[step]:.2f}" for one in columns) + f" | {growth:.2f} |")
    parts = ("live model: bind", "**mapping**: stored and live proved, composed; bound before", "**plans of 8 ranks**")
    totals = [sum(one[part] for part in parts) for one in columns]
    lines.append("| **from opened to all 8 plans** | " + " | ".join(f"**{one:.2f}**" for one in totals) + " | |")
    return [*lines, ""]


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[25_000, 50_000, 100_000], help="stored tensors")
    parser.add_argument("--rounds", type=int, default=3, help="of which the best counts")
    parser.add_argument("--write", type=Path, help="also write the tables into this file")
    options = parser.parse_args()
    lines = [
        f"Seconds of one core, the best of {options.rounds} rounds. Growth: how many times longer the last size takes "
        "than the first, per stored tensor; 1.00 is linear. What stock's engine takes to build on such a model is in "
        "`docs/results/mapping-performance.md`.",
        "",
    ]
    for job in JOBS:
        lines += table(job, options.sizes, options.rounds)
    text = "\n".join(lines)
    print(text)
    if options.write:
        title = "# Planning a load of 100,000 stored tensors\n\nWritten by `make bench-planning`.\n\n"
        options.write.write_text(title + text, encoding="utf-8")


if __name__ == "__main__":
    main()
