"""How ranks talk about a save or load: bytes to everyone, and one agreed outcome.

A :class:`Channel` has two operations. In ``exchange`` every rank gives bytes and gets every rank's bytes; in
``pass_on`` ranks give bytes to some others, as all have agreed before. Nothing that travels is a pickle.
:func:`all_gather_checked` and :func:`together` run a piece of work on every rank and let them all go on, or let all
raise the same error; no rank is left waiting in a collective for one that failed. With the first agreement of an
operation travels a :class:`ConsistencyFacts`: whether the ranks mean the same at all. :func:`broadcast` gives one
rank's bytes to some others.

Cost of one exchange: an all-gather of a short frame, in which most of what ranks say has room, and a second one of the
padded payloads where some rank says more. What is passed on is an all-to-all of just the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from paddleformers_fc.distributed.rank_format import MOST_VALUES, escape_text, format_ranks, group_by_value
from paddleformers_fc.errors import CheckpointError, FlexError, PeerError, from_wire

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""Bytes on their way, one-dimensional."""

_T = TypeVar("_T")

_LENGTH_BYTES = 8
_FRAME_ROOM = 1016


class Channel(Protocol):
    """Every rank's way to every other."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by rank. Every rank must call."""

    def all_to_all(self, outgoing: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        """Give bytes to some ranks, and take what some have for this one. Every rank must call.

        Args:
            outgoing: bytes by the rank that gets them.
            sizes: how many bytes come, by the rank that they come from; what that rank gives, as agreed before.
        Returns:
            bytes by the rank that they come from.
        """


class ConsistencyFacts(Protocol):
    """What must be the same on every rank of an operation."""

    @property
    def digest(self) -> bytes:
        """Of what this rank means, never empty; the same on ranks that mean the same."""

    def differences(self, channel: Channel) -> FlexError:
        """What the ranks mean differently, where digests differ. Every rank must call."""


class _RankMessage(msgspec.Struct):
    """What one rank was doing, and its result, or its error in wire form; the digest of its roll, if it has one."""

    doing: str
    result: bytes = b""
    error: str = ""
    roll: bytes = b""


_outcomes = msgspec.msgpack.Decoder(_RankMessage)


class LocalChannel:
    """The channel of a job with one process."""

    rank = 0
    world_size = 1

    def all_gather(self, payload: bytes) -> list[bytes]:
        """This rank's payload alone."""
        return [payload]

    def all_to_all(self, outgoing: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        """What this rank gives itself."""
        return {rank: outgoing[rank] for rank in sizes}


ALONE = LocalChannel()
"""The channel of one process; it has no state and is shared."""


class PaddleChannel:
    """All ranks of a running Paddle job, over its default group."""

    def __init__(self) -> None:
        import paddle.distributed as dist

        self.rank = int(dist.get_rank())
        self.world_size = int(dist.get_world_size())

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by one or two all-gathers of bytes."""
        length = len(payload).to_bytes(_LENGTH_BYTES, "little")
        frames = self._all_gather(_pad(length + payload[:_FRAME_ROOM], _LENGTH_BYTES + _FRAME_ROOM))
        lengths = [int.from_bytes(frame[:_LENGTH_BYTES].tobytes(), "little") for frame in frames]
        longest = max(lengths)
        if longest <= _FRAME_ROOM:
            rows = [frame[_LENGTH_BYTES:] for frame in frames]
        else:
            rows = self._all_gather(_pad(payload, longest))
        return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]

    def all_to_all(self, outgoing: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        """Bytes to and from some ranks, by one all-to-all."""
        import paddle
        import paddle.distributed as dist

        # One byte more to this rank itself: a collective of nothing at all is not defined everywhere.
        own = np.zeros(1, np.uint8)
        parts = [np.concatenate([outgoing.get(rank, own[:0]), own[: rank == self.rank]]) for rank in self._ranks]
        coming = [sizes.get(rank, 0) + (rank == self.rank) for rank in self._ranks]
        target = paddle.empty([sum(coming)], dtype="uint8")
        dist.alltoall_single(
            out_tensor=target,
            in_tensor=paddle.to_tensor(np.concatenate(parts)),
            in_split_sizes=[part.size for part in parts],
            out_split_sizes=coming,
        )
        arrived, ends = target.numpy(), np.cumsum(coming)
        return {rank: arrived[ends[rank] - coming[rank] :][:size] for rank, size in sizes.items()}

    @property
    def _ranks(self) -> range:
        return range(self.world_size)

    def _all_gather(self, array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        import paddle
        import paddle.distributed as dist

        gathered: list[Any] = []
        dist.all_gather(gathered, paddle.to_tensor(array))
        return [tensor.numpy() for tensor in gathered]


def _pad(data: bytes, size: int) -> Bytes:
    padded = np.zeros(size, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return padded


class GuardedChannel:
    """A channel each of whose operations happens within something that guards it.

    Args:
        channel: all ranks.
        guard: makes what one operation happens within.
    """

    def __init__(self, channel: Channel, guard: Callable[[], AbstractContextManager[None]]) -> None:
        self._channel = channel
        self._guard = guard

    @property
    def rank(self) -> int:
        """This rank."""
        return self._channel.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._channel.world_size

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by rank; raises what the guard raises."""
        with self._guard():
            return self._channel.all_gather(payload)

    def all_to_all(self, outgoing: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        """Bytes to and from some ranks; raises what the guard raises."""
        with self._guard():
            return self._channel.all_to_all(outgoing, sizes)


def job_channel() -> Channel:
    """The channel of the running job: all its ranks, or this process alone."""
    import paddle.distributed as dist

    return PaddleChannel() if dist.is_initialized() and dist.get_world_size() > 1 else ALONE


def all_gather_checked(
    channel: Channel, doing: str, work: Callable[[], bytes], roll: ConsistencyFacts | None = None
) -> list[bytes]:
    """Do a piece of work on every rank, and go on only if all of them succeeded.

    Args:
        channel: the ranks.
        doing: what the work is, in the same words on every rank: ranks that do different things are told apart by it.
        work: this rank's part; what it returns goes to every rank.
        roll: what must be equal, which counts before what became of the work. A work that has one is the first of its
            operation, and changes nothing that lasts.
    Returns:
        every rank's result, by rank.
    Raises:
        FlexError: the same error on every rank: what the roll tells; that the ranks were doing different things; or the
            error of the rank that failed, or of all ranks that did.
    """
    failure: BaseException | None = None
    doing = escape_text(doing)
    try:
        outcome = _RankMessage(doing, result=work())
    except FlexError as error:
        failure, outcome = error, _RankMessage(doing, error=error.to_wire())
    except Exception as error:  # Every other rank waits in the exchange below, so any fault must travel.
        failure, outcome = error, _wrap_unexpected(doing, error)
    if roll is not None and channel.world_size > 1:
        try:
            outcome.roll = roll.digest
        except Exception as error:  # As above; what became of the work came first.
            if failure is None:
                failure, outcome = error, _wrap_unexpected(doing, error)
    outcomes = [_decode(payload) for payload in channel.all_gather(msgspec.msgpack.encode(outcome))]
    if roll is not None and all(found.roll for found in outcomes) and len({found.roll for found in outcomes}) > 1:
        raise roll.differences(channel) from failure
    doings = [found.doing for found in outcomes]
    if len(set(doings)) > 1:
        raise PeerError(
            "The ranks are not doing the same thing.",
            where=f"a job of {channel.world_size} ranks",
            evidence=[group_by_value(doings)],
            next_step="Start every rank with the same software, arguments and data, so that all save together.",
        ) from failure
    refuse_failed(channel, [found.error for found in outcomes], failure)
    return [found.result for found in outcomes]


def _wrap_unexpected(doing: str, error: Exception) -> _RankMessage:
    """What a rank says of an error that is not one of ours."""
    return _RankMessage(doing, error=PeerError(f"{type(error).__name__} while {doing}: {error}").to_wire())


def run_on_all(channel: Channel, doing: str, work: Callable[[], _T], roll: ConsistencyFacts | None = None) -> _T:
    """As :func:`all_gather_checked`, for work whose result stays on its rank."""
    made: list[_T] = []

    def run() -> bytes:
        made.append(work())
        return b""

    all_gather_checked(channel, doing, run, roll)
    return made[0]


def refuse_failed(channel: Channel, errors: Sequence[str], cause: BaseException | None = None) -> None:
    """Go on only if no rank failed.

    Args:
        channel: the ranks.
        errors: by rank, its error in wire form; empty where it succeeded. The same on every rank.
        cause: this rank's own error, if it failed.
    Raises:
        FlexError: the same on every rank.
    """
    failed = {rank: from_wire(text) for rank, text in enumerate(errors) if text}
    if failed:
        raise _merge_errors(failed, channel.world_size) from cause


def broadcast(channel: Channel, data: bytes, size: int, members: Sequence[int]) -> bytes:
    """Give one rank's bytes to some others, which hand them on: as many rounds as their number has binary digits.

    Args:
        channel: the ranks; every rank must call.
        data: the bytes, on the first member; of no meaning elsewhere.
        size: how many there are, known to every rank.
        members: the rank that has the bytes, then those that are to get them.
    Returns:
        the bytes on every member; empty on other ranks.
    """
    place = members.index(channel.rank) if channel.rank in members else None
    held = np.frombuffer(data if place == 0 else b"", np.uint8)
    having = 1
    while having < len(members):
        outgoing: dict[int, Bytes] = {}
        sizes: dict[int, int] = {}
        if place is not None and place < having and place + having < len(members):
            outgoing[members[place + having]] = held
        if place is not None and having <= place < 2 * having:
            sizes[members[place - having]] = size
        held = next(iter(channel.all_to_all(outgoing, sizes).values()), held)
        having *= 2
    return held.tobytes()


def _decode(payload: bytes) -> _RankMessage:
    """What a rank said; a rank that speaks another language is doing something else."""
    try:
        return _outcomes.decode(payload)
    except msgspec.MsgspecError:
        return _RankMessage("something that cannot be understood here")


def _merge_errors(failed: dict[int, FlexError], world_size: int) -> FlexError:
    """One error for all ranks, equal everywhere; the ranks are named."""
    first = failed[min(failed)]
    if world_size == 1:
        return first
    groups: dict[str, list[int]] = {}
    for rank, error in failed.items():
        groups.setdefault(error.render(), []).append(rank)
    if len(groups) == 1:
        who = "every rank" if len(failed) == world_size else format_ranks(failed)
        where = f"{first.where} (on {who})" if first.where else f"on {who}"
        return type(first)(first.what, where=where, evidence=first.evidence, next_step=first.next_step)
    if len({_without_path(error) for error in failed.values()}) == 1:
        return _merge_path_errors(failed, world_size)
    steps = {error.next_step for error in failed.values()}
    if len(steps) == 1:
        # Said once for all of them, and not by each.
        groups = {text.removesuffix(f"\n  next: {first.next_step}"): ranks for text, ranks in groups.items()}
    evidence = [f"{format_ranks(ranks)}: {text}" for text, ranks in groups.items()]
    kind = _common_kind(failed.values())
    return kind(
        f"{len(failed)} of {world_size} ranks failed, for different reasons.",
        evidence=evidence,
        next_step=first.next_step if len(steps) == 1 else "Do for each of these ranks what is said there.",
    )


def _common_kind(errors: Iterable[FlexError]) -> type[FlexError]:
    """What several errors are: faults of a checkpoint stay that, whatever ranks found wrong with it."""
    kinds = {type(error) for error in errors}
    if len(kinds) == 1:
        return kinds.pop()
    return CheckpointError if all(issubclass(kind, CheckpointError) for kind in kinds) else PeerError


def _merge_path_errors(failed: dict[int, FlexError], world_size: int) -> FlexError:
    """One error for ranks that met the same, each at a path of its own."""
    first = failed[min(failed)]
    kind, what, evidence, next_step = _without_path(first)
    places: dict[str, list[int]] = {}
    for rank, error in failed.items():
        places.setdefault(error.where, []).append(rank)
    lines = [f"{format_ranks(ranks)}: {where}" for where, ranks in places.items()]
    if len(lines) > MOST_VALUES:
        lines[MOST_VALUES - 1 :] = [f"{len(lines) - MOST_VALUES + 1} more paths on other ranks"]
    who = "every rank" if len(failed) == world_size else format_ranks(failed)
    return kind(what[:1].upper() + what[1:], where=f"on {who}", evidence=[*evidence, *lines], next_step=next_step)


def _without_path(error: FlexError) -> tuple[type[FlexError], str, tuple[str, ...], str]:
    """What an error says, whatever the path that it says it of."""
    path = error.where.partition(", byte ")[0]
    if "/" not in path:
        return type(error), error.what, error.evidence, error.next_step
    # Not where it is the beginning of a longer path.
    said = re.compile(re.escape(path) + r"(?![\w/-])")
    what, *evidence = (said.sub("each path below", text) for text in (error.what, *error.evidence))
    return type(error), what, tuple(evidence), error.next_step
