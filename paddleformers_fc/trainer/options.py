"""The options of a run: defaults, ranges, and when they are checked.

The options, and conflicts with PaddleFormers' options (:mod:`.conflicts`), are checked once, when the training
arguments are constructed and before a process group exists. The fields are a plain dataclass, which :mod:`.entry` mixes
into PaddleFormers' classes.

The module also stores which package reads open weights, because ``from_pretrained`` runs before a Trainer exists. The
training arguments that were created last decide: this package if their ``flex_checkpoint`` is true, else PaddleFormers.
Before the first arguments, :func:`.entry.install` chooses this package.

This module does not import Paddle.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paddleformers_fc.api_arguments import MOST_THREADS, Kind
from paddleformers_fc.errors import OptionError
from paddleformers_fc.formats.checkpoint import TIED_WAYS
from paddleformers_fc.storage.manifest import LEVELS
from paddleformers_fc.storage.paths import RemotePath, expand_user, mask_credentials, parse_store, require_local
from paddleformers_fc.text import likely_meant
from paddleformers_fc.trainer.conflicts import (
    CONFLICTS,
    DEVELOPMENT,
    SEMI_AUTO_CONFLICTS,
    STAGE_CONFLICTS,
    WITHOUT_EFFECT,
    check_conflicts,
    spelled,
)

OFF = "off"
SAVE_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR2", "SIGHUP")
"""Values of ``flex_save_on_signal``, besides ``off``."""

_DUMP_SIGNAL = "SIGUSR1"
_MAY_BE_OFF = ("flex_verify", "flex_check_replicas", "flex_save_on_signal")
"""Keys that accept ``off``, which YAML reads as false if it has no quotes."""

NO_PLACE = "none"
"""The value of ``flex_upload`` for no uploads, and of ``flex_local_dir`` for no local tier."""

_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]+)?)\s*([KMGT]?)(I?)B\s*", re.IGNORECASE)
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SMALLEST_SIZE = 10**6
_LONGEST_TIMEOUT = 7 * 24 * 3600
_MOST_STEPS = 10**9


def _described(help: str, default: Any) -> dict[str, str]:
    """Return the metadata of a field, whose help ends with its default; no value is spelled none."""
    return {"help": f"{help} Default: {spelled(default) if default or default is False else NO_PLACE}."}


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata=_described(help, default))


@dataclass
class FlexFields:
    """The options that this package adds to PaddleFormers' training arguments."""

    def __new__(cls, *_: Any, **given: Any) -> FlexFields:
        """Check for removed options and for keys of later versions, which a dataclass only calls unexpected.

        Raises:
            OptionError: with all such keys.
        """
        if not REMOVED.isdisjoint(given):
            raise unknown_keys(REMOVED & given.keys(), (), {})
        if given.get("flex_checkpoint"):
            check_conflicts(SimpleNamespace(**given), DEVELOPMENT)
        return super().__new__(cls)

    flex_checkpoint: bool = _option(
        False, "Save, resume and export through paddleformers_fc: any parallel layout can resume a checkpoint."
    )
    flex_verify: str = _option(
        "full",
        "How thoroughly to check what is read: off, size (presence and size of every file, and the checksums of "
        "metadata files) or full (also the checksums of all tensors, while they are read).",
    )
    flex_threads: int = _option(4, "Threads per process for reading and verifying, 1 to 256.")
    flex_read: str = _option(
        "auto",
        "How replicas read what they share: each (everything), once (each reads a share and sends it to the others), "
        "or auto (once if they are on at least 4 hosts).",
    )
    flex_check_replicas: str = _option(
        "warn",
        "What to do if replicas differ at save time: off (do not compare), warn (in the log and in the checkpoint) or "
        "refuse.",
    )
    flex_tied: str = _option(
        "refuse",
        "Which copy to read or export if the stored copies of a tied tensor differ, or those of tensor-parallel ranks: "
        "refuse (none), first or last. For the checkpoint that resume_from_checkpoint names.",
    )
    flex_allow_config_changes: list[str] = field(
        default_factory=list,
        metadata=_described(
            "Configuration keys that may change on resume although they change the meaning of weights, such as "
            "[rope_theta].",
            [],
        ),
    )
    flex_allow_casts: bool = _option(
        False,
        "Allow a different precision on resume, float32 or bfloat16: weights are read from stored master weights, and "
        "missing master weights are filled from float32 weights.",
    )
    flex_timeout: int = _option(1800, "How many seconds ranks wait for each other, 1 to 604800.")
    flex_max_shard_size: str = _option(
        "5GB",
        "Largest file of an export, in bytes of tensors, such as 500MB, 5GB or 4GiB; at least 1MB. A larger tensor "
        "gets a file of its own.",
    )
    flex_keep_every: int = _option(
        0, "Keep every checkpoint whose step is a multiple of this number, beyond save_total_limit."
    )
    flex_local_dir: str = _option(
        "none",
        "Directory on every node's disk or in its memory, such as /dev/shm/run, for frequent checkpoints; the newest "
        "two are kept.",
    )
    flex_local_steps: int = _option(0, "Save to flex_local_dir every N steps, except at steps that save to output_dir.")
    flex_upload: str = _option(
        "none",
        "URL of an object store, such as s3://bucket/run, to which every checkpoint is uploaded in the background.",
    )
    flex_async_save: bool = _option(
        False, "Save asynchronously: training waits only for a copy of this process's shards; a thread writes them."
    )
    use_flex_async_save: bool = _option(
        False, "Another name of flex_async_save, used by PaddleFormers' development branch."
    )
    flex_stream: dict[str, Any] = field(
        default_factory=dict,
        metadata=_described(
            'Pass the weights to a function every N steps, such as {"steps": 10, "to": "my_engine.push"}. The first '
            "rank calls it with the step and an iterator over names and complete tensors.",
            {},
        ),
    )
    flex_save_on_signal: str = _option(
        SAVE_SIGNALS[0],
        "On this signal, save on all processes at the same step and end with code 85: SIGTERM, SIGINT, SIGUSR2, "
        "SIGHUP, or off.",
    )
    flex_ema_decay: float = _option(
        0.0,
        "Decay of an exponential moving average of the trained weights in host memory, at least 0 and less than 1; 0 "
        "for no average.",
    )
    flex_ema_interval: int = _option(1, "Update the average every N optimizer steps.")
    flex_ema_evaluate: bool = _option(False, "Evaluate with the averaged weights.")
    flex_unknown_versions: str = _option(
        "refuse",
        "What to do with a version of Paddle or PaddleFormers that this package is not tested with: refuse or warn. "
        "Names and signatures that this package depends on are checked either way.",
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in _MAY_BE_OFF:
            if getattr(self, name) is False:
                setattr(self, name, OFF)
        if self.flex_checkpoint:
            _move_aliases(self)
            if getattr(self, "enable_auto_parallel", False):
                # Otherwise PaddleFormers would read the checkpoint to resume as open weights.
                self.convert_from_hf = False
        parent = getattr(super(), "__post_init__", None)
        if parent is not None:
            parent()


REMOVED = frozenset(
    {
        *("flex_accept_model", "flex_async_depth", "flex_async_memory", "flex_ema_bias_correction"),
        *("flex_ema_start_step", "flex_max_file_size", "flex_plan_cache", "flex_staging_size"),
    }
)
"""Keys of earlier versions whose values are constants now."""

FIELD_NAMES = tuple(one.name for one in fields(FlexFields))
"""The keys that this package adds."""

_DEFAULTS = {one.name: one.default for one in fields(FlexFields)}


def _one_of(*ways: str) -> Kind:
    return Kind(f"one of {', '.join(ways)}", lambda value: value in ways or (value is False and OFF in ways))


def _whole(first: int, last: int) -> Kind:
    return Kind(f"a whole number from {first} to {last}", lambda value: type(value) is int and first <= value <= last)


_DECAY = Kind(
    "a number of at least 0 and below 1",
    lambda value: isinstance(value, float | int) and not isinstance(value, bool) and 0 <= value < 1,
)
_KINDS = {
    **dict.fromkeys(
        (name for name, default in _DEFAULTS.items() if isinstance(default, bool)),
        Kind("true or false", lambda value: isinstance(value, bool)),
    ),
    "flex_verify": _one_of(*LEVELS),
    "flex_check_replicas": _one_of(OFF, "warn", "refuse"),
    "flex_save_on_signal": _one_of(OFF, *SAVE_SIGNALS),
    "flex_read": _one_of("auto", "each", "once"),
    "flex_tied": _one_of(*TIED_WAYS),
    "flex_unknown_versions": _one_of("refuse", "warn"),
    "flex_threads": _whole(1, MOST_THREADS),
    "flex_timeout": _whole(1, _LONGEST_TIMEOUT),
    "flex_keep_every": _whole(0, _MOST_STEPS),
    "flex_local_steps": _whole(0, _MOST_STEPS),
    "flex_ema_interval": _whole(1, _MOST_STEPS),
    "zcc_ema_interval": _whole(1, _MOST_STEPS),
    "flex_ema_decay": _DECAY,
    "zcc_save_ema_coef": _DECAY,
    "flex_allow_config_changes": Kind(
        "a list of keys such as [rope_theta]",
        lambda value: isinstance(value, list) and all(isinstance(key, str) and key for key in value),
    ),
}
"""The valid values of keys, also of PaddleFormers' keys that are moved to ours."""

_EMA_ALIASES = {"zcc_save_ema_coef": "flex_ema_decay", "zcc_ema_interval": "flex_ema_interval"}
"""PaddleFormers' keys of a moving average, and this package's keys with the same meaning."""

_ALIASES = {**_EMA_ALIASES, "use_flex_async_save": "flex_async_save"}


def _move_aliases(options: Any) -> None:
    """Move the values of PaddleFormers' keys to the keys of this package, so that its own mechanisms do not run.

    With ``zcc_save_ema_coef``, its Trainer would add an averaging callback that rejects intervals that do not divide
    ``save_steps``. With ``use_flex_async_save``, its development branch would save on its own thread.
    """
    options.flex_async_save |= options.use_flex_async_save
    options.use_flex_async_save = False
    for theirs, ours in _EMA_ALIASES.items():
        default = _DEFAULTS[ours]
        if hasattr(options, theirs):
            if getattr(options, theirs) not in (None, default):
                setattr(options, ours, getattr(options, theirs))
            setattr(options, theirs, default or None)


def check_options(options: Any) -> None:
    """Check the ranges of our options and, with ``flex_checkpoint``, conflicts with PaddleFormers' options.

    Args:
        options: an object with the attributes of :class:`FlexFields` and any of PaddleFormers' options.

    Raises:
        OptionError: with every fault found; or ``output_dir`` is empty or a URL.
        MappingError: ``aoa_config`` contains no statements.
    """
    faults = list(_range_faults(options))
    if faults:
        raise OptionError(
            "Invalid value of an option of paddleformers_fc.",
            where="training arguments",
            evidence=faults,
            next_step="Correct the value, or remove the key to use its default.",
        )
    if not options.flex_checkpoint:
        return
    output_dir = getattr(options, "output_dir", None)
    if isinstance(output_dir, str | os.PathLike):
        require_local(output_dir, "A checkpoint")
        _check_uploads_elsewhere(options, expand_user(output_dir))
        _check_tiers_separate(options, expand_user(output_dir))
    if getattr(options, "aoa_config", None) is not None:
        from paddleformers_fc.aoa import read_config  # Most runs have no statements.

        read_config(options.aoa_config)
    semi_auto = SEMI_AUTO_CONFLICTS if getattr(options, "enable_auto_parallel", False) else ()
    check_conflicts(options, (*CONFLICTS, *semi_auto))
    _check_one_average(options)
    _check_saves(options)


def _check_one_average(options: Any) -> None:
    """Check that PaddleFormers' keys of a moving average agree with ours.

    Raises:
        OptionError: with both keys and values.
    """
    pairs = [
        (theirs, getattr(options, theirs, None), ours, getattr(options, ours)) for theirs, ours in _EMA_ALIASES.items()
    ]
    _check_one_value(
        (theirs, one, ours, other)
        for theirs, one, ours, other in pairs
        if one not in (None, _DEFAULTS[ours], other) and other != _DEFAULTS[ours]
    )


def _check_saves(options: Any) -> None:
    """Check that ``save_steps`` lets PaddleFormers save any checkpoint; it reports nothing if not.

    Raises:
        OptionError: with the number.
    """
    strategy, steps = getattr(options, "save_strategy", "steps"), getattr(options, "save_steps", 1)
    is_saved = getattr(strategy, "value", strategy) != "steps" or getattr(options, "save_last_step", False)
    if isinstance(steps, int) and steps < 1 and not is_saved:
        raise OptionError(
            "flex_checkpoint: true is set, and no step would be saved.",
            where="training arguments",
            evidence=[f"save_steps: {steps} with save_strategy: steps"],
            next_step='Set save_steps to 1 or more; or save_strategy: epoch, or "no" for a run without checkpoints.',
        )


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check a configuration for keys that bypass this package, and for aliases of one key with different values.

    Only a configuration shows which values were set, and may contain keys of later versions of PaddleFormers.

    Args:
        settings: the keys of a configuration.

    Raises:
        OptionError: with every conflict.
    """
    if not settings.get("flex_checkpoint"):
        return
    check_conflicts(SimpleNamespace(**settings), (*STAGE_CONFLICTS, *DEVELOPMENT))
    pairs = [(theirs, settings.get(theirs), ours, settings.get(ours)) for theirs, ours in _ALIASES.items()]
    _check_one_value(pair for pair in pairs if None not in pair and pair[1] != pair[3])


def _check_one_value(pairs: Iterable[tuple[str, Any, str, Any]]) -> None:
    """Check that there are no pairs of keys that set one property to different values.

    Raises:
        OptionError: with all pairs.
    """
    faults = [f"{theirs}: {spelled(one)} and {ours}: {spelled(other)}" for theirs, one, ours, other in pairs]
    if faults:
        raise OptionError(
            "Two keys set the same property to different values.",
            where="training arguments",
            evidence=faults,
            next_step="Remove one of the two keys.",
        )


def unknown_keys(unknown: Iterable[str], stock: Iterable[str], places: Mapping[str, str]) -> OptionError:
    """Return the error about keys that are unknown to PaddleFormers and this package.

    Args:
        unknown: the keys.
        stock: the keys of PaddleFormers.
        places: file and line of the keys that have one.
    """
    names, known = sorted(unknown), (*FIELD_NAMES, *sorted(stock))
    lines = [(name, _suggestion(name, known)) for name in names]
    correct = f"Correct the key or remove it. This package has {', '.join(FIELD_NAMES)}."
    remove = "Remove the key; CHANGELOG.md lists what replaces it."
    return OptionError(
        "Unknown key in the configuration.",
        where="training arguments",
        evidence=[f"{places[name]}: {line}" if name in places else line for name, line in lines],
        next_step=remove if REMOVED.issuperset(names) else correct,
    )


def _suggestion(key: str, known: Sequence[str]) -> str:
    if key in REMOVED:
        return f"{key}: removed: the value is constant now"
    # PaddleNLP's tensor_parallel_degree is tensor_model_parallel_size here, which other keys resemble more.
    sizes = [key.replace("parallel_degree", size) for size in ("model_parallel_size", "parallel_size")]
    meant = likely_meant(next((name for name in sizes if name in known), key), known)
    return f"{key}: {meant}" if meant else key


def without_effect(options: Any) -> list[str]:
    """Return one line for every option without effect under ``flex_checkpoint``.

    Args:
        options: as for :func:`check_options`, already checked.
    """
    # PaddleFleet has both keys: its save_to_hf requests exports, which this package writes.
    effective = "save_to_hf" if hasattr(options, "save_safetensors") else ""
    return [one.line(options) for one in WITHOUT_EFFECT if one.key != effective and one.holds(options)]


def parse_size(text: str) -> int:
    """Return a number of bytes from ``"5GB"`` (powers of 1000) or ``"5GiB"`` (powers of 1024).

    Raises:
        OptionError: the text is not a size.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise OptionError(
            f"{text!r} is not a size{_missing_unit(text)}.",
            next_step="Write a number and a unit, such as 500MB, 5GB or 4GiB.",
        )
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2].upper()])


def shard_bytes(size: str | float) -> int:
    """Return the maximum bytes of an exported file.

    Args:
        size: a text as for :func:`parse_size`, or a number of bytes.
    Raises:
        OptionError: the size is not a text or a finite number, or is less than one byte.
    """
    if isinstance(size, str):
        count: float = parse_size(size)
    else:
        count = size if isinstance(size, Real) and not isinstance(size, bool) else 0
    if not 1 <= count < math.inf:
        raise OptionError(
            f"max_shard_size: {size!r} is not a number of bytes of at least 1.",
            next_step="Set a size such as 500MB, 5GB or 4GiB, or a number of bytes.",
        )
    return int(count)


def is_active(options: Any) -> bool:
    """Return whether training arguments enable this package."""
    return bool(getattr(options, "flex_checkpoint", False))


def save_signal(options: Any) -> str | None:
    """Return the name of the signal on which a run saves and ends; None if it handles none."""
    named = options.flex_save_on_signal
    return None if named in (False, OFF) or not options.flex_checkpoint else str(named)


def _range_faults(options: Any) -> list[str]:
    faults = []
    for name, kind in _KINDS.items():
        value = getattr(options, name, None)
        is_set = name in FIELD_NAMES or (value is not None and options.flex_checkpoint)
        if is_set and not kind.accepts(value):
            is_reserved = name == "flex_save_on_signal" and value == _DUMP_SIGNAL
            why = ": ranks write their stacks on it" if is_reserved else ""
            faults.append(f"{name}: {value!r} is not {kind.expected}{why}")
    faults.extend(f"flex_max_shard_size: {fault}" for fault in _size_faults(options.flex_max_shard_size))
    faults.extend(_stream_faults(options.flex_stream))
    faults.extend(_upload_faults(options.flex_upload))
    faults.extend(_local_faults(options))
    return faults


def _check_uploads_elsewhere(options: Any, output_dir: str) -> None:
    """Check that checkpoints are not uploaded to the directory in which they are saved.

    Raises:
        OptionError: they are.
    """
    url = upload_url(options)
    if url is not None and os.path.realpath(url.url.partition("://")[2]) == os.path.realpath(output_dir):
        raise OptionError(
            "flex_upload and output_dir are one directory.",
            where="training arguments",
            evidence=[f"flex_upload: {url}", f"output_dir: {output_dir}"],
            next_step="Name another directory in one of them.",
        )


def _check_tiers_separate(options: Any, output_dir: str) -> None:
    """Check that neither the local tier nor ``output_dir`` contains the other: each deletes its old checkpoints.

    Raises:
        OptionError: with both directories.
    """
    local = local_dir(options)
    if local is None:
        return
    own, other = Path(os.path.realpath(local)), Path(os.path.realpath(output_dir))
    if own == other or own in other.parents or other in own.parents:
        raise OptionError(
            "flex_local_dir and output_dir are one directory, or one is inside the other.",
            where="training arguments",
            evidence=[f"flex_local_dir: {local}", f"output_dir: {output_dir}"],
            next_step="Name a directory of its own in flex_local_dir, on a disk or in memory of each node.",
        )


def local_dir(options: Any) -> Path | None:
    """Return the directory of the local tier; None without one.

    Raises:
        OptionError: it is a URL.
    """
    if options.flex_local_dir == NO_PLACE or not options.flex_checkpoint:
        return None
    return require_local(expand_user(options.flex_local_dir), "A local checkpoint")


def upload_url(options: Any) -> RemotePath | None:
    """Return the URL to which checkpoints are uploaded; None if they are not."""
    if options.flex_upload == NO_PLACE:
        return None
    return parse_store(options.flex_upload, "An upload")


def _local_faults(options: Any) -> list[str]:
    directory, steps = options.flex_local_dir, options.flex_local_steps
    if not isinstance(directory, str) or not directory:
        return [f"flex_local_dir: {directory!r} is not a directory such as /dev/shm/run"]
    if directory != NO_PLACE and steps == 0:
        return [f"flex_local_dir: {directory} needs flex_local_steps of at least 1, the steps between two saves there"]
    if directory == NO_PLACE and type(steps) is int and steps > 0:
        return [f"flex_local_steps: {steps!r} needs flex_local_dir, the directory of these saves"]
    return []


def _stream_faults(value: Any) -> list[str]:
    if value == {}:
        return []
    steps, to = (value.get("steps"), value.get("to")) if isinstance(value, dict) and len(value) == 2 else (0, "")
    if type(steps) is int and 1 <= steps <= _MOST_STEPS and isinstance(to, str) and _DOTTED.fullmatch(to):
        return []
    return [
        f"flex_stream: {value!r} is not a mapping such as {{steps: 10, to: my_engine.push}}, with steps from 1 and the "
        "dotted name of a function"
    ]


def _upload_faults(value: Any) -> list[str]:
    if value == NO_PLACE:
        return []
    if not isinstance(value, str) or not value:
        return [f"flex_upload: {value!r} is not a URL such as s3://bucket/run"]
    if mask_credentials(value) != value:
        return [f"flex_upload: {mask_credentials(value)} contains credentials; fsspec's configuration has them"]
    try:
        parse_store(value, "An upload")
    except OptionError as error:
        return [f"flex_upload: {error.what}"]
    return []


def _size_faults(text: Any) -> list[str]:
    if not isinstance(text, str) or _SIZE.fullmatch(text) is None:
        return [f"{text!r} is not a size such as 500MB, 5GB or 4GiB{_missing_unit(text)}"]
    if parse_size(text) < _SMALLEST_SIZE:
        return [f"{text!r} is smaller than 1MB"]
    return []


def _missing_unit(text: Any) -> str:
    """Return a remark if a size is a number without a unit."""
    return ": it has no unit" if re.fullmatch(r"\s*[0-9.]+\s*", str(text)) else ""


@dataclass
class _Reader:
    """Which package reads open weights.

    Args:
        options: the options with which this package reads; None if PaddleFormers reads.
        by_arguments: whether training arguments have decided it.
    """

    options: FlexFields | None = None
    by_arguments: bool = False


_reader = _Reader()


def reader_options() -> FlexFields | None:
    """Return the options with which this package reads open weights; None if PaddleFormers reads them."""
    return _reader.options


def follow(arguments: FlexFields) -> None:
    """Choose the reader of open weights by these training arguments."""
    _reader.options = arguments if arguments.flex_checkpoint else None
    _reader.by_arguments = True


def read_by_default() -> None:
    """Let this package read open weights until training arguments are created."""
    if not _reader.by_arguments:
        _reader.options = FlexFields(flex_checkpoint=True)


def read_natively_by_default() -> None:
    """Undo :func:`read_by_default`."""
    if not _reader.by_arguments:
        _reader.options = None
