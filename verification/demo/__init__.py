"""The demo: train, resume under other layouts, export, and compare.

Two tiny models on a real text, two ranks over gloo, no accelerator needed. For Llama: six steps on two data-parallel
ranks with a checkpoint at step 3; from there again as tensor parallel, pipeline parallel and sharded (version 2). Each
resumed run first saves its loaded state, which is compared bit for bit with the checkpoint and exported. Then it trains
on, and its losses are compared with the uninterrupted run's. One export is trained from, with stock PaddleFormers. LoRA
adapters of Llama: data parallel to tensor parallel. For ERNIE 4.5 MoE: data parallel to tensor parallel, once through
this package and once with PaddleFormers' own FlexCheckpoint.

The output directory holds everything: the YAML, log and checkpoints of each run, the exports and
``losses.png``. This package imports no Paddle; the trainings are processes of their own.

Time: about 75 s on two cores. Memory: two ranks of 450 MB. Disk: 60 MB.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from paddleformers_fc import api
from paddleformers_fc.errors import OptionError
from paddleformers_fc.output import console
from paddleformers_fc.storage.files import make_directories
from verification.demo.assets import Assets, prepare
from verification.demo.jobs import AS_LOADED, DemoResult, DemoRun, train
from verification.demo.report import LossComparison, LossLine, draw, table
from verification.demo.settings import DP2, GLOBAL_BATCH, LORA, PP2, RESUME_AT, SHARDING2V2, SINGLE, TP2, DemoLayout
from verification.digests import canonical_digests, unequal_tensors

DEFAULT_OUTPUT = Path("demo_out")
PICTURE = "losses.png"
_MARKER = ".paddleformers-fc-demo"

Log = Callable[[str], None]


@dataclass(frozen=True)
class Workplace:
    """The directories of the demo.

    Args:
        root: the output directory.
        assets: corpus and models.
        log: receives a line for each stage.
    """

    root: Path
    assets: Assets
    log: Log

    def train(self, run: DemoRun) -> DemoResult:
        """Start one training, wait for it, and report its duration."""
        trained = train(run, self.root / "runs")
        self.log(f"{run.name}: {len(trained.losses)} steps on {run.layout.ranks} rank(s), {trained.seconds:.1f} s")
        return trained


def demo(output: Path = DEFAULT_OUTPUT) -> int:
    """Run the whole demo, print its tables, and write the picture.

    Args:
        output: the directory to work in; an earlier demo in it is replaced, anything else is refused.

    Returns:
        0 when everything is as it must be, 1 when something was found wrong.

    Raises:
        OptionError: the directory holds something else.
        StorageError: it cannot be made.
        FlexError: a training failed.
    """
    progress = console(stderr=True)
    started = time.monotonic()
    place = _prepare(output, progress.print)
    comparisons = [compare_llama(place), compare_lora(place), compare_ernie(place)]
    draw(comparisons, place.root / PICTURE)
    faults = [fault for comparison in comparisons for fault in comparison.faults()]
    _show(comparisons, faults, place.root, time.monotonic() - started)
    return 1 if faults else 0


def compare_llama(place: Workplace) -> LossComparison:
    """Llama: from two data-parallel ranks to every other way of using two ranks, and from the export."""
    model = "llama"
    whole = place.train(DemoRun("llama-dp2", place.assets.models[model], place.assets.corpus, DP2))
    reference = _reference(place, whole)
    lines = tuple(_resumed(place, whole, layout) for layout in (TP2, PP2, SHARDING2V2))
    reloaded = _reload(place, place.root / "exports" / whole.run.name, model)
    return LossComparison("Llama", RESUME_AT, reference, lines, reloaded)


def compare_lora(place: Workplace) -> LossComparison:
    """Adapters of Llama: from data parallel to tensor parallel. Checkpoints and exports contain the adapters alone."""
    model, corpus = place.assets.models["llama"], place.assets.corpus
    whole = place.train(DemoRun("llama_lora-dp2", model, corpus, DP2, options=LORA))
    return LossComparison("Llama, LoRA", RESUME_AT, _reference(place, whole), (_resumed(place, whole, TP2),))


def compare_ernie(place: Workplace) -> LossComparison:
    """ERNIE 4.5 MoE: from data parallel to tensor parallel, with this package and without it."""
    model, corpus = place.assets.models["ernie_moe"], place.assets.corpus
    whole = place.train(DemoRun("ernie_moe-dp2", model, corpus, DP2))
    ours = _resumed(place, whole, TP2)
    stock_whole = place.train(DemoRun("ernie_moe-stock-dp2", model, corpus, DP2, flex=False))
    stock = place.train(
        DemoRun("ernie_moe-stock-tp2", model, corpus, TP2, flex=False, resume=_checkpoint(stock_whole, RESUME_AT))
    )
    theirs = LossLine("tp2, PaddleFormers' own", stock.losses, stock=True)
    return LossComparison("ERNIE 4.5 MoE", RESUME_AT, _reference(place, whole), (ours, theirs))


def _resumed(place: Workplace, whole: DemoResult, layout: DemoLayout) -> LossLine:
    """Resume the uninterrupted run's checkpoint under another layout; export and digest what was loaded."""
    family = whole.run.name.partition("-")[0]
    saved = _checkpoint(whole, RESUME_AT)
    name, options = f"{family}-{layout.name}", whole.run.options
    run = DemoRun(name, whole.run.model, whole.run.corpus, layout, resume=saved, options=options)
    trained = place.train(run)
    loaded = trained.output / AS_LOADED
    return LossLine(
        layout.name,
        trained.losses,
        export_md5=_export(place, loaded, run.name),
        unequal_tensors=tuple(map(" ".join, unequal_tensors(canonical_digests(saved), canonical_digests(loaded)))),
    )


def _reference(place: Workplace, whole: DemoResult) -> LossLine:
    export = _export(place, _checkpoint(whole, RESUME_AT), whole.run.name)
    return LossLine(whole.run.layout.name, whole.losses, export_md5=export)


def _reload(place: Workplace, export: Path, model: str) -> float:
    """Return the loss of the first batch after the resume when stock PaddleFormers starts from an export."""
    records = place.assets.corpus.read_text(encoding="utf-8").splitlines(keepends=True)
    rest = place.assets.corpus.with_name("corpus-after-resume.jsonl")
    rest.write_text("".join(records[RESUME_AT * GLOBAL_BATCH :]), encoding="utf-8")
    copy = place.root / "runs" / "reloaded"  # PaddleFormers writes into a directory that it starts from.
    shutil.copytree(export, copy)
    run = DemoRun(f"{model}-from-export", copy, rest, SINGLE, flex=False, options={"max_steps": 1})
    return place.train(run).losses.get(1, float("nan"))


def _checkpoint(trained: DemoResult, step: int) -> Path:
    return trained.output / f"checkpoint-{step}"


def _export(place: Workplace, checkpoint: Path, name: str) -> str:
    """Export a checkpoint and return the md5 that the ``export`` command prints."""
    return api.open(checkpoint).export(place.root / "exports" / name, md5=True).md5


def _prepare(output: Path, log: Log) -> Workplace:
    root = output.absolute()
    if root.exists() and not (root / _MARKER).exists() and any(root.iterdir()):
        raise OptionError(
            "The output directory contains other files, which the demo would replace.",
            where=str(root),
            evidence=sorted(path.name for path in root.iterdir())[:5],
            next_step="Name an empty or a new directory with --output.",
        )
    shutil.rmtree(root, ignore_errors=True)
    make_directories(root / "runs")
    (root / _MARKER).touch()
    assets = prepare(root / "assets")
    log(f"Prepared a corpus, a tokenizer and two models in {root / 'assets'}.")
    return Workplace(root, assets, log)


def _show(comparisons: Iterable[LossComparison], faults: list[str], root: Path, seconds: float) -> None:
    screen = console()
    for comparison in comparisons:
        screen.print(table(comparison))
    for fault in faults:
        screen.print(f"WRONG: {fault}", style="bold red")
    if not faults:
        screen.print("Every resumed run holds the saved state bit for bit and trains on like the uninterrupted run.")
    screen.print(f"{root / PICTURE}\n{seconds:.0f} s in all.")
