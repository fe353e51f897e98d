"""Evaluate the sizes and conditions of a declaration for a model's configuration.

A size is one of these:

* a name: ``"hidden"``. It refers to the first that exists: a number of the tensor's name (``layer``), a size of the
  family, a configuration key, a default of the family. A dotted name is a size of a tower (``vision.hidden``) or a key
  of a nested configuration (``text_config.hidden_size``). Inside the size ``x``, the name ``x`` is a configuration key.
* a number.
* a tuple: the sum of its entries, such as the parts of a fused layer: ``("q", "kv", "kv")``.
* :class:`OneOf`: several names of one key.
* a function whose parameters are names: ``lambda heads, head: heads * head``.

A condition is a name, a bool or a function. An absent key counts as false.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from paddleformers_fc.errors import MappingError


class OneOf(msgspec.Struct, frozen=True):
    """A key with several names. If a configuration has several of them, their values must be equal.

    If it has none, the value is the default of the first name.
    """

    names: tuple[str, ...]


Size = str | int | tuple[Any, ...] | OneOf | Callable[..., Any]
Condition = str | bool | Callable[..., Any]
Conditions = tuple[tuple[Condition, bool], ...]
"""Conditions, each with the truth value that it must have."""

_NO_NUMBERS: dict[str, int] = {}
_NOTHING_UNKNOWN: dict[str, str] = {}
_NO_TOWERS: dict[str, Sizes] = {}


class Sizes:
    """The sizes of one model.

    Args:
        declared: the family's sizes by name.
        config: the model's configuration.
        defaults: the class's values for keys that the configuration lacks.
        unknown: names whose value is unknown, with the reason. Unlike absent keys, using one is an error.
        towers: the sizes of the model's towers by name: ``vision.hidden`` is a size of tower ``vision``.
    """

    def __init__(
        self,
        declared: Mapping[str, Size],
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

    def length(self, size: Size, numbers: Mapping[str, int] = _NO_NUMBERS) -> int:
        """Return the value of a size that counts elements or tensors.

        Args:
            size: the size.
            numbers: the numbers in the tensor's name, by placeholder.
        Raises:
            MappingError: the configuration lacks a key, or the value is not a length.
        """
        found = self._value(size, numbers)
        if found is None:
            raise self._error(size, "is not in the configuration")
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise self._error(size, f"is {found!r} and not a length")
        return found

    def value(self, size: Size) -> Any:
        """Return the value of a size, of any type; None if the configuration lacks it.

        Raises:
            MappingError: as :meth:`length`.
        """
        return self._value(size, _NO_NUMBERS)

    def holds(self, conditions: Conditions, numbers: Mapping[str, int] = _NO_NUMBERS) -> bool:
        """Return whether all conditions hold.

        Raises:
            MappingError: as :meth:`length`.
        """
        return all(bool(self._value(one, numbers)) is expected for one, expected in conditions)

    def defines(self, size: Size, numbers: Mapping[str, int] = _NO_NUMBERS) -> bool:
        """Return whether a size has a value for this configuration and these numbers of a name."""
        try:
            return self._value(size, numbers) is not None
        except MappingError:
            return False

    def is_given(self, size: Size) -> bool:
        """Return whether the configuration contains a key that a size depends on."""
        return any(value_at(self._config, key) is not None for _, key in self.keys(size))

    def reads(self, size: Size) -> frozenset[str]:
        """Return the names that a size uses, and the parameters of the family's functions among them."""
        names = frozenset(names_of(size))
        functions = (self._declared[name] for name in names if callable(self._declared.get(name)) and name != "head")
        return names.union(*map(names_of, functions))

    def within(self, tower: str) -> Sizes:
        """Return the sizes of a tower; ``self`` for an empty name."""
        return self._towers[tower] if tower else self

    def _value(self, size: Size, numbers: Mapping[str, int]) -> Any:
        if isinstance(size, str):
            return self._named(size, numbers)
        if isinstance(size, int):
            return size
        if isinstance(size, OneOf):
            return self._of_one(size.names, numbers)
        try:
            if isinstance(size, tuple):
                return sum(self._value(one, numbers) for one in size)
            found = size(*(_argument(self._named(name, numbers)) for name in names_of(size)))
            return found.value if isinstance(found, (_Text, _Entries)) else found
        except (TypeError, ArithmeticError, LookupError) as error:
            absent = sorted(name for name in names_of(size) if self._named(name, numbers) is None)
            reason = f"requires {', '.join(absent)}, which the configuration does not contain" if absent else str(error)
            raise self._error(size, reason) from error

    def keys(self, size: Size, within: frozenset[str] = frozenset()) -> Iterator[tuple[Sizes, str]]:
        """Yield the configuration keys that a size depends on, each with the sizes of the model or tower.

        Inside the definition of a size, its own name is a key.
        """
        for name in names_of(size):
            tower, _, rest = name.partition(".")
            if tower in self._towers:
                yield from self._towers[tower].keys(rest)
            elif name in self._declared and name not in within:
                yield from self.keys(self._declared[name], within | {name})
            else:
                yield self, name

    def _of_one(self, names: tuple[str, ...], numbers: Mapping[str, int]) -> Any:
        """Return the value of a key with several names.

        Raises:
            MappingError: the configuration has several of the names, with different values.
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

    def _named(self, name: str, numbers: Mapping[str, int]) -> Any:
        if name in numbers:
            return numbers[name]
        if name in self._known:
            return self._known[name]
        if name in self._unknown:
            raise self._error(name, self._unknown[name])
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

    def _error(self, size: Size, reason: str) -> MappingError:
        keys = sorted({key for _, key in self.keys(size)})
        return MappingError(
            f"`{text_of(size)}` {reason}.",
            where="config.json",
            evidence=[] if keys == [size] else [f"it is read from {', '.join(keys)}"],
            next_step="Complete the configuration, or the family's sizes and defaults.",
        )


class _Text:
    """A configured text. Unlike a str, it cannot be multiplied by a number, which could give a text of any length."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __bool__(self) -> bool:
        return bool(self.value)

    def __eq__(self, other: object) -> bool:
        return bool(self.value == other)

    __hash__ = None  # type: ignore[assignment]


class _Entries(Sequence[Any]):
    """A configured list, which cannot be multiplied either and has no negative indices."""

    def __init__(self, value: Sequence[Any]) -> None:
        self.value = value

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int) or not 0 <= index < len(self.value):
            raise IndexError(f"needs entry {index} of a list of {len(self.value)}")
        return _argument(self.value[index])


def _argument(value: Any) -> Any:
    """Wrap a configured value as an argument for functions of sizes."""
    if isinstance(value, str):
        return _Text(value)
    return _Entries(value) if isinstance(value, (list, tuple)) else value


def names_of(size: Size) -> tuple[str, ...]:
    """Return the names that a size or a condition uses."""
    if isinstance(size, str):
        return (size,)
    if isinstance(size, OneOf):
        return size.names
    if isinstance(size, tuple):
        return tuple(name for one in size for name in names_of(one))
    return _parameters(size) if callable(size) else ()


@lru_cache(maxsize=4096)
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def text_of(size: Size) -> str:
    """Format a size for an error: the names that it uses."""
    if isinstance(size, tuple):
        return " + ".join(map(text_of, size))
    if callable(size):
        return f"{getattr(size, '__name__', 'size')}({', '.join(names_of(size))})".replace("<lambda>", "")
    return " | ".join(size.names) if isinstance(size, OneOf) else str(size)


def conditions_text(conditions: Conditions) -> str:
    """Format conditions for an error."""
    return " and ".join(text_of(one) if expected else f"not {text_of(one)}" for one, expected in conditions)


def value_at(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value of a configuration key; dots lead into nested configurations: ``text_config.hidden_size``."""
    found: Any = config
    for key in path.split("."):
        if not isinstance(found, Mapping) or key not in found:
            return default
        found = found[key]
    return found
