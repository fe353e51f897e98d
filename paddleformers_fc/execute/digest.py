"""Canonical tensors of a checkpoint, and their digests: equal numbers have equal digests under every layout and format.

Canonical tensors are assembled one at a time; memory is the largest tensor. ``diff`` compares these digests, and tests
use them to show that a resume is bitwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddleformers_fc.execute.read_pool import ReadPool
from paddleformers_fc.execute.reading import read_tensors, verify_equal
from paddleformers_fc.formats import OpenedCheckpoint, open_checkpoint
from paddleformers_fc.layout.roles import ROLES
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.plan import ReadItem, ReadSource, canonical_layout, canonical_source, plan_reads
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import natural


@dataclass(frozen=True)
class TensorDigest:
    """One canonical tensor.

    Args:
        role: its role.
        name: its canonical name, with the suffix of an optimizer state.
        dtype: element type by its numpy name.
        shape: global shape.
        md5: hex digest of its bytes, row-major and little-endian.
    """

    role: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    md5: str


def canonical_digests(
    directory: AnyPath, verify: str = "size", roles: Collection[str] = ROLES
) -> Iterator[TensorDigest]:
    """Open a checkpoint of any format and yield the digests of its canonical tensors; see :func:`digests_of`.

    Args:
        directory: a checkpoint of any format.
        verify: how the files are checked first, where checksums are recorded.
        roles: which roles to read.
    Raises:
        FlexError: the directory cannot be opened, proved or read.
    """
    return digests_of(open_checkpoint(directory, verify), roles)


def digests_of(checkpoint: OpenedCheckpoint, roles: Collection[str] = ROLES) -> Iterator[TensorDigest]:
    """Yield the digests of the canonical tensors of a checkpoint, in natural order.

    Args:
        checkpoint: an opened checkpoint of any format.
        roles: which roles to read.
    Raises:
        FlexError: its mapping cannot be proved, or a file cannot be read.
    """
    source = canonical_source(checkpoint)
    layout = {role: shards for role, shards in canonical_layout(source).items() if role in roles}
    for role, shard, array in read_canonical(source, layout):
        md5 = hashlib.md5(array.view(np.uint8).data).hexdigest()
        yield TensorDigest(role, shard.name, shard.dtype, shard.global_shape, md5)


def read_canonical(
    source: ReadSource, layout: Mapping[str, Mapping[str, Shard]]
) -> Iterator[tuple[str, Shard, np.ndarray[Any, Any]]]:
    """Yield role, shard and flat array of some shards of canonical tensors, in natural order within each role.

    Args:
        source: from a checkpoint to the canonical space.
        layout: role -> name -> the shard to be read.
    Raises:
        FlexError: the shards do not fit what is stored, copies of a tied tensor differ, or a file cannot be read.
    """
    catalog = source.catalog
    plan = plan_reads(source, layout)
    plan.report.refuse(str(catalog.root))
    verify_equal(plan.checks, catalog.root, identities=catalog.identities)
    items: dict[tuple[str, str], list[ReadItem]] = {}
    for item in plan.items:
        items.setdefault((item.role, item.name), []).append(item)
    with ReadPool(identities=catalog.identities) as pool:
        for role, shards in layout.items():
            wanted = ((shards[name], items.get((role, name), ())) for name in sorted(shards, key=natural))
            for shard, array in read_tensors(pool, catalog.root, wanted):
                yield role, shard, array
