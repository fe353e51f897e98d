"""For how long training stands still for a save, as multiples of one copy of what is saved.

``python -m benchmarks.asynchronous [--write PAGE]``. A Llama of 51 million float32 parameters with AdamW, 612 MB, is
trained and saved to a file system in memory. Each contender has a process of its own, in which its saves and the plain
copy take turns; a figure is the median ratio to the copies of the same process.

* in the step: training waits for the whole save;
* at once: training waits for the copy, as where upstream changes weights in the passes;
* beside: the copy runs during the next passes, and training waits for the rest of it before the next update.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pages import replace_measured
from paddleformers_fc.cpu_runtime.launch import launch

ROOT = Path(__file__).resolve().parent.parent
SIZES: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 512}
MICRO_BATCH = 8
MARK = "flex-figures "

Figures = dict[str, list[float]]
"""Seconds by what was timed; ``copy`` is the plain copy."""


def copies(nbytes: int) -> Callable[[], float]:
    """Return a function that times one copy between two kept buffers."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)

    def once() -> float:
        started = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - started

    return once


# ---- Ours.


def ours(output_dir: str, rounds: int) -> Figures:
    """Save in the step, at once and beside, in turn, at every second step of one training."""
    from paddleformers_fc import FlexCheckpointCallback, FlexTrainer, FlexTrainingArguments, cpu_runtime
    from paddleformers_fc.trainer.async_save import Saver
    from paddleformers_fc.trainer.session import session_of
    from verification.matrix import tiny
    from verification.matrix.layouts import MatrixLayout

    cpu_runtime.activate()  # On a CPU Paddle's synchronize() raises, which "at once" calls.
    ways = ("in the step", "at once", "beside")
    found: Figures = {name: [] for name in ("copy", *ways, *(f"step after {way}" for way in ways))}
    layout = MatrixLayout("single")
    args = tiny.training_arguments(
        layout,
        output_dir,
        cls=FlexTrainingArguments,
        flex_checkpoint=True,
        flex_async_save=True,
        max_steps=2 * len(ways) * (rounds + 1),
        save_steps=2,
        save_total_limit=1,
        flex_verify="size",
    )

    class Turns(FlexCheckpointCallback):
        """Chooses the way of every save, and waits for it before the next one."""

        def __init__(self) -> None:
            self.begun = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % 2 == 1:
                way = ways[state.global_step // 2 % len(ways)]
                run.saver = Saver(is_async=False) if way == "in the step" else beside
                # Read at every save; the optimizer has been wrapped already, and ignores it.
                args.stage1_broadcast_overlap = way == "at once"
                if state.global_step // 2 >= len(ways):
                    found["copy"].append(copy())
            self.begun = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % 2 == 1 and state.global_step > 1:
                way = ways[(state.global_step - 2) // 2 % len(ways)]
                if (state.global_step - 2) // 2 >= len(ways):
                    found[f"step after {way}"].append(time.perf_counter() - self.begun)
                beside.finish(run)

        def on_checkpoint_saved(self, args: Any, report: Any) -> None:
            number = report.step // 2 - 1
            if number >= len(ways):
                found[ways[number % len(ways)]].append(report.blocked)

    model = tiny.build("llama", layout, args, **SIZES)
    copy = copies(3 * sum(parameter.numel().item() * 4 for parameter in model.parameters()))
    trainer = tiny.trainer(model, args, cls=FlexTrainer, callbacks=[Turns()])
    run = session_of(trainer)
    beside: Any = run.saver
    trainer.train()
    return found


def step_ends(output_dir: str, rounds: int) -> Figures:
    """Train on two ranks, and return the first one's seconds at step ends.

    At every second step end the ranks read and begin an agreement; at the others they only send a request to the store,
    wait for its answer, and send another one.
    """
    out = Path(output_dir)
    argv = ["-m", "benchmarks.asynchronous", "--contender", "agreeing", "--rounds", str(rounds), "--scratch", str(out)]
    ended = launch(argv, 2, out / "logs", 600)
    lines = [line for line in ended.logs[0].read_text().splitlines() if line.startswith(MARK)]
    figures: Figures = json.loads(lines[-1].removeprefix(MARK))
    return figures


def agreeing(output_dir: str, rounds: int) -> Figures:
    """Be one of these ranks."""
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments
    from paddleformers_fc.distributed import step_agreement
    from paddleformers_fc.distributed.store_client import StoreClient, job_store_address
    from paddleformers_fc.trainer import session as sessions
    from verification.matrix import tiny
    from verification.matrix.layouts import MatrixLayout

    step_agreement.IDLE_SECONDS = 1e-6  # Signals are the subject of an agreement at every step end.
    end, found = sessions.agree, Figures({"step end": [], "requests": []})
    clients: list[StoreClient] = []

    def timed(session: Any, kind: str) -> None:
        step = session.trainer.state.global_step
        if not clients and (address := job_store_address()) is not None:  # Served since the Trainer was constructed.
            clients.append(StoreClient(address, 60, 60))
        started = time.perf_counter()
        if step % 2:
            end(session, kind)
        else:
            clients[0].add("requests", 0)
            clients[0].post({"requests": 0})
        if step > 80:
            found["requests" if step % 2 == 0 else "step end"].append(time.perf_counter() - started)

    sessions.agree = timed
    layout = MatrixLayout("dp2", nproc=2)
    given = {"flex_checkpoint": True, "flex_async_save": True, "max_steps": 80 * (rounds + 1), "save_steps": 10**6}
    args = tiny.training_arguments(layout, output_dir, cls=FlexTrainingArguments, **given)
    tiny.trainer(tiny.build("llama", layout, args), args, cls=FlexTrainer).train()
    return found


# ---- PaddleFormers' unified checkpoint, saved asynchronously.


def unified(output_dir: str, rounds: int) -> Figures:
    """Save PaddleFormers' unified checkpoint with ``async_save``, which copies to shared memory in the step."""
    from paddleformers.trainer import Trainer, TrainingArguments

    from verification.matrix import tiny
    from verification.matrix.layouts import MatrixLayout

    found: Figures = {"copy": [], "in the step": []}
    layout = MatrixLayout("single")
    args = tiny.training_arguments(
        layout,
        output_dir,
        cls=TrainingArguments,
        save_checkpoint_format="unified_checkpoint",
        load_checkpoint_format="unified_checkpoint",
        unified_checkpoint_config="async_save",
        max_steps=2 * (rounds + 1),
        save_steps=2,
        save_total_limit=1,
    )

    class Timed(Trainer):
        def _save_checkpoint(self, *given: Any, **named: Any) -> None:
            copied, started = copy(), time.perf_counter()
            super()._save_checkpoint(*given, **named)
            if self.state.global_step > 2:
                found["in the step"].append(time.perf_counter() - started)
                found["copy"].append(copied)

    model = tiny.build("llama", layout, args, **SIZES)
    copy = copies(3 * sum(parameter.numel().item() * 4 for parameter in model.parameters()))
    tiny.trainer(model, args, cls=Timed).train()
    return found


# ---- PyTorch.


def dcp(output_dir: str, rounds: int) -> Figures:
    """``torch.distributed.checkpoint.async_save`` with a stager that is kept, at once and beside a computation."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(49)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    stager = DefaultStager(StagingOptions(False, False, True, False))
    copy = copies(3 * sum(parameter.numel() * 4 for parameter in model.parameters()))
    found: Figures = {name: [] for name in ("copy", "at once", "beside")}
    batch, kept = torch.randn(4096, 1024), Path(output_dir)

    def passes() -> None:
        model(batch).sum().backward()

    passes()
    optimizer.step()
    for number in range(2 * (rounds + 1)):
        way = ("at once", "beside")[number % 2]
        copied = copy()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        started = time.perf_counter()
        saved = checkpoint.async_save(state, checkpoint_id=kept / f"step-{number}", async_stager=stager)
        staged = getattr(saved, "staging_completion", None)
        blocked = time.perf_counter() - started
        if way == "beside":
            passes()
        started = time.perf_counter()
        if staged is not None:
            staged.result()
        blocked += time.perf_counter() - started
        if number >= 2:
            found["copy"].append(copied)
            found[way].append(blocked)
        getattr(saved, "upload_completion", saved).result()
        shutil.rmtree(kept / f"step-{number}")
    return found


CONTENDERS = {"ours": ours, "step ends": step_ends, "unified": unified, "dcp": dcp}
TITLES = {
    ("ours", "in the step"): "flex, blocking",
    ("ours", "at once"): "flex_async_save, copied at once",
    ("ours", "beside"): "flex_async_save, passes of {passes:.1f} copies follow",
    ("unified", "in the step"): "PaddleFormers' unified checkpoint, `async_save`",
    ("dcp", "at once"): "PyTorch `dcp.async_save`, kept stager, waited for at once",
    ("dcp", "beside"): "PyTorch `dcp.async_save`, kept stager, passes follow",
}


def measured(name: str, rounds: int, scratch: Path) -> Figures | str:
    """Return the figures of a contender in a process of its own, or why there are none."""
    place = Path(tempfile.mkdtemp(prefix="flex-async-", dir=scratch))
    try:
        command = [
            sys.executable,
            "-m",
            "benchmarks.asynchronous",
            "--contender",
            name,
            "--rounds",
            str(rounds),
            "--scratch",
            str(place),
        ]
        # PaddleFormers' saving process lives on after a failure.
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    lines = [line for line in ended.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        return (ended.stderr.strip().splitlines() or ["no output"])[-1][:120]
    figures: Figures = json.loads(lines[-1].removeprefix(MARK))
    return figures


def table(results: dict[str, Figures | str]) -> str:
    """Return the report as Markdown."""
    lines = ["| save | training stands still, in copies | seconds |", "|---|---:|---:|"]
    for (name, way), title in TITLES.items():
        found = results.get(name)
        if found is None:
            continue
        if isinstance(found, str):
            lines.append(f"| {title} | {found} | |")
            continue
        copied = statistics.median(found["copy"])
        seconds = statistics.median(found[way])
        passes = statistics.median(found.get("step after in the step", [0.0])) / copied
        lines.append(f"| {title.format(passes=passes)} | {seconds / copied:.2f} | {seconds:.3f} |")
    own = results.get("ours")
    if isinstance(own, dict):
        after = {way: statistics.median(own[f"step after {way}"]) for way in ("in the step", "beside")}
        lines += ["", f"One copy takes {statistics.median(own['copy']):.3f} s. "]
        lines[-1] += (
            f"The next step takes {after['beside']:.2f} s while an asynchronous save is written, "
            f"and {after['in the step']:.2f} s after a blocking save."
        )
    ends = results.get("step ends")
    if isinstance(ends, dict):
        (low, middle, high), (_, least, _) = (statistics.quantiles(found, n=4) for found in ends.values())
        lines += ["", f"On two ranks a step end that reads and begins an agreement takes {1000 * middle:.2f} ms "]
        lines[-1] += f"(quartiles {1000 * low:.2f} and {1000 * high:.2f} ms), its requests to the store alone "
        lines[-1] += f"{1000 * least:.2f} ms."
    return "\n".join(lines)


def main() -> None:
    """Measure all contenders, or be one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="saves of every kind after the warm-up")
    parser.add_argument("--only", default="", help="contenders, with commas between; all by default")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"), help="a file system in memory")
    parser.add_argument("--write", type=Path, help="a page whose measured part is replaced")
    options = parser.parse_args()
    if options.contender:
        figures = {**CONTENDERS, "agreeing": agreeing}[options.contender](str(options.scratch), options.rounds)
        print(MARK + json.dumps(figures), flush=True)
        return
    names = options.only.split(",") if options.only else list(CONTENDERS)
    text = table({name: measured(name, options.rounds, options.scratch) for name in names})
    print(text)
    if options.write:
        replace_measured(options.write, text)


if __name__ == "__main__":
    main()
