"""The operations that are counted, and the jobs: two models over grids of 64 to 10,240 ranks, and a tiny one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.distributed.consistency import ConsistencyCheck
from paddleformers_fc.execute.load import PreparedLoad, prepare_load
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.save import comparable_facts, snapshot, write_and_commit
from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.formats.checkpoint import OpenedCheckpoint
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.plan.simulate import declared_model
from paddleformers_fc.trainer import resume, rotation
from verification.scale.counting import Meter, counted_calls
from verification.scale.ranks import RANKS_PER_NODE, ScaleJob, capture_zeros

DENSE = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
MOE = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 0,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
}
TINY = {
    **DENSE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 512,
}
MODELS: dict[str, tuple[dict[str, Any], str, int]] = {
    "70B dense": (DENSE, "tp=8,pp=8,sharding={},split=true", 64),
    "671B MoE": (MOE, "pp=8,ep=8,sharding={},split=true", 8),
    "tiny": (TINY, "tp=2,pp=2,sharding={},split=true", 4),
}
"""Configuration, grid, and the ranks of the grid at sharding 1."""

FIRST_SAVE, LATER_SAVE, ROTATION = "first save", "later save", "rotation"
RESUME, OPENING, PLANNING = "automatic resume", "opening", "planning"
CONNECTING = "connecting"

Counts = dict[str, dict[int, Meter]]
"""What each rank that ran has done, by operation."""


def running_ranks(world: int) -> list[int]:
    """Return the coordinator, the first rank of the second node, a middle and the last rank."""
    return [0, RANKS_PER_NODE, world // 2 + 1, world - 1]


def count_operations(name: str, world: int, running: Sequence[int]) -> Counts:
    """Run every operation once, in the order in which a run and its successor need them.

    Args:
        name: a key of :data:`MODELS`.
        world: number of ranks.
        running: the ranks that run.
    """
    config, grid, alone = MODELS[name]
    described = ModelDescription(dict(config))
    model = declared_model(family_for(config), described, parse_grid(grid.format(world // alone)), "bfloat16")
    memory = Path("/dev/shm")
    with counted_calls(), tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        job = ScaleJob(model, running, Path(place))
        try:
            return _operations(job)
        finally:
            job.close()


def _operations(job: ScaleJob) -> Counts:
    counts: Counts = {CONNECTING: job.connecting}
    opened: dict[int, OpenedCheckpoint] = {}

    def measure(operation: str, work: Callable[[int, Channel], Any]) -> dict[int, Any]:
        counts[operation], results = job.run(work)
        return results

    measure(FIRST_SAVE, partial(_save, job, 1))
    measure(LATER_SAVE, partial(_save, job, 2))
    measure(ROTATION, lambda _, channel: rotation.rotate(job.directory, 1, [], _ignore, "full", 4, channel))
    newest = measure(RESUME, lambda _, channel: resume.newest_or_refuse(job.directory, channel, _ignore))
    opened.update(measure(OPENING, lambda rank, channel: open_on_all_ranks(newest[rank], channel, "full")))
    measure(PLANNING, lambda rank, channel: _plan(job, opened[rank], rank, channel))
    return counts


def _save(job: ScaleJob, step: int, rank: int, channel: Channel) -> None:
    directory = job.directory / f"checkpoint-{step}"
    part = job.part(rank, step)
    check = ConsistencyCheck(f"saving {directory.name}", comparable_facts(part.model, part.job, part.replicas))
    write_and_commit(snapshot(lambda: part, capture_zeros, channel, check), directory, channel)


def _plan(job: ScaleJob, checkpoint: OpenedCheckpoint, rank: int, channel: Channel) -> PreparedLoad:
    return prepare_load(checkpoint, job.weights(rank), job.model.model, channel)


def _ignore(_: str) -> None:
    """Drop a line of the log."""
