"""The Trainer of a script: PaddleFormers' Trainer, or a subclass of it, with flex checkpoints.

Every method calls its function in :mod:`.trainer_init`, which calls PaddleFormers if ``flex_checkpoint`` is false.
"""

from __future__ import annotations

from typing import Any

from paddleformers_fc import upstream
from paddleformers_fc.errors import EnvironmentMismatch
from paddleformers_fc.trainer import ema_weights, loader_patches, loading, saving, trainer_init
from paddleformers_fc.trainer.library import HOOKS, Trainer

_AnyTrainer: Any = object
"""The type of the class that follows the mixin, which is unknown here."""


class FlexTrainerMixin(_AnyTrainer):
    """Put it before a Trainer class of PaddleFormers: ``class MyTrainer(FlexTrainerMixin, SomeTrainer)``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse classes whose save and load path is unknown.

        Raises:
            EnvironmentMismatch: the class is no PaddleFormers Trainer, the mixin comes after it, or PaddleFormers
                differs from the tested version.
        """
        super().__init_subclass__(**kwargs)
        upstream.require(HOOKS)
        _refuse_other_classes(cls)
        loader_patches.watch()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        trainer_init.init_trainer(self, super().__init__, *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer.train``; ``resume_from_checkpoint=True`` takes the newest finished checkpoint."""
        return loading.train(self, super().train, *args, **kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        return loading.inner_training_loop(self, super()._inner_training_loop, *args, **kwargs)

    def _load_flex_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        loading.load(self, super()._load_flex_checkpoint, *args, **kwargs)

    def _load_rng_state(self, *args: Any, **kwargs: Any) -> None:
        loading.load_rng_state(self, super()._load_rng_state, *args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        saving.save(self, super()._save_checkpoint, *args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As ``Trainer.save_model``: the model in HuggingFace format. Every rank must call."""
        saving.save_model_of_slices(self, super().save_model, *args, **kwargs)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        saving.save_model(self, super()._save, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer.evaluate``; with the averaged weights under ``flex_ema_evaluate``."""
        return ema_weights.evaluate(self, super().evaluate, *args, **kwargs)

    def _sorted_checkpoints(self, *args: Any, **kwargs: Any) -> list[str]:
        found: list[str] = saving.sorted_checkpoints(self, super()._sorted_checkpoints, *args, **kwargs)
        return found

    def _rotate_checkpoints(self, *args: Any, **kwargs: Any) -> None:
        saving.rotate_checkpoints(self, super()._rotate_checkpoints, *args, **kwargs)


def _refuse_other_classes(cls: type[Any]) -> None:
    bases = cls.__mro__
    if Trainer in bases and bases.index(FlexTrainerMixin) < bases.index(Trainer):
        return
    others = [base for base in bases if base.__module__.partition(".")[0] == "paddlenlp"]
    if Trainer in bases:
        what = f"{cls.__name__} names FlexTrainerMixin after PaddleFormers' Trainer, whose methods then come first."
    elif others:
        what = "FlexTrainerMixin is for PaddleFormers' Trainer; that of PaddleNLP has paddleformers_fc.nlp."
    else:
        what = f"{cls.__name__} is not a Trainer of PaddleFormers; FlexTrainerMixin does nothing without one."
    raise EnvironmentMismatch(
        what,
        where=f"{cls.__module__}.{cls.__qualname__}",
        evidence=[f"its bases are {', '.join(f'{base.__module__}.{base.__qualname__}' for base in cls.__bases__)}"],
        next_step="Write class MyTrainer(FlexTrainerMixin, SomeTrainer), where SomeTrainer is paddleformers.trainer."
        "Trainer or a subclass of it.",
    )


class FlexTrainer(FlexTrainerMixin, Trainer):
    """PaddleFormers' Trainer with flex checkpoints, enabled by ``flex_checkpoint=True``."""
