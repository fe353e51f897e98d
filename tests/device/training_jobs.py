"""Jobs of real trainings on the device: where their state lives, and what a save and a load copy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.device.counting import CopiedBytes, copied, synchronisations
from tests.device.running import FAKE, device
from tests.harness import tiny


def train(
    layout: Mapping[str, Any],
    output_dir: str,
    on: str,
    model: Mapping[str, Any],
    arguments: Mapping[str, Any],
    resume: str | None = None,
) -> dict[str, Any]:
    """Train with checkpoints at steps 3 and 6; a resumed training saves what it has loaded as its checkpoint-3.

    Args:
        layout: a ``MatrixLayout`` as JSON.
        output_dir: the same on all ranks.
        on: name of the device that holds the model.
        model: overrides of the tiny model's configuration.
        arguments: overrides of the training arguments.
        resume: a checkpoint.
    Returns:
        the losses, the devices that hold parameters and optimizer states, where page-locked memory was allocated,
        and for every step end at which ranks only agree, how often it has waited for the device, and the bytes that it
        has copied to the host.
    """
    import paddle
    from paddleformers.trainer import TrainerCallback

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, "max_steps": 6, "save_steps": 3, "device": on}
    paddle.set_device(on)
    args = tiny.training_arguments(layout, output_dir, **settings, **arguments)

    class SaveAsLoaded(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if resume is not None:
                trainer._save_checkpoint(trainer.model)

    built = tiny.build("llama", layout, args, **model)
    trainer = tiny.trainer(built, args, cls=FlexTrainer, callbacks=[SaveAsLoaded()])
    ended, allocated = _count_step_ends(), _note_page_locked()
    trainer.train(resume_from_checkpoint=resume)
    weights = built.sharded_state_dict()
    states = [*weights.values(), *trainer.optimizer.sharded_state_dict(weights).values()]
    devices = sorted({str(state.local_tensor.place) for state in states})
    return {"losses": trainer.losses, "devices": devices, "step ends": ended, "page-locked": allocated}


def _note_page_locked() -> list[str]:
    """Return a list of where page-locked memory is allocated; that of the fake accelerator is ordinary memory."""
    from paddleformers_fc.execute import async_snapshot, staging_pool
    from paddleformers_fc.trainer.async_save import AsyncSaves

    allocate, save = staging_pool.new_buffer, AsyncSaves.save
    where, noted = ["before training"], []

    def allocate_and_note(size: int, pinned: bool) -> Any:
        if pinned:
            noted.append(where[0])
        return allocate(size, pinned and device() != FAKE)

    def save_and_note(self: Any, *args: Any) -> None:
        where[0] = "in a save"
        save(self, *args)

    if device() == FAKE:
        async_snapshot.has_pinned_memory = lambda place: not staging_pool.in_host_memory(place)
    staging_pool.new_buffer = async_snapshot.new_buffer = allocate_and_note
    AsyncSaves.save = save_and_note
    return noted


def _count_step_ends() -> list[list[int]]:
    """Have ranks agree at every step end, and return a list of what that costs where they exchange nothing."""
    from paddleformers_fc.distributed import step_agreement
    from paddleformers_fc.trainer import events
    from paddleformers_fc.trainer.async_save import AsyncSaves

    step_agreement.PENDING_SECONDS = 1e-6
    end, advance = events.agree, AsyncSaves.advance
    ended: list[list[int]] = []
    exchanged: list[int] = []

    def advance_and_note(self: Any, session: Any) -> None:
        exchanged.append(session.trainer.state.global_step)
        advance(self, session)

    def end_and_count(session: Any, kind: str) -> None:
        waits, copies = synchronisations(), copied()
        end(session, kind)
        if session.trainer.state.global_step not in exchanged:
            ended.append([synchronisations() - waits, (copied() - copies).to_host])

    AsyncSaves.advance, events.agree = advance_and_note, end_and_count
    return ended


class CountedChannel:
    """A channel that counts what its messages copy, because they are tensors of the device.

    Args:
        inner: carries the messages.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.copied = CopiedBytes()

    def gather(self, *arguments: Any) -> Any:
        """As that of the inner channel."""
        before = copied()
        found = self._inner.gather(*arguments)
        self.copied += copied() - before
        return found

    def all_to_all(self, outgoing: Mapping[int, Any], sizes: Mapping[int, int]) -> dict[int, Any]:
        """As that of the inner channel."""
        before = copied()
        found: dict[int, Any] = self._inner.all_to_all(outgoing, sizes)
        self.copied += copied() - before
        return found


def count(layout: Mapping[str, Any], model: Mapping[str, Any], output_dir: str, once: bool) -> dict[str, Any]:
    """Train a step, save and load, by the executors; where the state lives, and the bytes copied and expected.

    Args:
        layout: a ``MatrixLayout`` as JSON.
        model: overrides of the tiny model's configuration.
        output_dir: the same on all ranks.
        once: whether what several ranks want is read by one of them.
    """
    import paddle

    from paddleformers_fc.distributed.channel import job_channel
    from paddleformers_fc.distributed.consistency import ConsistencyCheck
    from paddleformers_fc.execute.load import load_checkpoint
    from paddleformers_fc.execute.opening import open_on_all_ranks
    from paddleformers_fc.execute.replicas import hashed_range
    from paddleformers_fc.execute.save import JobRecord, begin_save, config_bytes, live_part, save_checkpoint
    from paddleformers_fc.execute.staging_pool import in_host_memory, measured_transfers
    from paddleformers_fc.storage.executor import ReadOptions
    from paddleformers_fc.trainer.description import describe_model

    paddle.set_device(device())
    args = tiny.training_arguments(layout, output_dir, max_steps=1, device=device())
    built = tiny.build("llama", layout, args, **model)
    trainer = tiny.trainer(built, args)
    trainer.train()
    weights = built.sharded_state_dict()
    roles: dict[str, dict[str, Any]] = {"model_state": weights}
    for name, state in trainer.optimizer.sharded_state_dict(weights).items():
        roles.setdefault("master_weight" if name.endswith(".w_0") else "optimizer_state", {})[name] = state
    tensors = [state.local_tensor for states in roles.values() for state in states.values()]

    channel, described = CountedChannel(job_channel()), describe_model(built)
    files = {"config.json": config_bytes(described.config)} if channel.rank == 0 else {}
    job, target = JobRecord(3, 24, {}), Path(output_dir) / "counted" / "checkpoint-3"
    before = copied() - channel.copied
    with measured_transfers() as figures:
        save_checkpoint(target, roles, described, files, job, channel)
    saved = copied() - channel.copied - before
    part = live_part(roles, described, files, job, "warn")
    taken = begin_save(lambda: part, target, channel, ConsistencyCheck("planning again", {}))
    taken.removal.close()
    plan = taken.plan
    before = copied() - channel.copied
    load_checkpoint(
        open_on_all_ranks(target, channel), roles, described, channel, ReadOptions(replicas="once" if once else "each")
    )
    loaded = copied() - channel.copied - before

    def width(role: str, name: str) -> int:
        return int(roles[role][name].local_tensor.element_size())

    return {
        "roles": sorted(roles),
        "on the host": [str(tensor.place) for tensor in tensors if in_host_memory(tensor.place)],
        "saved": saved.to_host,
        "late in the save": saved.late_to_host,
        "in flight": figures.in_flight,
        "share": sum(
            (piece.stop - piece.start) * width(file.role, piece.name) for file in plan.files for piece in file.pieces
        ),
        "hashed": sum(
            (stop - start) * width(one.role, one.shard.name)
            for one in plan.replicas
            for start, stop in [hashed_range(one, job.step)]
        ),
        "uploaded by the save": saved.to_device,
        "loaded": loaded.to_device,
        "late": loaded.late_to_device,
        "wanted": sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors),
        "downloaded by the load": loaded.to_host,
    }


def train_offloaded(output_dir: str, on: str, bf16: bool, resume: str | None = None) -> dict[str, Any]:
    """Train with ``tensorwise_offload_optimizer`` and checkpoints at steps 3 and 6.

    Args:
        output_dir: of this training.
        on: name of the device that holds the model.
        bf16: whether weights are bfloat16, with master weights.
        resume: a checkpoint.
    Returns:
        the losses, where weights and states live after the load and at the end, and the bytes copied by the load, by
        the creation of the states before it, and by the last save.
    """
    import paddle
    from paddleformers.trainer import TrainerCallback

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments
    from paddleformers_fc.execute import load
    from paddleformers_fc.trainer import live_roles, save

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, "max_steps": 6, "save_steps": 3, "device": on}
    paddle.set_device(on)
    layout = {**tiny.SINGLE.to_json(), "bf16": bf16}
    args = tiny.training_arguments(layout, output_dir, **settings, tensorwise_offload_optimizer=True)
    found: dict[str, Any] = {}

    def places() -> dict[str, list[str]]:
        roles = live_roles.run_roles(trainer.model, trainer.optimizer)
        return {role: sorted({str(one.local_tensor.place) for one in names.values()}) for role, names in roles.items()}

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found["loaded"] = places() if resume is not None else {}

    def counted(what: str, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            before = copied()
            result = function(*arguments, **named)
            found[what] = [(copied() - before).to_device, (copied() - before).to_host]
            return result

        return call

    trainer = tiny.trainer(tiny.build("llama", layout, args), args, cls=FlexTrainer, callbacks=[Watch()])
    load.read_redistributed = counted("load", load.read_redistributed)
    save.write_and_commit = counted("save", save.write_and_commit)
    live_roles.LiveModel.prepare = counted("create", live_roles.LiveModel.prepare)  # type: ignore[method-assign]
    trainer.train(resume_from_checkpoint=resume)
    weights = [one.local_tensor for one in trainer.model.sharded_state_dict().values()]
    found["weights"] = sum(math.prod(tensor.shape) * tensor.element_size() for tensor in weights)
    return {**found, "losses": trainer.losses, "kept": places()}


def train_with_average(
    layout: Mapping[str, Any], output_dir: str, on: str, arguments: Mapping[str, Any], resume: str | None = None
) -> dict[str, Any]:
    """Train with a moving average and checkpoints at steps 3 and 6, and swap the averaged weights in at the end.

    Args:
        layout: a ``MatrixLayout`` as JSON.
        output_dir: the same on all ranks.
        on: name of the device that holds the model.
        arguments: overrides of the training arguments.
        resume: a checkpoint.
    Returns:
        the losses, where the averages live, and digests of the weights before, in and after the block.
    """
    import paddle

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments, averaged_weights
    from paddleformers_fc.trainer.session import session_of
    from tests.trainer.ema_jobs import bits

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, "max_steps": 6, "save_steps": 3, "device": on}
    paddle.set_device(on)
    args = tiny.training_arguments(layout, output_dir, **settings, flex_ema_decay=0.9, **arguments)
    trainer = tiny.trainer(tiny.build("llama", layout, args), args, cls=FlexTrainer)
    trainer.train(resume_from_checkpoint=resume)
    digests = [bits(trainer)]
    with averaged_weights(trainer):
        digests.append(bits(trainer))
        trainer.evaluate(tiny.Samples())
    average = session_of(trainer).average
    places = sorted({str(one.local_tensor.place) for one in average.tensors.values()})
    return {"losses": trainer.losses, "places": places, "digests": [*digests, bits(trainer)]}
