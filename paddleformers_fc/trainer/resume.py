"""Which checkpoint a run resumes from.

One rank looks and all ranks take its answer, so that they never resume from different steps. A directory that is not a
finished checkpoint is passed over with a warning that names it, if the newest one was asked for; if it was asked for by
its name, it is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paddleformers_fc.errors import NotACheckpoint
from paddleformers_fc.execute.channel import Channel, agree
from paddleformers_fc.storage.commit import recover
from paddleformers_fc.storage.manifest import newest_checkpoint


def newest(output_dir: Path, channel: Channel, warn: Callable[[str], None]) -> Path | None:
    """The newest finished checkpoint of a run; None if it has none.

    Args:
        output_dir: where the run saves.
        channel: all ranks of the job; every rank must call.
        warn: gets one line per directory that is passed over, on the first rank.

    Raises:
        StorageError: the operating system refused to look.
    """

    def look() -> bytes:
        recover(output_dir)
        found, skipped = newest_checkpoint(output_dir)
        for path, why in skipped:
            warn(f"{path} cannot be resumed from and is passed over: {why}")
        return str(found).encode() if found is not None else b""

    answer = _first_rank(channel, f"looking for checkpoints in {output_dir}", look)
    return Path(answer.decode()) if answer else None


def newest_or_refuse(output_dir: Path, channel: Channel, warn: Callable[[str], None]) -> Path:
    """As :func:`newest`, for a run that must resume.

    Raises:
        NotACheckpoint: there is none.
    """
    found = newest(output_dir, channel, warn)
    if found is None:
        raise NotACheckpoint(
            f"{output_dir} has no finished checkpoint to resume from.",
            where=str(output_dir),
            next_step="Name a checkpoint in resume_from_checkpoint, or remove that key to start from the beginning.",
        )
    return found


def _first_rank(channel: Channel, doing: str, work: Callable[[], bytes]) -> bytes:
    return agree(channel, doing, lambda: work() if channel.rank == 0 else b"")[0]
