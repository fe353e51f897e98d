"""The shared parts of opening a checkpoint of a stock Trainer, for all its formats of tensor files.

All of its formats have a ``config.json`` or none, the Trainer's files (:mod:`.stock_run`), no checksums and no mapping.
The mapping follows from the family of the model, once it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddleformers_fc.errors import Corrupt, FormatError, NotACheckpoint, OptionError
from paddleformers_fc.families import is_known
from paddleformers_fc.families.description import STACK_OF_FFN, ModelDescription
from paddleformers_fc.formats.catalog import Catalog
from paddleformers_fc.formats.checkpoint import (
    CONFIG_NAME,
    Format,
    OpenedCheckpoint,
    StoredModel,
    parse_config,
    with_config,
)
from paddleformers_fc.formats.checks import CheckList
from paddleformers_fc.formats.huggingface import model_documents, read_description
from paddleformers_fc.formats.same_save import foreign_files
from paddleformers_fc.formats.stock_run import (
    read_powers,
    refuse_invalid_powers,
    refuse_mixed_states,
    run_documents,
    run_files,
    run_reader,
)
from paddleformers_fc.mapping import prove
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.storage.checksum import BlockHasher
from paddleformers_fc.storage.file_checksums import FileChecksum
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import count_text

COPY_AGAIN_STEP = "Use another checkpoint, or copy the files again: all of one save."
NAME_CONFIG = (
    f"Name a directory with the model's {CONFIG_NAME}: convert --config DIR, or config= of open and load in Python."
)


@dataclass(frozen=True)
class StockConfig:
    """The configuration of the model that a directory is of.

    Args:
        stored: the content of ``config.json``; empty if there is none.
        given: the configuration of the reader, which serves if there is none; empty for none.
        recorded: the checksum of ``config.json``.
    """

    stored: dict[str, Any]
    given: Mapping[str, Any]
    recorded: Mapping[str, FileChecksum]

    @property
    def used(self) -> Mapping[str, Any]:
        """The stored configuration, or else the given one."""
        return self.stored or self.given


def read_stock_config(directory: Path, given: Mapping[str, Any]) -> StockConfig:
    """Read the ``config.json`` of a directory.

    Args:
        directory: of a checkpoint.
        given: the configuration that serves if there is none; empty for none.
    Raises:
        FormatError: it is not a JSON object.
    """
    raw = read_description(directory, CONFIG_NAME)
    if raw is None:
        return StockConfig({}, given, {})
    hasher = BlockHasher()
    hasher.update(raw)
    recorded = {CONFIG_NAME: hasher.file_checksum(CONFIG_NAME)}
    return StockConfig(parse_config(raw, directory / CONFIG_NAME), given, recorded)


def open_stock(
    format_: Format,
    directory: Path,
    catalog: Catalog,
    faults: Sequence[str],
    config: StockConfig,
    describe: Callable[[dict[str, Any]], StoredModel],
) -> OpenedCheckpoint:
    """Return the opened checkpoint of a catalog.

    Args:
        format_: the format that recognised it.
        directory: of the checkpoint.
        catalog: the stored tensors.
        faults: why the files are not one whole checkpoint, beside those of the catalog.
        config: of the model.
        describe: returns the stored model under a configuration.
    Raises:
        Corrupt: there are faults, or files of several saves or steps; all of them.
        FormatError: files of the Trainer are links to something outside of the directory.
    """
    refuse_links(directory, run_files(directory))
    faults = [*faults, *catalog.faults()]
    if faults:
        raise Corrupt(
            f"The checkpoint does not contain all of its model, whole and once: {count_text(len(faults), 'fault')}.",
            where=str(directory),
            evidence=fold(faults),
            next_step=COPY_AGAIN_STEP,
        )
    if foreign := list(foreign_files(directory, catalog)):
        raise Corrupt(
            f"{directory} contains files of several saves, or under the names of other ranks.",
            where=str(directory),
            evidence=fold(foreign),
            next_step=COPY_AGAIN_STEP,
        )

    powers = read_powers(directory, catalog)
    refuse_mixed_states(directory, powers)

    def read(values: dict[str, Any]) -> StoredModel:
        model = describe(values)
        refuse_alternating(directory, model)
        return model

    opened = OpenedCheckpoint(
        format_,
        catalog,
        config.stored,
        lambda: read(config.stored),
        config.recorded,
        find_unrecorded=lambda: {**model_documents(directory), **run_documents(directory, catalog.roles)},
        describe_as=read,
        read_run=run_reader(directory, powers),
        check_states=lambda: refuse_invalid_powers(directory, powers),
    )
    return with_config(opened, config.given) if config.given else opened


def refuse_alternating(directory: AnyPath, model: StoredModel) -> None:
    """Refuse Paddle's own formats for a model whose rows of gate and up alternate: nothing in them shows the order.

    Raises:
        OptionError: the model has such experts.
    """
    config = {} if model.description is None else model.description.config
    if config.get("using_sonic_moe") and any(name.endswith(STACK_OF_FFN) for name in model.rules.targets):
        raise OptionError(
            "Experts of using_sonic_moe are supported in checkpoints of this package and in exports.",
            where=str(directory),
            evidence=["gate and up alternate row by row in training, which Paddle's formats do not record"],
            next_step="Resume with PaddleFormers and export the weights, or train without using_sonic_moe.",
        )


def refuse_links(directory: Path, entries: Iterable[Path]) -> None:
    """Refuse files and directories that are links to something outside of the checkpoint.

    Raises:
        FormatError: there are such links.
    """
    root = os.path.realpath(directory)
    outside = [str(one) for one in entries if os.path.commonpath((root, os.path.realpath(one))) != root]
    if outside:
        raise FormatError(
            f"{directory} is a checkpoint of which parts are links to somewhere else.",
            where=str(directory),
            evidence=outside,
            next_step="Copy what the links lead to into the directory.",
        )


def malformed_file(path: Path, fault: str) -> FormatError:
    """Return the error for a file with other content than that of a checkpoint."""
    return FormatError(
        f"{path} is not a file of a checkpoint of Paddle: {fault}.", where=str(path), next_step=COPY_AGAIN_STEP
    )


def model_description(directory: AnyPath, config: Mapping[str, Any]) -> ModelDescription:
    """Return the model that a configuration describes.

    Raises:
        NotACheckpoint: there is no configuration.
    """
    if not config:
        raise NotACheckpoint(
            f"{directory} does not describe the model that it is of.",
            where=str(directory),
            evidence=[f"{CONFIG_NAME} is not in it"],
            next_step=f"{NAME_CONFIG} Other commands need a copy of it in a copy of {directory.name}.",
        )
    return ModelDescription(config, partial=True)


def verify_tensors(checks: CheckList, open_checkpoint: Callable[[], OpenedCheckpoint]) -> OpenedCheckpoint:
    """Check that every tensor is stored whole and once, and that optimizer states are those of a step.

    Args:
        checks: where the results are recorded.
        open_checkpoint: opens the checkpoint, which refuses tensors with gaps or with several copies.
    """

    def open_with_states() -> OpenedCheckpoint:
        found = open_checkpoint()
        found.check_states()
        return found

    checks.not_compared("this format has no checksums")
    return checks.check(
        "tensors",
        open_with_states,
        lambda found: f"{count_text(found.catalog.count, 'tensor')}, each stored whole and once",
    )


def verify_stock(checks: CheckList, open_checkpoint: Callable[[], OpenedCheckpoint]) -> OpenedCheckpoint:
    """Check the tensors as :func:`verify_tensors`, and that none of the model is missing."""
    opened = verify_tensors(checks, open_checkpoint)
    if is_known(opened.config):
        checks.attempt(
            "model",
            lambda: prove(opened.rules.mapping(), "The checkpoint's mapping"),
            lambda _: "all tensors that the configuration describes",
        )
    else:
        checks.impossible.append(f"missing layers: no {CONFIG_NAME} of a known family")
    return opened
