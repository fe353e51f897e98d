"""Where the weights of a live model come from: the base of adapters, failed loads, and loaders that check nothing.

A model remembers the directory from which this package has filled it, with hashes of its tensors and the identities of
the files. Before adapters are trained, the ranks divide the weight files and hash them, or use the checksums in
``flex_checksums.json``. The fingerprint of the base is a digest of the weights instead if the base was not read from
files, if its tensors have changed, or if the files were replaced.

A load verifies tensors while it fills them, so it may find damage after some have changed. It marks the model first and
removes the mark at the end; marked models are neither trained nor saved. Loads fail or succeed on all ranks together.

PaddleFormers' own loader skips mismatches: it cuts or omits tensors of other shapes. A model that it has filled is
marked as unverified, and a Trainer with ``flex_checkpoint`` rejects such a model. The mark is an attribute of the
layer, so it survives a copy and nesting in another model.

Time: 0.3 s per GiB of a rank, an eighth of the load, after a load and again before adapters are trained. A save of
adapters compares samples of the base: three copies of at most 4,096 elements per base tensor of the rank. Paddle's
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
from paddleformers_fc.errors import MismatchError, OptionError
from paddleformers_fc.execute.memory import host_pieces
from paddleformers_fc.families.description import Base
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.storage.block_checksums import digest_of
from paddleformers_fc.storage.identities import Identities, identities_of, stored_identities
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import count_text, fold
from paddleformers_fc.trainer import description, dist_tensors, library, live_roles, optimizers
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.library import has_adapters, unwrap_model

_SOURCE, _SAMPLES = "_flex_source", "_flex_base_samples"
_SAMPLED = 4096
"""Maximum number of elements of a row that :func:`check_base` compares."""


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


def identify_base(model: Any, channel: Channel, again: bool = False) -> None:
    """Set the fingerprint of a LoRA base model, unless it is set. Every rank must call.

    Args:
        model: any model, or a wrapper of it.
        channel: all ranks of the job.
        again: whether to replace a fingerprint that is set: the base may have changed since.
    Raises:
        FlexError: the same on every rank: a file cannot be read, or the base cannot be mapped.
    """
    model = unwrap_model(model)
    if not has_adapters(model) or (hasattr(model, description.FINGERPRINT) and not again):
        return
    files, location = _files(model, channel)
    if files:
        base = Base(location, files)
    else:
        from paddleformers_fc.execute.digest import digest_live

        weights = optimizers.cut(live_roles.base_weights(model))
        base = Base(tensors=digest_live(weights, describe_model(description.base_model(model)), channel))
    setattr(model, description.FINGERPRINT, base)
    setattr(model, _SAMPLES, _samples(model))
    if channel.rank == 0:
        by = f"{count_text(len(base.files), 'file')} of {base.location}" if base.files else "a digest of its weights"
        library.logger.info(f"The base of the adapters is identified by {by}.")


def check_base(model: Any) -> None:
    """Check that nothing has changed the base of adapters since it was identified; their checkpoints do not contain it.

    The first, middle and last row of every base tensor are compared, up to 4,096 elements of each: hashing all elements
    would take longer than a save of adapters. Tensors that were cast or sliced since are compared from now on.

    Args:
        model: any model, or a wrapper of it.
    Raises:
        MismatchError: a base tensor has changed, on this rank.
    """
    model = unwrap_model(model)
    if not has_adapters(model):
        return
    known, now = getattr(model, _SAMPLES, {}), _samples(model)
    changed = [name for name, one in now.items() if known.get(name, one) != one and known[name][0] == one[0]]
    if changed:
        raise MismatchError(
            f"The base of the adapters has changed: {count_text(len(changed), 'tensor')}. No checkpoint contains it.",
            where="LoRA",
            evidence=fold(changed),
            next_step="Do not change the base while adapters are trained. To train on a merged model, save it with "
            "save_model, and start a new run from it.",
        )
    setattr(model, _SAMPLES, now)


def _samples(model: Any) -> dict[str, tuple[object, bytes]]:
    """Return dtype and shape of every base tensor of this rank, and a digest of some elements."""
    weights = optimizers.cut(live_roles.base_weights(model))
    return {name: _sample(weight.local_tensor) for name, weight in weights.items()}


def _sample(tensor: Any) -> tuple[object, bytes]:
    size = math.prod(tensor.shape)
    rows = max(1, tensor.shape[0]) if tensor.shape else 1
    hasher = xxhash.xxh3_128()
    for row in sorted({0, rows // 2, rows - 1}):
        start = row * (size // rows)
        for piece in host_pieces(tensor, start, min(start + _SAMPLED, size)):
            hasher.update(np.ascontiguousarray(piece).view(np.uint8).data)
    return (str(tensor.dtype), tuple(tensor.shape)), hasher.digest()


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
        what = "its files were replaced" if all(unchanged) else "its tensors have changed"
        library.logger.warning(f"The base of the adapters was read from {source.directory}, and {what} since.")
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

    def read() -> tuple[dict[str, str], bool]:
        recorded = opened.recorded
        found = {name: recorded[name].digest if name in recorded else digest_of(directory / name) for name in mine}
        # Checked after hashing, to detect files that were replaced meanwhile.
        same = identities_of(directory / name for name in opened.files) == stored_identities(source.identities)
        return found, same

    everyone = all_gather_checked(channel, "hashing the base of the adapters", read, tuple[dict[str, str], bool])
    if not all(same for _, same in everyone):
        return {}
    return {name: digest for files, _ in everyone for name, digest in sorted(files.items())}


_UNDEFINED = "_flex_undefined"


@contextmanager
def mark_undefined_until_loaded(model: Any, directory: AnyPath) -> Iterator[None]:
    """Context manager around a load that fills a model; the model stays marked as undefined if the load fails.

    First wait for asynchronous saves and averages that still read live tensors.

    Args:
        model: the ``paddle.nn.Layer`` without wrappers, or a state dict.
        directory: the source, for the error.
    """
    live_roles.finish_reads()
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


_LOADER = "_flex_loader"
_VERIFIED = ""


def note_unverified(model: Any, loader: str) -> None:
    """Mark a model as filled by a loader that does not check for mismatches.

    Args:
        model: a ``paddle.nn.Layer``.
        loader: the loader's call, for the error message.
    """
    setattr(model, _LOADER, loader)


def note_verified(model: Any, completely: bool) -> None:
    """Mark a model as filled by this package.

    Args:
        model: a ``paddle.nn.Layer``.
        completely: whether every tensor was overwritten; this removes the marks of other loaders.
    """
    for layer in model.sublayers(include_self=True) if completely else ():
        layer.__dict__.pop(_LOADER, None)
    if getattr(model, _LOADER, None) is None:
        setattr(model, _LOADER, _VERIFIED)


def is_verified(model: Any) -> bool:
    """Return whether this package has filled a model, and no other loader has."""
    return getattr(model, _LOADER, None) == _VERIFIED


def check_verified(model: Any) -> None:
    """Check that PaddleFormers' loader has filled neither a model nor any layer of it.

    Raises:
        OptionError: with every layer that it has filled.
    """
    layers = model.named_sublayers(include_self=True)
    found = [f"{name or 'the model'}: {source}" for name, one in layers if (source := getattr(one, _LOADER, _VERIFIED))]
    if found:
        raise OptionError(
            "The model's weights were set by a loader that skips what does not fit, and were not checked.",
            where="model",
            evidence=fold(found),
            next_step="Create the training arguments with flex_checkpoint=True, or call paddleformers_fc.install(), "
            "before from_pretrained; or fill the model with paddleformers_fc.load_open_weights(model, directory).",
        )
