"""Canonical names that a file may lack, in groups.

A model with prediction layers starts from files without them, and a model without them from files that have them. A
*group* consists of the names of one declared prefix and one number, such as all of prediction layer 0. For the layers
of the model it consists of the names of all layers, such as the biases of all their routers. A file with a part of a
group is incomplete, and the missing names are an error.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from paddleformers_fc.families.bind import family_numbers, family_sizes
from paddleformers_fc.families.declarations import NUMBER, PLACEHOLDER, Family
from paddleformers_fc.families.description import ModelDescription

Group = tuple[int, ...]

_HOLE = "{}"
_OF_THE_MODEL = "layer"
_TOKEN = re.compile(r"\{([^{}]*)\}")


class OptionalNames:
    """The optional names of one model; ``name in optional`` tests a canonical name.

    Args:
        family: the model's family.
        model: the model, whose configuration gives the number of the first prediction layer.
    """

    def __init__(self, family: Family, model: ModelDescription) -> None:
        numbers, sizes = family_numbers(family), family_sizes(family, model)
        self._beginnings: list[tuple[re.Pattern[str], tuple[int, ...]]] = []
        self._apart: list[tuple[bool, ...]] = []
        self._marks = {index: marks for index, text in enumerate(family.optional) if (marks := _marks(family, text))}
        for text in family.optional:
            placeholders = [token for token in _TOKEN.findall(text) if "," not in token]
            starts = tuple(sizes.length(numbers[name].start) for name in placeholders)
            self._beginnings.append((re.compile(_TOKEN.sub(_matcher, _escaped(text))), starts))
            self._apart.append(tuple(name != _OF_THE_MODEL for name in placeholders))

    def group(self, name: str) -> Group | None:
        """Return the group of a canonical name, or None if the name is not optional."""
        for index, (pattern, starts) in enumerate(self._beginnings):
            found = pattern.match(name)
            if found is None:
                continue
            numbers = tuple(int(number) for number in found.groups())
            if all(number >= start for number, start in zip(numbers, starts, strict=True)):
                return (index, *itertools.compress(numbers, self._apart[index]))
        return None

    def missed(self, untouched: Sequence[str], stored: Iterable[str]) -> list[str]:
        """Return the tensors of a file that a model does not read and must not ignore.

        Among optional names these are tensors of a layer of which another tensor is read, such as a bias that the model
        lacks, or scales of quantised values. Layers of the model itself are others, as in a file with more layers than
        the configuration.

        Args:
            untouched: the names that the model does not read.
            stored: all names of the file.
        """
        left, names = set(untouched), list(stored)
        layers = {_layer(name) for name in names if name not in left}
        marked = {group for name in names if (group := self.group(name)) and self._is_mark(group, name)}
        return [
            name
            for name in untouched
            if (group := self.group(name)) is None
            or _layer(name) in layers
            or (group[0] in self._marks and group not in marked)
        ]

    def _is_mark(self, group: Group, name: str) -> bool:
        return NUMBER.sub(_HOLE, name) in self._marks.get(group[0], ())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.group(name) is not None


def _marks(family: Family, beginning: str) -> frozenset[str]:
    """Return the names, without numbers, that distinguish a group of this prefix from layers of the model.

    There are none if the prefix is sufficient.
    """
    matches = re.compile(_TOKEN.sub(_matcher, _escaped(beginning))).match
    own: set[str] = set()
    others: set[str] = set()
    for source in (source for statement in family.statements for source in statement.sources):
        if matches(PLACEHOLDER.sub("0", source)):
            (own if source.startswith(beginning) else others).add(PLACEHOLDER.sub(_HOLE, source))
    return frozenset(own - others) if others else frozenset()


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _escaped(text: str) -> str:
    return text.replace(".", r"\.")


def _matcher(token: re.Match[str]) -> str:
    inside = token.group(1)
    return f"(?:{inside.replace(',', '|')})" if "," in inside else r"(\d+)"
