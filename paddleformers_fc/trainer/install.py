"""Flex checkpoints for the stock ``Trainer`` class and the stock command line, without a subclass.

:func:`install` replaces the methods of :data:`OVERRIDES` on PaddleFormers' ``Trainer`` class by ones that ask the
arguments first, and lets PaddleFormers' argument parser know our options. :func:`uninstall` puts the originals back. A
Trainer whose arguments do not say ``flex_checkpoint: true`` runs the originals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from paddleformers.trainer import PdArgumentParser, Trainer

from paddleformers_fc.trainer import loading, saving, seam
from paddleformers_fc.trainer.arguments import with_flex_fields
from paddleformers_fc.trainer.mixin import FlexTrainerMixin

OVERRIDES: dict[str, Callable[..., Any]] = {
    "__init__": seam.construct,
    "train": loading.train,
    "_inner_training_loop": loading.inner_training_loop,
    "_load_flex_checkpoint": loading.load,
    "_load_rng_state": loading.load_rng_state,
    "_save_checkpoint": saving.save,
    "save_model": saving.save_model_of_slices,
    "_save": saving.save_model,
    "_sorted_checkpoints": saving.sorted_checkpoints,
    "_rotate_checkpoints": saving.rotate_checkpoints,
}
"""The methods of ``Trainer`` that ask first, and what they do instead."""

_originals: dict[tuple[type[Any], str], Any] = {}


def install() -> None:
    """Make the stock ``Trainer`` and argument parser know ``flex_checkpoint``. A second call does nothing."""
    if _originals:
        return
    for name, override in OVERRIDES.items():
        _replace(Trainer, name, _asking(Trainer.__dict__[name], override))
    _replace(PdArgumentParser, "__init__", _constructed_with_our_options(PdArgumentParser.__init__))
    _replace(PdArgumentParser, "parse_dict", _parsed_with_our_options(PdArgumentParser.parse_dict))


def uninstall() -> None:
    """Put everything back that :func:`install` replaced."""
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()


def _replace(owner: type[Any], name: str, replacement: Callable[..., Any]) -> None:
    _originals[owner, name] = owner.__dict__[name]
    setattr(owner, name, replacement)


def _asking(original: Callable[..., Any], override: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, FlexTrainerMixin):
            return original(self, *args, **kwargs)  # The subclass has asked already.
        return override(self, functools.partial(original, self), *args, **kwargs)

    return method


def _constructed_with_our_options(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, dataclass_types: Any, **kwargs: Any) -> None:
        kinds = [dataclass_types] if isinstance(dataclass_types, type) else dataclass_types
        original(self, [with_flex_fields(kind) for kind in kinds], **kwargs)

    return __init__


def _parsed_with_our_options(original: Callable[..., Any]) -> Callable[..., Any]:
    # The command line makes its parser before it runs the file named by custom_register_path, and parses after it.
    @functools.wraps(original)
    def parse_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.dataclass_types = [with_flex_fields(kind) for kind in self.dataclass_types]
        return original(self, *args, **kwargs)

    return parse_dict
