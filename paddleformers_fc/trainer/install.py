"""Flex checkpoints for the stock ``Trainer`` class and the stock command line, without a subclass.

:func:`install` replaces methods of PaddleFormers' ``Trainer`` class by ones that test the arguments first, and adds the
options to PaddleFormers' argument parser. Open weights are read through this package until training arguments decide
otherwise (:mod:`.reader`). :func:`uninstall` restores the originals. A Trainer whose arguments lack
``flex_checkpoint: true`` runs the originals.

Nothing is replaced before the table of :mod:`paddleformers_fc.upstream` has been checked, so the modules that import
more of PaddleFormers than this one are imported after that.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paddleformers_fc import upstream
from paddleformers_fc.trainer import reader
from paddleformers_fc.trainer.arguments import with_flex_fields
from paddleformers_fc.trainer.host import HOOKS, LIBRARY, PADDLEFORMERS, PADDLENLP, PdArgumentParser, Trainer
from paddleformers_fc.trainer.options import FIELD_NAMES, check_stage, unknown_keys

_Replacement = tuple[type[Any], str, Callable[..., Any]]
"""A class, the name of one of its methods, and what makes its replacement out of the original."""

_ABSENT = object()
_originals: dict[tuple[type[Any], str], Any] = {}
"""The attributes of the classes themselves; ``_ABSENT`` for inherited methods."""


def install() -> None:
    """Add ``flex_checkpoint`` to the stock ``Trainer`` and argument parser. A second call has no effect.

    Raises:
        EnvironmentMismatch: the installed PaddleFormers differs from the tested version; no method was replaced.
    """
    if (Trainer, "train") not in _originals:
        upstream.require(HOOKS)
        from paddleformers_fc.trainer import loaders

        _replace([*_trainer_methods(), *(_PARSER if LIBRARY == PADDLEFORMERS else ())])
        loaders.watch()
    reader.read_by_default()


def install_options() -> None:
    """Add the options to PaddleFormers' argument parser alone. A second call has no effect."""
    _replace(_PARSER)


def uninstall() -> None:
    """Restore everything that :func:`install` replaced, except loaders, which still leave marks."""
    reader.read_natively_by_default()
    while _originals:
        (owner, name), original = _originals.popitem()
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _replace(replacements: Iterable[_Replacement]) -> None:
    """Replace methods, all of them or none; those that are replaced already stay."""
    try:
        for owner, name, make in replacements:
            if (owner, name) in _originals:
                continue
            replacement = make(getattr(owner, name))
            _originals[owner, name] = vars(owner).get(name, _ABSENT)
            setattr(owner, name, replacement)
    except BaseException:
        uninstall()
        raise


def _trainer_methods() -> list[_Replacement]:
    """Return the replaced methods of ``Trainer``."""
    return [(Trainer, name, functools.partial(_dispatching, override)) for name, override in _overrides().items()]


def _overrides() -> Mapping[str, Callable[..., Any]]:
    if LIBRARY == PADDLENLP:
        from paddleformers_fc.trainer.nlp_trainer import OVERRIDES

        return OVERRIDES
    from paddleformers_fc.trainer import ema_weights, loading, saving, trainer_init

    return {
        "__init__": trainer_init.init_trainer,
        "train": loading.train,
        "_inner_training_loop": loading.inner_training_loop,
        "_load_flex_checkpoint": loading.load,
        "_load_rng_state": loading.load_rng_state,
        "_save_checkpoint": saving.save,
        "save_model": saving.save_model_of_slices,
        "_save": saving.save_model,
        "_sorted_checkpoints": saving.sorted_checkpoints,
        "_rotate_checkpoints": saving.rotate_checkpoints,
        "evaluate": ema_weights.evaluate,
    }


def _dispatching(override: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Not before: this import watches loaders, which an installation that breaks off must leave alone.
        if isinstance(self, _mixin()):
            return original(self, *args, **kwargs)  # The subclass has tested the arguments already.
        return override(self, functools.partial(original, self), *args, **kwargs)

    return method


def _mixin() -> type[Any]:
    if LIBRARY == PADDLENLP:
        from paddleformers_fc.trainer import nlp_mixin

        return nlp_mixin.FlexTrainerMixin
    from paddleformers_fc.trainer import mixin

    return mixin.FlexTrainerMixin


def _constructed_with_our_options(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, dataclass_types: Any, **kwargs: Any) -> None:
        kinds = [dataclass_types] if isinstance(dataclass_types, type) else dataclass_types
        original(self, [with_flex_fields(kind) for kind in kinds], **kwargs)

    return __init__


def _parsed_with_our_options(original: Callable[..., Any]) -> Callable[..., Any]:
    # The command line makes its parser before it runs the file named by custom_register_path, and parses after it.
    @functools.wraps(original)
    def parse_dict(self: Any, args: Mapping[str, Any], *others: Any, **kwargs: Any) -> Any:
        from paddleformers_fc.trainer.documents import remember_data_arguments

        check_stage(args)
        self.dataclass_types = [with_flex_fields(kind) for kind in self.dataclass_types]
        _refuse_unknown(args, self.dataclass_types)
        parsed = original(self, args, *others, **kwargs)
        remember_data_arguments(parsed)
        return parsed

    return parse_dict


def _refuse_unknown(args: Any, kinds: list[Any]) -> None:
    """Refuse unknown keys beside ours. PaddleFormers refuses them later: its arguments start a process group first.

    Raises:
        OptionError: with all of them.
    """
    names = {str(key) for key in args}
    known = {one.name for kind in kinds for one in dataclasses.fields(kind) if one.init}
    ours = any(name.startswith("flex_") and not name.startswith("flex_ckpt") for name in names)
    if ours and names - known:
        raise unknown_keys(names - known, known.difference(FIELD_NAMES))


_PARSER: tuple[_Replacement, ...] = (
    (PdArgumentParser, "__init__", _constructed_with_our_options),
    (PdArgumentParser, "parse_dict", _parsed_with_our_options),
)
