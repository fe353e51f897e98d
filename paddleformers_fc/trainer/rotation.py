"""Delete old checkpoints beyond ``save_total_limit``.

The limit counts and deletes finished flex checkpoints only, never files of other programs or formats. The newest whole
checkpoint and the best one are never deleted. A checkpoint with diverged copies of tied tensors is not whole: it does
not count towards the limit, and is deleted before whole ones.

A checkpoint is whole if ``flex_verify`` would accept it at a resume; sizes of files are always compared. Under ``full``
the ranks also hash the newest checkpoint, each a share of it, before an older one is deleted: one pass per save that
deletes.

If a run saves on several disks, each contains a part of every checkpoint. All ranks verify together, and the newest
checkpoint that is whole across all disks stays on each of them. If none is whole, only checkpoints with diverged ties
are deleted.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

from paddleformers_fc.distributed.channel import ALONE, Channel, gather_and_keep
from paddleformers_fc.errors import CheckpointError
from paddleformers_fc.storage.commit import remove_checkpoint
from paddleformers_fc.storage.files import is_directory
from paddleformers_fc.storage.leftovers import clean_unfinished
from paddleformers_fc.storage.manifest import Manifest, read_manifest
from paddleformers_fc.storage.names import parse_step
from paddleformers_fc.storage.paths import RemotePath
from paddleformers_fc.trainer import resume

_P = TypeVar("_P", Path, RemotePath)


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


def rotate(
    output_dir: Path,
    limit: int | None,
    needed: Sequence[Path],
    log: Callable[[str], None],
    level: str = "size",
    threads: int = 4,
    channel: Channel = ALONE,
    leads: Collection[int] = (0,),
) -> None:
    """Delete the checkpoints of a run beyond its limit, and leftovers of interrupted saves.

    Args:
        output_dir: where the run saves.
        limit: ``save_total_limit``; None deletes no checkpoint.
        needed: checkpoints that always stay: the last one, and the best one.
        log: receives one line per deleted directory, and per damaged one.
        level: verification of the newest checkpoint: ``full``, otherwise sizes of files.
        threads: threads that read and hash under ``full``.
        channel: all ranks if the run saves on several disks, and every rank must call; otherwise this process alone.
        leads: the ranks that delete, one for each disk.

    Raises:
        StorageError: the operating system refused a deletion.
    """
    is_lead = channel.rank in leads

    def clean() -> tuple[bool, dict[Path, Manifest]]:
        if not is_lead:
            return False, {}
        removed, _ = clean_unfinished(output_dir)
        for leftover in removed:
            log(f"Deleted {leftover.path}. {leftover.why}")
        finished = finished_checkpoints(output_dir) if limit is not None else {}
        return limit is not None and len(finished) > limit, finished

    too_many, before = gather_and_keep(channel, "cleaning the output directory", clean, bool)
    if not any(too_many) or limit is None:
        return
    newest, damaged = resume.find_newest(output_dir, channel, "full" if level == "full" else "size", threads)
    if not is_lead:
        return
    # A checkpoint that another job has replaced meanwhile was not verified.
    present = finished_checkpoints(output_dir)
    manifests = {path: manifest for path, manifest in present.items() if before.get(path) == manifest}
    checkpoints = list(manifests)
    for path, why in damaged:
        if path in manifests:
            stays = f"{newest} stays under every limit" if newest is not None else "no whole checkpoint is deleted"
            log(f"{path} is not whole, so {stays}: {why}")
    wanted = {path.resolve() for path in (newest, *needed) if path is not None}
    kept = frozenset(path for path in checkpoints if path.resolve() in wanted)
    diverged = [path for path, manifest in manifests.items() if manifest.ties]
    removable = [path for path in diverged if path not in kept][: max(0, len(checkpoints) - limit)]
    if newest is not None:
        whole = [path for path in checkpoints if path not in diverged]
        removable += superfluous(whole, limit, kept.intersection(whole))
    for path in removable:
        remove_checkpoint(path)
        log(f"Deleted {path}, which is beyond save_total_limit: {limit}.")


def finished_checkpoints(output_dir: Path) -> dict[Path, Manifest]:
    """Return the finished checkpoints of a run on this disk, lowest step first; renamed ones are never deleted."""
    found: dict[Path, Manifest] = {}
    for path in numbered(output_dir, "checkpoint"):
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(path)
            if manifest.step == parse_step(path):
                found[path] = manifest
    return found
