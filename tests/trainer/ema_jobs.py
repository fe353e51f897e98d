"""Trainings with a moving average; each public function is a job of the fork server and returns JSON."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from tests.harness import tiny
from tests.trainer.jobs import callback, failing, few_samples, flex_trainer

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


def swap_between_steps(**settings: Any) -> list[float]:
    """Train with an evaluation of the averaged weights in every pass, while saves of the step before are under way."""
    from paddleformers_fc import averaged_weights

    def evaluate(args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step:
            with averaged_weights(trainer):
                trainer.evaluate()

    trainer = flex_trainer(**settings, callbacks=[callback(on_step_begin=evaluate)], eval_dataset=few_samples())
    trainer.train()
    return list(trainer.losses)


def evaluated(
    layout: Mapping[str, Any], output_dir: str, arguments: Mapping[str, Any], fail: bool = False
) -> dict[str, Any]:
    """Train with an evaluation after every step; losses of both.

    Args:
        fail: whether an evaluation of the averaged weights fails in the middle of a pass before every later step;
            returns whether the weights are then those of before.
    """
    from paddleformers_fc import averaged_weights

    losses: list[float] = []
    restored: list[bool] = []

    def evaluate_and_fail(args: Any, state: Any, *_: Any, **__: Any) -> None:
        if fail and state.global_step:
            before = bits(trainer)
            layer = trainer.model.model.layers[2].mlp.down_proj
            with contextlib.suppress(ZeroDivisionError), averaged_weights(trainer), failing(layer):
                trainer.evaluate()
            restored.append(bits(trainer) == before)

    def note(*_: Any, metrics: Any = None, **__: Any) -> None:
        losses.append(float(metrics["eval_loss"]))

    given = {"eval_dataset": tiny.Samples(), "callbacks": [callback(on_step_begin=evaluate_and_fail, on_evaluate=note)]}
    trainer = flex_trainer(layout, output_dir, {**EVALUATED, **arguments}, **given)
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
