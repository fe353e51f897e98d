"""Which old checkpoints ``save_total_limit`` deletes.

Only finished flex checkpoints are counted and deleted: what another program or another format left in the directory is
not ours to remove. The newest one that is whole stays under every limit, and so does the best one.

A checkpoint with diverged copies of tied tensors is not whole. It does not count towards the limit, and is deleted
before a whole one.

Whole is what ``flex_verify`` would find whole at a resume, and at least by the sizes of files. So a bit that has
flipped in the newest one costs the older ones under ``size``, and under ``full`` it does not: then the newest one is
read and hashed before anything older is deleted. That is one pass over it for every save that has something to delete,
which the ranks share.

Where a run saves onto several disks, each holds a part of every checkpoint and no process sees whether one is whole. So
all ranks look together, and the newest one that is whole over all disks stays on each of them. If none is whole, only
checkpoints with diverged ties are deleted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from paddleformers_fc.distributed.channel import ALONE, Channel, gather_and_keep
from paddleformers_fc.errors import CheckpointError
from paddleformers_fc.storage.commit import remove_checkpoint
from paddleformers_fc.storage.leftovers import clean_unfinished
from paddleformers_fc.storage.manifest import Manifest, read_manifest
from paddleformers_fc.storage.names import parse_step
from paddleformers_fc.trainer import resume


def numbered(output_dir: Path, prefix: str) -> list[Path]:
    """The directories ``prefix-N`` of a run, lowest N first."""
    pattern = re.compile(re.escape(prefix) + "-([0-9]+)")
    found = [(match, path) for path in output_dir.glob(f"{prefix}-*") if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if path.is_dir())]


def superfluous(checkpoints: Sequence[Path], limit: int, kept: frozenset[Path]) -> list[Path]:
    """Which checkpoints are beyond a limit.

    Args:
        checkpoints: oldest first.
        limit: how many may stay.
        kept: those that stay in any case; they count.
    """
    free = [path for path in checkpoints if path not in kept]
    return free[: max(0, len(checkpoints) - max(limit, len(kept)))]


def rotate(
    output_dir: Path,
    limit: int | None,
    needed: Sequence[Path],
    say: Callable[[str], None],
    level: str = "size",
    threads: int = 4,
    channel: Channel = ALONE,
    leads: Collection[int] = (0,),
) -> None:
    """Delete the checkpoints of a run that are beyond its limit, and what crashed saves have left.

    Args:
        output_dir: where the run saves.
        limit: ``save_total_limit``; None deletes no checkpoint.
        needed: checkpoints that stay in any case: the one just saved, and the best so far if one is tracked.
        say: gets one line per directory that is deleted, and per damaged one that an older one stays for.
        level: how it is seen that the newest one is whole: ``full``, or else by the sizes of its files.
        threads: how many read and hash under ``full``.
        channel: all ranks where the run saves onto several disks, and every rank must call; else this process alone.
        leads: the ranks that delete, one for each disk.

    Raises:
        StorageError: the operating system refused.
    """
    is_lead = channel.rank in leads

    def clean() -> tuple[bool, dict[Path, Manifest]]:
        if not is_lead:
            return False, {}
        removed, _ = clean_unfinished(output_dir)
        for leftover in removed:
            say(f"Deleted {leftover.path}. {leftover.why}")
        finished = _finished(output_dir) if limit is not None else {}
        return limit is not None and len(finished) > limit, finished

    too_many, before = gather_and_keep(channel, "cleaning the output directory", clean, bool)
    if not any(too_many) or limit is None:
        return
    newest, damaged = resume.find_newest(output_dir, channel, "full" if level == "full" else "size", threads)
    if not is_lead:
        return
    # What another job has replaced meanwhile may have looked damaged, and is not the checkpoint that was looked at.
    manifests = {path: manifest for path, manifest in _finished(output_dir).items() if before.get(path) == manifest}
    checkpoints = list(manifests)
    for path, why in damaged:
        if path in manifests:
            stays = f"{newest} stays under every limit" if newest is not None else "no whole checkpoint is deleted"
            say(f"{path} is not whole, so {stays}: {why}")
    wanted = {path.resolve() for path in (newest, *needed) if path is not None}
    kept = frozenset(path for path in checkpoints if path.resolve() in wanted)
    diverged = [path for path, manifest in manifests.items() if manifest.ties]
    doomed = [path for path in diverged if path not in kept][: max(0, len(checkpoints) - limit)]
    if newest is not None:
        whole = [path for path in checkpoints if path not in diverged]
        doomed += superfluous(whole, limit, kept.intersection(whole))
    for path in doomed:
        remove_checkpoint(path)
        say(f"Deleted {path}, which is beyond save_total_limit: {limit}.")


def _finished(output_dir: Path) -> dict[Path, Manifest]:
    """The finished checkpoints of a run on this disk, lowest step first, with their manifests."""
    found = {path: _manifest(path) for path in numbered(output_dir, "checkpoint")}
    # One under another name was given it by somebody, and is not ours to delete.
    return {path: manifest for path, manifest in found.items() if manifest and manifest.step == parse_step(path)}


def _manifest(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return None
