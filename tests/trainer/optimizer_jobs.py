"""Every optimizer of the table in docs/optimizers.md, trained by the Trainer in rank processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.trainer.jobs import flex_trainer

WHOLE = {"max_steps": 4, "save_steps": 2}


@dataclass(frozen=True)
class Choice:
    """One way to choose an optimizer.

    Args:
        optimizer: its name in the table.
        made: the expression that makes it, with ``model`` and ``lr``; empty if ``arguments`` choose it.
        declared: the line that declares it; empty if the package does.
        arguments: of the Trainer.
        half: whether the model is bfloat16, with master weights.
    """

    optimizer: str
    made: str = ""
    declared: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    half: bool = False


_REGISTER = "paddleformers_fc.register_optimizer(paddle.optimizer"
_MADE = "parameters=model.parameters(), learning_rate=lr, grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0)"
LAMB = f'{_REGISTER}.Lamb, like_parameter=["moment1", "moment2"], numbers=["beta1_pow_acc", "beta2_pow_acc"])'

CHOICES = {
    "adamw": Choice("AdamW", arguments={"optim": "adamw"}),
    "amsgrad": Choice("AdamW, amsgrad", f"paddle.optimizer.AdamW({_MADE}, amsgrad=True)"),
    "amsgrad-half": Choice(
        "AdamW, amsgrad, bf16 O2", f"paddle.optimizer.AdamW({_MADE}, amsgrad=True, multi_precision=True)", half=True
    ),
    "low": Choice("AdamW, 16-bit moments", f"paddle.optimizer.AdamW({_MADE}, use_lowprecision_moment=True)", half=True),
    "custom": Choice("AdamWCustom", arguments={"optim": "adamw_custom"}),
    "custom-low": Choice(
        "AdamWCustom, 16-bit moments, bf16 O2",
        arguments={"optim": "adamw_custom", "use_lowprecision_moment": True},
        half=True,
    ),
    "mini": Choice("AdamWMini", arguments={"optim": "adamw_mini"}),
    "mini-script": Choice("AdamWMini of a script", f"AdamWMini({_MADE})"),
    "sgd": Choice("SGD", f"paddle.optimizer.SGD({_MADE})", f"{_REGISTER}.SGD)"),
    "momentum": Choice(
        "Momentum", f"paddle.optimizer.Momentum({_MADE})", f'{_REGISTER}.Momentum, like_parameter=["velocity"])'
    ),
    "lamb": Choice("Lamb", f"paddle.optimizer.Lamb({_MADE})", LAMB),
}


def trainer_of(key: str, layout: Mapping[str, Any], output_dir: str, **arguments: Any) -> Any:
    """A Trainer with the optimizer of a choice."""
    import paddle
    from paddleformers.utils.optimizer import AdamWMini

    import paddleformers_fc
    from paddleformers_fc import FlexTrainer

    choice = CHOICES[key]
    names = {"paddle": paddle, "paddleformers_fc": paddleformers_fc, "AdamWMini": AdamWMini}
    if choice.declared:
        exec(choice.declared, names)

    class Trainer(FlexTrainer):
        def create_optimizer(self, lr_scheduler: Any = None) -> Any:
            if not choice.made:
                return super().create_optimizer(lr_scheduler)
            self.optimizer = eval(choice.made, {**names, "model": self.model, "lr": self.lr_scheduler})
            return self.optimizer

    layout = {**layout, "bf16": choice.half}
    return flex_trainer(layout, output_dir, {**choice.arguments, **arguments}, cls=Trainer)


def train_and_resume(keys: list[str], layout: Mapping[str, Any], output_dir: str) -> dict[str, Any]:
    """Train four steps with each optimizer, and the last two again from the checkpoint of the second; the losses."""
    found = {}
    for key in keys:
        whole = trainer_of(key, layout, f"{output_dir}/{key}/whole", **WHOLE)
        whole.train()
        again = trainer_of(key, layout, f"{output_dir}/{key}/again", **WHOLE)
        again.train(resume_from_checkpoint=f"{output_dir}/{key}/whole/checkpoint-2")
        found[key] = {"whole": whole.losses, "again": again.losses}
    return found


def save_again(keys: list[str], layout: Mapping[str, Any], source: str, target: str) -> dict[str, str]:
    """Load the checkpoint of each optimizer and save it under this layout; the errors of those that are refused.

    Args:
        keys: the optimizers.
        layout: the layout.
        source: directory with ``{key}/checkpoint-2``.
        target: likewise.
    """
    from paddleformers_fc.errors import FlexError

    refused = {}
    for key in keys:
        trainer = trainer_of(key, layout, f"{target}/{key}", max_steps=2)
        try:
            trainer.train(resume_from_checkpoint=f"{source}/{key}/checkpoint-2")
            trainer._save_checkpoint(trainer.model)
        except FlexError as error:
            refused[key] = error.render()
    return refused
