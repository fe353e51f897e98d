"""One training of the demo: its YAML, its ranks, the losses it logged.

A training is started as a user would start it, through PaddleFormers' own launcher with a YAML, over gloo on this
machine. Our runs and stock runs differ in the file of ``custom_register_path`` only. Ours registers this package and a
witness (:mod:`.ours`). The stock run's only patches a machine without an accelerator (:mod:`.stock`).

Time: 7 s per run of two ranks on two cores, of which training is below 1 s. Memory: 450 MB per rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from paddleformers_fc.cpu_runtime.launch import launch
from paddleformers_fc.cpu_runtime.ranks import PATIENCE_SECONDS
from paddleformers_fc.errors import FlexError, OptionError
from verification.demo.settings import DemoLayout, settings

_HERE = Path(__file__).parent
OURS = _HERE / "ours.py"
STOCK = _HERE / "stock.py"
AS_LOADED = "as-loaded"
"""The file of the witness of a resumed run, inside the output directory."""
_STEP = re.compile(r"\bloss: ([-+.\w]+), .*?\bglobal_step: (\d+),")


@dataclass(frozen=True)
class DemoRun:
    """A training to start.

    Args:
        name: of its directory and its YAML.
        model: a Hugging Face directory to start from.
        corpus: the JSONL file to train on.
        layout: how the ranks share it.
        flex: through this package; False for PaddleFormers' own checkpoints.
        resume: the checkpoint to resume.
        options: further keys of the YAML.
    """

    name: str
    model: Path
    corpus: Path
    layout: DemoLayout
    flex: bool = True
    resume: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DemoResult:
    """The results of a training.

    Args:
        run: as it was started.
        output: the Trainer's output directory, with its checkpoints.
        losses: step -> loss, as logged, with eight digits after the point.
        seconds: from start to end of all its processes.
    """

    run: DemoRun
    output: Path
    losses: Mapping[int, float]
    seconds: float


def train(run: DemoRun, directory: Path) -> DemoResult:
    """Start a training and wait for it.

    Args:
        run: the training.
        directory: gets ``<name>.yaml``, ``<name>/`` and ``logs/<name>/``.

    Raises:
        OptionError: the path of the corpus cannot be written into a YAML of PaddleFormers.
        FlexError: a rank failed; the error holds the end of its log.
    """
    _check_no_separators(run.corpus)
    output = directory / run.name
    recipe = directory / f"{run.name}.yaml"
    recipe.write_text(yaml.safe_dump(_content(run, output), sort_keys=False), encoding="utf-8")
    result = launch(
        ["-m", "paddleformers.cli.launcher", "train", str(recipe)],
        nproc=run.layout.ranks,
        log_dir=directory / "logs" / run.name,
        timeout=PATIENCE_SECONDS,
    )
    if result.returncode != 0:
        raise FlexError(
            f"The training {run.name!r} of the demo failed with code {result.returncode}.",
            where=str(recipe),
            evidence=[result.report()],
            next_step="Read the log named above; the YAML can be started again on its own.",
        )
    losses = _losses(result.logs[0].read_text(encoding="utf-8", errors="replace"))
    return DemoResult(run, output, losses, result.seconds)


def _content(run: DemoRun, output: Path) -> dict[str, Any]:
    content = settings(str(run.model), str(run.corpus), str(output), run.layout)
    content["custom_register_path"] = str(OURS if run.flex else STOCK)
    if run.flex:
        content["flex_checkpoint"] = True
    if run.resume is not None:
        content["resume_from_checkpoint"] = str(run.resume)
    return content | dict(run.options)


def _losses(log: str) -> dict[int, float]:
    return {int(step): float(loss) for loss, step in _STEP.findall(log)}


def _check_no_separators(corpus: Path) -> None:
    if re.search(r"[\s,#]", str(corpus)):
        raise OptionError(
            "The demo's directory has a space, a comma or a # in its path, which PaddleFormers takes for separators.",
            where=str(corpus),
            next_step="Name another directory with --output.",
        )
