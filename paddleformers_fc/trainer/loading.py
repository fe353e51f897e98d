"""Resume: replacements for the methods of PaddleFormers' Trainer that load, one function each.

They choose the checkpoint, load weights and states, and continue the data where the checkpoint ended. The training loop
is PaddleFormers' own. It gets no checkpoint, because the Trainer's state, the data position and the random state are
restored here. Work that can fail on a single rank runs in a helper that makes all ranks raise the error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import paddle.distributed as dist
from msgspec import structs
from paddle.optimizer.lr import CosineAnnealingWarmRestarts, LambdaDecay

from paddleformers_fc.distributed.channel import Channel, all_gather_checked, gather_and_keep, run_on_all
from paddleformers_fc.errors import CheckpointError, Diverged, FlexError, MismatchError, StorageError
from paddleformers_fc.execute.load import (
    LoadReport,
    LoadTerms,
    PreparedLoad,
    load_consistency,
    prepare_load,
    whole_model,
)
from paddleformers_fc.execute.opening import open_on_all_ranks, own_file
from paddleformers_fc.execute.output_directory import facts_of
from paddleformers_fc.execute.phases import PhaseTimer
from paddleformers_fc.execute.reading import Key
from paddleformers_fc.execute.staging_pool import measured_transfers
from paddleformers_fc.formats import OpenedCheckpoint, stock_run
from paddleformers_fc.formats.checkpoint import REFUSE, require_average, with_tied
from paddleformers_fc.layout.live import LiveRoles
from paddleformers_fc.layout.roles import EMA_STATE, MASTER, MASTER_WEIGHT, MODEL_STATE, OPTIMIZER_STATE
from paddleformers_fc.progress_display import shown_in_training
from paddleformers_fc.storage.commit import leftovers
from paddleformers_fc.storage.files import real_path
from paddleformers_fc.storage.manifest import Manifest
from paddleformers_fc.storage.paths import AnyPath, parse_named, parse_path
from paddleformers_fc.text import count_text, fold, natural, size_text
from paddleformers_fc.trainer import (
    batches,
    documents,
    ema,
    library,
    live_roles,
    optimizers,
    position,
    reference,
    restore,
    resume,
    rng,
    run_changes,
    weight_sources,
)
from paddleformers_fc.trainer.description import describe_model, filled_from_run
from paddleformers_fc.trainer.library import LOAD_METHOD, logger
from paddleformers_fc.trainer.options import local_dir
from paddleformers_fc.trainer.resume import degrees_text, parallel_degrees
from paddleformers_fc.trainer.save import rotate
from paddleformers_fc.trainer.save_on_signal import listening
from paddleformers_fc.trainer.session import CheckpointReport, Loaded, Native, Run, Session, read_options, session_of
from paddleformers_fc.trainer.startup import check_run
from paddleformers_fc.trainer.tiers import Tier, unused_tier


def _define_step_variable(step: int) -> None:
    """Define the environment variable of PaddleFormers' loop, before a data loader has threads.

    PaddleFormers 1.2.0 sets ``TRAINER_GLOBAL_STEP`` in each step. In the first step a loader thread may be reading the
    environment without a lock (Hugging Face's tokenizers look up ``TOKENIZERS_PARALLELISM`` for each text), and adding
    a variable may move the environment, which rarely crashes the process. Changing an existing variable is safe.

    Args:
        step: number of finished steps.
    """
    os.environ["TRAINER_GLOBAL_STEP"] = str(step)


def train(
    trainer: Any,
    native: Native,
    resume_from_checkpoint: str | bool | None = None,
    ignore_keys_for_eval: list[str] | None = None,
) -> Any:
    """Replace ``Trainer.train``: choose the checkpoint, of which ``True`` requests the newest finished one.

    Raises:
        NotACheckpoint: there is no checkpoint, or the named directory is not a checkpoint.
        FlexError: as :func:`.startup.check_run`, before the first step.
    """
    session = session_of(trainer)
    model = describe_model(trainer.model)
    tier = check_run(session, model)
    if session.uploads is not None:
        session.uploads.check()
    session.run = Run(model, {"train"}, local=Tier(is_local=True, id=tier) if tier else None)
    trainer._skip_global_steps = 0
    if session.average is not None:
        session.average.reset()
    timer = PhaseTimer()
    chosen = _choose(session.args, resume_from_checkpoint, _search(session))
    seconds = timer.end("open")
    _warn_of_leftovers(session)
    if session.args.should_log:
        session.warn(unused_tier(session.args))
    if chosen is None:
        _begin_new_run(session)
        return native(None, ignore_keys_for_eval)
    session.run.chosen = replace(chosen, seconds=seconds)
    return native(str(chosen.path), ignore_keys_for_eval)


def _warn_of_leftovers(session: Session) -> None:
    """Warn, on ranks that log, of directories of other saves that the next save does not delete."""
    places = _search(session).places
    if not session.args.should_log:
        return
    try:
        found = [(path, facts_of(one)) for path in places.values() for one in leftovers(path) if one.stays]
    except StorageError:
        return  # The first save raises it.
    for place in dict.fromkeys(path for path, _ in found):
        session.warn(
            f"{place} contains directories of other saves. Review and remove them with paddleformers-fc clean {place}:",
            (f"{place}/{one.name}, {size_text(one.bytes)}: {one.why}" for path, one in found if path == place),
        )


def _search(session: Session) -> resume.Search:
    """Return the search for the newest checkpoint of a run."""
    return resume.Search(
        Path(session.args.output_dir),
        session.channel,
        session.warn_once,
        session.run.model.config,
        documents.RESUME_FILES,
        local_dir(session.args),
    )


def _choose(args: Any, requested: str | bool | None, search: resume.Search) -> resume.Choice | None:
    """Choose the checkpoint to resume; None to start from the beginning.

    Args:
        args: the training arguments.
        requested: the argument of ``Trainer.train``.
        search: the search for the newest checkpoint.
    """
    if getattr(args, "looks_for_last_checkpoint", False):
        if args.resume_from_checkpoint is None and not args.overwrite_output_dir:
            # The command line requests the newest directory, or None on a node with an empty disk. This request is
            # ignored, because all ranks must decide together.
            return resume.newest_or_begin(search)
        # Preference training requests the newest directory, or None, even if a user named another checkpoint.
        requested = args.resume_from_checkpoint
    if not requested:
        return None
    if requested is True:
        return resume.require_newest(search)
    return resume.open_named(parse_named(requested), args.flex_verify, search)


def _begin_new_run(session: Session, saved: Sequence[resume.Saved] | None = None) -> None:
    """Create the record of a new run, and warn of checkpoints of other runs in its output directory."""
    output_dir = Path(session.args.output_dir)
    session.run.record = resume.new_run()
    saved = resume.saved_in(_search(session).places, session.channel) if saved is None else saved
    session.warn(resume.new_run_warning(session.run.record, saved, output_dir))


def load(trainer: Any, native: Native, resume_from_checkpoint: str) -> None:
    """Replace ``Trainer._load_flex_checkpoint``: fill model and optimizer, and restore the Trainer's state.

    Raises:
        FlexError: the same on every rank. If tensors were already being filled, the model is marked as undefined; see
            :mod:`.weight_sources`.
    """
    session = session_of(trainer)
    if not session.run.ran:  # A script called this method, not train.
        session.run = Run(describe_model(trainer.model))
    args, choice = session.args, _choice_of(session, resume_from_checkpoint)
    timer = PhaseTimer({"open": choice.seconds})
    if args.should_log:
        logger.info(f"Resuming from {choice.path}")
    with measured_transfers() as transfers, filled_from_run(trainer):
        session.run.model = describe_model(trainer.model)
        ready, report = _fill_chosen(session, choice, timer)
    checkpoint, progress = ready.checkpoint, ready.progress
    directory = checkpoint.catalog.root
    documents.take_over(trainer.model, checkpoint.config, checkpoint.held.get(documents.GENERATION))
    _discard_aborted_step(session)
    session.run.loaded = None
    session.run.ran.add(LOAD_METHOD)
    if progress is not None:
        states = frozenset(ready.names.of(checkpoint.catalog.roles.get(OPTIMIZER_STATE, {})))
        session.run.loaded = Loaded(directory, checkpoint.manifest, report.changes, progress, ready.generators, states)
        _restore_progress(trainer, progress)
        _locate_best(session, directory)
    _restore_average(session, ready)
    timer.end("finish")
    loaded = CheckpointReport(
        step=checkpoint.manifest.step,
        directory=directory,
        seconds=timer.elapsed,
        bytes=report.bytes_read,
        layouts=(degrees_text(checkpoint.manifest.parallel), degrees_text(parallel_degrees(args))),
        transfers=transfers,
        casts=report.casts,
        phases=timer.phases(report.phases.slowest),
    )
    session.report_loaded(loaded)
    _report_missing_content(args, checkpoint, progress is not None)
    if progress is None:
        session.warn(run_changes.changes_text(checkpoint.manifest.step, report.changes))


def _report_missing_content(args: Any, checkpoint: OpenedCheckpoint, continued: bool) -> None:
    """Log what a checkpoint of another format lacks for the resume."""
    if checkpoint.commit_record is not None or not args.should_log:
        return
    absent = stock_run.lacking(checkpoint.documents, dist.get_rank()) if continued else ["checksums"]
    logger.info(f"{checkpoint.catalog.root} {checkpoint.format.predicate}. It does not contain: {'; '.join(absent)}.")


@dataclass(frozen=True)
class _PreparedLoad:
    """A checkpoint that matches the model, before anything changes.

    Args:
        checkpoint: the opened checkpoint, with the metadata files of a resume.
        progress: the Trainer's state; None if the run is not continued.
        generators: the random generators of this process; None if the checkpoint does not contain them.
        load: fills weights, states and moving averages.
        names: names of the states in the live model.
    """

    checkpoint: OpenedCheckpoint
    progress: documents.TrainingProgress | None
    generators: bytes | None
    load: PreparedLoad
    names: restore.LiveNames


class _VerificationError(Exception):
    """A checkpoint is damaged; the cause lists the faults. Tensors may be undefined."""


@contextlib.contextmanager
def _verifying() -> Iterator[None]:
    """Context manager that turns errors of the checkpoint itself into a verification error."""
    try:
        yield
    except (CheckpointError, Diverged) as error:
        raise _VerificationError from error


def _fill_chosen(session: Session, choice: resume.Choice, timer: PhaseTimer) -> tuple[_PreparedLoad, LoadReport]:
    """Fill model and optimizer from the named checkpoint, or from the newest checkpoint that passes verification.

    A damaged tensor is found while it is filled. An older checkpoint then fills all tensors again.

    Raises:
        FlexError: the same on every rank: the named checkpoint is damaged, the newest one does not match the model, or
            no checkpoint is left.
    """
    model, search = session.trainer.model, _search(session)
    damaged: dict[Path, str] = {}
    touched: set[Key] | None = None
    while True:
        try:
            try:
                ready = _prepare(session, choice, timer)
            except MismatchError as mismatch:
                raise mismatch if choice.named else resume.with_new_run_advice(mismatch) from None
            if touched is not None:
                _check_overwrites(ready, touched, session.channel)
            directory = ready.checkpoint.catalog.root
            session.run.chosen = replace(choice, path=directory, opened=None)
            _identify_run(session, ready.checkpoint.manifest, session.run.chosen)
            touched = (touched or set()) | ready.load.targets
            shown = shown_in_training(f"loading {directory.name}", session.args.should_log)
            with _verifying(), weight_sources.mark_undefined_until_loaded(model, directory), shown:
                return ready, ready.load.fill()
        except _VerificationError as failed:
            error = failed.__cause__
            if choice.named or not isinstance(error, FlexError) or not isinstance(choice.path, Path):
                raise (error or failed) from None
            timer.end("read")
            damaged[choice.path] = why = error.in_one_line()
        search.warn(f"{choice.path} fails verification and is skipped: {why}")
        choice = resume.require_newest(search, damaged)


def _check_overwrites(ready: _PreparedLoad, touched: set[Key], channel: Channel) -> None:
    """Check that a checkpoint fills all tensors that damaged checkpoints have begun to fill.

    Raises:
        MismatchError: the same on every rank.
    """

    def compare() -> None:
        # Every load allocates new moving averages.
        left = {key for key in touched - ready.load.targets if key[0] != EMA_STATE}
        if left:
            raise MismatchError(
                f"{count_text(len(left), 'tensor')} would keep undefined values of a damaged checkpoint.",
                where=str(ready.checkpoint.catalog.root),
                evidence=fold([f"{role} {name} is not in this checkpoint" for role, name in sorted(left)]),
                next_step="Start the job again, and name this checkpoint in resume_from_checkpoint.",
            )

    run_on_all(channel, "comparing the tensors of two checkpoints", compare)


def _prepare(session: Session, choice: resume.Choice, timer: PhaseTimer) -> _PreparedLoad:
    args, channel, directory = session.args, session.channel, choice.path
    model, options, continued = session.run.model, read_options(args), not args.ignore_load_lr_and_optim
    consistency = session.consistency(f"resuming from {directory.name}")
    with _verifying():
        # Some stock Trainers do not save the configuration.
        opened = choice.opened or open_on_all_ranks(
            directory, channel, args.flex_verify, consistency, lambda: model.config, documents.RESUME_FILES
        )
        choose_copies = partial(_with_copies, session, choice.named, opened)
        if opened.commit_record is None:
            checkpoint = run_on_all(channel, f"reading the run of {directory.name}", choose_copies)
        else:
            checkpoint = choose_copies()
        checkpoint = documents.hold_for_resume(checkpoint, channel, continued)
    timer.end("open")
    unread = args.flex_verify == "full" and opened.commit_record is not None
    checkpoint = structs.replace(checkpoint, averaged=_from_average(args, checkpoint), unread=unread)
    with _verifying():
        progress = documents.read_progress(checkpoint, session.trainer.optimizer) if continued else None
    if progress is not None:
        _check_progress(session, progress, directory)
        _check_reference(session, progress, directory)
    handed = own_file(checkpoint, channel, documents.rng_name) if continued else None
    terms = LoadTerms(
        args.aoa_config,
        may_change=args.flex_allow_config_changes,
        may_cast=args.flex_allow_casts,
        facts=consistency.facts,
    )
    if args.aoa_config:
        weights = partial(live_roles.model_roles, session.trainer.model)
        same = load_consistency(checkpoint, model, terms)
        terms = structs.replace(terms, tensors=whole_model(model, weights, channel, same))
    live = _LiveTensors(session, checkpoint, continued, terms, handed)
    with _verifying():
        load = prepare_load(checkpoint, live.to_fill, model, channel, options, terms, timer)
    return _PreparedLoad(checkpoint, progress, live.generators, load, live.names)


@dataclass
class _LiveTensors:
    """The live tensors of this rank, as a callback of the exchange of plans.

    Args:
        session: the session of the Trainer.
        checkpoint: the opened checkpoint.
        continued: whether the run is continued; if not, only its weights are loaded.
        terms: how the model may differ.
        handed: the random generators of this process, if another rank has read them.
        names: names of the states in the live model; set by :meth:`to_fill`.
        generators: the random generators of this process; None if the checkpoint does not contain them.
    """

    session: Session
    checkpoint: OpenedCheckpoint
    continued: bool
    terms: LoadTerms
    handed: bytes | None
    names: restore.LiveNames = field(default_factory=restore.LiveNames)
    generators: bytes | None = None

    def to_fill(self) -> LiveRoles:
        """Return the weights and states that the checkpoint fills, and read the random generators of this process."""
        session, trainer, checkpoint = self.session, self.session.trainer, self.checkpoint
        stored, targets, optimizer = checkpoint.catalog.roles, [MODEL_STATE], None
        session.settle_weights()
        if self.continued:
            self.generators = documents.read_generators(checkpoint, dist.get_rank(), self.handed)
        if self.continued or stored.get(MASTER_WEIGHT) or self.terms.may_cast:
            optimizer = trainer.optimizer
            optimizers.check_supported(optimizer)
            optimizers.build_buffers(trainer.model_wrapped, optimizer)
            # A new run from the weights of a checkpoint starts with the full precision of its master weights.
            targets += [MASTER_WEIGHT, OPTIMIZER_STATE] if self.continued else [MASTER_WEIGHT]
        # PaddleFormers offloads accumulators when they are created, but master weights only after the first step.
        place_master = library.offload if trainer.args.tensorwise_offload_optimizer else None
        live = live_roles.LiveModel(trainer.model, optimizer, session.run.model, place_master)
        found, self.names = restore.to_fill(live, checkpoint, session.run.model, self.terms, targets)
        if self.continued and session.average is not None and stored.get(EMA_STATE):
            # A stored average has the name of its parameter; the names of master weights map it to the live model.
            masters = self.names.of({name + MASTER.suffix for name in stored[EMA_STATE]})
            found[EMA_STATE] = session.average.allocate({name.removesuffix(MASTER.suffix) for name in masters})
        return found


def _from_average(args: Any, checkpoint: OpenedCheckpoint) -> bool:
    """Return whether to read the weights from their moving averages.

    Raises:
        OptionError: the checkpoint has no moving averages; the same on every rank.
    """
    is_requested = bool(getattr(args, "sharded_model_from_ema", False))
    if is_requested:
        require_average(checkpoint)
    return is_requested


def _identify_run(session: Session, manifest: Manifest, choice: resume.Choice) -> None:
    """Set the record of the run that resumes a checkpoint, and warn of other runs in its output directory."""
    if session.args.ignore_load_lr_and_optim:
        _begin_new_run(session, choice.saved)
        return
    places, path = _search(session).places, choice.path
    here = isinstance(path, Path) and real_path(path.parent) in map(real_path, places.values())
    saved = choice.saved if choice.saved is not None else resume.saved_in(places, session.channel)
    session.run.record, text = resume.continue_or_branch(manifest, saved, here, choice.named)
    session.warn(text)


def _with_copies(session: Session, named: bool, checkpoint: OpenedCheckpoint) -> OpenedCheckpoint:
    """Return a checkpoint with the copies of tied tensors to read, which a user may choose if they differ."""
    args, manifest = session.args, checkpoint.manifest
    if not named or args.flex_tied == REFUSE:
        return with_tied(checkpoint, REFUSE)
    if manifest.ties:
        session.warn(
            f"Copies of tied tensors in {checkpoint.catalog.root} differ. flex_tied: {args.flex_tied} reads the copies "
            f"of the {args.flex_tied} pipeline stage.",
            (line for tie in manifest.ties for line in tie.differences),
        )
    return with_tied(checkpoint, args.flex_tied)


def _choice_of(session: Session, path: str) -> resume.Choice:
    """Return the choice for a path that PaddleFormers passes on, or a script that calls the method itself."""
    chosen = session.run.chosen
    if chosen is not None and path == str(chosen.path):
        return chosen
    return resume.Choice(parse_path(path), named=True)


def _check_progress(session: Session, progress: documents.TrainingProgress, directory: AnyPath) -> None:
    """Check that the live objects can receive the state that :func:`_restore_progress` will set later."""
    trainer = session.trainer
    position.from_document(progress.data, str(directory / documents.DATA))
    documents.check_alike(progress.scheduler, trainer.lr_scheduler.state_dict(), directory / documents.SCHEDULER)
    own = documents.own_scheduler(trainer)
    if own is not None and progress.own_scheduler is not None:
        documents.check_alike(progress.own_scheduler, own.state_dict(), directory / documents.OWN_SCHEDULER)
    elif own is not None:
        session.warn(
            f"{directory} has no state for the optimizer's own learning-rate scheduler, which starts from the "
            "beginning.",
        )
    if trainer.do_grad_scaling and progress.scaler is not None:
        documents.check_alike(progress.scaler, trainer.scaler.state_dict(), directory / documents.SCALER)


def _check_reference(session: Session, progress: documents.TrainingProgress, directory: AnyPath) -> None:
    """Check that the saved run had the same reference model."""
    model = reference.reference_of(session.trainer)
    if model is None or progress.reference is None:
        return
    what, where = "Invalid description of the reference model.", directory / documents.REFERENCE
    saved = documents.typed(progress.reference, reference.ReferenceDocument, what, where)
    session.reference = session.reference or reference.contents_of(model, session.channel)
    reference.check_same_reference(saved, session.reference, directory, session.args.flex_allow_casts)


def _restore_progress(trainer: Any, progress: documents.TrainingProgress) -> None:
    """Restore the learning-rate schedulers, the loss scaler and the Trainer's state."""
    scheduler = trainer.lr_scheduler
    _restore_scheduler(scheduler, progress.scheduler)
    if type(scheduler) is LambdaDecay:
        # If the schedule has changed, the first step must use its rate, not the saved rate.
        scheduler.last_lr = scheduler.get_lr()
    own = documents.own_scheduler(trainer)
    if own is not None and progress.own_scheduler is not None:
        _restore_scheduler(own, progress.own_scheduler)
    if trainer.do_grad_scaling and progress.scaler is not None:
        trainer.scaler.load_state_dict(progress.scaler)
    trainer.state = progress.state
    # PaddleFormers averages the losses over the steps of this run, without the skipped ones.
    trainer._skip_global_steps = progress.state.global_step


def _restore_scheduler(scheduler: Any, saved: dict[str, Any]) -> None:
    """Restore a learning-rate scheduler, and the position in its cycle that Paddle's state of warm restarts lacks."""
    scheduler.set_state_dict(saved)
    if isinstance(scheduler, CosineAnnealingWarmRestarts):
        scheduler.T_cur, scheduler.T_i = scheduler.last_epoch, scheduler.T_0
        while scheduler.T_cur >= scheduler.T_i:
            scheduler.T_cur -= scheduler.T_i
            scheduler.T_i *= scheduler.T_mult


def _restore_average(session: Session, ready: _PreparedLoad) -> None:
    """Continue the moving average of the checkpoint, or warn if only the checkpoint or only the run has one."""
    directory, stored = ready.checkpoint.catalog.root, ready.checkpoint.catalog.roles.get(EMA_STATE, {})
    values = None if ready.progress is None else ready.progress.average
    if ready.progress is None:
        if stored and session.average is not None:
            session.warn(
                f"The moving average of {directory} is not continued, because ignore_load_lr_and_optim starts a new "
                "run. The average of this run starts as a copy of the weights."
            )
    elif session.average is None:
        if stored:
            session.warn(
                f"{directory} has a moving average of {count_text(len(stored), 'tensor')}, and this run has none: the "
                "average is not continued, and later checkpoints do not contain it. Set flex_ema_decay to continue it."
            )
    elif values is None or not stored:
        session.warn(
            f"{directory} has no moving average. It starts as a copy of the weights at its next update and does not "
            "include earlier steps."
        )
    else:
        what, where = "Invalid description of the moving average.", directory / documents.AVERAGE
        saved = documents.typed(values, ema.AverageDocument, what, where)
        session.average.restore(ready.load.roles.get(EMA_STATE, {}), saved)


def _discard_aborted_step(session: Session) -> None:
    """Discard the gradients and batches that an aborted step of this Trainer has left."""
    if session.has_trained:
        live_roles.drop_gradients(session.trainer.model, session.trainer.optimizer)
    session.trainer._pp_data_buffer = []


def _locate_best(session: Session, resumed: AnyPath) -> None:
    """Set the current path of the best checkpoint. If it is missing, warn now instead of failing after training."""
    state = session.trainer.state
    named = state.best_model_checkpoint
    if named is None:
        return
    local = local_dir(session.args)
    if local is not None and isinstance(resumed, Path) and real_path(resumed.parent) == real_path(local):
        resumed = Path(session.args.output_dir) / resumed.name  # The best checkpoint is in output_dir.
    found = state.best_model_checkpoint = resume.locate_best(named, resumed, session.channel)
    if found is None:
        session.warn(
            f"Missing best checkpoint: neither {named} nor a directory of that name next to {resumed} is a finished "
            "checkpoint. The next evaluated and saved checkpoint replaces it.",
        )


def inner_training_loop(
    trainer: Any,
    native: Native,
    args: Any,
    model: Any,
    train_dataloader: Any,
    len_dataloader: int | None,
    max_steps: int,
    num_train_epochs: int,
    num_update_steps_per_epoch: int,
    num_train_samples: int,
    resume_from_checkpoint: str | None,
    ignore_keys_for_eval: list[str] | None,
) -> Any:
    """Replace ``Trainer._inner_training_loop``: start the data of a resumed run where the checkpoint ended.

    Raises:
        OptionError: the order or the batches of the data do not match, or the optimizer states are not supported.
        SystemExit: the run was saved after a signal.
    """
    session = session_of(trainer)
    saved = _saved_data(session.run)
    order, passes = _data(session, train_dataloader, len_dataloader, saved)
    if isinstance(saved, position.StepPosition):
        saved = saved.under(position.batch_sizes_of(args, passes), order, passes, args.dataloader_drop_last)

    def check() -> tuple[list[str], str]:
        return _check_training(session), "" if saved is None else _changes(session, saved, order, passes)

    # The optimizer and its sharding wrappers exist only now.
    stateless, changes = gather_and_keep(session.channel, "checking the model and the optimizer", check, list[str])
    _warn_of_missing_states(session, stateless)
    session.warn(changes)
    start, epochs, loader = position.Start(position.Position(), 0), num_train_epochs, train_dataloader
    on_epoch_replayed = None
    if saved is not None:
        start = _start(session, saved, order, passes)
        done = trainer.state.global_step >= max_steps
        epochs = position.epochs_left(start, num_train_epochs, args.max_steps > 0, done)
        loader = batches.ResumedBatches(
            train_dataloader,
            start,
            order.indexed,
            on_first_batch=lambda: _restore_generators(session),
            on_epoch_over=session.position.begin_next_epoch,
            keep_waiting=trainer._pp_data_buffer.append,
            rereads=_rereads(session, train_dataloader, start, order),
        )
        on_epoch_replayed = loader.expect_first
    session.position.begin(order, passes, start, saved is not None, num_train_epochs, on_epoch_replayed)
    session.has_trained = True
    session.run.ran.add("_inner_training_loop")
    session.run.begun = trainer.state.global_step
    _define_step_variable(trainer.state.global_step)
    with (
        _uploading(session),
        listening(session),
        session.agreement.running(),
        session.best.hidden_from_loop(trainer),
        session.saver.draining(session),
    ):
        result = native(
            args,
            model,
            loader,
            len_dataloader,
            max_steps,
            epochs,
            num_update_steps_per_epoch,
            num_train_samples,
            None,
            ignore_keys_for_eval,
        )
    if args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
        _load_best(session, Path(trainer.state.best_model_checkpoint))
    return result


@contextlib.contextmanager
def _uploading(session: Session) -> Iterator[None]:
    """Context manager around a training loop; its exit finishes uploads and deletes old checkpoints."""
    if session.uploads is None:
        yield
        return
    with session.uploads.draining():
        yield
    output = session.run.output
    if output.saved is not None:
        best = session.trainer.state.best_model_checkpoint
        rotate(session, output, output.saved, best, output.disks, session.channel)


def _check_training(session: Session) -> list[str]:
    """Check model and optimizer, and return this rank's trained parameters that have no states in the checkpoint."""
    model, optimizer, loaded = session.trainer.model, session.trainer.optimizer, session.run.loaded
    weight_sources.check_defined(model)
    session.check_optimizer()
    if session.average is not None:
        ema.check_has_states(model, optimizer)
    if loaded is None or not optimizers.has_states(optimizer):
        return []
    live = live_roles.LiveModel(model, described=session.run.model)
    return live_roles.trained_without_states(live, loaded.stored_states)


def _warn_of_missing_states(session: Session, everyone: list[list[str]]) -> None:
    names, loaded = sorted({name for names in everyone for name in names}, key=natural), session.run.loaded
    if loaded is None or not names:
        return
    has_averages = session.average is not None and loaded.progress.average is not None
    session.warn(
        f"{count_text(len(names), 'trained parameter')} {'has' if len(names) == 1 else 'have'} no optimizer states "
        f"in {loaded.directory}: frozen in the saved run, without a gradient, or new. Their states start at zero"
        + (", and their moving averages as copies of the weights." if has_averages else "."),
        fold(names),
    )


def _saved_data(run: Run) -> position.SavedData | position.StepPosition | None:
    """Return the data position of the resumed checkpoint; None if the run is not continued."""
    if run.loaded is None:
        return None
    return position.from_document(run.loaded.progress.data, f"{run.loaded.directory}/{documents.DATA}")


def _data(
    session: Session, loader: Any, passes: int | None, saved: position.SavedData | position.StepPosition | None
) -> tuple[position.SampleOrder, int | None]:
    """Return the order of the data and the passes of an epoch, which are None if unknown.

    Ranks that receive their batches from other ranks also receive these values.
    """
    order = batches.order_of(loader)
    if isinstance(saved, tuple):
        order = replace(
            order, corpus=batches.digest(getattr(loader, "dataset", None), position.covered(saved[0], saved[2]))
        )
    own = order, batches.passes_of_epoch(loader, passes)
    if not session.args.distributed_dataloader:
        return own
    reads = getattr(loader, "_need_data", True)
    everyone = all_gather_checked(
        session.channel,
        "describing the data",
        lambda: [own] if reads else [],
        list[tuple[position.SampleOrder, int | None]],
    )
    return next(order for orders in everyone for order in orders)


def _start(
    session: Session, saved: position.SavedData, order: position.SampleOrder, passes: int | None
) -> position.Start:
    args = session.args
    pace = position.batch_sizes_of(args, passes)
    if args.ignore_data_skip:
        return position.Start(position.Position(saved[0].epoch, 0, saved[0].consumed), 0)
    pipeline = args.pipeline_model_parallel_size > 1
    return position.start_after(saved, pace, order, passes, pipeline, args.dataloader_drop_last)


def _rereads(session: Session, loader: Any, start: position.Start, order: position.SampleOrder) -> bool:
    """Return whether to read the finished epochs of a stream again; warn if that is not possible."""
    if session.args.ignore_data_skip or not batches.needs_finished_epochs(loader, order.indexed):
        return False
    if not getattr(loader, "num_workers", 0):
        return True
    # The end of a stream that is read faster than workers send it blocks Paddle's loader forever.
    if start.position.epoch:
        session.warn(
            f"Finished epochs of the data ({start.position.epoch}) are not read again, because the data loader has "
            "worker processes. If the order of an epoch depends on the epochs before it, samples are repeated or left "
            "out: set dataloader_num_workers: 0."
        )
    return False


def _changes(session: Session, saved: position.SavedData, order: position.SampleOrder, passes: int | None) -> str:
    """Return a table of differences from the saved model and run, on ranks that log.

    Raises:
        OptionError: the run continues in the middle of an epoch whose samples have changed.
    """
    args, loaded = session.args, session.run.loaded
    if loaded is None or not args.should_log:
        return ""
    done, old_pace, old_order = saved
    pace, skips = position.batch_sizes_of(args, passes), done.samples > 0 and not args.ignore_data_skip
    streams = not order.indexed and skips
    arguments = loaded.progress.arguments, documents.own_arguments(args, session.trainer.optimizer)
    if skips:
        run_changes.check_same_samples(*arguments, str(loaded.directory))
    found = [
        *loaded.changes,
        *run_changes.argument_changes(*arguments, streams),
        *run_changes.batch_changes(old_pace, pace),
        *run_changes.length_changes((old_order, old_pace), (order, pace)),
        *run_changes.file_changes(loaded.manifest, documents.tokenizer_files(session.trainer)),
    ]
    return run_changes.changes_text(session.trainer.state.global_step, found, streams)


def _load_best(session: Session, directory: Path) -> None:
    """Load the weights of the best checkpoint after training."""
    model, args, channel = session.trainer.model, session.args, session.channel
    checkpoint = with_tied(open_on_all_ranks(directory, channel, args.flex_verify), args.flex_tied)
    session.settle_weights()
    roles = partial(live_roles.model_roles, model)
    terms = LoadTerms(may_change=args.flex_allow_config_changes, may_cast=args.flex_allow_casts)
    load = prepare_load(checkpoint, roles, describe_model(model), channel, read_options(args), terms)
    shown = shown_in_training(f"loading {directory.name}", args.should_log)
    with weight_sources.mark_undefined_until_loaded(model, directory), shown:
        load.fill()
    if args.should_log:
        logger.info(f"The model now has the weights of its best checkpoint, {directory}.")


def _restore_generators(session: Session) -> None:
    """Restore this rank's random generators, or warn if the checkpoint has none for this number of ranks."""
    args, loaded = session.args, session.run.loaded
    if loaded is None:
        return
    path, generators = loaded.directory / documents.rng_name(dist.get_rank()), loaded.generators
    restored = generators is not None and rng.restore_generators(
        generators, str(path), args.world_size, args.use_hybrid_parallel, args.tensor_model_parallel_size > 1
    )
    if not restored:
        session.warn_once(
            f"Random generators are not restored: {loaded.directory} has none for "
            f"{count_text(args.world_size, 'rank')}. Dropout and other randomness differ from the saved run.",
        )
