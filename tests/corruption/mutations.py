"""Random damage to a small, real checkpoint.

Every mutation is drawn from a seeded generator, done to the files themselves, looked at, and undone. What is drawn is
the kind first and then the place, so that the small files that matter most (manifest, mapping, headers) are hit as
often as the large ones.

Time: about 2 ms a mutation, most of it in the check. Memory: the checkpoint's files, twice.
"""

from __future__ import annotations

import itertools
import random
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from paddleformers_fc.errors import FlexError
from paddleformers_fc.formats.flex import open_flex
from paddleformers_fc.storage.checksum import INDEX_NAME, is_document
from paddleformers_fc.storage.manifest import MANIFEST_NAME
from tests.execute.simulated import canonical, save

Files = dict[str, bytes]
"""Relative path -> content."""
Mutation = tuple[str, dict[str, bytes | None], tuple[str, ...]]
"""Its kind; path -> new content, or None for a file that is taken away; the error must name one of the last."""


def checkpoint(directory: Path, seed: int) -> Files:
    """Save a small checkpoint of two ranks; its files."""

    def files(rank: int) -> Files:
        own = {f"trainer/rng-{rank:05d}.json": f'{{"seed": {seed}, "rank": {rank}}}'.encode()}
        return own if rank else {**own, "trainer/state.json": f'{{"seed": {seed}}}'.encode()}

    save(directory, canonical(layers=1, seed=seed), 2, files=files)
    found = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


def run(directory: Path, seed: int, count: int) -> tuple[str, list[str]]:
    """Damage the checkpoint in ``directory`` ``count`` times, and check each time that it is refused and named.

    Args:
        directory: where to save the checkpoint that is damaged; another of the same layout is saved beside it.
        seed: of the random numbers.
        count: how many mutations.
    Returns:
        the count, for people; and the mutations that were not refused, or whose file was not named.
    """
    files, stale = checkpoint(directory / "checkpoint-3", 0), checkpoint(directory / "checkpoint-4", 1)
    assert files.keys() == stale.keys()
    target = directory / "checkpoint-3"
    open_flex(target, "full")
    tried: Counter[str] = Counter()
    missed: list[str] = []
    for kind, change, named in itertools.islice(_mutations(random.Random(seed), files, stale), count):
        tried[kind] += 1
        _write(target, change)
        try:
            open_flex(target, "full")
            missed.append(f"{kind} of {named} is not refused")
        except FlexError as error:
            if not any(name in str(error) for name in named):
                missed.append(f"{kind} of {named} is not named: {error.what}")
        _write(target, {path: files.get(path) for path in change})
    open_flex(target, "full")
    kinds = ", ".join(f"{tried[kind]} {kind}" for kind in sorted(tried))
    return f"{count:,} mutations (seed {seed}), {count - len(missed):,} rejected under `full`: {kinds}.", missed


def _write(directory: Path, change: dict[str, bytes | None]) -> None:
    for path, content in change.items():
        if content is None:
            (directory / path).unlink()
        else:
            (directory / path).write_bytes(content)


# ---- Drawing.


def _mutations(chance: random.Random, files: Files, stale: Files) -> Iterator[Mutation]:
    """Mutations without an end, one of every kind after the other."""
    names = sorted(files)
    weights = [name for name in names if not is_document(name)]
    known = (MANIFEST_NAME, "mapping.json")
    flipped: dict[str, tuple[list[str], Callable[[bytes], int], Callable[[bytes], int]]] = {
        "tensors": (weights, _data_begin, len),
        "headers": (weights, lambda _: 0, _data_begin),
        "the manifest": ([MANIFEST_NAME], lambda _: 0, len),
        "mapping.json": (["mapping.json"], lambda _: 0, len),
        "other files": ([name for name in names if name.endswith(".json") and name not in known], lambda _: 0, len),
        "the index": ([INDEX_NAME], lambda _: 0, len),
    }
    while True:
        for place, (candidates, begin, end) in flipped.items():
            name = chance.choice(candidates)
            content = bytearray(files[name])
            content[chance.randrange(begin(files[name]), end(files[name]))] ^= 1 << chance.randrange(8)
            yield f"bit flips in {place}", {name: bytes(content)}, (name,)
        name = chance.choice(names)
        size = len(files[name])
        # Half of them lose only a few bytes, which is hardest to detect.
        kept = chance.randrange(size) if chance.random() < 0.5 else size - chance.randint(1, min(8, size))
        yield "truncations", {name: files[name][:kept]}, (name,)
        name = chance.choice(names)
        yield "missing files", {name: None}, (name,)
        one = chance.choice(names)
        other = chance.choice([name for name in names if files[name] != files[one]])
        yield "swaps of two files", {one: files[other], other: files[one]}, (one, other)
        # Some files, but not all, are those of another checkpoint of the same model and layout.
        changed = [name for name in names if files[name] != stale[name]]
        chosen = chance.sample(changed, chance.randint(1, len(changed) - 1))
        named = tuple(changed if MANIFEST_NAME in chosen else chosen)
        yield "sets of stale files", {name: stale[name] for name in chosen}, named
        # A file of an earlier save with more ranks, or a stray copy.
        source = chance.choice([*weights, "trainer/rng-00000.json"])
        name = re.sub("[0-9]{5}", f"{chance.randint(2, 99999):05d}", source)
        yield "extra files", {name: chance.choice([files, stale])[source]}, (name,)


def _data_begin(content: bytes) -> int:
    return 8 + int(struct.unpack("<Q", content[:8])[0])
