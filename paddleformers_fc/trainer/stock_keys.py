"""The keys that PaddleFormers' command line accepts, with their types, words and defaults, as its own parser has them.

An unknown key or a wrong value fails in every rank, after half a minute of imports. A process of its own therefore
imports the parser once and writes the table to the user's cache; whoever checks settings reads the table. A file of the
cache belongs to the source of PaddleFormers' arguments, of PaddleFleet and of this module, whatever their versions are.
In the ranks the parser is there already (:func:`describe`).

Time: 5 s for a new table, 1 ms for one that is cached.
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
from paddleformers_fc.trainer.options import FIELD_NAMES, spelled
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
"""Keys whose text PaddleFormers converts to members of these classes, which its parser does not know."""

_WORDS = {
    "stage": ("SFT", "PT", "DPO", "VL-SFT", "VL-PT", "VL-DPO", "dsv3_pretrain", "ernie_pretrain", "auto-parallel"),
    "fine_tuning": ("LoRA", "full"),
    "compute_type": ("bf16", "fp16", "float32", "wint8", "wint4", "wint4/8", "nf4"),
}
"""Values of keys without an enumeration. PaddleFormers trains without adapters for any other ``fine_tuning``."""

_ANY_CASE, _SEVERAL = "fine_tuning", "sharding"
_ALSO_SWITCHES = ("resume_from_checkpoint", _SEVERAL)
"""Texts in place of which PaddleFormers accepts true and false."""

_ANY, _NULL = "", type(None)
_MEANING = {"int": "a whole number", "float": "a number", "strtobool": "true or false", "str": "text"}
"""Converters of the parser, and the values that they mean."""
_REFUSED = {
    "int": (str, bool, float, _NULL),
    "float": (str, bool, _NULL),
    "strtobool": (str,),
    "str": (bool,),
}
"""The types of values that every rank refuses, or that silently mean something else, such as the text ``false``."""

ADVICE = (
    "Write numbers, true and false without quotes, and texts such as no with them: YAML reads no as false. In a YAML "
    'file a number with an exponent needs a dot and a sign, such as 1.0e-5. sharding: "" is none.'
)


class StockKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """A key of PaddleFormers.

    Args:
        kind: a key of :data:`_MEANING`; empty if values of any kind are left to PaddleFormers.
        words: the texts that are accepted; empty for any.
        default: the value of a missing key, if it is one of YAML's scalars.
    """

    kind: str = _ANY
    words: tuple[str, ...] = ()
    default: bool | int | float | str | None = None

    def fault(self, key: str, value: Any, is_extended: bool) -> str:
        """Return what is wrong with a value of this key; empty if nothing is."""
        text = repr(value) if isinstance(value, str | list) else spelled(value)
        if self.words and not is_extended:
            if self._is_word(key, value):
                return ""
            meant = likely_meant(str(value), self.words)
            return f"{text} is none of {', '.join(self.words)}{meant and f'; {meant}'}"
        is_absent = self.default is None and value in (None, False)
        if type(value) not in _REFUSED.get(self.kind, ()) or is_absent or text.lower() == "'true'":
            return ""
        return f"{text} is not {_MEANING[self.kind]}"

    def _is_word(self, key: str, value: Any) -> bool:
        if not isinstance(value, str):
            return key == _SEVERAL and (value == [] or isinstance(value, bool))
        if key == _ANY_CASE:
            return value.lower() in map(str.lower, self.words)
        return all(word in self.words for word in (value.split() if key == _SEVERAL else [value]))


class StockTable(msgspec.Struct, frozen=True):
    """The arguments of a training by PaddleFormers' command line; empty if they cannot be read.

    Args:
        keys: by name.
        without_fleet: types of models whose classes cannot be imported because PaddleFleet is missing.
    """

    keys: Mapping[str, StockKey] = {}
    without_fleet: tuple[str, ...] = ()


def check_values(settings: Mapping[str, Any], keys: Mapping[str, StockKey], is_extended: bool) -> None:
    """Refuse values that PaddleFormers would refuse in every rank, or read as others.

    Args:
        settings: the keys of a configuration.
        keys: those of PaddleFormers; the keys of this package have checks of their own.
        is_extended: whether a file of the user may add words, such as stages.
    Raises:
        OptionError: with all wrong values.
    """
    given = {key: value for key, value in settings.items() if key in keys and key not in FIELD_NAMES}
    faults = [f"{key}: {fault}" for key, value in given.items() if (fault := keys[key].fault(key, value, is_extended))]
    if faults:
        raise OptionError(
            "A value of the configuration is not one of its key.",
            where="training arguments",
            evidence=faults,
            next_step=ADVICE,
        )


@cache
def stock_table() -> StockTable:
    """Return the table of the installed PaddleFormers, from the cache or by its parser."""
    name, root = _name(), Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "paddleformers_fc").expanduser()
    if not name:
        return StockTable()
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((root / name).read_bytes(), type=StockTable)
    made = subprocess.run([sys.executable, "-m", __name__], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    try:
        table = msgspec.json.decode(made.stdout, type=StockTable)
    except msgspec.MsgspecError:
        return StockTable()
    partial = root / f"{name}.{os.getpid()}"
    with suppress(OSError):  # Without a place for it, the next process makes another one.
        root.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(made.stdout)
        partial.replace(root / name)
    return table


def _name() -> str:
    """Return the name of the table in the cache; empty if PaddleFormers is not installed."""
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
        is_checked = kind in _REFUSED and action.nargs in (None, "?") and action.dest not in _ALSO_SWITCHES
        if name and action.dest not in keys:  # The first of a switch; "--no_..." has the same destination.
            keys[action.dest] = StockKey(
                kind if is_checked else _ANY,
                words.get(action.dest) or tuple(action.choices or ()),
                default if isinstance(default, bool | int | float | str) else None,
            )
    return keys


def _made_table() -> StockTable:
    """Import PaddleFormers' parser, and the classes of the models that are declared here."""
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
    with redirect_stdout(sys.stderr):  # Imports print.
        made = _made_table()
    sys.stdout.buffer.write(msgspec.json.encode(made))
