"""``paddleformers_fc.stream``: iterate over the weights of a live model, for inference engines and exports.

It describes the model as ``save`` does, and :mod:`paddleformers_fc.execute.stream` sends the tensors. Adapters are
merged by default: the small adapters are sent first, and receivers then add each change to its tensor of the base.
:func:`push` passes a stream to the function of ``flex_stream``.

Memory: ``max_bytes`` in flight on a rank, and the adapters of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import msgspec
import paddle
from msgspec import structs

from paddleformers_fc.api_arguments import (
    COUNT,
    FLAG,
    NAMES,
    TEXT,
    Kind,
    one_of,
    require,
    require_or_none,
)
from paddleformers_fc.distributed.channel import (
    Channel,
    gather_and_keep,
    group_by_value,
    run_on_all,
)
from paddleformers_fc.distributed.communicator import job_communicator
from paddleformers_fc.errors import MismatchError, OptionError
from paddleformers_fc.execute.export import parse_export_dtype
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
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer import adapter_checks, live_roles, optimizers, own_statements, weight_sources
from paddleformers_fc.trainer.description import base_model, describe_model
from paddleformers_fc.trainer.library import has_adapters, unwrap_model
from paddleformers_fc.trainer.loop import (
    Config,
    RankTensors,
    described_source,
    is_by_name,
    rank_tensors_by_name,
    with_rules,
)

HOST, MODEL = "host", "model"


def _is_receivers(value: object) -> bool:
    if isinstance(value, str):
        return value in ("all", "first")
    if not isinstance(value, Collection) or isinstance(value, (bytes, Mapping)) or len(value) == 0:
        return False
    return all(type(one) is int and one >= 0 for one in value)


_RECEIVERS = Kind('"all", "first" or a list of ranks', _is_receivers)


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
    """Yield the complete tensors of a live model in the names, layout and order of an export. Every rank must iterate.

    The tensors are copies, which the caller may keep. Do not train the model until the stream has ended. A rank that
    receives nothing must iterate too: it sends its parts, and its iterator yields nothing.

    Args:
        model: a layer with ``sharded_state_dict``, or its parallel wrapper; or a state dict of semi-automatic
            parallelism.
        names: canonical names of the tensors; None for all.
        dtype: ``float32`` or ``bfloat16``, to which tensors of the model's dtype are cast; None for no cast.
        to: the ranks that receive the tensors: ``all``, ``first``, or their numbers.
        max_bytes: bound on the bytes in flight on a rank; a single tensor may exceed it.
        device: ``host``, or ``model`` for the device of the model.
        adapters: True to stream only the adapters of a model, under PEFT's names; otherwise they are merged into the
            weights.
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
        own_statements.adopt_statements(model, channel)
    adapter_checks.check_adapters(model, channel)
    live_roles.wait_for_weights()

    def prepare() -> _Prepared:
        require_or_none(NAMES, names=names)
        require_or_none(TEXT, dtype=dtype)
        require(_RECEIVERS, to=to)
        require(COUNT, max_bytes=max_bytes)
        require(one_of((HOST, MODEL)), device=device)
        require(FLAG, adapters=adapters)
        selected = None if names is None else tuple(sorted(names))
        cast_to = parse_export_dtype(dtype or "")
        request = StreamRequest(
            _receivers(to, channel.world_size), channel.world_size, selected, cast_to, int(max_bytes)
        )
        source, described = described_source(model, None, family, config, mapping)
        weight_sources.check_defined(source.model)
        _check_adapters(described, request, adapters)
        weights = source.weights()
        if mapping is not None or is_by_name(described):
            described = structs.replace(described, config=without_family(described.config))
            _check_axes(weights, request)
        return _Prepared(described, weights, request)

    if has_adapters(unwrap_model(model)) and not adapters:
        return _merged(unwrap_model(model), prepare, channel, device)
    planned = _planned(prepare, channel)
    return replace(planned, place=_place(planned.part.tensors, device)).tensors()


@dataclass(frozen=True)
class _Prepared:
    """This rank's part of a stream.

    Args:
        model: the description of the model.
        weights: role -> name -> live weight.
        request: what to stream.
    """

    model: ModelDescription
    weights: Roles
    request: StreamRequest


class _Introduction(msgspec.Struct):
    """What a rank sends to the others before a stream is planned.

    Args:
        request: the request as text, for comparison.
        tensors: its tensors, if the model is mapped by name.
        plans: the names of its cached plans.
    """

    request: str
    tensors: RankTensors
    plans: list[bytes]


def _planned(prepare: Callable[[], _Prepared], channel: Channel) -> Stream:
    """Plan a stream, with one exchange if all ranks have cached the plan. Every rank must call.

    Args:
        prepare: returns this rank's part; its errors are raised on all ranks.
        channel: all ranks of the job.
    """

    def introduce() -> tuple[_Introduction, tuple[_Prepared, LivePart, dict[bytes, StreamPlan]]]:
        own = prepare()
        part = part_of(own.weights, own.model)
        plans = known_plans(part, own.request, channel.rank)
        tensors = rank_tensors_by_name(own.model, own.weights)
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
    """Yield the tensors of a model with its adapters merged. Every rank must call."""

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
"""Receives a step and the weights after it."""


def receiver_of(args: Any, channel: Channel) -> Receive | None:
    """Return the function of ``flex_stream`` on the first rank; None without it. Every rank must call.

    Args:
        args: training arguments.
        channel: all ranks of the job.
    Raises:
        OptionError: the same on every rank: the function cannot be imported or called.
    """
    if not args.flex_stream:
        return None
    find = partial(_import_receiver, args.flex_stream["to"], channel.rank)
    return run_on_all(channel, "looking for the function of flex_stream", find)


def _import_receiver(named: str, rank: int) -> Receive | None:
    """Import a function, or instantiate a class, by its dotted name on the first rank; return None on other ranks."""
    if rank != 0:
        return None
    module, _, name = named.rpartition(".")
    try:
        found = getattr(import_module(module), name)
        receive: Receive = found() if isinstance(found, type) else found
        if not callable(receive):
            raise TypeError(f"it is a {type(receive).__name__}")
    except Exception as error:  # The user's module may raise anything.
        raise OptionError(
            f"flex_stream cannot pass weights to {named}.",
            where="flex_stream",
            evidence=[f"{type(error).__name__}: {error}"],
            next_step="Name a function, or a class whose instances can be called, of a module on PYTHONPATH.",
        ) from error
    return receive


def push(trainer: Any, receive: Receive | None, channel: Channel) -> None:
    """Pass the weights to the function of ``flex_stream`` if that is due after this step. Every rank must call.

    Args:
        trainer: the Trainer.
        receive: the function, on the first rank.
        channel: all ranks of the job.
    Raises:
        FlexError: the same on every rank: the stream or the function has failed.
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


def _check_axes(weights: Roles, request: StreamRequest) -> None:
    """Check that no tensor without axes, which rules by name do not contain, would be left out unnoticed."""
    numbers = [name for named in weights.values() for name, one in named.items() if not one.global_shape]
    if numbers and request.names is None:
        raise OptionError(
            f"{count_text(len(numbers), 'tensor')} of the model without axes cannot be streamed.",
            where="stream",
            evidence=numbers,
            next_step="Pass the other names as names, and send these numbers yourself.",
        )


def _check_adapters(described: ModelDescription, request: StreamRequest, adapters: bool) -> None:
    """Check that a request fits the adapters of a model.

    Raises:
        OptionError: the model has no adapters, or has adapters and a dtype is requested.
    """
    if adapters and described.adapters is None:
        raise OptionError("The model has no adapters.", where="adapters", next_step="Omit adapters=True.")
    if request.dtype and described.adapters is not None:
        raise OptionError(
            "dtype= is not supported for a model with adapters.",
            where="dtype",
            next_step="Omit dtype=, and cast the received tensors.",
        )


def _place(weights: Roles, device: str) -> Any:
    """Return the Paddle place of a stream's tensors; None for host memory."""
    first = next((one.local_tensor for one in weights.get(MODEL_STATE, {}).values()), None)
    if device == HOST or first is None or paddle.device.get_device() == "cpu":
        return None
    return first.place
