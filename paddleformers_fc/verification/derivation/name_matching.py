"""Match the names of two spaces, for a model that no family declares.

A name is a template and the numbers in it. Templates correspond at one of three levels, the first that has any:

===========  =============================================================================================
level        example (model's name, canonical name)
===========  =============================================================================================
``EQUAL``    the same text
``SPELLED``  the same words: ``q_layernorm`` and ``q_norm``, ``shared_experts`` and ``shared_expert``
``NESTED``   one has whole components more: ``model.embedding.embed_tokens`` and ``model.embed_tokens``
===========  =============================================================================================

A name that is fused of others, or that a stack of experts goes by, is spelled out into the names expected for it. The
numbers of layers may be shifted, where the two sides have the same run of numbers from another beginning.
Templates are few; every pair is compared once, the names themselves are looked up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
HOLE = "{}"
_SPELLINGS = {"layernorm": "norm"}
_LEAVES = ("weight", "bias")

Numbers = tuple[int, ...]

QKV, FFN = "qkv", "ffn"
FUSED = {
    QKV: ("qkv_proj", "fused_qkv_proj", "query_key_value", "qkv", "c_attn"),
    FFN: ("up_gate_proj", "gate_up_proj", "gate_up_fused_proj", "fused_gate_up_proj", "gate_up"),
}
"""The names of fused layers."""

PARTS = {
    QKV: (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("wq", "wk", "wv")),
    FFN: (("gate_proj", "up_proj"), ("w1", "w3"), ("gate", "up")),
}
"""The names of their parts, in order."""

STACKS = {"weight1": FUSED[FFN][0], "weight2": "down_proj"}
"""The content of the two tensors of grouped experts."""


class NameMatch(IntEnum):
    """The similarity of two names; lower is more similar."""

    EQUAL = 0
    SPELLED = 1
    NESTED = 2


def split(name: str) -> tuple[str, Numbers]:
    """Return the template of a name, and the numbers in its holes."""
    return _NUMBER.sub(HOLE, name), tuple(int(number) for number in _NUMBER.findall(name))


def filled(template: str, numbers: Iterable[int]) -> str:
    """Return the name of a template with these numbers."""
    return template.format(*numbers)


def words(template: str) -> tuple[tuple[str, ...], ...]:
    """Return the words of every component, as they are compared: in the singular, and in one spelling."""
    return tuple(_words(component) for component in template.split("."))


def _words(component: str) -> tuple[str, ...]:
    singular = (word[:-1] if len(word) > 3 and word.endswith("s") else word for word in component.split("_"))
    return tuple(_SPELLINGS.get(word, word) for word in singular)


@dataclass(frozen=True, slots=True)
class Fusion:
    """The parts of a fused template.

    Args:
        kind: ``qkv`` or ``ffn``.
        name: the component with the name of the fused layer.
        parts: the templates of the parts, in order.
    """

    kind: str
    name: str
    parts: tuple[str, ...]


def fusions(template: str) -> Iterator[Fusion]:
    """Yield the parts of a fused template by its name, in every spelling."""
    components = template.split(".")
    place = _layer_place(components)
    for kind, names in FUSED.items():
        if components[place] not in names:
            continue
        for parts in PARTS[kind]:
            yield Fusion(kind, components[place], tuple(_with(components, place, part) for part in parts))


def carvings(template: str) -> Iterator[tuple[str, Fusion]]:
    """Fused templates that a template may be a part of, with all the parts of each."""
    components = template.split(".")
    place = _layer_place(components)
    for kind, spellings in PARTS.items():
        for parts in spellings:
            if components[place] not in parts:
                continue
            for name in FUSED[kind]:
                siblings = tuple(_with(components, place, part) for part in parts)
                yield _with(components, place, name), Fusion(kind, name, siblings)


def fused_kind(template: str) -> str | None:
    """Return the layers that a fused template consists of by its name."""
    component = template.split(".")[_layer_place(template.split("."))]
    return next((kind for kind, names in FUSED.items() if component in names), None)


def layer_name(template: str) -> str:
    """Return the name of the layer alone, without its parents and without ``weight`` or ``bias``."""
    components = template.split(".")
    return components[_layer_place(components)]


def stacks(template: str) -> Iterator[tuple[str, ...]]:
    """Yield the templates of one expert's tensors for templates that may be stacks; the last hole is the expert.

    Names of grouped products hold their experts under ``experts``, and end in ``weight`` as single layers do.
    """
    components = template.split(".")
    for place, component in enumerate(components[:-1]):
        if "experts" not in component.split("_") or "shared" in component or components[place + 1] == HOLE:
            continue
        rest = [STACKS.get(part, part) for part in components[place + 1 :] if part not in _LEAVES]
        one = ".".join([*components[:place], "experts", HOLE, *rest, "weight"])
        yield (one,)
        for fusion in fusions(one):
            yield fusion.parts


def prefix_of(template: str) -> str:
    """Return the scope of a template's layer."""
    components = template.split(".")
    return ".".join(components[: _layer_place(components)])


def _layer_place(components: list[str]) -> int:
    return len(components) - 2 if len(components) > 1 and components[-1] in _LEAVES else len(components) - 1


def _with(components: list[str], place: int, name: str) -> str:
    return ".".join([*components[:place], name, *components[place + 1 :]])


class CanonicalNames:
    """The names of the canonical side.

    Args:
        names: all of them.
        shifts: the offset of a model's first numbers, by the text before the number.
    """

    def __init__(self, names: Iterable[str], shifts: Mapping[str, int]) -> None:
        self._shifts = shifts
        self._numbers: dict[str, set[Numbers]] = {}
        for name in names:
            template, numbers = split(name)
            self._numbers.setdefault(template, set()).add(numbers)
        self._words = {template: words(template) for template in self._numbers}
        self._alike: dict[tuple[str, NameMatch], list[str]] = {}

    def named(self, template: str, numbers: Numbers, level: NameMatch) -> list[str]:
        """Return the canonical names that correspond to a model's at one level."""
        moved = self.moved(template, numbers)
        return [filled(other, moved) for other in self._templates(template, level) if moved in self._numbers[other]]

    def experts(self, template: str, numbers: Numbers, level: NameMatch) -> list[list[str]]:
        """As :meth:`named`, for a template whose last hole is an expert: the names of all experts, in order."""
        moved = self.moved(template, numbers)
        found = []
        for other in self._templates(template, level):
            entries = sorted(entry for entry in self._numbers[other] if entry[:-1] == moved)
            if entries:
                found.append([filled(other, entry) for entry in entries])
        return found

    def moved(self, template: str, numbers: Numbers) -> Numbers:
        """Return the numbers of a model's name as the canonical side counts."""
        shift = self._shifts.get(template.split(HOLE)[0], 0)
        return (numbers[0] - shift, *numbers[1:]) if numbers and shift else numbers

    def _templates(self, template: str, level: NameMatch) -> list[str]:
        if level is NameMatch.EQUAL:
            return [template] if template in self._numbers else []
        if (template, level) not in self._alike:
            own = words(template)
            found = [other for other, its in self._words.items() if other != template and _level(own, its) is level]
            self._alike[template, level] = found
        return self._alike[template, level]


def _level(one: tuple[tuple[str, ...], ...], other: tuple[tuple[str, ...], ...]) -> NameMatch | None:
    if [word for part in one for word in part] == [word for part in other for word in part]:
        return NameMatch.SPELLED
    shorter, longer = sorted((one, other), key=len)
    if one[-1] != other[-1] or one.count((HOLE,)) != other.count((HOLE,)) or len(shorter) < 2:
        return None
    rest = iter(longer)
    return NameMatch.NESTED if all(part in rest for part in shorter) else None


def shifts_of(model: Iterable[str], canonical: Iterable[str]) -> dict[str, int]:
    """Return the offset of a model's first numbers from the canonical ones, by the text before the number.

    A shift is taken where the numbers of both sides are equal under it and under no other; else there is none.
    """
    ours, theirs = _runs(model), _runs(canonical)
    shifts: dict[str, int] = {}
    for prefix, numbers in ours.items():
        others = theirs.get(prefix) or _by_last_component(prefix, theirs)
        if not others or numbers == others:
            continue
        shift = min(numbers) - min(others)
        if {number - shift for number in numbers} == others:
            shifts[prefix] = shift
    return shifts


def _by_last_component(prefix: str, runs: Mapping[str, set[int]]) -> set[int]:
    component = prefix.rstrip(".").split(".")[-1]
    found = [numbers for other, numbers in runs.items() if other.rstrip(".").split(".")[-1] == component]
    return found[0] if len(found) == 1 else set()


def _runs(names: Iterable[str]) -> dict[str, set[int]]:
    runs: dict[str, set[int]] = {}
    for name in names:
        template, numbers = split(name)
        if numbers:
            runs.setdefault(template.split(HOLE)[0], set()).add(numbers[0])
    return runs
