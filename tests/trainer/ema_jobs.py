"""Trainings with a moving average; each public function is a job of the fork server and returns JSON."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from tests.harness import tiny
from tests.trainer.jobs import failing, few_samples, flex_trainer
from tests.trainer.lora_jobs import trainer_of

EVALUATED = {"evaluation_strategy": "steps", "eval_steps": 1, "do_eval": True}


def digest_of(trainer: Any) -> str:
    """A digest of the weights that all ranks hold together; the same under every layout."""
    from paddleformers_fc.execute.digest import digest_live
    from paddleformers_fc.trainer import live_roles
    from paddleformers_fc.trainer.description import describe_model
    from paddleformers_fc.trainer.session import channel_of

    weights = live_roles.model_roles(trainer.model)["model_state"]
    return digest_live(weights, describe_model(trainer.model), channel_of(trainer.args))


def bits(trainer: Any) -> str:
    """A digest of the weights of this rank, bit by bit."""
    import hashlib

    from paddleformers_fc.execute.memory import host_pieces
    from paddleformers_fc.trainer import live_roles

    digest = hashlib.md5()
    for name, weight in sorted(live_roles.model_roles(trainer.model)["model_state"].items()):
        tensor = weight.local_tensor
        for piece in host_pieces(tensor, 0, int(tensor.size)):
            digest.update(name.encode() + piece.tobytes())
    return digest.hexdigest()


def swap(export: str, after: int = 1, adapters: bool = False, **settings: Any) -> dict[str, Any]:
    """Train, and evaluate the averaged weights in a block that ends with an error.

    Args:
        export: where the averaged weights are exported.
        after: a second training of as many steps follows.
        adapters: whether adapters are trained.
    """
    from paddleformers_fc import averaged_weights, save_ema
    from paddleformers_fc.errors import OptionError

    trainer = trainer_of(**settings) if adapters else flex_trainer(**settings)
    found: dict[str, Any] = {}
    from paddleformers.trainer import TrainerCallback

    class Swap(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            found["before"], found["own"] = bits(trainer), digest_of(trainer)
            with contextlib.suppress(ZeroDivisionError), averaged_weights(trainer):
                found["inside"], found["averaged"] = bits(trainer), digest_of(trainer)
                trainer.evaluate(few_samples())
                try:
                    trainer._save_checkpoint(trainer.model)
                except OptionError as error:
                    found["refused"] = error.what
                raise ZeroDivisionError
            found["after"] = bits(trainer)
            save_ema(trainer, export)

    trainer.add_callback(Swap())
    trainer.train()
    return {**found, "losses": trainer.losses}


def swap_between_steps(**settings: Any) -> list[float]:
    """Train with an evaluation of the averaged weights in every pass, while saves of the step before are under way."""
    from paddleformers.trainer import TrainerCallback

    from paddleformers_fc import averaged_weights

    class Swap(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step:
                with averaged_weights(trainer):
                    trainer.evaluate()

    trainer = flex_trainer(**settings, callbacks=[Swap()], eval_dataset=few_samples())
    trainer.train()
    return list(trainer.losses)


def resumed_from_average(resume: str, **settings: Any) -> str:
    """Resume with ``sharded_model_from_ema``; the digest of the weights before the first step."""
    from paddleformers.trainer import TrainerCallback

    found: list[str] = []

    class Look(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            found.append(digest_of(trainer))

    trainer = flex_trainer(**settings, callbacks=[Look()])
    trainer.train(resume_from_checkpoint=resume)
    return found[0]


def evaluated(
    layout: Mapping[str, Any], output_dir: str, arguments: Mapping[str, Any], fail: bool = False
) -> dict[str, Any]:
    """Train with an evaluation after every step; losses of both.

    Args:
        fail: whether an evaluation of the averaged weights fails in the middle of a pass before every later step;
            returns whether the weights are then those of before.
    """
    from paddleformers.trainer import TrainerCallback

    from paddleformers_fc import averaged_weights

    losses: list[float] = []
    restored: list[bool] = []

    class Evaluate(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if fail and state.global_step:
                before = bits(trainer)
                layer = trainer.model.model.layers[2].mlp.down_proj
                with contextlib.suppress(ZeroDivisionError), averaged_weights(trainer), failing(layer):
                    trainer.evaluate()
                restored.append(bits(trainer) == before)

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
            losses.append(float(metrics["eval_loss"]))

    given = {**EVALUATED, **arguments}
    trainer = flex_trainer(layout, output_dir, given, eval_dataset=tiny.Samples(), callbacks=[Evaluate()])
    trainer.train()
    trainer.save_model(f"{output_dir}/exported")
    return {"losses": trainer.losses, "evaluated": losses, "restored": restored}


def evaluated_before_weights_arrive(**settings: Any) -> dict[str, Any]:
    """As :func:`evaluated`, with an export at the end, on ranks that receive nothing before they wait for it.

    A device with streams may receive the weights of an overlapped broadcast or gather as late. With gloo they arrive
    at once.
    """
    import paddle
    from paddle.base import core

    pending: list[Any] = []
    broadcast, gather = paddle.distributed.broadcast, core.ProcessGroupGloo.all_gather

    class Arrival:
        def __init__(self, receive: Any) -> None:
            self.receive = receive
            pending.append(self)

        def wait(self) -> None:
            self.receive()
            self.receive = lambda: None

    def begin(tensor: Any, src: int = 0, group: Any = None, sync_op: bool = True) -> Any:
        arrival = Arrival(lambda: broadcast(tensor, src, group, True))
        return arrival.wait() if sync_op else arrival

    def begin_gather(group: Any, part: Any, whole: Any, *more: Any, **named: Any) -> Any:
        if more or named:  # Not the call by which sharding stage 1 v2 receives its parameters.
            return gather(group, part, whole, *more, **named)
        return Arrival(lambda: gather(group, part, whole).wait())

    def synchronize() -> None:
        while pending:
            pending.pop(0).wait()

    paddle.distributed.broadcast, paddle.device.synchronize = begin, synchronize
    core.ProcessGroupGloo.all_gather = begin_gather
    return evaluated(**settings)
