"""Weights of ranks in the names and orientation of open weights: ``model.tp00_pp00.safetensors``.

Trainers with ``save_to_hf`` write them beside optimizer states that have the names and the orientation of the model.
The family's rules lead from one to the other: every stored canonical part becomes boxes of tensors of the model, of
which the file contains the axes in reverse order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import DeclaredTensor, ModelDescription, bind, enumerate_tensors, family_for
from paddleformers_fc.families.enumerate import built_order
from paddleformers_fc.families.names import Names, tied_names, tied_sources
from paddleformers_fc.formats.checkpoint import StoredShard
from paddleformers_fc.formats.legacy.rank_files import FileArray
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping import Shape, TensorMapping, TensorSources
from paddleformers_fc.mapping.boxes import Box, whole
from paddleformers_fc.mapping.templates import BoxLink, pushed
from paddleformers_fc.storage.dtypes import dtype_size
from paddleformers_fc.text import count_text

_FUSED = "fuse_attention_"
"""The beginning of keys that many classes ignore: the fusion that they state is tried first, then no fusion."""


@dataclass(frozen=True)
class CanonicalModel:
    """A model whose canonical tensors are stored.

    Args:
        tensors: its tensors in the order in which it builds them.
        ties: aliases that are stored, and their owners.
        mapping: from canonical tensors onto them.
        tp: number of tensor-parallel ranks.
    """

    tensors: Mapping[str, DeclaredTensor]
    ties: Mapping[str, str]
    mapping: TensorMapping
    tp: int

    def on_stage(self, stored: Iterable[str]) -> dict[str, Shape]:
        """Return the local shapes of the tensors that some canonical ones make up, in the order of building."""
        present = frozenset(stored)
        return {
            name: _local(one, self.tp)
            for name, one in self.tensors.items()
            if self._is_on(name, present) and not (name in self.ties and self._is_on(self.ties[name], present))
        }

    def _is_on(self, name: str, present: frozenset[str]) -> bool:
        return name in self.mapping.made and present.issuperset(self.mapping.made[name].names)

    def shards(self, name: str, stored: Mapping[str, FileArray], tp: int) -> Iterator[tuple[bool, StoredShard] | str]:
        """Yield the boxes of a tensor that one rank stores, and whether its file has the axes in reverse order.

        Args:
            name: the tensor.
            stored: the rank's canonical parts.
            tp: the tensor-parallel rank.
        """
        tensor, made = self.tensors[name], self.mapping.made[name]
        for link in made.template.links:
            source = made.names[link.source]
            local, total = stored[source].shape, self.mapping.sources[source].shape
            part = _part_of(local, total, _source_axis(tensor, link), self.tp, tp)
            common = None if part is None else part.intersect(link.source_box)
            if part is None:
                yield f"{source}: {list(local)} on each of {self.tp} ranks is not a part of {list(total)}"
            elif common is not None:
                yield _placed(tensor, link, stored[source], part, common)


def canonical_models(model: ModelDescription, tp: int, stored: Sequence[str]) -> Iterator[CanonicalModel | str]:
    """Yield every model that a configuration can describe, or as text how its canonical tensors differ from the stored.

    Raises:
        MappingError: the family is unknown.
    """
    family, present = family_for(model.config), frozenset(stored)
    plain = {key: value for key, value in model.config.items() if not key.startswith(_FUSED)}
    seen: list[set[str]] = []
    for config, is_fleet in itertools.product((model.config, plain), (None, False, True)):
        one = replace(model, config=config, is_fleet=is_fleet)
        try:
            ties = tied_names(family, one)
            declared = {tensor.name: tensor for tensor in enumerate_tensors(family, one)}
            kept = {name: tensor for name, tensor in declared.items() if ties.get(name) not in declared}
            mapping = bind(family, one, [tensor.under(tp) for tensor in kept.values()]).mapping()
        except MappingError:
            continue
        for (alias, owner), (name, source) in zip(ties.items(), tied_sources(family, one).items(), strict=True):
            if name in present and name not in mapping.sources:
                # Every stage of a pipeline has a copy of its own.
                kept[alias] = replace(kept[owner], name=alias)
                mapping.made[alias] = TensorSources(mapping.made[owner].template, (name,))
                mapping.sources[name] = mapping.sources[source]
        tensors = {name: kept[name] for name in built_order(kept, family.built)}
        if tensors.keys() in seen:
            continue
        seen.append(set(tensors))
        differing = sorted(present ^ mapping.sources.keys())
        name_of = Names(family, one).name_of
        fused = sorted(name for name in present - mapping.sources.keys() if name_of(name) in tensors)
        if fused:
            yield (
                f"{count_text(len(fused), 'fused layer')}, such as {fused[0]}: save_to_hf stores them under the names "
                "of the model, but not transposed as the other layers are"
            )
        elif differing:
            only = "stored and not" if differing[0] in present else "not stored and"
            count = count_text(len(differing), "tensor")
            yield f"{count} differ: {differing[0]} is {only} in the open weights of the model"
        else:
            yield CanonicalModel(tensors, {alias: owner for alias, owner in ties.items() if alias in kept}, mapping, tp)


def _local(tensor: DeclaredTensor, tp: int) -> Shape:
    cuts = tensor.under(tp).cuts
    return tuple(length // cut for length, cut in zip(tensor.shape, cuts, strict=True))


def _source_axis(tensor: DeclaredTensor, link: BoxLink) -> int | None:
    return None if tensor.cut is None else link.axes[tensor.cut]


def _part_of(local: Shape, total: Shape, axis: int | None, ranks: int, rank: int) -> Box | None:
    """Return the box of one rank's canonical part; None if its shape is neither whole nor cut on the stated axis."""
    if local == total:
        return whole(total)
    if axis is None or not 0 <= axis < len(total) or local != (*total[:axis], total[axis] // ranks, *total[axis + 1 :]):
        return None
    lo = tuple(rank * local[axis] if index == axis else 0 for index in range(len(total)))
    return Box(lo, tuple(low + length for low, length in zip(lo, local, strict=True)))


def _placed(
    tensor: DeclaredTensor, link: BoxLink, array: FileArray, part: Box, common: Box
) -> tuple[bool, StoredShard] | str:
    shape, turned = common.shape, link.axes != tuple(range(len(link.axes)))
    if shape[1:] != part.shape[1:] or (turned and link.axes != tuple(reversed(range(len(shape))))):
        return f"{tensor.name}: {array.file} does not contain {common} in one piece"
    width = dtype_size(array.dtype)
    begin = array.begin + (common.lo[0] - part.lo[0]) * math.prod(shape[1:]) * width if shape else array.begin
    shard = Shard(tensor.name, array.dtype, tensor.shape, pushed(link, common))
    return turned, (shard, array.file, begin, width)
