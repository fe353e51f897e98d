"""The base of adapters: where its weights were read from, and its fingerprint.

A model keeps the directory from which this package has filled all of it, with a hash of every tensor and the identities
of the files. Before its adapters are trained, the weight files of that directory are hashed, or their recorded
checksums (``flex_checksums.json``) are used. The ranks divide the files among themselves.
The base is identified by a digest of its weights if it was not read from files, if its tensors have changed since, or
if the files were replaced.

Time: 0.3 s per GiB of a rank for the hashes after a load, an eighth of the load itself, and the same once more when
adapters are trained. Paddle's ``inplace_version`` would cost less, but does not count ``set_value``.

Models that a failed load has left undefined: no step trains them, and no save stores them.

A load compares the checksums of tensors while it fills them, so damage is found after some tensors have changed. The
model is marked before it is filled, and the mark is removed when all of it is filled. All ranks of a load fail or
succeed together, so the mark is the same on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import xxhash

from paddleformers_fc.distributed.channel import Channel, all_gather_checked, run_on_all
from paddleformers_fc.errors import MismatchError
from paddleformers_fc.execute.memory import host_pieces
from paddleformers_fc.families.description import Base
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.storage.block_checksums import digest_of
from paddleformers_fc.storage.identities import Identities, identities_of, stored_identities
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer import description, dist_tensors, live_roles, optimizers
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.library import has_adapters, unwrap_model

_SOURCE = "_flex_source"
_READ_BYTES = 8 * 1024 * 1024


class _Source(msgspec.Struct, frozen=True):
    """The files of a model, and its contents when it was read.

    Args:
        directory: the directory.
        identities: of the files.
        digests: of the tensors of this rank, by name.
    """

    directory: AnyPath
    identities: Identities
    digests: Mapping[str, bytes]


def remember(model: Any, directory: AnyPath, identities: Identities) -> None:
    """Note that all weights of a model were read from a directory of open weights.

    Args:
        model: the model, just read.
        directory: the directory.
        identities: of the files that were read.
    """
    weights = live_roles.model_roles(model)[MODEL_STATE]
    digests = {name: _digest(weight.local_tensor) for name, weight in weights.items()}
    setattr(description.base_model(model), _SOURCE, _Source(directory, identities, digests))


def _digest(tensor: Any) -> bytes:
    found = xxhash.xxh3_128()
    for piece in host_pieces(tensor, 0, math.prod(tensor.shape)):
        found.update(np.ascontiguousarray(piece).view(np.uint8).data)
    return found.digest()


def forget(model: Any) -> None:
    """Note that a model is about to be filled. A model with adapters keeps its base, which no load changes."""
    if not has_adapters(model) and hasattr(model, _SOURCE):
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
    if not has_adapters(model) or description.has_base(model):
        return
    files, location = _files(model, channel)
    if files:
        base = Base(location, files)
    else:
        from paddleformers_fc.execute.digest import digest_live

        base = Base(
            tensors=digest_live(
                optimizers.cut(live_roles.base_weights(model)),
                describe_model(description.base_model(model)),
                channel,
            )
        )
    description.set_base(model, base)
    if channel.rank == 0:
        from paddleformers_fc.trainer.library import logger

        of = f"{count_text(len(base.files), 'file')} of {base.location}" if base.files else "its weights, without files"
        logger.info(f"The base of the adapters is identified by {of}.")


def _files(model: Any, channel: Channel) -> tuple[dict[str, str], str]:
    """Return the digests of the files that contain the base, by name, and their directory; none if no files do."""
    source: _Source | None = getattr(description.base_model(model), _SOURCE, None)
    if source is None:
        return {}, ""
    unchanged = all_gather_checked(
        channel, "comparing the base of the adapters", lambda: _is_unchanged(model, source), bool
    )
    found = _file_digests(source, channel) if all(unchanged) else {}
    if not found and channel.rank == 0:
        from paddleformers_fc.trainer.library import logger

        what = "its files were replaced" if all(unchanged) else "its tensors have changed"
        logger.warning(f"The base of the adapters was read from {source.directory}, and {what} since.")
    return found, str(source.directory)


def _is_unchanged(model: Any, source: _Source) -> bool:
    """Return whether the tensors of the base on this rank are those that were read."""
    weights = optimizers.cut(live_roles.base_weights(model))
    return all(_digest(weight.local_tensor) == source.digests.get(name) for name, weight in weights.items())


def _file_digests(source: _Source, channel: Channel) -> dict[str, str]:
    """Return the digests of all files by name; none if a file is not the one that was read."""
    from paddleformers_fc.formats.huggingface import open_huggingface

    directory = source.directory
    opened = run_on_all(channel, "looking at the base of the adapters", lambda: open_huggingface(directory))
    mine = sorted(opened.files)[channel.rank :: channel.world_size]

    def read() -> _Digests:
        recorded = opened.recorded
        found = {name: recorded[name].digest if name in recorded else digest_of(directory / name) for name in mine}
        # After the files were hashed, so that one that was replaced meanwhile is noticed too.
        return _Digests(
            found, identities_of(directory / name for name in opened.files) == stored_identities(source.identities)
        )

    everyone = all_gather_checked(channel, "hashing the base of the adapters", read, _Digests)
    if not all(one.same for one in everyone):
        return {}
    return {name: digest for one in everyone for name, digest in sorted(one.files.items())}


class _Digests(msgspec.Struct):
    """The digests of a rank, and whether it has access to the files that were read."""

    files: dict[str, str]
    same: bool


_MARK = "_flex_undefined"


@contextmanager
def until_filled(model: Any, directory: AnyPath) -> Iterator[None]:
    """Return a block that fills a model, which is undefined if the block fails.

    Args:
        model: the ``paddle.nn.Layer``, without wrappers, or a state dict, whose tensors are marked.
        directory: the source, for the error.
    """
    marked = list(_marked(model))
    for one in marked:
        setattr(one, _MARK, str(directory))
    forget(model)
    yield
    for one in marked:
        delattr(one, _MARK)


def check_defined(model: Any) -> None:
    """Refuse a model that a load has begun to fill and did not finish.

    Raises:
        MismatchError: it is undefined.
    """
    directory = next((getattr(one, _MARK) for one in _marked(model) if hasattr(one, _MARK)), None)
    if directory is not None:
        raise MismatchError(
            "The model's tensors are undefined: a load began to fill them and failed.",
            where=str(directory),
            next_step="Load a whole checkpoint into this model, or start the job again.",
        )


def _marked(model: Any) -> Iterable[Any]:
    """Return the objects that have the mark: a layer, or the tensors of a state dict."""
    return [tensor for _, _, tensor in dist_tensors.leaves(model)] if isinstance(model, Mapping) else [model]
