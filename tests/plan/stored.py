"""Checkpoints that exist as catalogs alone: what a simulated job would have written, without a byte of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paddleformers_fc.formats import Catalog, OpenedCheckpoint
from paddleformers_fc.formats.catalog import StoredForm, StoredFragment, StoredTensor, gather_shards
from paddleformers_fc.formats.checkpoint import StoredModel
from paddleformers_fc.formats.flex import FLEX
from paddleformers_fc.layout.roles import OPTIMIZERS, OptimizerDescriptor
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping import Shape
from paddleformers_fc.plan.simulate import SimulatedModel
from paddleformers_fc.storage.dtypes import item_size, to_safetensors
from paddleformers_fc.storage.manifest import Manifest


def stored_tensor(name: str, dtype: str, shape: Shape, fragments: Iterable[StoredFragment]) -> StoredTensor:
    """A tensor whose boxes lie at these places."""
    fragments = tuple(fragments)
    form = StoredForm(dtype, shape, tuple(fragment.box for fragment in fragments))
    return StoredTensor(name, form, tuple((fragment.file, fragment.begin) for fragment in fragments))


def opened(catalog: Catalog, manifest: Manifest, model: StoredModel, config: dict[str, Any]) -> OpenedCheckpoint:
    """A flex checkpoint that was never on a disk."""
    return OpenedCheckpoint(FLEX, catalog, config, model, commit_record=manifest)


def checkpoint_of(model: SimulatedModel, optimizer: OptimizerDescriptor = OPTIMIZERS[0]) -> OpenedCheckpoint:
    """The checkpoint that a simulated job would write: each distinct shard by the first rank that holds it."""
    found: dict[str, list[tuple[Shard, str, int, int]]] = {}
    seen: set[tuple[str, Shard]] = set()
    for rank in range(model.grid.world_size):
        for role, shards in model.roles(rank, optimizer).items():
            at = 0
            for shard in shards.values():
                if (role, shard) in seen:
                    continue
                seen.add((role, shard))
                width = item_size(to_safetensors(shard.dtype))
                found.setdefault(role, []).append((shard, f"{role}/rank-{rank:05d}.safetensors", at, width))
                at += shard.size * width
    catalog = Catalog(Path("simulated"), {role: gather_shards(shards)[0] for role, shards in found.items()})
    manifest = Manifest(
        written_by="",
        step=1,
        consumed_samples=1,
        world_size=model.grid.world_size,
        parallel={},
        files=[],
        family=model.family.name,
    )
    return opened(catalog, manifest, StoredModel(model.rules, model.model), dict(model.model.config))
