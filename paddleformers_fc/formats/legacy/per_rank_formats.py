"""The two formats of one file per rank, which PaddleNLP's and PaddleFormers' Trainers write (:mod:`.rank_shards`).

Older Trainers write files of weights per tensor-parallel rank and stage, and files of optimizer states per rank of the
sharding group as well. All sharding stages have these names.

Under ``sharding_io`` and in zero-cost saves (FlashCheckpoint), every rank of a sharding group stores its own part of
the weights, and ``model_meta.json`` describes the parameters of all ranks. Weights with master weights are not stored;
they are read from these. Moving averages are in ``ema.*.pdopt``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddleformers_fc.formats.catalog import Catalog
from paddleformers_fc.formats.checkpoint import CheckList, OpenedCheckpoint, StoredModel
from paddleformers_fc.formats.huggingface import INDEX_NAME, SINGLE_NAME
from paddleformers_fc.formats.legacy.rank_files import EMA, MODEL, OPTIMIZER, is_rank_file, refuse_mixed
from paddleformers_fc.formats.legacy.rank_shards import (
    META_NAME,
    compare_copies,
    last_copies,
    open_ranked,
    stored_model,
)
from paddleformers_fc.formats.paddle_distcp import PADDLE_DISTCP
from paddleformers_fc.formats.stock_checkpoint import StockFormat
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.storage.files import is_directory, list_directory
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import count_text


@dataclass(frozen=True)
class RankFormat(StockFormat):
    """One file per rank and kind.

    Args:
        name: in JSON output.
        title: in text, as the kind of a directory.
        predicate: in errors, behind the path of a directory.
        has_meta: whether ``model_meta.json`` describes the ranks.
    """

    name: str
    title: str
    predicate: str
    has_meta: bool

    advice = "Convert it with paddleformers-fc convert, and name the result."
    checks = ("tensors", "model", "replicas", "equal values")

    def recognises(self, directory: AnyPath) -> bool:
        """Return whether there are files of ranks: of an optimizer, or of weights without open weights beside them."""
        if not isinstance(directory, Path) or not is_directory(directory):
            return False
        names = {path.name for path in list_directory(directory)}
        if (META_NAME in names) is not self.has_meta:
            return False
        if any(is_rank_file(name, OPTIMIZER, EMA) for name in names):
            return True
        return not names & {INDEX_NAME, SINGLE_NAME} and any(is_rank_file(name, MODEL) for name in names)

    def open_under(self, directory: AnyPath, verify: str, config: Mapping[str, Any]) -> OpenedCheckpoint:
        """As :func:`open_ranked`; parts of tensor-parallel ranks are not read without a configuration."""
        if PADDLE_DISTCP.recognises(directory):
            refuse_mixed(directory, [(MODEL_STATE, "files of ranks")])
        return open_ranked(directory, self, config)

    def verify(self, directory: AnyPath, level: str, checks: CheckList) -> OpenedCheckpoint:
        """Check that every tensor is stored whole and once, and that all ranks have the same numbers of it."""
        opened = super().verify(directory, level, checks)
        if level == "full":
            with checks.optional("replicas"):
                count = count_text(self.compare_copies(opened), "array")
                checks.passed("replicas", f"{count} of other tensor-parallel ranks equal to those of tp00")
        return opened

    def stored_model(self, checkpoint: OpenedCheckpoint) -> StoredModel:
        """As :func:`~paddleformers_fc.formats.legacy.rank_shards.stored_model`."""
        return stored_model(checkpoint.catalog, checkpoint.config, checkpoint.facts.cuts)

    def compare_copies(self, checkpoint: OpenedCheckpoint) -> int:
        """Compare the arrays of other tensor-parallel ranks."""
        return compare_copies(checkpoint.facts.directory, checkpoint.facts.copies)

    def last_copies(self, checkpoint: OpenedCheckpoint) -> Catalog:
        """Read the files again, and return the copies of the last tensor-parallel rank."""
        return last_copies(checkpoint)


LEGACY_HYBRID = RankFormat(
    "legacy_hybrid",
    "checkpoint of hybrid parallelism (one .pdparams and .pdopt per rank)",
    "was written rank by rank by an older Trainer",
    has_meta=False,
)
SHARDING_IO = RankFormat(
    "sharding_io",
    "checkpoint of sharding_io or FlashCheckpoint (one file per rank and model_meta.json)",
    "was written rank by rank by sharding_io or FlashCheckpoint",
    has_meta=True,
)
