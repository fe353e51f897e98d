"""How bytes get from some ranks to others: between threads, and between real ranks over Paddle's own groups."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddleformers_fc.distributed import channel as channels
from paddleformers_fc.distributed.channel import (
    ALONE,
    MAX_TOTAL_BYTES,
    Channel,
    all_gather_checked,
    broadcast,
    gather_and_keep,
    job_channel,
    run_on_all,
)
from paddleformers_fc.errors import (
    CheckpointError,
    Corrupt,
    FlexError,
    FormatError,
    OptionError,
    PeerError,
    StorageError,
)
from paddleformers_fc.storage.files import refused
from tests.cli.test_main import python
from tests.execute.simulated import ThreadChannel, job, succeed
from tests.harness.on_ranks import on_ranks


def test_a_message_that_cannot_be_encoded_is_an_error_on_every_rank() -> None:
    def work(channel: Any) -> None:
        message: object = {1: object()} if channel.rank == 1 else {}
        gather_and_keep(channel, "describing", lambda: (message, None), object)

    outcomes = job(3, work)
    assert all("TypeError while describing" in str(outcome) and "on rank 1" in str(outcome) for outcome in outcomes)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
READ_ONLY = OSError(errno.EROFS, os.strerror(errno.EROFS))


def failing(*refusals: tuple[str, str, OSError, int]) -> FlexError:
    """What every rank raises where each was refused something: to do what, where, why, and at which byte."""
    return merged(*(refused(action, Path(path), error, offset=byte) for action, path, error, byte in refusals))


def merged(*errors: FlexError) -> FlexError:
    """What every rank raises where each has an error."""

    def work(channel: Any) -> None:
        def fail() -> None:
            raise errors[channel.rank]

        run_on_all(channel, "saving", fail)

    outcomes = job(len(errors), work)
    assert len({outcome.to_wire() for outcome in outcomes}) == 1
    return outcomes.error()


def test_ranks_that_fail_alike_at_paths_of_their_own_have_one_reason() -> None:
    error = failing(*(("write", f"/run/rank-{rank}", FULL, 4096 * rank) for rank in range(3)))
    assert isinstance(error, StorageError)
    assert error.what == "The operating system refused to write each path below: No space left on device."
    assert error.where == "on every rank"
    places = [f"rank {rank}: /run/rank-{rank}, byte {4096 * rank}" for rank in range(3)]
    assert error.evidence == ("errno 28 (ENOSPC)", *places)
    assert error.render().count("next:") == 1
    many = failing(*(("write", f"/run/rank-{rank}", FULL, 0) for rank in range(12)))
    assert many.evidence[-1] == "5 more paths on other ranks"
    assert len(many.evidence) == 9


def test_a_next_step_that_ranks_share_is_reported_once_and_others_stay_with_their_ranks() -> None:
    error = failing(("write", "/run/a", FULL, 0), ("sync", "/run/b", FULL, 0))
    assert "for different reasons" in error.what
    assert error.render().count("Free space on this file system") == 1
    text = failing(("write", "/run/a", FULL, 0), ("write", "/run/b", READ_ONLY, 0)).render()
    assert text.count("Free space on this file system") == text.count("mounted read-only") == 1


@pytest.mark.parametrize(
    ("kinds", "common"),
    [((Corrupt, Corrupt), Corrupt), ((Corrupt, FormatError), CheckpointError), ((Corrupt, OptionError), PeerError)],
)
def test_errors_of_several_ranks_are_raised_as_their_common_class(
    kinds: tuple[type[FlexError], ...], common: type[FlexError]
) -> None:
    error = merged(*(kind(f"Fault {number}.") for number, kind in enumerate(kinds)))
    assert type(error) is common
    assert error.evidence == ("rank 0: Fault 0.", "rank 1: Fault 1.")


def test_an_error_of_another_library_travels_with_what_was_being_done() -> None:
    with pytest.raises(PeerError, match="KeyError while saving: 'step'"):
        run_on_all(ALONE, "saving", lambda: {}["step"])


def test_a_process_alone_passes_on_to_itself() -> None:
    array = np.arange(3, dtype=np.uint8)
    assert ALONE.all_to_all({0: array}, {0: 3}) == {0: array}
    assert ALONE.all_to_all({}, {}) == {}


def started() -> Channel:
    """Return the channel of a job whose ranks have found each other."""
    import paddle.distributed as dist

    dist.init_parallel_env()
    return job_channel()


@on_ranks(4)
def test_real_ranks_receive_what_is_for_them_whatever_its_length() -> None:
    channel = started()
    rank = channel.rank
    for nbytes in (1, 1 << 20):  # Each of the first two ranks sends to the next one.
        outgoing = {rank + 1: np.full(nbytes, rank + 1, np.uint8)} if rank < 2 else {}
        arrived = channel.all_to_all(outgoing, {rank - 1: nbytes} if rank in (1, 2) else {})
        assert {source: array.tolist() for source, array in arrived.items()} == (
            {rank - 1: [rank] * nbytes} if rank in (1, 2) else {}
        )
    texts = [bytes([one]) * length for one, length in enumerate((5, 3000, 0, 1016))]
    assert channel.gather("a test", texts[rank]) == texts
    length = 3 << 20  # Three messages are longer than a round.
    mine = bytes([rank]) * (length if rank else 0)
    everyone = all_gather_checked(channel, "describing", lambda: mine, bytes, to=2)
    assert everyone == ([b"", *(bytes([one]) * length for one in (1, 2, 3))] if rank == 2 else [])
    assert broadcast(channel, "telling", lambda: mine, bytes, source=1) == b"\1" * length


@on_ranks(3)
def test_real_ranks_unite_the_marks_of_all_and_leave_them_if_one_fails() -> None:
    channel = started()
    marks = np.zeros(5, np.uint8)

    def work() -> tuple[int, None]:
        marks[channel.rank] = 1
        return channel.rank, None

    assert gather_and_keep(channel, "planning", work, int, marks=marks)[0] == [0, 1, 2]
    assert marks.tolist() == [1, 1, 1, 0, 0]

    def fail() -> tuple[int, None]:
        marks[4] = channel.rank
        return 1 // channel.rank, None

    with pytest.raises(PeerError, match="ZeroDivisionError"):
        gather_and_keep(channel, "planning", fail, int, marks=marks)
    assert marks.tolist() == [1, 1, 1, 0, channel.rank]


@pytest.mark.parametrize(
    ("error", "text"), [(FULL, "No space left on device"), (None, "not doing the same thing")], ids=["fail", "differ"]
)
def test_ranks_whose_marks_have_different_lengths_report_their_own_errors_first(
    error: OSError | None, text: str
) -> None:
    def describe() -> tuple[int, None]:
        if error is not None:
            raise error
        return 1, None

    def work(channel: ThreadChannel) -> None:
        gather_and_keep(channel, "planning", describe, int, marks=np.zeros(3 + channel.rank, np.uint8))

    assert all(text in str(outcome) for outcome in job(2, work))


@pytest.mark.parametrize(
    ("messages", "sent"),
    [(["same"] * 4, []), (["one", "same", "same", "same"], [9]), (["a", "b", "a", "b"], [4]), ([""] * 4, [])],
)
def test_ranks_with_equal_messages_send_them_once(messages: list[str], sent: list[int]) -> None:
    def work(channel: ThreadChannel) -> tuple[list[str], list[int]]:
        return all_gather_checked(channel, "describing", lambda: messages[channel.rank], str), channel.sizes

    frames = 16 + 4 * 12
    assert succeed(4, work) == [(messages, [frames, *sent])] * 4


@on_ranks(2)
def test_messages_that_do_not_fit_into_memory_are_refused_with_their_sizes() -> None:
    channel = started()
    with pytest.raises(PeerError, match="describing shards") as caught:
        all_gather_checked(channel, "describing shards", lambda: bytes([channel.rank]) * (MAX_TOTAL_BYTES + 1), bytes)
    assert caught.value.evidence == ("rank 0 sends the longest, 50,331,654 bytes; all send 100,663,308 bytes",)
    assert channel.gather("a test", b"") == [b"", b""]


def test_one_message_for_all_may_be_longer_than_those_of_all_ranks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_TOTAL_BYTES", 100)
    monkeypatch.setattr(channels, "MAX_MESSAGE_BYTES", 1000)

    def work(channel: ThreadChannel) -> tuple[int, bool]:
        arrived = broadcast(channel, "reading the metadata", lambda: bytes(900), bytes)
        with pytest.raises(PeerError, match=r"reading a log are too large: the longest exceeds 1,000 bytes"):
            broadcast(channel, "reading a log", lambda: bytes(1000), bytes)
        with pytest.raises(PeerError, match=r"describing shards are too large.* all others exceed 100 bytes"):
            all_gather_checked(channel, "describing shards", lambda: bytes([channel.rank] * 120), bytes)
        return len(arrived), any(arrived)

    assert succeed(2, work) == [(900, False)] * 2


DECODING = """
import sys, threading, types
from paddleformers_fc.distributed.channel import decoder_of

# Annotations are texts, as in the package: Python's own code resolves them, and threads take turns in it.
SOURCE = "from __future__ import annotations\\nimport msgspec\\nMessage0 = int\\n" + "".join(
    f"class Message{n + 1}(msgspec.Struct):\\n"
    + "".join(f"    {name}: list[Message{n}] = []\\n" for name in "abcdef")
    for n in range(12)
)


def decode(start, kind):
    start.wait()
    decoder_of(kind).decode(b"\\x81\\xa1a\\x91\\x80")


sys.setswitchinterval(1e-6)
for number in range(40):
    module = sys.modules[f"messages{number}"] = types.ModuleType(f"messages{number}")
    exec(SOURCE, module.__dict__)
    start = threading.Barrier(4)
    threads = [threading.Thread(target=decode, args=(start, module.Message12)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_decode_a_new_kind_of_message_at_once_do_not_end_the_process() -> None:
    assert python("-c", DECODING).stderr == ""
