"""Saving: every rank writes its share into a staging directory; the coordinator commits it, or nothing.

1. Every rank describes its shards, and all ranks learn all descriptions. Replicas are found by box, not by count, and
   each is given to the rank that has the fewest bytes so far; every rank computes the same division.
2. The coordinator proves the mapping of the whole model, checks that every tensor is covered, and creates the staging
   directory beside the target.
3. Every rank writes its files, with checksums taken while writing, and returns receipts.
4. The coordinator writes ``mapping.json`` and the manifest and commits by renaming.

Any failure on any rank ends in the same error on every rank and in a removed staging directory; a crash leaves it
behind under a name that says so. Beyond the tensors, memory is the descriptions: linear in the shards of all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from paddleformers_fc import __version__
from paddleformers_fc.catalog.flex import CONFIG_NAME, MAPPING_NAME
from paddleformers_fc.catalog.stored import gather_shards
from paddleformers_fc.errors import MismatchError, OptionError
from paddleformers_fc.execute.channel import Channel, agree
from paddleformers_fc.execute.memory import host_copy
from paddleformers_fc.execute.staging import staging_beside
from paddleformers_fc.families import ModelTensor, bind, family_for
from paddleformers_fc.families.text import aoa_texts
from paddleformers_fc.layout import Shard
from paddleformers_fc.layout.codec import HEADER_KEY, ShardRecord, encode_shards, record_of
from paddleformers_fc.layout.live import describe_roles
from paddleformers_fc.layout.roles import MODEL_STATE, split_state_name
from paddleformers_fc.mapping import RuleSet, prove
from paddleformers_fc.mapping.boxes import shifted
from paddleformers_fc.mapping.codec import encode_rules
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.storage.commit import commit
from paddleformers_fc.storage.dtypes import item_size, to_safetensors
from paddleformers_fc.storage.files import write_file
from paddleformers_fc.storage.manifest import FileReceipt, Manifest, write_manifest
from paddleformers_fc.storage.safetensors import SafetensorsWriter

Roles = Mapping[str, Mapping[str, Any]]
Held = dict[str, dict[str, Shard]]


@dataclass(frozen=True)
class JobRecord:
    """What a checkpoint says about the job that wrote it.

    Args:
        step: optimizer steps done.
        consumed_samples: training samples seen.
        parallel: degree per parallel axis, for a reader.
    """

    step: int
    consumed_samples: int
    parallel: dict[str, int]


@dataclass(frozen=True)
class SaveReport:
    """What a save did.

    Args:
        manifest: of the finished checkpoint.
        set_aside: directories with somebody's files that were found under the checkpoint's name and moved out of the
            way, and older checkpoints that could not be deleted; normally none.
    """

    manifest: Manifest
    set_aside: tuple[Path, ...]


class _Finished(msgspec.Struct):
    """The coordinator's outcome on its way to the other ranks."""

    manifest: Manifest
    set_aside: list[str]


class _Description(msgspec.Struct):
    """One live shard on its way to the other ranks."""

    record: ShardRecord
    dtype: str


def save_checkpoint(
    directory: Path,
    roles: Roles,
    config: Mapping[str, Any],
    files: Mapping[str, bytes],
    job: JobRecord,
    channel: Channel,
) -> SaveReport:
    """Write a finished checkpoint.

    Args:
        directory: ``checkpoint-N``. An older finished one under this name is replaced in one step.
        roles: role -> name -> live ``ShardedWeight`` of this rank.
        config: the model's configuration, as in ``config.json``.
        files: this rank's small files, by path relative to the checkpoint; must hold ``config.json`` on rank 0.
        job: what the manifest says about the job.
        channel: all ranks of the job; every rank must call.
    Returns:
        the manifest, and directories that the save had to leave beside it.
    Raises:
        FlexError: the same on every rank; the target is untouched.
    """
    own: dict[str, dict[str, Any]] = {}

    def describe() -> bytes:
        own.update(_without_aliases(roles, config))
        return _encoded(describe_roles(own))

    everyone = [_decoded(payload) for payload in agree(channel, "describing shards", describe)]
    share = divide(everyone)[channel.rank]
    with staging_beside(directory, channel, lambda: _refuse_unfit(everyone, config, files)) as staging:
        written = agree(channel, "writing", lambda: _write_share(staging, own, share, files, channel.rank))
        finished = agree(
            channel, "committing", lambda: _finish(staging, directory, everyone, config, written, job, channel)
        )
    outcome = msgspec.json.decode(finished[0], type=_Finished)
    return SaveReport(outcome.manifest, tuple(map(Path, outcome.set_aside)))


def divide(everyone: list[Held]) -> list[list[tuple[str, str]]]:
    """Which rank writes which shard, so that each distinct shard is written once and bytes are even.

    Args:
        everyone: the shards of every rank, by rank.
    Returns:
        role and name of every shard that each rank writes, by rank.
    """
    holders: dict[tuple[str, Shard], list[int]] = {}
    for rank, roles in enumerate(everyone):
        for role, shards in roles.items():
            for shard in shards.values():
                holders.setdefault((role, shard), []).append(rank)
    load = [0] * len(everyone)
    share: list[list[tuple[str, str]]] = [[] for _ in everyone]
    # Shards with one holder leave no choice; the rest, largest first, go where there is least.
    for (role, shard), ranks in sorted(
        holders.items(), key=lambda entry: (len(entry[1]) > 1, -entry[0][1].size, entry[0][0], entry[0][1].name)
    ):
        rank = min(ranks, key=lambda candidate: (load[candidate], candidate))
        load[rank] += shard.size * item_size(to_safetensors(shard.dtype))
        share[rank].append((role, shard.name))
    return [sorted(names) for names in share]


def model_rules(config: Mapping[str, Any], shards: Mapping[str, Shard]) -> RuleSet:
    """The rules of a model, or of one rank's part of it, from its live shards.

    Args:
        config: the model's configuration.
        shards: ``model_state`` shards by name.
    """
    tensors = [ModelTensor(shard.name, shard.global_shape, shard.dtype, shard.cuts) for shard in shards.values()]
    cuts = {tensor.name: tensor.cuts for tensor in tensors if any(cut > 1 for cut in tensor.cuts)}
    return replace(bind(family_for(config), config, tensors), cuts=cuts)


def _without_aliases(roles: Roles, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """This rank's weights without aliases that are the very memory of their owner, as tied parameters are.

    The optimizer keeps one state for such a pair and names it after whichever of the two sorts first; it is saved under
    the owner's name. An alias with memory of its own, on another pipeline stage, is saved as itself and must be equal.
    """
    weights = dict(roles.get(MODEL_STATE, {}))
    shared: dict[str, str] = {}
    for tie in model_rules(config, describe_roles({MODEL_STATE: weights})[MODEL_STATE]).ties:
        if tie.owner in weights and _address(weights[tie.owner]) == _address(weights[tie.alias]):
            shared[tie.alias] = tie.owner
    kept: dict[str, dict[str, Any]] = {}
    for role, names in roles.items():
        for name, weight in names.items():
            state = split_state_name(role, name)
            owner = shared.get(state.parameter)
            if owner is None:
                kept.setdefault(role, {})[name] = weight
            elif role != MODEL_STATE:
                kept.setdefault(role, {})[owner + state.suffix] = weight
    return kept


def _address(weight: Any) -> int:
    return int(weight.local_tensor.data_ptr())


def _encoded(held: Held) -> bytes:
    return msgspec.json.encode(
        {
            role: [_Description(record_of(shard), shard.dtype) for shard in shards.values()]
            for role, shards in held.items()
        }
    )


def _decoded(payload: bytes) -> Held:
    found = msgspec.json.decode(payload, type=dict[str, list[_Description]])
    return {
        role: {
            item.record.name: Shard(
                item.record.name,
                item.dtype,
                item.record.global_shape,
                shifted(item.record.shape, item.record.offset),
                item.record.flat,
            )
            for item in items
        }
        for role, items in found.items()
    }


def _union(everyone: list[Held]) -> dict[str, Shard]:
    """One shard of every model tensor of the job; its cuts tell the tensor-parallel degree."""
    union: dict[str, Shard] = {}
    for roles in everyone:
        union.update(roles.get(MODEL_STATE, {}))
    return union


def _refuse_unfit(everyone: list[Held], config: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """On the coordinator, before anything is written: prove that what will be saved is whole and describes itself."""
    if CONFIG_NAME not in files:
        raise OptionError(f"A checkpoint describes itself, and {CONFIG_NAME} is missing from its files.")
    prove(model_rules(config, _union(everyone)).mapping(), "The model's mapping")
    _refuse_partial(everyone)


def _refuse_partial(everyone: list[Held]) -> None:
    faults: list[str] = []
    parameters = _union(everyone)
    for role in sorted({role for roles in everyone for role in roles}):
        distinct = {shard for roles in everyone for shard in roles.get(role, {}).values()}
        tensors, contradictions = gather_shards(
            (shard, f"rank {role}", 0, item_size(to_safetensors(shard.dtype))) for shard in distinct
        )
        faults.extend(contradictions)
        for tensor in tensors.values():
            faults.extend(tensor.faults())
        for name in tensors:
            if split_state_name(role, name).parameter not in parameters:
                faults.append(f"{name}: is a state of no parameter")
    if faults:
        raise MismatchError(
            f"{len(faults)} tensors of this job are not held whole and once. Nothing was written.",
            evidence=fold(faults),
            next_step="The ranks describe shards that do not fit together; check the parallel configuration.",
        )


def _write_share(
    staging: Path, roles: Roles, share: list[tuple[str, str]], files: Mapping[str, bytes], rank: int
) -> bytes:
    receipts: list[FileReceipt] = []
    described = describe_roles(roles)
    for role in sorted({role for role, _ in share}):
        names = [name for owner, name in share if owner == role]
        names.sort(key=lambda name: (-item_size(to_safetensors(described[role][name].dtype)), name))
        receipts.append(_write_role(staging, role, names, roles, described, rank))
    receipts.extend(write_file(staging / path, data, root=staging) for path, data in sorted(files.items()))
    return msgspec.json.encode(receipts)


def _write_role(staging: Path, role: str, names: list[str], roles: Roles, described: Held, rank: int) -> FileReceipt:
    shards = {name: described[role][name] for name in names}
    entries = [
        (name, to_safetensors(shard.dtype), shard.box.shape if shard.flat is None else (shard.size,))
        for name, shard in shards.items()
    ]
    path = staging / role / f"rank-{rank:05d}.safetensors"
    with SafetensorsWriter(
        path, entries, {"format": "flex", HEADER_KEY: encode_shards(shards)}, root=staging
    ) as writer:
        for name in names:
            writer.write(name, host_copy(roles[role][name].local_tensor))
        return writer.close()


def _finish(
    staging: Path,
    directory: Path,
    everyone: list[Held],
    config: Mapping[str, Any],
    written: list[bytes],
    job: JobRecord,
    channel: Channel,
) -> bytes:
    """On the coordinator: mapping, manifest, commit."""
    if channel.rank != 0:
        return b""
    family, rules = family_for(config), model_rules(config, _union(everyone))
    receipts = [receipt for payload in written for receipt in msgspec.json.decode(payload, type=list[FileReceipt])]
    receipts.append(write_file(staging / MAPPING_NAME, encode_rules(rules), root=staging))
    manifest = Manifest(
        written_by=f"paddleformers_fc {__version__}",
        step=job.step,
        consumed_samples=job.consumed_samples,
        world_size=channel.world_size,
        parallel=dict(job.parallel),
        family=family.name,
        aoa=aoa_texts(family, config, rules),
        files=sorted(receipts, key=lambda receipt: receipt.path),
    )
    write_manifest(staging, manifest)
    committed = commit(staging, directory)
    set_aside = [str(path) for path in (committed.kept, committed.left) if path is not None]
    return msgspec.json.encode(_Finished(manifest, set_aside))


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """A configuration as the bytes of ``config.json``."""
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
