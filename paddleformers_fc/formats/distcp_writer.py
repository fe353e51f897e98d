"""The files of a checkpoint that PaddleFormers' Trainer and Paddle's ``dist.load_state_dict`` read.

The tensors are those of the saved model, cut as on its ranks: the order inside a fused layer depends on the
tensor-parallel degree, which only the cuts record. Tied tensors and their states are stored under all their names: in a
pipeline stock reads all of them, elsewhere it reads states under the name that sorts first. Every role has a directory
with ``0.metadata`` and files ``0_0.distcp``, ``1_0.distcp``, ...; Paddle requires the three roles even where one is
empty. The Trainer's state is written into the files that PaddleFormers reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.families.stated import model_ties
from paddleformers_fc.formats.checkpoint import ExportWriter, OpenedCheckpoint, OutputFile, compare_run, grouped_by_size
from paddleformers_fc.formats.stock_checkpoint import refuse_alternating
from paddleformers_fc.formats.stock_run import SCALER, SCHEDULER
from paddleformers_fc.layout.roles import MASTER_WEIGHT, MODEL_STATE, OPTIMIZER_STATE, parameter_of
from paddleformers_fc.layout.shards import Shard, ShardsByRole, shard_bytes
from paddleformers_fc.mapping import RuleSet, Tie
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.storage import state_json
from paddleformers_fc.storage.checksum import FileChecksum
from paddleformers_fc.storage.dtypes import dtype_size, to_numpy, to_safetensors
from paddleformers_fc.storage.manifest import TRAINER_DIRECTORY
from paddleformers_fc.storage.pickles import PickledObject, encode_array_dict, encode_pickle
from paddleformers_fc.storage.safetensors import FileLayout

METADATA_NAME = "0.metadata"
_ROLES = (MODEL_STATE, MASTER_WEIGHT, OPTIMIZER_STATE)
_CLASSES = "paddle.distributed.flex_checkpoint.dcp.metadata"
_STATE = ("paddleformers.trainer.trainer_callback", "TrainerState")
_GENERATOR = ("paddle.base.libpaddle", "GeneratorState")


class DistcpWriter(ExportWriter):
    """Metadata and files of arrays, one directory per role, and the files of a Trainer."""

    marks = tuple(f"{role}/{METADATA_NAME}" for role in _ROLES)
    alone = True

    def rules(self, checkpoint: OpenedCheckpoint) -> RuleSet:
        """Return the rules of the stored model, or of that built from open weights, with the ties of its family."""
        model = checkpoint.format.built_model(checkpoint)
        refuse_alternating(checkpoint.catalog.root, model)
        ties = {**model_ties(model.description), **model.rules.aliases}
        owned = (Tie(owner, alias) for alias, owner in ties.items() if owner in model.rules.targets)
        return replace(model.rules, ties=tuple(owned))

    def files(self, checkpoint: OpenedCheckpoint, layout: ShardsByRole, max_file_bytes: int) -> tuple[OutputFile, ...]:
        """Divide the tensors of the three roles into files."""
        rules = self.rules(checkpoint)
        copies: dict[str, list[str]] = {}
        for tie in rules.ties:
            copies.setdefault(tie.owner, [tie.owner]).append(tie.alias)
        found: list[OutputFile] = []
        for role in _ROLES:
            parts: dict[int, dict[str, Shard]] = {}
            for name, tensor in layout.get(role, {}).items():
                parameter = parameter_of(role, name)
                names = [copy + name.removeprefix(parameter) for copy in copies.get(parameter, (parameter,))]
                for number, shard in enumerate(_cut(tensor, rules.cuts.get(parameter, ()))):
                    named = {copy: msgspec.structs.replace(shard, name=copy) for copy in names}
                    parts.setdefault(number, {}).update(named)
            groups = [group for _, part in sorted(parts.items()) for group in grouped_by_size(part, max_file_bytes)]
            for path, group in zip(self.names(role, 0, len(groups)), groups, strict=True):
                found.append(OutputFile(path, role, tuple(sorted(group, key=lambda one: -dtype_size(one.dtype)))))
        return tuple(found)

    def names(self, role: str, rank: int, count: int) -> list[str]:
        """Return the paths of the files of a role; Paddle's names begin with a rank, and any rank reads any file."""
        return [f"{role}/{number}_0.distcp" for number in range(count)]

    def header(self, path: Path, shards: Sequence[Shard]) -> FileLayout:
        """Return the pickle of a dict of arrays around their bytes."""
        sizes = tuple(map(shard_bytes, shards))
        arrays = [(one.name, _code(one.dtype), one.box.shape, size) for one, size in zip(shards, sizes, strict=True)]
        header, trailer = encode_array_dict(arrays)
        return FileLayout(header, sizes, trailer)

    def documents(self, checkpoint: OpenedCheckpoint, files: Sequence[OutputFile]) -> dict[str, bytes]:
        """Return the metadata of every role, and the state of the Trainer as far as the checkpoint has it."""
        found = {f"{role}/{METADATA_NAME}": _metadata([one for one in files if one.role == role]) for role in _ROLES}
        empty = set(_ROLES) - {one.role for one in files}
        found |= {f"{role}/0_0.distcp": encode_pickle({}) for role in sorted(empty)}
        for path in sorted(checkpoint.documents):
            directory, _, name = path.rpartition("/")
            if directory == TRAINER_DIRECTORY:
                found |= _of_trainer(checkpoint, path, name.removesuffix(".json"))
        if checkpoint.has_run:
            compare_run(checkpoint)
            found |= {f"saved_signal_{rank}": b"1" for rank in range(checkpoint.manifest.world_size)}
        return found

    def seal(
        self, checkpoint: OpenedCheckpoint, files: Sequence[OutputFile], written: Sequence[FileChecksum]
    ) -> dict[str, bytes]:
        """Return nothing: the format records no checksums."""
        return {}


def _cut(tensor: Shard, cuts: Sequence[int]) -> Iterator[Shard]:
    """Yield the shards of a tensor that is cut as its parameter; a number of a parameter is whole."""
    shape = tensor.global_shape
    if len(cuts) != len(shape) or any(length % cut for length, cut in zip(shape, cuts, strict=True)):
        cuts = (1,) * len(shape)
    lengths = [length // cut for length, cut in zip(shape, cuts, strict=True)]
    for place in itertools.product(*map(range, cuts)):
        low = tuple(number * length for number, length in zip(place, lengths, strict=True))
        high = tuple(begin + length for begin, length in zip(low, lengths, strict=True))
        yield msgspec.structs.replace(tensor, box=Box(low, high))


def _metadata(files: Sequence[OutputFile]) -> bytes:
    described: dict[str, list[PickledObject]] = {}
    stored: dict[PickledObject, str] = {}
    for file in files:
        for one in file.tensors:
            flat = {"is_flattened": False, "flattened_range": None}
            place = {"global_offset": one.box.lo, "local_shape": one.box.shape}
            tensor = {**place, "dtype": one.dtype, "global_shape": one.global_shape, **flat}
            index = {"tensor_key": one.name, **place, **flat, "replica_id": None}
            described.setdefault(one.name, []).append(PickledObject(_CLASSES, "LocalTensorMetadata", tensor))
            stored[PickledObject(_CLASSES, "LocalTensorIndex", index)] = file.path.rpartition("/")[2]
    names = {name: (name,) for name in described}
    state = {"state_dict_metadata": described, "storage_metadata": stored, "flat_mapping": names}
    return encode_pickle(PickledObject(_CLASSES, "Metadata", state))


def _of_trainer(checkpoint: OpenedCheckpoint, path: str, name: str) -> dict[str, bytes]:
    """Return the file of PaddleFormers for a document of a Trainer; none for documents that it has no file for."""
    if name not in ("state", "scheduler", "scaler") and not name.startswith("rng-"):
        return {}
    state = state_json.decode_object(checkpoint.document(path), name)
    if name == "state":
        return {"trainer_state.bin": encode_pickle(PickledObject(*_STATE, state))}
    if name.startswith("rng-"):
        tracked = {key: list(map(_generator, states)) for key, states in state["hybrid_parallel"].items()}
        states: dict[str, Any] = {
            "python": state["python"],
            "numpy": state["numpy"],
            "cuda": list(map(_generator, state["device"])),
            "cpu": _generator(state["cpu"]),
            "world_size": state["world_size"],
        }
        if tracked:
            states["hybrid_parallel_rng_state_tracker"] = tracked
        return {f"rng_state_{int(name.removeprefix('rng-'))}.pth": encode_pickle(states)}
    return {SCHEDULER if name == "scheduler" else SCALER: encode_pickle(state)}


def _generator(state: dict[str, Any]) -> PickledObject:
    engine = list(state["engine"].encode("latin-1"))
    return PickledObject(*_GENERATOR, (state["device"], state["seed"], state["offset"], engine))


def _code(dtype: str) -> str:
    """Return numpy's code of an element type; Paddle writes the bits of bfloat16 as unsigned integers."""
    if dtype == "bfloat16":
        return "u2"
    found: str = np.dtype(to_numpy(to_safetensors(dtype))).str[1:]
    return found


DISTCP_WRITER = DistcpWriter()
