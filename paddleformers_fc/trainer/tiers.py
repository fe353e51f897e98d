"""The two tiers of a run, ``output_dir`` and in ``flex_local_dir`` a fast directory per node; and what each keeps.

The local tier is a second output directory with the same names, commits, checks and rotation. It keeps the newest two
checkpoints, and does not save steps that ``output_dir`` saves. An automatic resume takes the newest checkpoint of both
(:mod:`.resume`).

Both directories contain a record with the same id, so they may be moved or copied together. A run that finds another
id, or checkpoints without an id, does not start: it would resume or delete another run's checkpoints. Every local save
checks the record and restores a missing one, because a node may have lost its directory.

Over ``save_total_limit`` old checkpoints are deleted, except steps that ``flex_keep_every`` keeps. Only finished flex
checkpoints are counted and deleted, never other files or formats. The newest complete checkpoint and the best one
always stay. A checkpoint with diverged copies of tied tensors is not complete: it does not count, and is deleted first.

The checkpoint that was just saved is complete, because its save fails if a write or sync fails; its files are not
checked again. A checkpoint of a higher step, from another run, is checked by file sizes. Later damage is found by
``verify`` and by a resume, which then takes an older checkpoint.

If a run saves on several disks, every disk keeps the newest complete checkpoint. All ranks decide together which one
that is. If none is complete, only checkpoints with diverged ties are deleted.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from paddleformers_fc.distributed.channel import ALONE, Channel, gather_and_keep, run_on_all
from paddleformers_fc.errors import CheckpointError, Corrupt, OptionError, StorageError
from paddleformers_fc.execute.commit_coordinator import DiskLeaders
from paddleformers_fc.storage.commit import finished, remove_checkpoint
from paddleformers_fc.storage.files import is_directory, make_directories, real_path, replace_file
from paddleformers_fc.storage.json_io import decode_typed, read_document
from paddleformers_fc.storage.manifest import Manifest, candidates_in
from paddleformers_fc.storage.paths import RemotePath, parse_step
from paddleformers_fc.trainer import resume
from paddleformers_fc.trainer.options import local_dir

RECORD_NAME = "flex_local_tier.json"
"""The name of the record in ``output_dir`` and in the local tier."""

_NEW = "new "
"""The prefix of an id that the first rank has just generated."""

_OTHER_COPY = "Copy this file from the other directory: output_dir and flex_local_dir have the same one."


class TierRecord(msgspec.Struct, frozen=True):
    """The record that an output directory shares with its local tier.

    Attributes:
        id: the id of the pair.
        output_dir: the output directory when the record was written, for human readers.
        local_dir: the local tier on this node.
    """

    id: str
    output_dir: str
    local_dir: str


_records = msgspec.json.Decoder(TierRecord)


class Known(msgspec.Struct, frozen=True):
    """What a rank knows of its local tier before training.

    Attributes:
        id: the id in its output directory. If there is none, a new id on the first rank and empty on others; also empty
            without a local tier.
        is_claimed: whether both directories have the record of this run.
    """

    id: str = ""
    is_claimed: bool = False


@dataclass
class Tier:
    """A directory in which a run saves, and its saves since ``train`` was called.

    Args:
        is_local: whether it is the local tier.
        begun: the step of the last save that has begun.
        saved: the last committed checkpoint.
        disks: the processes that share a disk of the tier; known after the first save.
        id: the id of the local tier; empty before training, and without a local tier.
    """

    is_local: bool = False
    begun: int = 0
    saved: Path | None = None
    disks: DiskLeaders | None = None
    id: str = ""

    def directory(self, args: Any) -> Path:
        """Return the directory that the training arguments set."""
        local = local_dir(args) if self.is_local else None
        return Path(args.output_dir) if local is None else local


def read_record(directory: Path) -> TierRecord | None:
    """Return the record of a directory; None if it has none.

    Raises:
        FormatError: the file is not a record.
        StorageError: it cannot be read.
    """
    path = directory / RECORD_NAME
    with suppress(Corrupt):
        return decode_typed(_records, read_document(path), str(path), _OTHER_COPY)
    return None


def local_tier_of(output_dir: Path) -> Path | None:
    """Find the local tier of an output directory on this machine by their records; return None if there is none.

    Raises:
        StorageError: the operating system denied access.
    """
    record = read_record(output_dir)
    if record is None or record.local_dir == str(real_path(output_dir)):
        return None
    tier = read_record(Path(record.local_dir))
    return Path(record.local_dir) if tier is not None and tier.id == record.id else None


def known_tier(args: Any, rank: int) -> Known:
    """Read the records of this rank's tiers."""
    local, output_dir = local_dir(args), Path(args.output_dir)
    if local is None:
        return Known()
    record, other = read_record(output_dir), read_record(local)
    if record is None:
        return Known() if rank else Known(f"{_NEW}{secrets.token_hex(8)}")
    has_paths = rank != 0 or record == _record(local, output_dir, record.id)
    return Known(record.id, has_paths and other is not None and other.id == record.id)


def unused_tier(args: Any) -> str:
    """Return a warning if the output directory has a local tier and ``flex_local_dir`` is not set; else empty."""
    output_dir = Path(args.output_dir)
    with suppress(CheckpointError, StorageError):
        record = None if local_dir(args) is not None else read_record(output_dir)
        if record is not None and record.local_dir != str(real_path(output_dir)):
            return (
                f"{output_dir} has a local tier, {record.local_dir}, and flex_local_dir is not set: checkpoints there "
                f"are not resumed. Set flex_local_dir, or remove {output_dir / RECORD_NAME}."
            )
    return ""


def claim(args: Any, channel: Channel, known: Sequence[Known]) -> str:
    """Write the records of a local tier on every rank, and return the id. Every rank must call.

    The first rank writes first, so that ranks on the same disk find its records. If all ranks have found the same
    record, there is no exchange.

    Args:
        args: the training arguments.
        channel: all ranks.
        known: :func:`known_tier` of every rank.

    Raises:
        OptionError: the same on every rank: the local tier belongs to another run.
        StorageError: the same on every rank: a record cannot be read or written.
    """
    ids = [one.id for one in known]
    own = next((one for one in ids if one and not one.startswith(_NEW)), ids[0].removeprefix(_NEW))
    if all(one.is_claimed and one.id == own for one in known):
        return own
    for is_turn in (channel.rank == 0, channel.rank != 0):
        run_on_all(channel, "checking flex_local_dir", partial(_claim, args, own, channel.rank) if is_turn else tuple)
    return own


def _claim(args: Any, own: str, rank: int) -> None:
    output_dir, local = Path(args.output_dir), local_dir(args)
    if local is None:
        return
    check_own(local, own)
    known, record = read_record(output_dir), _record(local, output_dir, own)
    # Write output_dir's record first: if killed in between, the local tier must not have an id that output_dir lacks.
    if known is None or known.id != own or (rank == 0 and known != record):
        _write(output_dir, record)
    keep(local, output_dir, own)


def keep(local: Path, output_dir: Path, own: str) -> None:
    """Write the record of a local tier if it is missing.

    Raises:
        OptionError: the directory belongs to another run now.
        StorageError: the record cannot be read or written.
    """
    if read_record(local) is None:
        _write(local, _record(local, output_dir, own))
    else:
        check_own(local, own)


def check_own(local: Path, own: str) -> None:
    """Check that a local tier does not belong to another run.

    Args:
        local: the directory; it need not exist.
        own: the id of this run; empty if its output directory has none.

    Raises:
        OptionError: it has another id, or checkpoints and no id.
        StorageError: the operating system denied access.
    """
    record = read_record(local)
    if record is not None and record.id == own:
        return
    found = [path.name for path in candidates_in(local)]
    if record is None and found:
        raise OptionError(
            "flex_local_dir has checkpoints that were not saved to a local tier.",
            where=str(local),
            evidence=[f"missing: {RECORD_NAME}", f"checkpoints: {', '.join(found)}"],
            next_step="Name another directory in flex_local_dir, or move these checkpoints away.",
        )
    if record is not None:
        raise OptionError(
            "flex_local_dir is the local tier of another run.",
            where=str(local),
            evidence=[
                f"it belongs to output_dir: {record.output_dir} with the id {record.id}",
                f"this output_dir has {f'the id {own}' if own else 'no id'}",
                f"checkpoints: {', '.join(found) or 'none'}",
            ],
            next_step="Name another directory in flex_local_dir, or remove this one if that run is over. To resume one "
            "of its checkpoints, move it from every node into output_dir first.",
        )


def _record(local: Path, output_dir: Path, own: str) -> TierRecord:
    return TierRecord(own, str(real_path(output_dir)), str(real_path(local)))


def _write(directory: Path, record: TierRecord) -> None:
    make_directories(directory)
    replace_file(directory / RECORD_NAME, msgspec.json.format(msgspec.json.encode(record), indent=1))


_P = TypeVar("_P", Path, RemotePath)


@dataclass(frozen=True)
class Retention:
    """How many checkpoints of a run to keep.

    Args:
        limit: the maximum number; None for all.
        every: checkpoints whose step is a multiple of it stay over the limit; 0 for none.
        name: the name of the limit in the log.
    """

    limit: int | None
    every: int = 0
    name: str = "save_total_limit"

    def keeps(self, manifest: Manifest) -> bool:
        """Return whether ``every`` keeps a checkpoint; never if it has diverged ties."""
        return self.every > 0 and manifest.step % self.every == 0 and not manifest.ties


LOCAL_RETENTION = Retention(2, name="the limit of flex_local_dir")
"""The retention of a local tier."""


def retention_of(args: Any) -> Retention:
    """Return the retention by the training arguments; as in PaddleFormers, a limit of 0 or less means no limit."""
    limit = args.save_total_limit if args.save_total_limit and args.save_total_limit > 0 else None
    return Retention(limit, args.flex_keep_every)


def numbered(output_dir: Path, prefix: str) -> list[Path]:
    """Return the directories ``prefix-N`` of a run, lowest N first."""
    pattern = re.compile(re.escape(prefix) + "-([0-9]+)")
    found = [(match, path) for path in output_dir.glob(f"{prefix}-*") if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if is_directory(path))]


def over_limit(checkpoints: Sequence[_P], limit: int, kept: frozenset[_P]) -> list[_P]:
    """Return the oldest checkpoints over a limit.

    Args:
        checkpoints: oldest first.
        limit: maximum number of checkpoints.
        kept: checkpoints that always stay. They count towards the limit.
    """
    free = [path for path in checkpoints if path not in kept]
    return free[: max(0, len(checkpoints) - max(limit, len(kept)))]


def delete_over_limit(
    output_dir: Path,
    retention: Retention,
    saved: Path | None,
    needed: Sequence[Path],
    log: Callable[[str], None],
    channel: Channel = ALONE,
    leads: Collection[int] = (0,),
) -> None:
    """Delete the checkpoints of a run over its limit.

    Args:
        output_dir: where the run saves.
        retention: how many to keep.
        saved: the last checkpoint that this run has saved.
        needed: other checkpoints that always stay, such as the best one.
        log: receives one line per deleted directory, and per damaged one.
        channel: all ranks if the run saves on several disks, in which case every rank must call; else this process
            alone.
        leads: the ranks that delete, one per disk.

    Raises:
        StorageError: the operating system refused a deletion.
    """
    limit = retention.limit
    if limit is None:
        return
    recorded = saved.name if saved is not None else ""

    def list_own() -> tuple[list[bool], dict[Path, Manifest]]:
        found = finished_checkpoints(output_dir) if channel.rank in leads else {}
        is_complete = any(path.name == recorded and not manifest.ties for path, manifest in found.items())
        return [len(found) > limit, is_complete], found

    everyone, manifests = gather_and_keep(channel, "looking for old checkpoints", list_own, list[bool])
    if not any(too_many for too_many, _ in everyone):
        return
    known = frozenset({recorded} if any(is_complete for _, is_complete in everyone) else ())
    newest, damaged = resume.find_newest(output_dir, channel, known=known)
    if not manifests:
        return
    for path, why in damaged:
        if path in manifests:
            stays = f"{newest} stays under every limit" if newest is not None else "no complete checkpoint is deleted"
            log(f"{path} is not complete, so {stays}: {why}")
    protected = {path.resolve() for path in (newest, saved, *needed) if path is not None}
    kept = frozenset(path for path in manifests if path.resolve() in protected)
    for path in to_delete(manifests, retention, kept, newest is not None):
        remove_checkpoint(path)
        log(f"Deleted {path}, which is over {retention.name}: {limit}.")


def to_delete(
    manifests: Mapping[_P, Manifest], retention: Retention, kept: frozenset[_P], keeps_complete: bool = True
) -> list[_P]:
    """Return the checkpoints to delete: first those with diverged ties, then old ones.

    Args:
        manifests: manifests of the finished checkpoints, oldest first.
        retention: how many to keep.
        kept: checkpoints that always stay.
        keeps_complete: whether a complete checkpoint is among the kept ones.
    """
    limit = retention.limit
    if limit is None:
        return []
    diverged = [path for path, manifest in manifests.items() if manifest.ties]
    complete = [path for path in manifests if path not in diverged]
    removable = [path for path in diverged if path not in kept][: max(0, len(manifests) - limit)]
    old = over_limit(complete, limit, kept.intersection(complete)) if keeps_complete else []
    return removable + [path for path in old if not retention.keeps(manifests[path])]


def finished_checkpoints(output_dir: Path) -> dict[Path, Manifest]:
    """Return the finished checkpoints of a run on this disk, lowest step first, without renamed ones."""
    found = ((path, finished(path)) for path in numbered(output_dir, "checkpoint"))
    return {path: manifest for path, manifest in found if manifest is not None and manifest.step == parse_step(path)}
