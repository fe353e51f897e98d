"""The operation of a statement, from its attributes and the number of names on each side.

This module checks the form only. Whether an operation fits its tensors is checked when they are known. Operations have
no reverse: a mapping does (:meth:`~paddleformers_fc.mapping.TensorMapping.reversed`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paddleformers_fc.aoa.faults import Fault
from paddleformers_fc.aoa.syntax import FFN, FLAGS, NOTHING, QKV, QKV_PER_RANK, AoaStatement, Attribute
from paddleformers_fc.mapping.boxes import Shape

DTYPES = ("float16", "float32", "bfloat16")
_NUMBERS = re.compile(r"\[\s*(\d{1,9}\s*(?:,\s*\d{1,9}\s*)*)?\]", re.ASCII)
_DEFAULT_FUSED_AXIS = 1


@dataclass(frozen=True, slots=True)
class OneSided:
    """``a -> _``: no target reads the source. ``_ -> b``: the target keeps its initial values."""


@dataclass(frozen=True, slots=True)
class Move:
    """One name to one name.

    Args:
        permute: for every axis of the result the axis that it reads; empty for all axes reversed; None for no change.
        reshape: the shape with an axis of blocks in front, [blocks, rows, ...], of which the other form is
            [blocks * rows, ...]; empty for no change.
        read_as: the declared dtype of the source, or None.
        cast: the dtype that values are converted to, or None.
    """

    permute: Shape | None = None
    reshape: Shape = ()
    read_as: str | None = None
    cast: str | None = None


@dataclass(frozen=True, slots=True)
class Join:
    """Several names to one, or one to several equal lengths, in order along an axis."""

    axis: int


@dataclass(frozen=True, slots=True)
class Fused:
    """Parts of a fused layer: [gate | up] or [Q | K | V] per tensor-parallel rank, or [q..q k v] per kv head.

    Args:
        kind: the layout.
        axis: the axis of the parts.
        counts: the numbers of query, key and value heads; 1 and 1 for gate and up.
    """

    kind: str
    axis: int
    counts: Shape = (1, 1)


Operation = OneSided | Move | Join | Fused


def operation_of(statement: AoaStatement, left: int, right: int) -> Operation:
    """Return the operation of a statement.

    Args:
        statement: the parsed statement.
        left: the number of expanded names on its left side.
        right: the number of expanded names on its right side.
    Raises:
        Fault: the attributes and the numbers of names fit no operation.
    """
    if any(item.pattern == NOTHING for item in (*statement.left, *statement.right)):
        return _one_sided(statement)
    flags = [statement.attributes[flag] for flag in FLAGS if flag in statement.attributes]
    if len(flags) > 1:
        raise Fault("A statement has one fused layout.", "a second statement", flags[1].span)
    if flags:
        return _fused(statement, flags[0], (left, right))
    if left == right == 1:
        return _move(statement)
    if left > 1 and right > 1:
        raise Fault("Several names on both sides: the relation of the parts is missing.", "one statement per part")
    _only(statement, ("axis",), "several names")
    if "axis" not in statement.attributes:
        raise Fault("The axis of the names is missing.", "`, axis=0` at the end")
    return Join(int(statement.attributes["axis"].value))


def _one_sided(statement: AoaStatement) -> OneSided:
    items = (*statement.left, *statement.right)
    example = "`_ -> new_tensor` or `old_tensor -> _`"
    if len(items) != 2 or all(item.pattern == NOTHING for item in items):
        raise Fault("`_` is alone on its side, with one name on the other.", example)
    for attribute in statement.attributes.values():
        raise Fault("A statement with `_` has no attributes.", example, attribute.span)
    for item in items:
        if "$" in item.pattern or "*" in item.pattern or item.transposed or item.array:
            raise Fault("`_` goes with the whole name of one tensor.", "one statement per tensor", item.span)
    return OneSided()


def _only(statement: AoaStatement, keys: tuple[str, ...], what: str) -> None:
    for attribute in statement.attributes.values():
        if attribute.key not in keys:
            raise Fault(
                f"{attribute.key} is not supported in a statement of {what}.",
                f"a separate statement, one name to one name, with {attribute.key}",
                attribute.span,
            )


_FORMS = {
    FFN: ("`gate, up -> fused`, `fused -> gate, up` or `fused -> fused`", ((2, 1), (1, 2), (1, 1))),
    QKV: ("`q, k, v -> fused` or `fused -> q, k, v`", ((3, 1), (1, 3))),
    QKV_PER_RANK: ("`q, k, v -> fused`, `fused -> q, k, v` or `fused -> fused`", ((3, 1), (1, 3), (1, 1))),
}


def _fused(statement: AoaStatement, flag: Attribute, names: tuple[int, int]) -> Operation:
    given, kind = statement.attributes, flag.key
    numbers = () if kind == FFN else ("num_heads", "num_key_value_groups")
    _only(statement, ("axis", kind, *numbers), kind)
    for key in numbers:
        if key not in given or int(given[key].value) < 1:
            example = f"{kind}, num_heads=32, num_key_value_groups=8"
            raise Fault(f"{kind} requires {key}, at least 1.", example, flag.span)
    heads, groups = (int(given[key].value) for key in numbers) if numbers else (1, 1)
    if heads % groups:
        raise Fault(
            f"num_heads={heads} is not divisible by num_key_value_groups={groups}.",
            "num_key_value_groups is the number of kv heads and divides num_heads",
            given["num_key_value_groups"].span,
        )
    accepted, forms = _FORMS[kind]
    if names not in forms:
        raise Fault(f"{kind} does not go from {names[0]} to {names[1]} names.", accepted, flag.span)
    axis = int(given["axis"].value) if "axis" in given else _DEFAULT_FUSED_AXIS
    return Fused(kind, axis, (heads, groups, groups) if numbers else (1, 1))


def _move(statement: AoaStatement) -> Move:
    given = statement.attributes
    match tuple(given):
        case () | ("axis",):
            return Move()
        case ("permute",):
            return Move(permute=_permutation(given["permute"]))
        case ("reshape",):
            return Move(reshape=_blocks(given["reshape"]))
        case ("dtype",):
            return Move(cast=_dtype(given["dtype"]))
        case ("src_dtype", "dst_dtype"):
            return Move(read_as=_dtype(given["src_dtype"]), cast=_dtype(given["dst_dtype"]))
    raise Fault(
        f"Unsupported attributes of a statement from one name to one name: {', '.join(given)}.",
        "one of: permute; reshape; dtype; src_dtype and then dst_dtype",
        list(given.values())[-1].span,
    )


def _numbers(attribute: Attribute, what: str, example: str) -> Shape:
    found = _NUMBERS.fullmatch(attribute.value.strip())
    if found is None:
        raise Fault(f"Invalid list of {what}.", example, attribute.span)
    return tuple(int(part) for part in found.group(1).split(",")) if found.group(1) else ()


def _permutation(attribute: Attribute) -> Shape:
    axes = _numbers(attribute, "axes", 'permute="[1, 0]", or permute="[]" for all reversed')
    if sorted(axes) != list(range(len(axes))):
        raise Fault(
            f"{list(axes)} does not contain every axis once.", f"an order of {list(range(len(axes)))}", attribute.span
        )
    return axes


def _blocks(attribute: Attribute) -> Shape:
    example = 'reshape="[8, 16, 32]" for 8 blocks of 16 rows, which are [128, 32] in the other form'
    shape = _numbers(attribute, "lengths", example)
    if len(shape) < 3 or 0 in shape:
        raise Fault(f"{list(shape)} is not a shape of blocks with at least three axes.", example, attribute.span)
    return shape


def _dtype(attribute: Attribute) -> str:
    if attribute.value not in DTYPES:
        raise Fault(f"Unknown dtype {attribute.value!r}.", ", ".join(DTYPES), attribute.span)
    return attribute.value
