"""This package: with checksums, proof, manifest and commit when it saves, with preflight when it loads.

Nothing but Paddle is imported at the top, so that an import costs what it costs a script.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paddle.nn import Layer

import paddleformers_fc
from benchmarks.performance.held import Done, Held
from benchmarks.performance.pieces import copy_of
from benchmarks.performance.streamed import taken

MODEL_STATE = "model_state"
EXPORTED_FILE_BYTES = 5 * 10**9


def prepare(verb: str) -> None:
    """Import what a script imports before its first call."""
    getattr(paddleformers_fc, {"save": "save", "load": "load", "start": "load", "stream": "stream"}.get(verb, "open"))


class _Model(Layer):
    """A model of these weights."""

    def __init__(self, weights: dict[str, Any]) -> None:
        super().__init__()
        self._weights = weights

    def sharded_state_dict(self, structured_name_prefix: str = "") -> dict[str, Any]:
        """Return the weights by name."""
        return dict(self._weights)


def save(directory: Path, held: Held) -> Done:
    """``paddleformers_fc.save``; with states of an optimizer what it calls."""
    roles, checkpoint = held.roles, directory / "checkpoint-1"
    if roles.keys() == {MODEL_STATE}:
        report = paddleformers_fc.save(checkpoint, _Model(roles[MODEL_STATE]), step=1, config=held.config)
        return Done(phases=report.phases.seconds)
    from paddleformers_fc.distributed.channel import job_channel
    from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
    from paddleformers_fc.families import ModelDescription

    files = {"config.json": config_bytes(held.config)} if held.rank == 0 else {}
    model = ModelDescription(held.config, is_fleet=False)
    save_checkpoint(checkpoint, roles, model, files, JobRecord(1, 1, {}), job_channel())
    return Done()


def load(directory: Path, held: Held, verify: str = "full") -> Done:
    """``paddleformers_fc.load``; with states of an optimizer what it calls."""
    roles, checkpoint = held.roles, directory / "checkpoint-1"
    if roles.keys() == {MODEL_STATE}:
        report = paddleformers_fc.load(checkpoint, _Model(roles[MODEL_STATE]), config=held.config, verify=verify)
        return Done(report.bytes_read, report.phases.seconds)
    from paddleformers_fc.distributed.channel import job_channel
    from paddleformers_fc.execute.load import load_checkpoint
    from paddleformers_fc.execute.opening import open_on_all_ranks
    from paddleformers_fc.families import ModelDescription

    opened = open_on_all_ranks(checkpoint, job_channel(), verify)
    report = load_checkpoint(opened, roles, ModelDescription(held.config, is_fleet=False), job_channel())
    return Done(report.bytes_read, report.phases.seconds)


def start(directory: Path, held: Held) -> Done:
    """What ``load`` does from open weights, for the ranks of one pipeline stage, the others not being there."""
    from paddleformers_fc.execute.memory import slots_of
    from paddleformers_fc.execute.reading import execute_reads
    from paddleformers_fc.execute.save_plan import model_rules
    from paddleformers_fc.families import ModelDescription, OptionalNames, family_for
    from paddleformers_fc.formats.huggingface import open_huggingface
    from paddleformers_fc.layout.live import describe_roles
    from paddleformers_fc.plan.build import plan_reads
    from paddleformers_fc.plan.sources import huggingface_source
    from paddleformers_fc.storage.executor import DEFAULT_OPTIONS

    model = ModelDescription(held.config, is_fleet=False)
    catalog, shards = open_huggingface(directory).catalog, describe_roles(held.roles)
    optional = OptionalNames(family_for(model.config), model)
    source, report = huggingface_source(catalog, model_rules(model, shards[MODEL_STATE]), optional)
    plan = plan_reads(source, shards)
    plan.report.merge([report]).raise_error(str(directory))
    return Done(execute_reads(plan, directory, slots_of(held.roles), DEFAULT_OPTIONS, catalog.identities))


def export(source: Path, target: Path, held: Held) -> Done:
    """``Checkpoint.export``."""
    checkpoint = paddleformers_fc.open(source / "checkpoint-1")
    checkpoint.export(target / "exported", max_shard_bytes=EXPORTED_FILE_BYTES)
    return Done()


def stream(directory: Path, held: Held, exported: bool = False, is_checked: bool = False) -> Done:
    """``paddleformers_fc.stream`` to every rank; or ``save`` and ``Checkpoint.export`` on the first rank."""
    if not exported:
        model = _Model(held.roles[MODEL_STATE])
        return taken(paddleformers_fc.stream(model, config=held.config), is_checked)
    if not is_checked:
        save(directory, held)
        if held.rank == 0:
            export(directory, directory, held)
    return Done()


def verify(directory: Path, held: Held) -> Done:
    """``Checkpoint.verify``, as ``paddleformers-fc verify`` does."""
    paddleformers_fc.open(directory / "checkpoint-1").verify("full")
    return Done()


def diff(directory: Path, held: Held) -> Done:
    """``Checkpoint.diff`` with the copy of what was saved."""
    saved = directory / "checkpoint-1"
    if not paddleformers_fc.open(saved).diff(paddleformers_fc.open(copy_of(saved))).equal:
        raise RuntimeError(f"diff has found a difference in {saved}")
    return Done()
