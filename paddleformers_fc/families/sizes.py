"""Sizes and conditions of a declaration: small expressions over a model's configuration.

A declaration contains ``"heads * head"`` or ``"layer >= first_k_dense_replace"``, which are evaluated to a number or a
truth value. A name is, in this order, a number of the tensor's name (``layer``), a size that the family declares, a key
of the configuration, a default of the family. Inside the size ``x`` the name ``x`` is a key of the configuration. A
dotted name is a size of a tower (``vision.hidden``) or a key of a nested configuration (``text_config.hidden_size``).

Libraries have several names for one key: ``num_experts | num_local_experts`` is the value of the one in the
configuration, or the default of the first. Several values must be equal.

Some keys are lists: ``layer_types[layer]`` is an entry, ``len(vision.deepstack_visual_indexes)`` the number of entries.

Expressions are parsed by Python's parser and restricted to a short list of nodes, so that a declaration is data:
integers, texts, names, arithmetic, comparison, ``and or not``, ``x if y else z``, names joined by ``|``, entries and
lengths of lists. Each text is parsed once per process.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from paddleformers_fc.errors import MappingError

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
_NO_NUMBERS: dict[str, int] = {}
_NOTHING_UNKNOWN: dict[str, str] = {}
_NO_TOWERS: dict[str, Sizes] = {}


class Sizes:
    """The sizes of one model.

    Args:
        declared: the family's sizes, name -> expression.
        config: the model's configuration.
        defaults: the values of the model's class for keys that the configuration does not contain.
        unknown: names without a value, with the reason. An absent key counts as false; one of these is an error.
        towers: the sizes of the model's towers by name: ``vision.hidden`` is a size of tower ``vision``.
    """

    def __init__(
        self,
        declared: Mapping[str, str],
        config: Mapping[str, Any],
        defaults: Mapping[str, Any] = _NO_NUMBERS,
        unknown: Mapping[str, str] = _NOTHING_UNKNOWN,
        towers: Mapping[str, Sizes] = _NO_TOWERS,
    ) -> None:
        self._declared = declared
        self._config = config
        self._defaults = defaults
        self._unknown = unknown
        self._towers = towers
        self._known: dict[str, Any] = {}
        self._open: list[str] = []

    def length(self, expression: str, numbers: Mapping[str, int] = _NO_NUMBERS) -> int:
        """Return the value of an expression that is a number of elements or of tensors.

        Args:
            expression: its text.
            numbers: the numbers in the tensor's own name, by placeholder.
        Raises:
            MappingError: the expression is malformed, or the configuration lacks a key.
        """
        found = self._value(expression, numbers)
        if found is None:
            raise self._refused(expression, "is not in the configuration")
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise self._refused(expression, f"is {found!r} and not a length")
        return found

    def value(self, expression: str) -> Any:
        """Return the value of an expression, of any type; None if the configuration does not give it.

        Raises:
            MappingError: as :meth:`length`.
        """
        return self._value(expression, _NO_NUMBERS)

    def holds(self, condition: str, numbers: Mapping[str, int] = _NO_NUMBERS) -> bool:
        """Return whether a condition holds; an empty one always does.

        Raises:
            MappingError: as :meth:`length`.
        """
        return bool(self._value(condition, numbers)) if condition else True

    def defines(self, expression: str, numbers: Mapping[str, int] = _NO_NUMBERS) -> bool:
        """Return whether an expression has a value under this configuration and these numbers of a name."""
        try:
            return self._value(expression, numbers) is not None
        except MappingError:
            return False

    def is_given(self, expression: str) -> bool:
        """Return whether the configuration itself has a key that an expression reads."""
        return any(value_at(self._config, key) is not None for key in self._keys(expression))

    def within(self, tower: str) -> Sizes:
        """Return the sizes of a tower; those of the model itself for an empty name."""
        return self._towers[tower] if tower else self

    def _value(self, expression: str, numbers: Mapping[str, int]) -> Any:
        try:
            return self._walk(parsed(expression), numbers)
        except (TypeError, ArithmeticError) as error:
            absent = sorted(name for name in names_of(expression) - set(numbers) if self._named(name, numbers) is None)
            reason = f"requires {', '.join(absent)}, which the configuration does not contain" if absent else str(error)
            raise self._refused(expression, reason) from error

    def _walk(self, node: ast.expr, numbers: Mapping[str, int]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if name := _name(node):
            return self._named(name, numbers)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self._synonym(synonyms(node), numbers)
        if isinstance(node, ast.BinOp):
            left, right = self._walk(node.left, numbers), self._walk(node.right, numbers)
            return _ARITHMETIC[type(node.op)](_number(left), _number(right))
        if isinstance(node, ast.BoolOp):
            return self._chosen(node, numbers)
        if isinstance(node, ast.UnaryOp):
            value = self._walk(node.operand, numbers)
            return not value if isinstance(node.op, ast.Not) else -_number(value)
        if isinstance(node, ast.IfExp):
            return self._walk(node.body if self._walk(node.test, numbers) else node.orelse, numbers)
        if isinstance(node, ast.Compare):
            return self._compared(node, numbers)
        if isinstance(node, ast.Subscript):
            return _entry(self._walk(node.value, numbers), self._walk(node.slice, numbers))
        if isinstance(node, ast.Call):
            return len(_list(self._walk(node.args[0], numbers)))
        return tuple(self._walk(item, numbers) for item in node.elts) if isinstance(node, ast.Tuple) else None

    def _chosen(self, node: ast.BoolOp, numbers: Mapping[str, int]) -> Any:
        value: Any = None
        for operand in node.values:
            value = self._walk(operand, numbers)
            if bool(value) is isinstance(node.op, ast.Or):
                return value
        return value

    def _keys(self, expression: str, within: frozenset[str] = frozenset()) -> set[str]:
        """Return the configuration keys that an expression reads; a size inside its own expression is a key."""
        names = names_of(expression)
        towers = {name: name.partition(".") for name in names if name.partition(".")[0] in self._towers}
        names -= towers.keys()
        inside = {name for name in names - within if name in self._declared}
        return {*(names - inside)}.union(
            *(self._keys(self._declared[name], within | {name}) for name in inside),
            *(self._towers[tower]._keys(rest) for tower, _, rest in towers.values()),
        )

    def _synonym(self, names: tuple[str, ...], numbers: Mapping[str, int]) -> Any:
        """Return the value of names for one key.

        Raises:
            MappingError: the configuration gives several of them, and they differ.
        """
        found = {name: value_at(self._config, name) for name in names}
        given = {name: value for name, value in found.items() if value is not None}
        if any(value != next(iter(given.values())) for value in given.values()):
            raise MappingError(
                f"{' and '.join(given)} are names of one key, and their values differ.",
                where="config.json",
                evidence=[f"{name}: {value}" for name, value in given.items()],
                next_step="Give one of the names in the configuration, or the same value to all.",
            )
        return next(iter(given.values())) if given else self._named(names[0], numbers)

    def _compared(self, node: ast.Compare, numbers: Mapping[str, int]) -> bool:
        left = self._walk(node.left, numbers)
        for comparison, operand in zip(node.ops, node.comparators, strict=True):
            right = self._walk(operand, numbers)
            if not _COMPARISONS[type(comparison)](left, right):
                return False
            left = right
        return True

    def _named(self, name: str, numbers: Mapping[str, int]) -> Any:
        if name in numbers:
            return numbers[name]
        if name in self._known:
            return self._known[name]
        if name in self._unknown:
            raise self._refused(name, self._unknown[name])
        head, _, rest = name.partition(".")
        if rest and head in self._towers:
            return self._towers[head].value(rest)
        if name in self._declared and name not in self._open:
            self._open.append(name)
            try:
                value = self._value(self._declared[name], _NO_NUMBERS)
            finally:
                self._open.pop()
        else:
            value = value_at(self._config, name, self._defaults.get(name))
        if not self._open:
            self._known[name] = value
        return value

    def _refused(self, expression: str, reason: str) -> MappingError:
        keys = sorted(self._keys(expression))
        return MappingError(
            f"`{expression}` {reason}.",
            where="config.json",
            evidence=[] if keys == [expression] else [f"it is read from {', '.join(keys)}"],
            next_step="Complete the configuration, or the family's sizes and defaults.",
        )


def _number(value: Any) -> Any:
    """Return a value if it is a number: text multiplied by a number could have any length."""
    if not isinstance(value, (int, float)):
        raise TypeError(f"needs a number and not {value if value is None else type(value).__name__}")
    return value


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"needs a list and not {value if value is None else type(value).__name__}")
    return value


def _entry(values: Any, index: Any) -> Any:
    """Return an entry of a list, counted from 0."""
    if not isinstance(index, int) or not 0 <= index < len(_list(values)):
        raise TypeError(f"needs entry {index} of a list of {len(values)}")
    return values[index]


@lru_cache(maxsize=4096)
def parsed(expression: str) -> ast.expr:
    """Return the syntax tree of an expression.

    Raises:
        MappingError: where it is malformed or uses more than the language of this module has.
    """
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        raise _malformed(expression, f"is no expression: {error.msg}") from error
    for node in ast.walk(tree):
        if not _is_known(node):
            raise _malformed(expression, f"uses {type(node).__name__}, which the language of sizes does not have")
    return tree


def synonyms(node: ast.expr) -> tuple[str, ...]:
    """Return the names that ``|`` joins in an expression, in order; none if it joins anything else than names."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        left, right = synonyms(node.left), synonyms(node.right)
        return (*left, *right) if left and right else ()
    name = _name(node)
    return (name,) if name else ()


@lru_cache(maxsize=4096)
def names_of(expression: str) -> frozenset[str]:
    """Return the names that an expression uses; none for an empty one."""
    if not expression:
        return frozenset()
    return frozenset(_names(parsed(expression)))


def value_at(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value of a key of a configuration, or of a nested one: ``text_config.hidden_size``."""
    found: Any = config
    for key in path.split("."):
        if not isinstance(found, Mapping) or key not in found:
            return default
        found = found[key]
    return found


def _names(node: ast.AST) -> Iterator[str]:
    if name := _name(node):
        yield name
    elif isinstance(node, ast.Call):
        yield from _names(node.args[0])
    else:
        for child in ast.iter_child_nodes(node):
            yield from _names(child)


def _name(node: ast.AST) -> str:
    """Return the name that a node is, with dots for an attribute; empty for other nodes."""
    if isinstance(node, ast.Attribute):
        owner = _name(node.value)
        return owner and f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_known(node: ast.AST) -> bool:
    if isinstance(node, (ast.operator, ast.cmpop)):
        return type(node) in _ARITHMETIC or type(node) in _COMPARISONS or isinstance(node, ast.BitOr)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return bool(synonyms(node))
    if isinstance(node, ast.Attribute):
        return bool(_name(node))
    if isinstance(node, ast.Call):
        return _name(node.func) == "len" and len(node.args) == 1 and not node.keywords
    if isinstance(node, ast.Constant):
        return node.value is None or isinstance(node.value, (int, str))
    return isinstance(
        node,
        (
            *(ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Name, ast.Tuple, ast.Subscript),
            *(ast.Load, ast.And, ast.Or, ast.Not, ast.USub),
        ),
    )


def _malformed(expression: str, reason: str) -> MappingError:
    return MappingError(
        f"`{expression}` {reason}.", where="a family's declaration", next_step="Correct the family's declaration."
    )
