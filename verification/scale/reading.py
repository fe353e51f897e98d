"""Count the bytes that all ranks of a job read together in a resume, if each reads for itself and if replicas share.

The ranks are on nodes of eight. Each plan is derived by the package's own code from the rank's simulated layout; no
tensor is read. Ranks with equal layouts have one plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paddleformers_fc.distributed.channel import ALONE
from paddleformers_fc.execute.exchange import SharedReads, replicas_of
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.formats.checkpoint import OpenedCheckpoint
from paddleformers_fc.plan.build import plan_reads
from paddleformers_fc.plan.items import StoredPart
from paddleformers_fc.plan.simulate import SimulatedModel
from paddleformers_fc.plan.sources import resume_source
from paddleformers_fc.plan.transfer_plan import size_of
from paddleformers_fc.storage.executor import ReadOptions
from verification import temporary_directory
from verification.scale.operations import model_over, saved_checkpoint
from verification.scale.ranks import hosts_of, live_weights

JOBS = (("70B dense", 64, "dp=64"), ("70B dense", 64, "tp=8,pp=8,sharding=8,split=true"))
"""Model, ranks that save it, and the grid that resumes it."""


class Reads(msgspec.Struct, frozen=True):
    """The bytes of tensors that a job reads.

    Args:
        each: of all ranks, if each reads for itself.
        shared: of all ranks under ``flex_read: auto``.
        most: of the rank that reads most then, on average over its replicas.
    """

    each: int
    shared: int
    most: int


def count_reads(job: tuple[str, int, str]) -> Reads:
    """Save a checkpoint, and count what a job reads that resumes it, in one of :data:`JOBS`."""
    name, ranks, grid = job
    with temporary_directory() as place:
        return reads_of(open_on_all_ranks(saved_checkpoint(name, ranks, place), ALONE, "off"), model_over(name, grid))


def reads_of(checkpoint: OpenedCheckpoint, model: SimulatedModel) -> Reads:
    """Return what the ranks of a model over its grid read of a checkpoint."""
    source, _ = resume_source(checkpoint, model.rules)
    world = model.grid.world_size
    options = ReadOptions(replicas="auto", hosts=hosts_of(world))
    known: dict[bytes, tuple[int, SharedReads, tuple[StoredPart, ...]]] = {}
    ranks: list[tuple[int, SharedReads, tuple[StoredPart, ...]]] = []
    for rank in range(world):
        layout = model.roles(rank)
        key = msgspec.msgpack.encode(layout)
        if key not in known:
            plan = plan_reads(source, layout)
            known[key] = (
                _size([item.stored for item in plan.items]),
                *SharedReads.of(plan, live_weights(layout), options),
            )
        ranks.append(known[key])
    messages = [message for _, message, _ in ranks]
    read = [float(size) for size, *_ in ranks]
    for rank, (size, _, parts) in enumerate(ranks):
        replicas = replicas_of(messages, rank, options, parts)
        if replicas is not None:
            shared = _size(parts)
            read[rank] = size - shared + shared / len(replicas.ranks)
    return Reads(sum(size for size, *_ in ranks), round(sum(read)), round(max(read)))


def _size(parts: Sequence[StoredPart]) -> int:
    return sum(size_of(part) for part in parts)
