"""JSON documents that are nearly right: a valid one in which a few nodes were changed, and written down oddly.

Random bytes are refused by the first check of every reader. What finds faults is a real document with one thing wrong
in it: a node that is missing, there twice, of another type, larger than anything, or swapped with another; and a text
that says the same thing in a way that readers differ about (a key twice, numbers beyond every type, another encoding).

Everything is drawn from a seeded generator. A node is never in two places: changed in one it would change in the other,
or come to hold itself. Time and memory are linear in the document.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Path = tuple[Any, ...]
"""The keys and indices that lead to a node."""


@dataclass(frozen=True)
class Raw:
    """JSON text that stands for itself, for numbers that Python would write in another way."""

    text: str


@dataclass(frozen=True)
class Pairs:
    """An object whose keys may occur twice."""

    items: tuple[tuple[str, Any], ...]


def written(value: Any) -> str:
    """The JSON text of a value that may hold :class:`Raw` and :class:`Pairs`."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{written(one)}" for key, one in value.items) + "}"
    if isinstance(value, dict):
        return written(Pairs(tuple(value.items())))
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def nested(depth: int) -> Raw:
    """A list in a list in a list."""
    return Raw("[" * depth + "]" * depth)


NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 33, 255, 65_536, 1_000_003, 2**31, 2**53 + 1, 2**60, 2**63 - 1, 2**63, 2**64, -(2**63)),
    *(0.5, Raw("1e3"), Raw("1e999"), Raw("-0"), Raw("NaN"), Raw("-Infinity"), Raw("9" * 300), Raw("9" * 5_000)),
)
TEXTS: tuple[str, ...] = (
    *("", ".", "..", "../x", "/etc/passwd", "a/../../b", "a\\..\\b", "\0", "a\0b", "\ud800", "\u202e", "\x1b[31m"),
    *("float32", "object", "V999999999", "U99999999", "model.layers.0.mlp.gate_proj.weight", "layers.\u00b2.x"),
    *("a." + "9" * 5_000 + ".b", "\u0661.\u0661.w", "x" * 5_000, "%1000000000d", "__class__", "{0.__class__}"),
)
ODD: tuple[Any, ...] = (None, True, False, [], {}, [[]], [0], {"a": 0}, nested(40), nested(3_000))


def mutated(document: Any, chance: random.Random) -> bytes:
    """The bytes of a document in which one to three nodes were changed.

    Args:
        document: of JSON's own types; it is not changed.
        chance: where every choice comes from.
    """
    value = copy.deepcopy(document)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        value = _changed(value, chance)
    return _encoded(written(value), chance)


def _encoded(text: str, chance: random.Random) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    if chance.random() < 0.9:
        return raw
    at = chance.randrange(len(raw) + 1)
    one = bytes([chance.randrange(256)])
    whole = (b"\xef\xbb\xbf" + raw, text.encode("utf-16", "surrogatepass"), raw + raw, b"")
    return chance.choice((*whole, raw[:at], raw[:at] + one + raw[at:], raw[:at] + b"\xff\xfe" + raw[at:]))


def _changed(value: Any, chance: random.Random) -> Any:
    """A node is deleted, there many times, a copy of another, a neighbour of its number, or any other value."""
    paths = list(_paths(value, ()))
    path = chance.choice(paths)
    if not path:
        return chance.choice((*ODD, [value, copy.deepcopy(value)]))
    parent, key = _node(value, path[:-1]), path[-1]
    old, kind = parent[key], chance.randrange(8)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, list):
        parent[key:key] = [copy.deepcopy(old) for _ in range(chance.choice((1, 2, 40)))]
    elif kind == 1:
        again = chance.choice((key, f"{key}x", *TEXTS))
        return _put(value, path[:-1], Pairs((*parent.items(), (again, copy.deepcopy(old)))))
    elif kind == 2:
        parent[key] = copy.deepcopy(_node(value, chance.choice(paths)))
    elif kind < 5 and type(old) is int:
        parent[key] = chance.choice((old - 1, old + 1, -old, 2 * old, old << 20, old // 2))
    else:
        own = NUMBERS if isinstance(old, (int, float)) else TEXTS if isinstance(old, str) else ODD
        parent[key] = copy.deepcopy(chance.choice(own if chance.random() < 0.7 else (*NUMBERS, *TEXTS, *ODD)))
    return value


def _paths(value: Any, at: Path) -> Iterator[Path]:
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield from _paths(one, (*at, key))


def _node(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _put(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    _node(value, path[:-1])[path[-1]] = new
    return value
