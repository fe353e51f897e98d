"""A data loader that starts in the middle of an epoch, and what the position needs to know of the data.

PaddleFormers' loop runs as if it started from the beginning. The wrapped loader (:class:`ResumedBatches`) starts the
first epoch where the checkpoint ended, and sets the sampler's epoch instead of the loop. Indexed corpora
(``dataset_type: pretrain``) are identified by a digest of 256 samples.

Time: PaddleFormers' samplers skip by index. Streams, which have no index, and custom loaders are read up to the
position.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import xxhash
from paddle.io import BatchSampler

from paddleformers_fc.trainer.library import (
    DistributedBatchSampler,
    MappingBatchSampler,
    MappingDistributedBatchSampler,
)
from paddleformers_fc.trainer.position import BatchSizes, Position, SampleOrder, Start, passes_of

_DIGESTED_SAMPLES = 256


def digest(dataset: Any, count: int) -> str:
    """Return a digest of the first samples of an indexed corpus; empty for other data.

    PaddleFormers distributes a corpus to as many samples as the run needs, so another ``max_steps`` or global batch may
    change all samples. The digest covers the documents and offsets of evenly spaced samples.

    Args:
        dataset: PaddleFormers' ``GPTDataset``, or a ``BlendableDataset`` of several.
        count: number of samples.
    """
    if not _is_indexed(dataset) or not 0 < count <= len(dataset):
        return ""
    chosen = np.unique(np.linspace(0, count - 1, _DIGESTED_SAMPLES).astype(np.int64))
    locations = [_location(dataset, int(index)) for index in chosen]
    return xxhash.xxh3_128_hexdigest(repr((count, locations)).encode())


def _is_indexed(dataset: Any) -> bool:
    if hasattr(dataset, "dataset_index"):
        return all(_is_indexed(one) for one in dataset.datasets)
    return hasattr(dataset, "shuffle_idx")


def _location(dataset: Any, index: int) -> tuple[int, ...]:
    """Return the location of a sample: the index of its dataset, its first and last document, and offsets in them."""
    if hasattr(dataset, "dataset_index"):
        number = int(dataset.dataset_index[index])
        return (number, *_location(dataset.datasets[number], int(dataset.dataset_sample_index[index])))
    row = int(dataset.shuffle_idx[index])
    (first, begin), (last, end) = dataset.sample_idx[row], dataset.sample_idx[row + 1]
    return int(dataset.doc_idx[first]), int(begin), int(dataset.doc_idx[last]), int(end)


_SKIPPING = (MappingBatchSampler, MappingDistributedBatchSampler, DistributedBatchSampler)
_NOTHING = object()


def order_of(loader: Any) -> SampleOrder:
    """Return the order in which a data loader reads samples.

    Args:
        loader: the result of ``Trainer.get_train_dataloader``.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, MappingDistributedBatchSampler):
        seed = sampler.base_seed if sampler.shuffle else 0
        return SampleOrder(True, sampler.total_size, bool(sampler.shuffle), seed, len(sampler.dataset))
    if isinstance(sampler, MappingBatchSampler):
        source = sampler.sampler
        shuffled, length = hasattr(source, "base_seed"), len(source.data_source)
        return SampleOrder(True, length, shuffled, source.base_seed if shuffled else 0, length)
    if isinstance(sampler, DistributedBatchSampler):
        return SampleOrder(True, sampler.total_size, False, 0)
    return SampleOrder(False, 0, False, 0)


def needs_finished_epochs(loader: Any, indexed: bool) -> bool:
    """Return whether the order of an epoch may depend on the epochs before it, and only reading these restores it.

    Args:
        loader: the data loader.
        indexed: as for :class:`ResumedBatches`.
    """
    return not indexed and not isinstance(getattr(loader, "batch_sampler", None), BatchSampler)


def passes_of_epoch(loader: Any, length: int | None) -> int | None:
    """Return the number of forward passes of this rank in an epoch; None if it is unknown.

    The length of PaddleFormers' distributed sampler also counts a sample that its order leaves out.

    Args:
        loader: the result of ``Trainer.get_train_dataloader``.
        length: its length.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, MappingDistributedBatchSampler):
        return length
    return passes_of(sampler.total_size, BatchSizes(sampler.batch_size, 1, sampler.nranks), sampler.drop_last)


class ResumedBatches:
    """The data loader of a resumed run, whose first epoch begins where the checkpoint ended.

    Args:
        loader: the data loader.
        start: the position at which the run continues.
        indexed: whether samples are skipped by index, on this rank or on the rank that sends its batches.
        on_first_batch: restores the global random generators, from which shuffling draws. In the middle of an epoch it
            is called between reading and training the first batch. At the start of an epoch, which the saved run had
            not shuffled yet, it is called before the first batch is read.
        on_epoch_over: called if the first epoch has no batch left and the next epoch replaces it, which is known of a
            stream only after reading it.
        keep_waiting: receives each batch that waits in a pipeline, before the first batch.
        rereads: whether to read finished epochs again; see :func:`needs_finished_epochs`.
    """

    def __init__(
        self,
        loader: Any,
        start: Start,
        indexed: bool,
        on_first_batch: Callable[[], None],
        on_epoch_over: Callable[[], None],
        keep_waiting: Callable[[Any], None],
        rereads: bool = True,
    ) -> None:
        self._loader = loader
        self._indexed = indexed
        self._start = start
        self._on_first_batch = on_first_batch
        self._is_first = True
        self._is_begun = False
        self._on_epoch_over = on_epoch_over
        self._keep_waiting = keep_waiting
        self._rereads = rereads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        skips = self._start.passes > 0
        iterator = self._begin_epoch()
        first = next(iterator, _NOTHING)
        if first is _NOTHING and skips:
            self._on_epoch_over()
            iterator = self._begin_epoch()
            first = next(iterator, _NOTHING)
        for batch in () if first is _NOTHING else itertools.chain([first], iterator):
            self._restore_once()
            yield batch

    def expect_first(self) -> None:
        """Treat the next batch as the first one, because the saved run had trained on all batches before it."""
        self._is_first = True

    def _restore_once(self) -> None:
        if self._is_first:
            self._on_first_batch()
            self._is_first = False

    def _begin_epoch(self) -> Iterator[Any]:
        position, passes, order = self._start.position, self._start.passes, self._start.order
        epoch, samples, waiting = position.epoch, position.samples, position.waiting
        self._start = Start(Position(epoch + 1), 0)
        is_at_begin = passes == 0
        if waiting:
            samples -= waiting * (samples // passes)
            passes -= waiting
        sampler = getattr(self._loader, "batch_sampler", None)
        if isinstance(sampler, _SKIPPING):
            sampler.set_epoch(epoch, samples)
        elif isinstance(sampler, BatchSampler) and not self._is_begun:
            _replay_epochs(self._loader, sampler, epoch)
        elif self._rereads and not self._is_begun:
            for _ in range(epoch):
                for _ in self._loader:
                    pass
        if is_at_begin:
            self._restore_once()
        if order is not None and isinstance(sampler, MappingBatchSampler | MappingDistributedBatchSampler):
            iterator = _iterate_with(self._loader, _RemainingBatches(sampler, order, epoch, samples))
        else:
            iterator = _iterate(self._loader, epoch > 0 and not self._is_begun)
        self._is_begun = True
        for _ in range(0 if self._indexed else passes):
            next(iterator, None)
        for batch in itertools.islice(iterator, waiting):
            self._keep_waiting(batch)
        return iterator


def _replay_epochs(loader: Any, sampler: BatchSampler, epochs: int) -> None:
    """Iterate a sampler over finished epochs without reading data, so that it shuffles the next epoch as before.

    Args:
        loader: the sampler's loader.
        sampler: a sampler that counts its epochs or draws from the global random generators.
        epochs: number of finished epochs.
    """
    for epoch in range(epochs):
        if getattr(loader, "num_workers", 0) and not (epoch and _has_persistent_workers(loader)):
            np.random.randint(sys.maxsize)  # A loader draws a seed when it starts worker processes.
        for _ in sampler:
            pass


def _has_persistent_workers(loader: Any) -> bool:
    return bool(getattr(loader, "num_workers", 0) and getattr(loader, "_persistent_workers", False))


def _iterate(loader: Any, had_workers: bool) -> Iterator[Any]:
    """Return an iterator over an epoch of a loader.

    Args:
        loader: the data loader.
        had_workers: whether the saved run had started worker processes before this epoch, unlike this run.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if not (had_workers and _has_persistent_workers(loader) and isinstance(sampler, BatchSampler)):
        # The loader of semi-automatic parallelism is its own iterator, and calling iter() on it restarts it.
        return (batch for batch in loader)
    loader.batch_sampler = _SeedUndoingSampler(sampler)
    try:
        return (batch for batch in loader)
    finally:
        loader.batch_sampler = sampler


class _SeedUndoingSampler:
    """A sampler that shuffles as if the loader had not just drawn a seed for worker processes.

    The loader of a resumed run starts persistent workers in a later epoch than the saved run did.
    """

    def __init__(self, sampler: BatchSampler) -> None:
        self._sampler = sampler
        self._state: Any = np.random.get_state()

    def __iter__(self) -> Iterator[Any]:
        state, self._state = self._state, None
        if state is not None:
            np.random.set_state(state)
        yield from self._sampler


def _iterate_with(loader: Any, sampler: Any) -> Iterator[Any]:
    """Return an iterator of a loader that uses another sampler; later iterators use the loader's own."""
    # Under distributed_dataloader the loader sends batches of an inner loader, and creates its iterator lazily.
    reader = getattr(loader, "_dataloader", loader)
    own, keeps = reader.batch_sampler, reader._persistent_workers
    # With persistent workers the next epochs would reuse this iterator and its sampler.
    reader.batch_sampler, reader._persistent_workers = sampler, False
    try:
        iterator: Iterator[Any] = iter(reader)
    finally:
        reader.batch_sampler, reader._persistent_workers = own, keeps
    if reader is loader:
        return iterator
    loader._lazy_dataloader_iter = iterator
    return iter(loader)


class _RemainingBatches:
    """The rest of a resumed epoch, in an order that differs from the sampler's own.

    Args:
        sampler: the sampler of this rank.
        order: the order; each of its parts is permuted as PaddleFormers' samplers permute an epoch.
        epoch: added to the seed.
        samples: number of samples of the epoch, over all ranks, to leave out.
    """

    def __init__(self, sampler: Any, order: SampleOrder, epoch: int, samples: int) -> None:
        ranks, rank = getattr(sampler, "nranks", 1), getattr(sampler, "local_rank", 0)
        indices: list[int] = []
        for end in order.ends:
            paddle.seed(order.seed + epoch)
            begin = len(indices)
            indices += [begin + index for index in paddle.randperm(end - begin).tolist()]
        mine = indices[: len(indices) // ranks * ranks][rank::ranks][samples // ranks :]
        self.batch_size = sampler.batch_size
        full = len(mine) // self.batch_size * self.batch_size
        stop = full if sampler.drop_last else len(mine)
        self._batches = [mine[start : start + self.batch_size] for start in range(0, stop, self.batch_size)]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)
