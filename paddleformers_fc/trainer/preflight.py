"""Preflight checks: before the first step, all ranks compare versions and options, and test that they can save.

A node with another package version, another YAML or a read-only disk would be found by the first save, after hours, or
not at all. With this check every rank raises one error within a second of the start of training. Cost: one exchange,
and one directory made and deleted per rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from paddleformers_fc.distributed.channel import Channel, run_on_all
from paddleformers_fc.distributed.consistency import ConsistencyCheck, comparable_config, software_versions
from paddleformers_fc.distributed.store_client import on_several_nodes
from paddleformers_fc.storage.files import check_writable
from paddleformers_fc.trainer import reference
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.job_state import channel_of

_OF_A_NODE = frozenset(
    {
        "dataloader_num_workers",
        "device",
        "disable_tqdm",
        "local_rank",
        "log_on_each_node",
        "logging_dir",
        "metrics_output_path",
        "output_dir",
        "output_signal_dir",
        "prefetch_factor",
        "report_to",
        "resume_from_checkpoint",
        "run_name",
        "wandb_api_key",
        "wandb_http_proxy",
    }
)
"""Options that may differ between nodes: paths, logging, and options of one process alone."""

_PACKAGES = ("paddleformers", "paddlenlp", "paddleformers_fc")


def check(trainer: Any, channel: Channel, has_trained: bool) -> None:
    """Compare versions, options and model configuration across ranks, and test every output disk.

    Args:
        trainer: about to train.
        channel: all ranks; every rank must call.
        has_trained: whether it has trained before; its model then differs from a reference model.
    Raises:
        PeerError: the same on every rank: a table of the differences, with values and ranks.
        StorageError: the same on every rank: the output directories that cannot be written, with their ranks.
        MismatchError: see :func:`.reference.refuse_unlike`.
    """
    args = trainer.args
    facts = {
        "versions": software_versions(),
        "config": comparable_config(describe_model(trainer.model)),
        **dict(_options(args)),
    }

    def work() -> None:
        check_writable(Path(args.output_dir))
        # PaddleFormers' preference training sets it after Trainer.__init__.
        reference.refuse_updates(trainer)
        if not has_trained:
            reference.refuse_unlike(reference.model_of(trainer), trainer.model)

    run_on_all(channel, "checking the training", work, ConsistencyCheck("starting the training", facts))


def check_disks(args: Any) -> None:
    """Test every output disk of a job on several nodes; every rank must call, before its Trainer is made.

    PaddleFormers makes the output directory on rank 0 alone, where a failure would leave all other ranks waiting.

    Raises:
        StorageError: the same on every rank: the output directories that cannot be written, with their ranks.
    """
    if on_several_nodes():
        run_on_all(channel_of(args), "testing the output directory", lambda: check_writable(Path(args.output_dir)))


def _options(args: Any) -> Iterator[tuple[str, object]]:
    """Return the options of PaddleFormers and of this package that must be equal on all ranks; not those of a user's
    class."""
    for kind in type(args).__mro__:
        if kind.__module__.partition(".")[0] in _PACKAGES:
            for name in vars(kind).get("__dataclass_fields__", {}):
                if name not in _OF_A_NODE:
                    yield name, _plain(getattr(args, name))
    yield (
        "resume_from_checkpoint",
        "a path" if isinstance(args.resume_from_checkpoint, str) else (args.resume_from_checkpoint),
    )


def _plain(value: object) -> object:
    """Return a value that is the same text in every process; the type of one that is not."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, str | int | float | bool) else type(value).__name__
