"""Exports that are interrupted.

Open weights are written from a checkpoint or from live memory, into a new directory, in place of an older export, or
into a run's output directory. After each accident there is under the target's name the older export or the new one,
every tensor and every small file of it, or, where files are replaced one by one, something that no reader takes for an
export; files of others are there; what is left beside or inside it is recognised; and the next export cleans up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from paddleformers_fc.distributed.channel import ALONE, Channel
from paddleformers_fc.errors import FlexError, NotACheckpoint
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.live_export import save_weights
from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
from paddleformers_fc.formats.huggingface import INDEX_NAME, SINGLE_NAME, open_huggingface
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.storage.commit import leftovers
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME
from tests.crash.killing import Scenario, Step
from tests.crash.worlds import CONFIG, MODEL, NEW, NEXT, OLD, ONE, Lost, names_in, numbers_in, weights_of, whole

MANY, SINGLE = 300, 10**9
"""Bounds on a file, in bytes: some tensors in each, or all in one."""
NOTES = b"of somebody else"
NOTHING, UNFINISHED = 0, -1
"""What is under the target's name, where it is no generation."""


def scenarios() -> Iterator[Scenario]:
    """Every way in which an export meets what is there."""
    yield _scenario("to a new directory", 1, None, MANY)
    yield _scenario("of a live model to one file, 2 ranks", 2, None, SINGLE, live=True)
    yield _scenario("of a live model, 2 ranks", 2, None, MANY, live=True)
    yield _scenario("of a live model in place of an older one, 2 ranks", 2, MANY, MANY, live=True)
    yield _scenario("of a live model in place of an older one", 1, SINGLE, MANY, live=True)
    for older, bound in ((SINGLE, SINGLE), (SINGLE, MANY), (MANY, SINGLE), (MANY, MANY)):
        form = f"{'one file' if older == SINGLE else 'many'} by {'one' if bound == SINGLE else 'many'}"
        yield _scenario(f"in place of an older one, {form}", 1, older, bound)
    yield _scenario("into a run's directory", 1, None, SINGLE, inside=True)
    yield _scenario("into a run's directory with an older one", 1, SINGLE, SINGLE, inside=True)
    yield _scenario("of a live model into a run's directory", 2, SINGLE, SINGLE, live=True, inside=True)


def _scenario(
    name: str, ranks: int, older: int | None, bound: int, live: bool = False, inside: bool = False
) -> Scenario:
    """An export, and another one in its place.

    Args:
        name: for a report.
        ranks: how many.
        older: bound on a file of the export that is there before; None where there is none.
        bound: on a file of the new one.
        live: whether it is written from live memory, and not from a checkpoint.
        inside: whether the target is a run's output directory, with checkpoints in it.
    """

    def prepare(there: Path) -> None:
        for generation in (OLD, NEW, NEXT):
            _save(_checkpoint(there, generation, inside), generation)
        if older is not None:
            export_checkpoint(_checkpoint(there, OLD, inside), there / "hf", older)
            (there / "hf" / "notes.txt").write_bytes(NOTES)

    def export(there: Path, channel: Channel) -> None:
        if live:
            weights = weights_of("dp=2" if ranks == 2 else ONE, channel.rank, NEW)[MODEL_STATE]
            files = _described(NEW) if channel.rank == 0 else {}
            save_weights(weights, MODEL, files, there / "hf", bound, channel)
        else:
            export_checkpoint(there / f"checkpoint-{NEW}", there / "hf", bound)

    def again(there: Path, channel: Channel) -> None:
        if channel.rank == 0:
            export_checkpoint(there / f"checkpoint-{NEXT}", there / "hf", bound)

    def look(there: Path) -> int:
        for generation in (OLD, NEW, NEXT):
            if whole(_checkpoint(there, generation, inside)) != generation:
                raise Lost(f"checkpoint-{generation} was touched")
        if older is not None and (there / "hf" / "notes.txt").read_bytes() != NOTES:
            raise Lost("a file of somebody else was touched")
        return _found(there)

    def clean(there: Path) -> None:
        try:
            again(there, ALONE)
        except FlexError as error:
            raise Lost(f"the next export is refused: {error.render()}") from error
        left = [one.path.name for place in (there, there / "hf") for one in leftovers(place)]
        if look(there) != NEXT or left:
            raise Lost(f"the next export is not all that is there: {names_in(there / 'hf')} {left}")

    is_new = older is None and not inside
    steps = Step(export, NEW, () if is_new else (UNFINISHED,)), Step(again, NEXT, (UNFINISHED,))
    return Scenario(f"an export {name}", ranks, prepare, NOTHING if older is None else OLD, steps, look, clean)


def _checkpoint(there: Path, generation: int, inside: bool) -> Path:
    return (there / "hf" if inside and generation == OLD else there) / f"checkpoint-{generation}"


def _found(there: Path) -> int:
    """What is under the target's name: a generation of which all is there, or that there is none.

    Raises:
        Lost: something looks whole and is not, or is not recognised.
    """
    target = there / "hf"
    known = {"hf", *(f"checkpoint-{generation}" for generation in (OLD, NEW, NEXT))}
    strange = set(names_in(there)) - known - {one.path.name for one in leftovers(there)}
    if strange:
        raise Lost(f"{strange} is neither an export nor recognised as unfinished")
    inside = {one.path.name for one in leftovers(target)}
    if not target.exists() or not (set(names_in(target)) - inside - {f"checkpoint-{OLD}"}):
        return NOTHING
    try:
        tensors = open_huggingface(target, "full").catalog.roles[MODEL_STATE].values()
    except NotACheckpoint:
        return UNFINISHED
    except FlexError as error:
        raise Lost(error.render()) from error
    files = sorted({part.file for one in tensors for part in one.fragments})
    there_are = [name for name in names_in(target) if name.endswith(".safetensors")]
    has_index = (target / INDEX_NAME).exists()
    if there_are != files or has_index != (files != [SINGLE_NAME]) or not (target / CHECKSUMS_NAME).exists():
        raise Lost(f"{names_in(target)} are there, of which {files} count")
    seen = {json.loads((target / name).read_bytes())["generation"] for name in _described(OLD)}
    seen = seen.union(*(numbers_in(target / name) for name in files))
    if len(seen) != 1:
        raise Lost(f"{target} is a mixture of {sorted(seen)}")
    return int(seen.pop())


def _described(generation: int) -> dict[str, bytes]:
    """The small files of an export; each contains its generation."""
    return {
        "config.json": config_bytes({**CONFIG, "generation": generation}),
        "tokenizer.json": json.dumps({"generation": generation}).encode(),
    }


def _save(directory: Path, generation: int) -> None:
    files = {**_described(generation), "trainer/rng-00000.json": json.dumps({"generation": generation}).encode()}
    roles = {MODEL_STATE: weights_of(ONE, 0, generation)[MODEL_STATE]}
    save_checkpoint(directory, roles, MODEL, files, JobRecord(generation, generation, {}), ALONE)
