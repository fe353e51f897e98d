"""The list of all checkpoint formats; finds the format of a directory or URL.

To add a format, define a :class:`~paddleformers_fc.formats.checkpoint.Format` in a module and list it in ``FORMATS``; a
format that conversions write is also listed in ``TARGETS``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from paddleformers_fc.errors import Corrupt, FormatError, NotACheckpoint, OptionError
from paddleformers_fc.families import ModelDescription, family_for, is_known
from paddleformers_fc.families.changes import ABSENT, config_changes, table
from paddleformers_fc.families.names import Names
from paddleformers_fc.formats import adapters as adapter_files, flex, huggingface
from paddleformers_fc.formats.adapters import PADDLEFORMERS_LORA, PEFT
from paddleformers_fc.formats.checkpoint import CONFIG_NAME, MAPPING_NAME, ExportWriter, Format, OpenedCheckpoint
from paddleformers_fc.formats.flex import FLEX
from paddleformers_fc.formats.huggingface import HUGGINGFACE
from paddleformers_fc.formats.legacy.rank_shards import LEGACY_HYBRID, SHARDING_IO
from paddleformers_fc.formats.legacy.unified import UNIFIED
from paddleformers_fc.formats.paddle_distcp import DISTCP_WRITER, PADDLE_DISTCP
from paddleformers_fc.formats.stock_run import read_run
from paddleformers_fc.layout.roles import MODEL_STATE, ROLES
from paddleformers_fc.storage.files import exists, list_directory, similar_entry
from paddleformers_fc.storage.manifest import MANIFEST_NAME, Manifest
from paddleformers_fc.storage.paths import AnyPath, RemotePath, parse_step
from paddleformers_fc.text import count_text, fold, suggestion

_T = TypeVar("_T")

FORMATS: tuple[Format, ...] = (
    FLEX,
    UNIFIED,
    LEGACY_HYBRID,
    SHARDING_IO,
    HUGGINGFACE,
    PADDLE_DISTCP,
    PADDLEFORMERS_LORA,
    PEFT,
)
"""Every format; the first that recognises a directory opens it."""

EXPORTS = {
    HUGGINGFACE.name: huggingface.HUGGINGFACE_WRITER,
    PADDLEFORMERS_LORA.name: adapter_files.PADDLEFORMERS_LORA_WRITER,
    PEFT.name: adapter_files.PEFT_WRITER,
}
"""The writers of exports, by the names in commands."""

TARGETS: dict[str, tuple[Format, ExportWriter]] = {
    "flex": (FLEX, flex.FLEX_WRITER),
    "hf": (HUGGINGFACE, huggingface.HUGGINGFACE_WRITER),
    "distcp": (PADDLE_DISTCP, DISTCP_WRITER),
}
"""The formats of conversions and their writers, by the names in commands."""

_NAME_A_CHECKPOINT = "Name a finished checkpoint-N directory, or a directory with safetensors files and their index."
_COPY = "Copy it to a local directory: checkpoints of Paddle and of stock Trainers are not read from URLs."


def format_of(directory: AnyPath) -> Format | None:
    """Return the format of a directory or URL, by the names of its files; None if it is not a checkpoint.

    Raises:
        StorageError: the directory cannot be listed.
    """
    return next((one for one in FORMATS if one.recognises(directory)), None)


def is_resumable(directory: AnyPath) -> bool:
    """Return whether a directory is a resumable checkpoint of another format, by the names of its files.

    Raises:
        StorageError: the directory cannot be listed.
    """
    found = format_of(directory)
    return found is not None and found is not FLEX and found.loadable and not found.canonical


def writer_of(name: str) -> ExportWriter:
    """Return the writer of an export format.

    Raises:
        OptionError: the format is unknown, or exports do not support it.
    """
    return _chosen("an export", EXPORTS, name)


def conversion_target(name: str) -> tuple[Format, ExportWriter]:
    """Return a conversion format and its writer.

    Raises:
        OptionError: the format is unknown, or conversions do not support it.
    """
    return _chosen("a conversion", TARGETS, name)


def _chosen(what: str, known: Mapping[str, _T], name: str) -> _T:
    if name not in known:
        raise OptionError(
            f"Unknown format of {what}: {name!r}.",
            evidence=[f"known: {', '.join(known)}"],
            next_step="Give one of them.",
        )
    return known[name]


def default_writer(checkpoint: OpenedCheckpoint) -> ExportWriter:
    """Return the default export format: open weights, or PEFT for adapters.

    Raises:
        FlexError: the checkpoint does not describe its model.
    """
    if checkpoint.format is FLEX and checkpoint.known.adapters is not None:
        return adapter_files.PEFT_WRITER
    return huggingface.HUGGINGFACE_WRITER


def open_weights(directory: AnyPath, verify: str, adapters: bool) -> OpenedCheckpoint:
    """Open the weights that a live model starts from.

    Args:
        directory: open weights, or the files of adapters.
        verify: as for open weights.
        adapters: whether the model has adapters; then adapters are opened, otherwise open weights.
    Raises:
        NotACheckpoint: the directory does not contain them.
        CheckpointError: it is damaged or malformed.
    """
    if not adapters:
        return HUGGINGFACE.open(directory, verify)
    for one in (PADDLEFORMERS_LORA, PEFT):
        if one.recognises(directory):
            return one.open(directory, verify)
    raise NotACheckpoint(
        f"{directory} contains no adapters.",
        where=str(directory),
        evidence=[f"neither {adapter_files.ADAPTER_CONFIG_NAME} nor {adapter_files.LORA_CONFIG_NAME} is there"],
        next_step="Name a directory of adapters, and load the base into the model before adapters are added.",
    )


def require_format(directory: AnyPath) -> Format:
    """Return the format of a directory or URL.

    Raises:
        NotACheckpoint: no format recognises it; the error lists finished checkpoints in the directory.
    """
    found = format_of(directory)
    if found is not None:
        return found
    if isinstance(directory, Path) and not exists(directory):
        raise NotACheckpoint(
            f"{directory} does not exist.",
            where=str(directory),
            evidence=similar_entry(directory),
            next_step=_NAME_A_CHECKPOINT,
        )
    unfinished = exists(directory / MAPPING_NAME)
    others, step = ([], "") if unfinished else huggingface.torch_files(directory)
    known = [] if unfinished else [f"known formats: {'; '.join(one.title for one in FORMATS)}"]
    raise NotACheckpoint(
        f"{directory} is an unfinished checkpoint."
        if unfinished
        else f"{directory} is not a checkpoint of a known format.",
        where=str(directory),
        evidence=[f"no {MANIFEST_NAME}, {' or '.join(huggingface.HUGGINGFACE_WRITER.marks)} is in it", *others, *known],
        next_step=checkpoints_advice(directory)
        or step
        or (_COPY if isinstance(directory, RemotePath) else _NAME_A_CHECKPOINT),
    )


def open_checkpoint(
    directory: AnyPath,
    verify: str = "size",
    roles: Collection[str] | None = None,
    config: Mapping[str, Any] | None = None,
) -> OpenedCheckpoint:
    """Open a checkpoint of any format.

    Args:
        directory: a checkpoint of any format, or a directory of open weights.
        verify: how thoroughly to check files first, if checksums are recorded: ``off``, ``size`` or ``full``.
        roles: the roles of a flex checkpoint to open, including the weights; None for all.
        config: the model's configuration, for a directory of another format that has none.
    Raises:
        OptionError: a role is unknown, or the weights are not among the roles.
        NotACheckpoint: no format recognises the directory.
        CheckpointError: the checkpoint is damaged or malformed.
    """
    if roles is not None:
        _check_roles(roles)
    format = require_format(directory)
    if roles is not None and format is FLEX:
        return flex.open_flex(directory, verify, roles)
    opened = format.open(directory, verify, config)
    if config and not opened.config and opened.commit_record is None:
        return structs.replace(opened, config=dict(config))
    return opened


def _check_roles(roles: Collection[str]) -> None:
    """Check that roles are known and include the weights.

    Raises:
        OptionError: they are not.
    """
    listed = isinstance(roles, Collection) and not isinstance(roles, str) and all(one in ROLES for one in roles)
    if not listed or MODEL_STATE not in roles:
        raise OptionError(
            f"Invalid roles to open: {roles!r}.",
            where="roles",
            evidence=[f"roles: {', '.join(ROLES)}", *_suggestions(roles)],
            next_step=f"Give a list of these that contains {MODEL_STATE}, or None for all.",
        )


def _suggestions(roles: object) -> list[str]:
    """Return a suggestion for every unknown name in a collection of roles."""
    names = roles if isinstance(roles, Collection) else ()
    return [line for one in names if one not in ROLES for line in suggestion(one, ROLES)]


def open_stored(directory: AnyPath) -> OpenedCheckpoint:
    """Open a checkpoint of any format to list the stored tensors, such as the values and scales of a quantization.

    Raises:
        CheckpointError: as :func:`open_checkpoint`.
    """
    format = require_format(directory)
    is_quantizable = format is HUGGINGFACE
    return huggingface.open_huggingface(directory, as_stored=True) if is_quantizable else format.open(directory)


def saved_run(directory: Path, config: Mapping[str, Any] | None = None) -> Manifest:
    """Return the manifest of a checkpoint of another format, after checking its tensors.

    Tensors of tensor-parallel ranks are not checked without a configuration; the resuming run will check them.

    Args:
        directory: the checkpoint.
        config: the model's configuration, for a directory that has none.
    Raises:
        CheckpointError: the checkpoint is damaged, or contains no run.
    """
    try:
        opened = open_checkpoint(directory, config=config)
        opened.check_states()
        return opened.manifest
    except NotACheckpoint:
        if config or not is_resumable(directory) or read_config(directory):
            raise
        return read_run(directory)


def read_config(directory: AnyPath) -> dict[str, Any]:
    """Return the ``config.json`` of any directory; empty if there is none.

    Raises:
        Corrupt: the file does not match its recorded checksum.
        FormatError: it is not a JSON object.
    """
    return flex.read_config(directory) if FLEX.recognises(directory) else huggingface.read_config(directory)


def describes_model(directory: AnyPath) -> bool:
    """Return whether a directory describes its model: a flex checkpoint, or a directory with a ``config.json``.

    Raises:
        FormatError: the file is not a JSON object.
    """
    return FLEX.recognises(directory) or bool(huggingface.read_config(directory))


def require_config(directory: AnyPath) -> dict[str, Any]:
    """Return the ``config.json`` of a directory.

    Raises:
        OptionError: there is none.
        Corrupt: the file does not match its recorded checksum.
        FormatError: it is not a JSON object.
    """
    config = read_config(directory)
    if not config:
        raise OptionError(
            f"{directory} has no {CONFIG_NAME}.",
            where=str(directory / CONFIG_NAME),
            next_step="Name a directory with the model's config.json, or copy it there.",
        )
    return config


def given_config(directory: AnyPath, named: AnyPath) -> dict[str, Any]:
    """Return the configuration that a user names for a checkpoint; the checkpoint's own one if it says the same.

    Args:
        directory: the checkpoint.
        named: a directory with the model's ``config.json``, or this file.
    Raises:
        OptionError: there is no configuration, or it differs from the checkpoint's in a key that both have.
        Corrupt: the checkpoint has lost its own, or it does not match its recorded checksum.
        StorageError: the file cannot be read.
    """
    place = named.parent if named.name == CONFIG_NAME else named
    try:
        config = require_config(place)
    except (Corrupt, FormatError) as error:  # The option is wrong, and not the checkpoint.
        raise OptionError(
            f"--config (config=) names no configuration: {error.what}",
            where=str(place / CONFIG_NAME),
            evidence=error.evidence,
            next_step="Name a directory with the model's config.json.",
        ) from error
    if not describes_model(directory):
        return config
    try:
        own = read_config(directory)
    except Corrupt as error:
        raise Corrupt(
            error.what,
            where=error.where,
            evidence=[*error.evidence, "--config (config=) cannot replace a file with a recorded checksum"],
            next_step=f"Copy {CONFIG_NAME} of another checkpoint of this run to {directory / CONFIG_NAME}.",
        ) from error
    # The own one may have more keys, such as that of adapters. A key that it lacks has a default.
    changes = config_changes(ModelDescription(own), ModelDescription(config), True)
    changes = [one for one in changes if one.now != ABSENT and (one.saved != ABSENT or one.because)]
    if changes:
        raise OptionError(
            f"{directory} has a configuration, and --config (config=) names a different one.",
            where=str(place / CONFIG_NAME),
            evidence=[f"saved: {directory / CONFIG_NAME}", f"now: {place / CONFIG_NAME}", *table(changes)],
            next_step="Leave out --config (config=), which is for checkpoints without a configuration.",
        )
    return own


def check_heads(checkpoint: OpenedCheckpoint) -> None:
    """Check that stored tensors of attention heads have the shapes that a configuration named by a user gives.

    Fused layers alone do not show the number of heads: another one would split them at other places.

    Raises:
        OptionError: some have others.
        FlexError: the checkpoint has no rules under this configuration.
    """
    if checkpoint.format.canonical or not is_known(checkpoint.config):
        return
    model, targets = checkpoint.known, checkpoint.rules.targets
    faults = Names(family_for(checkpoint.config), model).head_faults(targets)
    if faults:
        raise OptionError(
            f"The named configuration is of another model: {count_text(len(faults), 'tensor')} differ.",
            where=str(checkpoint.catalog.root),
            evidence=fold(faults),
            next_step="Name the configuration of the model that was saved with --config (config=).",
        )


def checkpoints_advice(directory: AnyPath) -> str:
    """Return a next step that lists the finished checkpoints in a directory; empty if there are none."""
    inside = sorted(
        (step, path.name)
        for path in list_directory(directory)
        if (step := parse_step(path)) is not None and exists(path / MANIFEST_NAME)
    )
    return f"Name a checkpoint inside it: {', '.join(name for _, name in inside)}." if inside else ""
