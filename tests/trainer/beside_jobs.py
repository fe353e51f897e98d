"""Trainings that save beside their steps, held or broken at a moment of a save; each job returns JSON."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness import tiny
from tests.trainer.jobs import flex_trainer, outcome

_LONG = 60.0
_A_WHILE = 0.3


def with_late_copies(job: str, **settings: Any) -> Any:
    """Run a job whose snapshots are copied when the next update wants to begin, and after it if it does not wait.

    What a moving average reads is copied then too, or when someone waits for the average before that.

    Args:
        job: module and function.
        settings: its arguments.
    """
    from paddleformers_fc.execute.async_snapshot import SnapshotCopy
    from paddleformers_fc.trainer import async_save
    from paddleformers_fc.trainer.ema import MovingAverage, UpdateBarrier
    from paddleformers_fc.trainer.events import LoopEvents

    wanted, average_wanted, updated = threading.Event(), threading.Event(), threading.Event()
    prepare, finish, copy = async_save.prepare, UpdateBarrier.finish, SnapshotCopy.finish
    settled, call = MovingAverage.wait_for_update, LoopEvents.call_event

    def prepare_again(*args: Any) -> Any:
        for one in (wanted, average_wanted, updated):
            one.clear()
        return prepare(*args)

    def finish_wanted(self: Any) -> None:
        wanted.set()
        average_wanted.set()
        finish(self)

    def settled_wanted(self: Any) -> None:
        average_wanted.set()
        settled(self)

    def copy_late(self: Any) -> Any:
        is_average = threading.current_thread().name.startswith("flex-ema")
        assert (average_wanted if is_average else wanted).wait(_LONG), "no update has followed"
        updated.wait(_A_WHILE)
        return copy(self)

    def called(self: Any, event: str, *args: Any, **kwargs: Any) -> Any:
        if event == "on_optimizer_end":
            updated.set()
        return call(self, event, *args, **kwargs)

    async_save.prepare = prepare_again
    UpdateBarrier.finish = finish_wanted
    LoopEvents.call_event = called
    SnapshotCopy.finish = copy_late
    MovingAverage.wait_for_update = settled_wanted
    module, _, name = job.partition(":")
    return getattr(importlib.import_module(module), name)(**settings)


def with_events(hold: bool = False, **settings: Any) -> dict[str, Any]:
    """Train and evaluate; what callbacks and reporters see of every save, in order.

    Args:
        hold: whether every step but the first begins when the save of the one before can be reported.
    """
    from paddleformers.trainer import TrainerCallback

    from paddleformers_fc import FlexCheckpointCallback
    from paddleformers_fc.trainer.session import session_of

    seen: list[Any] = []

    class Listener(FlexCheckpointCallback):
        def on_checkpoint_saved(self, args: Any, report: Any) -> None:
            seen.append(["saved", report.step, (Path(report.directory) / "flex_checkpoint.json").is_file()])

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            best, there = state.best_model_checkpoint, Path(args.output_dir) / f"checkpoint-{state.global_step}"
            found = [
                best and Path(best).name,
                best is None or Path(best).is_dir(),
                state.best_metric,
                len(state.log_history),
                (there / "flex_checkpoint.json").is_file(),
            ]
            seen.append(["on_save", state.global_step, *found])

    class Hold(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saves = session_of(trainer).saver
            while hold and saves.under_way:
                saves.advance(session_of(trainer))

    trainer = flex_trainer(**settings, callbacks=[Listener(), Hold()], eval_dataset=tiny.Samples())
    trainer.train()
    state = trainer.state
    best = state.best_model_checkpoint
    return {**outcome(trainer), "seen": seen, "best": best and Path(best).name, "metric": state.best_metric}


def commit_in_evaluation(**settings: Any) -> list[Any]:
    """Train and evaluate; each batch of an evaluation waits for what the thread of a save does.

    Returns:
        the step whose evaluation sees the first checkpoint, then the step of every save, and that of its report.
    """
    from paddleformers_fc import FlexCheckpointCallback
    from paddleformers_fc.trainer.session import session_of

    seen: list[Any] = []

    class Listener(FlexCheckpointCallback):
        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saves = session_of(trainer).saver
            if saves.under_way:
                saves._save.done.exception()
            if not seen and any(Path(args.output_dir).glob("checkpoint-*")):
                seen.append(["committed", state.global_step])

        def on_checkpoint_saved(self, args: Any, report: Any) -> None:
            seen.append(["saved", report.step, trainer.state.global_step])

    trainer = flex_trainer(**settings, callbacks=[Listener()], eval_dataset=tiny.Samples())
    trainer.train()
    return seen


class Fault:
    """What goes wrong in one save of one rank.

    Args:
        kind: of the fault.
        is_victim: whether this rank has it.
        step: of the save.
    """

    def __init__(self, kind: str, is_victim: bool, step: int) -> None:
        self.kind, self.is_victim, self.step, self.is_over = kind, is_victim, step, False

    def due(self, path: str) -> bool:
        """Return whether an operation on a file is to be refused."""
        return self.is_victim and not self.is_over and f"checkpoint-{self.step}.unfinished" in path


def _install(fault: Fault) -> Any:
    """Make the fault happen in this process, as long as what is returned lives."""
    import errno

    from paddleformers_fc.execute.async_snapshot import SnapshotCopy
    from tests.crash.net import Net, Open, Operation, cast

    class Refuse(Open):
        def before(self, operation: Operation) -> None:
            wanted = {"disk full": "write", "read-only": "mkdir"}.get(fault.kind)
            if operation.kind == wanted and fault.due(operation.path):
                number = errno.ENOSPC if wanted == "write" else errno.EROFS
                raise OSError(number, os.strerror(number), operation.path)

    copy, begun = SnapshotCopy.finish, Counter[str]()

    def broken(self: Any) -> Any:
        begun["copies"] += 1
        if fault.kind == "copy" and fault.is_victim and not fault.is_over and begun["copies"] == fault.step:
            raise ValueError("a broken copy")
        return copy(self)

    SnapshotCopy.finish = broken
    net = cast(Net(Refuse()))
    net.__enter__()  # This process ends with the job.
    return net


def fail_and_go_on(kind: str, victim: int, step: int, **settings: Any) -> dict[str, Any]:
    """Train; a save fails on one rank. Then train on in the same Trainer from the newest checkpoint.

    Returns:
        the error, the step at which it was raised, the checkpoints that were there, and what a training returns.
    """
    from paddleformers_fc.errors import FlexError

    fault = Fault(kind, os.environ.get("PADDLE_TRAINER_ID", "0") == str(victim), step)
    installed = _install(fault)
    trainer = flex_trainer(**settings)
    try:
        trainer.train()
    except FlexError as error:
        text, cause = error.render(), repr(error.__cause__)
    else:
        return {"text": f"no error under {installed}"}
    fault.is_over = True
    there = sorted(path.name for path in Path(settings["output_dir"]).iterdir() if "checkpoint" in path.name)
    found = {"text": text, "cause": cause, "raised": trainer.state.global_step, "there": there}
    trainer.losses.clear()
    trainer.train(resume_from_checkpoint=True)
    return {**found, **outcome(trainer)}


def break_off(at: int, victims: list[int], kind: str, **settings: Any) -> dict[str, Any]:
    """Train; some ranks raise an error of their own in the pass after a step, while its save has not begun to write.

    Ranks that raise alone do not wait for the others for long.

    Args:
        at: the step.
        victims: the ranks.
        kind: of the error, a built-in exception.
    """
    import builtins

    from paddleformers.trainer import TrainerCallback

    from paddleformers_fc.distributed import step_agreement
    from paddleformers_fc.execute import save

    alone = len(victims) < int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    step_agreement.ENDING_SECONDS = _A_WHILE if alone else _LONG
    raised, write = threading.Event(), save._write_files
    is_victim = int(os.environ.get("PADDLE_TRAINER_ID", "0")) in victims

    def write_late(planned: Any, *args: Any) -> Any:
        if is_victim and planned.part.job.step == at:
            assert raised.wait(_LONG)
        return write(planned, *args)

    class BreakOff(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if is_victim and state.global_step == at:
                raised.set()
                raise getattr(builtins, kind)("broken off")

    save._write_files = write_late
    trainer = flex_trainer(**settings, callbacks=[BreakOff()])
    try:
        trainer.train()
    except BaseException as error:
        if alone:
            raise
        newest = Path(settings["output_dir"]) / f"checkpoint-{at}"
        return {"error": type(error).__name__, "committed": (newest / "flex_checkpoint.json").is_file()}
    return {"error": None}


def note_communication(**settings: Any) -> dict[str, Any]:
    """Train; who communicates, and what is opened for it.

    Returns:
        the number of exchanges from the beginning of every save to that of the next one, the threads that communicate,
        and the groups and connections that are opened after the Trainer.
    """
    import paddle
    from paddle.base import core

    from paddleformers_fc.distributed.channel import PaddleChannel
    from paddleformers_fc.distributed.communicator import Communicator
    from paddleformers_fc.distributed.store_client import StoreClient
    from paddleformers_fc.trainer.async_save import AsyncSaves

    exchanges: list[int] = []
    threads: set[str] = set()
    opened: list[str] = []
    save = AsyncSaves.save

    def noting(native: Callable[..., Any], is_exchange: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            threads.add(threading.current_thread().name)
            if is_exchange and exchanges:
                exchanges[-1] += 1
            return native(*args, **kwargs)

        return call

    def opening(native: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            opened.append(name)
            return native(*args, **kwargs)

        return call

    def save_and_count(self: Any, *args: Any) -> None:
        exchanges.append(0)
        save(self, *args)

    AsyncSaves.save = save_and_count
    for kind, names in ((Communicator, ["gather"]), (PaddleChannel, ["all_to_all"]), (StoreClient, ["add", "wait"])):
        for name in names:
            setattr(kind, name, noting(getattr(kind, name), kind is not StoreClient))
    trainer = flex_trainer(**settings)
    StoreClient.__init__ = opening(StoreClient.__init__, "connection")
    paddle.distributed.new_group = opening(paddle.distributed.new_group, "group")
    core.ProcessGroupGloo.create = opening(core.ProcessGroupGloo.create, "group")
    trainer.train()
    return {"exchanges": exchanges, "threads": sorted(threads), "opened": opened}


def note_preparations(job: str, **settings: Any) -> list[str]:
    """Run a job, and return where saves were planned and memory for snapshots was allocated.

    Args:
        job: module and function.
        settings: its arguments.
    """
    from paddleformers_fc.execute import save
    from paddleformers_fc.execute.async_snapshot import SnapshotBuffer
    from paddleformers_fc.trainer.async_save import AsyncSaves

    plan, reserve, begin = save._new_plan, SnapshotBuffer.reserve, AsyncSaves.save
    noted, where = [], ["before training"]

    def plan_and_note(*args: Any) -> Any:
        noted.append(f"planned {where[0]}")
        return plan(*args)

    def reserve_and_note(self: Any, *args: Any) -> bool:
        is_new = reserve(self, *args)
        noted.extend([f"allocated {where[0]}"] if is_new else [])
        return is_new

    def save_and_note(self: Any, *args: Any) -> None:
        where[0] = "in a save"
        begin(self, *args)

    save._new_plan, SnapshotBuffer.reserve, AsyncSaves.save = plan_and_note, reserve_and_note, save_and_note
    module, _, name = job.partition(":")
    getattr(importlib.import_module(module), name)(**settings)
    return noted


def train_without_memory(victim: int, **settings: Any) -> dict[str, Any]:
    """Train where one rank may get no more address space when it allocates memory for snapshots.

    Returns:
        the error, and the step at which it was raised.
    """
    import resource

    import paddle.distributed as dist

    from paddleformers_fc.errors import FlexError
    from paddleformers_fc.execute.async_snapshot import SnapshotBuffer

    reserve = SnapshotBuffer.reserve

    def reserve_under_a_limit(self: Any, *args: Any) -> bool:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), limits[1]))
        try:
            return reserve(self, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)

    if dist.get_rank() == victim:
        SnapshotBuffer.reserve = reserve_under_a_limit
    trainer = flex_trainer(**settings)
    try:
        trainer.train()
    except FlexError as error:
        return {"error": error.render(), "step": trainer.state.global_step}
    return {}


def hold_the_first_save(held: int, until: int, **settings: Any) -> dict[str, Any]:
    """Train; the save of one step is not written before that of a later step waits for it.

    Returns:
        the steps in the order of their commits, whether the snapshot was complete before the first commit, and the
        lines of the log about waiting.
    """
    from paddleformers_fc.execute import save
    from paddleformers_fc.trainer import async_save
    from paddleformers_fc.trainer.async_save import AsyncSaves
    from paddleformers_fc.trainer.library import logger

    waits, committed, captured = threading.Event(), [], []
    write, wait, report = save._write_files, AsyncSaves._wait, async_save.report_save
    lines: list[str] = []

    def write_held(planned: Any, *args: Any) -> Any:
        if planned.part.job.step == held:
            assert waits.wait(_LONG)
        return write(planned, *args)

    def report_and_note(session: Any, prepared: Any, *args: Any) -> None:
        committed.append(prepared.step)
        report(session, prepared, *args)

    def wait_and_note(self: Any, session: Any, why: str) -> None:
        if session.trainer.state.global_step == until and self._save is not None and self._save.prepared.step == held:
            captured.append(not session.barrier._reads)
            waits.set()
        wait(self, session, why)

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "Waited" in record.getMessage():
                lines.append(record.getMessage())

    save._write_files, AsyncSaves._wait, async_save.report_save = write_held, wait_and_note, report_and_note
    getattr(logger, "logger", logger).addHandler(Lines())
    trainer = flex_trainer(**settings)
    trainer.train()
    return {"committed": committed, "captured": captured, "lines": lines}


def change_shards(odd: int, at: int, **settings: Any) -> Any:
    """Train; from one step on one rank saves a state that it has not saved before, as one that it has just created.

    Args:
        odd: the rank.
        at: the step.
    """
    from paddleformers_fc.trainer import save

    roles = save._roles
    trainer = flex_trainer(**settings)

    def without_one(*args: Any) -> Any:
        found = roles(*args)
        if int(os.environ["PADDLE_TRAINER_ID"]) == odd and trainer.state.global_step < at:
            states = dict(found["optimizer_state"])
            del states[max(states)]
            found = {**found, "optimizer_state": states}
        return found

    save._roles = without_one
    trainer.train()
    return outcome(trainer)


def change_meanwhile(**settings: Any) -> None:
    """Train and save; in the pass after the first save all that its documents describe changes, before their encoding.

    A save in the step has encoded them then.
    """
    import random

    import numpy as np
    from paddleformers.generation import GenerationConfig
    from paddleformers.trainer import TrainerCallback
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from paddleformers_fc import FlexTrainer
    from paddleformers_fc.trainer import async_save

    changed, capture = threading.Event(), async_save.capture_files

    def encoded_late(trainer: Any) -> Any:
        encode = capture(trainer)
        return lambda: (changed.wait(_LONG), encode())[1]

    class CopiesFiles(FlexTrainer):
        def copy_custom_files(self, output_dir: str) -> None:
            (Path(output_dir) / "notes.txt").write_text(self.args.copy_custom_file_list)

    class Change(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            state.trial_params = {}

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step != 1:
                return
            config = trainer.model.config
            config.task_specific_params["task"]["beams"] = config.bos_token_id = 7
            trainer.model.generation_config.temperature = 0.25
            trainer.tokenizer.add_tokens(["later"])
            args.copy_custom_file_list, args.seed = "later", 1234
            args.flex_allow_config_changes.append("rope_theta")
            state.trial_name, state.trial_params["later"] = "later", True
            random.random()
            np.random.random()
            changed.set()

    async_save.capture_files = encoded_late
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"w": 0, "[U]": 1}, "[U]")))
    trainer = flex_trainer(**settings, cls=CopiesFiles, callbacks=[Change()], tokenizer=tokenizer)
    trainer.args.copy_custom_file_list = "at the step"
    trainer.model.config.task_specific_params = {"task": {"beams": 3}}
    trainer.model.generation_config = GenerationConfig(temperature=0.5)
    trainer.train()
