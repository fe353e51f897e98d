"""Argument checks of the Python API: an invalid argument raises :class:`OptionError` instead of failing later.

:func:`require` compares arguments with a :class:`Kind`. Functions that look a value up in a table, such as the name of
a format, check it themselves.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral
from os import PathLike
from typing import SupportsIndex

import msgspec

from paddleformers_fc.errors import OptionError
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.storage.paths import RemotePath
from paddleformers_fc.text import suggestion


class Kind(msgspec.Struct, frozen=True):
    """The valid values of an argument.

    Args:
        expected: a noun phrase, such as "a whole number", used after "Give" and after "is not".
        accepts: whether a value is valid.
        words: the valid values if they are texts.
    """

    expected: str
    accepts: Callable[[object], bool]
    words: tuple[str, ...] = ()


def _is_int(value: object, least: int, most: float = math.inf) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def _is_names(value: object) -> bool:
    if not isinstance(value, Collection) or isinstance(value, (str, bytes, Mapping)):
        return False
    return all(isinstance(one, str) for one in value)


def _is_degrees(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) and _is_int(one, 1) for key, one in value.items())


def _is_shapes(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(shape, Sequence) and all(_is_int(length, 0) for length in shape)
        for name, shape in value.items()
    )


TEXT = Kind("a text", lambda value: isinstance(value, str))
DIRECTORY = Kind(
    "a path, or a URL such as s3://bucket/run/checkpoint-3",
    lambda value: isinstance(value, (str, PathLike, RemotePath)),
)
FLAG = Kind("True or False", lambda value: isinstance(value, bool))
COUNT = Kind("a whole number of 1 or more", lambda value: _is_int(value, 1))
MOST_THREADS = 256
THREADS = Kind(f"a whole number from 1 to {MOST_THREADS}", lambda value: _is_int(value, 1, MOST_THREADS))
COUNT_OR_ZERO = Kind("an int of at least 0 and below 2**53", lambda value: type(value) is int and 0 <= value < 1 << 53)
"""For stored numbers: every JSON reader represents these exactly."""
TOLERANCE = Kind("a finite number of at least 0", _is_finite)
NAMES = Kind("a list of texts", _is_names)
DEGREES = Kind('the degree of each axis, such as {"tp": 2, "pp": 1}', _is_degrees)
SHAPES = Kind('the shape of each tensor by name, such as {"lm_head.weight": [64, 32]}', _is_shapes)


def one_of(values: Collection[str]) -> Kind:
    """Return the kind of an argument that is one of these texts."""
    return Kind(f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values, tuple(values))


def instance_of(kind: type | tuple[type, ...], expected: str) -> Kind:
    """Return the kind of an argument that is an instance of a class."""
    return Kind(expected, lambda value: isinstance(value, kind))


def require(kind: Kind, **arguments: object) -> None:
    """Check that arguments are of a kind.

    Args:
        kind: the kind of every argument.
        arguments: values by argument name.
    Raises:
        OptionError: for the first invalid argument.
    """
    for name, value in arguments.items():
        if not kind.accepts(value):
            raise OptionError(
                f"Invalid argument: {name}={reprlib.repr(value)}.",
                where=name,
                evidence=[f"its type is {type(value).__name__}", *suggestion(value, kind.words)],
                next_step=f"Give {kind.expected}.",
            )


def require_or_none(kind: Kind, **arguments: object) -> None:
    """Check arguments as :func:`require` does, except those that are None."""
    require(kind, **{name: value for name, value in arguments.items() if value is not None})


def parse_box(name: str, shape: Sequence[int], box: Sequence[slice]) -> Box:
    """Return the box that slices select. Open, negative and large bounds mean the same as in numpy.

    Args:
        name: name of the tensor.
        shape: global shape of the tensor.
        box: one slice per axis.
    Raises:
        OptionError: ``box`` does not have one slice per axis, or a slice has a step.
    """
    fault = _fault(box, len(shape))
    if fault:
        raise OptionError(
            f"The box of {name} {fault}.",
            where="box",
            evidence=[f"the shape of the tensor is {list(shape)}"],
            next_step="Give one slice without a step per axis, such as slice(0, 1) for the index 0.",
        )
    ranges = [range(length)[one] for one, length in zip(box, shape, strict=True)]
    return Box(tuple(one.start for one in ranges), tuple(max(one.start, one.stop) for one in ranges))


def _fault(box: object, axes: int) -> str:
    """Return why a box is invalid, as the end of a sentence; empty if it is valid."""
    if isinstance(box, str) or not isinstance(box, Sequence):
        return f"is {reprlib.repr(box)}, which is not a sequence of slices"
    for one in box:
        if not isinstance(one, slice):
            return f"contains {reprlib.repr(one)}, which is not a slice"
        if one.step is not None and one.step != 1:
            return f"contains {one!r}, which has a step"
        if not all(bound is None or isinstance(bound, SupportsIndex) for bound in (one.start, one.stop)):
            return f"contains {one!r}, whose bounds are not whole numbers"
    return "" if len(box) == axes else f"has {len(box)} slices instead of {axes}"
