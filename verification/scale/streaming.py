"""Count what a rank of a large job does to stream the weights: its messages, its pieces and its plan.

Descriptions, plans and rounds are made by the package's own code from the simulated layouts of all ranks. No weight is
sent; the bytes of a round follow from its pieces.
"""

from __future__ import annotations

import time

import msgspec

from paddleformers_fc.execute.replicas import Ties
from paddleformers_fc.execute.stream import StreamPlan, StreamRequest, describe_job, plan_of_rank
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.layout.shard_messages import encode_rank_shards
from verification.scale.operations import grid_of, model_over

JOBS = (("70B dense", 64, "first"), ("70B dense", 512, "first"), ("70B dense", 512, "all"), ("70B dense", 4096, "all"))
"""Model, ranks, and the ranks that get the tensors."""


class Streams(msgspec.Struct, frozen=True):
    """What a stream costs.

    Args:
        described: bytes of the longest description of a rank, sent before the first stream.
        plan: bytes of the plan, which all ranks get once before the first stream.
        coordinator: seconds in which the coordinator makes it.
        planning: seconds in which a rank makes its part of it.
        words: exchanges of a later stream that carry no weights.
        rounds: exchanges of weights.
        sent: bytes that the busiest of three ranks sends of its own.
        received: bytes that a receiver gets.
    """

    described: int
    plan: int
    coordinator: float
    planning: float
    words: int
    rounds: int
    sent: int
    received: int


def count_stream(job: tuple[str, int, str]) -> Streams:
    """Plan a stream of one of :data:`JOBS`, and count it on its first, a middle and its last rank."""
    name, world, to = job
    model = model_over(name, grid_of(name, world))
    described = model.model
    layouts = [{MODEL_STATE: model.roles(rank)[MODEL_STATE]} for rank in range(world)]
    payloads = [encode_rank_shards(layout) for layout in layouts]
    request = StreamRequest(tuple(range(world)) if to == "all" else (0,))
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
    return Streams(
        max(map(len, payloads)),
        len(packed),
        coordinator,
        longest,
        3 + len(batches),
        sum(len(batch.rounds) for batch in batches),
        max(sum(one.size for one in own if one.move.owner == rank) for rank, own in pieces.items()),
        sum(one.size for one in pieces[0]),
    )
