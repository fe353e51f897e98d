"""Flex checkpoints for the stock ``Trainer`` class and the stock command line, without a subclass.

:func:`install` attaches this package to PaddleFormers' ``Trainer`` (:mod:`.attach`) and adds the options to
PaddleFormers' argument parser: for an argument class of PaddleFormers, the parser fills the one with our options.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from paddleformers_fc.trainer.arguments import FlexTrainingArguments
from paddleformers_fc.trainer.attach import Replacement, attach, detach, replace
from paddleformers_fc.trainer.library import PdArgumentParser, TrainingArguments
from paddleformers_fc.trainer.options import FIELD_NAMES, check_settings, unknown_keys
from paddleformers_fc.trainer.stock_keys import describe, refuse_values
from paddleformers_fc.upstream import LIBRARY
from paddleformers_fc.upstream.hooks import PADDLEFORMERS


def install() -> None:
    """Add ``flex_checkpoint`` to the stock ``Trainer`` and argument parser. A second call has no effect.

    Raises:
        EnvironmentMismatch: the installed PaddleFormers differs from the tested version; no method was replaced.
    """
    attach(_PARSER if LIBRARY == PADDLEFORMERS else ())


def install_options() -> None:
    """Add the options to PaddleFormers' argument parser alone. A second call has no effect."""
    replace(_PARSER)


def uninstall() -> None:
    """Restore all that :func:`install` replaced except ``from_pretrained``, which still notes what it fills."""
    detach()


def with_flex_fields(kind: type[Any]) -> type[Any]:
    """Return the class with our options that takes the place of an argument class of PaddleFormers.

    Args:
        kind: any dataclass that PaddleFormers' parser fills.

    Returns:
        ``FlexTrainingArguments`` for ``TrainingArguments``, ``FlexFinetuningArguments`` for the command line's own
        ``FinetuningArguments``, and every other class unchanged.
    """
    if kind is TrainingArguments:
        return FlexTrainingArguments
    if kind.__module__ == "paddleformers.cli.hparams.finetuning_args" and kind.__name__ == "FinetuningArguments":
        from paddleformers_fc.trainer.cli_arguments import FlexFinetuningArguments

        return FlexFinetuningArguments
    return kind


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

        _refuse_values(args, self)
        self.dataclass_types = [with_flex_fields(kind) for kind in self.dataclass_types]
        _refuse_unknown(args, self.dataclass_types)
        parsed = original(self, args, *others, **kwargs)
        remember_data_arguments(parsed)
        return parsed

    return parse_dict


def _refuse_values(settings: Mapping[str, Any], parser: Any) -> None:
    """Refuse values that PaddleFormers reads as others, or refuses once its arguments have started a process group.

    Raises:
        OptionError: with the first kind of them.
    """
    check_settings(settings)
    if settings.get("flex_checkpoint"):
        refuse_values(settings, describe(parser), is_extended=True)


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


_PARSER: tuple[Replacement, ...] = (
    (PdArgumentParser, "__init__", _constructed_with_our_options),
    (PdArgumentParser, "parse_dict", _parsed_with_our_options),
)
