"""The differences between the run that saved a checkpoint and the run that resumes it.

Settings that change which samples an epoch contains raise an error. Other changes (learning rate, corpus, tokenizer,
batch) are only reported, in one table.

Time and memory: constant; tokenizer files are compared by their checksums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paddleformers_fc.errors import OptionError
from paddleformers_fc.families.changes import ABSENT, Change, table, value_text
from paddleformers_fc.storage.checksum import checksum_of
from paddleformers_fc.storage.manifest import Manifest
from paddleformers_fc.trainer.position import SAME_SAMPLES, BatchSizes, SampleOrder

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
    lines = [f"This run differs from the run that saved step {step}:", *(f"  {line}" for line in table(rows))]
    if "samples per step" in keys:
        lines.append(_BATCH_ADVICE)
    ordering = [key for key in keys if key in ("seed", STREAM_ARGUMENT, *CORPUS)]
    if streams and ordering:
        lines.append(_STREAM_ADVICE.format(keys=" or ".join(ordering)))
    return "\n".join(lines)
