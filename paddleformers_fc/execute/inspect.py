"""The facts of a directory, from its manifest and headers alone: of a checkpoint, or of an output directory.

No tensor byte is read; the cost is one small read per file.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from paddleformers_fc.errors import FlexError, NotACheckpoint, OptionError
from paddleformers_fc.execute.output_directory import OutputFacts, output_facts
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.formats.inspection import JobFacts, RoleFacts, TensorFacts, job_facts, list_tensors, role_facts
from paddleformers_fc.formats.registry import open_checkpoint, open_stored, read_config, require_format
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.storage.manifest import read_manifest
from paddleformers_fc.storage.paths import AnyPath

_CONFIG_KEYS = (
    "model_type",
    "architectures",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "moe_num_experts",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "tie_word_embeddings",
)

OUTPUT_DIRECTORY = "output_directory"

_MOST_NEAR = 5
"""Maximum number of similar names that an error lists."""


class Inspection(msgspec.Struct, frozen=True):
    """The facts that ``inspect`` reports.

    Attributes:
        kind: name of the format, or ``output_directory``.
        path: the directory as it was named.
        job: the job that saved it; None for open weights.
        model: the keys of ``config.json`` that determine a model's size.
        files: number of files.
        bytes: their sizes together.
        roles: the stored tensors by role.
        tensors: the stored tensors that match; None without a pattern.
        output: the checkpoints and leftovers in it; None if there are none.
    """

    kind: str
    path: str
    job: JobFacts | None
    model: dict[str, Any]
    files: int
    bytes: int
    roles: dict[str, RoleFacts]
    tensors: list[TensorFacts] | None = None
    output: OutputFacts | None = None


def inspect_directory(directory: AnyPath, pattern: str | None = None) -> Inspection:
    """Return the facts about a directory.

    Args:
        directory: a flex checkpoint, a directory of open weights, or an output directory.
        pattern: a shell pattern; the stored tensors whose names match are listed. None lists nothing.
    Raises:
        OptionError: no stored tensor matches.
        FlexError: the directory cannot be opened.
    """
    output = output_facts(directory) if isinstance(directory, Path) else None
    try:
        opened = open_stored(directory)
    except NotACheckpoint:
        if output is None or pattern is not None:
            raise
        return Inspection(OUTPUT_DIRECTORY, str(directory), None, {}, 0, 0, {}, output=output)
    tensors = None if pattern is None else list_tensors(opened, pattern)
    if pattern is not None and not tensors:
        raise OptionError(
            f"No stored tensor matches {pattern!r}.",
            where=str(directory),
            evidence=_near_names(pattern, (name for stored in opened.catalog.roles.values() for name in stored)),
            next_step=f"A pattern must match the whole name; write '*{pattern.strip('*')}*'. Optimizer states end in a "
            "suffix such as .moment1_0.",
        )
    return _facts(opened, directory, tensors, output)


def _near_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Return a line of similar names, indices folded: those that contain the pattern, or are like it in a part."""
    wanted, known = pattern.strip("*").lower(), list(names)
    containing = fold(name for name in known if wanted in name.lower())
    folded = containing or fold(known)
    parts = difflib.get_close_matches(wanted, sorted({part for name in folded for part in name.split(".")}), n=1)
    near = (
        containing
        or difflib.get_close_matches(wanted, folded, n=_MOST_NEAR)
        or [name for name in folded if set(parts) & set(name.split("."))]
    )
    return [f"similar: {', '.join(near[:_MOST_NEAR])}"] if near and wanted else []


def damaged_facts(directory: AnyPath) -> Inspection | None:
    """Return the facts of a damaged checkpoint: without sizes compared, else its manifest's alone; None without those.

    Its files and their sizes are the recorded ones.
    """
    with suppress(FlexError):
        return _facts(open_checkpoint(directory, "off"), directory)
    with suppress(FlexError):
        manifest = read_manifest(directory)
        sizes = [one.size for one in manifest.files]
        config: dict[str, Any] = {}
        with suppress(FlexError):
            config = read_config(directory)
        return Inspection(
            require_format(directory).name,
            str(directory),
            job_facts(manifest),
            _model_facts(config),
            len(sizes),
            sum(sizes),
            {},
        )
    return None


def _model_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in _CONFIG_KEYS if key in config}


def _facts(
    opened: OpenedCheckpoint,
    directory: AnyPath,
    tensors: list[TensorFacts] | None = None,
    output: OutputFacts | None = None,
) -> Inspection:
    sizes = opened.file_sizes
    return Inspection(
        kind=opened.format.name,
        path=str(directory),
        job=job_facts(opened.commit_record),
        model=_model_facts(opened.config),
        files=len(sizes),
        bytes=sum(sizes.values()),
        roles=role_facts(opened),
        tensors=tensors,
        output=output,
    )
