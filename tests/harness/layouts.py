"""Fingerprint a layout: a digest of the boxes of every rank, which does not depend on names of layouts or degrees."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import msgspec

from paddleformers_fc.layout.shards import Shard


def fingerprint(ranks: Iterable[Mapping[str, Mapping[str, Shard]]]) -> str:
    """Return the fingerprint of a layout, 32 hex digits.

    Args:
        ranks: role -> full name -> shard, for every rank. The order of names is ignored.
    """
    digest = hashlib.blake2b(digest_size=16)
    for roles in ranks:
        records = [
            (role, name, shard.dtype, shard.global_shape, shard.box.lo, shard.box.shape, shard.flat)
            for role, shards in sorted(roles.items())
            for name, shard in sorted(shards.items())
        ]
        digest.update(hashlib.blake2b(msgspec.json.encode(records), digest_size=16).digest())
    return digest.hexdigest()
