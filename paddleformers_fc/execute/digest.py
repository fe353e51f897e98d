"""Digests of canonical tensors: the same numbers give the same digest under every layout.

Every canonical tensor of every role is put together, one at a time, and hashed; memory is the largest tensor. This is
what the ``diff`` verb compares, and how a resume is shown to be bitwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from paddleformers_fc.errors import NotACheckpoint
from paddleformers_fc.execute.read_pool import ReadPool
from paddleformers_fc.execute.reading import read_tensors, verify_equal
from paddleformers_fc.formats import open_huggingface
from paddleformers_fc.layout.roles import MODEL_STATE, ROLES
from paddleformers_fc.mapping import Mapping, TensorSpec
from paddleformers_fc.mapping.correspondences import TensorSources
from paddleformers_fc.mapping.templates import identity
from paddleformers_fc.plan import ReadItem, ReadSource, canonical_layout, canonical_source, plan_reads
from paddleformers_fc.plan.paddle_distcp import is_paddle_checkpoint, open_stored
from paddleformers_fc.plan.report import natural
from paddleformers_fc.storage.files import exists
from paddleformers_fc.storage.manifest import MANIFEST_NAME
from paddleformers_fc.storage.paths import AnyPath


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
    """Digests of everything in a flex checkpoint or a Hugging Face directory, in natural order.

    Args:
        directory: a finished flex checkpoint, or a directory of open weights.
        verify: how the files are checked first, where checksums are recorded.
        roles: which roles to read.
    Raises:
        FlexError: the directory cannot be opened, proved or read.
    """
    source = _source(directory, verify)
    layout = {role: shards for role, shards in canonical_layout(source).items() if role in roles}
    plan = plan_reads(source, layout)
    plan.report.refuse(str(directory))
    verify_equal(plan.checks, directory, identities=source.catalog.identities)
    items: dict[tuple[str, str], list[ReadItem]] = {}
    for item in plan.items:
        items.setdefault((item.role, item.name), []).append(item)
    with ReadPool(identities=source.catalog.identities) as crew:
        for role, shards in layout.items():
            wanted = ((shards[name], items.get((role, name), ())) for name in sorted(shards, key=natural))
            for shard, array in read_tensors(crew, directory, wanted):
                md5 = hashlib.md5(array.view(np.uint8).data).hexdigest()
                yield TensorDigest(role, shard.name, shard.dtype, shard.global_shape, md5)


def _source(directory: AnyPath, verify: str) -> ReadSource:
    if exists(directory / MANIFEST_NAME) or is_paddle_checkpoint(directory):
        return canonical_source(open_stored(directory, verify))
    try:
        catalog = open_huggingface(directory, verify)
    except NotACheckpoint as error:
        raise NotACheckpoint(
            "The directory is neither a finished flex checkpoint nor a directory of open weights.",
            where=str(directory),
            evidence=[f"no {MANIFEST_NAME}", *error.evidence],
            next_step="Name a checkpoint-N directory or a directory with safetensors files.",
        ) from error
    specs = {name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in catalog.roles[MODEL_STATE].items()}
    same = {name: TensorSources(identity(spec.shape), (name,)) for name, spec in specs.items()}
    return ReadSource(catalog, Mapping(specs, specs, same))
