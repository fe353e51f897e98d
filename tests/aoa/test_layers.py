"""Text that is written for one layer of each kind is the text of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from paddleformers_fc.aoa import AoaTensor, Hints, normal, parse, render
from paddleformers_fc.aoa.runs import reduce_layers
from paddleformers_fc.families import FAMILIES, Family, bind, enumerate_tensors
from paddleformers_fc.formats.aoa_statements import with_ties
from paddleformers_fc.mapping import Correspondence, TensorMapping, TensorSpec, prove
from paddleformers_fc.mapping.boxes import Box, whole
from tests.families.spaces import model_of, nested_settings
from tests.harness.sampling import thorough

Part = tuple[list[Correspondence], dict[str, TensorSpec], dict[str, TensorSpec]]


def tensor(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, dtype)


def moved(source: str, target: str, spec: TensorSpec, turned: bool = False) -> Part:
    axes = tuple(range(len(spec.shape)))
    axes = axes[::-1] if turned else axes
    made = TensorSpec(tuple(spec.shape[axis] for axis in axes), spec.dtype)
    item = Correspondence(source, whole(spec.shape), target, whole(made.shape), axes)
    return [item], {source: spec}, {target: made}


def joined(sources: list[str], target: str, rows: int) -> Part:
    """Sources of ``rows`` by 3 one behind the other."""
    spec = tensor(rows, 3)
    items = [
        Correspondence(name, whole(spec.shape), target, Box((rows * at, 0), (rows * (at + 1), 3)), (0, 1))
        for at, name in enumerate(sources)
    ]
    return items, dict.fromkeys(sources, spec), {target: tensor(rows * len(sources), 3)}


def interleaved(sources: list[str], target: str) -> Part:
    """Two rows of each source, one of each in turn."""
    spec = tensor(2, 3)
    items = [
        Correspondence(name, Box((row, 0), (row + 1, 3)), target, Box((2 * row + at, 0), (2 * row + at + 1, 3)), (0, 1))
        for row in range(2)
        for at, name in enumerate(sources)
    ]
    return items, dict.fromkeys(sources, spec), {target: tensor(4, 3)}


def split(source: str, targets: list[str], rows: int) -> Part:
    items, sources, made = joined(targets, source, rows)
    return [_back(one) for one in items], made, sources


def _back(item: Correspondence) -> Correspondence:
    return Correspondence(item.target, item.target_box, item.source, item.source_box, item.axes)


KINDS: dict[str, Callable[[str], Part]] = {
    "same": lambda n: moved(f"m.layers.{n}.same", f"m.layers.{n}.same", tensor(2)),
    "renamed": lambda n: moved(f"m.layers.{n}.a", f"m.layers.{n}.b.w", tensor(2, 3)),
    "longer": lambda n: moved(f"m.layers.{n}.a", f"m.layers.{n}.b.w", tensor(4, 3)),
    "turned": lambda n: moved(f"m.layers.{n}.t", f"m.layers.{n}.u", tensor(2, 3), turned=True),
    "joined": lambda n: joined([f"m.layers.{n}.q", f"m.layers.{n}.k"], f"m.layers.{n}.qk", 2),
    "reversed": lambda n: joined([f"m.layers.{n}.k", f"m.layers.{n}.q"], f"m.layers.{n}.qk", 2),
    "interleaved": lambda n: interleaved([f"m.layers.{n}.q", f"m.layers.{n}.k"], f"m.layers.{n}.qk"),
    "square": lambda n: moved(f"m.layers.{n}.s3", f"m.layers.{n}.s4", tensor(3, 3)),
    "turned square": lambda n: moved(f"m.layers.{n}.s3", f"m.layers.{n}.s4", tensor(3, 3), turned=True),
    "split": lambda n: split(f"m.layers.{n}.vo", [f"m.layers.{n}.v", f"m.layers.{n}.o"], 2),
    "stack": lambda n: joined([f"m.layers.{n}.experts.{e}.up" for e in range(3)], f"m.layers.{n}.up", 2),
    "other space": lambda n: moved(f"m.layers.{n}.s", f"n.{n}.s", tensor(5)),
    "next": lambda n: moved(f"m.layers.{n}.x", f"m.layers.{int(n) + 1}.y", tensor(2)),
    "outside": lambda n: moved(f"m.layers.{n}.z", f"m.z{n}", tensor(2)),
    "last": lambda n: moved(f"m.block.{n}", f"m.piece.{n}", tensor(2)),
    "ring": lambda n: _both(
        moved(f"m.layers.{n}.r", f"m.layers.{n}.s1", tensor(2)), moved(f"m.layers.{n}.s1", f"m.layers.{n}.r", tensor(2))
    ),
    "zero": lambda n: moved(f"m.layers.0{n}.a.{n}.b", f"m.layers.0{n}.c.{n}.d", tensor(2)),
    "three experts": lambda n: _both(
        *[moved(f"m.layers.{n}.experts.{e}.g", f"m.layers.{n}.experts.{e}.h", tensor(2)) for e in range(3)]
    ),
    "two experts": lambda n: _both(
        *[moved(f"m.layers.{n}.experts.{e}.g", f"m.layers.{n}.experts.{e}.h", tensor(2)) for e in range(2)]
    ),
}


def _both(*parts: Part) -> Part:
    items: list[Correspondence] = []
    sources: dict[str, TensorSpec] = {}
    targets: dict[str, TensorSpec] = {}
    for found, read, made in parts:
        items += found
        sources.update(read)
        targets.update(made)
    return items, sources, targets


def mapping_of(layers: Sequence[list[str]], dropped: Sequence[int] = (), fresh: Sequence[int] = ()) -> TensorMapping:
    """A mapping whose layers hold these kinds of tensors."""
    parts = [moved("m.embed", "m.e.weight", tensor(7))]
    for number, kinds in enumerate(layers):
        names: set[str] = set()
        for kind in kinds:
            part = KINDS[kind](str(number))
            if not names & (part[1].keys() | part[2].keys()):
                parts.append(part)
                names |= part[1].keys() | part[2].keys()
    items, sources, targets = _both(*parts)
    gone = {f"m.layers.{number}.gone": tensor(1) for number in dropped}
    new = {f"m.layers.{number}.new": tensor(1) for number in fresh}
    return TensorMapping.of({**sources, **gone}, {**targets, **new}, items, frozenset(new), frozenset(gone))


def texts(mapping: TensorMapping, hints: Hints, reverse: bool) -> tuple[list[str], TensorMapping]:
    """The text, and what it means of the whole mapping."""
    statements = render(mapping, hints, reverse=reverse)
    left, right = (mapping.targets, mapping.sources) if reverse else (mapping.sources, mapping.targets)
    cuts = (hints.right, hints.left) if reverse else (hints.left, hints.right)
    sides = [
        {name: AoaTensor(one.shape, one.dtype, cut.get(name, (1,) * len(one.shape))) for name, one in specs.items()}
        for specs, cut in zip((left, right), cuts, strict=True)
    ]
    return statements, parse(statements, *sides)


def check(mapping: TensorMapping, hints: Hints) -> None:
    for reverse in (False, True):
        _, back = texts(mapping, hints, reverse)
        expected = mapping.reversed() if reverse else mapping
        assert normal(back) == normal(expected)
        assert (back.fresh, back.dropped) == (expected.fresh, expected.dropped)


NUMBERS = st.lists(st.integers(0, 5), max_size=2, unique=True)


@thorough(400)
@given(
    st.lists(st.lists(st.sampled_from(sorted(KINDS)), max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 2), min_size=1, max_size=7),
    NUMBERS,
    NUMBERS,
    st.dictionaries(st.sampled_from([f"m.layers.{n}.u" for n in range(6)]), st.sampled_from([(1, 2), (3, 1)])),
)
def test_the_text_of_layers_of_any_kinds_means_all_of_them(
    menu: list[list[str]], chosen: list[int], dropped: list[int], fresh: list[int], cuts: dict[str, tuple[int, int]]
) -> None:
    mapping = mapping_of([menu[one % len(menu)] for one in chosen], dropped, fresh)
    prove(mapping)
    check(mapping, Hints(right={name: cut for name, cut in cuts.items() if name in mapping.targets}))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_layers_that_are_alike_are_written_once_unless_they_are_not_closed(kind: str) -> None:
    mapping = mapping_of([["same", kind]] * 5)
    little = reduce_layers(mapping, Hints())
    if kind in ("next", "outside"):
        assert little is None
        return
    assert little is not None
    assert sum(".same" in name for name in little.mapping.targets) == 1
    assert sum("block" in name for name in little.mapping.sources) == (5 if kind == "last" else 0)


@pytest.mark.parametrize("differing", ["cut", "dtype", "missing", "order", "rounds"])
def test_a_layer_that_differs_in_anything_represents_only_itself(differing: str) -> None:
    layers = [["renamed", "joined"]] * 4
    if differing == "missing":
        layers[2] = ["renamed"]
    if differing == "order":
        layers[2] = ["renamed", "reversed"]
    if differing == "rounds":
        layers[2] = ["renamed", "interleaved"]
    mapping = mapping_of(layers)
    hints = Hints(right={"m.layers.2.qk": (2, 1)} if differing == "cut" else {})
    if differing == "dtype":
        half = tensor(2, 3, dtype="float16")
        mapping = replace(
            mapping,
            sources={**mapping.sources, "m.layers.2.a": half},
            targets={**mapping.targets, "m.layers.2.b.w": half},
        )
    little = reduce_layers(mapping, hints)
    assert little is not None
    assert {name for name in little.mapping.targets if ".b.w" in name} == {"m.layers.0.b.w", "m.layers.2.b.w"}
    check(mapping, hints)


def test_layers_with_tensors_that_are_dropped_or_fresh_are_written_by_name_and_the_others_once() -> None:
    mapping = mapping_of([["renamed"]] * 6, dropped=[2], fresh=[4])
    little = reduce_layers(mapping, Hints())
    assert little is not None
    assert {name for name in little.mapping.targets if ".b.w" in name} == {f"m.layers.{n}.b.w" for n in (0, 2, 4)}
    check(mapping, Hints())


def test_a_statement_that_names_a_layer_is_written_for_every_layer() -> None:
    mapping = mapping_of([["ring"]] * 3)
    statements, _ = texts(mapping, Hints(), False)
    assert {number for number in "012" if any(f"m.layers.{number}." in one for one in statements)} == {"0", "1", "2"}
    check(mapping, Hints())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_text_of_a_family_with_more_layers_is_that_of_all_its_layers(family: Family) -> None:
    layers = {**family.defaults, **family.tiny}.get("num_hidden_layers", 2) + 4
    # Empty layers in front give the two sides different numbers, and no layer is closed.
    kinds = family.tiny.get("text_config", {}).get("layer_types")
    listed = {"layer_types": kinds * (layers // len(kinds))} if kinds else {}
    changes = {"num_hidden_layers": layers, "num_empty_layers_add_in_head": 0, **listed}
    described = model_of(nested_settings(family, **changes))
    tensors = [one.under(tp=2) for one in enumerate_tensors(family, described)]
    rules = replace(bind(family, described, tensors), cuts={one.name: one.cuts for one in tensors})
    mapping = with_ties(rules)
    little = reduce_layers(mapping, Hints(right=rules.cuts))
    assert little is not None
    assert len(little.mapping.targets) < len(mapping.targets)
    check(mapping, Hints(right=rules.cuts))
