"""Write derived rules as a family that can be registered, and its source text.

Rules are those of one model under one layout; a family declares every model of its kind. Three steps lead from one to
the other: the tensors of one template become one statement, lengths become names of sizes if exactly one name fits, and
the numbers that have a tensor become a condition. The family is bound to the model again and compared, rule by rule,
before it is returned. It is a draft: lengths without a name are those of one configuration, and a condition on numbers
(``layer >= 1``) may depend on a key. Linear in the tensors.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from math import prod
from typing import Any

from paddleformers_fc.aoa import normal
from paddleformers_fc.errors import MappingError
from paddleformers_fc.families.bind import ModelTensor, bind
from paddleformers_fc.families.declarations import SIZES, Family, Geometry, Numbers, Stack, Statement, TiedName
from paddleformers_fc.families.description import ModelDescription
from paddleformers_fc.families.enumerate import enumerate_tensors
from paddleformers_fc.families.sizes import Sizes
from paddleformers_fc.mapping import Rule, RuleSet, Shape
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.verification.derivation.name_matching import HOLE, fused_kind, layer_name, split
from paddleformers_fc.verification.derivation.options import are_heads_of_one_size, head_counts

_LENGTHS = ("vocab", "hidden", "q", "kv", "head", "ffn", "expert_ffn", "q + 2 * kv", "2 * ffn", "2 * expert_ffn")
_WORD = re.compile(r"\W")
_WIDTH = 110
_BY_HAND = "Use the derived statements, or write the family by hand (docs/add-a-family.md)."
_NONE: dict[str, Geometry] = {}
_OF_HEADS = (Geometry.FUSED_QKV, Geometry.FUSED_QKV_PER_RANK)
_CHOICES = (Geometry.SAME, Geometry.LINEAR, Geometry.FUSED_FFN, Geometry.FUSED_QKV_PER_RANK)


def family_of(
    name: str,
    rules: RuleSet,
    tensors: Sequence[ModelTensor],
    config: Mapping[str, Any],
    fused: Mapping[str, Geometry] = _NONE,
) -> Family:
    """Return a family that gives a model's rules.

    Layers that are fused in files and in the model are equal on one rank. The way in which tensor parallelism cuts them
    is given by ``fused`` and never guessed.

    Args:
        name: the family's name, and its one ``model_type``.
        rules: the rules of the model, without tensor parallelism.
        tensors: all tensors of the model.
        config: the model's configuration, which becomes the one that the family is proved on.
        fused: the geometry of layers that are fused in files too, by their name, such as ``gate_up_proj``.
    Raises:
        MappingError: the language of families does not express the rules, or ``fused`` lacks a layer.
    """
    family = _Writer(name, rules, tensors, config, fused).family()
    _compare(family, rules, tensors, config)
    return family


class _Writer:
    def __init__(
        self,
        name: str,
        rules: RuleSet,
        tensors: Sequence[ModelTensor],
        config: Mapping[str, Any],
        fused: Mapping[str, Geometry],
    ) -> None:
        self._name = name
        self._fused = fused
        self._rules = rules
        self._config = {key: value for key, value in config.items() if _is_plain(value)}
        self._heads = head_counts(config)
        self._groups: dict[str, list[ModelTensor]] = {}
        for tensor in tensors:
            self._groups.setdefault(split(tensor.name)[0], []).append(tensor)
        self._by_target: dict[str, list[Rule]] = {}
        for rule in rules.rules:
            for target in rule.targets:
                self._by_target.setdefault(target, []).append(rule)
        self._dtype = Counter(tensor.dtype for tensor in tensors).most_common(1)[0][0]
        self._numbers = self._spans()
        self._sizes = Sizes({**SIZES, **self._own_sizes()}, self._config)

    def family(self) -> Family:
        aliases = {tie.alias for tie in self._rules.ties}
        self._refuse_without_geometry()
        return Family(
            name=self._name,
            model_types=(self._name,),
            statements=tuple(self._statement(template, group, aliases) for template, group in self._groups.items()),
            tied=tuple(TiedName(tie.alias, tie.owner) for tie in self._rules.ties),
            sizes=self._own_sizes(),
            numbers=tuple(
                Numbers(name, self._count(name, len(span)), str(span.start - shift), str(shift))
                for name, (span, shift) in self._numbers.items()
            ),
            tiny=self._config,
        )

    def _refuse_without_geometry(self) -> None:
        """Refuse layers that are fused in both spaces and whose geometry is not given."""
        missing = [
            f"{tensor.name}: is fused in files too; {layer_name(template)}={'|'.join(one.value for one in _CHOICES)}"
            for template, group in self._groups.items()
            if fused_kind(template) and layer_name(template) not in self._fused
            for tensor in group
            if [len(rule.sources) for rule in self._by_target.get(tensor.name, ())] == [1]
        ]
        if missing:
            raise MappingError(
                "The geometry of layers that are fused in files as well is missing.",
                evidence=fold(missing),
                next_step="Give the geometry of each with --fused; fused_ffn and fused_qkv_old divide every part.",
            )

    def _spans(self) -> dict[str, tuple[range, int]]:
        """Return the numbers of a model's names by placeholder, and their offset from canonical ones."""
        found: dict[str, set[int]] = {}
        shifts: dict[str, set[int]] = {}
        for template, group in self._groups.items():
            for place, placeholder in enumerate(_placeholders(template)):
                for tensor in group:
                    number = split(tensor.name)[1][place]
                    found.setdefault(placeholder, set()).add(number)
                    for rule in self._by_target.get(tensor.name, ())[:1]:
                        shifts.setdefault(placeholder, set()).add(number - split(rule.sources[0])[1][place])
        for placeholder, seen in shifts.items():
            if len(seen) > 1:
                raise self._unsaid([f"{placeholder}: numbers are larger than canonical ones by {sorted(seen)}"])
        return {
            name: (range(min(numbers), max(numbers) + 1), next(iter(shifts.get(name, {0}))))
            for name, numbers in found.items()
        }

    def _count(self, name: str, count: int) -> str:
        if name == "layer" and count == self._config.get("num_hidden_layers"):
            return "layers"
        return "experts" if name == "expert" else str(count)

    def _own_sizes(self) -> dict[str, str]:
        """Return heads that only a nested configuration gives, as digits, and the number of experts."""
        nested = self._heads if head_counts(self._config) is None else None
        heads = dict(zip(("heads", "kv_heads"), map(str, nested), strict=True)) if nested else {}
        return heads | self._experts()

    def _experts(self) -> dict[str, str]:
        """Return the number of experts as a key of the configuration, if exactly one key has this value."""
        counts = {
            len(self._by_target[tensor.name])
            for group in self._groups.values()
            for tensor in group
            if any(rule.slab is not None for rule in self._by_target.get(tensor.name, ()))
        }
        if "expert" in self._numbers:
            counts.add(len(self._numbers["expert"][0]))
        if len(counts) != 1:
            return {}
        (count,) = counts
        keys = [key for key, value in self._config.items() if "experts" in key and value == count]
        return {"experts": keys[0] if len(keys) == 1 else str(count)}

    def _statement(self, template: str, group: list[ModelTensor], aliases: set[str]) -> Statement:
        first = group[0]
        if len({(tensor.shape, tensor.dtype) for tensor in group}) > 1:
            raise self._unsaid([f"{tensor.name}: shape {list(tensor.shape)}, {tensor.dtype}" for tensor in group])
        names = _placeholders(template)
        sources, geometry, turned, stack = self._made(first, names, aliases)
        return Statement(
            _spelled(template, names),
            sources,
            geometry,
            turned,
            stack,
            tuple(self._length(length) for length in first.shape),
            None,
            self._where(names, [split(tensor.name)[1] for tensor in group]),
            "" if first.dtype == self._dtype else first.dtype,
            parts=self._parts(first.name) if geometry in _OF_HEADS else (),
        )

    def _parts(self, name: str) -> tuple[str, ...]:
        """Return the lengths of query, key and value of a fused tensor, if they are not heads of one size."""
        (rule,) = self._by_target[name]
        if len(rule.lengths) != 3 or self._heads is None or are_heads_of_one_size(rule.lengths, *self._heads):
            return ()
        return tuple(self._length(part) for part in rule.lengths)

    def _made(
        self, tensor: ModelTensor, names: Sequence[str], aliases: set[str]
    ) -> tuple[tuple[str, ...], Geometry, bool, Stack | None]:
        if tensor.name in aliases:
            return (tensor.name,), Geometry.SAME, True, None
        rules = self._by_target.get(tensor.name, [])
        if not rules:
            return (), Geometry.SAME, True, None
        rule, rank = rules[0], len(tensor.shape)
        inner = [*names, "expert"]
        if len(rule.targets) > 1:
            raise self._unsaid([f"{tensor.name}: is a part of {rule.sources[0]}, and a statement makes one tensor"])
        if rule.slab is not None:
            new = rule.slab.stop - rule.slab.start == 1
            axes = tuple(axis for axis in rule.axes if axis >= 0)
            return self._spelled_sources(rule.sources, inner), *_geometry(rule, axes), Stack(rule.slab.axis, new)
        if len(set(map(_template, rule.sources))) < len(rule.sources):
            kinds = list(dict.fromkeys(map(_template, rule.sources)))
            return (
                tuple(_spelled(kind, inner) for kind in kinds),
                Geometry.FUSED_FFN if len(kinds) == 2 else Geometry.LINEAR,
                rule.axes != tuple(range(rank)),
                Stack(rule.axis),
            )
        geometry, turned = _geometry(rule, rule.axes)
        if len(rule.sources) == 1 and fused_kind(_template(tensor.name)):
            given = self._fused[layer_name(_template(tensor.name))]
            geometry = Geometry.SAME if given is Geometry.LINEAR and rank == 1 else given
        elif len(rule.sources) == 3:
            per_head = self._heads is not None and rule.target_blocks == self._heads[1]
            geometry = Geometry.FUSED_QKV if per_head else Geometry.FUSED_QKV_PER_RANK
        return self._spelled_sources(rule.sources, names), geometry, turned, None

    def _spelled_sources(self, sources: Iterable[str], names: Sequence[str]) -> tuple[str, ...]:
        return tuple(_spelled(_template(source), names) for source in sources)

    def _length(self, length: int) -> str:
        fitting = [name for name in _LENGTHS if self._is_length(name, length)]
        return fitting[0] if len(fitting) == 1 else str(length)

    def _is_length(self, name: str, length: int) -> bool:
        """Return whether a size is this length; one of several modalities is a list and no length."""
        try:
            return self._sizes.defines(name) and self._sizes.length(name) == length
        except MappingError:
            return False

    def _where(self, names: Sequence[str], rows: Sequence[tuple[int, ...]]) -> str:
        columns = [sorted({row[place] for row in rows}) for place in range(len(names))]
        if prod(map(len, columns)) != len(rows):
            raise self._unsaid([f"{', '.join(names)}: {len(rows)} tensors, not every number with every other"])
        conditions = []
        for name, column in zip(names, columns, strict=True):
            span, shift = self._numbers[name]
            inner = [number - shift for number in column]
            if len(column) == len(span):
                continue
            if column == list(range(column[0], span.stop)):
                conditions.append(f"{name} >= {inner[0]}")
            elif column == list(range(span.start, column[-1] + 1)):
                conditions.append(f"{name} <= {inner[-1]}")
            else:
                conditions.append(f"{name} in ({', '.join(map(str, inner))},)")
        return " and ".join(conditions)

    def _unsaid(self, evidence: Sequence[str]) -> MappingError:
        return MappingError(
            f"The language of families does not express the derived rules of {self._name}.",
            evidence=fold(evidence),
            next_step=_BY_HAND,
        )


def _geometry(rule: Rule, axes: Shape) -> tuple[Geometry, bool]:
    """Return the geometry of a rule of one or two sources, and whether it is transposed; biases do not show that."""
    straight = axes == tuple(range(len(axes)))
    if len(rule.sources) == 2:
        return Geometry.FUSED_FFN, not straight or len(axes) == 1
    return (Geometry.SAME, True) if straight else (Geometry.LINEAR, True)


def _compare(family: Family, rules: RuleSet, tensors: Sequence[ModelTensor], config: Mapping[str, Any]) -> None:
    """Refuse a family that gives other tensors or other rules than it was made of."""
    own = {tensor.name: (tensor.shape, tensor.dtype) for tensor in tensors}
    dtype = Counter(tensor.dtype for tensor in tensors).most_common(1)[0][0]
    model = ModelDescription(config)
    declared = {one.name: (one.shape, one.dtype) for one in enumerate_tensors(family, model, dtype)}
    bound = bind(family, model, tensors)
    wanted, made = normal(rules.mapping()), normal(bound.mapping())
    faults = [f"{name}: is another tensor as the family declares it" for name in own if declared.get(name) != own[name]]
    faults += [f"{name}: is declared and no tensor of the model" for name in declared if name not in own]
    faults += sorted({f"{item.target}: is made of its sources in another way" for item in wanted ^ made})
    if faults:
        raise MappingError(
            f"The family {family.name} differs from the derived rules.",
            evidence=fold(faults),
            next_step=_BY_HAND,
        )


def source_text(family: Family) -> str:
    """Return the source of a family's module."""
    return f'''"""{family.name}: derived from the names, shapes and layers of a model and its files.

Check lengths in digits and conditions on numbers: they are those of one configuration.
"""

from paddleformers_fc.families.declarations import Family, Geometry, Numbers, Stack, Statement, TiedName

FAMILY = {_source(family, 0)}
'''


def _source(value: object, depth: int) -> str:
    """Return the Python source of a value. Fields of dataclasses that have their default are omitted."""
    if isinstance(value, Enum):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        given = {
            one.name: getattr(value, one.name) for one in fields(value) if getattr(value, one.name) != _default(one)
        }
        return _bracketed(
            f"{type(value).__name__}(", [f"{key}={_source(one, depth + 1)}" for key, one in given.items()], ")", depth
        )
    if isinstance(value, (tuple, list)):
        items = [_source(one, depth + 1) for one in value]
        opening, closing = "()" if isinstance(value, tuple) else "[]"
        return _bracketed(opening, items, f",{closing}" if len(items) == 1 else closing, depth)
    if isinstance(value, Mapping):
        entries = [f"{_source(key, depth + 1)}: {_source(one, depth + 1)}" for key, one in value.items()]
        return _bracketed("{", entries, "}", depth)
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _default(one: Field[Any]) -> object:
    return one.default_factory() if one.default_factory is not MISSING else one.default


def _bracketed(opening: str, items: Sequence[str], closing: str, depth: int) -> str:
    line = f"{opening}{', '.join(items)}{closing}"
    if len(line) < _WIDTH - 4 * depth and "\n" not in line:
        return line
    inner = "".join(f"{'    ' * (depth + 1)}{item},\n" for item in items)
    return f"{opening}\n{inner}{'    ' * depth}{closing.lstrip(',')}"


def _template(name: str) -> str:
    return split(name)[0]


def _placeholders(template: str) -> list[str]:
    """Return a name for every hole of a template, after the component before it."""
    names: list[str] = []
    components = template.split(".")
    for place, component in enumerate(components):
        if component == HOLE:
            before = _WORD.sub("_", components[place - 1]) if place else "number"
            name = {"layers": "layer", "experts": "expert"}.get(before, before)
            names.append(name if name not in names else f"{name}_{len(names)}")
    return names


def _spelled(template: str, names: Sequence[str]) -> str:
    return template.format(*(f"{{{name}}}" for name in names))


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
