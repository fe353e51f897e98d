"""Save and load with real bytes between simulated ranks: any layout to any other, where no model can be built.

The ranks are threads of this process, and their weights are numpy arrays of the shards of a simulated layout. Saves,
loads, digests and exports are those of every real job. A hop loads a checkpoint of layout A on the ranks of B, saves it
there, and loads it back on A. Every canonical tensor must keep its md5, every rank of A its bits, and the exports must
be equal.

Time and memory: the model once per rank and per hop. Made for tiny models in a directory in memory.
"""

from __future__ import annotations

import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.errors import FlexError, PeerError
from paddleformers_fc.execute.digest import TensorDigest
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.load import load_checkpoint
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.layout.roles import EMA_STATE, split_state_name
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors
from verification.digests import canonical_digests, unequal_tensors
from verification.thread_ranks import job

Array = np.ndarray[Any, Any]
Roles = dict[str, dict[str, "SimulatedWeight"]]

QWEN3_MOE = ModelDescription(
    {
        "model_type": "qwen3_moe",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "vocab_size": 64,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [0],
        "tie_word_embeddings": False,
    },
    is_fleet=True,
)
"""A tiny Qwen3-MoE, whose classes are in a package that cannot be installed here."""


@dataclass(frozen=True)
class RoundTrip:
    """One cell of a matrix: from one layout to another and back.

    Args:
        source: the name of the layout that saved.
        target: the name of the layout in between.
        tensors: canonical tensors of all roles that were compared.
        differences: the tensors that were not bitwise equal, one line each.
    """

    source: str
    target: str
    tensors: int
    differences: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Return whether every bit survived."""
        return not self.differences


def round_trips(
    alone: SimulatedModel,
    rows: Mapping[str, SimulatedModel],
    columns: Mapping[str, SimulatedModel],
    directory: Path,
) -> Iterator[RoundTrip]:
    """Yield every hop from a row to a column and back.

    All rows are loaded from one checkpoint of a single rank, so that all of them hold the same canonical numbers.

    Args:
        alone: the model on one rank.
        rows: the model over the grids that save, by name.
        columns: the model over the grids that it is loaded under.
        directory: an existing directory to work in.
    """
    root = directory / "alone"
    save(root, [filled(_roles_of(alone, 0), value_of)], alone)
    expected, exported = _facts(root, directory)
    for name, row in rows.items():
        saved = directory / "source"
        roles = load(root, row)
        save(saved, roles, row)
        for target, column in columns.items():
            differences = _round_trip(saved, roles, row, column, directory, expected, exported)
            yield RoundTrip(name, target, len(expected), tuple(differences))
        shutil.rmtree(saved)
    shutil.rmtree(root)


def _round_trip(
    saved: Path,
    saved_roles: list[Roles],
    row: SimulatedModel,
    column: SimulatedModel,
    directory: Path,
    expected: list[TensorDigest],
    exported: dict[str, str],
) -> Iterator[str]:
    there, back = directory / "there", directory / "back"
    save(there, load(saved, column), column)
    returned = load(there, row)
    save(back, returned, row)
    for path, place in ((there, "there"), (back, "back")):
        found, files = _facts(path, directory)
        for role, name in unequal_tensors(expected, found):
            yield f"{place}: {role} {name} has another md5"
        if files != exported:
            yield f"{place}: the export has other files or other bytes"
        shutil.rmtree(path)
    for rank, (one, other) in enumerate(zip(saved_roles, returned, strict=True)):
        for role, weights in one.items():
            for name, weight in weights.items():
                if weight.local_tensor.array.tobytes() != other[role][name].local_tensor.array.tobytes():
                    yield f"rank {rank}: {role} {name} came back with other bits"


def _facts(checkpoint: Path, directory: Path) -> tuple[list[TensorDigest], dict[str, str]]:
    """Return the digest of every canonical tensor, and the checksum of every exported file."""
    target = directory / "exported"
    files = export_checkpoint(checkpoint, target).digests()
    shutil.rmtree(target)
    return list(canonical_digests(checkpoint)), files


def laid_out(described: ModelDescription, grid: str, dtype: str = "bfloat16") -> SimulatedModel:
    """Return a declared model over a grid, e.g. ``tp=2,pp=2``."""
    return declared_model(family_for(described.config), described, parse_grid(grid), dtype)


def save_model(directory: Path, model: SimulatedModel, value: Callable[[str, Shard], Array] | None = None) -> Path:
    """Save a model whose tensors have given values, by default those of :func:`value_of`; return the directory."""
    ranks = range(model.grid.world_size)
    save(directory, [filled(model.roles(rank), value or value_of) for rank in ranks], model)
    return directory


def save(directory: Path, roles: list[Roles], model: SimulatedModel) -> None:
    """Save what simulated ranks hold.

    Args:
        directory: the checkpoint to write.
        roles: role -> name -> weight, of every rank, by rank.
        model: the model over its grid.
    Raises:
        FlexError: as every rank of a job would.
    """

    def work(channel: Channel) -> None:
        files = {"config.json": config_bytes(model.model.config)} if channel.rank == 0 else {}
        save_checkpoint(directory, roles[channel.rank], model.model, files, JobRecord(1, 1, {}), channel)

    run_threads(model.grid.world_size, work)


def load(directory: Path, model: SimulatedModel) -> list[Roles]:
    """Load a checkpoint on simulated ranks.

    Args:
        directory: the checkpoint.
        model: the model over the grid to load under.
    Returns:
        role -> name -> weight, of every rank, by rank.
    Raises:
        FlexError: as every rank of a job would.
    """
    loaded: dict[int, Roles] = {}

    def work(channel: Channel) -> None:
        checkpoint = open_on_all_ranks(directory, channel)
        # A run without an average reads none from a checkpoint without one.
        averaged = EMA_STATE in checkpoint.catalog.roles
        shards = _roles_of(model, channel.rank) if averaged else model.roles(channel.rank)
        loaded[channel.rank] = filled(shards, _zeros)
        load_checkpoint(checkpoint, loaded[channel.rank], model.model, channel)

    run_threads(model.grid.world_size, work)
    return [loaded[rank] for rank in range(model.grid.world_size)]


def _roles_of(model: SimulatedModel, rank: int) -> dict[str, dict[str, Shard]]:
    """Return every shard of one rank of a run with a moving average of its weights."""
    averages = {name: msgspec.structs.replace(one, dtype="float32") for name, one in model.owned(rank).items()}
    return {**model.roles(rank), EMA_STATE: averages}


@lru_cache(maxsize=64)
def _name_of(dtype: np.dtype[Any]) -> str:
    return str(dtype)


class _HostPlace:
    """The memory of the arrays of simulated ranks."""

    @staticmethod
    def is_gpu_place() -> bool:
        """Return False: simulated ranks have no GPU."""
        return False

    @staticmethod
    def is_cpu_place() -> bool:
        """In main memory."""
        return True


@dataclass(frozen=True)
class HostTensor:
    """A numpy array with the methods of a tensor that the executors call.

    Args:
        array: contiguous and writable.
    """

    array: Array
    place: _HostPlace = field(default_factory=_HostPlace)

    @property
    def dtype(self) -> str:
        """Element type by its numpy name."""
        return _name_of(self.array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of every axis."""
        return self.array.shape

    def is_contiguous(self) -> bool:
        """Always."""
        return True

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        return int(self.array.ctypes.data)

    def _is_initialized(self) -> bool:
        return True


@dataclass(frozen=True)
class SimulatedWeight:
    """A shard with memory, in the fields of a ``ShardedWeight``."""

    key: str
    local_tensor: HostTensor
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    is_flattened: bool
    flattened_range: slice | None


def filled(roles: Mapping[str, Mapping[str, Shard]], value: Callable[[str, Shard], Array]) -> Roles:
    """Return memory for the shards of one rank, with the values of its part of each tensor.

    Args:
        roles: role -> name -> shard.
        value: the whole tensor that a shard is of, from its role and the shard.
    """
    return {
        role: {name: weight_of(shard, _part(value(role, shard), shard)) for name, shard in shards.items()}
        for role, shards in roles.items()
    }


def _part(whole: Array, shard: Shard) -> Array:
    part = whole[tuple(slice(low, high) for low, high in zip(shard.box.lo, shard.box.hi, strict=True))]
    if shard.flat is not None:
        part = part.reshape(-1)[shard.flat[0] : shard.flat[1]]
    return np.array(part, order="C")


def weight_of(shard: Shard, array: Array) -> SimulatedWeight:
    """Return a shard as a weight with these numbers."""
    box, flat = shard.box, None if shard.flat is None else slice(*shard.flat)
    return SimulatedWeight(shard.name, HostTensor(array), box.shape, shard.global_shape, box.lo, flat is not None, flat)


def value_of(role: str, shard: Shard) -> Array:
    """Return a tensor of random numbers that depend on its name alone; powers of beta are equal for all parameters."""
    state = split_state_name(role, shard.name, shard.global_shape)
    # An average has the name of its parameter, and other numbers.
    named = f"{role} {shard.name}" if role == EMA_STATE else shard.name
    seed = zlib.crc32((state.suffix if state.scalar else named).encode())
    numbers = np.random.default_rng(seed).standard_normal(shard.global_shape)
    return numbers.astype(to_numpy(to_safetensors(shard.dtype)))


def _zeros(role: str, shard: Shard) -> Array:
    return np.zeros(shard.global_shape, to_numpy(to_safetensors(shard.dtype)))


def run_threads(ranks: int, work: Callable[[Channel], None]) -> None:
    """Run work on so many ranks, each a thread.

    Args:
        ranks: how many.
        work: the work of each, with its channel to the others.
    Raises:
        FlexError: the error of a rank. A rank that raises anything outside an exchange ends the job for all.
    """
    raised = [outcome for outcome in job(ranks, work) if isinstance(outcome, Exception)]
    if not raised:
        return
    # The other ranks, which waited for the failed one, report a broken barrier.
    broken = threading.BrokenBarrierError
    error = min(raised, key=lambda one: isinstance(one, broken) or isinstance(one.__cause__, broken))
    if isinstance(error, FlexError):
        raise error
    raise PeerError(f"A simulated rank failed: {type(error).__name__}: {error}") from error
