"""The source of a model's weights: a Trainer refuses a model that PaddleFormers' ``from_pretrained`` has filled.

That loader skips what does not fit: a tensor of another shape is cut or left out, and the job trains. The replaced
``from_pretrained`` (:mod:`.loader_patches`) therefore notes it on the model. Our reader (:mod:`.pretrained`) notes the
models that it has filled. What a script assigns itself is not checked.

The note is an attribute, so that it survives a copy of the model and a model that is put into another one.
"""

from __future__ import annotations

from typing import Any

from paddleformers_fc.errors import OptionError
from paddleformers_fc.mapping.folding import fold

_SOURCE = "_flex_weight_source"
_VERIFIED = ""


def note_unverified(model: Any, loader: str) -> None:
    """Note that a loader has filled a model without a comparison.

    Args:
        model: a ``paddle.nn.Layer``.
        loader: the loader's name and what it has read, for the error.
    """
    setattr(model, _SOURCE, loader)


def note_verified(model: Any, completely: bool) -> None:
    """Note that our reader has filled a model.

    Args:
        model: a ``paddle.nn.Layer``.
        completely: whether no tensor has kept its values; then what other loaders have filled is gone.
    """
    for layer in model.sublayers(include_self=True) if completely else ():
        layer.__dict__.pop(_SOURCE, None)
    if getattr(model, _SOURCE, None) is None:
        setattr(model, _SOURCE, _VERIFIED)


def is_verified(model: Any) -> bool:
    """Return whether our reader has filled a model."""
    return getattr(model, _SOURCE, None) == _VERIFIED


def require_verified(model: Any) -> None:
    """Refuse a model that PaddleFormers' loader has filled, also as a part of it.

    Raises:
        OptionError: with every layer that was filled by it.
    """
    layers = model.named_sublayers(include_self=True)
    found = [f"{name or 'the model'}: {source}" for name, one in layers if (source := getattr(one, _SOURCE, _VERIFIED))]
    if found:
        raise OptionError(
            "The model's weights were set by a loader that skips what does not fit, and were not checked.",
            where="model",
            evidence=fold(found),
            next_step="Create the training arguments with flex_checkpoint=True, or call paddleformers_fc.install(), "
            "before from_pretrained; or fill the model with paddleformers_fc.load_open_weights(model, directory).",
        )
