"""The events of a training loop: what this package does before and after the callbacks.

:class:`LoopEvents` replaces ``call_event`` of the Trainer's callback handler when the Trainer is constructed, so that
every event of PaddleFormers goes through it.

It also stops a run that bypasses the replaced methods, because a subclass overrides a method without ``super()`` or
PaddleFormers calls another method. Such a run would save in PaddleFormers' own format, or ignore the checkpoint to
resume. Replaced methods therefore record their calls (``ran`` and ``output`` of :class:`.session.Run`), which are
checked at the start of training, at every save and after it. Ranks do not communicate: all have the same records.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddleformers_fc.errors import EnvironmentMismatch
from paddleformers_fc.trainer import sonic_moe, streaming
from paddleformers_fc.trainer.library import LOAD_METHOD, PREFIX_CHECKPOINT_DIR, ShardingOption
from paddleformers_fc.trainer.optimizers import drop_prefetched
from paddleformers_fc.trainer.session import Session


class LoopEvents:
    """The events of one Trainer.

    Args:
        session: the session of the Trainer.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        handler = session.trainer.callback_handler
        self._call_callbacks = handler.call_event
        handler.call_event = self.call_event

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Handle an event, and call all callbacks as ``CallbackHandler.call_event`` does."""
        session = self._session
        with session.best.visible_in(session.trainer):
            if event == "on_save" and session.saver.defers_event(state.global_step):
                return control
            self._before(event, args, state, control)
            control = self._call_callbacks(event, args, state, control, **kwargs)
            self._after(event, args, state, control)
        return control

    def _before(self, event: str, args: Any, state: Any, control: Any) -> None:
        session = self._session
        if event == "on_train_begin":
            check_own_loop(session)
            if getattr(args, "using_sonic_moe", False):
                sonic_moe.alternate_before_training(session.trainer)
            session.position.on_train_begin(args, state)
        elif event == "on_epoch_begin":
            session.position.on_epoch_begin(state)
        elif event == "on_optimizer_begin":
            if session.average is not None:
                session.average.check_not_in_model()
            session.barrier.finish()
            if ShardingOption.FULL_SHARD in args.sharding:
                drop_prefetched(session.trainer.model.parameters())  # The update changes their weights.
        elif event == "on_step_end":
            self._check_local(state)
            session.position.on_step_end(args, state)
            # Before the callbacks, so that a save in a callback contains the average of this step.
            if session.average is not None:
                session.average.on_step_end(state)
        elif event == "on_save":
            self._check_saved(args, state)
        elif event == "on_train_end":
            session.saver.finish(session)

    def _after(self, event: str, args: Any, state: Any, control: Any) -> None:
        session = self._session
        if event == "on_prediction_step" and session.agreement.is_running:
            agree(session, "evaluation")
        elif event == "on_step_end":
            agree(session, "training")
            session.saver.report()
            session.figures.send_loaded()
            streaming.push(session.trainer, session.receive, session.channel)
        elif event == "on_epoch_end":
            session.position.on_epoch_end(args, state, control)
        if session.signals is not None:
            session.signals.direct(event, control)

    def _check_local(self, state: Any) -> None:
        """Check at the second step that the end of the first step could save to the local tier.

        Raises:
            EnvironmentMismatch: the same on every rank.
        """
        run, name = self._session.run, "_maybe_log_save_evaluate"
        if run.local is not None and state.global_step == run.begun + 2 and name not in run.ran:
            _raise_skipped(self._session.trainer, "the end of a step", [name])

    def _check_saved(self, args: Any, state: Any) -> None:
        """Check that this package did the save that has just ended.

        Raises:
            EnvironmentMismatch: the same on every rank.
        """
        session = self._session
        if state is not session.trainer.state:
            return  # The deferred event of an asynchronous save, which has the state of its step.
        directory = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        skipped = [] if session.run.output.saved == directory else ["_save_checkpoint"]
        _raise_skipped(session.trainer, str(directory), skipped)


def agree(session: Session, kind: str) -> None:
    """Advance a save whose current part all ranks have done, and learn whether any rank has received a signal.

    Args:
        session: the session of the Trainer.
        kind: the kind of the step that ends.
    """
    saver, signals = session.saver, session.signals
    agreed = session.agreement.read()
    if agreed is not None and agreed.is_signalled:
        signals.become_due()
    subject = saver.under_way
    if subject is not None and agreed is not None and agreed.subject is subject:
        saver.advance(session)
        subject = saver.under_way
    if subject is not None or signals is not None:
        session.agreement.begin_next(kind, subject, saver.is_done, bool(signals and signals.received))


def check_own_loop(session: Session) -> None:
    """Check that the training loop and the requested load went through the replaced methods.

    Args:
        session: the session of a Trainer that trains, or that saves without having trained.

    Raises:
        EnvironmentMismatch: lists the methods that did not run.
    """
    expected = ("train", LOAD_METHOD, "_inner_training_loop")
    skipped = [name for name in expected if name not in session.run.ran]
    if session.run.chosen is None and LOAD_METHOD in skipped:
        skipped.remove(LOAD_METHOD)
    _raise_skipped(session.trainer, "the start of training", skipped)


def _raise_skipped(trainer: Any, where: str, skipped: Sequence[str]) -> None:
    if not skipped:
        return
    raise EnvironmentMismatch(
        "flex_checkpoint is true, and the training loop did not go through this package.",
        where=where,
        evidence=[
            f"{name} of paddleformers_fc did not run; the Trainer's own is {_definition(trainer, name)}"
            for name in skipped
        ],
        next_step="Call super() in every method that a Trainer class overrides. Delete checkpoints of such runs: they "
        "are in another format.",
    )


def _definition(trainer: Any, name: str) -> str:
    """Return the qualified name of a method in the class that defines it."""
    owner = next((one for one in type(trainer).__mro__ if name in vars(one)), type(trainer))
    return f"{owner.__module__}.{owner.__qualname__}.{name}"
