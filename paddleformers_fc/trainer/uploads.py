"""Upload committed checkpoints in the background, under ``flex_upload``.

The leader of every disk has one thread, which uploads checkpoints one by one. The coordinator's thread also deletes
checkpoints over ``save_total_limit`` from the store. Checkpoints stay on disk until they are uploaded. A failed upload
is logged and retried after the next commit and at the end of training, which waits for all uploads and raises the last
error.

At its start a run uploads complete checkpoints of ``output_dir`` that the store lacks, so a restart completes
interrupted uploads. An error in training, an interrupt or a save on a signal stops the upload; the store then has no
manifest of that checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paddleformers_fc.distributed.channel import Channel, all_gather_checked, run_on_all
from paddleformers_fc.errors import CheckpointError, FlexError, StorageError
from paddleformers_fc.execute.commit_coordinator import DiskLeaders
from paddleformers_fc.execute.upload import Upload, remove_uploaded, uploaded_checkpoints
from paddleformers_fc.storage.commit import finished
from paddleformers_fc.storage.files import exists
from paddleformers_fc.storage.manifest import verify_files
from paddleformers_fc.storage.paths import RemotePath, parse_step
from paddleformers_fc.storage.remote_writes import check_remote_writable
from paddleformers_fc.text import rate_text, size_text
from paddleformers_fc.trainer.library import logger
from paddleformers_fc.trainer.tiers import Retention, finished_checkpoints, numbered, retention_of, to_delete

_WAIT_SECONDS = 10.0
"""Interval at which ranks that wait for uploads exchange their state."""
_STOP_SECONDS = 10.0
"""Longest wait for the thread at a stop. Launchers wait 30 s for a process that they have signalled."""


class _Stopped(Exception):
    """Stops an upload."""


class CheckpointUploader:
    """The uploads of one process.

    Args:
        url: the directory of the checkpoints in the store.
        retention: how many checkpoints to keep there.
        patience: seconds to wait for the files of other disks.
        is_coordinator: whether this process sends metadata files and manifests.
    """

    def __init__(self, url: RemotePath, retention: Retention, patience: float, is_coordinator: bool) -> None:
        self._url, self._retention, self._patience = url, retention, patience
        self._is_coordinator = is_coordinator
        self._waiting: list[Path] = []
        self._failed: dict[Path, FlexError] = {}
        self._earlier: set[Path] = set()
        self._best: str | None = None
        self._changed = threading.Condition()
        self._commits: Counter[Path] = Counter()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def enqueue_existing(self, output_dir: Path) -> None:
        """Upload checkpoints of an earlier run that the store lacks, if all of their files are on this disk."""
        for path in numbered(output_dir, "checkpoint"):
            with self._changed:
                self.enqueue(path)
                self._earlier.add(path)

    def enqueue(self, checkpoint: Path, best: str | None = None) -> None:
        """Add a committed checkpoint to the queue, after failed ones, which are retried.

        Args:
            checkpoint: ``checkpoint-N``.
            best: the best checkpoint, which is not deleted.
        """
        with self._changed:
            self._best = best or self._best
            # A run that resumed from an earlier step may save a waiting checkpoint again.
            failed = [path for path in self._failed if path != checkpoint]
            self._waiting = [*failed, *(path for path in self._waiting if path != checkpoint), checkpoint]
            self._failed.clear()
            self._earlier.discard(checkpoint)
            self._commits[checkpoint] += 1
            self._start()

    def pending(self) -> list[Path]:
        """Return the checkpoints that are not uploaded yet."""
        with self._changed:
            return [*self._failed, *self._waiting]

    def retry(self) -> None:
        """Retry failed uploads."""
        with self._changed:
            self._waiting = [*self._failed, *self._waiting]
            self._failed.clear()
            self._start()

    def is_busy(self, seconds: float) -> bool:
        """Wait for all uploads, at most some seconds; return whether any are left."""
        with self._changed:
            return not self._changed.wait_for(lambda: not self._waiting, seconds)

    def raise_failures(self) -> None:
        """Raise the last error of the first checkpoint that could not be uploaded.

        Raises:
            FlexError: there is such a checkpoint.
        """
        with self._changed:
            for error in self._failed.values():
                raise error

    def stop(self) -> None:
        """Stop after the current part. Files that are already uploaded stay, without a manifest."""
        with self._changed:
            self._stop.set()
            self._changed.notify_all()
            left = [*self._failed, *self._waiting]
            thread = self._thread
        if thread is not None:
            thread.join(_STOP_SECONDS)  # Do not wait forever for a store that does not answer.
        if left:
            names = ", ".join(path.name for path in left)
            logger.warning(f"Not uploaded to {self._url}: {names}. A restart of the run with flex_upload uploads them.")

    def _start(self) -> None:
        self._changed.notify_all()
        if self._waiting and (self._thread is None or self._stop.is_set()):
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._work, args=(self._stop,), name="flex-uploader", daemon=True)
            self._thread.start()

    def _work(self, stop: threading.Event) -> None:
        def check() -> None:
            if stop.is_set():
                raise _Stopped

        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or stop.is_set())
                if stop.is_set():
                    return
                checkpoint = self._waiting[0]
                number = self._commits[checkpoint]
            try:
                failure = self._upload(checkpoint, check)
            except _Stopped:
                return
            with self._changed:
                # Otherwise the checkpoint was committed again meanwhile, and must be uploaded again.
                if self._commits[checkpoint] == number:
                    self._waiting.remove(checkpoint)
                    if failure is not None:
                        self._failed[checkpoint] = failure
                self._changed.notify_all()

    def _upload(self, checkpoint: Path, check: Callable[[], None]) -> FlexError | None:
        """Upload a checkpoint and delete old ones from the store; log and return an error."""
        started = time.monotonic()
        target = self._url / checkpoint.name
        try:
            if not exists(checkpoint):
                logger.warning(f"{checkpoint} was deleted before it was uploaded to {self._url}.")
                return None
            if checkpoint in self._earlier and not _is_complete(checkpoint):
                return None  # Rotation and resume report it.
            sent = Upload(checkpoint, target, self._is_coordinator, self._patience, check).run()
            seconds = time.monotonic() - started
            if sent:
                logger.info(f"Uploaded {target}: {size_text(sent)} in {seconds:.2f} s, {rate_text(sent, seconds)}")
            if self._is_coordinator and self._retention.limit is not None:
                self._rotate(target)
        except _Stopped:
            raise
        except Exception as error:
            failure = error if isinstance(error, FlexError) else _unexpected(target, error)
            logger.warning(f"{checkpoint} is not uploaded; the next save tries again.\n{failure.render()}")
            return failure
        return None

    def _rotate(self, uploaded: RemotePath) -> None:
        """Delete checkpoints over the limit from the store, but never this, the newest complete or the best one."""
        manifests = uploaded_checkpoints(self._url)
        complete = [path for path, manifest in manifests.items() if not manifest.ties]
        best = None if self._best is None else Path(self._best).name
        kept = frozenset(path for path in manifests if path in (*complete[-1:], uploaded) or path.name == best)
        for path in to_delete(manifests, self._retention, kept):
            remove_uploaded(path, manifests[path])
            logger.info(f"Deleted {path}, which is over save_total_limit: {self._retention.limit}.")


def _is_complete(checkpoint: Path) -> bool:
    """Return whether all files of a checkpoint are on this disk."""
    manifest = finished(checkpoint)
    if manifest is None or manifest.step != parse_step(checkpoint):
        return False
    try:
        verify_files(checkpoint, manifest, "size")
    except CheckpointError:
        return False
    return True


def _unexpected(target: RemotePath, error: Exception) -> StorageError:
    return StorageError(
        f"The upload to {target} has failed.",
        where=str(target),
        evidence=[f"{type(error).__name__}: {error}"],
        next_step="Restart the run with the same flex_upload to upload the rest.",
    )


class Uploads:
    """The uploads of a Trainer's job.

    Args:
        url: ``flex_upload``.
        args: the training arguments.
        channel: all ranks.
    """

    def __init__(self, url: RemotePath, args: Any, channel: Channel) -> None:
        self._url, self._channel, self._patience = url, channel, args.flex_timeout
        self._output_dir = Path(args.output_dir)
        self._uploader = CheckpointUploader(url, retention_of(args), args.flex_timeout, channel.rank == 0)
        self._leads = False
        self._in_loop = False

    def check(self) -> None:
        """Check before training that the store is writable. Every rank must call.

        Raises:
            FlexError: the same on every rank: the URL, the bucket or the credentials are invalid.
        """

        def write() -> None:
            if self._channel.rank == 0:
                check_remote_writable(self._url)

        run_on_all(self._channel, "checking flex_upload", write)

    def committed(self, checkpoint: Path, best: str | None, disks: DiskLeaders) -> None:
        """Upload a committed checkpoint. Call it on every rank, on any thread, before old checkpoints are deleted."""
        if self._channel.rank in disks.sorted_leaders:
            if not self._leads:
                self._leads = True
                # Disks of other ranks were still unknown at the start of the run.
                for path in finished_checkpoints(self._output_dir) if len(disks.sorted_leaders) > 1 else ():
                    self._uploader.enqueue(path)
            self._uploader.enqueue(checkpoint, best)

    def pending(self) -> list[Path]:
        """Return the checkpoints on this disk that are not uploaded yet."""
        return self._uploader.pending()

    @contextmanager
    def draining(self) -> Iterator[None]:
        """Context manager around the training loop that uploads every checkpoint before it exits. Every rank enters.

        Raises:
            FlexError: the same on every rank: a checkpoint cannot be uploaded.
        """

        def begin() -> None:
            if self._channel.rank == 0:
                self._uploader.enqueue_existing(self._output_dir)

        run_on_all(self._channel, "looking for checkpoints to upload", begin)
        self._in_loop = True
        try:
            yield
            self.finish()
        except BaseException:
            self._uploader.stop()
            raise
        finally:
            self._in_loop = False

    def finish_outside_loop(self) -> None:
        """Wait for the upload of a checkpoint that was saved outside a training loop. Every rank must call."""
        if not self._in_loop:
            self.finish()

    def _wait(self) -> None:
        """Wait until no rank is uploading."""
        seconds = min(_WAIT_SECONDS, self._patience / 4)
        while any(
            all_gather_checked(self._channel, "waiting for uploads", lambda: self._uploader.is_busy(seconds), bool)
        ):
            continue

    def finish(self) -> None:
        """Wait until every checkpoint is uploaded; retry failed uploads once. Every rank must call.

        Raises:
            FlexError: the same on every rank: the error of the last attempt.
        """
        pending = self._uploader.pending()
        if pending:
            logger.info(f"Waiting for uploads to {self._url}: {', '.join(path.name for path in pending)}.")
        self._wait()
        self._uploader.retry()
        self._wait()
        run_on_all(self._channel, "uploading checkpoints", self._uploader.raise_failures)
