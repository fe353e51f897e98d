"""What is saved under an accident, and what must be found after it.

A model of two layers is laid over 1, 2 or 4 ranks. Every number in a checkpoint is its *generation*: all weights, all
states, the files of every rank, and the manifest's count of samples. So a mixture of two saves cannot look whole, also
where each of its files does.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from paddleformers_fc.distributed.channel import ALONE, Channel
from paddleformers_fc.errors import FlexError
from paddleformers_fc.execute.load import load_checkpoint
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model
from paddleformers_fc.storage.checksum import INDEX_NAME
from paddleformers_fc.storage.commit import leftovers
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors
from paddleformers_fc.storage.manifest import newest_checkpoint, read_manifest, verify_files
from paddleformers_fc.storage.paths import parse_hidden, parse_step
from paddleformers_fc.storage.safetensors import read_header
from paddleformers_fc.trainer.resume import find_newest
from paddleformers_fc.trainer.tiers import Retention, delete_over_limit
from tests.storage.support import names_in
from verification.simulate_ranks import Roles, filled, run_threads

SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 16, "head_dim": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}
CONFIG = {"model_type": "llama", **SIZES, **HEADS}
MODEL = ModelDescription(CONFIG)
OLD, NEW, NEXT = 1, 2, 3
"""Generations: of what is there before, of what the job saves, and of the next save."""
ONE = "dp=1"
TWO = ("dp=2", "tp=2", "pp=2", "sharding=2", "sharding=2,split=true")
GRIDS = (ONE, *TWO, "tp=2,pp=2", "tp=2,sharding=2", "sharding=4,split=true")
"""The layouts, on 1, 2 and 4 ranks."""
SOME_GRIDS = (ONE, "tp=2", "sharding=4,split=true")
Found = tuple[int, int]
"""What a run that resumes would take: the step of a checkpoint, and the generation of its numbers."""


class Lost(AssertionError):
    """What must have been found was not."""


def ranks_of(grid: str) -> int:
    """How many ranks a layout has."""
    return _model(grid).grid.world_size


def save(output_dir: Path, grid: str, step: int, generation: int, channel: Channel) -> None:
    """What one rank does to save ``checkpoint-step``."""
    files = {f"trainer/rng-{channel.rank:05d}.json": json.dumps({"generation": generation}).encode()}
    if channel.rank == 0:
        files["config.json"] = config_bytes(CONFIG)
    roles, record = weights_of(grid, channel.rank, generation), JobRecord(step, generation, {})
    save_checkpoint(output_dir / f"checkpoint-{step}", roles, MODEL, files, record, channel)


def save_together(output_dir: Path, grid: str, step: int, generation: int) -> None:
    """Save a checkpoint here and now, with a thread for each rank."""
    run_threads(ranks_of(grid), lambda channel: save(output_dir, grid, step, generation, channel))


def resume_and_save(output_dir: Path, grid: str, step: int, generation: int, channel: Channel) -> None:
    """Load the newest checkpoint under a layout, look at every number, and save a step."""
    found = find_newest(output_dir, channel)[0]
    if found is None:
        raise Lost(f"{output_dir} has nothing to resume from.")
    roles = filled(_model(grid).roles(channel.rank), functools.partial(_constant, 0))
    load_checkpoint(open_on_all_ranks(found, channel), roles, MODEL, channel)
    seen = {float(one.local_tensor.array.flat[0]) for held in roles.values() for one in held.values()}
    if len(seen) != 1:
        raise Lost(f"{found} was loaded as {sorted(seen)}.")
    save(output_dir, grid, step, generation, channel)


def rotate_alone(output_dir: Path, limit: int, saved: Path | None, channel: Channel) -> None:
    """What the ranks of a Trainer do after a save."""
    if channel.rank == 0:
        delete_over_limit(output_dir, Retention(limit), saved, (), lambda line: None)


def whole(checkpoint: Path) -> int:
    """The generation of a checkpoint in which every byte and every number is right.

    Raises:
        Lost: it is damaged, or of more than one generation.
    """
    try:
        manifest = read_manifest(checkpoint)
        verify_files(checkpoint, manifest, "full", threads=1)
    except FlexError as error:
        raise Lost(error.render()) from error
    generation = manifest.consumed_samples
    for path in (checkpoint / one.path for one in manifest.files):
        seen = {generation}
        if path.suffix == ".safetensors" and path.name != INDEX_NAME:
            seen = numbers_in(path)
        elif path.parent.name == "trainer":
            seen = {json.loads(path.read_bytes())["generation"]}
        if seen != {generation}:
            raise Lost(f"{path} holds {sorted(seen)}, not {generation}.")
    return generation


def numbers_in(path: Path) -> set[float]:
    """Every number of a file of tensors, once."""
    data, entries = path.read_bytes(), read_header(path).tensors.values()
    arrays = [np.frombuffer(data[one.begin : one.end], to_numpy(one.dtype)) for one in entries]
    return {float(number) for array in arrays for number in set(array.tolist())}


def chosen(output_dir: Path) -> Found:
    """What ``resume_from_checkpoint: true`` takes, checked to the last byte; nothing else may look like a checkpoint.

    Raises:
        Lost: there is nothing to take, or it is not whole, or something unfinished has the name of a checkpoint.
    """
    before, _ = newest_checkpoint(output_dir)
    if before is None:
        raise Lost(f"Nothing is found in {names_in(output_dir)}.")
    generation = whole(before)
    hidden = {one.path.name for one in leftovers(output_dir)}
    for name in names_in(output_dir):
        if parse_step(output_dir / name) is None and name not in hidden:
            raise Lost(f"{name} is neither a checkpoint nor recognised as unfinished.")
    after = find_newest(output_dir, ALONE)[0]
    if after is None or (after != before and whole(after) != generation):
        raise Lost(f"{before} was the newest, and {after} is taken.")
    step = parse_step(after)
    if step is None:
        raise Lost(f"{after} is taken, which has no step.")
    return step, generation


def cleaned_by_the_next_save(output_dir: Path) -> None:
    """Save a further step; afterwards there are finished checkpoints and nothing else.

    Raises:
        Lost: something is left, or the new checkpoint is not taken.
    """
    save(output_dir, ONE, 9, NEXT, ALONE)
    if chosen(output_dir) != (9, NEXT):
        raise Lost(f"The next save is not what is taken: {names_in(output_dir)}.")
    if hidden_in(output_dir):
        raise Lost(f"The next save has left {hidden_in(output_dir)}.")


def hidden_in(directory: Path) -> list[str]:
    """The directories beside the checkpoints that are not finished."""
    return [name for name in names_in(directory) if parse_hidden(directory / name) is not None]


def fresh(directory: Path) -> Path:
    """An empty directory in place of what was there."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def warm() -> None:
    """Make everything once that is made once: of a process that is about to fork."""
    for grid in GRIDS:
        for rank in range(ranks_of(grid)):
            for generation in (OLD, NEW, NEXT):
                weights_of(grid, rank, generation)


@functools.cache
def _model(grid: str) -> SimulatedModel:
    return declared_model(family_for(CONFIG), MODEL, parse_grid(grid), "bfloat16")


@functools.cache
def weights_of(grid: str, rank: int, generation: int) -> Roles:
    """What a rank holds: every number is the generation."""
    return filled(_model(grid).roles(rank), functools.partial(_constant, generation))


def _constant(generation: int, role: str, shard: Shard) -> np.ndarray[Any, Any]:
    return np.full(shard.global_shape, generation, to_numpy(to_safetensors(shard.dtype)))
