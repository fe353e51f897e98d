"""Every optimizer of the table in docs/optimizers.md, trained by the Trainer in rank processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.harness import tiny
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


def train_with_own_scheduler(output_dir: str, resume: str | None = None) -> list[float]:
    """Train with an optimizer whose learning rate a callback halves after every step; the rates."""
    import paddle
    from paddleformers.trainer import TrainerCallback

    trainer = flex_trainer(tiny.SINGLE.to_json(), output_dir, WHOLE)
    scheduler = paddle.optimizer.lr.StepDecay(learning_rate=0.01, step_size=1, gamma=0.5)
    trainer.optimizer = paddle.optimizer.AdamW(parameters=trainer.model.parameters(), learning_rate=scheduler)
    rates = []

    class Halve(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            rates.append(trainer.optimizer.get_lr())
            scheduler.step()

    trainer.add_callback(Halve())
    trainer.train(resume_from_checkpoint=resume)
    return rates


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


def train_undeclared(kind: str, output_dir: str) -> str:
    """Train with an optimizer that nothing declares; the error."""
    import paddle

    from paddleformers_fc import FlexTrainer
    from paddleformers_fc.errors import FlexError

    class Trainer(FlexTrainer):
        def create_optimizer(self, lr_scheduler: Any = None) -> Any:
            chosen = Own if kind == "Own" else getattr(paddle.optimizer, kind)
            self.optimizer = chosen(parameters=self.model.parameters(), learning_rate=0.01)

    class Own(paddle.optimizer.AdamW):
        """A subclass with one state more."""

        def _add_moments_pows(self, p: Any) -> None:
            super()._add_moments_pows(p)
            self._add_accumulator("third", p)

    trainer = flex_trainer(tiny.SINGLE.to_json(), output_dir, {"max_steps": 2, "save_steps": 2}, cls=Trainer)
    try:
        trainer.train()
    except FlexError as error:
        assert not trainer.losses
        return error.render()
    return ""


def train_misdeclared(output_dir: str, layout: Mapping[str, Any]) -> dict[str, str]:
    """Train with optimizers whose states do not have the declared shapes; the errors."""
    import paddle

    import paddleformers_fc
    from paddleformers_fc import FlexTrainer
    from paddleformers_fc.errors import FlexError

    made = {
        "Adagrad": ({"numbers": ["moment"]}, {}),
        "Adam": ({"like_parameter": ["moment1", "moment2", "beta1_pow_acc"], "numbers": ["beta2_pow_acc"]}, {}),
        "ASGD": ({"like_parameter": ["d", "y"], "numbers": ["m"]}, {"batch_num": 1}),
    }
    found = {}
    for kind, (declared, options) in made.items():
        chosen = getattr(paddle.optimizer, kind)

        class Trainer(FlexTrainer):
            def create_optimizer(self, lr_scheduler: Any = None, chosen: Any = chosen, options: Any = options) -> Any:
                self.optimizer = chosen(parameters=self.model.parameters(), learning_rate=0.01, **options)

        try:
            paddleformers_fc.register_optimizer(chosen, **declared)
            flex_trainer(layout, f"{output_dir}/{kind}", {"max_steps": 2, "save_steps": 2}, cls=Trainer).train()
            found[kind] = ""
        except FlexError as error:
            found[kind] = error.render()
    return found


def resume_with(key: str, layout: Mapping[str, Any], output_dir: str, resume: str | None, **arguments: Any) -> str:
    """Resume with the optimizer of a choice; the error, if any."""
    from paddleformers_fc.errors import FlexError

    try:
        trainer_of(key, layout, output_dir, max_steps=3, **arguments).train(resume_from_checkpoint=resume)
    except FlexError as error:
        return error.render()
    return ""


def load_in_float32(output_dir: str) -> dict[str, Any]:
    """Save a bfloat16 model with master weights, and load it into a float32 model, without a Trainer.

    Returns:
        the error without ``allow_casts``, the lines of the report with it, and the weights that are not the master
        weights.
    """
    import paddle

    import paddleformers_fc
    from paddleformers_fc.errors import FlexError

    args = tiny.training_arguments(tiny.SINGLE, f"{output_dir}/out")
    half = tiny.build("llama", {**tiny.SINGLE.to_json(), "bf16": True}, args)
    optimizer = paddle.optimizer.AdamW(parameters=half.parameters(), multi_precision=True)
    block = paddle.base.framework.default_main_program().global_block()
    optimizer._create_accumulators(block, half.parameters())
    for master in optimizer._master_weights.values():
        master.set_value(master + 1e-4)  # Digits that bfloat16 does not have.
    paddleformers_fc.save(f"{output_dir}/checkpoint-1", half, optimizer, step=1)
    masters = {
        name: optimizer._master_weights[one.local_tensor.name] for name, one in half.sharded_state_dict().items()
    }
    full = tiny.build("llama", tiny.SINGLE, args)
    other = paddle.optimizer.AdamW(parameters=full.parameters())
    refused = ""
    try:
        paddleformers_fc.load(f"{output_dir}/checkpoint-1", full, other)
    except FlexError as error:
        refused = error.render()
    report = paddleformers_fc.load(f"{output_dir}/checkpoint-1", full, other, allow_casts=True)
    weights = {name: one.local_tensor for name, one in full.sharded_state_dict().items()}
    wrong = [name for name, weight in weights.items() if weight.numpy().tobytes() != masters[name].numpy().tobytes()]
    # Weights alone give a bfloat16 model all digits of its master weights.
    paddleformers_fc.save(f"{output_dir}/checkpoint-2", full, step=2)
    third = tiny.build("llama", {**tiny.SINGLE.to_json(), "bf16": True}, args)
    last = paddle.optimizer.AdamW(parameters=third.parameters(), multi_precision=True)
    paddleformers_fc.load(f"{output_dir}/checkpoint-2", third, last, allow_casts=True)
    for name, one in third.sharded_state_dict().items():
        if last._master_weights[one.local_tensor.name].numpy().tobytes() != masters[name].numpy().tobytes():
            wrong.append(name)
    return {"refused": refused, "casts": report.casts, "tensors": len(weights), "wrong": wrong}


MORE_LAYERS = [
    statement
    for name in (
        *("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        *(f"self_attn.{part}_proj" for part in "qkvo"),
    )
    for statement in (
        f"model.layers.1.{name}.weight -> model.layers.2.{name}.weight",
        f"_ -> model.layers.1.{name}.weight",
    )
]
"""A new layer before the second of two."""


def load_into_more_layers(layout: Mapping[str, Any], output_dir: str, by_trainer: bool) -> dict[str, Any]:
    """Train a model of two layers for two steps, and load it with statements into a model of three.

    Returns:
        the loaded tensors and states that are not equal to the stored ones, the stored ones that were not loaded, and
        the states of the new layer.
    """
    statements = {"aoa_statements": MORE_LAYERS}
    saved = flex_trainer(layout, f"{output_dir}/few", {"max_steps": 2, "save_steps": 2}, model={"num_hidden_layers": 2})
    saved.train()
    held = _all_bits(saved.model, saved.optimizer)
    arguments = {"max_steps": 2, "save_steps": 2, "aoa_config": statements}
    more = flex_trainer(layout, f"{output_dir}/more", arguments, model={"num_hidden_layers": 3})
    checkpoint = f"{output_dir}/few/checkpoint-2"
    if by_trainer:
        more.train(resume_from_checkpoint=checkpoint)
        loaded = _all_bits(more.model, more.optimizer)
    else:
        loaded = _all_bits(more.model, _loaded(checkpoint, more.model, statements))
    stored = {name: name.replace("layers.2.", "layers.1.") for name in loaded if "layers.1." not in name}
    return {
        "differ": [new for new, name in stored.items() if loaded[new] != held[name]],
        "missing": sorted({*held} - {*stored.values()}),
        "new": sorted(name for name in loaded if "layers.1." in name and not name.endswith(".weight")),
    }


def load_weights_into_more_layers(output_dir: str) -> list[str]:
    """Save the weights of a float32 model of two layers, and load them with statements into a bfloat16 one of three.

    Returns:
        the parameters whose master weights are not the stored weights.
    """
    import paddleformers_fc

    args = tiny.training_arguments(tiny.SINGLE, f"{output_dir}/out")
    few = tiny.build("llama", tiny.SINGLE, args, num_hidden_layers=2)
    paddleformers_fc.save(f"{output_dir}/checkpoint-1", few, step=1)
    more = tiny.build("llama", {**tiny.SINGLE.to_json(), "bf16": True}, args, num_hidden_layers=3)
    optimizer = _loaded(f"{output_dir}/checkpoint-1", more, {"aoa_statements": MORE_LAYERS}, allow_casts=True)
    held, loaded = _all_bits(few, None), _all_bits(more, optimizer)
    names = {name: name.replace("layers.2.", "layers.1.") for name in more.sharded_state_dict() if ".1." not in name}
    return [name for name, stored in names.items() if loaded.get(f"{name}.w_0") != held[stored]]


def _loaded(checkpoint: str, model: Any, statements: Mapping[str, Any], **options: Any) -> Any:
    import paddle

    import paddleformers_fc

    optimizer = paddle.optimizer.AdamW(parameters=model.parameters(), multi_precision=True)
    paddleformers_fc.load(checkpoint, model, optimizer, aoa_config=statements, **options)
    return optimizer


def _all_bits(model: Any, optimizer: Any) -> dict[str, str]:
    """The bytes of every tensor and state, as hex."""
    from paddleformers_fc.trainer import live_roles

    roles = live_roles.model_roles(model) if optimizer is None else live_roles.run_roles(model, optimizer)
    tensors = [(name, one.local_tensor) for weights in roles.values() for name, one in weights.items()]
    return {name: tensor.astype("float32").numpy().tobytes().hex() for name, tensor in tensors}
