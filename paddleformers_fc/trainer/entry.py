"""The entry points: the table of replaced methods, and the classes for scripts.

:func:`replaced` lists every method of PaddleFormers that changes. :func:`attach` replaces all of them or none, after it
has checked the hooks of :mod:`paddleformers_fc.upstream`; modules that import more of PaddleFormers are imported after
this check. A Trainer without ``flex_checkpoint: true`` runs the original methods. The entry points attach at different
times:

- ``FlexTrainingArguments(flex_checkpoint=True)``: before a process group exists;
- ``FlexTrainer``, which is PaddleFormers' Trainer: when the name is imported;
- ``FlexTrainerMixin``: when a Trainer class is derived from it;
- :func:`install`: when it is called. PaddleFormers' argument parser then also accepts the options of this package.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from paddleformers_fc import upstream
from paddleformers_fc.errors import EnvironmentMismatch
from paddleformers_fc.trainer import options
from paddleformers_fc.trainer.library import (
    HOOKS,
    LOAD_METHOD,
    NAME,
    PdArgumentParser,
    Trainer,
    TrainingArguments,
    logger,
)
from paddleformers_fc.trainer.options import FIELD_NAMES, FlexFields, check_settings, unknown_keys
from paddleformers_fc.trainer.stock_keys import check_values, describe
from paddleformers_fc.upstream import LIBRARY
from paddleformers_fc.upstream.hooks import PADDLENLP

Method = Callable[..., Any]
Place = tuple[type[Any], str]
"""A class of the library, and the name of one of its methods."""

_originals: dict[Place, Any] = {}
"""The original class attributes."""


def replaced() -> Iterator[tuple[Place, Any]]:
    """Yield every replaced method of the library with its replacement.

    Replacements in the Trainer get the Trainer, the bound original method, and its arguments. Except for the
    constructor, they run only if the Trainer's arguments enable this package.
    """
    from paddleformers_fc.trainer import ema_weights, loading, pretrained, save, startup
    from paddleformers_fc.trainer.library import LoRAModel, PretrainedModel

    methods: dict[str, Method] = {
        "train": loading.train,
        LOAD_METHOD: loading.load,
        "_inner_training_loop": loading.inner_training_loop,
        "_maybe_log_save_evaluate": save.log_save_evaluate,
        "_save_checkpoint": save.save,
        "_sorted_checkpoints": save.sorted_checkpoints,
        "_rotate_checkpoints": save.rotate_checkpoints,
        "save_model": save.save_model_of_slices,
        "_save": save.save_model,
        "evaluate": ema_weights.evaluate,
    }
    construct: Method = startup.init_trainer
    if LIBRARY == PADDLENLP:
        from paddleformers_fc.trainer import nlp_trainer

        construct = nlp_trainer.init_trainer
        methods |= nlp_trainer.METHODS
    yield (Trainer, "__init__"), _method(Trainer.__init__, construct)
    for name, replacement in methods.items():
        yield (Trainer, name), _method(getattr(Trainer, name), replacement, only_when_active=True)
    yield (PretrainedModel, "from_pretrained"), pretrained.replaced_from_pretrained(PretrainedModel)
    yield (LoRAModel, "from_pretrained"), pretrained.replaced_from_adapters(LoRAModel)


def _replaced_in_parser() -> Iterator[tuple[Place, Any]]:
    """Yield the replaced methods of PaddleFormers' argument parser; PaddleNLP's parser needs no change."""
    if LIBRARY != PADDLENLP:
        yield (PdArgumentParser, "__init__"), _method(PdArgumentParser.__init__, _construct_parser)
        yield (PdArgumentParser, "parse_dict"), _method(PdArgumentParser.parse_dict, _parse)


def _method(original: Method, replacement: Method, only_when_active: bool = False) -> Method:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if only_when_active and not options.is_active(self.args):
            return original(self, *args, **kwargs)
        return replacement(self, functools.partial(original, self), *args, **kwargs)

    return method


def attach() -> None:
    """Replace the methods of the Trainer and its models, all of them or none. A second call has no effect.

    Raises:
        EnvironmentMismatch: the installed PaddleFormers differs from the tested version; no method was replaced.
    """
    if (Trainer, "train") not in _originals:
        upstream.require(HOOKS)
        _replace(replaced)


def detach() -> None:
    """Restore all original methods."""
    options.read_natively_by_default()
    while _originals:
        (owner, name), original = _originals.popitem()
        setattr(owner, name, original)


def _replace(replacements: Callable[[], Iterator[tuple[Place, Any]]]) -> None:
    try:
        for (owner, name), replacement in replacements():
            _originals[owner, name] = vars(owner)[name]
            setattr(owner, name, replacement)
    except BaseException:
        detach()
        raise


def install() -> None:
    """Add ``flex_checkpoint`` to the stock ``Trainer`` and argument parser. A second call has no effect.

    This package then also reads open weights, unless training arguments disable it (:mod:`.options`).

    Raises:
        EnvironmentMismatch: the installed PaddleFormers differs from the tested version; no method was replaced.
    """
    attach()
    install_options()
    options.read_by_default()


def install_options() -> None:
    """Add the options to PaddleFormers' argument parser only. A second call has no effect."""
    if (PdArgumentParser, "parse_dict") not in _originals:
        _replace(_replaced_in_parser)


@dataclass
class ActiveFields(FlexFields):
    """The options, which attach this package to the process and choose the reader of open weights.

    Raises:
        OptionError: an option is out of range, or conflicts with ``flex_checkpoint: true``.
        EnvironmentMismatch: ``flex_checkpoint`` is true, and Paddle or PaddleFormers differs from the tested versions.
    """

    def __post_init__(self) -> None:
        if self.flex_checkpoint:
            upstream.require(HOOKS)
            for line in upstream.require_versions(self.flex_unknown_versions):
                logger.warning(f"flex_unknown_versions: warn: {line}. This package is not tested with this version.")
            attach()
        super().__post_init__()
        options.follow(self)


@dataclass
class FlexTrainingArguments(ActiveFields, TrainingArguments):
    """``TrainingArguments`` with the options of :class:`~paddleformers_fc.trainer.options.FlexFields`."""


def __getattr__(name: str) -> Any:
    """Return ``FlexTrainer``, which is the library's Trainer, after attaching this package."""
    if name != "FlexTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attach()
    return Trainer


class FlexTrainerMixin:
    """Mixin for a custom Trainer class: ``class MyTrainer(FlexTrainerMixin, SomeTrainer)``.

    Overridden methods must call ``super()``. ``train(resume_from_checkpoint=True)`` resumes the newest finished
    checkpoint. ``save_model`` writes the model in Hugging Face format, and every rank must call it. ``evaluate`` uses
    the averaged weights under ``flex_ema_evaluate``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Attach this package, and check that its methods take precedence in the class.

        Raises:
            EnvironmentMismatch: the class is not a Trainer of the library, the mixin comes after the Trainer, or the
                library differs from the tested version.
        """
        super().__init_subclass__(**kwargs)
        attach()
        bases = cls.__mro__
        if Trainer in bases and bases.index(FlexTrainerMixin) < bases.index(Trainer):
            return
        if Trainer in bases:
            what = f"{cls.__name__} names FlexTrainerMixin after the Trainer of {NAME}, whose methods take precedence."
        elif LIBRARY != PADDLENLP and any(one.__module__.partition(".")[0] == PADDLENLP for one in bases):
            what = f"FlexTrainerMixin is for the Trainer of {NAME}. For PaddleNLP's Trainer use paddleformers_fc.nlp."
        else:
            what = f"{cls.__name__} is not a Trainer of {NAME}, which FlexTrainerMixin extends."
        raise EnvironmentMismatch(
            what,
            where=f"{cls.__module__}.{cls.__qualname__}",
            evidence=[f"bases: {', '.join(f'{base.__module__}.{base.__qualname__}' for base in cls.__bases__)}"],
            next_step="Write class MyTrainer(FlexTrainerMixin, SomeTrainer), where SomeTrainer is "
            f"{LIBRARY}.trainer.Trainer or a subclass of it.",
        )


# ---- PaddleFormers' argument parser.


def with_flex_fields(kind: type[Any]) -> type[Any]:
    """Return an argument class of PaddleFormers with the options of this package.

    Args:
        kind: any dataclass that PaddleFormers' parser fills.

    Returns:
        ``FlexTrainingArguments`` for ``TrainingArguments``, ``FlexFinetuningArguments`` for the command line's
        ``FinetuningArguments``, and any other class unchanged.
    """
    if kind is TrainingArguments:
        return FlexTrainingArguments
    if kind.__module__ == f"{LIBRARY}.cli.hparams.finetuning_args" and kind.__name__ == "FinetuningArguments":
        # Its module imports this one and the complete command line.
        found: type[Any] = import_module("paddleformers_fc.trainer.cli_arguments").FlexFinetuningArguments
        return found
    return kind


def _construct_parser(parser: Any, native: Method, dataclass_types: Any, **kwargs: Any) -> None:
    kinds = [dataclass_types] if isinstance(dataclass_types, type) else dataclass_types
    native([with_flex_fields(kind) for kind in kinds], **kwargs)


def _parse(parser: Any, native: Method, settings: Mapping[str, Any], *others: Any, **kwargs: Any) -> Any:
    # The command line creates its parser before it runs the file in custom_register_path, and parses afterwards.
    from paddleformers_fc.trainer.documents import remember_data_arguments

    check_settings(settings)
    if settings.get("flex_checkpoint"):
        check_values(settings, describe(parser), is_extended=True)
    parser.dataclass_types = [with_flex_fields(kind) for kind in parser.dataclass_types]
    _check_known(settings, parser.dataclass_types)
    parsed = native(settings, *others, **kwargs)
    remember_data_arguments(parsed)
    return parsed


def _check_known(settings: Any, kinds: list[Any]) -> None:
    """Check for unknown keys if the settings have options of this package.

    PaddleFormers checks them too late, after its arguments have started a process group.

    Raises:
        OptionError: lists all unknown keys.
    """
    names = {str(key) for key in settings}
    known = {one.name for kind in kinds for one in dataclasses.fields(kind) if one.init}
    ours = any(name.startswith("flex_") and not name.startswith("flex_ckpt") for name in names)
    if ours and names - known:
        raise unknown_keys(names - known, known.difference(FIELD_NAMES), {})
