"""The construction of a Trainer: an unsupported run is refused before hours of training."""

from __future__ import annotations

import functools
from typing import Any

from paddleformers_fc.distributed.channel import run_on_all
from paddleformers_fc.errors import OptionError
from paddleformers_fc.execute.save import check_ties
from paddleformers_fc.execute.save_plan import model_rules
from paddleformers_fc.families import family_for
from paddleformers_fc.layout.live import describe_roles
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.trainer import (
    adapter_checks,
    base_fingerprint,
    batches,
    description,
    documents,
    ema,
    live_roles,
    own_statements,
    preflight,
    pretrained,
    sonic_moe,
)
from paddleformers_fc.trainer.async_save import AsyncSaves, StepEnds
from paddleformers_fc.trainer.callback import (
    ATTENDED,
    AlternateOnce,
    DropPrefetched,
    FlexCheckpointCallback,
    ProgressRecorder,
    ReportFigures,
    record_progress,
)
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.ema import UpdateBarrier
from paddleformers_fc.trainer.job_state import (
    JOB_STATE,
    WAITING,
    JobState,
    Native,
    channel_of,
    refuse_optimizer,
    reporters,
    step_agreement_of,
)
from paddleformers_fc.trainer.library import logger
from paddleformers_fc.trainer.library_models import LoRAModel, PretrainedModel, ShardingOption
from paddleformers_fc.trainer.options import FlexFields, is_active, upload_url, without_effect
from paddleformers_fc.trainer.save_job import BypassCheck, SyncSaves
from paddleformers_fc.trainer.saving import save_pretrained
from paddleformers_fc.trainer.uploads import Uploads

_RELEASES_WEIGHTS = "FP8QuantWeightCallback"
"""PaddleFormers' callback that keeps quantized weights alone during the passes; PaddleNLP has none."""


def init_trainer(trainer: Any, native: Native, *args: Any, **kwargs: Any) -> None:
    """``Trainer.__init__``: afterwards the model exports through us and the loop is followed.

    Raises:
        OptionError: the model or the optimizer is one whose checkpoints are not supported, or another loader has set
            the model's weights.
        MappingError: no family declares the model, and the statements of its class do not map it.
    """
    given = (*args, *kwargs.values())
    for active in filter(is_active, given):
        setattr(active, ATTENDED, True)
        preflight.check_disks(active)
        for model in (one for one in map(description.base_model, given) if isinstance(one, PretrainedModel)):
            documents.keep_use_cache(model)
    native(*args, **kwargs)
    arguments = trainer.args
    record_progress(trainer)
    if not is_active(arguments) or trainer.model is None:
        return
    _refuse_other_arguments(arguments)
    channel = channel_of(arguments)
    own_statements.adopt(trainer.model, channel)
    run_on_all(channel, "checking the model", lambda: _refuse_undeclared(trainer))
    adapter_checks.refuse_unsupported(trainer.model, channel)
    adapter_checks.refuse_untrained(trainer.model, channel)
    run_on_all(channel, "describing the adapters", lambda: _refuse_unmapped(trainer.model))
    refuse_optimizer(trainer)
    run_on_all(
        channel,
        "checking where the model's weights come from",
        lambda: pretrained.require_verified(trainer.model),
    )
    base_fingerprint.identify_once(trainer.model, channel)
    agreement = step_agreement_of(arguments)
    saves = AsyncSaves(agreement) if arguments.flex_async_save else None
    job_state = JobState(
        batches.PositionTracker(lambda: len(getattr(trainer, WAITING, ()))),
        UpdateBarrier(lambda: _passes_change_weights(trainer)),
        saves or SyncSaves(),
        agreement,
    )
    url = upload_url(arguments)
    job_state.uploads = None if url is None else Uploads(url, arguments, channel)
    setattr(trainer, JOB_STATE, job_state)
    if getattr(arguments, "using_sonic_moe", False):
        trainer.add_callback(AlternateOnce(trainer))
    trainer.add_callback(job_state.tracker)
    trainer.add_callback(job_state.update_barrier)
    if ShardingOption.FULL_SHARD in arguments.sharding:
        trainer.add_callback(DropPrefetched(trainer.model))
    trainer.add_callback(StepEnds(trainer, agreement, saves))
    _add_average(trainer, job_state)
    trainer.add_callback(BypassCheck(trainer))
    if all(isinstance(one, ProgressRecorder) for one in reporters(trainer)):
        trainer.add_callback(FlexCheckpointCallback())
    trainer.add_callback(ReportFigures(trainer))
    trainer.model.save_pretrained = functools.partial(save_pretrained, trainer, trainer.model.save_pretrained)
    if arguments.should_log:
        for line in without_effect(arguments):
            logger.warning(line)


def _refuse_other_arguments(arguments: Any) -> None:
    """Refuse arguments with a ``flex_checkpoint`` of their own, which was not compared with the others."""
    if not isinstance(arguments, FlexFields):
        raise OptionError(
            "flex_checkpoint: true is set in training arguments that lack the other options of paddleformers_fc.",
            where=f"{type(arguments).__module__}.{type(arguments).__qualname__}",
            next_step="Use FlexTrainingArguments, or a subclass of it.",
        )


def _refuse_undeclared(trainer: Any) -> None:
    model = trainer.model
    if getattr(model, "config", None) is None:
        raise OptionError(
            "flex_checkpoint: true needs a model of PaddleFormers, whose configuration describes its tensors.",
            where=type(model).__name__,
            next_step="Train a PretrainedModel, or remove flex_checkpoint.",
        )
    described = describe_model(model)
    if described.rules is None:
        family_for(described.config)  # Refuses a model that could not be saved after hours of training.
    sonic_moe.refuse_unsupported(trainer, dict(described.config))
    check_ties(live_roles.model_roles(model)[MODEL_STATE], described)


def _refuse_unmapped(model: Any) -> None:
    """Refuse adapters of layers that the family does not declare."""
    if isinstance(model, LoRAModel):
        model_rules(describe_model(model), describe_roles(live_roles.model_roles(model))[MODEL_STATE])


def _add_average(trainer: Any, job_state: JobState) -> None:
    """Keep a moving average of the weights if the arguments request one."""
    settings = ema.settings_of(trainer.args)
    if settings is None:
        return
    job_state.average = ema.MovingAverage(
        settings,
        ema.KnownParts(trainer),
        job_state.update_barrier,
    )
    # A callback of the user that saves when a step ends saves the average after that step.
    trainer.callback_handler.callbacks.insert(0, job_state.average)


def _passes_change_weights(trainer: Any) -> bool:
    """Return whether the passes receive parameters, or release weights."""
    kinds = {kind.__name__ for one in trainer.callback_handler.callbacks for kind in type(one).__mro__}
    return live_roles.receives_in_passes(trainer.args) or _RELEASES_WEIGHTS in kinds
