"""Random damage to a small, real checkpoint.

Every mutation is drawn from a seeded generator, done to the files themselves, looked at, and undone. What is drawn is
the kind first and then the place, so that the small files that matter most (manifest, mapping, headers) are hit as
often as the large ones.

Time: about 2 ms a mutation, most of it in the check. Memory: the checkpoint's files, twice.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.errors import FlexError
from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
from paddleformers_fc.formats.flex import open_flex
from paddleformers_fc.storage.checksum import INDEX_NAME, is_document
from paddleformers_fc.storage.manifest import MANIFEST_NAME
from tests.execute.simulated import CONFIG, MODEL, Arrays, canonical, live, succeed

Files = dict[str, bytes]
"""Relative path -> content."""


@dataclass(frozen=True)
class Mutation:
    """One way to damage a checkpoint.

    Args:
        kind: for the count.
        change: path -> new content, or None for a file that is taken away.
        named: the error must name one of these.
    """

    kind: str
    change: dict[str, bytes | None]
    named: tuple[str, ...]


@dataclass
class Tally:
    """What became of the mutations.

    Args:
        tried: how many, by kind.
        missed: those that were not refused, or whose file was not named.
    """

    tried: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)

    def sentence(self, seed: int) -> str:
        """The count, for people."""
        kinds = ", ".join(f"{self.tried[kind]} {kind}" for kind in sorted(self.tried))
        total = sum(self.tried.values())
        return f"{total:,} mutations (seed {seed}), {total - len(self.missed):,} refused under `full`: {kinds}."


def checkpoint(directory: Path, seed: int) -> Files:
    """Save a small checkpoint of two ranks; its files."""
    arrays: Arrays = canonical(layers=1, seed=seed)

    def work(channel: Channel) -> None:
        rank = channel.rank
        files = {f"trainer/rng-{rank:05d}.json": f'{{"seed": {seed}, "rank": {rank}}}'.encode()}
        if rank == 0:
            files |= {"config.json": config_bytes(CONFIG), "trainer/state.json": f'{{"seed": {seed}}}'.encode()}
        record = JobRecord(3, 24, {"tp": 2})
        save_checkpoint(directory, live(arrays, 2, rank), MODEL, files, record, channel)

    succeed(2, work)
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def run(directory: Path, seed: int, count: int) -> Tally:
    """Damage the checkpoint in ``directory`` ``count`` times, and check each time that it is refused and named.

    Args:
        directory: where to save the checkpoint that is damaged; another of the same layout is saved beside it.
        seed: of the random numbers.
        count: how many mutations.
    """
    files, stale = checkpoint(directory / "checkpoint-3", 0), checkpoint(directory / "checkpoint-4", 1)
    assert files.keys() == stale.keys()
    target = directory / "checkpoint-3"
    open_flex(target, "full")
    tally = Tally()
    for mutation in _mutations(random.Random(seed), files, stale, count):
        tally.tried[mutation.kind] += 1
        _write(target, mutation.change)
        fault = _missed(target, mutation)
        _write(target, {path: files.get(path) for path in mutation.change})
        if fault:
            tally.missed.append(f"{mutation.kind} of {', '.join(mutation.named)}: {fault}")
    open_flex(target, "full")
    return tally


def _missed(target: Path, mutation: Mutation) -> str:
    try:
        open_flex(target, "full")
    except FlexError as error:
        return "" if any(name in str(error) for name in mutation.named) else f"not named: {error.what}"
    return "not refused"


def _write(directory: Path, change: dict[str, bytes | None]) -> None:
    for path, content in change.items():
        if content is None:
            (directory / path).unlink()
        else:
            (directory / path).write_bytes(content)


# ---- Drawing.


def _mutations(chance: random.Random, files: Files, stale: Files, count: int) -> Iterator[Mutation]:
    names = sorted(files)
    weights = [name for name in names if not is_document(name)]
    draw: list[Callable[[], Mutation | None]] = [
        lambda: _flipped(chance, "bit flips in tensors", weights, files, _data_begin),
        lambda: _flipped(chance, "bit flips in headers", weights, files, lambda _: 0, _data_begin),
        lambda: _flipped(chance, "bit flips in the manifest", [MANIFEST_NAME], files, lambda _: 0),
        lambda: _flipped(chance, "bit flips in mapping.json", ["mapping.json"], files, lambda _: 0),
        lambda: _flipped(chance, "bit flips in other files", _small(names), files, lambda _: 0),
        lambda: _truncated(chance, names, files),
        lambda: _swapped(chance, names, files),
        lambda: _stale(chance, names, files, stale),
        lambda: _missing(chance, names),
        lambda: _extra(chance, files, stale, weights),
        lambda: _flipped(chance, "bit flips in the index", [INDEX_NAME], files, lambda _: 0),
    ]
    done = 0
    while done < count:
        mutation = draw[done % len(draw)]()
        if mutation is not None:
            done += 1
            yield mutation


def _small(names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".json") and name not in (MANIFEST_NAME, "mapping.json")]


def _data_begin(content: bytes) -> int:
    return 8 + int(struct.unpack("<Q", content[:8])[0])


def _flipped(
    chance: random.Random,
    kind: str,
    names: list[str],
    files: Files,
    begin: Callable[[bytes], int],
    end: Callable[[bytes], int] = len,
) -> Mutation:
    name = chance.choice(names)
    content = bytearray(files[name])
    content[chance.randrange(begin(files[name]), end(files[name]))] ^= 1 << chance.randrange(8)
    return Mutation(kind, {name: bytes(content)}, (name,))


def _truncated(chance: random.Random, names: list[str], files: Files) -> Mutation:
    name = chance.choice(names)
    size = len(files[name])
    # Half of them lose a few bytes only, which is what is hardest to see.
    kept = chance.randrange(size) if chance.random() < 0.5 else size - chance.randint(1, min(8, size))
    return Mutation("truncations", {name: files[name][:kept]}, (name,))


def _swapped(chance: random.Random, names: list[str], files: Files) -> Mutation | None:
    one, other = chance.sample(names, 2)
    if files[one] == files[other]:
        return None
    return Mutation("swaps of two files", {one: files[other], other: files[one]}, (one, other))


def _stale(chance: random.Random, names: list[str], files: Files, stale: Files) -> Mutation | None:
    """Some files, but not all, are those of another checkpoint of the same model and layout."""
    changed = [name for name in names if files[name] != stale[name]]
    chosen = chance.sample(changed, chance.randint(1, len(changed) - 1))
    named = tuple(changed) if MANIFEST_NAME in chosen else tuple(chosen)
    return Mutation("sets of stale files", {name: stale[name] for name in chosen}, named)


def _missing(chance: random.Random, names: list[str]) -> Mutation:
    name = chance.choice(names)
    return Mutation("missing files", {name: None}, (name,))


def _extra(chance: random.Random, files: Files, stale: Files, weights: list[str]) -> Mutation:
    """A file that a save with more ranks has left behind, or that somebody has copied there."""
    source = chance.choice([*weights, "trainer/rng-00000.json"])
    folder = source.split("/")[0]
    stem = "rng" if folder == "trainer" else "rank"
    name = f"{folder}/{stem}-{chance.randint(2, 99999):05d}.{source.rpartition('.')[2]}"
    return Mutation("extra files", {name: chance.choice([files, stale])[source]}, (name,))
