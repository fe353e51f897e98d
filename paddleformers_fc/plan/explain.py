"""Trace a tensor to its files and byte offsets, with the rules between its stored and canonical names.

A canonical tensor is explained by the stored boxes that it is read from, a stored tensor by the canonical boxes that
are read from it. Both follow from the plan of an export, so they match what an export reads.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from operator import add

import msgspec

from paddleformers_fc.errors import OptionError
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.layout.roles import split_state_name
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping import Rule
from paddleformers_fc.mapping.boxes import Box, shifted
from paddleformers_fc.plan.build import Planner
from paddleformers_fc.plan.sources import canonical_layout, canonical_names, canonical_source
from paddleformers_fc.text import suggestion

CANONICAL, STORED = "canonical", "stored"


class BoxSource(msgspec.Struct, frozen=True):
    """A box of a stored tensor that is a box of a canonical tensor.

    Attributes:
        stored: name of the stored tensor.
        stored_box: coordinates in the stored tensor, the end excluded.
        file: path of the file, relative to the checkpoint.
        begin: byte offset of the stored shard that contains the box.
        shard: coordinates of that shard in the stored tensor.
        canonical: name of the canonical tensor.
        canonical_box: coordinates in the canonical tensor.
        axes: for every canonical axis the stored axis that it reads, or -1 for a new axis of length one.
    """

    stored: str
    stored_box: Box
    file: str
    begin: int
    shard: Box
    canonical: str
    canonical_box: Box
    axes: tuple[int, ...]


class ExplainedTensor(msgspec.Struct, frozen=True):
    """One tensor with the requested name, in one role and one of the two spaces.

    Attributes:
        side: ``canonical`` or ``stored``.
        role: its role.
        dtype: element type.
        shape: global shape.
        boxes: the stored boxes that it is read from, or the canonical boxes that are read from it.
        rules: the rules between the two spaces; none if both have the same names.
        tied: other stored names of the same tensor, which must be equal.
    """

    side: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    boxes: list[BoxSource]
    rules: list[Rule]
    tied: list[str]


class Explanation(msgspec.Struct, frozen=True):
    """The report of ``explain``.

    Attributes:
        path: the directory, as the user named it.
        kind: its format.
        name: the requested name.
        tensors: the tensors with this name.
    """

    path: str
    kind: str
    name: str
    tensors: list[ExplainedTensor]


def explain_tensor(checkpoint: OpenedCheckpoint, name: str) -> Explanation:
    """Explain a tensor by its canonical or stored name, including the suffix of a state.

    Raises:
        OptionError: there is no such tensor; the error suggests a similar name.
        FlexError: the mapping of the checkpoint cannot be proved.
    """
    explainer = _Explainer(checkpoint)
    found = [*explainer.canonical(name), *explainer.stored(name)]
    explainer.planner.report.raise_error(str(checkpoint.catalog.root))
    if not found:
        raise OptionError(
            f"Unknown tensor {name!r}.",
            where=str(checkpoint.catalog.root),
            evidence=suggestion(name, explainer.names()),
            next_step=f"List the stored tensors: paddleformers-fc inspect {shlex.quote(str(checkpoint.catalog.root))} "
            "--tensors",
        )
    return Explanation(str(checkpoint.catalog.root), checkpoint.format.name, name, found)


class _Explainer:
    """The plan of an export, tensor by tensor."""

    def __init__(self, checkpoint: OpenedCheckpoint) -> None:
        self._checkpoint, self._source = checkpoint, canonical_source(checkpoint)
        self._layout = canonical_layout(self._source)
        self._roles = {} if checkpoint.format.canonical else checkpoint.catalog.roles
        self.planner = Planner(self._source)

    def names(self) -> set[str]:
        """Return every name of both spaces."""
        spaces: Iterable[Mapping[str, object]] = (*self._layout.values(), *self._roles.values())
        return {name for space in spaces for name in space}

    def canonical(self, name: str) -> Iterator[ExplainedTensor]:
        """Yield the canonical tensors with a name, and the stored boxes that they are read from."""
        for role, shards in self._layout.items():
            if name in shards:
                shard, parameter = shards[name], split_state_name(role, name).parameter
                rules = [rule for rule in self._rules() if parameter in rule.sources]
                boxes = list(self._boxes(role, shard))
                tied = [other for box in boxes[:1] for other in self._tied(role, box.stored)]
                yield ExplainedTensor(CANONICAL, role, shard.dtype, shard.global_shape, boxes, rules, tied)

    def stored(self, name: str) -> Iterator[ExplainedTensor]:
        """Yield the stored tensors with a name, and the canonical boxes that are read from them."""
        for role, tensors in self._roles.items():
            if name in tensors:
                tensor, parameter = tensors[name], split_state_name(role, name).parameter
                owner = self._source.stored_aliases.get(parameter, parameter)
                readers = [self._layout[role][one] for one in canonical_names(self._source, role, name)]
                boxes = [box for one in readers for box in self._boxes(role, one) if box.stored == name]
                rules = [rule for rule in self._rules() if owner in rule.targets]
                tied = self._tied(role, name)
                yield ExplainedTensor(STORED, role, tensor.dtype, tensor.shape, boxes, rules, tied)

    def _rules(self) -> tuple[Rule, ...]:
        return () if self._checkpoint.format.canonical else self._checkpoint.rules.rules

    def _tied(self, role: str, name: str) -> list[str]:
        """Return the other stored names of a tied tensor."""
        state = split_state_name(role, name)
        aliases = self._source.stored_aliases
        owner = aliases.get(state.parameter, state.parameter)
        copies = [owner, *(alias for alias, known in aliases.items() if known == owner)]
        stored = self._source.catalog.roles[role]
        return [full for one in copies if (full := one + state.suffix) != name and full in stored]

    def _boxes(self, role: str, shard: Shard) -> Iterator[BoxSource]:
        filling = self.planner.filling(role, shard)
        if filling is None:
            return
        for piece in filling.pattern.pieces:
            tensor, part = filling.tensors[piece.tensor], piece.stored_part
            (file, begin), stored_box = tensor.offsets[piece.box], tensor.form.boxes[piece.box]
            stored = shifted(part.shape, tuple(map(add, stored_box.lo, part.lo)))
            yield BoxSource(tensor.name, stored, file, begin, stored_box, shard.name, piece.part, piece.axes)
