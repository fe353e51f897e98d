"""The events of a training loop, in one order: parts of the session, callbacks, and the parts with the last word.

:class:`LoopEvents` takes the place of ``call_event`` of the Trainer's callback handler, once, when the Trainer is
constructed. Every event of PaddleFormers passes it.

It also stops a run whose loop bypasses this package. Two changes can bypass the replaced methods of a Trainer: a
subclass that overrides one without ``super()``, or a PaddleFormers that calls another method. The run would then save
in PaddleFormers' own format, or continue without the weights of the checkpoint that it resumes. Each replaced method
therefore records its call (``ran`` and ``output`` of :class:`.session.Run`). The records are checked at the start of
training, in every save and after it. All ranks have the same records, so that they need no exchange.
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
        session: of the Trainer.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        handler = session.trainer.callback_handler
        self._call_callbacks = handler.call_event
        handler.call_event = self.call_event

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Call our parts and all callbacks, as ``CallbackHandler.call_event``."""
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
                drop_prefetched(session.trainer.model.parameters())  # Their weights are about to change.
        elif event == "on_step_end":
            self._check_local(state)
            session.position.on_step_end(args, state)
            # A callback of the user that saves when a step ends saves the average after that step.
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
        """Stop at the second step if the end of the first one did not reach the save of the local tier.

        Raises:
            EnvironmentMismatch: the same on every rank.
        """
        run, name = self._session.run, "_maybe_log_save_evaluate"
        if run.local is not None and state.global_step == run.begun + 2 and name not in run.ran:
            _raise_skipped(self._session.trainer, "the end of a step", [name])

    def _check_saved(self, args: Any, state: Any) -> None:
        """Stop after the first save that was not ours.

        Raises:
            EnvironmentMismatch: the same on every rank.
        """
        session = self._session
        if state is not session.trainer.state:
            return  # After an asynchronous save the event has the state of its step, also on a rank that ends alone.
        directory = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        skipped = [] if session.run.output.saved == directory else ["_save_checkpoint"]
        _raise_skipped(session.trainer, str(directory), skipped)


def agree(session: Session, kind: str) -> None:
    """Commit a save that all ranks have written, and find out whether a rank has got a signal.

    Args:
        session: of the Trainer.
        kind: of the step that ends.
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
    """Refuse to train or save if the loop or the requested load is not the replaced method.

    Args:
        session: of a Trainer that trains, or that saves without having trained.

    Raises:
        EnvironmentMismatch: with the methods that did not run.
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
        next_step="Let the methods that a Trainer class overrides call super(). Delete checkpoints that such a run has "
        "written: they are in another format.",
    )


def _definition(trainer: Any, name: str) -> str:
    """Return the class that defines a method of the Trainer."""
    owner = next((one for one in type(trainer).__mro__ if name in vars(one)), type(trainer))
    return f"{owner.__module__}.{owner.__qualname__}.{name}"
