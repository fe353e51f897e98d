"""The curves that TensorBoard and Weights & Biases have written, as JSON: ``python reporter_readers.py DIRECTORY``."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Scalars = dict[str, list[tuple[int, float]]]


def of_tensorboard(directory: Path) -> Scalars:
    """The curves of a directory of event files, by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def of_wandb(directory: Path) -> Scalars:
    """The curves of the one offline run below a directory, over the steps that the Trainer logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    found: Scalars = {}
    for data in _records(file.read_bytes()):
        record: Any = Record()
        record.ParseFromString(data)
        row = {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in record.history.item}
        step = row.get("train/global_step")
        for name, value in row.items():
            if step is not None and isinstance(value, (int, float)):
                found.setdefault(name, []).append((step, value))
    return found


def _records(raw: bytes) -> Iterator[bytes]:
    """Yield the records of a run: a log of LevelDB, in blocks of 32 KiB, after a header of seven bytes."""
    assert raw.startswith(b":W&B")
    at, record = 7, b""
    while len(raw) - at >= 7:
        if (left := -at % (32 << 10)) and left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", raw, at)
        record += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # A whole record, or the last part of one.
            yield record
            record = b""


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    print(json.dumps({"tensorboard": of_tensorboard(directory), "wandb": of_wandb(directory)}))
