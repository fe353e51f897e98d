"""Attach this package to the stock ``Trainer`` class: replace its methods by ones that test the arguments first.

:func:`attach` replaces them, :func:`detach` restores the originals. A Trainer whose arguments lack ``flex_checkpoint:
true`` runs the originals. Open weights are read through this package until training arguments decide otherwise
(:mod:`.options`).

The table of :mod:`paddleformers_fc.upstream` is checked before the first replacement. Modules that import more of
PaddleFormers than this one are therefore imported after the check.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paddleformers_fc import upstream
from paddleformers_fc.trainer import options
from paddleformers_fc.trainer.library import HOOKS, Trainer
from paddleformers_fc.upstream.hooks import PADDLENLP

Replacement = tuple[type[Any], str, Callable[..., Any]]
"""A class, the name of one of its methods, and a function from the original to its replacement."""

_ABSENT = object()
_originals: dict[tuple[type[Any], str], Any] = {}
"""The attributes of the classes themselves; ``_ABSENT`` for inherited methods."""


def attach(others: Iterable[Replacement] = ()) -> None:
    """Replace the methods of the stock ``Trainer``, all of them or none. A second call has no effect.

    Args:
        others: replaced with them; those that are replaced already stay.

    Raises:
        EnvironmentMismatch: the installed PaddleFormers differs from the tested version; no method was replaced.
    """
    if (Trainer, "train") in _originals:
        replace(others)
    else:
        upstream.require(HOOKS)
        from paddleformers_fc.trainer import adapter_files

        methods = [(Trainer, name, functools.partial(_dispatching, override)) for name, override in overrides().items()]
        replace([*methods, *others])
        adapter_files.watch()
    options.read_by_default()


def detach() -> None:
    """Restore all originals except ``from_pretrained``, which still notes the models that it fills."""
    options.read_natively_by_default()
    while _originals:
        (owner, name), original = _originals.popitem()
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def replace(replacements: Iterable[Replacement]) -> None:
    """Replace methods, all of them or none; those that are replaced already stay."""
    try:
        for owner, name, make in replacements:
            if (owner, name) in _originals:
                continue
            replacement = make(getattr(owner, name))
            _originals[owner, name] = vars(owner).get(name, _ABSENT)
            setattr(owner, name, replacement)
    except BaseException:
        detach()
        raise


def overrides() -> Mapping[str, Callable[..., Any]]:
    """Return the replacements of the methods of ``Trainer`` by name.

    A replacement gets the Trainer, the bound method that it replaces, and the arguments.
    """
    from paddleformers_fc.trainer import ema_weights, loading, saving, trainer_init

    if upstream.LIBRARY == PADDLENLP:
        from paddleformers_fc.trainer.nlp_trainer import OVERRIDES as own
    else:
        own = {
            "__init__": trainer_init.init_trainer,
            "_load_flex_checkpoint": loading.load,
            "save_model": saving.save_model_of_slices,
        }
    return {
        **own,
        "train": loading.train,
        "_inner_training_loop": loading.inner_training_loop,
        "_load_rng_state": loading.load_rng_state,
        "_save_checkpoint": saving.save,
        "_save": saving.save_model,
        "_sorted_checkpoints": saving.sorted_checkpoints,
        "_rotate_checkpoints": saving.rotate_checkpoints,
        "evaluate": ema_weights.evaluate,
    }


class Overriding:
    """The base of Trainer classes that call the overrides before any method of the stock Trainer."""


def _dispatching(override: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, Overriding):
            return original(self, *args, **kwargs)
        return override(self, functools.partial(original, self), *args, **kwargs)

    return method
