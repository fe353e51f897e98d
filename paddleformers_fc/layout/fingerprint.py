"""One short text per layout: who owns which box. Two layouts are the same if and only if their fingerprints are.

What a layout is called, or which degrees made it, does not enter. Linear in the shards of all ranks; one rank's are in
memory at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import msgspec

from paddleformers_fc.layout.codec import record_of
from paddleformers_fc.layout.shards import Shard


def fingerprint(ranks: Iterable[Mapping[str, Mapping[str, Shard]]]) -> str:
    """The fingerprint of a layout, 32 hex digits.

    Args:
        ranks: role -> full name -> shard, of every rank, by rank. In what order names come does not matter.
    """
    digest = hashlib.blake2b(digest_size=16)
    for roles in ranks:
        held = [
            (role, name, shard.dtype, record_of(shard))
            for role, shards in sorted(roles.items())
            for name, shard in sorted(shards.items())
        ]
        digest.update(hashlib.blake2b(msgspec.json.encode(held), digest_size=16).digest())
    return digest.hexdigest()
