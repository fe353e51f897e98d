"""Set up a Trainer when it is constructed, and check its run before the first step.

A run that could not be saved fails here, instead of after hours of training.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from paddleformers_fc.distributed.channel import all_gather_checked, run_on_all
from paddleformers_fc.distributed.consistency import ConsistencyCheck, comparable_config, software_versions
from paddleformers_fc.distributed.store_client import on_several_nodes
from paddleformers_fc.errors import OptionError
from paddleformers_fc.execute.save import check_ties
from paddleformers_fc.execute.save_plan import model_rules
from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.layout.live import describe_roles
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.storage.files import check_writable
from paddleformers_fc.trainer import (
    adapter_checks,
    description,
    documents,
    ema,
    live_roles,
    own_statements,
    reference,
    streaming,
    tiers,
    weight_sources,
)
from paddleformers_fc.trainer.async_save import Saver
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.library import LoRAModel, PretrainedModel, logger
from paddleformers_fc.trainer.options import FlexFields, is_active, local_dir, upload_url, without_effect
from paddleformers_fc.trainer.save import save_pretrained
from paddleformers_fc.trainer.session import ATTENDED, Native, Session, channel_of, new_session, record_progress
from paddleformers_fc.trainer.uploads import Uploads
from paddleformers_fc.upstream.hooks import LIBRARIES

_CHANGE_WEIGHTS = {"FP8QuantWeightCallback", description.SWITCH}
"""Callbacks of a library that quantize weights, or move their values, during the passes."""


def init_trainer(trainer: Any, native: Native, *args: Any, **kwargs: Any) -> None:
    """``Trainer.__init__``: then check the model, create the session, and replace ``model.save_pretrained``.

    Raises:
        OptionError: checkpoints of the model or the optimizer are not supported, or another loader has filled the
            model.
        MappingError: no family declares the model, and the statements of its class do not map it.
    """
    given = (*args, *kwargs.values())
    for active in filter(is_active, given):
        setattr(active, ATTENDED, True)
        _check_disks(active)
        for model in (one for one in map(description.base_model, given) if isinstance(one, PretrainedModel)):
            documents.keep_use_cache(model)
    native(*args, **kwargs)
    arguments = trainer.args
    record_progress(trainer)
    if not is_active(arguments) or trainer.model is None:
        return
    _check_own_arguments(arguments)
    channel = channel_of(arguments)
    own_statements.adopt_statements(trainer.model, channel)
    run_on_all(channel, "checking the model", lambda: _check_model(trainer))
    adapter_checks.check_trained(trainer.model, channel)
    barrier = live_roles.UpdateBarrier(lambda: _passes_change_weights(trainer))
    session = new_session(trainer, barrier, Saver(arguments.flex_async_save))
    session.check_optimizer()
    weight_sources.identify_base(trainer.model, channel, again=True)
    decay, url = float(arguments.flex_ema_decay), upload_url(arguments)
    if decay:
        parts = ema.KnownParts(trainer)
        session.average = ema.MovingAverage(decay, arguments.flex_ema_interval, parts, session.barrier)
    if url is not None:
        session.uploads = Uploads(url, arguments, channel)
    session.receive = streaming.receiver_of(arguments, channel)
    session.attach()
    trainer.model.save_pretrained = functools.partial(save_pretrained, trainer, trainer.model.save_pretrained)
    if arguments.should_log:
        for line in without_effect(arguments):
            logger.warning(line)


def _check_own_arguments(arguments: Any) -> None:
    """Check that the arguments have our fields, and not only their own ``flex_checkpoint``, which was not checked."""
    if not isinstance(arguments, FlexFields):
        raise OptionError(
            "flex_checkpoint: true is set in training arguments that lack the other options of paddleformers_fc.",
            where=f"{type(arguments).__module__}.{type(arguments).__qualname__}",
            next_step="Use FlexTrainingArguments, or a subclass of it.",
        )


def _check_model(trainer: Any) -> None:
    """Check that the model is declared, supported and verified."""
    model = trainer.model
    if getattr(model, "config", None) is None:
        raise OptionError(
            "flex_checkpoint: true needs a model of PaddleFormers, whose configuration describes its tensors.",
            where=type(model).__name__,
            next_step="Train a PretrainedModel, or remove flex_checkpoint.",
        )
    described = describe_model(model)
    if described.rules is None:
        family_for(described.config)  # Raises for undeclared models.
    description.check_sonic_moe(trainer, dict(described.config))
    weights = live_roles.model_roles(model)[MODEL_STATE]
    check_ties(weights, described)
    adapter_checks.check_own_adapters(model)
    if isinstance(model, LoRAModel):  # The family must declare all layers that have adapters.
        model_rules(described, describe_roles({MODEL_STATE: weights})[MODEL_STATE])
    weight_sources.check_verified(model)


def _passes_change_weights(trainer: Any) -> bool:
    """Return whether forward or backward passes receive or change weights."""
    kinds = {kind.__name__ for one in trainer.callback_handler.callbacks for kind in type(one).__mro__}
    return live_roles.receives_in_passes(trainer.args) or not kinds.isdisjoint(_CHANGE_WEIGHTS)


# ---- Before the first step.

_NODE_OPTIONS = frozenset(
    {
        *("dataloader_num_workers", "device", "disable_tqdm", "flex_local_dir", "local_rank", "log_on_each_node"),
        *("logging_dir", "metrics_output_path", "output_dir", "output_signal_dir", "prefetch_factor", "report_to"),
        *("resume_from_checkpoint", "run_name", "wandb_api_key", "wandb_http_proxy"),
    }
)
"""Options that may differ between nodes: paths, logging, and options of a single process."""

_PACKAGES = (*LIBRARIES, "paddleformers_fc")


def check_run(session: Session, model: ModelDescription) -> str:
    """Compare versions, options and model configuration across ranks, test every disk, and claim the local tier.

    Every rank must call. Cost: one exchange, and one directory that is created and deleted per rank and tier; two more
    exchanges to claim a local tier.

    Args:
        session: the session of a Trainer that is about to train.
        model: the description of its model.
    Returns:
        the id of the local tier; empty without one.
    Raises:
        PeerError: the same on every rank: a table of the differences, with values and ranks.
        StorageError: the same on every rank: the output directories that are not writable, with their ranks.
        MismatchError: see :func:`.reference.check_reference_alike`.
        OptionError: see :func:`.tiers.claim`.
    """
    trainer, args, local = session.trainer, session.args, local_dir(session.args)
    facts = {
        "versions": software_versions(),
        "config": comparable_config(model),
        **dict(_options(args)),
    }

    def check_own() -> tiers.Known:
        for directory in (Path(args.output_dir), local):
            if directory is not None:
                check_writable(directory)
        # Not in init_trainer: PaddleFormers sets the reference model after Trainer.__init__.
        reference.check_no_reference_updates(trainer)
        if not session.has_trained:  # A trained model differs from its reference model.
            reference.check_reference_alike(reference.reference_of(trainer), trainer.model)
        return tiers.known_tier(args, session.channel.rank)

    consistency = ConsistencyCheck("starting the training", facts)
    known = all_gather_checked(session.channel, "checking the training", check_own, tiers.Known, consistency)
    return "" if local is None else tiers.claim(args, session.channel, known)


def _check_disks(args: Any) -> None:
    """Check that every output disk of a job on several nodes is writable. Every rank must call.

    Call it before the Trainer is constructed: PaddleFormers creates the output directory on rank 0 only, where a
    failure would leave all other ranks waiting.

    Raises:
        StorageError: the same on every rank: the output directories that are not writable, with their ranks.
    """
    if on_several_nodes():
        run_on_all(channel_of(args), "testing the output directory", lambda: check_writable(Path(args.output_dir)))


def _options(args: Any) -> Iterator[tuple[str, object]]:
    """Yield the options that must be equal on all ranks: PaddleFormers' and ours, without those of a user's class."""
    for kind in type(args).__mro__:
        if kind.__module__.partition(".")[0] in _PACKAGES:
            for name in vars(kind).get("__dataclass_fields__", {}):
                if name not in _NODE_OPTIONS:
                    yield name, _plain(getattr(args, name))
    named = args.resume_from_checkpoint
    yield "resume_from_checkpoint", "a path" if isinstance(named, str) else named


def _plain(value: object) -> object:
    """Return a value that has the same text in every process; for other values the name of their type."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, str | int | float | bool) else type(value).__name__
