"""The digests of a checkpoint's canonical tensors, by which runs and exports are compared."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from paddleformers_fc.execute.digest import TensorDigest, digest_tensors, weights_md5
from paddleformers_fc.formats.registry import open_checkpoint
from paddleformers_fc.layout.roles import ROLES
from paddleformers_fc.plan.sources import canonical_layout, canonical_source
from paddleformers_fc.storage.paths import AnyPath


def canonical_digests(
    directory: AnyPath, verify: str = "size", roles: Collection[str] = ROLES
) -> Iterator[TensorDigest]:
    """Open a checkpoint of any format and yield the digests of its canonical tensors, in natural order.

    Args:
        directory: a checkpoint of any format.
        verify: how the files are checked first, where checksums are recorded.
        roles: the roles to read.
    Raises:
        FlexError: the directory cannot be opened, proved or read.
    """
    source = canonical_source(open_checkpoint(directory, verify))
    return digest_tensors(source, {role: found for role, found in canonical_layout(source).items() if role in roles})


def unequal_tensors(expected: Iterable[TensorDigest], found: Iterable[TensorDigest]) -> list[tuple[str, str]]:
    """Return role and name of the tensors that are not bitwise the same on both sides, or on one side only."""
    known, actual = ({(each.role, each.name): each for each in side} for side in (expected, found))
    return [key for key in sorted(known.keys() | actual.keys()) if known.get(key) != actual.get(key)]


def stored_md5(directory: AnyPath) -> str:
    """Read all tensors of open weights, and return the md5 of their names and bytes (:func:`.weights_md5`).

    Args:
        directory: a directory or URL of open weights.
    Raises:
        FlexError: the directory cannot be opened or read.
    """
    return weights_md5({one.name: one.md5 for one in canonical_digests(directory)})
