"""A channel for a thread beside the training, over a gloo group of its own.

Its messages are in host memory, so its exchanges launch nothing on a device. Gloo has no all-to-all, and here it is an
all-gather: every rank gets the bytes of all. A save sends such messages only if ranks write onto several disks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.distributed.channel import Bytes, gather_payloads

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
