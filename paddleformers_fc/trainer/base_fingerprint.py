"""The fingerprint of a LoRA base model, and models that a failed load has left undefined.

A model remembers the directory from which this package has filled it, with hashes of its tensors and the identities of
the files. Before adapters are trained, the ranks divide the weight files and hash them, or use the checksums in
``flex_checksums.json``. The fingerprint is a digest of the weights instead if the base was not read from files, if its
tensors have changed, or if the files were replaced.

A load verifies tensors while it fills them, so it may find damage after some have changed. It marks the model first and
removes the mark at the end; marked models are neither trained nor saved. Loads fail or succeed on all ranks together.

Time: 0.3 s per GiB of a rank, an eighth of the load, after a load and again before adapters are trained. Paddle's
``inplace_version`` would be faster, but does not count ``set_value``.
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
    """The files that a model was read from, and digests of this rank's tensors by name."""

    directory: AnyPath
    identities: Identities
    digests: Mapping[str, bytes]


def remember(model: Any, directory: AnyPath, identities: Identities) -> None:
    """Remember that all weights of a model were read from a directory of open weights.

    Args:
        model: the model, directly after the read.
        directory: the directory.
        identities: identities of the files that were read.
    """
    weights = live_roles.model_roles(model)[MODEL_STATE]
    digests = {name: _digest(weight.local_tensor) for name, weight in weights.items()}
    setattr(description.base_model(model), _SOURCE, _Source(directory, identities, digests))


def _digest(tensor: Any) -> bytes:
    hasher = xxhash.xxh3_128()
    for piece in host_pieces(tensor, 0, math.prod(tensor.shape)):
        hasher.update(np.ascontiguousarray(piece).view(np.uint8).data)
    return hasher.digest()


def forget(model: Any) -> None:
    """Forget the source of a model before it is filled. Models with adapters keep it: no load changes their base."""
    if not has_adapters(model) and hasattr(model, _SOURCE):
        delattr(model, _SOURCE)


def identify_once(model: Any, channel: Channel) -> None:
    """Set the fingerprint of a LoRA base model, unless it is set. Every rank must call.

    Args:
        model: any model, or a wrapper of it.
        channel: all ranks of the job.
    Raises:
        FlexError: the same on every rank: a file cannot be read, or the base cannot be mapped.
    """
    model = unwrap_model(model)
    if not has_adapters(model) or hasattr(model, description.FINGERPRINT):
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
    setattr(model, description.FINGERPRINT, base)
    if channel.rank == 0:
        from paddleformers_fc.trainer.library import logger

        by = f"{count_text(len(base.files), 'file')} of {base.location}" if base.files else "a digest of its weights"
        logger.info(f"The base of the adapters is identified by {by}.")


def _files(model: Any, channel: Channel) -> tuple[dict[str, str], str]:
    """Return the digests of the base's files by name, and their directory; empty if no files contain the base."""
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
    """Return whether the base tensors of this rank have not changed since they were read."""
    weights = optimizers.cut(live_roles.base_weights(model))
    return all(_digest(weight.local_tensor) == source.digests.get(name) for name, weight in weights.items())


def _file_digests(source: _Source, channel: Channel) -> dict[str, str]:
    """Return the digests of all files by name; empty if a file was replaced since it was read."""
    from paddleformers_fc.formats.huggingface import open_huggingface

    directory = source.directory
    opened = run_on_all(channel, "looking at the base of the adapters", lambda: open_huggingface(directory))
    mine = sorted(opened.files)[channel.rank :: channel.world_size]

    def read() -> _FileDigests:
        recorded = opened.recorded
        found = {name: recorded[name].digest if name in recorded else digest_of(directory / name) for name in mine}
        # Checked after hashing, to detect files that were replaced meanwhile.
        same = identities_of(directory / name for name in opened.files) == stored_identities(source.identities)
        return _FileDigests(found, same)

    everyone = all_gather_checked(channel, "hashing the base of the adapters", read, _FileDigests)
    if not all(one.unchanged for one in everyone):
        return {}
    return {name: digest for one in everyone for name, digest in sorted(one.files.items())}


class _FileDigests(msgspec.Struct):
    """The file digests of one rank, and whether all files are unchanged as this rank sees them."""

    files: dict[str, str]
    unchanged: bool


_UNDEFINED = "_flex_undefined"


@contextmanager
def mark_undefined_until_loaded(model: Any, directory: AnyPath) -> Iterator[None]:
    """Context manager around a load that fills a model; the model stays marked as undefined if the load fails.

    Args:
        model: the ``paddle.nn.Layer`` without wrappers, or a state dict.
        directory: the source, for the error.
    """
    marked = list(_markable(model))
    for one in marked:
        setattr(one, _UNDEFINED, str(directory))
    forget(model)
    yield
    for one in marked:
        delattr(one, _UNDEFINED)


def check_defined(model: Any) -> None:
    """Check that no failed load has left a model undefined.

    Raises:
        MismatchError: the model is undefined.
    """
    directory = next((getattr(one, _UNDEFINED) for one in _markable(model) if hasattr(one, _UNDEFINED)), None)
    if directory is not None:
        raise MismatchError(
            "The model's tensors are undefined: a load began to fill them and failed.",
            where=str(directory),
            next_step="Load a complete checkpoint into this model, or start the job again.",
        )


def _markable(model: Any) -> Iterable[Any]:
    """Return the objects that a mark is set on: a layer, or the tensors of a state dict."""
    return [tensor for _, _, tensor in dist_tensors.leaves(model)] if isinstance(model, Mapping) else [model]
