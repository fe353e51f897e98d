"""Random AOA programs that mean something: statement after statement on whatever tensors there are by then."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from paddleformers_fc.aoa import AoaTensor
from paddleformers_fc.mapping import Shape

LENGTHS = st.sampled_from([2, 3, 4, 8, 16])
CUTS = st.sampled_from([1, 2, 4])


@dataclass(frozen=True)
class Program:
    """Statements and the tensors of both sides."""

    statements: tuple[str, ...]
    left: dict[str, AoaTensor]
    right: dict[str, AoaTensor]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A few statements; what they leave behind is the right side, cut at random."""
    left = {f"s{index}": draw(_tensors()) for index in range(draw(st.integers(1, 3)))}
    held: dict[str, Shape] = {name: tensor.shape for name, tensor in left.items()}
    statements: list[str] = []
    for step in range(draw(st.integers(0, 5))):
        made = draw(_statement(held, step))
        if made is None:
            continue
        texts, read, written = made
        statements += texts
        held = {name: shape for name, shape in held.items() if name not in read} | written
    right = {name: AoaTensor(shape, "float32", draw(_cuts(shape))) for name, shape in held.items()}
    return Program(tuple(statements), left, right)


Made = tuple[list[str], list[str], dict[str, Shape]]


@st.composite
def _statement(draw: st.DrawFn, held: dict[str, Shape], step: int) -> Made | None:
    kind = draw(st.sampled_from([_move, _move, _split, _array, _join, _fused_ffn, _fused_qkv, _fused_again]))
    return draw(kind(held, step))


@st.composite
def _read(draw: st.DrawFn, held: dict[str, Shape]) -> tuple[str, str, Shape]:
    """A name that is held, how it is read, and the shape that is seen."""
    name = draw(st.sampled_from(sorted(held)))
    if draw(st.booleans()):
        return name, name, held[name]
    return name, name + "^T", held[name][::-1]


@st.composite
def _move(draw: st.DrawFn, held: dict[str, Shape], step: int) -> Made:
    name, view, shape = draw(_read(held))
    target = draw(st.sampled_from([f"n{step}", name]))
    if draw(st.booleans()):
        return [f"{view} -> {target}"], [name], {target: shape}
    axes = draw(st.permutations(range(len(shape))))
    permuted = tuple(shape[axis] for axis in axes)
    return [f'{view} -> {target}, permute="{list(axes)}"'], [name], {target: permuted}


@st.composite
def _split(draw: st.DrawFn, held: dict[str, Shape], step: int) -> Made | None:
    name, view, shape = draw(_read(held))
    axis, count = draw(st.integers(0, len(shape) - 1)), draw(st.integers(2, 4))
    if shape[axis] % count:
        return None
    part = _with(shape, axis, shape[axis] // count)
    parts = {f"n{step}p{index}": part for index in range(count)}
    return [f"{view} -> {', '.join(parts)}, axis={axis}"], [name], parts


@st.composite
def _array(draw: st.DrawFn, held: dict[str, Shape], step: int) -> Made | None:
    name, view, shape = draw(_read(held))
    axis = draw(st.integers(0, len(shape) - 1))
    count = shape[axis]
    parts = {f"{name}_{index}": _with(shape, axis, 1) for index in range(count)}
    if count == 1 or not held.keys().isdisjoint(parts):
        return None
    cut = draw(st.integers(1, count - 1))
    ends = {f"n{step}b": _with(shape, axis, cut), f"n{step}c": _with(shape, axis, count - cut)}
    lines = [f"{view} -> {name}[0:{count}], axis={axis}"]
    lines += [f"{name}[0:{cut}] -> n{step}b, axis={axis}", f"{name}[{cut}:{count}] -> n{step}c, axis={axis}"]
    return lines, [name], ends


@st.composite
def _join(draw: st.DrawFn, held: dict[str, Shape], step: int) -> Made | None:
    first, view, shape = draw(_read(held))
    axis = draw(st.integers(0, len(shape) - 1))
    fellows = [
        name
        for name, other in held.items()
        if name != first and len(other) == len(shape) and _with(other, axis, 0) == _with(shape, axis, 0)
    ]
    if not fellows:
        return None
    second = draw(st.sampled_from(fellows))
    joined = _with(shape, axis, shape[axis] + held[second][axis])
    return [f"{view}, {second} -> n{step}, axis={axis}"], [first, second], {f"n{step}": joined}


@st.composite
def _fused_ffn(draw: st.DrawFn, held: dict[str, Shape], step: int) -> Made | None:
    name, _, shape = draw(_read(held))
    shape = held[name]
    axis = draw(st.integers(0, len(shape) - 1))
    if shape[axis] % 2:
        return None
    half = _with(shape, axis, shape[axis] // 2)
    parts = {f"n{step}g": half, f"n{step}u": half}
    text = f"{name} -> {', '.join(parts)}, fused_ffn, axis={axis}"
    if draw(st.booleans()):
        return [text], [name], parts
    turned = half[::-1]
    joined = _with(turned, 0, 2 * turned[0])
    again = f"n{step}g^T, n{step}u^T -> n{step}, axis=0, fused_ffn"
    return [text, again], [name], {f"n{step}": joined}


@st.composite
def _fused_qkv(draw: st.DrawFn, held: dict[str, Shape], step: int) -> Made | None:
    name, view, shape = draw(_read(held))
    axis = draw(st.integers(0, len(shape) - 1))
    heads, groups = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]))
    if shape[axis] % (heads + 2 * groups):
        return None
    head = shape[axis] // (heads + 2 * groups)
    parts = {
        f"n{step}{part}": _with(shape, axis, head * count)
        for part, count in zip("qkv", (heads, groups, groups), strict=True)
    }
    numbers = f"num_heads={heads}, num_key_value_groups={groups}"
    text = f"{view} -> {', '.join(parts)}, fused_qkv, {numbers}, axis={axis}"
    if draw(st.booleans()):
        return [text], [name], parts
    kind = draw(st.sampled_from(["fused_qkv", "fused_qkv_old"]))
    again = f"{', '.join(parts)} -> n{step}, {kind}, {numbers}, axis={axis}"
    return [text, again], [name], {f"n{step}": shape}


@st.composite
def _fused_again(draw: st.DrawFn, held: dict[str, Shape], step: int) -> Made:
    name = draw(st.sampled_from(sorted(held)))
    axis = draw(st.integers(0, len(held[name]) - 1))
    kind = draw(st.sampled_from(["fused_ffn", "fused_qkv_old, num_heads=2, num_key_value_groups=1"]))
    return [f"{name} -> n{step}, {kind}, axis={axis}"], [name], {f"n{step}": held[name]}


@st.composite
def _tensors(draw: st.DrawFn) -> AoaTensor:
    shape = tuple(draw(st.lists(LENGTHS, min_size=1, max_size=3)))
    return AoaTensor(shape, "float32", draw(_cuts(shape)))


@st.composite
def _cuts(draw: st.DrawFn, shape: Shape) -> Shape:
    """One axis at most is cut, as tensor parallelism does."""
    axis, count = draw(st.integers(0, len(shape) - 1)), draw(CUTS)
    return tuple(count if index == axis and length % count == 0 else 1 for index, length in enumerate(shape))


def _with(shape: Shape, axis: int, length: int) -> Shape:
    return (*shape[:axis], length, *shape[axis + 1 :])
