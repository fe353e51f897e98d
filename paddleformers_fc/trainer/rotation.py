"""Delete old checkpoints beyond ``save_total_limit``, but for those of every N-th step under ``flex_keep_every: N``.

The limit counts and deletes finished flex checkpoints only, never files of other programs or formats. The newest whole
checkpoint and the best one are never deleted. A checkpoint with diverged copies of tied tensors is not whole: it does
not count towards the limit, and is deleted before whole ones.

The checkpoint that was just saved is whole by the record of its save, which computes sizes and checksums while it
writes and fails if a write or sync fails; its files are not looked at again. Only a checkpoint with a higher step, of
another run, is whole by the sizes of its files. Damage that happens later is found by a resume, which then takes an
older checkpoint, and by ``verify``.

If a run saves on several disks, each contains a part of every checkpoint. All ranks look together, and the newest
checkpoint that is whole across all disks stays on each of them. If none is whole, only checkpoints with diverged ties
are deleted.
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
    """How many checkpoints of a run stay.

    Args:
        limit: the maximum number; None for all.
        every: checkpoints of steps that are multiples stay beyond the limit; 0 for none.
        name: of the limit, in the log.
    """

    limit: int | None
    every: int = 0
    name: str = "save_total_limit"

    def keeps(self, manifest: Manifest) -> bool:
        """Return whether a checkpoint stays beyond the limit; one with diverged ties does not."""
        return self.every > 0 and manifest.step % self.every == 0 and not manifest.ties


LOCAL_RETENTION = Retention(2, name="the limit of flex_local_dir")
"""The retention of a local tier."""


def retention_of(args: Any) -> Retention:
    """Return the retention of a run by its training arguments; PaddleFormers has no limit where it is 0 or less."""
    limit = args.save_total_limit if args.save_total_limit and args.save_total_limit > 0 else None
    return Retention(limit, args.flex_keep_every)


def numbered(output_dir: Path, prefix: str) -> list[Path]:
    """Return the directories ``prefix-N`` of a run, lowest N first."""
    pattern = re.compile(re.escape(prefix) + "-([0-9]+)")
    found = [(match, path) for path in output_dir.glob(f"{prefix}-*") if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if is_directory(path))]


def superfluous(checkpoints: Sequence[_P], limit: int, kept: frozenset[_P]) -> list[_P]:
    """Return the checkpoints beyond a limit.

    Args:
        checkpoints: oldest first.
        limit: maximum number of checkpoints.
        kept: checkpoints that always stay; they count.
    """
    free = [path for path in checkpoints if path not in kept]
    return free[: max(0, len(checkpoints) - max(limit, len(kept)))]


def delete_superfluous(
    output_dir: Path,
    retention: Retention,
    saved: Path | None,
    needed: Sequence[Path],
    log: Callable[[str], None],
    channel: Channel = ALONE,
    leads: Collection[int] = (0,),
) -> None:
    """Delete the checkpoints of a run beyond its limit.

    Args:
        output_dir: where the run saves.
        retention: how many stay.
        saved: the checkpoint that this run has saved last.
        needed: further checkpoints that always stay: the best one.
        log: receives one line per deleted directory, and per damaged one.
        channel: all ranks if the run saves on several disks, and every rank must call; otherwise this process alone.
        leads: the ranks that delete, one for each disk.

    Raises:
        StorageError: the operating system refused a deletion.
    """
    limit = retention.limit
    if limit is None:
        return
    recorded = saved.name if saved is not None else ""

    def look() -> tuple[list[bool], dict[Path, Manifest]]:
        found = finished_checkpoints(output_dir) if channel.rank in leads else {}
        is_whole = any(path.name == recorded and not manifest.ties for path, manifest in found.items())
        return [len(found) > limit, is_whole], found

    everyone, manifests = gather_and_keep(channel, "looking for old checkpoints", look, list[bool])
    if not any(too_many for too_many, _ in everyone):
        return
    known = frozenset({recorded} if any(is_whole for _, is_whole in everyone) else ())
    newest, damaged = resume.find_newest(output_dir, channel, known=known)
    if not manifests:
        return
    for path, why in damaged:
        if path in manifests:
            stays = f"{newest} stays under every limit" if newest is not None else "no whole checkpoint is deleted"
            log(f"{path} is not whole, so {stays}: {why}")
    wanted = {path.resolve() for path in (newest, saved, *needed) if path is not None}
    kept = frozenset(path for path in manifests if path.resolve() in wanted)
    for path in beyond(manifests, retention, kept, newest is not None):
        remove_checkpoint(path)
        log(f"Deleted {path}, which is beyond {retention.name}: {limit}.")


def beyond(
    manifests: Mapping[_P, Manifest], retention: Retention, kept: frozenset[_P], has_whole: bool = True
) -> list[_P]:
    """Return the checkpoints to delete: those with diverged ties first.

    Args:
        manifests: of the finished checkpoints, oldest first.
        retention: how many stay.
        kept: checkpoints that always stay.
        has_whole: whether one of those that stay is whole.
    """
    limit = retention.limit
    if limit is None:
        return []
    diverged = [path for path, manifest in manifests.items() if manifest.ties]
    whole = [path for path in manifests if path not in diverged]
    removable = [path for path in diverged if path not in kept][: max(0, len(manifests) - limit)]
    old = superfluous(whole, limit, kept.intersection(whole)) if has_whole else []
    return removable + [path for path in old if not retention.keeps(manifests[path])]


def finished_checkpoints(output_dir: Path) -> dict[Path, Manifest]:
    """Return the finished checkpoints of a run on this disk, lowest step first; renamed ones are never deleted."""
    found = ((path, finished(path)) for path in numbered(output_dir, "checkpoint"))
    return {path: manifest for path, manifest in found if manifest is not None and manifest.step == parse_step(path)}
