"""The position of a run in its data, in samples: saved, restored and tracked, and settings that may change the data.

PaddleFormers counts optimizer steps, and so repeats or loses samples if the global batch changes on resume. Here the
position is ``(epoch, samples of the epoch)``. It is exact because all samplers of PaddleFormers take batches from the
front of one order: after k batches, the first ``k * micro batch * data ranks`` samples are trained. A resumed run reads
the rest of the epoch in the saved order, also if the order is rounded to another number of ranks or the data is longer.
If seed or data differ, the trained samples are unknown, and resuming raises an error.

PaddleFormers' loop runs as if it started from the beginning. The wrapped loader (:class:`ResumedBatches`) starts the
first epoch where the checkpoint ended, and sets the sampler's epoch instead of the loop. PaddleFormers' samplers skip
by index. Streams, which have no index, and custom loaders are read up to the position.

Other changes (learning rate, corpus, tokenizer, batch) are only reported. Indexed corpora (``dataset_type: pretrain``)
are identified by a digest of 256 samples.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import msgspec
import numpy as np
import paddle
import xxhash
from paddle.io import BatchSampler

from paddleformers_fc.errors import FormatError, OptionError
from paddleformers_fc.families.changes import ABSENT, Change, table, value_text
from paddleformers_fc.storage.checksum import checksum_of
from paddleformers_fc.storage.manifest import RESTORE, Manifest
from paddleformers_fc.trainer import documents
from paddleformers_fc.trainer.library import (
    DistributedBatchSampler,
    MappingBatchSampler,
    MappingDistributedBatchSampler,
)

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
SAME_SAMPLES = (
    "Resume under settings with the same samples in the same order, or set ignore_data_skip: true to start the epoch "
    "from its beginning."
)


@dataclass(frozen=True)
class SampleOrder:
    """The order of the samples of an epoch.

    Args:
        indexed: whether samples have indices, so that a sampler can skip them.
        length: number of ordered samples, which the number of data ranks divides; 0 for a stream.
        shuffled: whether they are permuted.
        seed: seed of the permutation, to which the epoch is added; 0 without a permutation.
        samples: number of samples of the data, before it is rounded; 0 if unknown.
        parts: earlier lengths, if the data was extended within the epoch; each part has its own permutation.
        corpus: digest of the first :func:`covered` samples of the data; empty if unknown.
    """

    indexed: bool
    length: _Count
    shuffled: bool
    seed: int
    samples: _Count = 0
    parts: tuple[_Count, ...] = ()
    corpus: str = ""

    @property
    def ends(self) -> tuple[int, ...]:
        """The end index of each separately permuted part."""
        return (*self.parts, self.length)


@dataclass(frozen=True)
class BatchSizes:
    """The batch sizes of a run.

    Args:
        micro_batch: samples per rank and forward pass.
        accumulation: forward passes per optimizer step.
        ranks: number of data-parallel ranks, which read different samples.
    """

    micro_batch: _Size
    accumulation: _Size
    ranks: _Size

    @property
    def per_pass(self) -> int:
        """Samples of one forward pass on all ranks."""
        return self.micro_batch * self.ranks

    @property
    def per_step(self) -> int:
        """Samples of one optimizer step: the global batch."""
        return self.per_pass * self.accumulation


@dataclass(frozen=True)
class Position:
    """The position of a run in its data.

    Args:
        epoch: number of finished epochs.
        samples: samples of the current epoch that were read, on all ranks together.
        consumed: samples that were read since the first step.
        waiting: forward passes among them whose batches a pipeline has read and not trained yet. PaddleFormers keeps
            the remainder of an epoch for the next one, and trains every later batch with this delay.
        ended: whether the loop is at the end of the epoch, after passes beyond the last step that ``samples`` does not
            count.
    """

    epoch: _Count = 0
    samples: _Count = 0
    consumed: _Count = 0
    waiting: _Count = 0
    ended: bool = False


def batch_sizes_of(args: Any, passes: int | None = None) -> BatchSizes:
    """Return the batch sizes of a run.

    Args:
        args: PaddleFormers' training arguments.
        passes: forward passes per rank in an epoch, to which PaddleFormers limits the accumulation; None if unknown.
    """
    accumulation = args.gradient_accumulation_steps
    if passes:
        accumulation = min(accumulation, passes)
    return BatchSizes(args.per_device_train_batch_size, accumulation, args.dataset_world_size)


def to_document(position: Position, pace: BatchSizes, order: SampleOrder) -> dict[str, Any]:
    """Encode a position for a checkpoint; :func:`from_document` reads it."""
    return {"position": asdict(position), "pace": asdict(pace), "order": {**asdict(order), "parts": list(order.parts)}}


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    """The type of the result of :func:`to_document`."""

    position: Position
    pace: BatchSizes
    order: SampleOrder


SavedData = tuple[Position, BatchSizes, SampleOrder]
"""A position, with the batch sizes and the order of the run that saved it."""


class StepPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The position in a checkpoint of another format, which does not contain the order of the data.

    Attributes:
        steps: completed optimizer steps.
        consumed: trained samples.
        pace: the batch sizes; None if unknown.
    """

    steps: _Count
    consumed: _Count
    pace: BatchSizes | None

    def under(self, pace: BatchSizes, order: SampleOrder, passes: int | None, drop_last: bool = False) -> SavedData:
        """Return the position in the data of this run, as PaddleFormers computes it from steps.

        Args:
            pace: batch sizes of this run; also used for the saved run if its own are unknown.
            order: order of this run. The saved run must have had the same order, except for rounding to its ranks.
            passes: forward passes per rank in an epoch of this run; None if unknown, as for a stream.
            drop_last: whether both runs drop a last batch that is not full.
        """
        old = self.pace or pace
        if not order.indexed or passes is None:
            return Position(0, self.steps * old.per_step, self.consumed), old, order
        if old.ranks != pace.ranks and order.samples:
            order = replace(order, length=order.samples // old.ranks * old.ranks)
        own = passes if old == pace else passes_of(order.length, old, drop_last)
        epoch, steps = divmod(self.steps, max(own // max(min(old.accumulation, own), 1), 1))
        return Position(epoch, steps * old.per_step, self.consumed), old, order


def from_document(document: dict[str, Any], where: str) -> SavedData | StepPosition:
    """Decode the result of :func:`to_document`, or the position in a checkpoint of another format.

    Raises:
        FormatError: the document is damaged.
    """
    what = "Invalid position in the data."
    if "steps" in document:
        return documents.typed(document, StepPosition, what, where)
    read = documents.typed(document, _Document, what, where)
    position, ends = read.position, read.order.ends
    fault = ""
    if list(ends) != sorted(set(ends)):
        fault = "Invalid order of the data: parts overlap."
    elif position.waiting * read.pace.per_pass > position.samples:
        fault = "Invalid position in the data: more samples wait than were read."
    if fault:
        raise FormatError(fault, where=where, evidence=[str(read)], next_step=RESTORE)
    return position, read.pace, read.order


@dataclass(frozen=True)
class Start:
    """The position at which a resumed run continues.

    Args:
        position: the position; ``samples`` is 0 if the saved epoch is finished.
        passes: forward passes of the epoch before it; the last ``position.waiting`` of them are still to be trained.
        order: the order of the rest of the epoch; None for the order of this run.
    """

    position: Position
    passes: int
    order: SampleOrder | None = None


def start_after(
    saved: tuple[Position, BatchSizes, SampleOrder],
    pace: BatchSizes,
    order: SampleOrder,
    passes: int | None,
    pipeline: bool = False,
    drop_last: bool = False,
) -> Start:
    """Return the position at which a run continues.

    The last passes of an epoch run even if they are too few for a step: PaddleFormers adds their gradients to the next
    step.

    Args:
        saved: position, batch sizes and order of the checkpoint.
        pace: batch sizes of this run.
        order: order of this run.
        passes: forward passes per rank in an epoch of this run; None if unknown, as for a stream.
        pipeline: whether batches can wait in this run. If not, or if batch sizes differ, the run continues at the first
            waiting batch.
        drop_last: whether this run drops a last batch that is not full.
    Raises:
        OptionError: the settings of this run do not determine which samples were trained.
    """
    position, old_pace, old_order = saved
    if not pipeline or pace != old_pace:
        position = _without_waiting(position, old_pace)
    if position.samples == 0:
        return Start(position, 0)
    rest = _order_of_rest(old_order, order)
    if rest is not None:
        passes = passes_of(rest.length, pace, drop_last)
    faults = list(_order_faults(old_order, order if rest is None else replace(order, length=old_order.length)))
    if position.samples % pace.per_pass:
        faults.append(
            f"{position.samples} samples of epoch {position.epoch} were trained; {pace.ranks} data ranks with "
            f"per_device_train_batch_size {pace.micro_batch} read {pace.per_pass} per pass"
        )
    if faults:
        raise OptionError(
            "The run cannot continue with the next sample: the order of its data or its batch sizes do not fit.",
            where=f"global batch {old_pace.per_step} when saved, {pace.per_step} now",
            evidence=faults,
            next_step=SAME_SAMPLES,
        )
    done = position.samples // pace.per_pass
    if passes is not None and done - position.waiting >= passes:
        return Start(Position(position.epoch + 1, 0, position.consumed), 0)
    return Start(position, done, rest)


def passes_of(length: int, pace: BatchSizes, drop_last: bool = False) -> int:
    """Return the number of forward passes of every data rank in an epoch of this length."""
    full, left = divmod(length // pace.ranks, pace.micro_batch)
    return full + (left > 0 and not drop_last)


def covered(position: Position, order: SampleOrder) -> int:
    """Return how many of the data's first samples may have been trained; a checkpoint contains a digest of these."""
    return order.length if order.shuffled else position.samples


def _order_of_rest(old: SampleOrder, new: SampleOrder) -> SampleOrder | None:
    """Return the order of the rest of the epoch if its permutation differs from this run's; None if not, or unknown."""
    shuffled = old.indexed and new.indexed and old.shuffled and new.shuffled
    if not shuffled or old.ends == new.ends or not _same_samples(old, new):
        return None
    length = max(old.length, new.length)
    return replace(new, length=length, parts=tuple(end for end in old.ends if end < length))


def _same_samples(old: SampleOrder, new: SampleOrder) -> bool:
    """Return whether the data begins with the samples that the saved run has permuted."""
    if old.length > new.samples:  # Also bounds the numbers of a damaged checkpoint.
        return False
    return old.corpus == new.corpus if old.corpus else old.samples == new.samples


def _without_waiting(position: Position, pace: BatchSizes) -> Position:
    """Return the position before the waiting batches."""
    waiting = position.waiting * pace.per_pass
    return replace(position, samples=position.samples - waiting, consumed=position.consumed - waiting, waiting=0)


def _order_faults(old: SampleOrder, new: SampleOrder) -> Iterator[str]:
    if old.indexed != new.indexed:
        yield "the data was a map and is a stream now" if old.indexed else "the data was a stream and is a map now"
    elif old.shuffled != new.shuffled:
        yield f"dataloader_shuffle was {str(old.shuffled).lower()} and is {str(new.shuffled).lower()}"
    elif new.shuffled and old.seed != new.seed:
        yield f"seed was {old.seed} and is {new.seed}, which shuffles the data differently"
    elif new.shuffled and old.length != new.length:
        yield f"{old.length} samples were shuffled and {new.length} are now, which gives another order"
    if old.corpus and new.corpus != old.corpus:
        yield (
            "the corpus is distributed to other samples: by seed, sequence length, and the number of passes over it "
            "that max_steps and the global batch need"
        )


def epochs_left(start: Start, epochs: int, bounded_by_steps: bool, done: bool) -> int:
    """Return the number of epochs that a resumed loop still has to run.

    Args:
        start: the position at which it continues.
        epochs: epochs of the complete run.
        bounded_by_steps: whether ``max_steps`` ends the run.
        done: whether all steps are done.
    """
    if done:
        return 0
    return sys.maxsize if bounded_by_steps else max(epochs - start.position.epoch, 0)


OPTIMIZER = (
    *("optim", "learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm"),
    *("scale_loss", "optimizer"),
)
SCHEDULE = (
    *("lr_scheduler_type", "lr_scheduler", "warmup_ratio", "warmup_steps", "min_lr", "lr_end", "num_cycles", "power"),
    *("decay_steps", "decay_function", "max_steps", "num_train_epochs"),
)
CORPUS = (
    *("dataset_type", "input_dir", "split", "train_dataset_type", "train_dataset_path", "train_dataset_sizes"),
    *("train_dataset_prob", "mix_strategy", "random_shuffle", "num_samples_each_epoch", "max_seq_len"),
    *("max_prompt_len", "packing", "padding_free", "greedy_intokens", "buffer_size", "binpacking", "packing_interval"),
    *("truncate_packing", "truncation_strategy", "template", "use_template", "template_backend", "encode_one_turn"),
    *("split_multi_turn", "new_special_tokens_path", "dataloader_shuffle"),
)
AVERAGE = ("flex_ema_decay", "flex_ema_interval")
SETTINGS = (*OPTIMIZER, *SCHEDULE, *AVERAGE, "seed", *CORPUS)
"""The arguments of a run that are compared, in the order of the table."""

STREAM_ARGUMENT = "dataloader_num_workers"
"""An argument that may change the order of a stream, and of no other data."""

_BATCH_ADVICE = (
    "The number of samples per step has changed. To keep it, change per_device_train_batch_size or "
    "gradient_accumulation_steps."
)
_STREAM_ADVICE = (
    "The data is a stream. This run skips as many samples as were trained. If the order of the stream depends on "
    "{keys}, some samples are repeated and others are lost. To avoid that, change it back; to read the data from "
    "its beginning, set ignore_data_skip: true."
)


def argument_changes(saved: Mapping[str, Any], now: Mapping[str, Any], streams: bool) -> list[Change]:
    """Compare the arguments of two runs.

    Args:
        saved: the arguments in the checkpoint, by name.
        now: the arguments of this run.
        streams: whether the data is a stream.
    """
    names = (*SETTINGS, STREAM_ARGUMENT) if streams else SETTINGS
    pairs = [(name, saved[name], now[name]) for name in names if name in saved and name in now]
    return [Change(name, value_text(old), value_text(new)) for name, old, new in pairs if old != new]


def check_same_samples(saved: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Check that the settings still produce the samples of an epoch that a run continues.

    A script's own data has none of these settings. Samples of an indexed corpus (``dataset_type: pretrain``) are
    compared by their digest instead.

    Args:
        saved: the arguments in the checkpoint, by name.
        now: the arguments of this run.
        where: the checkpoint.

    Raises:
        OptionError: with every changed setting.
    """
    if now.get("dataset_type") == "pretrain" or not {"packing", "random_shuffle"} <= saved.keys() & now.keys():
        return
    keys = {
        "packing": "so that samples are packed differently",
        "random_shuffle": "which orders the data differently",
        **({"max_seq_len": "so that samples are packed differently"} if now["packing"] else {}),
        **({"seed": "which shuffles the data differently"} if now["random_shuffle"] else {}),
    }
    faults = [
        f"{key} was {value_text(saved.get(key))} and is {value_text(now.get(key))}, {effect}"
        for key, effect in keys.items()
        if saved.get(key) != now.get(key)
    ]
    if faults:
        raise OptionError(
            "The run cannot continue with the next sample: its settings produce different samples from the data.",
            where=where,
            evidence=faults,
            next_step=SAME_SAMPLES,
        )


def batch_changes(saved: BatchSizes, now: BatchSizes) -> list[Change]:
    """Compare batch sizes. If the number of data-parallel ranks differs, compare the global batch only."""
    rows = [("samples per step", saved.per_step, now.per_step)]
    if saved.per_step != now.per_step or saved.ranks == now.ranks:
        rows += [
            ("per_device_train_batch_size", saved.micro_batch, now.micro_batch),
            ("gradient_accumulation_steps", saved.accumulation, now.accumulation),
            ("data-parallel ranks", saved.ranks, now.ranks),
        ]
    return [Change(key, value_text(old), value_text(new)) for key, old, new in rows if old != new]


def length_changes(saved: tuple[SampleOrder, BatchSizes], now: tuple[SampleOrder, BatchSizes]) -> list[Change]:
    """Compare the lengths of the data, which are rounded to the number of data-parallel ranks."""
    (old, old_pace), (new, new_pace) = saved, now
    known = old.indexed and new.indexed and old.length and new.length and old_pace.ranks == new_pace.ranks
    if not known or old.length == new.length:
        return []
    return [Change("samples of train_dataset", value_text(old.length), value_text(new.length))]


def file_changes(manifest: Manifest, files: Mapping[str, bytes]) -> list[Change]:
    """Compare files of a tokenizer or processor by their checksums.

    Args:
        manifest: the manifest of the checkpoint.
        files: the contents of the files as this run would save them, by path.
    """
    changes = []
    # Checkpoints of other formats list no files.
    for path, content in sorted(files.items()) if manifest.files else ():
        checksum, digest = manifest.record_of(path), checksum_of(path, content).digest
        if checksum is None or checksum.digest != digest:
            saved = ABSENT if checksum is None else checksum.digest[:12]
            changes.append(Change(path, saved, digest[:12]))
    return changes


def changes_text(step: int, changes: Iterable[Change], streams: bool = False) -> str:
    """Return the warning about all changes; empty without any.

    Args:
        step: the step of the checkpoint.
        changes: the differences.
        streams: whether the data is a stream, some of whose samples were trained.
    """
    rows = list(changes)
    if not rows:
        return ""
    keys = [row.key for row in rows]
    lines = [f"This run differs from the one that saved step {step}:", *(f"  {line}" for line in table(rows))]
    if "samples per step" in keys:
        lines.append(_BATCH_ADVICE)
    ordering = [key for key in keys if key in ("seed", STREAM_ARGUMENT, *CORPUS)]
    if streams and ordering:
        lines.append(_STREAM_ADVICE.format(keys=" or ".join(ordering)))
    return "\n".join(lines)


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
    """

    def __init__(
        self,
        loader: Any,
        start: Start,
        indexed: bool,
        on_first_batch: Callable[[], None],
        on_epoch_over: Callable[[], None],
        keep_waiting: Callable[[Any], None],
    ) -> None:
        self._loader = loader
        self._indexed = indexed
        self._start = start
        self._on_first_batch = on_first_batch
        self._is_first = True
        self._is_begun = False
        self._on_epoch_over = on_epoch_over
        self._keep_waiting = keep_waiting

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


class PositionTracker:
    """Tracks the position of the training loop in its data; :class:`.session.LoopEvents` calls it.

    It also corrects two values of the Trainer's state that the loop derives from steps: the consumed samples, and the
    epoch of a run that was resumed in the middle of an epoch.

    Args:
        waiting: returns the number of batches that wait in a pipeline.
    """

    def __init__(self, waiting: Callable[[], int]) -> None:
        self._waiting = waiting
        self.begin(SampleOrder(False, 0, False, 0), None, Start(Position(), 0), False, 0)

    def begin(
        self,
        order: SampleOrder,
        passes: int | None,
        start: Start,
        resumed: bool,
        epochs: int,
        on_epoch_replayed: Callable[[], None] | None = None,
    ) -> None:
        """Start to track a run.

        Args:
            order: the order of the data.
            passes: forward passes per rank in an epoch; None if unknown, as for a stream.
            start: the position at which the run starts.
            resumed: whether the run was resumed.
            epochs: number of epochs of the run, including those before the resume.
            on_epoch_replayed: called at the end of a resumed epoch whose remaining passes the saved run had made.
        """
        self._own_order, self._passes, self._resumed, self._epochs = order, passes, resumed, epochs
        self.order = start.order or order
        self._on_epoch_replayed = on_epoch_replayed
        self._epochs_begun = self._step_at_epoch_begin = 0
        self._counted = sys.maxsize  # The last step that the position includes; no step is counted before an epoch.
        self.position = self._epoch_begin = start.position

    def begin_next_epoch(self) -> None:
        """Replace the resumed epoch, which has no batch left, by the next one."""
        self.order = self._own_order
        self.position = self._epoch_begin = Position(self._epoch_begin.epoch + 1, 0, self.position.consumed)

    def catch_up(self, args: Any, state: Any) -> None:
        """Count all steps so far: a callback may save before its step is counted, and skipped steps have no event."""
        if state.global_step > self._counted:
            self._count(args, state, self._waiting())
        state.consumed_samples = self.position.consumed

    def on_train_begin(self, args: Any, state: Any) -> None:
        """Set the number of epochs of the run; the loop counts only the remaining ones."""
        state.num_train_epochs = self._epochs
        state.consumed_samples = self.position.consumed
        self._set_epoch(args, state)

    def on_epoch_begin(self, state: Any) -> None:
        """Set the position to the first sample of an epoch, or to the start of the resumed epoch."""
        if self._epochs_begun > 0:
            self.order = self._own_order
            self._epoch_begin = Position(self._epoch_begin.epoch + 1, 0, self.position.consumed)
        self._epochs_begun += 1
        self._step_at_epoch_begin = self._counted = state.global_step
        self.position = self._epoch_begin

    def on_step_end(self, args: Any, state: Any) -> None:
        """Count the samples of a step."""
        self._count(args, state, self._waiting())

    def on_epoch_end(self, args: Any, state: Any, control: Any) -> None:
        """Count the samples of skipped steps (``skip_data_intervals``), for which there is no event."""
        # A run that resumes here reads the batches after the last step once more.
        self._count(args, state, self.position.waiting)
        self.position = replace(self.position, ended=True)
        if self._epoch_begin.ended and state.global_step == self._step_at_epoch_begin:
            # The saved run already evaluated and saved at the end of this epoch.
            control.should_evaluate = control.should_save = False
            if self._on_epoch_replayed is not None:
                self._on_epoch_replayed()

    def _count(self, args: Any, state: Any, waiting: int) -> None:
        begin = self._epoch_begin
        trained = (state.global_step - self._step_at_epoch_begin) * batch_sizes_of(args).per_step
        self.position = Position(begin.epoch, begin.samples + trained, begin.consumed + trained, waiting)
        self._counted = state.global_step
        state.consumed_samples = self.position.consumed
        self._set_epoch(args, state)

    def _set_epoch(self, args: Any, state: Any) -> None:
        """Set the epoch of a resumed run; the loop assumes that the run started at the first batch of an epoch."""
        if self._resumed:
            pace = batch_sizes_of(args)
            # PaddleFormers assumes that an epoch of unknown length is as long as the run.
            passes = self._passes or state.max_steps * pace.accumulation
            length = passes * pace.per_pass if self.order == self._own_order else self.order.length
            state.epoch = self.position.epoch + min(1.0, self.position.samples / length)
