"""Exchange typed messages between all ranks of a job, and raise the same error on all of them.

:func:`gather_and_keep` runs work on every rank and exchanges the messages that it returns. If the work fails on any
rank, a second exchange carries the errors and all ranks raise the same one, so no rank waits in a collective for a
failed rank. :func:`all_gather_checked`, :func:`run_on_all` and :func:`broadcast` are simpler forms. No message is a
pickle.

Cost of an exchange: a max all-reduce of 12 bytes per rank (48 KiB at 4,096 ranks) with the length and digest of each
message. The messages follow in rounds of 4 MiB, by a broadcast, a reduce or an all-reduce; equal messages are sent
once. The backend's rings and trees carry them, so no rank opens connections to thousands of others. Before memory is
allocated, the exchange fails if a message exceeds :data:`MAX_MESSAGE_BYTES`, or the others :data:`MAX_TOTAL_BYTES`.
"""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
import xxhash

from paddleformers_fc.errors import CheckpointError, FlexError, PeerError, from_wire

_MAX_VALUES = 8
"""Maximum number of values in one line of a report."""


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
    """Return values with their ranks: ``8 on ranks 0-2; 9 on rank 3``. The rarest value comes last.

    Args:
        values: the values by rank.
    """
    holders: dict[str, list[int]] = {}
    for rank, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        holders.setdefault(value, []).append(rank)
    lines = [f"{value} on {format_ranks(ranks)}" for value, ranks in sorted(holders.items(), key=_largest_group_first)]
    if len(lines) > _MAX_VALUES:
        lines[_MAX_VALUES - 1 :] = [f"{len(lines) - _MAX_VALUES + 1} more values on other ranks"]
    return "; ".join(lines)


def _largest_group_first(entry: tuple[str, list[int]]) -> tuple[int, int]:
    return -len(entry[1]), entry[1][0]


def escape_text(text: str) -> str:
    """Escape surrogates, which occur in file names of arbitrary bytes, so that UTF-8 can encode the text."""
    return text.encode("utf-8", "backslashreplace").decode()


Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""Bytes in transit, one-dimensional."""

_M = TypeVar("_M")
_T = TypeVar("_T")

MAX_TOTAL_BYTES = 48 << 20
"""Maximum total bytes of the messages in one exchange without the longest: they grow with the number of ranks."""

MAX_MESSAGE_BYTES = 1 << 30
"""Maximum bytes of one message, such as the metadata of a checkpoint that one rank has read."""

_ROUND_BYTES = 4 << 20
_FRAME = struct.Struct("<I8s")
_LONGEST = 0xFFFFFFFF
NO_HEAD = bytes(8)
"""The head of an exchange that compares nothing."""
NO_MARKS: Bytes = np.empty(0, np.uint8)
_REPORT_HEAD = b"\xff" * 8
"""The head of an exchange of errors."""

Payload = bytes | memoryview


class Channel(Protocol):
    """The collectives over all ranks of a job."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def gather(
        self, doing: str, payload: bytes, head: bytes = NO_HEAD, to: int | None = None, marks: Bytes = NO_MARKS
    ) -> list[Payload] | None:
        """Return the payload of every rank, by rank. Every rank must call.

        Args:
            doing: description of the exchange, for errors.
            payload: this rank's payload, of any length.
            head: eight bytes. If ranks pass different heads, no payload is exchanged and None is returned.
            to: the only rank that needs the payloads; other ranks may get empty ones.
            marks: flags, equally many on every rank with this head. Changed in place to the maximum over all ranks.
        Raises:
            PeerError: the same on every rank: the payloads are too large.
        """

    def all_to_all(self, outgoing: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        """Send bytes to some ranks and receive bytes from some. Every rank must call.

        Args:
            outgoing: bytes by receiver.
            sizes: number of bytes to receive, by sender; must match what the sender passes.
        Returns:
            bytes by sender.
        """

    def unite(self, array: Bytes, source: int | None, to: int | None) -> Bytes:
        """Return the element-wise maximum of an array over all ranks. Every rank must call.

        Args:
            array: this rank's array, writable and contiguous, equally long on all ranks; its elements are undefined
                afterwards.
            source: the only rank whose array is not zero; None if there may be several.
            to: the only rank that needs the maximum; None if all do.
        """

    def share(self, arrays: Mapping[int, Bytes]) -> dict[int, Bytes]:
        """Give the arrays of some ranks to all ranks. Every rank must call.

        Args:
            arrays: one array per sending rank, in the same order on all ranks: this rank's own, and zeros of the right
                length to receive the others. They are writable, contiguous and not empty, and undefined afterwards.
        Returns:
            the array of each sending rank, by rank.
        """


class ConsistencyFacts(Protocol):
    """Facts that must be equal on every rank of an operation."""

    @property
    def digest(self) -> bytes:
        """Digest of this rank's facts, never empty."""

    def mismatch_error(self, channel: Channel) -> FlexError:
        """Return the error for ranks whose digests differ. Every rank must call."""


class _RankReport(msgspec.Struct):
    """What one rank reports if an exchange fails.

    Args:
        doing: description of the work.
        error: the error in wire form; empty after success.
        digest: digest of the consistency facts; empty without them.
    """

    doing: str
    error: str = ""
    digest: bytes = b""


_BUILDING = threading.Lock()
_rank_reports = msgspec.msgpack.Decoder(_RankReport)


class LocalChannel:
    """The channel of a job of one process."""

    rank = 0
    world_size = 1

    def gather(
        self, doing: str, payload: bytes, head: bytes = NO_HEAD, to: int | None = None, marks: Bytes = NO_MARKS
    ) -> list[Payload]:
        """Return this rank's payload."""
        return [payload]

    def all_to_all(self, outgoing: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        """Return the bytes that this rank sends to itself."""
        return {rank: outgoing[rank] for rank in sizes}

    def unite(self, array: Bytes, source: int | None, to: int | None) -> Bytes:
        """Return the array."""
        return array

    def share(self, arrays: Mapping[int, Bytes]) -> dict[int, Bytes]:
        """Return the arrays."""
        return dict(arrays)


ALONE = LocalChannel()
"""The channel of one process. It has no state, so it is shared."""


class CollectiveChannel:
    """A channel that needs only one collective, :meth:`unite`.

    Args:
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def unite(self, array: Bytes, source: int | None, to: int | None) -> Bytes:
        """Return the maximum of an array over all ranks, as :meth:`Channel.unite`."""
        raise NotImplementedError

    def share(self, arrays: Mapping[int, Bytes]) -> dict[int, Bytes]:
        """Return an array of each of some ranks by a broadcast from each, as :meth:`Channel.share`."""
        return {rank: self.unite(array, rank, None) for rank, array in arrays.items()}

    def gather(
        self, doing: str, payload: bytes, head: bytes = NO_HEAD, to: int | None = None, marks: Bytes = NO_MARKS
    ) -> list[Payload] | None:
        """Return the payload of every rank, as :meth:`Channel.gather`."""
        frames = self._exchange_frames(payload, head)
        if frames is None:
            return None
        senders: dict[bytes, int] = {}
        first = [senders.setdefault(frame, rank) for rank, frame in enumerate(frames)]
        lengths = [_FRAME.unpack(frame)[0] * (first[rank] == rank) for rank, frame in enumerate(frames)]
        ends = np.cumsum([0, *lengths])
        _check_sizes(doing, ends)
        if marks.size:
            marks[:] = self.unite(marks, None, None)
        holders = [rank for rank, length in enumerate(lengths) if length]
        if len(senders) == 1 or (to is not None and holders == [to]):
            everything: Payload = payload if first[self.rank] == self.rank or len(senders) == 1 else b""
        else:
            own = payload if first[self.rank] == self.rank else b""
            everything = self._in_rounds(own, ends, holders[0] if len(holders) == 1 else None, to)
        if to not in (None, self.rank):
            return [b""] * self.world_size
        rows = memoryview(everything)
        return [rows[ends[rank] : ends[rank + 1]] for rank in first]

    def _exchange_frames(self, payload: bytes, head: bytes) -> list[bytes] | None:
        """Return the frame of every rank, equal for equal payloads; None if heads differ."""
        digest = xxhash.xxh3_64_digest(payload) if payload else NO_HEAD
        frame = np.frombuffer(_FRAME.pack(min(len(payload), _LONGEST), digest), np.uint8)
        own = np.zeros(2 * len(NO_HEAD) + self.world_size * frame.size, np.uint8)
        # The maxima of a number and its complement are complements only if all ranks have the same number.
        heads, frames = own[: 2 * len(NO_HEAD)].reshape(2, -1), own[2 * len(NO_HEAD) :].reshape(-1, frame.size)
        heads[0] = np.frombuffer(head, np.uint8)
        heads[1], frames[self.rank] = ~heads[0], frame
        united = self.unite(own, None, None)
        heads, frames = united[: heads.size].reshape(2, -1), united[heads.size :].reshape(-1, frame.size)
        return [one.tobytes() for one in frames] if (heads[0] == ~heads[1]).all() else None

    def _in_rounds(self, payload: bytes, ends: Bytes, source: int | None, to: int | None) -> Payload:
        """Return the concatenated payloads of all ranks."""
        total, first = int(ends[-1]), int(ends[self.rank])
        received = np.empty(total if to in (None, self.rank) else 0, np.uint8)
        for low in range(0, total, _ROUND_BYTES):
            array = np.zeros(min(_ROUND_BYTES, total - low), np.uint8)
            part = np.frombuffer(payload, np.uint8)[max(low - first, 0) : max(low - first + array.size, 0)]
            array[max(first - low, 0) :][: part.size] = part
            united = self.unite(array, source, to)
            received[low : low + array.size] = united[: received.size]
        return received.data


def _check_sizes(doing: str, ends: Bytes) -> None:
    """Check that messages are not too large, before memory for them is allocated."""
    sizes = np.diff(ends)
    longest = sizes.max()
    if longest > MAX_MESSAGE_BYTES or ends[-1] - longest > MAX_TOTAL_BYTES:
        raise PeerError(
            f"The messages of {sizes.size} ranks for {doing} are too large: the longest exceeds "
            f"{MAX_MESSAGE_BYTES:,} bytes, or all others exceed {MAX_TOTAL_BYTES:,} bytes together.",
            where=f"a job of {sizes.size} ranks",
            evidence=[f"rank {sizes.argmax()} sends the longest, {longest:,} bytes; all send {ends[-1]:,} bytes"],
            next_step="Report this with the size of the model and the layout of the job.",
        )


class PaddleChannel(CollectiveChannel):
    """The channel of a running Paddle job, over its default group."""

    def __init__(self) -> None:
        import paddle.distributed as dist

        super().__init__(int(dist.get_rank()), int(dist.get_world_size()))

    def unite(self, array: Bytes, source: int | None, to: int | None) -> Bytes:
        """Return the maximum of an array over all ranks, with one collective; in host memory in place."""
        import paddle.distributed as dist

        tensor = _tensor_of(array, is_sent=source in (None, self.rank))
        if source is not None:
            dist.broadcast(tensor, src=source)
        elif to is not None:
            dist.reduce(tensor, dst=to, op=dist.ReduceOp.MAX)
        else:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return array if _is_on_host() or to not in (None, self.rank) else tensor.numpy()

    def all_to_all(self, outgoing: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        """Send and receive bytes with one all-to-all."""
        import paddle.distributed as dist

        # Each rank also sends itself one byte, because not every backend supports a collective of zero bytes.
        own = [outgoing[self.rank]] if self.rank in outgoing else []
        parts = {**outgoing, self.rank: np.concatenate([*own, np.zeros(1, np.uint8)])}
        coming = [sizes.get(rank, 0) + (rank == self.rank) for rank in self._ranks]
        arrived: Bytes = np.empty(sum(coming), np.uint8)
        target = _tensor_of(arrived, is_sent=False)
        dist.alltoall_single(
            out_tensor=target,
            in_tensor=_tensor_of(np.concatenate([parts[rank] for rank in sorted(parts)])),
            in_split_sizes=[parts[rank].size if rank in parts else 0 for rank in self._ranks],
            out_split_sizes=coming,
        )
        arrived, ends = arrived if _is_on_host() else target.numpy(), np.cumsum(coming)
        return {rank: arrived[ends[rank] - coming[rank] :][:size] for rank, size in sizes.items()}

    @property
    def _ranks(self) -> range:
        return range(self.world_size)


def _is_on_host() -> bool:
    """Return whether tensors are in host memory, where a tensor and an array can share it."""
    import paddle

    return bool(paddle.device.get_device() == "cpu")


def _tensor_of(array: Bytes, is_sent: bool = True) -> Any:
    """Return a tensor of an array's shape, with its elements if they are sent; on a host in its memory."""
    import paddle

    if _is_on_host():
        return paddle.from_dlpack(array)
    return paddle.to_tensor(array) if is_sent else paddle.empty(array.shape, dtype=str(array.dtype))


def job_channel() -> Channel:
    """Return the channel of the running job, without timeouts."""
    import paddle.distributed as dist

    return PaddleChannel() if dist.is_initialized() and dist.get_world_size() > 1 else ALONE


def gather_and_keep(
    channel: Channel,
    doing: str,
    work: Callable[[], tuple[_M, _T]],
    kind: type[_M],
    consistency: ConsistencyFacts | None = None,
    to: int | None = None,
    marks: Bytes = NO_MARKS,
) -> tuple[list[_M], _T]:
    """Run work on every rank, and return the messages of all ranks if it succeeded on all of them.

    Args:
        channel: all ranks; every rank must call.
        doing: description of the work; must be equal on every rank.
        work: returns this rank's message and its local result. If it changes anything, the caller must undo that after
            an error.
        kind: type of the message; anything that msgspec encodes.
        consistency: facts that must be equal on all ranks. A mismatch takes precedence over other errors.
        to: the only rank that needs the messages; all ranks if None.
        marks: flags, equally many on every rank. The work sets this rank's flags; the call replaces them by the union
            over all ranks.
    Returns:
        the messages by rank, empty on ranks that do not need them, and this rank's local result. Equal messages are
        the same object.
    Raises:
        FlexError: the same on every rank: facts or descriptions differ, or the work failed on some ranks.
    """

    def encoded() -> tuple[bytes, _T]:
        message, kept = work()
        return msgspec.msgpack.encode(message), kept

    payloads, kept = _agree(channel, doing, encoded, consistency, to, marks)
    if to not in (None, channel.rank):
        return [], kept
    decoder = decoder_of(kind)
    distinct = [bytes(one) for one in payloads]
    decoded = {one: decoder.decode(one) for one in set(distinct)}
    return [decoded[one] for one in distinct], kept


def decoder_of(kind: type[_M]) -> msgspec.msgpack.Decoder[_M]:
    """Return a decoder of messages of a type.

    A lock is needed because msgspec 0.22 builds its description of a class lazily: another thread that decodes the
    same class at that moment reads the unfinished description and crashes the process.
    """
    with _BUILDING:
        return msgspec.msgpack.Decoder(kind)


class Part(msgspec.Struct, frozen=True):
    """Local work of a rank that ends with an exchange.

    Args:
        doing: as for :func:`gather_and_keep`.
        work: as for :func:`gather_and_keep`, or for :func:`broadcast` if there is a source.
        kind: as for :func:`gather_and_keep`.
        source: the only rank that has a message; None if all have one.
        to: the only rank that needs the messages; None if all do.
    """

    doing: str
    work: Callable[[], Any]
    kind: type[Any]
    source: int | None = None
    to: int | None = None


Parts: TypeAlias = Generator[Part, Any, _T]
"""A generator that yields parts and receives the result or the error of each exchange."""


def exchange_part(parts: Parts[Any], part: Part, channel: Channel) -> Part:
    """Run a part, exchange its result, and return the next part. Every rank must call.

    Raises:
        StopIteration: with the result of the last part.
        FlexError: the same on every rank.
    """
    try:
        result: Any
        if part.source is None:
            result = gather_and_keep(channel, part.doing, part.work, part.kind, to=part.to)
        else:
            result = broadcast(channel, part.doing, part.work, part.kind, source=part.source)
    except BaseException as error:
        return parts.throw(error)
    return parts.send(result)


def run_parts(parts: Parts[_T], channel: Channel) -> _T:
    """Run all parts, and return the result of the generator. Every rank must call."""
    try:
        part = next(parts)
        while True:
            part = exchange_part(parts, part, channel)
    except StopIteration as ended:
        return cast("_T", ended.value)


def all_gather_checked(
    channel: Channel,
    doing: str,
    work: Callable[[], _M],
    kind: type[_M],
    consistency: ConsistencyFacts | None = None,
    to: int | None = None,
) -> list[_M]:
    """Return the messages of all ranks, like :func:`gather_and_keep` without a local result."""
    return gather_and_keep(channel, doing, lambda: (work(), None), kind, consistency, to)[0]


def run_on_all(channel: Channel, doing: str, work: Callable[[], _T], consistency: ConsistencyFacts | None = None) -> _T:
    """Return this rank's result if the work succeeded on all ranks, like :func:`gather_and_keep` without messages."""
    return _agree(channel, doing, lambda: (b"", work()), consistency)[1]


def broadcast(
    channel: Channel,
    doing: str,
    work: Callable[[], _M],
    kind: type[_M],
    consistency: ConsistencyFacts | None = None,
    source: int = 0,
) -> _M:
    """Run work on one rank, and return its result on all ranks.

    Args:
        channel: all ranks; every rank must call.
        doing: description of the work, as for :func:`gather_and_keep`.
        work: returns the message; called on ``source``.
        kind: type of the message; anything that msgspec encodes.
        consistency: as for :func:`gather_and_keep`.
        source: the rank that has the message, equal on every rank.
    Raises:
        FlexError: the same on every rank, as :func:`gather_and_keep`.
    """

    def encoded() -> tuple[bytes, None]:
        return msgspec.msgpack.encode(work()) if channel.rank == source else b"", None

    payloads, _ = _agree(channel, doing, encoded, consistency)
    return decoder_of(kind).decode(payloads[source])


def _agree(
    channel: Channel,
    doing: str,
    work: Callable[[], tuple[bytes, _T]],
    consistency: ConsistencyFacts | None,
    to: int | None = None,
    marks: Bytes = NO_MARKS,
) -> tuple[list[Payload], _T]:
    """Run work on every rank, and return the payloads of all ranks if it succeeded on all of them."""
    failure: Exception | None = None
    kept: _T | None = None
    payload = b""
    report = _RankReport(escape_text(doing))
    try:
        payload, kept = work()
    except Exception as error:  # The other ranks wait in the exchange below, so they must receive every error.
        failure, report.error = error, _wire_form(error, report.doing)
    if consistency is not None and channel.world_size > 1:
        try:
            report.digest = consistency.digest
        except Exception as error:  # An error of the work takes precedence.
            failure, report.error = failure or error, report.error or _wire_form(error, report.doing)
    head = NO_HEAD if failure else xxhash.xxh3_64_digest(f"{report.doing}\0{marks.size}\0".encode() + report.digest)
    payloads = channel.gather(doing, b"" if failure else payload, head, to, NO_MARKS if failure else marks)
    if payloads is None or failure is not None:
        raise _disagreement(channel, report, consistency) from failure
    return payloads, cast("_T", kept)


def _disagreement(channel: Channel, report: _RankReport, consistency: ConsistencyFacts | None) -> FlexError:
    """Return the error to raise if a rank has failed, or if ranks do different things. Every rank must call."""
    if len(report.error) > MAX_TOTAL_BYTES // (2 * channel.world_size):
        what = from_wire(report.error).what
        report.error = PeerError(what, next_step="Read the complete error in the log of that rank.").to_wire()
    gathered = channel.gather(report.doing, msgspec.msgpack.encode(report), _REPORT_HEAD)
    everyone = [_rank_reports.decode(payload) for payload in gathered or ()]
    if consistency is not None and all(one.digest for one in everyone) and len({one.digest for one in everyone}) > 1:
        return consistency.mismatch_error(channel)
    descriptions = [one.doing for one in everyone]
    if len(set(descriptions)) != 1 or not any(one.error for one in everyone):
        return PeerError(
            "The ranks are not doing the same thing.",
            where=f"a job of {channel.world_size} ranks",
            evidence=[group_by_value(descriptions) or f"not every rank is {report.doing}"],
            next_step="Start every rank with the same software, arguments and data, so that all save together.",
        )
    failed = {rank: from_wire(one.error) for rank, one in enumerate(everyone) if one.error}
    return _merge_errors(failed, channel.world_size)


def _wire_form(error: Exception, doing: str) -> str:
    """Return an error in wire form; errors of other packages become a ``PeerError``."""
    if not isinstance(error, FlexError):
        error = PeerError(
            f"{type(error).__name__} while {doing}: {error}", next_step="Read the traceback in the log of that rank."
        )
    return error.to_wire()


def raise_failures(channel: Channel, errors: Sequence[str], cause: BaseException | None = None) -> None:
    """Raise the errors of all ranks that failed as one error.

    Args:
        channel: all ranks.
        errors: the errors by rank, in wire form; empty after success. Equal on all ranks.
        cause: this rank's own error.
    Raises:
        FlexError: the same on every rank.
    """
    failed = {rank: from_wire(text) for rank, text in enumerate(errors) if text}
    if failed:
        raise _merge_errors(failed, channel.world_size) from cause


def _merge_errors(failed: dict[int, FlexError], world_size: int) -> FlexError:
    """Return one error, equal on all ranks, that names the ranks that failed."""
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
        groups = {text.removesuffix(f"\n  next: {first.next_step}"): ranks for text, ranks in groups.items()}
    evidence = [f"{format_ranks(ranks)}: {text}" for text, ranks in groups.items()]
    kind = _common_kind(failed.values())
    return kind(
        f"{len(failed)} of {world_size} ranks failed, for different reasons.",
        evidence=evidence,
        next_step=first.next_step if len(steps) == 1 else "Follow the advice of each error above.",
    )


def _common_kind(errors: Iterable[FlexError]) -> type[FlexError]:
    """Return the class for several errors: ``CheckpointError`` if all of them are faults of a checkpoint."""
    kinds = {type(error) for error in errors}
    if len(kinds) == 1:
        return kinds.pop()
    return CheckpointError if all(issubclass(kind, CheckpointError) for kind in kinds) else PeerError


def _merge_path_errors(failed: dict[int, FlexError], world_size: int) -> FlexError:
    """Return one error for ranks whose errors differ only in their paths."""
    first = failed[min(failed)]
    kind, what, evidence, next_step = _without_path(first)
    places: dict[str, list[int]] = {}
    for rank, error in failed.items():
        places.setdefault(error.where, []).append(rank)
    lines = [f"{format_ranks(ranks)}: {where}" for where, ranks in places.items()]
    if len(lines) > _MAX_VALUES:
        lines[_MAX_VALUES - 1 :] = [f"{len(lines) - _MAX_VALUES + 1} more paths on other ranks"]
    who = "every rank" if len(failed) == world_size else format_ranks(failed)
    return kind(what[:1].upper() + what[1:], where=f"on {who}", evidence=[*evidence, *lines], next_step=next_step)


def _without_path(error: FlexError) -> tuple[type[FlexError], str, tuple[str, ...], str]:
    """Return the parts of an error without its path."""
    path = error.where.partition(", byte ")[0]
    if "/" not in path:
        return type(error), error.what, error.evidence, error.next_step
    # Do not replace longer paths that begin with this one.
    own_path = re.compile(re.escape(path) + r"(?![\w/-])")
    what, *evidence = (own_path.sub("each path below", text) for text in (error.what, *error.evidence))
    return type(error), what, tuple(evidence), error.next_step
