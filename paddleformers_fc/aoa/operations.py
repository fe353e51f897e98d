"""What a statement does: one operation, from its attributes and the number of names on each side.

Whether an operation fits the tensors it meets is decided where they are known; here it is decided that it is one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paddleformers_fc.aoa.faults import Fault
from paddleformers_fc.aoa.syntax import FLAGS, NOTHING, Attribute, Statement
from paddleformers_fc.mapping.boxes import Shape

DTYPES = ("float16", "float32", "bfloat16")
_PERMUTATION = re.compile(r"\[\s*(\d{1,3}\s*(?:,\s*\d{1,3}\s*)*)?\]", re.ASCII)
_DEFAULT_FUSED_AXIS = 1


@dataclass(frozen=True, slots=True)
class Drop:
    """``a -> _``: the source is wanted nowhere."""


@dataclass(frozen=True, slots=True)
class Fresh:
    """``_ -> b``: the target keeps its initial values."""


@dataclass(frozen=True, slots=True)
class Move:
    """One name to one name.

    Args:
        permute: for every axis of the result the axis that it reads; empty for all axes reversed; None for as it is.
        read_as: the dtype that is declared for what is read, or None.
        cast: the dtype that the numbers are converted to, or None.
    """

    permute: Shape | None = None
    read_as: str | None = None
    cast: str | None = None


@dataclass(frozen=True, slots=True)
class Join:
    """Several names to one, one behind the other along an axis."""

    axis: int


@dataclass(frozen=True, slots=True)
class Cut:
    """One name to several, in equal lengths along an axis."""

    axis: int


@dataclass(frozen=True, slots=True)
class FusedFfn:
    """[gate | up] for every tensor-parallel rank."""

    axis: int


@dataclass(frozen=True, slots=True)
class FusedQkv:
    """[q..q k v] for every kv head."""

    axis: int
    heads: int
    groups: int


@dataclass(frozen=True, slots=True)
class FusedQkvOld:
    """[Q | K | V] for every tensor-parallel rank."""

    axis: int
    heads: int
    groups: int


Operation = Drop | Fresh | Move | Join | Cut | FusedFfn | FusedQkv | FusedQkvOld


def operation_of(statement: Statement, left: int, right: int) -> Operation:
    """Return the operation of a statement.

    Args:
        statement: as it is written.
        left: the number of names that its left side stands for.
        right: the number of names that its right side stands for.
    Raises:
        Fault: where the attributes and the numbers of names fit no operation.
    """
    if any(item.pattern == NOTHING for item in (*statement.left, *statement.right)):
        return _with_nothing(statement)
    flag = _flag(statement)
    if flag is not None:
        return _fused(statement, flag, (left, right))
    if left == right == 1:
        return _move(statement)
    if left > 1 and right > 1:
        raise Fault("Several names on both sides: which part becomes which is not said.", "one statement per part")
    _only(statement, ("axis",), "several names")
    if "axis" not in statement.attributes:
        raise Fault("Along which axis the names lie is not said.", "`, axis=0` at the end")
    axis = int(statement.attributes["axis"].value)
    return Join(axis) if left > 1 else Cut(axis)


def _with_nothing(statement: Statement) -> Operation:
    items = (*statement.left, *statement.right)
    example = "`_ -> new_tensor` or `old_tensor -> _`"
    if len(items) != 2 or all(item.pattern == NOTHING for item in items):
        raise Fault("`_` stands alone on its side, and one name on the other.", example)
    for attribute in statement.attributes.values():
        raise Fault("What is added or removed has no attributes.", example, attribute.span)
    for item in items:
        if "$" in item.pattern or "*" in item.pattern or item.transposed or item.array:
            raise Fault("Beside `_` stands one tensor's whole name.", "one statement per tensor", item.span)
    return Fresh() if statement.left[0].pattern == NOTHING else Drop()


def _flag(statement: Statement) -> Attribute | None:
    found = [statement.attributes[flag] for flag in FLAGS if flag in statement.attributes]
    if len(found) > 1:
        raise Fault("A statement has one fused layout.", "a second statement", found[1].span)
    return found[0] if found else None


def _only(statement: Statement, keys: tuple[str, ...], what: str) -> None:
    for attribute in statement.attributes.values():
        if attribute.key not in keys:
            raise Fault(
                f"{attribute.key} cannot stand in a statement of {what}.",
                f"a statement of its own, one name to one name, with {attribute.key}",
                attribute.span,
            )


def _fused(statement: Statement, flag: Attribute, names: tuple[int, int]) -> Operation:
    given = statement.attributes
    axis = int(given["axis"].value) if "axis" in given else _DEFAULT_FUSED_AXIS
    if flag.key == "fused_ffn":
        _only(statement, ("axis", flag.key), flag.key)
        _fits(flag, names, ((2, 1), (1, 2), (1, 1)), "`gate, up -> fused`, `fused -> gate, up` or `fused -> fused`")
        return FusedFfn(axis)
    _only(statement, ("axis", flag.key, "num_heads", "num_key_value_groups"), flag.key)
    for key in ("num_heads", "num_key_value_groups"):
        if key not in given or int(given[key].value) < 1:
            raise Fault(
                f"{flag.key} needs {key}, at least 1.", f"{flag.key}, num_heads=32, num_key_value_groups=8", flag.span
            )
    heads, groups = int(given["num_heads"].value), int(given["num_key_value_groups"].value)
    if heads % groups:
        raise Fault(
            f"{heads} query heads are not shared evenly by {groups} kv heads.",
            "num_key_value_groups is the number of kv heads and divides num_heads",
            given["num_key_value_groups"].span,
        )
    if flag.key == "fused_qkv":
        _fits(flag, names, ((3, 1), (1, 3)), "`q, k, v -> fused` or `fused -> q, k, v`")
        return FusedQkv(axis, heads, groups)
    _fits(flag, names, ((3, 1), (1, 3), (1, 1)), "`q, k, v -> fused`, `fused -> q, k, v` or `fused -> fused`")
    return FusedQkvOld(axis, heads, groups)


def _fits(flag: Attribute, names: tuple[int, int], forms: tuple[tuple[int, int], ...], accepted: str) -> None:
    if names not in forms:
        raise Fault(f"{flag.key} is not from {names[0]} to {names[1]} names.", accepted, flag.span)


def _move(statement: Statement) -> Move:
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
        f"{', '.join(keys)} is more than one statement from one name to one name can do.",
        "one of: permute; dtype; src_dtype and then dst_dtype",
        given[keys[-1]].span,
    )


def _permutation(attribute: Attribute) -> Shape:
    found = _PERMUTATION.fullmatch(attribute.value.strip())
    if found is None:
        raise Fault("This is no list of axes.", 'permute="[1, 0]", or permute="[]" for all reversed', attribute.span)
    axes = tuple(int(part) for part in found.group(1).split(",")) if found.group(1) else ()
    if sorted(axes) != list(range(len(axes))):
        raise Fault(
            f"{list(axes)} does not name every axis once.", f"an order of {list(range(len(axes)))}", attribute.span
        )
    return axes


def _dtype(attribute: Attribute) -> str:
    if attribute.value not in DTYPES:
        raise Fault(f"{attribute.value!r} is no dtype of the language.", ", ".join(DTYPES), attribute.span)
    return attribute.value
