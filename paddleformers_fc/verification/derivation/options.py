"""The layouts that the shapes of two sides allow. Each is an option; only conventions exclude some.

The conventions, which neither shapes nor a proof confirm:

- A linear layer's weight is [in, out] in Paddle and [out, in] in canonical files. It decides square weights of linear
  layers, as long as no weight of a linear layer in the model shows by its shape that it is not turned.
- The kernel of a convolution has one order of axes on both sides.
- Parts are in the order of their names: query, key, value; gate, up.
- A feed-forward that is fused of gate and up holds, on every tensor-parallel rank, its gate before its up.

Cost is a constant per tensor; a stack of experts makes one rule per expert.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paddleformers_fc.mapping import Rule, Shape
from paddleformers_fc.mapping.correspondences import NEW_AXIS
from paddleformers_fc.mapping.rules import Slab
from paddleformers_fc.verification.derivation.layer_kinds import LayeredTensor, LayerKind
from paddleformers_fc.verification.derivation.name_matching import FFN, QKV, Fusion

Axes = tuple[int, ...]

SAME, TURNED, PER_RANK, PER_HEAD = "as stored", "turned", "per tensor-parallel rank", "per kv head"
CUT_AS_STORED = "as the file has it, and cut"
STRAIGHT = "one part behind the other"


@dataclass(frozen=True, slots=True)
class Option:
    """One layout that shapes allow.

    Args:
        rules: the rules that it is.
        layout: its name in questions; options of equal layers with equal names are the same.
        text: its AOA statement, or empty if one statement does not express it.
    """

    rules: tuple[Rule, ...]
    layout: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Conventions:
    """Conventions of a whole model.

    Args:
        heads: the numbers of query heads and of kv heads, if the configuration gives them.
        turned: whether weights of linear layers are transposed, as far as shapes show.
    """

    heads: tuple[int, int] | None
    turned: bool = True


@dataclass(frozen=True, slots=True)
class OptionSource:
    """A canonical tensor with a matching name."""

    name: str
    shape: Shape


def moved(target: LayeredTensor, source: OptionSource, fused: str | None, conventions: Conventions) -> list[Option]:
    """Return the layouts in which a target is one source, with or without permuted axes.

    Args:
        target: the model's tensor.
        source: the canonical one.
        fused: the kind of fused layer of the target's name, if any.
        conventions: of the model.
    """
    tensor = target.tensor
    found = list(_permutations(source.shape, tensor.shape))
    if len(found) > 1:
        found = _conventional(found, target.kind, conventions)
    cut = [axis for axis, count in enumerate(tensor.cuts) if count > 1]
    if fused is None or len(cut) != 1:
        return [_moved_option(tensor.name, tensor.shape, source.name, axes) for axes in found]
    return [option for axes in found for option in _reinterleaved(target, source, axes, cut[0], fused, conventions)]


def _permutations(source: Shape, target: Shape) -> Iterator[Axes]:
    """Yield the orders of a source's axes that give the target's shape; of those that move no element, one."""
    if len(source) != len(target) or sorted(source) != sorted(target):
        return
    seen: set[Axes] = set()
    for axes in itertools.permutations(range(len(source))):
        if all(source[axis] == length for axis, length in zip(axes, target, strict=True)):
            long = tuple(axis for axis in axes if source[axis] > 1)
            if long not in seen:
                seen.add(long)
                yield axes


def _conventional(found: list[Axes], kind: LayerKind, conventions: Conventions) -> list[Axes]:
    """Return the order of the layer's kind if several fit; all if the kind decides none."""
    straight = tuple(range(len(found[0])))
    if kind in (LayerKind.EMBEDDING, LayerKind.NORM, LayerKind.CONVOLUTION) and straight in found:
        return [straight]
    if kind is LayerKind.LINEAR and conventions.turned and straight[::-1] in found and len(straight) == 2:
        return [straight[::-1]]
    return found


def _moved_option(name: str, shape: Shape, source: str, axes: Axes) -> Option:
    last = len(shape) - 1
    rule = Rule((source,), (name,), (shape[-1] if shape else 1,), max(last, 0), axes)
    straight = tuple(range(len(axes)))
    if axes == straight:
        return Option((rule,), SAME, f"{source} -> {name}")
    if axes == straight[::-1]:
        return Option((rule,), TURNED, f"{source}^T -> {name}")
    return Option((rule,), f"axes {list(axes)}", f'{source} -> {name}, permute="{list(axes)}"')


def _reinterleaved(
    target: LayeredTensor, source: OptionSource, axes: Axes, axis: int, fused: str, conventions: Conventions
) -> Iterator[Option]:
    """Yield layouts of a tensor that is fused in both spaces and cut along the axis of its parts.

    Interleaved elements are cut as stored, consecutive parts per rank. Only the source code of the model shows the
    choice.
    """
    tensor = target.tensor
    whole = _moved_option(tensor.name, tensor.shape, source.name, axes)
    yield Option(whole.rules, CUT_AS_STORED, whole.text)
    length, cut = tensor.shape[axis], tensor.cuts[axis]
    seen = _view(source.name, axes)
    if fused == FFN and length % (2 * cut) == 0:
        rule = Rule((source.name,), (tensor.name,), (length // 2,) * 2, axis, axes, target_blocks=cut)
        yield Option((rule,), PER_RANK, f"{seen} -> {tensor.name}, fused_ffn{_along(axis)}")
    if fused == QKV and conventions.heads is not None:
        heads, groups = conventions.heads
        head = length // (heads + 2 * groups)
        if length % (heads + 2 * groups) == 0 and groups % cut == 0:
            parts = (heads * head, groups * head, groups * head)
            rule = Rule((source.name,), (tensor.name,), parts, axis, axes, target_blocks=cut)
            word = f"fused_qkv_old, num_heads={heads}, num_key_value_groups={groups}"
            yield Option((rule,), PER_RANK, f"{seen} -> {tensor.name}, {word}{_along(axis)}")


def joined(
    target: LayeredTensor, sources: Sequence[OptionSource], fusion: Fusion, conventions: Conventions
) -> list[Option]:
    """Return the layouts in which a target is its parts, joined along their output axis."""
    return [
        option
        for part_layout in _part_layouts(
            target.tensor.shape, [source.shape for source in sources], target.kind, conventions
        )
        for option in _joined_options(target, [source.name for source in sources], part_layout, fusion, conventions)
    ]


@dataclass(frozen=True, slots=True)
class _PartLayout:
    """The layout of parts along an axis of a tensor: their lengths, the axis, and the axes of each."""

    parts: tuple[int, ...]
    axis: int
    axes: Axes


def _part_layouts(whole: Shape, parts: Sequence[Shape], kind: LayerKind, conventions: Conventions) -> list[_PartLayout]:
    """Return the layouts of [out, in] parts in a tensor of this shape: transposed side by side, or stacked."""
    rank = len(whole)
    if rank not in (1, 2) or any(len(part) != rank or part[1:] != parts[0][1:] for part in parts):
        return []
    lengths = tuple(part[0] for part in parts)
    as_stored = (sum(lengths), *parts[0][1:])
    straight = tuple(range(rank))
    found = [_PartLayout(lengths, 0, straight)] if whole == as_stored else []
    if rank == 2 and whole == as_stored[::-1]:
        found.append(_PartLayout(lengths, 1, straight[::-1]))
    if len(found) > 1 and kind is LayerKind.LINEAR and conventions.turned:
        return found[1:]
    return found


def _joined_options(
    target: LayeredTensor, names: list[str], part_layout: _PartLayout, fusion: Fusion, conventions: Conventions
) -> Iterator[Option]:
    cut = target.tensor.cuts[part_layout.axis]
    left = ", ".join(_view(name, part_layout.axes) for name in names)
    for layout, blocks, word in _layouts(part_layout.parts, cut, fusion.kind, conventions):
        rule = Rule(
            tuple(names),
            (target.tensor.name,),
            part_layout.parts,
            part_layout.axis,
            part_layout.axes,
            target_blocks=blocks,
        )
        yield Option((rule,), layout, f"{left} -> {target.tensor.name}, {word}{_along(part_layout.axis)}")


def _layouts(parts: tuple[int, ...], cut: int, kind: str, conventions: Conventions) -> Iterator[tuple[str, int, str]]:
    """Name, rounds and AOA word of every layout that parts can have in one tensor."""
    if kind == QKV:
        yield from _qkv_layouts(parts, cut, conventions)
    elif all(part % cut == 0 for part in parts):
        yield PER_RANK, cut, "fused_ffn"


def _qkv_layouts(parts: tuple[int, ...], cut: int, conventions: Conventions) -> Iterator[tuple[str, int, str]]:
    if conventions.heads is None:
        return
    heads, groups = conventions.heads
    numbers = f"num_heads={heads}, num_key_value_groups={groups}"
    if heads % groups or parts[0] % heads or any(part % groups for part in parts[1:]):
        return
    if groups % cut == 0:
        yield PER_HEAD, groups, f"fused_qkv, {numbers}"
        if groups != cut:
            # One group per rank: AOA cuts heads of several sizes, such as queries with gates, in no other way.
            uneven = f"fused_qkv, num_heads={heads}, num_key_value_groups={cut}"
            yield PER_RANK, cut, f"fused_qkv_old, {numbers}" if are_heads_of_one_size(parts, heads, groups) else uneven


def carved(
    targets: Sequence[LayeredTensor], source: OptionSource, fusion: Fusion, conventions: Conventions
) -> list[Option]:
    """Return the layouts in which targets are the parts of one source, which canonical files hold fused."""
    shapes = [target.tensor.shape for target in targets]
    rank = len(source.shape)
    if rank not in (1, 2) or any(len(shape) != rank for shape in shapes):
        return []
    options: list[Option] = []
    for turned in (True, False) if rank == 2 else (False,):
        axis = 1 if turned else 0
        parts = tuple(shape[axis] for shape in shapes)
        others = {shape[1 - axis] for shape in shapes} if rank == 2 else set()
        axes: Axes = (1, 0) if turned else tuple(range(rank))
        if source.shape != (sum(parts), *others):
            continue
        names = tuple(target.tensor.name for target in targets)
        statement = f"{_view(source.name, axes)} -> {', '.join(names)}"
        for layout, blocks, word in _canonical_layouts(parts, axis, fusion.kind, conventions):
            rule = Rule((source.name,), names, parts, axis, axes, source_blocks=blocks)
            options.append(Option((rule,), layout, f"{statement}, {word}" if word else ""))
        if options and conventions.turned and all(target.kind is LayerKind.LINEAR for target in targets):
            return options
    return options


def _canonical_layouts(
    parts: tuple[int, ...], axis: int, kind: str, conventions: Conventions
) -> Iterator[tuple[str, int, str]]:
    """Name, rounds and AOA attributes of every layout in which canonical files can hold parts.

    AOA splits a tensor into equal lengths or heads of one size; for other parts there are no attributes.
    """
    if kind == FFN:
        yield STRAIGHT, 1, f"axis={axis}" if len(set(parts)) == 1 else ""
    elif conventions.heads is not None:
        heads, groups = conventions.heads
        numbers = f"num_heads={heads}, num_key_value_groups={groups}{_along(axis)}"
        even = are_heads_of_one_size(parts, heads, groups)
        yield STRAIGHT, 1, f"fused_qkv_old, {numbers}" if even else ""
        if groups > 1 and parts[0] % heads == 0 and all(part % groups == 0 for part in parts):
            yield PER_HEAD, groups, f"fused_qkv, {numbers}" if even else ""


def stack_options(
    target: LayeredTensor, experts: Sequence[Sequence[OptionSource]], conventions: Conventions
) -> list[Option]:
    """Return the layouts in which a target holds the experts of a layer.

    Args:
        target: the model's tensor.
        experts: for every part of an expert the tensors of all experts, in order.
        conventions: of the model; the kind of a stack's layer does not show whether it is transposed.
    """
    tensor, count = target.tensor, len(experts[0])
    shapes = [part[0].shape for part in experts]
    if any(len(part) != count or len({one.shape for one in part}) > 1 or len(part[0].shape) != 2 for part in experts):
        return []
    options: list[Option] = []
    for axis, new in ((0, True), (0, False), (1, False)):
        one = _of_one(tensor.shape, axis, new, count)
        if one is None:
            continue
        for part_layout in _part_layouts(one, shapes, LayerKind.OTHER, conventions):
            layout = f"experts on axis {axis}, {TURNED if part_layout.axis else SAME}"
            options.append(Option(_stack_rules(tensor.name, experts, part_layout, axis, new, one), layout))
    return options


def _of_one(shape: Shape, axis: int, new: bool, count: int) -> Shape | None:
    """Return the shape of one expert of a stack, or None where the stack does not hold as many."""
    if len(shape) != 2 + new or shape[axis] % count or (new and shape[axis] != count):
        return None
    middle = () if new else (shape[axis] // count,)
    return (*shape[:axis], *middle, *shape[axis + 1 :])


def _stack_rules(
    name: str, experts: Sequence[Sequence[OptionSource]], part_layout: _PartLayout, axis: int, new: bool, one: Shape
) -> tuple[Rule, ...]:
    names = [tuple(part[expert].name for part in experts) for expert in range(len(experts[0]))]
    along, axes = part_layout.axis, part_layout.axes
    if new:
        along, axes = along + (along >= axis), (*axes[:axis], NEW_AXIS, *axes[axis:])
    if along == axis:
        everything = tuple(source for row in names for source in row)
        return (Rule(everything, (name,), part_layout.parts * len(names), along, axes),)
    share = 1 if new else one[axis]
    return tuple(
        Rule(row, (name,), part_layout.parts, along, axes, slab=Slab(axis, expert * share, (expert + 1) * share))
        for expert, row in enumerate(names)
    )


def _along(axis: int) -> str:
    """Return the attribute that a fused layout needs where it does not lie along axis 1."""
    return "" if axis == 1 else f", axis={axis}"


def _view(name: str, axes: Axes) -> str:
    return f"{name}^T" if len(axes) > 1 and axes == tuple(range(len(axes)))[::-1] else name


def are_heads_of_one_size(parts: Shape, heads: int, groups: int) -> bool:
    """Return whether query, key and value consist of this many heads, all of one size."""
    return parts == tuple(parts[1] // groups * count for count in (heads, groups, groups))


def head_counts(config: Mapping[str, object]) -> tuple[int, int] | None:
    """Return the numbers of query heads and kv heads of a configuration, where it gives them and they group.

    A nested configuration of the text takes precedence. If queries have gates, the result is None: a model may keep
    them beside each head or behind all queries of a group, and the numbers do not determine which.
    """
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config
    if config.get("attn_output_gate"):
        return None
    heads = config.get("num_attention_heads")
    groups = config.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(groups, int) or heads < 1 or groups < 1 or heads % groups:
        return None
    return heads, groups
