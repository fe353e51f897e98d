"""Simulate the layout of a model without building it: the boxes of its tensors on each rank of a grid.

The tensors follow from the declaration of the family and the configuration. The grid determines the pipeline stage,
the tensor-parallel part, the experts and the optimizer states of every rank (:mod:`paddleformers_fc.layout.grid`).
Tests compare the result with live models and optimizers. This module is in ``plan`` because it needs families and
layouts, which do not import each other.

Replicas hold the same weights, so shards are created once per (stage, tensor-parallel rank, expert rank), and
partitions once per stage. The cost of a rank is linear in its shards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import structs

from paddleformers_fc.errors import OptionError
from paddleformers_fc.families import ModelDescription, ModelTensor, bind
from paddleformers_fc.families.declarations import DIVIDED, TEXT_EXPERTS, Family, Stage
from paddleformers_fc.families.enumerate import DeclaredTensor, built_order, enumerate_tensors, recognised_tensors
from paddleformers_fc.families.names import family_sizes, tied_names
from paddleformers_fc.families.sizes import Sizes
from paddleformers_fc.layout.grid import (
    MEBIBYTE,
    Coordinates,
    ParallelGrid,
    Share,
    fused_shares,
    layer_bounds,
    slice_range,
    uniform_bounds,
    whole_shares,
)
from paddleformers_fc.layout.roles import MODEL_STATE, NUMBER_SHAPE, OPTIMIZERS, OptimizerDescriptor, StateShape
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping import TensorSpec
from paddleformers_fc.mapping.boxes import Box, shifted, whole
from paddleformers_fc.storage.dtypes import dtype_size, model_dtype
from paddleformers_fc.text import fold

Shards = dict[str, Shard]

_SEGMENT_METHOD = "layer:DecoderLayer|EmptyLayer"
"""The default of PaddleFormers' pipelines, and the only method that falls back to ``uniform``."""


class SimulatedModel:
    """A declared model on a grid of ranks.

    Args:
        family: the model's family.
        model: its description.
        grid: the ranks.
        tensors: the model's tensors; 16-bit tensors have float32 master weights.
    Attributes:
        rules: the rules of the complete model on this grid.
    Raises:
        OptionError: the grid does not divide the model.
        MappingError: the configuration lacks a size.
    """

    def __init__(
        self, family: Family, model: ModelDescription, grid: ParallelGrid, tensors: Iterable[DeclaredTensor]
    ) -> None:
        self.family, self.grid = family, grid
        self.model = structs.replace(model, config={**family.defaults, **model.config})
        sizes = family_sizes(family, self.model)
        by_name = {tensor.name: tensor for tensor in tensors}
        stages = _fitting_stages(family, self.model, grid, by_name)
        ties = tied_names(family, self.model)
        self._ties = {alias: owner for alias, owner in ties.items() if alias in by_name}
        experts = sizes.length("experts") if sizes.defines("experts") else 0
        of_text = sizes.length(TEXT_EXPERTS) if TEXT_EXPERTS in family.sizes else experts
        self._experts = (of_text, experts - of_text)
        self._untrained = frozenset(name for name, tensor in by_name.items() if not tensor.trained)
        order = built_order(by_name, family.built)
        self._on_stage = [[by_name[name] for name in order if stages[name] == stage] for stage in range(grid.pp)]
        self._weights = lru_cache(maxsize=None)(self._make_weights)
        self._trained = lru_cache(maxsize=None)(self._make_trained)
        self._shares = lru_cache(maxsize=None)(self._make_shares)
        shards = [self._shard(tensor, 0, 0) for tensor in self.tensors]
        bound = [ModelTensor(one.name, one.global_shape, one.dtype, one.cuts) for one in shards]
        cuts = {one.name: one.cuts for one in bound if any(cut > 1 for cut in one.cuts)}
        self.rules = structs.replace(bind(family, self.model, bound), cuts=cuts)

    @property
    def tensors(self) -> Iterator[DeclaredTensor]:
        """All tensors that some rank holds; a pipeline omits some tensors that a single rank would hold."""
        return (tensor for tensors in self._on_stage for tensor in tensors)

    def weights(self, rank: int) -> Shards:
        """Return the weights of one rank by name; slices of them under sharding stage 3."""
        place = self.grid.coordinates(rank)
        found = self._weights(place.pp, place.tp, place.ep)
        return dict(found) if self.grid.stage < 3 else _by_name(self._slices(found.values(), place))

    def owned(self, rank: int) -> Shards:
        """Return by name the parts of parameters whose optimizer states one rank holds."""
        place = self.grid.coordinates(rank)
        dense, experts = self._trained(place.pp, place.tp, place.ep)
        if self.grid.sharding == 1:
            return _by_name((*dense, *experts))
        if self.grid.stage == 3:
            return _by_name(self._slices((*dense, *experts), place))
        of_dense, of_experts = self._shares(place.pp)
        shares = (dense, of_dense[place.sharding]), (experts, of_experts[place.moe_sharding])
        return _by_name(
            msgspec.structs.replace(shards[index], flat=part) for shards, share in shares for index, part in share
        )

    def states(self, rank: int, optimizer: OptimizerDescriptor) -> Iterator[tuple[str, Shard]]:
        """Yield role and shard of every state that one rank holds."""
        for parameter in self.owned(rank).values():
            for state in optimizer.states:
                name, dtype = parameter.name + state.suffix, state.dtype or parameter.dtype
                if state.sometimes:
                    continue
                if state.shape is StateShape.NUMBER:
                    yield state.role, Shard(name, dtype, NUMBER_SHAPE, whole(NUMBER_SHAPE))
                elif state.shape is StateShape.SHARD_NUMBER:
                    yield state.role, _shard_number(parameter, name, dtype)
                elif not state.half_only or dtype_size(parameter.dtype) == 2:
                    yield state.role, msgspec.structs.replace(parameter, name=name, dtype=dtype)

    def roles(self, rank: int, optimizer: OptimizerDescriptor = OPTIMIZERS[0]) -> dict[str, Shards]:
        """Return every shard of one rank, as a live model and optimizer describe it: role -> full name -> shard."""
        roles: dict[str, Shards] = {MODEL_STATE: self.weights(rank)}
        for role, shard in self.states(rank, optimizer):
            roles.setdefault(role, {})[shard.name] = shard
        return roles

    def _make_weights(self, pp: int, tp: int, ep: int) -> Shards:
        return _by_name(self._shard(one, tp, ep) for one in self._on_stage[pp] if self._holder(one) in (None, ep))

    def _make_trained(self, pp: int, tp: int, ep: int) -> tuple[tuple[Shard, ...], tuple[Shard, ...]]:
        """Return the shards of trained parameters in the optimizer's order, dense parameters and experts separately.

        A tied pair in one stage is one parameter, under the name that sorts first.
        """
        weights = self._weights(pp, tp, ep)
        names = {owner: min(owner, alias) for alias, owner in self._ties.items() if {owner, alias} <= weights.keys()}
        shared = {alias for alias, owner in self._ties.items() if owner in names}
        dense: list[Shard] = []
        experts: list[Shard] = []
        for tensor in self._on_stage[pp]:
            shard = weights.get(tensor.name)
            if shard is None or tensor.name in shared or not tensor.trained:
                continue
            shards = experts if self.grid.ep > 1 and _is_expert(tensor) else dense
            shards.append(msgspec.structs.replace(shard, name=names.get(shard.name, shard.name)))
        return tuple(dense), tuple(experts)

    def _make_shares(self, pp: int) -> tuple[list[Share], list[Share]]:
        """Return the shares of dense parameters and of experts in one stage, equal on its tensor-parallel ranks."""
        dense, experts = self._trained(pp, 0, 0)
        return self._divided(dense, self.grid.sharding), self._divided(experts, self.grid.moe_sharding)

    def _divided(self, shards: Sequence[Shard], ranks: int) -> list[Share]:
        sizes, widths = [shard.size for shard in shards], [dtype_size(shard.dtype) for shard in shards]
        if self.grid.split:
            return fused_shares(sizes, widths, ranks, self.grid.buffer * MEBIBYTE, self.grid.alignment)
        return whole_shares(sizes, ranks, self.grid.stage == 1)

    def _slices(self, shards: Iterable[Shard], place: Coordinates) -> Iterator[Shard]:
        for shard in shards:
            if shard.size <= self.grid.slice_above or shard.name in self._untrained:
                yield shard
                continue
            width = dtype_size(shard.dtype)
            part = slice_range(shard.size, width, place.sharding, self.grid.sharding, self.grid.alignment)
            if part is not None:
                yield msgspec.structs.replace(shard, flat=part)

    def _shard(self, tensor: DeclaredTensor, tp: int, ep: int) -> Shard:
        """Return a rank's shard of a tensor."""
        axis, index, degree = tensor.cut, tp, self.grid.tp
        if self.grid.ep > 1 and _is_expert(tensor):
            # An expert group spans the tensor-parallel ranks, so experts are not cut by tensor parallelism.
            axis, index, degree = tensor.expert_axis, ep, self.grid.ep
        lo, hi = [0] * len(tensor.shape), list(tensor.shape)
        if axis is not None:
            length = tensor.shape[axis] // degree
            lo[axis], hi[axis] = index * length, (index + 1) * length
        return Shard(tensor.name, tensor.dtype, tensor.shape, Box(tuple(lo), tuple(hi)))

    def _holder(self, tensor: DeclaredTensor) -> int | None:
        """Return the rank that holds a single expert, or None; each modality spreads its experts over all ranks."""
        if self.grid.ep == 1 or tensor.expert_axis is not None or "expert" not in tensor.numbers:
            return None
        number, (of_text, of_others) = tensor.numbers["expert"], self._experts
        first, count = (0, of_text) if number < of_text else (of_text, of_others)
        return (number - first) // (count // self.grid.ep)


def declared_model(
    family: Family, model: ModelDescription, grid: ParallelGrid, dtype: str = "float32"
) -> SimulatedModel:
    """Place the model of a configuration on a grid.

    Args:
        family: the model's family.
        model: its description.
        grid: the ranks.
        dtype: numpy name of the model's dtype.
    Raises:
        OptionError: the grid does not divide the model.
        MappingError: the configuration lacks a size.
    """
    return SimulatedModel(family, model, grid, enumerate_tensors(family, model, dtype))


def stored_model(
    family: Family,
    model: ModelDescription,
    grid: ParallelGrid,
    specs: Mapping[str, TensorSpec],
    dtype: str | None = None,
) -> SimulatedModel:
    """Place a saved model on another grid.

    Its tensors are the saved tensors, and those that no pipeline builds, which are added from the declaration.

    Args:
        family: the model's family.
        model: its description.
        grid: the ranks.
        specs: the saved tensors by name, with global shapes.
        dtype: numpy name of the model's dtype; None for the saved dtype.
    Raises:
        OptionError: the grid does not divide the model.
        MappingError: the family does not declare a tensor.
    """
    found = recognised_tensors(family, model, specs)
    saved = model_dtype({tensor.dtype for tensor in found})
    # A checkpoint of adapters contains only the trained tensors, not the model.
    declared = list(enumerate_tensors(family, model, dtype or saved)) if model.adapters is None else []
    blocks = [tensor for tensor in declared if tensor.stage is Stage.ABSENT and tensor.name not in specs]
    if dtype not in (None, saved):
        dtypes = {tensor.name: tensor.dtype for tensor in declared}
        found = [
            structs.replace(one, dtype=dtypes.get(one.name, dtype)) if one.dtype == saved else one for one in found
        ]
    return SimulatedModel(family, model, grid, [*found, *blocks])


def _shard_number(parameter: Shard, name: str, dtype: str) -> Shard:
    if parameter.flat is not None:
        raise OptionError(
            f"{name} has one number per shard of a tensor, but this grid divides tensors into ranges.",
            next_step="Choose a grid without split=true and without stage=3, or another optimizer.",
        )
    part = parameter.box.shape
    place = tuple(low // own if own else 0 for low, own in zip(parameter.box.lo, part, strict=True))
    return Shard(name, dtype, parameter.cuts, shifted((1,) * len(part), place))


def _fitting_stages(
    family: Family, model: ModelDescription, grid: ParallelGrid, tensors: Mapping[str, DeclaredTensor]
) -> dict[str, int | None]:
    """Return the pipeline stage that builds each tensor; None if no stage does.

    Raises:
        OptionError: the grid does not divide the model; lists all sizes and degrees that do not match.
    """
    sizes, faults, undivided = family_sizes(family, model), list[str](), set[str]()
    stages: dict[str, int | None] = dict.fromkeys(tensors, 0)
    divisors = [(size, key, "tp", grid.tp) for size, key in DIVIDED.items()]
    experts = [(size, "the number of experts", "ep", grid.ep) for size in ("experts", TEXT_EXPERTS)]
    for size, key, axis, count in (*divisors, *experts):
        if sizes.defines(size) and sizes.length(size) % count:
            faults.append(f"{key}={sizes.length(size)} is not divisible by {axis}={count}")
            undivided.add(size)
    if grid.ep > 1 and not sizes.defines("experts"):
        faults.append(f"ep={grid.ep}: the model has no experts")
    if grid.pp > 1:
        try:
            pipeline = _Pipeline(family, sizes, model.config, grid)
            stages = {name: pipeline.stage_of(tensor) for name, tensor in tensors.items()}
        except ValueError as error:
            faults.append(str(error))
    uncut = [
        f"{tensor.name}: {tensor.shape[tensor.cut]} on axis {tensor.cut} is not divisible by tp={grid.tp}"
        for tensor in tensors.values()
        if tensor.cut is not None and tensor.shape[tensor.cut] % grid.tp and not (grid.ep > 1 and _is_expert(tensor))
        # The size of the axis may be listed already.
        if tensor.cut_size is None or undivided.isdisjoint(sizes.reads(tensor.cut_size))
    ]
    faults.extend(fold(uncut))
    if faults:
        raise OptionError(
            f"The grid {grid} does not fit this model.",
            where=f"family {family.name}",
            evidence=faults,
            next_step="Choose degrees that divide the model.",
        )
    return stages


class _Pipeline:
    """The items of a pipeline in order, and their stages. Prediction layers follow the last norm; the head is last.

    Raises:
        ValueError: the stages do not divide the layers, or a key of the pipeline is invalid.
    """

    def __init__(self, family: Family, sizes: Sizes, config: Mapping[str, Any], grid: ParallelGrid) -> None:
        self._layers, self._stages = sizes.length("layers"), grid.pp
        head, tail = (_empty_layers(config, f"num_empty_layers_add_in_{end}") for end in ("head", "tail"))
        behind = sizes.length("mtp_layers") if any(one.name == "mtp" for one in family.numbers) else 0
        self._first_layer, self._norm = 1 + head, 1 + head + self._layers + tail
        is_layer = [False, *[True] * (self._norm - 1), False, *[False] * behind, False]
        self._bounds = _bounds(str(config.get("pp_seg_method") or _SEGMENT_METHOD), is_layer, grid)

    def stage_of(self, tensor: DeclaredTensor) -> int | None:
        """Return the stage that builds a tensor; None if no stage does."""
        if tensor.stage is Stage.ABSENT:
            return None
        if "layer" in tensor.numbers:
            item = self._first_layer + tensor.numbers["layer"]
        elif "mtp" in tensor.numbers:
            item = self._norm + 1 + tensor.numbers["mtp"] - self._layers
        else:
            item = {Stage.FIRST: 0, Stage.NORM: self._norm, Stage.LAST: self._bounds[-1] - 1}[tensor.stage]
        return (bisect_right(self._bounds, item) - 1) % self._stages


def _empty_layers(config: Mapping[str, Any], key: str) -> int:
    count = config.get(key) or 0
    if type(count) is not int or count < 0:
        raise ValueError(f"{key}={count!r} is not a number of layers")
    return count


def _bounds(method: str, is_layer: list[bool], grid: ParallelGrid) -> list[int]:
    parts, counted = grid.pp * grid.vpp, sum(is_layer)
    if method.startswith("["):
        try:
            listed = msgspec.json.decode(method, type=list[int])
        except ValueError:
            raise ValueError(f"pp_seg_method={method} is not a list of integers") from None
        bounds = [*listed, len(is_layer)] if len(listed) == parts else listed
        if len(bounds) != parts + 1 or bounds[0] or bounds[-1] != len(is_layer) or sorted(bounds) != bounds:
            raise ValueError(f"pp_seg_method={method} does not distribute {len(is_layer)} items to {parts} parts")
        return bounds
    if counted % parts == 0 and method != "uniform":
        return layer_bounds(is_layer, parts)
    if grid.vpp > 1 or method not in ("uniform", _SEGMENT_METHOD):
        raise ValueError(
            f"{counted} layers, empty ones included, are not divisible by pp x vpp = {grid.pp} x {grid.vpp} = {parts}"
        )
    if len(is_layer) < grid.pp:
        raise ValueError(
            f"{counted} layers, embedding, norm and head are {len(is_layer)} items, fewer than pp={grid.pp}"
        )
    return uniform_bounds(len(is_layer), grid.pp)


def _is_expert(tensor: DeclaredTensor) -> bool:
    return tensor.expert_axis is not None or "expert" in tensor.numbers


def _by_name(shards: Iterable[Shard]) -> Shards:
    return {shard.name: shard for shard in shards}
