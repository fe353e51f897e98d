"""Block checksums depend on the bytes and their place alone, not on how they came."""

from __future__ import annotations

import itertools
import random

import xxhash
from hypothesis import given, settings, strategies as st

from paddleformers_fc.storage.checksum import BlockHasher


@settings(derandomize=True)
@given(pieces=st.lists(st.binary(max_size=40), max_size=8), block_bytes=st.integers(1, 50), order=st.randoms())
def test_pieces_of_any_length_in_any_order_give_the_checksums_of_the_whole(
    pieces: list[bytes], block_bytes: int, order: random.Random
) -> None:
    whole, begins = b"".join(pieces), [0, *itertools.accumulate(map(len, pieces))]
    blocks = [whole[begin : begin + block_bytes] for begin in range(0, len(whole), block_bytes)]
    digests = [xxhash.xxh3_64_digest(block) for block in blocks]
    straight, hasher = BlockHasher(block_bytes), BlockHasher(block_bytes)
    for piece in pieces:
        straight.update(piece)
    shuffled = list(zip(begins, pieces, strict=False))
    order.shuffle(shuffled)
    for begin, piece in shuffled:
        hasher.update(piece, begin)
    for checksum in (straight.file_checksum("x"), hasher.file_checksum("x")):
        assert (checksum.path, checksum.size, checksum.block_bytes) == ("x", len(whole), block_bytes)
        assert [checksum.block(number) for number in range(checksum.count)] == digests
        assert checksum.digest == xxhash.xxh3_128_hexdigest(b"".join(digests))
