"""The judges of wrong declarations: the proof, the headers of real files, and numbers that somebody else computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import Family, ModelDescription, ModelTensor, bind, enumerate_tensors, family_for
from paddleformers_fc.families.names import Names
from paddleformers_fc.mapping import TensorMapping, prove
from tests.harness import tiny
from tests.mapping.numbers import Arrays, moved
from tests.parity import fixtures, jobs
from tests.parity.fixtures import Fixture
from tests.parity.mutations import Mutant, mutants

DEGREES = (1, 2)
PROOF, HEADERS, NUMBERS, UNCHANGED, MISSED = "proof", "headers", "numbers", "unchanged", "MISSED"
NOTICED = (PROOF, HEADERS, NUMBERS)


class Space:
    """The tensors of one model by its right declaration, and the canonical tensors that they are made of.

    Args:
        family: the family.
        description: the model.
        tp: degree of tensor parallelism.
        canonical: the numbers of the canonical tensors.
    """

    def __init__(self, family: Family, description: ModelDescription, tp: int, canonical: Arrays) -> None:
        self.description, self.canonical = description, canonical
        self.tensors = [one.under(tp) for one in enumerate_tensors(family, description)]
        self.mapping = bind(family, description, self.tensors).mapping()
        self.right = moved(self.mapping, canonical)
        self.declared = declared(Names(family, description), self.tensors)

    def refusal(self, mutant: Mutant) -> str | Arrays:
        """Which of proof and headers refuses a mutant, or that nothing changes; else the model's tensors by it."""
        if mutant.targets and self.declared.isdisjoint(mutant.targets):
            return UNCHANGED
        try:
            mapping = mutant.rules(self.description, self.tensors).mapping()
            if _headers(mapping) != _headers(self.mapping):
                return HEADERS
            prove(mapping)
            prove(mapping.reversed())
        except MappingError:
            return PROOF
        wrong = moved(mapping, self.canonical)
        return wrong if any(not np.array_equal(wrong[name], self.right[name]) for name in self.right) else UNCHANGED


def declared(index: Names, tensors: Sequence[ModelTensor]) -> set[str]:
    """The targets of the statements that declare one of these tensors."""
    return {kind.statement.target for tensor in tensors for kind in index.find(tensor.name)[0]}


def _headers(mapping: TensorMapping) -> dict[str, Any]:
    return {name: spec.shape for name, spec in mapping.sources.items()}


@dataclass(frozen=True)
class Subject:
    """A fixture, the real model that holds it, and its spaces under every degree."""

    fixture: Fixture
    model: Any
    spaces: tuple[Space, ...]
    tolerance: float

    def verdict(self, mutant: Mutant) -> str:
        """Who notices a mutant; a load that moves other numbers is noticed if the logits are others."""
        found = UNCHANGED
        for space in self.spaces:
            wrong = space.refusal(mutant)
            if not isinstance(wrong, str):
                # What the right mapping would have to read for the same model.
                in_effect = moved(space.mapping.reversed(), wrong)
                wrong = NUMBERS if self._differs(in_effect) else MISSED
            if wrong in NOTICED:
                return wrong
            found = MISSED if wrong == MISSED else found
        return found

    def _differs(self, canonical: Arrays) -> bool:
        import paddle

        alone, state = self.spaces[0], self.model.state_dict()
        wrong = moved(alone.mapping, canonical)
        changed = [name for name, right in alone.right.items() if not np.array_equal(wrong[name], right)]
        for name in changed:
            state[name].set_value(paddle.to_tensor(wrong[name].astype(np.float32)))
        found = jobs.logits(self.model, self.fixture)
        for name in changed:
            state[name].set_value(paddle.to_tensor(alone.right[name].astype(np.float32)))
        return not float(np.abs(found - self.fixture.logits).max()) < self.tolerance


def by_logits(names: Sequence[str], output_dir: str, tolerance: float) -> list[str]:
    """A job for one rank: who notices every mutant of the family of some fixtures, in the order of the mutants.

    Args:
        names: of the family's fixtures.
        output_dir: a directory for checkpoints.
        tolerance: the largest difference of logits that is not noticed.
    """
    args = jobs.arguments(tiny.SINGLE.to_json(), output_dir)
    subjects = [_subject(fixtures.read(name), args, Path(output_dir), tolerance) for name in names]
    family = family_for(subjects[0].fixture.config)
    return [_by_first(mutant, subjects) for mutant in mutants(family)]


def _by_first(mutant: Mutant, subjects: Sequence[Subject]) -> str:
    """The verdict of the first model that notices; missed if it changes one and is noticed by none."""
    found = UNCHANGED
    for subject in subjects:
        verdict = subject.verdict(mutant)
        if verdict in NOTICED:
            return verdict
        found = MISSED if verdict == MISSED else found
    return found


def _subject(fixture: Fixture, args: Any, directory: Path, tolerance: float) -> Subject:
    from paddleformers_fc.trainer.description import describe_model

    model = jobs.load(fixture, args, directory)
    described = describe_model(model)
    family = family_for(described.config)
    spaces = tuple(Space(family, described, tp, fixture.tensors) for tp in DEGREES)
    return Subject(fixture, model, spaces, tolerance)
