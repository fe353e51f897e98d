"""The Trainer of a script with PaddleNLP: its Trainer, or a subclass of it, with flex checkpoints.

PaddleNLP's Trainer loads in two methods, the model before it is wrapped and the optimizer afterwards. This package
loads both in the second one. Every method calls PaddleNLP if ``flex_checkpoint`` is false.
"""

from __future__ import annotations

from typing import Any

from paddleformers_fc import upstream
from paddleformers_fc.errors import EnvironmentMismatch
from paddleformers_fc.trainer import ema_weights, loader_patches, loading, nlp_trainer, saving
from paddleformers_fc.trainer.library import HOOKS, Trainer

_AnyTrainer: Any = object
"""The type of the class that follows the mixin, which is unknown here."""


class FlexTrainerMixin(_AnyTrainer):
    """Put it before a Trainer class of PaddleNLP: ``class MyTrainer(FlexTrainerMixin, SomeTrainer)``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse classes whose save and load path is unknown.

        Raises:
            EnvironmentMismatch: the class is no PaddleNLP Trainer, the mixin comes after it, or PaddleNLP differs from
                the tested version.
        """
        super().__init_subclass__(**kwargs)
        upstream.require(HOOKS)
        _refuse_other_classes(cls)
        loader_patches.watch()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        nlp_trainer.init_trainer(self, super().__init__, *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer.train``; ``resume_from_checkpoint=True`` takes the newest finished checkpoint."""
        return loading.train(self, super().train, *args, **kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        return loading.inner_training_loop(self, super()._inner_training_loop, *args, **kwargs)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return nlp_trainer.get_train_sampler(self, super()._get_train_sampler, *args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        nlp_trainer.load_model(self, super()._load_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        nlp_trainer.load(self, super()._load_optimizer_and_scheduler, *args, **kwargs)

    def _load_rng_state(self, *args: Any, **kwargs: Any) -> None:
        loading.load_rng_state(self, super()._load_rng_state, *args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        saving.save(self, super()._save_checkpoint, *args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As ``Trainer.save_model``: the model in Hugging Face format. Every rank must call."""
        nlp_trainer.save_model(self, super().save_model, *args, **kwargs)

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
    if Trainer in bases:
        what = f"{cls.__name__} names FlexTrainerMixin after PaddleNLP's Trainer, whose methods then come first."
    else:
        what = f"{cls.__name__} is not a Trainer of PaddleNLP; this FlexTrainerMixin does nothing without one."
    raise EnvironmentMismatch(
        what,
        where=f"{cls.__module__}.{cls.__qualname__}",
        evidence=[f"its bases are {', '.join(f'{base.__module__}.{base.__qualname__}' for base in cls.__bases__)}"],
        next_step="Write class MyTrainer(FlexTrainerMixin, SomeTrainer), where SomeTrainer is paddlenlp.trainer."
        "Trainer or a subclass of it.",
    )


class FlexTrainer(FlexTrainerMixin, Trainer):
    """PaddleNLP's Trainer with flex checkpoints, enabled by ``flex_checkpoint=True``."""
