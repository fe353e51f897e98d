"""Delete checkpoints over ``save_total_limit``, except steps that ``flex_keep_every`` keeps.

Only finished flex checkpoints are counted and deleted, never other files or formats. The newest complete checkpoint and
the best one always stay. A checkpoint with diverged copies of tied tensors is not complete: it does not count, and is
deleted first.

The checkpoint that was just saved is complete, because its save fails if a write or sync fails; its files are not
checked again. A checkpoint of a higher step, from another run, is checked by file sizes. Later damage is found by
``verify`` and by a resume, which then takes an older checkpoint.

If a run saves on several disks, every disk keeps the newest complete checkpoint. All ranks decide together which one
that is. If none is complete, only checkpoints with diverged ties are deleted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paddleformers_fc.distributed.channel import ALONE, Channel, gather_and_keep
from paddleformers_fc.storage.commit import finished, remove_checkpoint
from paddleformers_fc.storage.files import is_directory
from paddleformers_fc.storage.manifest import Manifest
from paddleformers_fc.storage.paths import RemotePath, parse_step
from paddleformers_fc.trainer import resume

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
