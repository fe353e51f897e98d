"""The base of adapters: where its weights were read from, and its fingerprint.

A model remembers the directory from which this package has filled all of it. When its adapters are about to be trained,
the files of weights in that directory are hashed, or their recorded checksums are taken, where the directory has any
(``flex_checksums.json``). The ranks share the files. The base of a model that was not read from files is identified by
a digest of its weights.
"""

from __future__ import annotations

from typing import Any

import xxhash

from paddleformers_fc.distributed.channel import Channel, all_gather_checked, run_on_all
from paddleformers_fc.execute.live_digest import digest_live
from paddleformers_fc.families.adapters import Base
from paddleformers_fc.formats.huggingface import open_huggingface
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.ranges import RangeReader
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer import lora, slices, state
from paddleformers_fc.trainer.description import describe
from paddleformers_fc.trainer.host import logger
from paddleformers_fc.trainer.host_models import LoRAModel, unwrap_model

_SOURCE = "_flex_source"
_READ_BYTES = 8 * 1024 * 1024


def remember(model: Any, directory: AnyPath) -> None:
    """Note that all weights of a model were read from a directory of open weights."""
    setattr(lora.base_model(model), _SOURCE, directory)


def forget(model: Any) -> None:
    """Note that a model is about to be filled. A model with adapters keeps its base, which no load changes."""
    if not isinstance(model, LoRAModel) and hasattr(model, _SOURCE):
        delattr(model, _SOURCE)


def identify_once(model: Any, channel: Channel) -> None:
    """Set the fingerprint of the base of a model with adapters, unless it is set. Every rank must call.

    Args:
        model: any model, or a wrapper of it.
        channel: all ranks of the job.
    Raises:
        FlexError: the same on every rank: a file cannot be read, or the base cannot be mapped.
    """
    model = unwrap_model(model)
    if not isinstance(model, LoRAModel) or lora.has_base(model):
        return
    directory = getattr(lora.base_model(model), _SOURCE, None)
    if directory is None:
        base = Base(
            tensors=digest_live(slices.cut(state.base_weights(model)), describe(lora.base_model(model)), channel)
        )
    else:
        base = Base(str(directory), _file_digests(directory, channel))
    lora.set_base(model, base)
    if channel.rank == 0:
        of = f"{count_text(len(base.files), 'file')} of {base.location}" if base.files else "its weights, without files"
        logger.info(f"The base of the adapters is identified by {of}.")


def _file_digests(directory: AnyPath, channel: Channel) -> dict[str, str]:
    opened = run_on_all(channel, "looking at the base of the adapters", lambda: open_huggingface(directory))
    mine = sorted(opened.files)[channel.rank :: channel.world_size]

    def read() -> dict[str, str]:
        recorded = opened.recorded
        with RangeReader() as reader:
            return {name: recorded[name].digest if name in recorded else hashed(reader, name) for name in mine}

    def hashed(reader: RangeReader, name: str) -> str:
        state, buffer, size = xxhash.xxh3_128(), memoryview(bytearray(_READ_BYTES)), opened.file_sizes[name]
        for begin in range(0, size, _READ_BYTES):
            chunk = buffer[: min(_READ_BYTES, size - begin)]
            reader.read_into(directory / name, begin, chunk)
            state.update(chunk)
        return state.hexdigest()

    everyone = all_gather_checked(channel, "hashing the base of the adapters", read, dict[str, str])
    return {name: digest for digests in everyone for name, digest in sorted(digests.items())}
