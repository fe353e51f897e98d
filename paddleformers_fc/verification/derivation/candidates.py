"""Candidates for the sources of each tensor, by names, shapes and kinds of layers.

A *candidate* consists of tensors that are decided together and their options, which are the layouts that shapes allow
for the tensors with matching names. :mod:`.derive` selects candidates and options. The names that a user's lines give
for one layer are learned here for the other layers.

Cost: a few look-ups by name for every tensor and level of names; templates are compared once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddleformers_fc.mapping import TensorSpec
from paddleformers_fc.verification.derivation.layer_kinds import LayeredTensor, LayerKind
from paddleformers_fc.verification.derivation.name_matching import (
    FFN,
    CanonicalNames,
    Fusion,
    NameMatch,
    carvings,
    filled,
    fused_kind,
    fusions,
    layer_name,
    shifts_of,
    split,
    stacks,
)
from paddleformers_fc.verification.derivation.options import (
    Conventions,
    Option,
    OptionSource,
    carved,
    head_counts,
    joined,
    moved,
    stack_options,
)


@dataclass(frozen=True)
class Candidate:
    """Tensors that are decided together.

    Args:
        targets: their names in the model.
        options: the layouts that they may have.
        reason: the evidence.
    """

    targets: tuple[str, ...]
    options: tuple[Option, ...]
    reason: str

    @property
    def sources(self) -> set[str]:
        """The canonical tensors of all options."""
        return {name for option in self.options for rule in option.rules for name in rule.sources}


class Evidence:
    """The evidence from names and shapes of both sides.

    Args:
        model: the model's tensors by name.
        canonical: every tensor of the canonical side.
        config: the model's configuration.
    Attributes:
        shapes: of the model's tensors.
        sources: shapes of the canonical ones.
        names: the canonical names.
        conventions: the conventions of the whole model.
    """

    def __init__(
        self, model: Mapping[str, LayeredTensor], canonical: Mapping[str, TensorSpec], config: Mapping[str, Any]
    ) -> None:
        self._model = model
        self._settled_parts: dict[str, tuple[str, ...]] = {}
        self.shapes = {name: one.tensor.shape for name, one in model.items()}
        self.sources = {name: spec.shape for name, spec in canonical.items()}
        self.names = CanonicalNames(canonical, shifts_of(model, canonical))
        self.conventions = Conventions(head_counts(config), self._are_linears_turned())

    def named(self, name: str, level: NameMatch) -> list[str]:
        """Return the canonical names that correspond to a model's at one level."""
        return self.names.named(*split(name), level)

    def is_named(self, name: str) -> bool:
        """Return whether any canonical name corresponds to a model's."""
        return any(self.named(name, level) for level in NameMatch)

    def source(self, name: str) -> OptionSource:
        """Return a canonical tensor."""
        return OptionSource(name, self.sources[name])

    def learn(self, name: str, sources: Sequence[str]) -> None:
        """Remember the names of a user's line for the other layers, if they have the numbers of its target."""
        template, numbers = split(name)
        moved_numbers = self.names.moved(template, numbers)
        if all(split(source)[1] == moved_numbers for source in sources):
            self._settled_parts[template] = tuple(split(source)[0] for source in sources)

    def is_settled(self, name: str) -> bool:
        """Return whether a user's line chose the names for tensors of this template."""
        return split(name)[0] in self._settled_parts

    def ways(self, name: str, level: NameMatch) -> Iterator[Candidate]:
        """Return the candidates of a tensor by its name, the likeliest first."""
        target = self._model[name]
        template, numbers = split(name)
        reason = f"{level.name.lower()} names"
        fused = fused_kind(template)
        if level is NameMatch.EQUAL and template in self._settled_parts:
            yield from _claimed((name,), self._as_settled(target), "as a settling line names it")
        options = [
            option
            for other in self.names.named(template, numbers, level)
            for option in moved(target, self.source(other), fused, self.conventions)
        ]
        yield from _claimed((name,), options, reason)
        for fusion in fusions(template):
            found = [self.names.named(part, numbers, level) for part in fusion.parts]
            if all(len(names) == 1 for names in found):
                sources = [self.source(names[0]) for names in found]
                yield from _claimed(
                    (name,), joined(target, sources, fusion, self.conventions), f"{reason} of its parts"
                )
        for parts in stacks(template):
            every = [self.names.experts(part, numbers, level) for part in parts]
            if all(len(names) == 1 for names in every):
                experts = [[self.source(one) for one in names[0]] for names in every]
                yield from _claimed(
                    (name,), stack_options(target, experts, self.conventions), f"{reason} of its experts"
                )
        for whole, fusion in carvings(template):
            siblings = tuple(part.format(*numbers) for part in fusion.parts)
            for other in self.names.named(whole, numbers, level):
                if all(part in self._model for part in siblings):
                    targets = [self._model[part] for part in siblings]
                    options = carved(targets, self.source(other), fusion, self.conventions)
                    yield from _claimed(siblings, options, f"{reason} of what it is a part of")

    def _as_settled(self, target: LayeredTensor) -> list[Option]:
        template, numbers = split(target.tensor.name)
        names = [filled(part, self.names.moved(template, numbers)) for part in self._settled_parts[template]]
        if any(name not in self.sources for name in names):
            return []
        sources = [self.source(name) for name in names]
        kind = fused_kind(template)
        if len(sources) == 1:
            return moved(target, sources[0], kind, self.conventions)
        fusion = Fusion(kind or FFN, layer_name(template), self._settled_parts[template])
        return joined(target, sources, fusion, self.conventions)

    def _are_linears_turned(self) -> bool:
        """Return False if a weight of a linear layer that is not square has the shape of its file."""
        for name, one in self._model.items():
            shape = one.tensor.shape
            if one.kind is not LayerKind.LINEAR or len(shape) != 2 or shape[0] == shape[1]:
                continue
            for other in self.named(name, NameMatch.EQUAL):
                if self.sources[other] == shape:
                    return False
        return True


def _claimed(targets: tuple[str, ...], options: Sequence[Option], reason: str) -> Iterator[Candidate]:
    if options:
        yield Candidate(targets, tuple(options), reason)
