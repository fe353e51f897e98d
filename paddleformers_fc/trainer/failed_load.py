"""Models that a failed load has left undefined: no step trains them, and no save stores them.

A load compares the checksums of tensors while it fills them, so damage is found after some tensors have changed. The
model is marked before it is filled, and the mark is removed when all of it is filled. All ranks of a load fail or
succeed together, so the mark is the same on all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.trainer import base_fingerprint, dist_tensors

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
    base_fingerprint.forget(model)
    yield
    for one in marked:
        delattr(one, _MARK)


def refuse_undefined(model: Any) -> None:
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
