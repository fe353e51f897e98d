"""``paddleformers_fc.stream``: the weights of a live model as an iterator, for inference engines and exports.

It describes the model as ``save`` does, and :mod:`paddleformers_fc.execute.stream` sends the tensors. A model with
adapters is streamed merged: first its adapters, which are small, then the tensors of its base, each with its change
added where it is received. :func:`push` passes a stream to the function of ``flex_stream``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import msgspec
import paddle
from msgspec import structs

from paddleformers_fc.api_arguments import COUNT, FLAG, NAMES, Kind, one_of, require, require_or_none
from paddleformers_fc.distributed.channel import Channel, gather_and_keep, group_by_value, run_on_all
from paddleformers_fc.distributed.communicator import job_communicator
from paddleformers_fc.errors import MismatchError, OptionError
from paddleformers_fc.execute.export import check_dtype
from paddleformers_fc.execute.merging import Merge, deltas_of
from paddleformers_fc.execute.save import LivePart
from paddleformers_fc.execute.stream import (
    DEFAULT_BYTES,
    Stream,
    StreamPlan,
    StreamRequest,
    Tensors,
    consume,
    known_plans,
    part_of,
    plan_stream,
)
from paddleformers_fc.families import Family, ModelDescription
from paddleformers_fc.families.description import is_adapter
from paddleformers_fc.families.stated import without_family
from paddleformers_fc.layout.live import Roles
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.trainer import adapter_checks, base_fingerprint, live_roles, optimizers, own_statements
from paddleformers_fc.trainer.description import base_model, describe_model
from paddleformers_fc.trainer.library import has_adapters, unwrap_model
from paddleformers_fc.trainer.loop import Config, RankTensors, described_source, is_by_name, rank_tensors, with_rules

HOST, MODEL = "host", "model"
_RECEIVERS = Kind(
    '"all", "first" or a list of ranks',
    lambda value: (
        value in ("all", "first")
        if isinstance(value, str)
        else isinstance(value, Collection) and len(value) > 0 and all(type(one) is int and one >= 0 for one in value)
    ),
)


def stream(
    model: Any,
    *,
    names: Sequence[str] | None = None,
    dtype: str | None = None,
    to: str | Sequence[int] = "all",
    max_bytes: int = DEFAULT_BYTES,
    device: str = HOST,
    adapters: bool = False,
    family: str | Family | None = None,
    config: Config | None = None,
    mapping: RuleSet | None = None,
) -> Tensors:
    """Yield the whole tensors of a live model in the names, layout and order of an export. Every rank must iterate.

    The tensors are copies, which the caller may keep. The model must not be trained until the stream has ended. A rank
    that gets nothing iterates over nothing and sends its parts meanwhile.

    Args:
        model: a layer with ``sharded_state_dict``, or its parallel wrapper; or a state dict of semi-automatic
            parallelism.
        names: canonical names of the tensors; None for all.
        dtype: ``float32`` or ``bfloat16`` for tensors of the model's dtype; None for the live one.
        to: the ranks that get the tensors: ``all``, ``first``, or their numbers.
        max_bytes: bound on the bytes that are under way on a rank; one tensor may exceed it.
        device: ``host``, or ``model`` for the device of the model.
        adapters: whether the adapters of a model are streamed alone, under PEFT's names; otherwise they are merged
            into the weights.
        family: as for :func:`.loop.save`.
        config: as for :func:`.loop.save`.
        mapping: as for :func:`.loop.save`.
    Yields:
        canonical name and ``paddle.Tensor``. ``torch.from_dlpack(tensor)`` shares its memory, and so does
        ``tensor.numpy()`` of a dtype that numpy has.
    Raises:
        FlexError: the same on every rank, at the call or while tensors are read.

    Example:
        >>> for name, tensor in paddleformers_fc.stream(model, to="first"):
        ...     engine.update(name, torch.from_dlpack(tensor))
    """
    channel = job_communicator()
    if family is config is mapping is None:
        own_statements.adopt(model, channel)
    adapter_checks.check_supported(model, channel)
    live_roles.wait_for_weights()

    def prepare() -> _Prepared:
        require_or_none(NAMES, names=names)
        require(_RECEIVERS, to=to)
        require(COUNT, max_bytes=max_bytes)
        require(one_of((HOST, MODEL)), device=device)
        require(FLAG, adapters=adapters)
        check_dtype(dtype or "")
        wanted = None if names is None else tuple(names)
        request = StreamRequest(_receivers(to, channel.world_size), wanted, dtype or "", int(max_bytes))
        source, described = described_source(model, None, family, config, mapping)
        base_fingerprint.check_defined(source.model)
        _check_adapters(described, request, adapters)
        if mapping is not None or is_by_name(described):
            described = structs.replace(described, config=without_family(described.config))
        return _Prepared(described, source.weights(), request)

    if has_adapters(unwrap_model(model)) and not adapters:
        return _merged(unwrap_model(model), prepare, channel, device)
    planned = _planned(prepare, channel)
    return replace(planned, place=_place(planned.part.tensors, device)).tensors()


@dataclass(frozen=True)
class _Prepared:
    """What this rank brings into a stream.

    Args:
        model: the description of the model.
        weights: role -> name -> live weight.
        request: what is streamed.
    """

    model: ModelDescription
    weights: Roles
    request: StreamRequest


class _Introduction(msgspec.Struct):
    """What a rank brings into a stream, on its way to the others.

    Args:
        request: what it asks for, as text.
        tensors: its tensors, if the model is mapped by name.
        plans: the names of the plans that it has kept.
    """

    request: str
    tensors: RankTensors
    plans: list[bytes]


def _planned(prepare: Callable[[], _Prepared], channel: Channel) -> Stream:
    """Plan a stream, with one exchange if all ranks have kept the plan of an earlier one. Every rank must call.

    Args:
        prepare: returns what this rank brings into it; its errors are raised on all ranks.
        channel: all ranks of the job.
    """

    def introduce() -> tuple[_Introduction, tuple[_Prepared, LivePart, dict[bytes, StreamPlan]]]:
        own = prepare()
        part = part_of(own.weights, own.model)
        plans = known_plans(part, own.request, channel.rank)
        tensors = rank_tensors(own.weights) if is_by_name(own.model) else RankTensors()
        return _Introduction(repr(own.request), tensors, list(plans)), (own, part, plans)

    everyone, (own, part, plans) = gather_and_keep(channel, "beginning a stream", introduce, _Introduction)
    requests = [one.request for one in everyone]
    if len(set(requests)) > 1:
        raise MismatchError(
            "The ranks ask for different streams.",
            where="stream",
            evidence=[group_by_value(requests)],
            next_step="Call stream with the same arguments on every rank.",
        )
    part = structs.replace(part, model=with_rules(own.model, [one.tensors for one in everyone]))
    plan = plan_stream(part, own.request, plans, [one.plans for one in everyone], channel)
    return Stream(plan, part, own.request, channel)


def _merged(model: Any, prepare: Callable[[], _Prepared], channel: Channel, device: str) -> Tensors:
    """Yield the tensors of a model with its adapters added. Every rank must call."""
    base_fingerprint.identify_once(model, channel)

    def prepare_adapters() -> _Prepared:
        own = prepare()
        return replace(own, request=replace(own.request, names=None, is_exported=False))

    def prepare_base() -> _Prepared:
        named = {name: one for name, one in live_roles.sharded_weights(model).items() if not is_adapter(name)}
        return replace(prepare(), model=describe_model(base_model(model)), weights={MODEL_STATE: optimizers.cut(named)})

    adapters = _planned(prepare_adapters, channel)
    tensors = dict(replace(adapters, as_arrays=True).tensors())
    settings = adapters.part.model.adapters
    merge = Merge(deltas_of(tensors, adapters.plan.shared, settings), {}) if tensors and settings is not None else None
    base = _planned(prepare_base, channel)
    yield from replace(base, place=_place(base.part.tensors, device), merge=merge).tensors()


Receive = Callable[[int, Tensors], object]
"""Gets a step, and the weights after it."""


def receiver_of(args: Any, channel: Channel) -> Receive | None:
    """Return the function of ``flex_stream`` on the first rank; None without it. Every rank must call.

    Args:
        args: training arguments.
        channel: all ranks of the job.
    Raises:
        OptionError: the same on every rank: it cannot be imported or called.
    """
    if not args.flex_stream:
        return None
    find = partial(_imported, args.flex_stream["to"], channel.rank)
    return run_on_all(channel, "looking for the function of flex_stream", find)


def _imported(named: str, rank: int) -> Receive | None:
    """Return a function, or an instance of a class, by its dotted name; None on other ranks than the first."""
    if rank != 0:
        return None
    module, _, name = named.rpartition(".")
    try:
        found = getattr(import_module(module), name)
        receive: Receive = found() if isinstance(found, type) else found
        if not callable(receive):
            raise TypeError(f"it is a {type(receive).__name__}")
    except Exception as error:  # Of any code.
        raise OptionError(
            f"flex_stream cannot pass weights to {named}.",
            where="flex_stream",
            evidence=[f"{type(error).__name__}: {error}"],
            next_step="Name a function, or a class whose instances can be called, of a module on PYTHONPATH.",
        ) from error
    return receive


def push(trainer: Any, receive: Receive | None, channel: Channel) -> None:
    """Pass the weights to the function of ``flex_stream``, if the step that ends is due. Every rank must call.

    Args:
        trainer: the Trainer.
        receive: the function, on the first rank.
        channel: all ranks of the job.
    Raises:
        FlexError: the same on every rank: the stream has failed, or the function.
    """
    step, steps = trainer.state.global_step, trainer.args.flex_stream.get("steps")
    if steps and step % steps == 0:
        live_roles.wait_for_weights(trainer.args)
        work = partial(_receive, receive, step)
        consume(stream(trainer.model, to="first"), channel, "pushing weights", work, type(None))


def _receive(receive: Receive | None, step: int, tensors: Tensors) -> None:
    if receive is not None:
        receive(step, tensors)


def _receivers(to: str | Sequence[int], world_size: int) -> tuple[int, ...]:
    if isinstance(to, str):
        return tuple(range(world_size)) if to == "all" else (0,)
    ranks = tuple(sorted(set(to)))
    if ranks[-1] >= world_size:
        raise OptionError(
            f"The job has no rank {ranks[-1]}.",
            where="to",
            evidence=[f"its ranks are 0 to {world_size - 1}"],
            next_step="Give ranks of the job.",
        )
    return ranks


def _check_adapters(described: ModelDescription, request: StreamRequest, adapters: bool) -> None:
    """Refuse a request that does not fit the adapters of a model.

    Raises:
        OptionError: the model has none, or another dtype is wanted of a merged model.
    """
    if adapters and described.adapters is None:
        raise OptionError("The model has no adapters.", where="adapters", next_step="Leave out adapters=True.")
    if request.dtype and described.adapters is not None:
        raise OptionError(
            "A model with adapters is streamed in its own dtype.",
            where="dtype",
            next_step="Leave out dtype=, and cast the tensors where they are received.",
        )


def _place(weights: Roles, device: str) -> Any:
    """Return the place of the tensors of a stream; None in host memory."""
    first = next((one.local_tensor for one in weights.get(MODEL_STATE, {}).values()), None)
    if device == HOST or first is None or paddle.device.get_device() == "cpu":
        return None
    return first.place
