"""The text of many layers with placeholders means each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, strategies as st
from msgspec import structs

from paddleformers_fc.aoa import AoaTensor, Tensors, parse, render, uncut, with_ties
from paddleformers_fc.mapping import Rule, RuleSet, TensorSpec, prove
from tests.aoa.spaces import normal
from tests.harness.sampling import thorough


def moved(source: str, target: str, rows: int = 2, turned: bool = False) -> Rule:
    return Rule((source,), (target,), (3 if turned else rows,), int(turned), (1, 0) if turned else (0, 1))


def joined(sources: list[str], target: str, groups: int = 1) -> Rule:
    return Rule(tuple(sources), (target,), (2,) * len(sources), 0, (0, 1), target_blocks=groups)


def experts(layer: str, count: int) -> list[Rule]:
    return [moved(f"{layer}.experts.{expert}.g", f"{layer}.experts.{expert}.h") for expert in range(count)]


KINDS: dict[str, Callable[[int], list[Rule]]] = {
    "same": lambda n: [moved(f"m.layers.{n}.same", f"m.layers.{n}.same")],
    "renamed": lambda n: [moved(f"m.layers.{n}.a", f"m.layers.{n}.b.w")],
    "longer": lambda n: [moved(f"m.layers.{n}.a", f"m.layers.{n}.b.w", rows=4)],
    "turned": lambda n: [moved(f"m.layers.{n}.t", f"m.layers.{n}.u", turned=True)],
    "joined": lambda n: [joined([f"m.layers.{n}.q", f"m.layers.{n}.k"], f"m.layers.{n}.qk")],
    "other order": lambda n: [joined([f"m.layers.{n}.k", f"m.layers.{n}.q"], f"m.layers.{n}.qk")],
    "interleaved": lambda n: [joined([f"m.layers.{n}.q", f"m.layers.{n}.k"], f"m.layers.{n}.qk", groups=2)],
    "split": lambda n: [Rule((f"m.layers.{n}.vo",), (f"m.layers.{n}.v", f"m.layers.{n}.o"), (2, 2), 0, (0, 1))],
    "stack": lambda n: [joined([f"m.layers.{n}.experts.{e}.up" for e in range(3)], f"m.layers.{n}.up")],
    "other space": lambda n: [moved(f"m.layers.{n}.s", f"n.{n}.s")],
    "next": lambda n: [moved(f"m.layers.{n}.x", f"m.layers.{n + 1}.y")],
    "up by one": lambda n: [moved(f"m.layers.{n}.z", f"m.layers.{n + 1}.z")],
    "outside": lambda n: [moved(f"m.layers.{n}.o", f"m.o{n}")],
    "last": lambda n: [moved(f"m.block.{n}", f"m.piece.{n}")],
    "zero": lambda n: [moved(f"m.layers.0{n}.a.{n}.b", f"m.layers.0{n}.c.{n}.d")],
    "three experts": lambda n: experts(f"m.layers.{n}", 3),
    "two experts": lambda n: experts(f"m.layers.{n}", 2),
}


def rules_of(layers: Sequence[list[str]], dropped: Sequence[int], fresh: Sequence[int]) -> RuleSet:
    """Rules whose layers hold these kinds of tensors, the first of several with a name in common."""
    rules = [moved("m.embed", "m.e.weight")]
    for number, kinds in enumerate(layers):
        names: set[str] = set()
        for kind in kinds:
            own = KINDS[kind](number)
            used = {name for rule in own for name in (*rule.sources, *rule.targets)}
            if not names & used:
                rules += own
                names |= used
    targets = {
        name: TensorSpec((sum(rule.parts) // len(rule.targets) if not rule.axis else 2, 3), "float32")
        for rule in rules
        for name in rule.targets
    }
    new = {f"m.layers.{number}.new": TensorSpec((1,), "float32") for number in fresh}
    return RuleSet({**targets, **new}, tuple(rules), (), tuple(new), tuple(f"m.layers.{n}.gone" for n in dropped))


def check(rules: RuleSet) -> None:
    mapping = with_ties(rules)
    prove(mapping)
    left: Tensors = {name: uncut(one.shape, one.dtype) for name, one in mapping.sources.items()}
    right: Tensors = {
        name: AoaTensor(one.shape, one.dtype, rules.cuts.get(name, (1,) * len(one.shape)))
        for name, one in mapping.targets.items()
    }
    forward = parse(render(rules), left, right)
    assert (normal(forward), forward.fresh, forward.dropped) == (normal(mapping), mapping.fresh, mapping.dropped)
    back = parse(render(rules, reverse=True), right, left)
    assert (normal(back), back.fresh, back.dropped) == (normal(mapping.reversed()), mapping.dropped, mapping.fresh)


NUMBERS = st.lists(st.integers(0, 5), max_size=2, unique=True)


@thorough(400)
@given(
    st.lists(st.lists(st.sampled_from(sorted(KINDS)), max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 2), min_size=1, max_size=7),
    NUMBERS,
    NUMBERS,
    st.dictionaries(st.sampled_from([f"m.layers.{n}.u" for n in range(6)]), st.sampled_from([(1, 3), (2, 1)])),
)
def test_the_text_of_layers_of_any_kinds_means_all_of_them(
    menu: list[list[str]], chosen: list[int], dropped: list[int], fresh: list[int], cuts: dict[str, tuple[int, int]]
) -> None:
    rules = rules_of([menu[one % len(menu)] for one in chosen], dropped, fresh)
    check(structs.replace(rules, cuts={name: cut for name, cut in cuts.items() if name in rules.targets}))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_layers_that_are_alike_are_written_once_unless_they_exchange_names(kind: str) -> None:
    few, many = (len(render(rules_of([["same", kind]] * count, [], []))) for count in (4, 9))
    spelled = kind in ("next", "up by one", "outside", "zero")
    assert (few < many) == spelled, (few, many)
