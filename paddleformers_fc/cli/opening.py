"""What kind of directory a user has named, and what is stored in it.

Three kinds can be read: a finished flex checkpoint, which its manifest tells, a directory of open weights in
safetensors files, and a checkpoint that Paddle wrote. Anything else is refused; where finished checkpoints lie inside
it, which is what an output directory looks like, the error names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from paddleformers_fc.errors import NotACheckpoint, OptionError
from paddleformers_fc.formats import Catalog, FlexCheckpoint, open_flex, open_huggingface
from paddleformers_fc.formats.distcp import open_distcp
from paddleformers_fc.formats.flex import CONFIG_NAME, MAPPING_NAME, parse_config, read_document_bytes
from paddleformers_fc.formats.huggingface import INDEX_NAME, SINGLE_NAME, read_description
from paddleformers_fc.plan.paddle_distcp import is_paddle_checkpoint
from paddleformers_fc.storage.files import exists, list_directory
from paddleformers_fc.storage.manifest import MANIFEST_NAME, read_manifest
from paddleformers_fc.storage.names import parse_step
from paddleformers_fc.storage.paths import AnyPath, require_local

CheckpointKind = Literal["flex_checkpoint", "huggingface", "paddle"]
FLEX: CheckpointKind = "flex_checkpoint"
HUGGINGFACE: CheckpointKind = "huggingface"
PADDLE: CheckpointKind = "paddle"


@dataclass(frozen=True)
class Opened:
    """A directory that was opened.

    Args:
        kind: what it is.
        catalog: what is stored.
        config: the model's configuration; empty for open weights without ``config.json``.
        checkpoint: the flex checkpoint, or None for the other kinds.
    """

    kind: CheckpointKind
    catalog: Catalog
    config: dict[str, Any]
    checkpoint: FlexCheckpoint | None = None


def kind_of(directory: AnyPath) -> CheckpointKind:
    """What a directory is, by the names of its files alone.

    Raises:
        NotACheckpoint: it is none of the three.
    """
    if exists(directory / MANIFEST_NAME):
        return FLEX
    if exists(directory / INDEX_NAME) or exists(directory / SINGLE_NAME):
        return HUGGINGFACE
    if is_paddle_checkpoint(directory):
        return PADDLE
    unfinished = exists(directory / MAPPING_NAME)
    raise NotACheckpoint(
        f"{directory} is an unfinished checkpoint."
        if unfinished
        else f"{directory} is neither a finished flex checkpoint nor a directory of open weights.",
        where=str(directory),
        evidence=[f"no {MANIFEST_NAME}, {INDEX_NAME} or {SINGLE_NAME} is in it"],
        next_step=_advice(directory),
    )


def refuse_open_weights(directory: AnyPath) -> CheckpointKind:
    """Go on only with a checkpoint; its kind.

    Raises:
        NotACheckpoint: it is something else, which is said with the checkpoints that lie inside it.
    """
    kind = kind_of(directory)
    if kind == HUGGINGFACE:
        raise NotACheckpoint(
            f"{directory} holds open weights and is no flex checkpoint.",
            where=str(directory),
            evidence=[f"{MANIFEST_NAME} is not there"],
            next_step=_advice(directory, "Name a finished checkpoint-N directory."),
        )
    return kind


def open_directory(directory: AnyPath, verify: str) -> Opened:
    """Open a flex checkpoint or a directory of open weights.

    Args:
        directory: what the user named; it exists.
        verify: ``off``, ``size`` or ``full``, where checksums are recorded.
    Raises:
        FlexError: it is neither, or it is damaged.
    """
    kind = kind_of(directory)
    if kind == FLEX:
        checkpoint = open_flex(directory, verify)
        return Opened(FLEX, checkpoint.catalog, checkpoint.config, checkpoint)
    config = config_beside(directory)
    if kind == PADDLE:
        return Opened(PADDLE, open_distcp(require_local(directory, "A checkpoint of Paddle")).catalog, config)
    return Opened(HUGGINGFACE, open_huggingface(directory, verify), config)


def config_beside(directory: AnyPath) -> dict[str, Any]:
    """The model's configuration in a directory; empty where there is none.

    Raises:
        Corrupt: the file does not match its recorded checksum.
        FormatError: it is not a JSON object.
    """
    path = directory / CONFIG_NAME
    if exists(directory / MANIFEST_NAME):
        return parse_config(read_document_bytes(directory, read_manifest(directory), CONFIG_NAME), path)
    raw = read_description(directory, CONFIG_NAME)
    return {} if raw is None else parse_config(raw, path)


def required_config(directory: AnyPath) -> dict[str, Any]:
    """The model's configuration in a directory that must have one.

    Raises:
        OptionError: there is none.
        Corrupt: the file does not match its recorded checksum.
        FormatError: it is not a JSON object.
    """
    config = config_beside(directory)
    if not config:
        raise OptionError(
            f"{directory} has no {CONFIG_NAME}.",
            where=str(directory / CONFIG_NAME),
            next_step="Name a directory with the model's config.json, or put it there.",
        )
    return config


_OTHERWISE = "Name a finished checkpoint-N directory, or a directory with safetensors files and their index."


def _advice(directory: AnyPath, otherwise: str = _OTHERWISE) -> str:
    inside = sorted(
        (step, path.name)
        for path in list_directory(directory)
        if (step := parse_step(path)) is not None and exists(path / MANIFEST_NAME)
    )
    if inside:
        return f"Name a checkpoint inside it: {', '.join(name for _, name in inside)}."
    return otherwise
