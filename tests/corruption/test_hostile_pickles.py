"""Pickles that somebody has put into a checkpoint's directory: no way in runs them.

Every file under a name that Paddle or PaddleFormers unpickles makes a file of its own beside the checkpoint when it is
run, and then becomes what the original holds, so that stock goes on to the next one.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import paddleformers_fc
from tests.corruption.guarantees import Seen, fault
from tests.corruption.jobs import WORSE_AND_WORSE, trained
from tests.harness.tiny import DP2
from verification.forkserver import ForkServer

NATIVE = ("0.metadata", "0_0.distcp", "1_0.distcp")
NAMES = (
    *(*NATIVE, ".metadata"),
    *(f"{role}/{name}" for role in ("model_state", "optimizer_state", "master_weight") for name in NATIVE),
    *("model_state.pdparams", "model_state.tp00.pdparams", "lora_model_state.pdparams", "ema_state.pdparams"),
    *("scheduler.pdparams", "scaler.pdparams", "optimizer.pdopt", "optimizer.tp00.pdopt", "rng_state_0.pth"),
    *("rng_state_1.pth", "training_args.bin", "trainer_state.bin", "pytorch_model.bin", ".saving_info"),
)
"""What Paddle, PaddleFormers and others would unpickle in a directory of theirs."""


class Trap:
    """A pickle that leaves a mark, and is then what another file holds."""

    def __init__(self, mark: Path, original: Path | None) -> None:
        value = f"__import__('pickle').load(open({str(original)!r}, 'rb'), encoding='latin1')" if original else "None"
        self.parts = (eval, (f"[open({str(mark)!r}, 'w').close(), {value}][1]",))

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


def trapped(directory: Path, marks: Path) -> None:
    """Put a trap under every name of a directory; what it held under such a name is kept beside it."""
    marks.mkdir(exist_ok=True)
    kept = marks.with_name(f"{marks.name}-originals")
    for name in NAMES:
        path, original = directory / name, kept / directory.name / name
        held = path.exists()
        if held:
            original.parent.mkdir(parents=True, exist_ok=True)
            path.rename(original)
        path.parent.mkdir(exist_ok=True)
        mark = marks / f"{directory.name}-{name.replace('/', '-')}"
        path.write_bytes(pickle.dumps(Trap(mark, original if held else None), 4))


@pytest.mark.slow
@fault("T19")
def test_t19_a_resume_runs_no_pickle(ranks: ForkServer, tmp_path: Path) -> Seen:
    seen = {}
    for ours_too in (False, True):
        there, marks = tmp_path / f"ours-{ours_too}", tmp_path / f"marks-{ours_too}"
        given = {"evaluate": True, "ours": ours_too}
        first = trained(ranks, DP2, there, None, {**WORSE_AND_WORSE, "max_steps": 2}, **given)[0]
        assert first["step"] == 2, first
        for step in (1, 2):
            trapped(there / f"checkpoint-{step}", marks)
        ended = trained(ranks, DP2, there, there / "checkpoint-2", {**WORSE_AND_WORSE, "max_steps": 3}, **given)[0]
        # The files whose pickles were run.
        seen[ours_too] = {path.name.split("-", 2)[-1] for path in marks.iterdir()}, ended
    stock, _ = seen[False]
    found, ended = seen[True]
    assert found == set()
    assert ended["step"] == 3
    assert ended["at_end"] == pytest.approx(ended["best"], abs=1e-6)
    run_by_stock = ", ".join(f"`{name}`" for name in sorted({name.rpartition("-")[2] for name in stock}))
    return {"run": run_by_stock}


def test_no_module_of_the_package_unpickles() -> None:
    imports, calls = r"^\s*(?:import|from) (?:_?pickle|dill|cloudpickle)\b", r"\b(?:paddle|np|numpy|torch)\.load\("
    unpickling = re.compile(f"{imports}|{calls}", re.M)
    modules = list(Path(paddleformers_fc.__file__).parent.rglob("*.py"))
    assert len(modules) > 100
    assert [path.name for path in modules if unpickling.search(path.read_text(encoding="utf-8"))] == []
    assert unpickling.search("def f():\n    import pickle")
    assert unpickling.search("state = paddle.load(path)")
