"""Store the Trainer's state as JSON: exact, readable, without pickle.

PaddleFormers pickles trainer state, scheduler, loss scaler, random generators and training arguments, a few kilobytes
of numbers. This module writes each as a JSON file. Numbers are restored bit for bit, because Python writes the shortest
decimal text that reads back as the same float. An array includes its dtype, and infinity and NaN use Python's extension
of JSON. Saving a value that cannot be written exactly raises an error.

``trainer.documents`` reads and restores the values; ``formats.stock_run`` converts them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from paddleformers_fc.errors import FormatError
from paddleformers_fc.storage.json_io import parse_json

_ARRAY = "__array__"
_TUPLE = "__tuple__"
_MARKS = frozenset({_ARRAY, _TUPLE})
_DTYPES = frozenset(np.dtype(kind).str for kind in np.typecodes["AllInteger"] + "efd?")


def encode(value: Any, what: str) -> bytes:
    """Encode ``value`` as JSON that :func:`decode_object` decodes to an equal value.

    Args:
        value: None, bool, int, float, str, and arrays, lists, tuples and string-keyed dicts of these.
        what: name of the file, for the error.

    Raises:
        FormatError: a part of the value has another type; the error names it.
    """
    return json.dumps(_plain(value, what), indent=1, sort_keys=True).encode() + b"\n"


def decode_object(raw: bytes, where: str) -> dict[str, Any]:
    """Decode the result of :func:`encode` of a dict.

    Args:
        raw: the JSON text.
        where: the file, for the error.

    Raises:
        FormatError: the text is not the result of :func:`encode` of a dict.
    """
    try:
        value = _rich(parse_json(raw))
        if not isinstance(value, dict):
            raise ValueError(f"it is a {type(value).__name__}, not an object")
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise FormatError(
            "The Trainer's state cannot be read.",
            where=where,
            evidence=[f"{type(error).__name__}: {error}"],
            next_step="The file was changed after it was written; resume from another checkpoint.",
        ) from error
    return value


def readable(value: Any) -> Any:
    """Return ``value`` as JSON for display only: values without a JSON type become text."""
    if isinstance(value, Mapping):
        return {str(key): readable(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [readable(one) for one in value]
    if isinstance(value, (np.integer, np.floating, np.bool_)):
        return value.item()
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _plain(value: Any, place: str) -> Any:
    """Return the value in JSON types."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (np.integer, np.floating, np.bool_)):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "iufb":
        return {_ARRAY: value.dtype.str, "shape": list(value.shape), "values": value.ravel().tolist()}
    if type(value) is tuple:
        return {_TUPLE: [_plain(one, f"{place}[{index}]") for index, one in enumerate(value)]}
    if type(value) is list:
        return [_plain(one, f"{place}[{index}]") for index, one in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value) and not _MARKS & value.keys():
        return {key: _plain(one, f"{place}.{key}") for key, one in value.items()}
    raise FormatError(
        f"{place} is a {type(value).__name__}, which cannot be saved as JSON.",
        where=place,
        next_step="Keep numbers, strings, lists and dicts with string keys in the Trainer's state.",
    )


def _rich(value: Any) -> Any:
    if isinstance(value, list):
        return [_rich(one) for one in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        return _array(value)
    if _TUPLE in value:
        if value.keys() != {_TUPLE} or not isinstance(value[_TUPLE], list):
            raise ValueError("it contains a tuple whose value is not a list")
        return tuple(_rich(one) for one in value[_TUPLE])
    return {key: _rich(one) for key, one in value.items()}


def _array(value: dict[str, Any]) -> np.ndarray[Any, Any]:
    # Checked before numpy sees it, because numpy accepts dtypes such as a string of a gigabyte.
    if value.keys() != {_ARRAY, "shape", "values"} or value[_ARRAY] not in _DTYPES:
        raise ValueError("it contains an array of an unknown kind")
    array = np.array(value["values"], dtype=np.dtype(value[_ARRAY]))
    if min(value["shape"], default=0) < 0 or math.prod(value["shape"]) != array.size:
        raise ValueError(f"it contains an array of {array.size} numbers with a different shape")
    return array.reshape(value["shape"])
