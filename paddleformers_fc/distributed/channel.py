"""Exchange typed messages between all ranks of a job, and raise the same error on all of them.

A :class:`Channel` has two operations. In ``all_gather`` every rank gives bytes and gets the bytes of every rank. In
``all_to_all`` ranks give bytes to some others, in sizes that all ranks have agreed on. No message is a pickle.

:func:`gather_and_keep` runs work on every rank, encodes its message, exchanges, and decodes the messages of all ranks.
If the work fails on any rank, all ranks raise the same error, so no rank waits in a collective for a failed one.
:func:`all_gather_checked` is the form without a local result, :func:`run_on_all` the form without a message. The first
exchange of an operation carries :class:`ConsistencyFacts`: digests that must be equal on all ranks. :func:`broadcast`
gives the bytes of one rank to some others.

Cost of one exchange: an all-gather of a frame of 1 KiB, and a second all-gather of the padded payloads if one is longer
than a frame. An all-to-all carries exactly the bytes.

Format ranks for reports: a thousand of them in one line.

A channel for a thread beside the training, over a gloo group of its own.

Its messages are in host memory, so its exchanges launch nothing on a device. Gloo has no all-to-all, and here it is an
all-gather: every rank gets the bytes of all. A save sends such messages only if ranks write onto several disks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import msgspec
import numpy as np

from paddleformers_fc.errors import CheckpointError, FlexError, PeerError, from_wire

MOST_VALUES = 8
"""Most values in one line."""


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as ``rank 3`` or ``ranks 0-2, 5``.

    Args:
        ranks: at least one, in any order.
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"


def group_by_value(values: Sequence[str] | Mapping[int, str]) -> str:
    """Return values with their ranks: ``8 on ranks 0-2; 9 on rank 3``. The value of the fewest ranks is last.

    Args:
        values: the value of each rank, by rank.
    """
    holders: dict[str, list[int]] = {}
    for rank, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        holders.setdefault(value, []).append(rank)
    lines = [f"{value} on {format_ranks(ranks)}" for value, ranks in sorted(holders.items(), key=_largest_group_first)]
    if len(lines) > MOST_VALUES:
        lines[MOST_VALUES - 1 :] = [f"{len(lines) - MOST_VALUES + 1} more values on other ranks"]
    return "; ".join(lines)


def _largest_group_first(entry: tuple[str, list[int]]) -> tuple[int, int]:
    return -len(entry[1]), entry[1][0]


def escape_text(text: str) -> str:
    """Return a text that UTF-8 can encode: surrogates, as in file names of arbitrary bytes, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""Bytes in transit, one-dimensional."""

_M = TypeVar("_M")
_T = TypeVar("_T")

_LENGTH_BYTES = 8
_FRAME_ROOM = 1016


class Channel(Protocol):
    """The collectives over all ranks of a job."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payload of every rank, by rank. Every rank must call."""

    def all_to_all(self, outgoing: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        """Send bytes to some ranks and receive bytes from some. Every rank must call.

        Args:
            outgoing: bytes by receiver.
            sizes: number of bytes by sender; equal to those that the sender passes.
        Returns:
            bytes by sender.
        """


class ConsistencyFacts(Protocol):
    """Facts that must be equal on every rank of an operation."""

    @property
    def digest(self) -> bytes:
        """The digest of this rank's facts, never empty."""

    def mismatch_error(self, channel: Channel) -> FlexError:
        """Return the error for ranks whose digests differ. Every rank must call."""


class _RankMessage(msgspec.Struct):
    """The message of one rank.

    Args:
        doing: description of the work.
        result: the encoded result of the work; empty after an error.
        error: the error in wire form; empty after success.
        digest: of the consistency facts; empty without them.
    """

    doing: str
    result: bytes = b""
    error: str = ""
    digest: bytes = b""


_rank_messages = msgspec.msgpack.Decoder(_RankMessage)


class LocalChannel:
    """The channel of a job of one process."""

    rank = 0
    world_size = 1

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return this rank's payload."""
        return [payload]

    def all_to_all(self, outgoing: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        """Return the bytes that this rank sends to itself."""
        return {rank: outgoing[rank] for rank in sizes}


ALONE = LocalChannel()
"""The channel of one process. It has no state, so it is shared."""


class PaddleChannel:
    """All ranks of a running Paddle job, over its default group."""

    def __init__(self) -> None:
        import paddle.distributed as dist

        self.rank = int(dist.get_rank())
        self.world_size = int(dist.get_world_size())

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payload of every rank, by one or two all-gathers of bytes."""
        return gather_payloads(payload, self._all_gather)

    def all_to_all(self, outgoing: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        """Send and receive bytes by one all-to-all."""
        import paddle
        import paddle.distributed as dist

        # One extra byte to this rank itself: not every backend defines a collective of zero bytes.
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


def gather_payloads(payload: bytes, all_gather: Callable[[Bytes], list[Bytes]]) -> list[bytes]:
    """Return the payload of every rank, by one or two all-gathers.

    Args:
        payload: that of this rank, of any length.
        all_gather: returns the array of every rank, by rank; all have the same length.
    """
    length = len(payload).to_bytes(_LENGTH_BYTES, "little")
    frames = all_gather(_pad(length + payload[:_FRAME_ROOM], _LENGTH_BYTES + _FRAME_ROOM))
    lengths = [int.from_bytes(frame[:_LENGTH_BYTES].tobytes(), "little") for frame in frames]
    longest = max(lengths)
    if longest <= _FRAME_ROOM:
        rows = [frame[_LENGTH_BYTES:] for frame in frames]
    else:
        rows = all_gather(_pad(payload, longest))
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def _pad(data: bytes, size: int) -> Bytes:
    padded = np.zeros(size, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return padded


def job_channel() -> Channel:
    """Return the unguarded channel of the running job."""
    import paddle.distributed as dist

    return PaddleChannel() if dist.is_initialized() and dist.get_world_size() > 1 else ALONE


def gather_and_keep(
    channel: Channel,
    doing: str,
    work: Callable[[], tuple[_M, _T]],
    kind: type[_M],
    consistency: ConsistencyFacts | None = None,
) -> tuple[list[_M], _T]:
    """Run work on every rank, and return the messages of all ranks if it succeeded on all of them.

    Args:
        channel: all ranks; every rank must call.
        doing: description of the work, equal on every rank; ranks with different descriptions are refused.
        work: returns this rank's message and its local result.
        kind: type of the message; anything that msgspec encodes.
        consistency: facts that must be equal on all ranks. A mismatch takes precedence over other errors. The work must
            change nothing persistent.
    Returns:
        the messages by rank, and this rank's local result.
    Raises:
        FlexError: the same on every rank: facts differ, descriptions differ, or the errors of the ranks that failed.
    """
    failure: Exception | None = None
    kept: _T | None = None
    sent = _RankMessage(escape_text(doing))
    try:
        message, kept = work()
        sent.result = msgspec.msgpack.encode(message)
    except Exception as error:  # The other ranks wait in the exchange below, so every error must be sent.
        failure, sent.error = error, _wire_form(error, sent.doing)
    if consistency is not None and channel.world_size > 1:
        try:
            sent.digest = consistency.digest
        except Exception as error:  # As above; an error of the work takes precedence.
            failure, sent.error = failure or error, sent.error or _wire_form(error, sent.doing)
    everyone = [_decode(payload) for payload in channel.all_gather(msgspec.msgpack.encode(sent))]
    if consistency is not None and all(one.digest for one in everyone) and len({one.digest for one in everyone}) > 1:
        raise consistency.mismatch_error(channel) from failure
    descriptions = [one.doing for one in everyone]
    if len(set(descriptions)) > 1:
        raise PeerError(
            "The ranks are not doing the same thing.",
            where=f"a job of {channel.world_size} ranks",
            evidence=[group_by_value(descriptions)],
            next_step="Start every rank with the same software, arguments and data, so that all save together.",
        ) from failure
    refuse_failed(channel, [one.error for one in everyone], failure)
    decoder = msgspec.msgpack.Decoder(kind)
    return [decoder.decode(one.result) for one in everyone], cast("_T", kept)


def all_gather_checked(
    channel: Channel, doing: str, work: Callable[[], _M], kind: type[_M], consistency: ConsistencyFacts | None = None
) -> list[_M]:
    """Return the messages of all ranks, as :func:`gather_and_keep`."""
    return gather_and_keep(channel, doing, lambda: (work(), None), kind, consistency)[0]


def run_on_all(channel: Channel, doing: str, work: Callable[[], _T], consistency: ConsistencyFacts | None = None) -> _T:
    """Return this rank's result if the work succeeded on all ranks, as :func:`gather_and_keep`."""
    return gather_and_keep(channel, doing, lambda: (None, work()), type(None), consistency)[1]


def _wire_form(error: Exception, doing: str) -> str:
    """Return an error as it is sent; one that is not ours becomes a ``PeerError``."""
    if not isinstance(error, FlexError):
        error = PeerError(
            f"{type(error).__name__} while {doing}: {error}", next_step="Read the traceback in the log of that rank."
        )
    return error.to_wire()


def refuse_failed(channel: Channel, errors: Sequence[str], cause: BaseException | None = None) -> None:
    """Raise the errors of all ranks that failed as one error.

    Args:
        channel: all ranks.
        errors: by rank, its error in wire form; empty after success. Equal on all ranks.
        cause: this rank's own error.
    Raises:
        FlexError: the same on every rank.
    """
    failed = {rank: from_wire(text) for rank, text in enumerate(errors) if text}
    if failed:
        raise _merge_errors(failed, channel.world_size) from cause


def broadcast(channel: Channel, data: bytes, size: int, members: Sequence[int]) -> bytes:
    """Send one rank's bytes to some others, along a binary tree.

    Args:
        channel: all ranks; every rank must call.
        data: the bytes; read on the first member only.
        size: number of bytes, equal on all ranks.
        members: the sender, then the receivers.
    Returns:
        the bytes on every member; empty on other ranks.
    """
    place = members.index(channel.rank) if channel.rank in members else None
    received = np.frombuffer(data if place == 0 else b"", np.uint8)
    having = 1
    while having < len(members):
        outgoing: dict[int, Bytes] = {}
        sizes: dict[int, int] = {}
        if place is not None and place < having and place + having < len(members):
            outgoing[members[place + having]] = received
        if place is not None and having <= place < 2 * having:
            sizes[members[place - having]] = size
        received = next(iter(channel.all_to_all(outgoing, sizes).values()), received)
        having *= 2
    return received.tobytes()


def _decode(payload: bytes) -> _RankMessage:
    """Decode the message of a rank; one of another version counts as another description."""
    try:
        return _rank_messages.decode(payload)
    except msgspec.MsgspecError:
        return _RankMessage("something that cannot be understood here")


def _merge_errors(failed: dict[int, FlexError], world_size: int) -> FlexError:
    """Return one error for all ranks, equal on all of them, that names the ranks that failed."""
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
        # The common next step is printed once.
        groups = {text.removesuffix(f"\n  next: {first.next_step}"): ranks for text, ranks in groups.items()}
    evidence = [f"{format_ranks(ranks)}: {text}" for text, ranks in groups.items()]
    kind = _common_kind(failed.values())
    return kind(
        f"{len(failed)} of {world_size} ranks failed, for different reasons.",
        evidence=evidence,
        next_step=first.next_step if len(steps) == 1 else "Follow the advice of each error above.",
    )


def _common_kind(errors: Iterable[FlexError]) -> type[FlexError]:
    """Return the class of several errors: faults of a checkpoint remain a ``CheckpointError``."""
    kinds = {type(error) for error in errors}
    if len(kinds) == 1:
        return kinds.pop()
    return CheckpointError if all(issubclass(kind, CheckpointError) for kind in kinds) else PeerError


def _merge_path_errors(failed: dict[int, FlexError], world_size: int) -> FlexError:
    """Return one error for ranks whose errors differ in their paths only."""
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
    """Return the parts of an error without its path."""
    path = error.where.partition(", byte ")[0]
    if "/" not in path:
        return type(error), error.what, error.evidence, error.next_step
    # Longer paths that begin with this one are kept.
    own_path = re.compile(re.escape(path) + r"(?![\w/-])")
    what, *evidence = (own_path.sub("each path below", text) for text in (error.what, *error.evidence))
    return type(error), what, tuple(evidence), error.next_step


_messages = msgspec.msgpack.Decoder(dict[int, bytes])


class HostChannel:
    """All ranks of a job.

    Args:
        group: a ``ProcessGroupGloo`` of all ranks, which no other thread uses.
    """

    def __init__(self, group: Any) -> None:
        self.rank, self.world_size = int(group.rank()), int(group.size())
        self._group = group

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payload of every rank, by one or two all-gathers of bytes."""
        return gather_payloads(payload, self._all_gather)

    def all_to_all(self, outgoing: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        """Send and receive bytes by an all-gather."""
        sent = msgspec.msgpack.encode({receiver: data.tobytes() for receiver, data in outgoing.items()})
        everyone = self.all_gather(sent)
        return {sender: np.frombuffer(_messages.decode(everyone[sender])[self.rank], np.uint8) for sender in sizes}

    def _all_gather(self, array: Bytes) -> list[Bytes]:
        import paddle

        place = paddle.CPUPlace()
        gathered = [paddle.empty([array.size], dtype="uint8", device=place) for _ in range(self.world_size)]
        self._group.all_gather(gathered, paddle.to_tensor(array, place=place), True).wait()
        return [tensor.numpy() for tensor in gathered]
