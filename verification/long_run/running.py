"""Run the trainings of the longer proof as cells of matrices, and let PaddleFormers write the weights of the last step.

Every training leaves a JSON file when it is finished; a second run starts with the first one that has none.

Time: 250 steps of four ranks take about a minute on two free cores. Memory: 400 MB, and about 50 MB per rank.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from paddleformers_fc.errors import PeerError
from paddleformers_fc.execute.digest import weights_md5
from paddleformers_fc.execute.export import export_checkpoint
from verification.digests import stored_md5
from verification.matrix.jobs import Training, trained
from verification.matrix.layouts import parse_layout
from verification.matrix.recipe import Recipe, cells_of
from verification.matrix.report import reason
from verification.matrix.running import Workshop

SAVED_AT = 50
LAST_STEP = 250
Losses = dict[int, float]


@dataclass(frozen=True)
class LongRun:
    """A matrix of one source, whose differences are shown and not judged.

    Args:
        recipe: of the matrix.
        unified: names of the layouts under which PaddleFormers writes the weights of the last step.
        fuses: whether it fuses projections, and writes them so.
    """

    recipe: Recipe
    unified: tuple[str, ...]
    fuses: bool = False


_LLAMA = Recipe(
    title="Llama",
    text="",
    model_type="llama",
    model={"num_key_value_heads": 4},
    sources=("sd2+tp2",),
    targets=("tp2+pp2", "sd2v1", "dp1"),
    arguments={"learning_rate": 0.002},
    tolerance=1.0,
    saved_at=SAVED_AT,
    last_step=LAST_STEP,
)
_ERNIE = structs.replace(
    _LLAMA,
    title="ERNIE 4.5 MoE",
    model_type="ernie4_5_moe",
    sources=("sd2+tp2(ep2)",),
    targets=("tp2(ep2)+pp2", "sd2(ep2)", "dp1"),
    # Under expert parallelism Paddle clips by a norm that depends on the layout.
    arguments={**_LLAMA.arguments, "max_grad_norm": 0.0},
)
EXPERIMENTS = (
    LongRun(_LLAMA, ("dp1", "pp2", "sd2v1", "tp2")),
    LongRun(_ERNIE, ("dp1", "pp2", "sd2(ep2)", "tp2"), fuses=True),
)


@dataclass(frozen=True)
class Unified:
    """A checkpoint that PaddleFormers wrote.

    Args:
        layout: under which it wrote.
        md5: of the weights; empty if it raised.
        error: the type of the exception; empty otherwise.
    """

    layout: str
    md5: str
    error: str


@dataclass(frozen=True)
class Findings:
    """The results of an experiment.

    Args:
        title: of its part of the page.
        source: name of the layout of the uninterrupted run.
        whole: losses of that run by step.
        resumed: those of the resumed runs by layout.
        export_md5: of the export of the last step of the uninterrupted run.
        fused_md5: the same weights with fused projections; empty if PaddleFormers fuses none.
        unified: what PaddleFormers wrote of that step.
    """

    title: str
    source: str
    whole: Losses
    resumed: dict[str, Losses]
    export_md5: str
    fused_md5: str
    unified: list[Unified]

    def difference(self, layout: str) -> tuple[float, int]:
        """Return the largest difference of a loss to that of the uninterrupted run, and the step at which it is."""
        losses = self.resumed[layout]
        return max((abs(losses[step] - self.whole[step]), -step) for step in losses)


def run(experiment: LongRun, root: Path) -> Findings:
    """Run an experiment, or the rest of it, and print a line per training.

    Args:
        experiment: the experiment.
        root: the directory of all runs.
    Raises:
        PeerError: a training failed, or a tensor is not as saved.
    """
    recipe = experiment.recipe
    place, cells = root / recipe.model_type, cells_of(recipe)
    resumed: dict[str, Losses] = {}
    with Workshop(recipe, place) as workshop:
        for cell, outcome in zip(cells, workshop.run(cells), strict=True):
            if not outcome.right(recipe.tolerance):
                raise PeerError(f"{outcome.name}: {reason(outcome)}.", where=str(place), next_step="Read the logs.")
            resumed[cell.target.name] = dict(enumerate(outcome.losses, SAVED_AT + 1))
            print(f"{recipe.title}, {outcome.name}: last loss {outcome.losses[-1]}", flush=True)
        saved = workshop.saved(cells[0])
        last, export = saved.checkpoint.with_name(f"checkpoint-{LAST_STEP}"), place / "export"
        shutil.rmtree(export, ignore_errors=True)
        export_checkpoint(last, export)
        unified = [_unified(workshop, recipe, name, place / f"unified-{name}", last) for name in experiment.unified]
    fused = fused_md5(export, int(recipe.model["num_key_value_heads"])) if experiment.fuses else ""
    whole = dict(enumerate(saved.losses, 1))
    return Findings(recipe.title, recipe.sources[0], whole, resumed, stored_md5(export), fused, unified)


def _unified(workshop: Workshop, recipe: Recipe, layout: str, place: Path, checkpoint: Path) -> Unified:
    shutil.rmtree(place, ignore_errors=True)
    training = Training(recipe, parse_layout(layout), str(place), resume=str(checkpoint))
    result = workshop.attempt(f"{__name__}:unify", training)
    error = result.values[0] if result.ok else PeerError.__name__
    return Unified(layout, "" if error else stored_md5(place / "unified"), error)


def unify(training: dict[str, Any]) -> str:
    """Load a checkpoint of which all steps are made, and let PaddleFormers write it; the error that prevents it.

    Args:
        training: a :class:`verification.matrix.jobs.Training` as JSON; its output directory gets ``unified``.
    """
    from paddleformers.trainer.unified_checkpoint import UnifiedCheckpointHandler

    trainer = trained(training)
    handler = UnifiedCheckpointHandler(trainer.args)
    try:
        target = f"{training['output_dir']}/unified"
        handler.save_unified_checkpoint(trainer.model, trainer.optimizer, target, save_to_hf=True)
    except Exception as error:  # The exception of upstream is the finding.
        return type(error).__name__
    return ""


def fused_md5(directory: Path, key_value_heads: int) -> str:
    """Return the md5 of weights as PaddleFormers' unified checkpoint of ERNIE 4.5 MoE stores them.

    Projections stay fused, inputs first. This is written without this package's mappings, with numpy alone, so that it
    can be held against them.

    Args:
        directory: an export.
        key_value_heads: groups of query, key and value.
    """
    from safetensors.numpy import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    for name in sorted(tensors):
        layer, _, last = name.rpartition(".q_proj.weight")
        if layer and not last:
            parts = [tensors.pop(f"{layer}.{kind}_proj.weight") for kind in "qkv"]
            groups = [part.reshape(key_value_heads, -1, part.shape[-1]) for part in parts]
            tensors[f"{layer}.qkv_proj.weight"] = np.concatenate(groups, axis=1).reshape(-1, parts[0].shape[-1]).T
        layer, _, last = name.rpartition(".gate_proj.weight")
        if layer and not last:
            gate_and_up = [tensors.pop(f"{layer}.{kind}_proj.weight") for kind in ("gate", "up")]
            tensors[f"{layer}.up_gate_proj.weight"] = np.concatenate(gate_and_up).T
    return weights_md5({name: hashlib.md5(one.tobytes()).hexdigest() for name, one in tensors.items()})
