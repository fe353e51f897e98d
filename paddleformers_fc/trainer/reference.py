"""Check that preference training resumes with the same reference model.

The reference model begins as a copy of the base. A checkpoint contains its *contents*: per tensor a sum over the
elements, which is equal under every layout. The sum does not depend on the order of elements, because fused tensors are
ordered by the tensor-parallel degree. Resuming with another reference model raises an error. So does
``ref_model_update_steps``, because an updated reference model would be part of the training state.

Time: one pass over the reference model per run, about a second per gigabyte and rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.distributed.channel import Channel, all_gather_checked
from paddleformers_fc.errors import MismatchError
from paddleformers_fc.execute.memory import host_pieces
from paddleformers_fc.families.stated import model_ties
from paddleformers_fc.layout.live import describe_roles
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import fold
from paddleformers_fc.trainer import live_roles, weight_sources
from paddleformers_fc.trainer.conflicts import REFERENCE_UPDATES, check_conflicts
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.own_statements import adopt_statements

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
    if reference is None or weight_sources.is_verified(reference):
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
            "The reference model does not match the checkpoint.",
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
