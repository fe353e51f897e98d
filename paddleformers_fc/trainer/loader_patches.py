"""Patches of the loaders that put weights into models: PaddleFormers' ``from_pretrained`` and Paddle's own.

:func:`watch` replaces them once per process by loaders that mark the layers and tensors that they fill
(:mod:`.origin`). If :mod:`.open_weights_reader` has chosen this package, ``from_pretrained`` reads through it instead
(:mod:`.pretrained`).
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import paddle
from paddle.distributed.flex_checkpoint.dcp import load_state_dict as dcp
from paddle.nn import Layer

from paddleformers_fc.errors import OptionError
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer import adapter_files, open_weights_reader, origin, pretrained
from paddleformers_fc.trainer.library_models import LoRAModel, PretrainedModel, model_utils


@functools.cache
def watch() -> None:
    """Replace the loaders by ones that leave marks. A second call does nothing.

    Layers that exist already are marked, because their loader is unknown.
    """
    for found in gc.get_objects():
        if issubclass(type(found), Layer):
            origin.mark(found, "built before paddleformers_fc could see which loader fills it")
    PretrainedModel.from_pretrained = classmethod(
        _from_pretrained(PretrainedModel.__dict__["from_pretrained"].__func__)
    )
    LoRAModel.from_pretrained = classmethod(_from_adapters(LoRAModel.__dict__["from_pretrained"].__func__))
    setting = _marking_layer(Layer.set_state_dict)
    Layer.set_state_dict = Layer.set_dict = Layer.load_dict = setting
    # Every call of Paddle's loader reaches one of these two, also if it was imported before.
    dcp.local_load_state_dict = _marking_tensors(dcp.local_load_state_dict)
    dcp.is_sharded_state_dict = _marking_tensors(dcp.is_sharded_state_dict)
    model_utils.faster_set_state_dict = _marking_layer(model_utils.faster_set_state_dict)


def _from_pretrained(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        options = open_weights_reader.options()
        if options is not None:
            if args:
                raise OptionError(
                    "from_pretrained with flex_checkpoint: true does not support positional arguments of the model.",
                    where=f"{cls.__name__}.from_pretrained",
                    evidence=[f"{count_text(len(args), 'argument')} after the path"],
                    next_step="Pass them as keyword arguments.",
                )
            return pretrained.from_pretrained(cls, pretrained_model_name_or_path, options, kwargs)
        model = original(cls, pretrained_model_name_or_path, *args, **kwargs)
        if isinstance(model, Layer):
            origin.mark(model, f"{cls.__name__}.from_pretrained({str(pretrained_model_name_or_path)!r})")
        return model

    return from_pretrained


def _from_adapters(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_pretrained(cls: Any, model: Any, lora_path: Any, **kwargs: Any) -> Any:
        options = open_weights_reader.options()
        if options is None:
            return original(cls, model, lora_path, **kwargs)
        return adapter_files.from_pretrained(cls, model, lora_path, options, kwargs)

    return from_pretrained


def _marking_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def marking(layer: Any, *args: Any, **kwargs: Any) -> Any:
        origin.mark(layer, original.__name__)
        return original(layer, *args, **kwargs)

    return marking


def _marking_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def marking(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        for value in state_dict.values():
            tensor = getattr(value, "local_tensor", value)
            if isinstance(tensor, paddle.Tensor):
                origin.mark(tensor, "paddle.distributed.load_state_dict")
        return original(state_dict, *args, **kwargs)

    return marking
