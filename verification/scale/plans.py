"""Count from plans what all ranks of a job read in a resume, and what a rank does to stream the weights."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from paddleformers_fc.distributed.channel import ALONE
from paddleformers_fc.execute.exchange import SharedReads, replicas_of
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.replicas import Ties
from paddleformers_fc.execute.stream import StreamPlan, StreamRequest, describe_job, plan_of_rank
from paddleformers_fc.formats.checkpoint import OpenedCheckpoint
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.layout.shard_messages import encode_rank_shards
from paddleformers_fc.plan.build import plan_reads
from paddleformers_fc.plan.items import StoredPart
from paddleformers_fc.plan.simulate import SimulatedModel
from paddleformers_fc.plan.sources import resume_source
from paddleformers_fc.plan.transfer_plan import size_of
from paddleformers_fc.storage.executor import ReadOptions
from paddleformers_fc.text import size_text
from verification import temporary_directory
from verification.scale.operations import grid_of, model_over, saved_checkpoint
from verification.scale.ranks import hosts_of, live_weights

RESUMES = (("70B dense", 64, "dp=64"), ("70B dense", 64, "tp=8,pp=8,sharding=8,split=true"))
"""Model, ranks that save it, and the grid that resumes it."""
RESUMES_HEAD = """## Bytes that a job reads in a resume

Nodes have eight ranks, and read a file once for each rank that needs it. *shared* is `flex_read: auto`.

| saved on | resumed on | `each` | shared | the rank that reads most |
|---|---|---|---|---|"""


def count_reads(job: tuple[str, int, str]) -> str:
    """Save a checkpoint, and return the row of what a job reads that resumes it, in one of :data:`RESUMES`."""
    name, ranks, grid = job
    with temporary_directory() as place:
        checkpoint = open_on_all_ranks(saved_checkpoint(name, ranks, place), ALONE, "off")
        sizes = " | ".join(map(size_text, reads_of(checkpoint, model_over(name, grid))))
    return f"| {name}, {ranks} ranks | `{grid}` | {sizes} |"


def reads_of(checkpoint: OpenedCheckpoint, model: SimulatedModel) -> tuple[int, int, int]:
    """Return the bytes of tensors that the ranks of a model over its grid read of a checkpoint.

    Returns:
        of all ranks, if each reads for itself; of all ranks under ``flex_read: auto``; of the rank that reads most
        then, on average over its replicas.
    """
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
            own = SharedReads.of(plan, live_weights(layout), options)
            known[key] = _size([item.stored for item in plan.items]), *own
        ranks.append(known[key])
    messages = [message for _, message, _ in ranks]
    read = [float(size) for size, *_ in ranks]
    for rank, (size, _, parts) in enumerate(ranks):
        replicas = replicas_of(messages, rank, options, parts)
        if replicas is not None:
            shared = _size(parts)
            read[rank] = size - shared + shared / len(replicas.ranks)
    return sum(size for size, *_ in ranks), round(sum(read)), round(max(read))


def _size(parts: Sequence[StoredPart]) -> int:
    return sum(size_of(part) for part in parts)


STREAMS = tuple(("70B dense", ranks, to) for ranks, to in ((64, "first"), (512, "first"), (512, "all"), (4096, "all")))
"""Model, ranks, and the ranks that get the tensors."""
STREAMS_HEAD = """## Streams of live weights

Descriptions and the plan are sent once for all streams of a model under a layout. *Words* are the exchanges
of a later stream without weights: one at its begin, one before every batch, and two at its end. *Sent*
is the most that the first, a middle or the last rank sends of its own tensors; if all ranks receive, each
also passes on what others send.

| model, ranks | to | description | plan | made in | a rank's part in | words | rounds | sent | received |
|---|---|---|---|---|---|---|---|---|---|"""


def count_stream(job: tuple[str, int, str]) -> str:
    """Plan a stream of one of :data:`STREAMS`, and return its row: counts of its first, a middle and its last rank."""
    name, world, to = job
    model = model_over(name, grid_of(name, world))
    described = model.model
    layouts = [{MODEL_STATE: model.roles(rank)[MODEL_STATE]} for rank in range(world)]
    payloads = [encode_rank_shards(layout) for layout in layouts]
    request = StreamRequest(tuple(range(world)) if to == "all" else (0,), world)
    ties: list[Ties] = []
    begun = time.monotonic()
    packed = describe_job(payloads, described, ties)
    coordinator = time.monotonic() - begun
    plans: dict[int, StreamPlan] = {}
    longest = 0.0
    for rank in sorted({0, world // 2 + 1, world - 1}):
        begun = time.monotonic()
        plans[rank] = plan_of_rank(packed, layouts[rank], described, request, rank, ties if rank == 0 else ())[1]
        longest = max(longest, time.monotonic() - begun)
    batches = plans[0].batches
    pieces = {
        rank: [one for batch in plan.batches for round in batch.rounds for one in round] for rank, plan in plans.items()
    }
    rounds = sum(len(batch.rounds) for batch in batches)
    sent = max(sum(one.size for one in own if one.move.owner == rank) for rank, own in pieces.items())
    received = sum(one.size for one in pieces[0])
    sizes = [size_text(size) for size in (max(map(len, payloads)), len(packed), sent, received)]
    made = f"{sizes[0]} | {sizes[1]} | {coordinator:.1f} s | {longest:.1f} s"
    return f"| {name}, {world:,} | `{to}` | {made} | {3 + len(batches):,} | {rounds:,} | {sizes[2]} | {sizes[3]} |"
