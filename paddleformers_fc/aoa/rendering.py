"""Render a mapping as AOA text: few statements with placeholders where that is exact, whole names elsewhere.

The text is parsed again and compared, box by box; text with another mapping is never returned. Layers that are alike
are rendered and verified once (:mod:`.runs`). Linear in the names, and in the correspondences of one layer of each
kind, up to sorting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from paddleformers_fc.aoa.components import Component, Inexpressible, SourceView, connected, ordered, oriented
from paddleformers_fc.aoa.evaluate import parse
from paddleformers_fc.aoa.names import NameIndex
from paddleformers_fc.aoa.runs import Hints, reduce_layers
from paddleformers_fc.aoa.statement_text import StatementWriter, Text, compacted, name_fault
from paddleformers_fc.aoa.values import AoaTensor
from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping.boxes import Shape
from paddleformers_fc.mapping.correspondences import Correspondence, TensorMapping, TensorSpec, coalesced
from paddleformers_fc.mapping.folding import fold

_ASIDE = "_kept"
_SHOWN = 20
_REMOVED = TensorSpec((1,), "float32")


def render(mapping: TensorMapping, hints: Hints | None = None, *, reverse: bool = False) -> list[str]:
    """Return the statements of a mapping, from its sources to its targets.

    Equal names without a change have no statement: the language maps them implicitly.

    Args:
        mapping: a mapping that was proved.
        hints: numbers of shards and heads; without them no statement depends on the ranks.
        reverse: write the statements from the targets to the sources instead.
    Returns:
        statements that Paddle's own engine evaluates to this mapping.
    Raises:
        MappingError: with everything that the language does not express.
    """
    hints = hints or Hints()
    reduced = reduce_layers(mapping, hints)
    if reduced is not None:
        # If one layer cannot be rendered, the error lists all of them.
        with contextlib.suppress(MappingError):
            statements = _directed(reduced.mapping, hints, reverse)
            if reduced.holds_for_all(statements):
                return statements
    return _directed(mapping, hints, reverse)


def _directed(mapping: TensorMapping, hints: Hints, reverse: bool) -> list[str]:
    if reverse:
        return _rendered(mapping.reversed(), replace(hints, left=hints.right, right=hints.left))
    return _rendered(mapping, hints)


def _rendered(mapping: TensorMapping, hints: Hints) -> list[str]:
    """Render the statements of a mapping, from its sources to its targets, and verify them by parsing."""
    components, refused = _components(mapping)
    statements = [f"{name} -> _" for name in sorted(mapping.dropped)]
    statements += [f"_ -> {name}" for name in sorted(mapping.fresh)]
    refused += [fault for name in sorted(mapping.dropped | mapping.fresh) if (fault := name_fault(name)) is not None]
    statements += _statements(components, mapping, hints, refused)
    _raise_refused(refused)
    _verify(statements, mapping, hints)
    return statements


def normal(mapping: TensorMapping) -> set[Correspondence]:
    """Return the correspondences of a mapping in the largest boxes, for comparison."""
    return {item for items in mapping.by_target.values() for item in coalesced(items)}


def _components(mapping: TensorMapping) -> tuple[list[Component], list[str]]:
    found: list[Component] = []
    refused: list[str] = []
    for items in connected(mapping):
        try:
            found.append(oriented(items, mapping))
        except Inexpressible as reason:
            refused.append(str(reason))
    return found, refused


def _statements(components: list[Component], mapping: TensorMapping, hints: Hints, refused: list[str]) -> list[str]:
    """Render all components, in an order in which no name is overwritten before it is read."""
    order = ordered(components)
    taken = frozenset((*mapping.sources, *mapping.targets))
    index = NameIndex(mapping.sources)
    writer = StatementWriter(hints, taken)
    copies = [_copies(writer, components[place], taken, refused) for place in order.copied]
    statements = compacted(copies, index)
    for rank in (order.free, *order.ranks):
        statements += compacted([_component_texts(writer, components[place], refused) for place in rank], index)
    for place in order.copied:
        component = components[place]
        texts = _component_texts(StatementWriter(_aside_hints(hints, component), taken), _aside(component), refused)
        statements += [str(text) for text in texts]
    return statements


def _component_texts(writer: StatementWriter, component: Component, refused: list[str]) -> list[Text]:
    faults = [fault for name in (*component.sources, *component.targets) if (fault := name_fault(name)) is not None]
    if faults:
        refused += faults
        return []
    try:
        return writer.statements(component)
    except Inexpressible as reason:
        refused.append(str(reason))
        return []


def _copies(writer: StatementWriter, component: Component, taken: frozenset[str], refused: list[str]) -> list[Text]:
    """Write oriented copies of a component's sources under other names."""
    texts: list[Text] = []
    for name, orientation in component.views.items():
        if name + _ASIDE in taken:
            refused.append(f"{name}: is overwritten before it is read, and {name}{_ASIDE} is not free")
        try:
            view = writer.source_text(name, orientation, texts)
        except Inexpressible as reason:
            refused.append(str(reason))
            continue
        texts.append(Text((view,), (name + _ASIDE,)))
    return texts


def _aside(component: Component) -> Component:
    """Return the component with copies of its sources."""
    return Component(
        {name + _ASIDE: shape for name, shape in component.sources.items()},
        component.targets,
        {name + _ASIDE: SourceView(tuple(range(len(shape)))) for name, shape in component.sources.items()},
        tuple(replace(piece, source=piece.source + _ASIDE) for piece in component.pairs),
    )


def _aside_hints(hints: Hints, component: Component) -> Hints:
    cuts = {
        name + _ASIDE: tuple(hints.left[name][axis] for axis in view.axes)
        for name, view in component.views.items()
        if name in hints.left
    }
    per_rank = {name + _ASIDE: hints.per_rank[name] for name in component.sources if name in hints.per_rank}
    return replace(hints, left={**hints.left, **cuts}, per_rank={**hints.per_rank, **per_rank})


def _raise_refused(refused: Iterable[str]) -> None:
    evidence = fold(dict.fromkeys(refused))
    if evidence:
        raise MappingError(
            "The AOA language does not express this mapping.",
            evidence=evidence,
            next_step="Use the mapping without its text: it is proved, and mapping.json contains all of it.",
        )


def _verify(statements: list[str], mapping: TensorMapping, hints: Hints) -> None:
    """Refuse text that is evaluated to another mapping."""
    left = _tensors(mapping.sources, hints.left)
    for name in mapping.dropped:
        left.setdefault(name, AoaTensor(_REMOVED.shape, _REMOVED.dtype, (1,)))
    right = _tensors(mapping.targets, hints.right)
    evidence: tuple[str, ...] = ()
    try:
        back = parse(statements, left, right)
    except MappingError as error:
        evidence = error.evidence
    else:
        if normal(back) != normal(mapping) or (back.fresh, back.dropped) != (mapping.fresh, mapping.dropped):
            evidence = (*statements[:_SHOWN], "is evaluated to another mapping")
    if evidence:
        raise MappingError(
            "The AOA text of this mapping is evaluated to another mapping.",
            evidence=evidence,
            next_step="Report this fault of the package. Only the text is missing.",
        )


def _tensors(specs: Mapping[str, TensorSpec], cuts: Mapping[str, Shape]) -> dict[str, AoaTensor]:
    return {
        name: AoaTensor(spec.shape, spec.dtype, cuts.get(name, (1,) * len(spec.shape))) for name, spec in specs.items()
    }
