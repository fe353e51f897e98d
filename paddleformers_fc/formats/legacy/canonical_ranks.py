"""Rank files whose weights have canonical names and orientation: ``model.tp00_pp00.safetensors``.

Trainers with ``save_to_hf`` write them together with optimizer states in the names and orientation of the model. The
family's rules convert the weights: every stored canonical part becomes boxes of the model's tensors, with reversed axes
in the file.

No table assigns the variables of states, such as ``linear_5.w_0``, to parameters. Paddle names a variable after the
class of its layer and numbers the layers of a class in the order in which they are built. The order in which the family
builds the parameters of a stage therefore gives one sequence per class, and layers of a kind (``q_proj`` of every
decoder layer) have the same class. Variables are only assigned if exactly one assignment matches the sizes of all
states.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import DeclaredTensor, ModelDescription, bind, enumerate_tensors, family_for
from paddleformers_fc.families.declarations import NUMBER
from paddleformers_fc.families.enumerate import built_order
from paddleformers_fc.families.names import Names, tied_names, tied_sources
from paddleformers_fc.formats.checkpoint import StoredShard
from paddleformers_fc.formats.legacy.rank_files import RankContent, arrange
from paddleformers_fc.formats.stock_checkpoint import FileArray
from paddleformers_fc.mapping import Shape, TensorMapping, TensorSources
from paddleformers_fc.mapping.boxes import Box, shifted, whole
from paddleformers_fc.mapping.templates import BoxLink, pushed
from paddleformers_fc.storage.dtypes import dtype_size
from paddleformers_fc.text import count_text

_FUSED = "fuse_attention_"
"""The prefix of configuration keys that many classes ignore: the configured fusion is tried first, then no fusion."""
_VARIABLE = re.compile(r"(?:slice@)?(([^@]+)_([0-9]{1,9})\.([wb]_[0-9]+))(?:_([A-Za-z]\w*))?")
_NAMED = ("embed", "lm_head")
"""Words that are either in both the class of a layer and the name of its parameter, or in neither."""
_NUMBER_SHAPES = ((), (1,))
_MOST_ORDERS = 4096
"""Maximum number of class orders to try. If sizes exclude none, there are exponentially many."""


@dataclass(frozen=True)
class CanonicalModel:
    """A model whose canonical tensors are stored.

    Args:
        tensors: its tensors, in the order in which it builds them.
        ties: stored aliases, and their owners.
        mapping: the mapping from canonical tensors to the model's tensors.
        tp: number of tensor-parallel ranks.
    """

    tensors: Mapping[str, DeclaredTensor]
    ties: Mapping[str, str]
    mapping: TensorMapping
    tp: int

    def on_stage(self, stored: Iterable[str]) -> dict[str, Shape]:
        """Return the local shapes of the tensors on the stage with these canonical tensors, in building order."""
        present = frozenset(stored)
        return {
            name: tuple(length // cut for length, cut in zip(one.shape, one.under(self.tp).cuts, strict=True))
            for name, one in self.tensors.items()
            if self._is_on(name, present) and not (name in self.ties and self._is_on(self.ties[name], present))
        }

    def _is_on(self, name: str, present: frozenset[str]) -> bool:
        return name in self.mapping.made and present.issuperset(self.mapping.made[name].names)

    def shards(self, name: str, stored: Mapping[str, FileArray], tp: int) -> Iterator[tuple[bool, StoredShard] | str]:
        """Yield the boxes of a tensor that a rank stores, and whether its file has the axes in reverse order.

        Args:
            name: the tensor.
            stored: the rank's canonical parts.
            tp: the tensor-parallel rank.
        """
        tensor, sources = self.tensors[name], self.mapping.made[name]
        for link in sources.template.links:
            source = sources.names[link.source]
            array, total = stored[source], self.mapping.sources[source].shape
            axis = None if tensor.cut is None else link.axes[tensor.cut]
            part = _part_of(array.shape, total, axis, self.tp, tp)
            common = None if part is None else part.intersect(link.source_box)
            if part is None:
                yield f"{source}: {list(array.shape)} on each of {self.tp} ranks is not a part of {list(total)}"
            elif common is not None:
                yield _placed(tensor, link, array, part, common)


def canonical_models(model: ModelDescription, tp: int, stored: Sequence[str]) -> Iterator[CanonicalModel | str]:
    """Yield every model that a configuration can describe, or as text how its canonical tensors differ.

    Raises:
        MappingError: the family is unknown.
    """
    family, present = family_for(model.config), frozenset(stored)
    plain = {key: value for key, value in model.config.items() if not key.startswith(_FUSED)}
    seen: list[set[str]] = []
    for config, is_fleet in itertools.product((model.config, plain), (None, False, True)):
        one = structs.replace(model, config=config, is_fleet=is_fleet)
        try:
            ties = tied_names(family, one)
            declared = {tensor.name: tensor for tensor in enumerate_tensors(family, one)}
            kept = {name: tensor for name, tensor in declared.items() if ties.get(name) not in declared}
            mapping = bind(family, one, [tensor.under(tp) for tensor in kept.values()]).mapping()
        except MappingError:
            continue
        for (alias, owner), (name, source) in zip(ties.items(), tied_sources(family, one).items(), strict=True):
            if name in present and name not in mapping.sources:
                # The first and last stage of a pipeline each have a copy.
                kept[alias] = structs.replace(kept[owner], name=alias)
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


def _part_of(local: Shape, total: Shape, axis: int | None, ranks: int, rank: int) -> Box | None:
    """Return the box of a rank's canonical part; None if it is neither complete nor cut on ``axis``."""
    if local == total:
        return whole(total)
    if axis is None or not 0 <= axis < len(total) or local != (*total[:axis], total[axis] // ranks, *total[axis + 1 :]):
        return None
    return shifted(local, tuple(rank * local[axis] if index == axis else 0 for index in range(len(total))))


def _placed(
    tensor: DeclaredTensor, link: BoxLink, array: FileArray, part: Box, common: Box
) -> tuple[bool, StoredShard] | str:
    shape, transposed = common.shape, link.axes != tuple(range(len(link.axes)))
    if shape[1:] != part.shape[1:] or (transposed and link.axes != tuple(reversed(range(len(shape))))):
        return f"{tensor.name}: {array.file} does not contain {common} in one piece"
    row = math.prod(shape[1:]) * dtype_size(array.dtype)
    begin = array.begin + (common.lo[0] - part.lo[0]) * row if shape else array.begin
    return transposed, replace(array, begin=begin).shard(tensor.name, tensor.shape, pushed(link, common))


@dataclass(frozen=True)
class _Variable:
    """A variable, with the pieces of each state that is not a scalar."""

    name: str
    states: Sequence[Sequence[FileArray]]

    def fits(self, shape: Shape) -> bool:
        """Return whether all states can belong to a parameter with this shape."""
        return all(not isinstance(arrange(shape, pieces), str) for pieces in self.states)


_Class = tuple[str, str]
"""The class of a layer, and the suffix of a variable in it, such as ``w_0``."""


def assign_variables(contents: Sequence[RankContent], parameters: Mapping[str, Shape]) -> dict[str, str] | str:
    """Return the name of the variable of every parameter.

    Args:
        contents: the optimizer files of one stage and tensor-parallel rank.
        parameters: local shapes by structured name, in the order in which the model builds them.
    Returns:
        the names, or as text why they are not unique.
    """
    classes = _classes(contents)
    count = sum(map(len, classes.values()))
    if count != len(parameters):
        return f"the optimizer has states of {count} variables, and the model has {len(parameters)} parameters"
    found: list[dict[str, str]] = []
    for tried, order in enumerate(_assignments(classes, parameters, {})):
        found += [] if order is None else [order]
        if tried == _MOST_ORDERS:
            return f"more than {_MOST_ORDERS} orders of the classes would have to be tried"
        if len(found) > 1:
            name = next(one for one in parameters if found[0][one] != found[1][one])
            return f"{name} can be {found[0][name]} or {found[1][name]}"
    if not found:
        names = ", ".join(sorted({name for name, _ in classes}))
        return f"no order of the classes {names} matches the parameters' shapes"
    return found[0]


def _classes(contents: Sequence[RankContent]) -> dict[_Class, list[_Variable]]:
    """Return the variables by their class, in the order of their numbers."""
    pieces: dict[tuple[str, str, int, str], dict[str, list[FileArray]]] = {}
    for content in contents:
        for key, array in (*content.arrays.items(), *content.master.items()):
            match = _VARIABLE.fullmatch(key)
            if match is not None:
                states = pieces.setdefault((match[2], match[4], int(match[3]), match[1]), {})
                states.setdefault(match[5] or "", []).append(array)
    classes: dict[_Class, list[_Variable]] = {}
    for (kind, leaf, _, name), states in sorted(pieces.items()):
        shaped = [one for one in states.values() if one[0].shape not in _NUMBER_SHAPES]
        classes.setdefault((kind, leaf), []).append(_Variable(name, shaped))
    return classes


def _is_possible(variables: _Class, name: str) -> bool:
    """Return whether variables of a class can belong to a parameter, by their names."""
    kind, leaf = variables
    return all((word in kind) == (word in name) for word in _NAMED) and (leaf[0] == "w" or name.endswith("bias"))


def _assignments(
    classes: Mapping[_Class, Sequence[_Variable]], parameters: Mapping[str, Shape], chosen: Mapping[str, _Class]
) -> Iterator[dict[str, str] | None]:
    """Yield every assignment in which layers of a kind have the same class; None for every attempt.

    Args:
        classes: the variables.
        parameters: local shapes, in building order.
        chosen: the classes of kinds of layers that are already chosen.
    """
    yield None
    used: Counter[_Class] = Counter()
    assigned: dict[str, str] = {}
    for name, shape in parameters.items():
        kind = NUMBER.sub("#", name)
        if kind not in chosen:
            for one in classes:
                if _is_possible(one, name):
                    yield from _assignments(classes, parameters, {**chosen, kind: one})
            return
        variables, at = classes[chosen[kind]], used[chosen[kind]]
        if at == len(variables) or not variables[at].fits(shape):
            return
        used[chosen[kind]] += 1
        assigned[name] = variables[at].name
    yield assigned
