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
        stream.MOST_DIRECT = 0
    found = {way: digests_of(paddleformers_fc.stream(trainer.model, **given)) for way, given in streams.items()}
    trainer.model.save_pretrained(f"{output_dir}/hf", max_shard_size=60_000)
    return {"losses": trainer.losses, "streams": found}


def between_steps(output_dir: str, **settings: Any) -> dict[str, Any]:
    """Train and stream after every step; the losses, the digests of every stream, and the exchanges of each."""
    from paddleformers.trainer import TrainerCallback

    import paddleformers_fc
    from paddleformers_fc.distributed.communicator import Communicator
    from tests.trainer import jobs

    streams: list[Digests] = []
    exchanges: list[list[str]] = []
    doing: list[str] = []
    gather = Communicator.gather

    def noting(self: Any, what: str, *args: Any, **kwargs: Any) -> Any:
        doing.append(what)
        return gather(self, what, *args, **kwargs)

    class StreamEveryStep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            doing.clear()
            streams.append(digests_of(paddleformers_fc.stream(trainer.model, to="first")))
            exchanges.append(list(doing))

    Communicator.gather = noting  # type: ignore[method-assign]
    trainer = jobs.flex_trainer(output_dir=output_dir, callbacks=[StreamEveryStep()], **settings)
    trainer.train()
    return {"losses": trainer.losses, "streams": streams, "exchanges": exchanges}


def broken(output_dir: str, **settings: Any) -> dict[str, str]:
    """Streams that fail on the last rank alone; the error of this rank by case, and the tensors that it got."""
    import paddle

    import paddleformers_fc
    from paddleformers_fc.errors import FlexError
    from paddleformers_fc.execute import stream as streams
    from tests.trainer import jobs

    trainer = jobs.flex_trainer(output_dir=output_dir, **settings)
    is_last = paddle.distributed.get_rank() == paddle.distributed.get_world_size() - 1
    found: dict[str, str] = {}
    small = {"max_bytes": 4096}

    def attempt(case: str, work: Callable[[], Any]) -> None:
        try:
            found[case] = f"none, {work()} tensors"
        except FlexError as error:
            found[case] = f"{type(error).__name__}: {error.what}"

    def end_early(at: int = 3, **given: Any) -> int:
        got = 0
        for got, _ in enumerate(paddleformers_fc.stream(trainer.model, **small, **given), 1):
            if is_last and got == at:
                break
        return got

    def fail_to_read() -> int:
        read = streams.LiveReader._read
        calls: list[int] = []

        def failing(self: Any, pieces: Any) -> Any:
            calls.append(1)
            if is_last and len(calls) > 2:
                raise MemoryError("no memory for pieces")
            return read(self, pieces)

        streams.LiveReader._read = failing  # type: ignore[method-assign]
        try:
            return len(digests_of(paddleformers_fc.stream(trainer.model, **small)))
        finally:
            streams.LiveReader._read = read  # type: ignore[method-assign]

    attempt(
        "arguments", lambda: digests_of(paddleformers_fc.stream(trainer.model, device="gpu" if is_last else "host"))
    )
    attempt("requests", lambda: digests_of(paddleformers_fc.stream(trainer.model, to="first" if is_last else "all")))
    attempt("names", lambda: digests_of(paddleformers_fc.stream(trainer.model, names=["model.norm.weigth"])))
    attempt("ranks", lambda: digests_of(paddleformers_fc.stream(trainer.model, to=[9])))
    attempt("adapters", lambda: digests_of(paddleformers_fc.stream(trainer.model, adapters=True)))
    attempt("reading", fail_to_read)
    attempt("early", end_early)
    attempt("last", lambda: end_early(at=1, names=["model.norm.weight"]))
    attempt("whole", lambda: len(digests_of(paddleformers_fc.stream(trainer.model, **small))))
    return found


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


def pushing(output_dir: str, **settings: Any) -> dict[str, Any]:
    """Train with ``flex_stream``; the losses, what the function got, and the error that ended the training."""
    from tests.trainer import jobs

    RECEIVED.clear()
    try:
        trainer = jobs.flex_trainer(output_dir=output_dir, **settings)
        trainer.train()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"losses": trainer.losses, "pushed": RECEIVED}


def most_bytes(output_dir: str, max_bytes: int, **settings: Any) -> dict[str, int]:
    """The largest tensor of a stream, its bytes together, and the most bytes of tensors that existed at one time."""
    import math
    import weakref

    import paddleformers_fc
    from paddleformers_fc.execute import stream
    from tests.trainer import jobs

    trainer = jobs.flex_trainer(output_dir=output_dir, **settings)
    made: list[tuple[Any, int]] = []
    found = {"largest": 0, "total": 0, "most": 0}
    empty = stream.empty_tensor

    def counting(shard: Any) -> Any:
        tensor, size = empty(shard), 4 * math.prod(shard.global_shape)
        made.append((weakref.ref(tensor), size))
        alive = sum(one for reference, one in made if reference() is not None)
        found.update(largest=max(found["largest"], size), total=found["total"] + size, most=max(found["most"], alive))
        return tensor

    stream.empty_tensor = counting
    for _ in paddleformers_fc.stream(trainer.model, max_bytes=max_bytes):
        pass
    return found
