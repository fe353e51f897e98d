"""Run the trainings of the longer proof on a fork server, one after the other.

Every training leaves a JSON file when it is finished; a second run starts with the first one that has none.

Time: 250 steps of four ranks take about a minute on two free cores. Memory: 400 MB, and about 50 MB per rank.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paddleformers_fc.errors import PeerError
from paddleformers_fc.execute.digest import weights_md5
from paddleformers_fc.execute.export import export_checkpoint
from verification.forkserver import ForkServer
from verification.long_run.fused import fused_md5
from verification.long_run.jobs import UNIFY
from verification.matrix.jobs import JOB, Training
from verification.matrix.layouts import parse_layout

SAVED_AT = 50
LAST_STEP = 250
_PATIENCE = 4 * 3600.0


@dataclass(frozen=True)
class LongRun:
    """A model, the layout that saves, and the layouts that resume.

    Args:
        title: of its part of the page.
        model_type: of the tiny model.
        model: overrides of its configuration.
        arguments: training arguments.
        source: name of the layout of the uninterrupted run.
        targets: names of the layouts that resume.
        unified: names of the layouts under which PaddleFormers writes the weights of the last step.
        fuses: whether it fuses projections, and writes them so.
    """

    title: str
    model_type: str
    model: Mapping[str, Any]
    arguments: Mapping[str, Any]
    source: str
    targets: tuple[str, ...]
    unified: tuple[str, ...]
    fuses: bool = False


EXPERIMENTS = (
    LongRun(
        "Llama",
        "llama",
        {"num_key_value_heads": 4},
        {"learning_rate": 0.002},
        "sd2+tp2",
        ("tp2+pp2", "sd2v1", "dp1"),
        ("dp1", "pp2", "sd2v1", "tp2"),
    ),
    LongRun(
        "ERNIE 4.5 MoE",
        "ernie4_5_moe",
        {"num_key_value_heads": 4},
        # Under expert parallelism Paddle clips by a norm that depends on the layout.
        {"learning_rate": 0.002, "max_grad_norm": 0.0},
        "sd2+tp2(ep2)",
        ("tp2(ep2)+pp2", "sd2(ep2)", "dp1"),
        ("dp1", "pp2", "sd2(ep2)", "tp2"),
        fuses=True,
    ),
)


class RunResult(msgspec.Struct, frozen=True):
    """A run.

    Args:
        losses: by step.
        export_md5: of the export of its last checkpoint.
        fused_md5: the same weights with fused projections; empty if PaddleFormers fuses none.
    """

    losses: dict[int, float]
    export_md5: str
    fused_md5: str


class Unified(msgspec.Struct, frozen=True):
    """A checkpoint that PaddleFormers wrote.

    Args:
        layout: under which it wrote.
        md5: of the weights; empty if it raised.
        error: the type of the exception; empty otherwise.
    """

    layout: str
    md5: str
    error: str


class Findings(msgspec.Struct, frozen=True):
    """The results of an experiment: the uninterrupted run, the resumed ones by layout, and unified checkpoints."""

    title: str
    source: str
    whole: RunResult
    resumed: dict[str, RunResult]
    unified: list[Unified]

    def difference(self, layout: str) -> tuple[float, int]:
        """Return the largest difference of a loss to that of the uninterrupted run, and the step at which it is."""
        losses = self.resumed[layout].losses
        return max((abs(losses[step] - self.whole.losses[step]), -step) for step in losses)


def run(experiment: LongRun, root: Path, log: Callable[[str], None]) -> Findings:
    """Run an experiment, or the rest of it.

    Args:
        experiment: the experiment.
        root: the directory of all runs.
        log: receives a line per training.
    """
    place = root / experiment.model_type
    with ForkServer(directory=_emptied(place / "server"), patience=_PATIENCE) as server:
        whole = _trained(server, experiment, experiment.source, place / "whole", None, log)
        saved = place / "whole" / f"checkpoint-{SAVED_AT}"
        resumed = {
            name: _trained(server, experiment, name, place / f"resumed-{name}", saved, log)
            for name in experiment.targets
        }
        last = place / "whole" / f"checkpoint-{LAST_STEP}"
        unified = [_unified(server, experiment, name, place / f"unified-{name}", last) for name in experiment.unified]
    return Findings(experiment.title, experiment.source, whole, resumed, unified)


def _emptied(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    return directory


def _trained(
    server: ForkServer,
    experiment: LongRun,
    layout: str,
    place: Path,
    resume: Path | None,
    log: Callable[[str], None],
) -> RunResult:
    record = place / "trained.json"
    if record.exists():
        return msgspec.json.decode(record.read_bytes(), type=RunResult)
    values = _run(server, JOB, experiment, layout, _emptied(place), resume)
    first = SAVED_AT + 1 if resume else 1
    logged = max(len(one) for one in values)
    losses: dict[int, float] = dict(enumerate(next(one for one in values if len(one) == logged), first))
    checkpoint, export = place / f"checkpoint-{LAST_STEP}", place / "export"
    export_checkpoint(checkpoint, export)
    heads = int(experiment.model["num_key_value_heads"])
    found = RunResult(losses, weights_md5(export), fused_md5(export, heads) if experiment.fuses else "")
    record.write_bytes(msgspec.json.encode(found))
    log(f"{experiment.title}, {layout}: steps {first} to {max(losses)}, last loss {losses[max(losses)]}")
    return found


def _unified(server: ForkServer, experiment: LongRun, layout: str, place: Path, checkpoint: Path) -> Unified:
    try:
        error = _run(server, UNIFY, experiment, layout, _emptied(place), checkpoint)[0]
    except PeerError as failed:
        return Unified(layout, "", type(failed).__name__)
    return Unified(layout, "" if error else weights_md5(place / "unified"), error)


def _run(
    server: ForkServer, job: str, experiment: LongRun, layout: str, place: Path, resume: Path | None
) -> tuple[Any, ...]:
    training = Training(
        experiment.model_type,
        dict(experiment.model),
        {**experiment.arguments, "save_steps": SAVED_AT if resume is None else LAST_STEP},
        parse_layout(layout),
        str(place),
        last_step=LAST_STEP,
        resume=None if resume is None else str(resume),
    )
    return server.run(job, training.layout.nproc, training.to_json()).values
