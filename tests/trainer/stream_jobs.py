"""Jobs that stream the weights of a live model, run inside rank processes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

Digests = dict[str, str]
"""The md5 of tensors by name, in the order in which they came."""


def digests_of(stream: Any) -> Digests:
    """The digests of the tensors of a stream."""
    from paddleformers_fc.execute.memory import host_view

    found: Digests = {}
    for name, tensor in stream:
        view = host_view(tensor)
        assert view is not None
        found[name] = hashlib.md5(view.tobytes()).hexdigest()
    return found


def after_training(
    output_dir: str,
    streams: Mapping[str, Mapping[str, Any]],
    adapted: bool = False,
    united: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Train, stream in several ways, and export; the losses and the digests of every stream by its name.

    Args:
        output_dir: of the training and of the export.
        streams: arguments of every stream by its name.
        adapted: whether the model has adapters.
        united: whether pieces go by one array to all ranks, as to many receivers.
    """
    import paddleformers_fc
    from paddleformers_fc.execute import stream
    from tests.trainer import jobs, lora_jobs

    build: Callable[..., Any] = lora_jobs.trainer_of if adapted else jobs.flex_trainer
    trainer = build(output_dir=output_dir, **settings)
    trainer.train()
    if united:
        stream.MAX_DIRECT_RECEIVERS = 0
    found = {way: digests_of(paddleformers_fc.stream(trainer.model, **given)) for way, given in streams.items()}
    trainer.model.save_pretrained(f"{output_dir}/hf", max_shard_size=60_000)
    return {"losses": trainer.losses, "streams": found}


RECEIVED: list[tuple[int, Digests]] = []


class Pushed:
    """Keeps the digests of what it gets."""

    def __call__(self, step: int, tensors: Any) -> None:
        RECEIVED.append((step, digests_of(tensors)))


def fail_before(step: int, tensors: Any) -> None:
    raise ConnectionError("the engine is gone before")


def fail_within(step: int, tensors: Any) -> None:
    for number, _ in enumerate(tensors):
        if number == 2:
            raise ConnectionError("the engine is gone within")


def fail_after(step: int, tensors: Any) -> None:
    digests_of(tensors)
    raise ConnectionError("the engine is gone after")


def take_one(step: int, tensors: Any) -> None:
    next(tensors)
