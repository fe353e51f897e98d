"""The replaced ``from_pretrained`` of PaddleFormers' models and adapters.

If :mod:`.open_weights_reader` has chosen this package, it reads through :mod:`.pretrained`. Otherwise PaddleFormers'
loader reads, which is noted on the model (:mod:`.weight_source`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from paddle.nn import Layer

from paddleformers_fc.errors import OptionError
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer import adapter_files, open_weights_reader, pretrained, weight_source
from paddleformers_fc.trainer.library_models import LoRAModel, PretrainedModel


@functools.cache
def watch() -> None:
    """Replace both methods. A second call does nothing."""
    PretrainedModel.from_pretrained = classmethod(
        _from_pretrained(PretrainedModel.__dict__["from_pretrained"].__func__)
    )
    LoRAModel.from_pretrained = classmethod(_from_adapters(LoRAModel.__dict__["from_pretrained"].__func__))


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
            weight_source.note_unverified(
                model, f"{cls.__name__}.from_pretrained({str(pretrained_model_name_or_path)!r})"
            )
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
