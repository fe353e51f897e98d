"""What is known of a live model beside its description: statements, adapters and their base, loads, the reference.

A model without a declared family is mapped by the AOA statements of its class, which stock FlexCheckpoint uses too:
``_gen_aoa_config`` and ``_gen_inv_aoa_config``, or a class's overrides of ``gen_aoa_statements`` and
``gen_inv_aoa_statements``. They are evaluated once, for the tensors of all ranks. A checkpoint stores the resulting
rules, so it can be read without the class.

LoRA adapters that cannot be saved and loaded are rejected with every reason. A Trainer checks its adapters when it is
constructed; ``save``, ``load`` and ``LoRAModel.from_pretrained`` check them before they read or write.

A model remembers the directory from which this package has filled it, with hashes of its tensors and the identities of
the files. Before adapters are trained, the ranks divide the weight files and hash them, or use the checksums in
``flex_checksums.json``. The fingerprint of the base is a digest of the weights instead if the base was not read from
files, if its tensors have changed, or if the files were replaced. Time: 0.3 s per GiB of a rank, an eighth of the load,
after a load and again before adapters are trained. Paddle's ``inplace_version`` would be faster, but does not count
``set_value``.

A load verifies tensors while it fills them, so it may find damage after some have changed. It marks the model first and
removes the mark at the end; marked models are neither trained nor saved. Loads fail or succeed on all ranks together.

PaddleFormers' own loader skips mismatches: it cuts or omits tensors of other shapes. A model that it has filled is
marked as unverified, and a Trainer with ``flex_checkpoint`` rejects such a model. The mark is an attribute of the
layer, so it survives a copy and nesting in another model.

The reference model of preference training begins as a copy of the base. A checkpoint contains its *contents*: per
tensor a sum over the elements, which is equal under every layout. The sum does not depend on the order of elements,
because fused tensors are ordered by the tensor-parallel degree. Resuming with another reference model raises an error.
So does ``ref_model_update_steps``, because an updated reference model would be part of the training state. Time: one
pass over the reference model per run, about a second per gigabyte and rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash
from paddle.nn import Layer

from paddleformers_fc.distributed.channel import Channel, all_gather_checked, run_on_all
from paddleformers_fc.errors import MappingError, MismatchError, OptionError
from paddleformers_fc.execute.load import whole_model
from paddleformers_fc.execute.memory import host_pieces
from paddleformers_fc.families import family_for, is_known
from paddleformers_fc.families.description import A, Base
from paddleformers_fc.families.stated import model_ties
from paddleformers_fc.layout.live import describe_roles
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.storage.block_checksums import digest_of
from paddleformers_fc.storage.identities import Identities, identities_of, stored_identities
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import count_text, fold
from paddleformers_fc.trainer import description, library, live_roles, optimizers
from paddleformers_fc.trainer.description import OWN_RULES, describe_model
from paddleformers_fc.trainer.library import has_adapters, unwrap_model
from paddleformers_fc.trainer.options import REFERENCE_UPDATES, check_conflicts

if TYPE_CHECKING:
    from paddleformers_fc.aoa import Program


_FORWARD = "_gen_aoa_config", "gen_aoa_statements"
_INVERSE = "_gen_inv_aoa_config", "gen_inv_aoa_statements"


def check_mapped(model: Any, model_type: str) -> None:
    """Check that a family declares a model type, or that the model or its class has statements.

    Raises:
        MappingError: there is neither.
    """
    if _writer(model, _FORWARD) is None:
        family_for({"model_type": model_type})


def adopt_statements(model: Any, channel: Channel) -> None:
    """Map a model without a declared family by the statements of its class. Every rank must call.

    Models with adapters, and models whose class has no statements, are skipped.

    Args:
        model: the model as it was built, or a wrapper of it.
        channel: all ranks of the job.
    Raises:
        MappingError: the same on every rank: the statements are invalid, cannot be proved or do not fit the model.
    """
    model = unwrap_model(model)
    if getattr(model, "config", None) is None or has_adapters(model) or _writer(model, _FORWARD) is None:
        return
    described = describe_model(model)
    if described.rules is not None or is_known(described.config):
        return
    named = f"No family declares model_type {described.model_type!r}"
    tensors = whole_model(described, partial(live_roles.model_roles, model), channel)

    def evaluate() -> RuleSet:
        from paddleformers_fc.aoa import Program
        from paddleformers_fc.families.class_statements import rules_of_statements

        try:
            forward, inverse = _program(model, _FORWARD) or Program(()), _program(model, _INVERSE)
            return rules_of_statements(tensors, forward, inverse, bool(described.config.get("tie_word_embeddings")))
        except MappingError as error:
            raise MappingError(
                f"{named}, and the AOA statements of the class cannot be used.",
                where=f"{type(model).__module__}.{type(model).__qualname__}",
                evidence=[error.what, *error.evidence],
                next_step="Correct the statements, or declare the family, as docs/add-a-family.md shows.",
            ) from error

    rules = run_on_all(channel, "evaluating the AOA statements of the model", evaluate)
    setattr(model, OWN_RULES, rules)
    if channel.rank == 0:
        ways = "in both directions" if _writer(model, _INVERSE) else "and their inversion"
        library.logger.info(
            f"{named}. The AOA statements of {type(model).__name__} are used {ways}: "
            f"{count_text(len(rules.targets), 'tensor')}, {count_text(len(rules.rules), 'rule')}, proved."
        )


def _writer(model: Any, names: tuple[str, str]) -> Callable[[Any], object] | None:
    """Return the first of these methods that a model or its class has; methods of ``Layer`` itself do not count."""
    kind = model if isinstance(model, type) else type(model)
    for name in names:
        found: Callable[[Any], object] | None = getattr(model, name, None)
        own = getattr(kind, name, None)
        if found is not None and (own is None or own is not getattr(Layer, name, None)):
            return found
    return None


def _program(model: Any, names: tuple[str, str]) -> Program | None:
    from paddleformers_fc.aoa import read_config

    writer = _writer(model, names)
    try:
        return None if writer is None else read_config(writer(model.config))
    except MappingError:
        raise
    except Exception as error:  # A model class may raise anything.
        evidence = [f"{type(error).__name__}: {error}"]
        next_step = "Correct this method of the model's class."
        raise MappingError(f"{names[0]} fails.", evidence=evidence, next_step=next_step) from error


_EXPERT_ATTRIBUTES = ("expert", "no_sync", "color")


def check_adapters(model: Any, channel: Channel) -> None:
    """Check that the adapters of a model can be saved and loaded. Every rank must call.

    Args:
        model: any model, or a wrapper of it.
        channel: all ranks of the job.
    Raises:
        OptionError: the same on every rank; it lists every unsupported option and layer with the reason.
    """
    if has_adapters(unwrap_model(model)):
        run_on_all(channel, "checking the adapters", partial(check_own_adapters, model))


def check_own_adapters(model: Any) -> None:
    """Check that the adapters of a model on this rank, if it has any, can be saved and loaded."""
    model = unwrap_model(model)
    _raise_faults(list(_faults(model)) if has_adapters(model) else [])


def check_trained(model: Any, channel: Channel) -> None:
    """Check that at least one rank trains a tensor of a model with adapters. Every rank must call.

    A single pipeline stage may have no trained tensor.

    Args:
        model: any model, or a wrapper of it.
        channel: all ranks of the job.
    Raises:
        OptionError: the same on every rank.
    """
    model = unwrap_model(model)
    if not has_adapters(model):
        return
    trained = all_gather_checked(
        channel,
        "counting the trained tensors",
        lambda: sum(not parameter.stop_gradient for parameter in model.parameters()),
        int,
    )
    _raise_faults([] if any(trained) else ["target_modules and trainable_modules: no tensor of the model is trained"])


def _raise_faults(faults: Sequence[str]) -> None:
    if faults:
        raise OptionError(
            "flex_checkpoint: true does not support these adapters.",
            where="LoRA",
            evidence=faults,
            next_step="Change the configuration of the adapters, or remove flex_checkpoint.",
        )


def _faults(model: Any) -> Iterator[str]:
    config = model.lora_config
    quantization = getattr(model.config, "quantization_config", None)
    layers = [(name, layer) for name, layer in model.model.named_sublayers()]
    if model.quantized or (quantization is not None and quantization.is_weight_quantize()):
        yield "a quantized base: PaddleFormers stores its weights and scales in kernel-specific layouts"
    if config.loraga:
        yield "loraga: PaddleFormers changes the base when it initialises the adapters, and no file contains the result"
    if config.do_qat:
        yield "do_qat: the quantization scales are not parameters of a declared layer"
    for kind, reason in _LAYERS.items():
        names = [name for name, layer in layers if _is_of(layer, (kind,))]
        if names:
            yield f"{kind} ({names[0]}{', ...' if len(names) > 1 else ''}): {reason}"
    unknown = [(name, layer) for name, layer in layers if _is_unknown(layer)]
    if unknown:
        name, layer = unknown[0]
        more = ", ..." if len(unknown) > 1 else ""
        yield f"{type(layer).__name__} ({name}{more}): unknown class of adapters; known are {', '.join(_SUPPORTED)}"
    averaged = [name for name, layer in layers if _is_averaged(layer)]
    if averaged:
        yield (
            f"expert parallelism: PaddleFormers does not mark adapters of experts ({averaged[0]}, ...) as parameters "
            "of one rank, and averages adapters of different experts; leave experts out of target_modules"
        )
    yield from _split_ties(model)
    merged = [name for name, layer in layers if getattr(layer, "merged", False)]
    if merged:
        yield f"{merged[0]} is merged into its base; call unmerge() of the model"


_LAYERS: Mapping[str, str] = {
    "QuantizationLoRABaseLinear": "its base is quantized",
    "LoRAConv2D": "no model family declares a convolution with adapters",
    "LoRAMoeExperts": "PaddleFormers does not describe the shards of adapters of stacked experts",
    "FleetLoRAMoeExperts": "it needs PaddleFleet's grouped experts, and PaddleFleet is on no public index",
}

# PaddleFleet's subclasses have the same parameters.
_SUPPORTED = (
    "LoRALinear",
    "ColumnParallelLoRALinear",
    "ColumnSequenceParallelLoRALinear",
    "RowParallelLoRALinear",
    "RowSequenceParallelLoRALinear",
)


def _is_unknown(layer: Any) -> bool:
    """Return whether a layer has adapter parameters and its class is in neither table."""
    if _is_of(layer, (*_LAYERS, *_SUPPORTED)):
        return False
    return any("lora_" in name for name, _ in layer.named_parameters(include_sublayers=False))


def _is_of(layer: Any, classes: Sequence[str]) -> bool:
    return any(kind.__name__ in classes for kind in type(layer).__mro__)


def _split_ties(model: Any) -> Iterator[str]:
    """Yield tied tensors that a pipeline, which copies them, trains under only one of their names."""
    patterns = model.lora_config.trainable_modules or ()
    if getattr(model.config, "pipeline_model_parallel_size", 1) <= 1 or not patterns:
        return
    for alias, owner in live_roles.tied(model).items():
        matched = [name for name in (owner, alias) if any(re.fullmatch(text, name) for text in patterns)]
        if len(matched) == 1:
            yield (
                f"trainable_modules: {matched[0]} is trained, and {owner} and {alias} are tied: under pipeline "
                "parallelism they are copies, and the other copy would not change; name both"
            )


def _is_averaged(layer: Any) -> bool:
    """Return whether PaddleFormers averages an adapter over ranks although its weight is an expert of this rank."""
    adapter, weight = getattr(layer, A, None), getattr(layer, "weight", None)
    if adapter is None or weight is None:
        return False
    return any(bool(getattr(weight, name, None)) != bool(getattr(adapter, name, None)) for name in _EXPERT_ATTRIBUTES)


_SOURCE = "_flex_source"


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


def identify_base(model: Any, channel: Channel) -> None:
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

        weights = optimizers.cut(live_roles.base_weights(model))
        base = Base(tensors=digest_live(weights, describe_model(description.base_model(model)), channel))
    setattr(model, description.FINGERPRINT, base)
    if channel.rank == 0:
        by = f"{count_text(len(base.files), 'file')} of {base.location}" if base.files else "a digest of its weights"
        library.logger.info(f"The base of the adapters is identified by {by}.")


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
    return [tensor for _, _, tensor in live_roles.leaves(model)] if isinstance(model, Mapping) else [model]


_LOADER = "_flex_weight_source"
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


_CHUNK_ELEMENTS = 1 << 18
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)


class ReferenceDocument(msgspec.Struct, forbid_unknown_fields=True):
    """``trainer/reference.json``.

    Args:
        contents: tensor -> its dtype, number of elements and sum, as text.
    """

    contents: dict[str, str]


def reference_of(trainer: Any) -> Any:
    """Return the reference model of a Trainer; None if it has none."""
    return getattr(trainer, "ref_model", None)


def check_no_reference_updates(trainer: Any) -> None:
    """Check that a script has not configured updates of the reference model.

    Raises:
        OptionError: with ``ref_model_update_steps``.
    """
    check_conflicts(getattr(trainer, "dpo_config", None), (REFERENCE_UPDATES,))


def check_reference_alike(reference: Any, model: Any) -> None:
    """Check that the reference model was loaded by this package or equals the model.

    PaddleFormers' preference training copies the model into the reference model with ``set_state_dict``, which skips
    mismatches.

    Args:
        reference: the reference model of a Trainer; None if it has none.
        model: the model that is about to be trained.

    Raises:
        MismatchError: with every tensor that differs.
    """
    if reference is None or getattr(reference, _LOADER, None) == _VERIFIED:
        return
    tensors = dict(_tensors(model))
    different = [
        f"{name}: not equal to the model's"
        for name, tensor in _tensors(reference)
        if name not in tensors or not _equal(tensor, tensors[name])
    ]
    if different:
        raise MismatchError(
            "The reference model was not loaded by paddleformers_fc, and differs from the model.",
            where="reference model",
            evidence=fold(different),
            next_step="Load both models from their directories after the training arguments were created with "
            "flex_checkpoint=True.",
        )


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _equal(one: Any, other: Any) -> bool:
    return list(one.shape) == list(other.shape) and np.array_equal(
        one.numpy(), other.astype(one.dtype).numpy(), equal_nan=True
    )


def check_same_reference(
    saved: ReferenceDocument, contents: Mapping[str, str], directory: AnyPath | Path, casts: bool = False
) -> None:
    """Check that a reference model has the contents that a checkpoint records.

    Args:
        saved: the record in the checkpoint.
        contents: the contents of the live model, see :func:`contents_of`.
        directory: the checkpoint.
        casts: whether precisions may differ; only numbers of elements are then compared.

    Raises:
        MismatchError: with every tensor that differs.
    """
    different = list(_differences(saved.contents, contents, casts))
    if different:
        raise MismatchError(
            "The reference model differs from the one that the saved run used.",
            where=str(directory),
            evidence=fold(different),
            next_step="Name the base of that run in model_name_or_path. To train against another reference model, set "
            "ignore_load_lr_and_optim: true, which starts a new run from these weights.",
        )


def _differences(saved: Mapping[str, str], now: Mapping[str, str], casts: bool) -> Iterator[str]:
    for name in sorted({*saved, *now}):
        old, new = saved.get(name, "absent"), now.get(name, "absent")
        if casts and old.partition(" ")[0] != new.partition(" ")[0]:
            old, new = (one.partition(" ")[2].partition(" ")[0] for one in (old, new))  # The numbers of elements.
        if old != new:
            yield f"{name}: saved {old}, now {new}"


class _ShardSum(msgspec.Struct):
    """The sum over one shard of a tensor."""

    name: str
    box: Box
    dtype: str
    elements: int
    total: int


def contents_of(model: Any, channel: Channel) -> dict[str, str]:
    """Return per tensor its dtype, number of elements, and a sum over their bits. Every rank must call.

    Args:
        model: the reference model as it was built.
        channel: all ranks of the job.
    """
    adopt_statements(model, channel)

    def work() -> list[_ShardSum]:
        weights = live_roles.model_roles(model)[MODEL_STATE]
        shards = describe_roles({MODEL_STATE: weights})[MODEL_STATE]
        aliases = model_ties(describe_model(model))  # Only some layouts have copies of tied tensors.
        return [
            _ShardSum(name, shard.box, shard.dtype, shard.size, _total(weights[name].local_tensor, shard.size))
            for name, shard in shards.items()
            if name not in aliases
        ]

    everyone = all_gather_checked(channel, "comparing the reference model", work, list[_ShardSum])
    boxes = {(shard.name, shard.box): shard for shards in everyone for shard in shards}
    totals: dict[str, tuple[str, int, int]] = {}
    for shard in boxes.values():
        _, elements, total = totals.get(shard.name, ("", 0, 0))
        totals[shard.name] = (shard.dtype, elements + shard.elements, (total + shard.total) % 2**64)
    return {name: f"{dtype} {elements} {total:016x}" for name, (dtype, elements, total) in sorted(totals.items())}


def _total(tensor: Any, elements: int) -> int:
    """Return a sum over the mixed bits of every element, modulo 2**64."""
    total = 0
    for part in host_pieces(tensor, 0, elements):
        for start in range(0, part.size, _CHUNK_ELEMENTS):
            chunk = part[start : start + _CHUNK_ELEMENTS]
            bits = chunk.view(f"u{chunk.itemsize}").astype(np.uint64)
            for multiplier in _MULTIPLIERS:
                bits *= np.uint64(multiplier)
                bits ^= bits >> np.uint64(32)
            total += int(bits.sum(dtype=np.uint64))
    return total % 2**64
