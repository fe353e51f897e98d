"""The operation of a statement, from its attributes and the number of names on each side.

This module checks the form only. Whether an operation fits its tensors is checked when they are known. Operations have
no reverse: a mapping does (:meth:`~paddleformers_fc.mapping.TensorMapping.reversed`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from paddleformers_fc.aoa.faults import Fault
from paddleformers_fc.aoa.syntax import FLAGS, NOTHING, AoaStatement, Attribute
from paddleformers_fc.mapping.boxes import Shape

DTYPES = ("float16", "float32", "bfloat16")
_PERMUTATION = re.compile(r"\[\s*(\d{1,3}\s*(?:,\s*\d{1,3}\s*)*)?\]", re.ASCII)
_DEFAULT_FUSED_AXIS = 1


class FusedOrder(Enum):
    """A fused layout; the value is its attribute."""

    FFN = "fused_ffn"
    QKV = "fused_qkv"
    QKV_PER_RANK = "fused_qkv_old"


@dataclass(frozen=True, slots=True)
class Drop:
    """``a -> _``: no target reads the source."""


@dataclass(frozen=True, slots=True)
class Fresh:
    """``_ -> b``: the target keeps its initial values."""


@dataclass(frozen=True, slots=True)
class Move:
    """One name to one name.

    Args:
        permute: for every axis of the result the axis that it reads; empty for all axes reversed; None for no change.
        read_as: the declared dtype of the source, or None.
        cast: the dtype that values are converted to, or None.
    """

    permute: Shape | None = None
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
        heads: the number of query heads; 1 for gate and up.
        groups: the number of kv heads; 1 for gate and up.
    """

    kind: FusedOrder
    axis: int
    heads: int = 1
    groups: int = 1

    @property
    def counts(self) -> Shape:
        """The proportions of the parts."""
        return (1, 1) if self.kind is FusedOrder.FFN else (self.heads, self.groups, self.groups)


Operation = Drop | Fresh | Move | Join | Fused


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
        return _with_nothing(statement)
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


def _with_nothing(statement: AoaStatement) -> Operation:
    items = (*statement.left, *statement.right)
    example = "`_ -> new_tensor` or `old_tensor -> _`"
    if len(items) != 2 or all(item.pattern == NOTHING for item in items):
        raise Fault("`_` is alone on its side, with one name on the other.", example)
    for attribute in statement.attributes.values():
        raise Fault("A statement with `_` has no attributes.", example, attribute.span)
    for item in items:
        if "$" in item.pattern or "*" in item.pattern or item.transposed or item.array:
            raise Fault("`_` goes with the whole name of one tensor.", "one statement per tensor", item.span)
    return Fresh() if statement.left[0].pattern == NOTHING else Drop()


def _only(statement: AoaStatement, keys: tuple[str, ...], what: str) -> None:
    for attribute in statement.attributes.values():
        if attribute.key not in keys:
            raise Fault(
                f"{attribute.key} is not supported in a statement of {what}.",
                f"a separate statement, one name to one name, with {attribute.key}",
                attribute.span,
            )


_FORMS = {
    FusedOrder.FFN: ("`gate, up -> fused`, `fused -> gate, up` or `fused -> fused`", ((2, 1), (1, 2), (1, 1))),
    FusedOrder.QKV: ("`q, k, v -> fused` or `fused -> q, k, v`", ((3, 1), (1, 3))),
    FusedOrder.QKV_PER_RANK: (
        "`q, k, v -> fused`, `fused -> q, k, v` or `fused -> fused`",
        ((3, 1), (1, 3), (1, 1)),
    ),
}


def _fused(statement: AoaStatement, flag: Attribute, names: tuple[int, int]) -> Operation:
    given, kind = statement.attributes, FusedOrder(flag.key)
    axis = int(given["axis"].value) if "axis" in given else _DEFAULT_FUSED_AXIS
    numbers = () if kind is FusedOrder.FFN else ("num_heads", "num_key_value_groups")
    _only(statement, ("axis", flag.key, *numbers), flag.key)
    for key in numbers:
        if key not in given or int(given[key].value) < 1:
            example = f"{flag.key}, num_heads=32, num_key_value_groups=8"
            raise Fault(f"{flag.key} requires {key}, at least 1.", example, flag.span)
    heads, groups = (int(given[key].value) for key in numbers) if numbers else (1, 1)
    if heads % groups:
        raise Fault(
            f"num_heads={heads} is not divisible by num_key_value_groups={groups}.",
            "num_key_value_groups is the number of kv heads and divides num_heads",
            given["num_key_value_groups"].span,
        )
    accepted, forms = _FORMS[kind]
    if names not in forms:
        raise Fault(f"{flag.key} does not go from {names[0]} to {names[1]} names.", accepted, flag.span)
    return Fused(kind, axis, heads, groups)


def _move(statement: AoaStatement) -> Move:
    given = statement.attributes
    keys = tuple(given)
    if keys == ("permute",):
        return Move(permute=_permutation(given["permute"]))
    if keys == ("dtype",):
        return Move(cast=_dtype(given["dtype"]))
    if keys == ("src_dtype", "dst_dtype"):
        return Move(read_as=_dtype(given["src_dtype"]), cast=_dtype(given["dst_dtype"]))
    if keys in ((), ("axis",)):
        return Move()
    raise Fault(
        f"Unsupported attributes of a statement from one name to one name: {', '.join(keys)}.",
        "one of: permute; dtype; src_dtype and then dst_dtype",
        given[keys[-1]].span,
    )


def _permutation(attribute: Attribute) -> Shape:
    found = _PERMUTATION.fullmatch(attribute.value.strip())
    if found is None:
        raise Fault("Invalid list of axes.", 'permute="[1, 0]", or permute="[]" for all reversed', attribute.span)
    axes = tuple(int(part) for part in found.group(1).split(",")) if found.group(1) else ()
    if sorted(axes) != list(range(len(axes))):
        raise Fault(
            f"{list(axes)} does not contain every axis once.", f"an order of {list(range(len(axes)))}", attribute.span
        )
    return axes


def _dtype(attribute: Attribute) -> str:
    if attribute.value not in DTYPES:
        raise Fault(f"Unknown dtype {attribute.value!r}.", ", ".join(DTYPES), attribute.span)
    return attribute.value
