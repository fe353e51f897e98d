"""The contenders that share a process with Paddle: a raw copy, safetensors, Paddle's FlexCheckpoint, and this package.

Each saves what a rank holds, and fills what a rank wants. What a contender leaves on the disk is its own affair; the
bytes that count are those of the tensors. A raw read takes as many bytes as the rank needs, from one file, in one piece
per tensor: what any reader would have to do at least.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors.numpy
from safetensors import safe_open

from benchmarks.performance.files import FILE, copy_of, is_transposed
from benchmarks.performance.models import MODELS, Array
from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.execute.diff_checkpoints import compare_checkpoints
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.load import load_checkpoint
from paddleformers_fc.execute.memory import host_view, slots_of
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.reading import execute_reads
from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
from paddleformers_fc.execute.save_plan import model_rules
from paddleformers_fc.execute.verify import verify_checkpoint
from paddleformers_fc.families import ModelDescription, OptionalNames, family_for
from paddleformers_fc.formats import open_checkpoint
from paddleformers_fc.formats.huggingface import open_huggingface
from paddleformers_fc.layout.live import describe_roles
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.plan import huggingface_source, plan_reads
from paddleformers_fc.storage.executor import DEFAULT_OPTIONS
from paddleformers_fc.storage.files import byte_view

EXPORTED_FILE_BYTES = 5 * 10**9
_CHECKED_BYTES = 4 << 20


@dataclass(frozen=True)
class Held:
    """What one rank holds or wants.

    Args:
        model: a name of :data:`.models.MODELS`.
        shards: role -> name -> shard.
        weights: role -> name -> live ``ShardedWeight``.
        channel: to the other ranks.
    """

    model: str
    shards: Mapping[str, Mapping[str, Shard]]
    weights: Mapping[str, Mapping[str, Any]]
    channel: Channel

    @property
    def arrays(self) -> dict[str, Array]:
        """The memory of every tensor, flat, by role and name."""
        return {
            f"{role}/{name}": _memory(weight) for role, names in self.weights.items() for name, weight in names.items()
        }


def _memory(weight: Any) -> Array:
    view = host_view(weight.local_tensor)
    if view is None:
        raise RuntimeError(f"{weight.key} is not in main memory")
    return view


class Checker(Protocol):
    """One way of reading all bytes of what was saved."""

    def check(self, verb: str, directory: Path) -> None:
        """Carry out ``verify``, or ``diff`` with the copy of what was saved (:func:`copy_of`)."""


class Contender(Protocol):
    """One way of saving and loading."""

    def save(self, directory: Path, held: Held) -> None:
        """Write what this rank holds; ``directory`` exists and is empty."""

    def load(self, directory: Path, held: Held) -> int:
        """Fill what this rank wants from what was saved; the bytes that were read, or -1 if they are not counted."""

    def start(self, directory: Path, held: Held) -> int:
        """The same from a directory of open weights."""

    def export(self, source: Path, target: Path, held: Held) -> None:
        """Write open weights: from a checkpoint, or from memory where a contender has no other way."""


class Raw:
    """The bytes, copied as they are."""

    def save(self, directory: Path, held: Held) -> None:
        """One file per rank, written and synced."""
        descriptor = os.open(directory / f"{held.channel.rank}.raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for array in held.arrays.values():
                view = byte_view(array)
                while view:
                    view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def load(self, directory: Path, held: Held) -> int:
        """This rank's file, piece by piece into the tensors."""
        descriptor = os.open(directory / f"{held.channel.rank}.raw", os.O_RDONLY)
        position = 0
        try:
            for array in held.arrays.values():
                view = byte_view(array)
                while view:
                    count = os.preadv(descriptor, [view], position)
                    position, view = position + count, view[count:]
        finally:
            os.close(descriptor)
        return position

    start = load

    def export(self, source: Path, target: Path, held: Held) -> None:
        """The tensors from memory into one file."""
        self.save(target, held)

    def check(self, verb: str, directory: Path) -> None:
        """Every file, piece by piece into one buffer; for ``diff`` twice."""
        buffer = memoryview(bytearray(_CHECKED_BYTES))
        for path in sorted(directory.glob("*.raw")) * (2 if verb == "diff" else 1):
            descriptor, position = os.open(path, os.O_RDONLY), 0
            try:
                while count := os.preadv(descriptor, [buffer], position):
                    position += count
            finally:
                os.close(descriptor)


class Safetensors:
    """The safetensors library: one file per rank, which knows nothing of layouts."""

    def save(self, directory: Path, held: Held) -> None:
        """``save_file`` of this rank's tensors."""
        safetensors.numpy.save_file(held.arrays, directory / f"{held.channel.rank}.safetensors")

    def load(self, directory: Path, held: Held) -> int:
        """``load_file``, and a copy into the tensors that exist."""
        found = safetensors.numpy.load_file(directory / f"{held.channel.rank}.safetensors")
        for name, array in held.arrays.items():
            np.copyto(array, found[name])
        return -1

    def start(self, directory: Path, held: Held) -> int:
        """A slice of every tensor with ``get_slice``, transposed by numpy into the tensor that exists."""
        with safe_open(directory / FILE, framework="numpy") as file:
            for name, shard in held.shards[MODEL_STATE].items():
                box = tuple(slice(low, high) for low, high in zip(shard.box.lo, shard.box.hi, strict=True))
                found = file.get_slice(name)[box[::-1] if is_transposed(name) else box]
                target = _memory(held.weights[MODEL_STATE][name]).reshape(shard.box.shape)
                np.copyto(target, found.T if is_transposed(name) else found)
        return -1

    def export(self, source: Path, target: Path, held: Held) -> None:
        """``save_file`` of the whole model, which is in memory."""
        safetensors.numpy.save_file(held.arrays, target / FILE)


@dataclass(frozen=True)
class Stock:
    """Paddle's own FlexCheckpoint.

    Args:
        options: ``safetensors=True`` for its other format.
    """

    options: Mapping[str, Any]

    def save(self, directory: Path, held: Held) -> None:
        """``save_state_dict``."""
        from paddle.distributed import save_state_dict

        with _quiet():
            save_state_dict(_flat(held), str(directory), **self.options)

    def load(self, directory: Path, held: Held) -> int:
        """``load_state_dict``."""
        from paddle.distributed import load_state_dict

        with _quiet():
            load_state_dict(_flat(held), str(directory), **self.options)
        return -1

    def start(self, directory: Path, held: Held) -> int:
        """``load_state_dict`` of open weights, with a statement for every transpose."""
        from paddle.distributed import load_state_dict

        statements = [
            f"{name}^T -> {name}" if is_transposed(name) else f"{name} -> {name}" for name in held.shards[MODEL_STATE]
        ]
        with _quiet():
            load_state_dict(_flat(held), str(directory), safetensors=True, aoa_config={"aoa_statements": statements})
        return -1

    def export(self, source: Path, target: Path, held: Held) -> None:
        """Stock has no export from a checkpoint without a model."""
        raise NotImplementedError


def _flat(held: Held) -> dict[str, Any]:
    return {name: weight for names in held.weights.values() for name, weight in names.items()}


@contextlib.contextmanager
def _quiet() -> Any:
    """Stock logs a line per key."""
    import logging

    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@dataclass(frozen=True)
class Ours:
    """This package: with checksums, proof, manifest and commit when it saves, with preflight when it loads.

    Args:
        verify: ``flex_verify`` of a load.
    """

    verify: str

    def save(self, directory: Path, held: Held) -> None:
        """``save_checkpoint``."""
        model = ModelDescription(MODELS[held.model].config, is_fleet=False)
        files = {"config.json": config_bytes(model.config)} if held.channel.rank == 0 else {}
        save_checkpoint(directory / "checkpoint-1", held.weights, model, files, JobRecord(1, 1, {}), held.channel)

    def load(self, directory: Path, held: Held) -> int:
        """``open_on_all_ranks`` and ``load_checkpoint``."""
        opened = open_on_all_ranks(directory / "checkpoint-1", held.channel, self.verify)
        return load_checkpoint(
            opened, held.weights, ModelDescription(MODELS[held.model].config, is_fleet=False), held.channel
        ).bytes_read

    def start(self, directory: Path, held: Held) -> int:
        """What ``prepare_weights`` does, for the ranks of one pipeline stage, the other stages not being there."""
        model = ModelDescription(MODELS[held.model].config, is_fleet=False)
        catalog = open_huggingface(directory).catalog
        shards = describe_roles(held.weights)
        optional = OptionalNames(family_for(model.config), model)
        source, report = huggingface_source(catalog, model_rules(model, shards[MODEL_STATE]), optional)
        plan = plan_reads(source, shards)
        plan.report.merge([report]).refuse(str(directory))
        return execute_reads(plan, directory, slots_of(held.weights), DEFAULT_OPTIONS, catalog.identities)

    def export(self, source: Path, target: Path, held: Held) -> None:
        """``export_checkpoint``."""
        export_checkpoint(source / "checkpoint-1", target / "exported", EXPORTED_FILE_BYTES)

    def check(self, verb: str, directory: Path) -> None:
        """``paddleformers-fc verify`` or ``diff``, without the start of a process."""
        saved = directory / "checkpoint-1"
        if verb == "diff":
            equal = compare_checkpoints(open_checkpoint(saved), open_checkpoint(copy_of(saved))).equal
        else:
            equal = verify_checkpoint(saved, "full")[1] is None
        if not equal:
            raise RuntimeError(f"{verb} has found a fault in {saved}")


CONTENDERS: Mapping[str, Contender] = {
    "raw": Raw(),
    "safetensors": Safetensors(),
    "stock": Stock({}),
    "stock safetensors": Stock({"safetensors": True}),
    "ours": Ours("full"),
    "ours size": Ours("size"),
    "ours off": Ours("off"),
}
"""By the names of the cases."""

CHECKERS: Mapping[str, Checker] = {"raw": Raw(), "ours": Ours("full")}
"""Those that take part in cases that fill no tensor."""
