"""The origin of a model's weights: marks of other loaders, and the refusal of models with marks.

PaddleFormers' and Paddle's loaders skip mismatches: a tensor of another shape is cut or omitted, and the job trains.
Each of them is therefore patched to mark the layers or tensors that it fills (:mod:`.loader_patches`). Our reader
removes the marks of those that it fills (:mod:`.pretrained`). A Trainer with ``flex_checkpoint: true`` refuses a model
with marks. A model that was built from a configuration alone has none. Values that a script assigns tensor by tensor
leave none either.

Marks are attributes, so that they survive a copy of the model and a model that is put into another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from paddleformers_fc.errors import OptionError
from paddleformers_fc.mapping.folding import fold

_MARK = "_flex_loaded_by"
_ITSELF = "the model"


def mark(filled: Any, loader: str) -> None:
    """Note that a loader other than ours has filled a layer or a tensor.

    Args:
        filled: a ``paddle.nn.Layer`` or a ``paddle.Tensor``.
        loader: the loader's name and its source, for the error.
    """
    setattr(filled, _MARK, loader)


def clear(model: Any) -> None:
    """Remove the marks of a model that our reader has filled completely."""
    for _, found in _parts(model):
        if hasattr(found, _MARK):
            delattr(found, _MARK)


def loaded_by_others(model: Any) -> list[str]:
    """Return the parts of a model that other loaders have filled, one line each.

    A part inside another one that the same loader has filled is left out.
    """
    lines: dict[str, str] = {}
    for name, found in _parts(model):
        loader = getattr(found, _MARK, None)
        if loader is not None and not any(lines.get(above) == loader for above in _above(name)):
            lines[name] = loader
    return [f"{name or _ITSELF}: {loader}" for name, loader in lines.items()]


def refuse_unchecked(model: Any) -> None:
    """Refuse a model whose weights another loader has set.

    Args:
        model: the model of a Trainer.

    Raises:
        OptionError: with every part that another loader has set.
    """
    found = loaded_by_others(model)
    if found:
        raise OptionError(
            "The model's weights were set by a loader that skips what does not fit, and were not checked.",
            where="model",
            evidence=fold(found),
            next_step="Create the training arguments with flex_checkpoint=True, or call paddleformers_fc.install(), "
            "before from_pretrained; or fill the model with paddleformers_fc.load_open_weights(model, directory).",
        )


def refuse_other_reference(reference: Any, model: Any) -> None:
    """Refuse a reference model that another loader has set, unless its weights are those of the trained model.

    PaddleFormers' preference training copies the model into the reference model with ``set_state_dict``, which skips
    mismatches.

    Args:
        reference: the reference model of a Trainer; None if it has none.
        model: the model that is about to be trained.

    Raises:
        OptionError: with every tensor that differs.
    """
    if reference is None or not loaded_by_others(reference):
        return
    tensors = dict(_tensors(model))
    apart = [
        f"{name}: not equal to the model's"
        for name, tensor in _tensors(reference)
        if name not in tensors or not _equal(tensor, tensors[name])
    ]
    if apart:
        raise OptionError(
            "The reference model was set by a loader that skips what does not fit, and is not the model.",
            where="reference model",
            evidence=fold(apart),
            next_step="Load both models from their directories after the training arguments were created with "
            "flex_checkpoint=True.",
        )


def _parts(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the layers of a model, outer ones first, then its tensors, by name."""
    yield from model.named_sublayers(include_self=True)
    yield from _tensors(model)


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _above(name: str) -> Sequence[str]:
    """Return the names of the layers that a part is in; the model itself has an empty one."""
    pieces = name.split(".")
    return [".".join(pieces[:end]) for end in range(len(pieces))] if name else []


def _equal(one: Any, other: Any) -> bool:
    return list(one.shape) == list(other.shape) and np.array_equal(
        one.numpy(), other.astype(one.dtype).numpy(), equal_nan=True
    )
