"""Random rules, shapes and boxes for property tests, and mappings that are changed by hand."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from paddleformers_fc.mapping import Correspondence, Rule, RuleSet, TensorMapping, TensorSources, TensorSpec
from paddleformers_fc.mapping.rules import Parts
from paddleformers_fc.mapping.templates import BoxLink, Template


@st.composite
def rules(draw: st.DrawFn, index: int = 0) -> tuple[Rule, tuple[tuple[str, TensorSpec], ...]]:
    """A rule of any kind, with the specs of its targets."""
    rank = draw(st.integers(1, 3))
    axis = draw(st.integers(0, rank - 1))
    axes = tuple(draw(st.permutations(range(rank))))
    source_blocks, target_blocks = draw(st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 1), (2, 4), (3, 2)]))
    unit = source_blocks * target_blocks
    parts = tuple(draw(st.lists(st.integers(1, 3).map(lambda n: n * unit), min_size=1, max_size=4)))
    sources = _names(draw, f"s{index}", len(parts), source_blocks)
    entries: Parts = parts
    if len(parts) > 2 and len(sources) == 1 and draw(st.booleans()):
        entries = (parts[:2], *parts[2:])
        sources = tuple(f"s{index}.{part}" for part in range(len(entries)))
    targets = _names(draw, f"t{index}", len(parts), target_blocks)
    targets = targets if entries == parts else (f"t{index}.whole",)
    other = [draw(st.integers(1, 4)) for _ in range(rank)]
    lengths = parts if len(targets) == len(parts) else (sum(parts),)
    specs = []
    for name, length in zip(targets, lengths, strict=True):
        shape = [*other]
        shape[axis] = length
        specs.append((name, TensorSpec(tuple(shape), "float32")))
    return Rule(sources, targets, entries, axis, axes, source_blocks, target_blocks), tuple(specs)


def _names(draw: st.DrawFn, stem: str, parts: int, blocks: int) -> tuple[str, ...]:
    split = blocks == 1 and draw(st.booleans())
    return tuple(f"{stem}.{part}" for part in range(parts)) if split else (f"{stem}.whole",)


@st.composite
def rule_sets(draw: st.DrawFn) -> RuleSet:
    """Several independent rules."""
    made = [draw(rules(index)) for index in range(draw(st.integers(1, 3)))]
    return RuleSet({name: spec for _, specs in made for name, spec in specs}, tuple(rule for rule, _ in made))


def with_items(mapping: TensorMapping, *items: Correspondence) -> TensorMapping:
    """The mapping of the same spaces with these correspondences instead."""
    return TensorMapping(mapping.sources, mapping.targets, made_of(items), mapping.fresh, mapping.dropped)


def made_of(items: Iterable[Correspondence]) -> dict[str, TensorSources]:
    """The sources of every target of these boxes, which are in any order."""
    groups: dict[str, tuple[dict[str, int], list[BoxLink]]] = {}
    for item in items:
        places, links = groups.setdefault(item.target, ({}, []))
        place = places.setdefault(item.source, len(places))
        links.append(BoxLink(place, item.source_box, item.target_box, item.axes, item.cast))
    known: dict[tuple[BoxLink, ...], Template] = {}
    made: dict[str, TensorSources] = {}
    for target, (places, links) in groups.items():
        form = tuple(links)
        made[target] = TensorSources(known.setdefault(form, Template(form)), tuple(places))
    return made
