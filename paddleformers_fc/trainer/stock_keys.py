"""A cached table of the keys, types, choices and defaults of PaddleFormers' command line.

An unknown key or an invalid value would fail only in the ranks, after half a minute of imports. So a child process
imports PaddleFormers' parser once and writes the table to the user's cache, and later checks read it there. The cache
key covers the sources of PaddleFormers' arguments and of this module, and the path of PaddleFleet. Ranks have imported
the parser anyway and use :func:`describe`.

Time: 5 s to build a table, 1 ms to read a cached one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from enum import Enum
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from paddleformers_fc.errors import OptionError
from paddleformers_fc.text import likely_meant
from paddleformers_fc.trainer.conflicts import spelled
from paddleformers_fc.trainer.options import FIELD_NAMES
from paddleformers_fc.upstream import FORMERS
from paddleformers_fc.upstream.hooks import PADDLEFLEET

_SOURCES = (
    "cli/hparams/*.py",
    "trainer/argparser.py",
    "trainer/training_args.py",
    "trainer/trainer_utils.py",
    "transformers/configuration_utils.py",
)
_ENUMERATIONS = {"lr_scheduler_type": "SchedulerType", "optim": "OptimizerNames", "sharding": "ShardingOption"}
"""Keys that PaddleFormers converts to these enumerations after parsing; its parser does not know their values."""

_WORDS = {
    "stage": ("SFT", "PT", "DPO", "VL-SFT", "VL-PT", "VL-DPO", "dsv3_pretrain", "ernie_pretrain", "auto-parallel"),
    "fine_tuning": ("LoRA", "full"),
    "compute_type": ("bf16", "fp16", "float32", "wint8", "wint4", "wint4/8", "nf4"),
}
"""Values of keys without an enumeration. PaddleFormers trains without adapters for any other ``fine_tuning``."""

_ANY_CASE, _SEVERAL = "fine_tuning", "sharding"
_ALSO_SWITCHES = ("resume_from_checkpoint", _SEVERAL)
"""Text keys for which PaddleFormers also accepts true and false."""

_ANY, _NULL = "", type(None)
_CONVERTERS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "int": ("a whole number", (str, bool, float, _NULL)),
    "float": ("a number", (str, bool, _NULL)),
    "strtobool": ("true or false", (str,)),
    "str": ("text", (bool,)),
}
"""By converter of the parser: a description of its values for messages, and types of values that PaddleFormers rejects
or silently misreads, such as the text ``false`` for a switch."""

ADVICE = (
    "Write numbers, true and false without quotes, and texts such as no with quotes: YAML reads no as false. In a YAML "
    'file a number with an exponent needs a dot and a sign, such as 1.0e-5. sharding: "" means none.'
)


class StockKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """A key of PaddleFormers.

    Args:
        kind: a key of :data:`_CONVERTERS`; empty if values are not checked here.
        words: the accepted texts; empty for any.
        default: the value of a missing key, if it is a YAML scalar.
    """

    kind: str = _ANY
    words: tuple[str, ...] = ()
    default: bool | int | float | str | None = None

    def fault(self, key: str, value: Any, is_extended: bool) -> str:
        """Return the fault of a value of this key; empty if it is valid."""
        text = repr(value) if isinstance(value, str | list) else spelled(value)
        if self.words and not is_extended:
            if self._is_word(key, value):
                return ""
            meant = likely_meant(str(value), self.words)
            return f"{text} is none of {', '.join(self.words)}{meant and f'; {meant}'}"
        meaning, rejected = _CONVERTERS.get(self.kind, ("", ()))
        is_absent = self.default is None and value in (None, False)
        if type(value) not in rejected or is_absent or text.lower() == "'true'":
            return ""
        return f"{text} is not {meaning}"

    def _is_word(self, key: str, value: Any) -> bool:
        if not isinstance(value, str):
            return key == _SEVERAL and (value == [] or isinstance(value, bool))
        if key == _ANY_CASE:
            return value.lower() in map(str.lower, self.words)
        return all(word in self.words for word in (value.split() if key == _SEVERAL else [value]))


class StockTable(msgspec.Struct, frozen=True):
    """The training arguments of PaddleFormers' command line; empty if they cannot be read.

    Args:
        keys: the keys by name.
        without_fleet: model types whose classes cannot be imported without PaddleFleet.
    """

    keys: Mapping[str, StockKey] = {}
    without_fleet: tuple[str, ...] = ()


def check_values(settings: Mapping[str, Any], keys: Mapping[str, StockKey], is_extended: bool) -> None:
    """Check a configuration for values that PaddleFormers would reject in every rank or misread.

    Args:
        settings: the keys and values of a configuration.
        keys: PaddleFormers' keys; this package's own keys are checked elsewhere.
        is_extended: whether a user's registration file may add accepted texts, such as stages.
    Raises:
        OptionError: with all invalid values.
    """
    given = {key: value for key, value in settings.items() if key in keys and key not in FIELD_NAMES}
    faults = [f"{key}: {fault}" for key, value in given.items() if (fault := keys[key].fault(key, value, is_extended))]
    if faults:
        raise OptionError(
            "Invalid value in the configuration.",
            where="training arguments",
            evidence=faults,
            next_step=ADVICE,
        )


@cache
def stock_table() -> StockTable:
    """Return the table of the installed PaddleFormers, from the cache or from its parser."""
    name, root = _cache_name(), Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "paddleformers_fc").expanduser()
    if not name:
        return StockTable()
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((root / name).read_bytes(), type=StockTable)
    child = subprocess.run([sys.executable, "-m", __name__], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    try:
        table = msgspec.json.decode(child.stdout, type=StockTable)
    except msgspec.MsgspecError:
        return StockTable()
    partial = root / f"{name}.{os.getpid()}"
    with suppress(OSError):  # Without a writable cache, each process builds the table.
        root.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(child.stdout)
        partial.replace(root / name)
    return table


def _cache_name() -> str:
    """Return the file name of the table in the cache; empty if PaddleFormers is not installed."""
    spec, fleet = map(find_spec, (FORMERS, PADDLEFLEET))
    if spec is None or spec.origin is None:
        return ""
    root = Path(spec.origin).parent
    sources = [Path(__file__), *(path for pattern in _SOURCES for path in sorted(root.glob(pattern)))]
    facts = [(str(path), (status := path.stat()).st_size, status.st_mtime_ns) for path in sources]
    return f"keys-{xxhash.xxh3_128_hexdigest(repr((facts, fleet and fleet.origin)).encode())}.json"


def describe(parser: Any) -> dict[str, StockKey]:
    """Return the keys of a parser of PaddleFormers.

    Args:
        parser: a ``PdArgumentParser``.
    """
    trainer_utils = import_module(f"{FORMERS}.trainer.trainer_utils")
    kinds = {key: getattr(trainer_utils, name, ()) for key, name in _ENUMERATIONS.items()}
    words = {**_WORDS, **{key: tuple(one.value for one in kind) for key, kind in kinds.items()}}
    keys: dict[str, StockKey] = {}
    for action in parser._actions:
        name, default = getattr(action.type, "__name__", _ANY), action.default
        default = default.value if isinstance(default, Enum) else default
        kind = "float" if name == "int" and isinstance(default, float) else name
        is_checked = kind in _CONVERTERS and action.nargs in (None, "?") and action.dest not in _ALSO_SWITCHES
        if name and action.dest not in keys:  # Skips the "--no_..." of a switch, which has the same destination.
            keys[action.dest] = StockKey(
                kind if is_checked else _ANY,
                words.get(action.dest) or tuple(action.choices or ()),
                default if isinstance(default, bool | int | float | str) else None,
            )
    return keys


def _build_table() -> StockTable:
    """Build the table from PaddleFormers' parser, and find out which declared models need PaddleFleet."""
    from paddleformers_fc.families.registry import OWN

    parser = import_module(f"{FORMERS}.cli.hparams.parser")
    missing = []
    for model_type in OWN:
        try:
            import_module(f"{FORMERS}.transformers.{model_type}.modeling")
        except Exception as error:  # A module may raise anything when it is imported.
            if PADDLEFLEET in f"{error} {error.__cause__}":
                missing.append(model_type)
    return StockTable(describe(parser.PdArgumentParser(parser._TRAIN_ARGS)), tuple(missing))


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):  # Imports print to stdout.
        built = _build_table()
    sys.stdout.buffer.write(msgspec.json.encode(built))
