"""The Trainer of a script: the library's Trainer, or a subclass of it, with flex checkpoints.

The methods are those of :func:`.attach.overrides`, which call the library if ``flex_checkpoint`` is false.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from paddleformers_fc import upstream
from paddleformers_fc.errors import EnvironmentMismatch
from paddleformers_fc.trainer import adapter_files
from paddleformers_fc.trainer.attach import Overriding, overrides
from paddleformers_fc.trainer.library import HOOKS, NAME, Trainer
from paddleformers_fc.upstream.hooks import PADDLEFORMERS, PADDLENLP


class FlexTrainerMixin(Overriding):
    """Put it before a Trainer class: ``class MyTrainer(FlexTrainerMixin, SomeTrainer)``.

    ``train(resume_from_checkpoint=True)`` takes the newest finished checkpoint. ``save_model`` writes the model in
    Hugging Face format, and every rank must call it. ``evaluate`` uses the averaged weights under
    ``flex_ema_evaluate``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse classes whose save and load path is unknown.

        Raises:
            EnvironmentMismatch: the class is no Trainer of the library, the mixin comes after it, or the library
                differs from the tested version.
        """
        super().__init_subclass__(**kwargs)
        upstream.require(HOOKS)
        _refuse_other_classes(cls)
        adapter_files.watch()


def _calling(override: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(Trainer, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return override(self, getattr(super(FlexTrainerMixin, self), name), *args, **kwargs)

    return method


for _name, _override in overrides().items():
    setattr(FlexTrainerMixin, _name, _calling(_override, _name))


def _refuse_other_classes(cls: type[Any]) -> None:
    bases = cls.__mro__
    if Trainer in bases and bases.index(FlexTrainerMixin) < bases.index(Trainer):
        return
    if Trainer in bases:
        what = f"{cls.__name__} names FlexTrainerMixin after the Trainer of {NAME}, whose methods then come first."
    elif upstream.LIBRARY == PADDLEFORMERS and any(one.__module__.partition(".")[0] == PADDLENLP for one in bases):
        what = "FlexTrainerMixin is for PaddleFormers' Trainer; that of PaddleNLP has paddleformers_fc.nlp."
    else:
        what = f"{cls.__name__} is not a Trainer of {NAME}; FlexTrainerMixin does nothing without one."
    raise EnvironmentMismatch(
        what,
        where=f"{cls.__module__}.{cls.__qualname__}",
        evidence=[f"its bases are {', '.join(f'{base.__module__}.{base.__qualname__}' for base in cls.__bases__)}"],
        next_step="Write class MyTrainer(FlexTrainerMixin, SomeTrainer), where SomeTrainer is "
        f"{upstream.LIBRARY}.trainer.Trainer or a subclass of it.",
    )


class FlexTrainer(FlexTrainerMixin, Trainer):
    """The library's Trainer with flex checkpoints, enabled by ``flex_checkpoint=True``."""
