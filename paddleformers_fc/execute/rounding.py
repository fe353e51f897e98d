"""Compare 16-bit weights with their master weights: every update rounds the master weight to the weight.

A load does not compare them: it would read master weights that other ranks need, and the next update rounds them again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.errors import Corrupt
from paddleformers_fc.execute.digest import PIECE_BYTES, read_in_pieces
from paddleformers_fc.layout.roles import MASTER, MASTER_WEIGHT, MODEL_STATE
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.plan import ReadSource, canonical_layout
from paddleformers_fc.storage.dtypes import dtype_size, to_numpy, to_safetensors
from paddleformers_fc.text import count_text


def compare_rounded(source: ReadSource) -> int:
    """Compare every weight of 16 bits that has a master weight, and return their number.

    Args:
        source: from a checkpoint to the canonical space.
    Raises:
        Corrupt: with every weight that is not its master weight, rounded to the nearest number, ties to even.
    """
    layout, catalog = canonical_layout(source), source.catalog
    masters = layout.get(MASTER_WEIGHT, {})
    weights = {
        name: shard
        for name, shard in layout.get(MODEL_STATE, {}).items()
        if name + MASTER.suffix in masters and dtype_size(shard.dtype) == 2
    }
    stored = {name.removesuffix(MASTER.suffix): one for name, one in catalog.roles.get(MASTER_WEIGHT, {}).items()}
    exact = replace(source, catalog=replace(catalog, roles={MODEL_STATE: stored}))
    wanted = {name: msgspec.structs.replace(shard, dtype=MASTER.dtype) for name, shard in weights.items()}
    pairs = zip(
        read_in_pieces(source, {MODEL_STATE: weights}, PIECE_BYTES),
        read_in_pieces(exact, {MODEL_STATE: wanted}, 2 * PIECE_BYTES),
        strict=True,
    )
    unlike = {
        shard.name: None for (_, shard, own), (_, _, master) in pairs if not _is_rounded(own, master, shard.dtype)
    }
    if unlike:
        raise Corrupt(
            f"{count_text(len(unlike), 'weight')} of {catalog.root} {'is' if len(unlike) == 1 else 'are'} not the "
            "rounded master weight.",
            where=str(catalog.root),
            evidence=fold(unlike),
            next_step="Use another checkpoint: numbers were changed after they were saved, or in training outside of "
            "the optimizer, or replicas differed under flex_check_replicas: off.",
        )
    return len(weights)


def _is_rounded(weight: np.ndarray[Any, Any], master: np.ndarray[Any, Any], dtype: str) -> bool:
    """Return whether the bytes of a weight are those of its master weight, rounded; NaN may have any bits."""
    own = weight.view(to_numpy(to_safetensors(dtype)))
    with np.errstate(over="ignore"):
        rounded = master.view(np.float32).astype(own.dtype)
    other = np.flatnonzero(own.view(np.uint16) != rounded.view(np.uint16))
    return bool(np.isnan(own[other]).all() and np.isnan(rounded[other]).all())
