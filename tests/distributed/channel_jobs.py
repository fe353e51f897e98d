"""Jobs that run inside rank processes: what goes through the channel of a real job."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paddleformers_fc.distributed.channel import Channel


def started() -> Channel:
    """The channel of a job whose ranks have found each other."""
    import paddle.distributed as dist

    from paddleformers_fc.distributed.channel import job_channel

    dist.init_parallel_env()
    return job_channel()


def started_beside() -> Channel:
    """The channel of a background thread of such a job."""
    from paddleformers_fc.trainer.job_state import background_communicator

    started()
    return background_communicator(0, 30.0)


def pass_on_in_a_ring(nbytes: int, beside: bool = False) -> list[int]:
    """Every rank but the last gives ``nbytes`` times its number to the next; what arrived, and from whom."""
    import numpy as np

    channel = started_beside() if beside else started()
    rank, last = channel.rank, channel.world_size - 1
    outgoing = {rank + 1: np.full(nbytes, rank + 1, np.uint8)} if rank < last else {}
    arrived = channel.all_to_all(outgoing, {rank - 1: nbytes} if rank else {})
    return [value for source, array in arrived.items() for value in (source, array.size, *set(array.tolist()))]


def gather_texts(lengths: list[int], beside: bool = False) -> list[int]:
    """Every rank gives as many bytes of its number; their lengths, and whether they are those that were given."""
    channel = started_beside() if beside else started()
    texts = channel.all_gather(bytes([channel.rank]) * lengths[channel.rank])
    return [*map(len, texts), int(all(set(text) <= {rank} for rank, text in enumerate(texts)))]


def exchange_on_two_threads(rounds: int) -> bool:
    """Two threads of every rank exchange texts at the same time, each over a channel of its own; whether all are right.

    A Trainer with another timeout gets another communicator of the second thread's group.
    """
    import threading

    from paddleformers_fc.trainer.job_state import background_communicator

    channels = [started(), started_beside()]
    wrong: list[str] = []

    def exchange(name: str, channel: Channel) -> None:
        for number in range(rounds):
            expected = [f"{name} {number} {rank}".encode() * (1 + 300 * (number % 2)) for rank in range(2)]
            if channel.all_gather(expected[channel.rank]) != expected:
                wrong.append(f"{name} {number}")

    threads = [threading.Thread(target=exchange, args=(f"thread {n}", one)) for n, one in enumerate(channels)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    exchange("another timeout", background_communicator(0, 31.0))
    return not wrong


def spread_among(members: list[int], text: str) -> str:
    """The text on a rank after the first member has sent it to the others."""
    from paddleformers_fc.distributed.channel import broadcast

    channel = started()
    data = text.encode() if channel.rank == members[0] else b""
    return broadcast(channel, data, len(text.encode()), members).decode()


def load_once(source: str) -> list[int]:
    """Load a checkpoint on every rank, each byte read once; bytes read and received, and whether anything is wrong."""
    from pathlib import Path

    from paddleformers_fc.execute.load import load_checkpoint
    from paddleformers_fc.execute.opening import open_on_all_ranks
    from paddleformers_fc.execute.read_pool import ReadOptions
    from tests.execute.simulated import MODEL, canonical, live, same_values

    channel = started()
    roles = live(canonical(), 1, channel.rank, empty=True)
    checkpoint = open_on_all_ranks(Path(source), channel)
    report = load_checkpoint(checkpoint, roles, MODEL, channel, ReadOptions(once=True))
    wrong = not same_values(roles, live(canonical(), 1, channel.rank))
    return [report.bytes_read, report.bytes_received, int(wrong)]
