"""Libraries that no index has, by copies of the installed PaddleFormers with the names of their public sources.

One copy is the package ``paddlefleet``, with the renamed key and the callback of its Trainer, where PaddleFormers
cannot be imported. The other one is a PaddleFormers with the renamed key, as its development branch is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.harness.limits import LIMIT
from tests.harness.tiny import DP2, MatrixLayout
from tests.trainer.test_entry_points import ROOT, write_yaml
from tests.trainer.test_sonic_moe import EXPERT
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

JOB = "tests.trainer.library_jobs:run"
KEY = re.compile(r"\b(_?)save_to_hf\b")
CALLBACK = """

class SonicMoELayoutSwitchCallback(TrainerCallback):
    def _switch(self, model, name):
        model.apply(lambda layer: getattr(layer, name)() if hasattr(layer, name) else None)

    def on_step_begin(self, args, state, control, **kwargs):
        self._switch(kwargs["model"], "convert_weights_to_sonic_layout")

    def on_optimizer_begin(self, args, state, control, **kwargs):
        self._switch(kwargs["model"], "convert_weights_to_grouped_layout")
"""
OLD = "InterleaveGateUpCallback(self.model, resume_from_checkpoint, self.args.output_dir)"


@dataclass(frozen=True)
class Copy:
    """A copy of PaddleFormers, and ranks that import it.

    Args:
        name: of the package.
        directory: of the package, to be named in PYTHONPATH.
        ranks: start with it.
    """

    name: str
    directory: Path
    ranks: ForkServer


def _write_copy(name: str, directory: Path) -> None:
    spec = find_spec("paddleformers")
    assert spec is not None
    assert spec.origin is not None
    package = directory / name
    shutil.copytree(Path(spec.origin).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in package.rglob("*.py"):
        text = KEY.sub(r"\1save_safetensors", path.read_text(encoding="utf-8"))
        if name != "paddleformers":
            # PaddleFormers looks for the layers of PaddleFleet, which are not installed.
            text = text.replace("paddlefleet", "absentfleet").replace("paddleformers", name)
        path.write_text(text, encoding="utf-8")
    if name == "paddleformers":
        return
    (directory / "sitecustomize.py").write_text('import sys\n\nsys.modules["paddleformers"] = None\n')
    callbacks, trainer = (package / "trainer" / f"{one}.py" for one in ("trainer_callback", "trainer"))
    callbacks.write_text(callbacks.read_text(encoding="utf-8") + CALLBACK, encoding="utf-8")
    text = trainer.read_text(encoding="utf-8")
    assert text.count(OLD) == 1
    text = text.replace(OLD, "SonicMoELayoutSwitchCallback()")
    trainer.write_text(text.replace("InterleaveGateUpCallback", "SonicMoELayoutSwitchCallback"), encoding="utf-8")


@pytest.fixture(scope="module", params=["paddlefleet", "paddleformers"])
def copied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    """One copy after the other."""
    directory = tmp_path_factory.mktemp(request.param)
    _write_copy(request.param, directory)
    preload = ("paddleformers_fc.cpu_runtime:activate", f"{request.param}.transformers.llama.modeling")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(directory))
        with ForkServer((*preload, "tests.harness.limits:be_patient"), grace=60, patience=LIMIT) as ranks:
            yield Copy(request.param, directory, ranks)


def settings(layout: MatrixLayout, output_dir: Path, resume: Path | None = None, **arguments: Any) -> dict[str, Any]:
    """The keyword arguments of a job that saves the steps 2 and 4."""
    return {
        "layout": layout.to_json(),
        "output_dir": str(output_dir),
        "arguments": {"max_steps": 4, "save_steps": 2, "flex_unknown_versions": "warn", **arguments},
        "resume": None if resume is None else str(resume),
    }


@pytest.fixture(scope="module")
def saved(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run of the installed PaddleFormers on two ranks: the output directory and the losses."""
    output_dir = tmp_path_factory.mktemp("saved")
    values = ranks.run(JOB, 2, settings(DP2, output_dir)).values
    return output_dir, values[0]["losses"]


def test_a_copy_trains_saves_and_exports_as_the_installed_library(
    copied: Copy, saved: tuple[Path, list[float]], tmp_path: Path
) -> None:
    values = copied.ranks.run(JOB, 2, settings(DP2, tmp_path)).values
    assert [value["library"] for value in values] == [copied.name] * 2
    assert values[0]["losses"] == saved[1]
    for step in (2, 4):
        of_copy, of_installed = (list(canonical_digests(root / f"checkpoint-{step}")) for root in (tmp_path, saved[0]))
        assert of_copy == of_installed
    exported, expected = (
        {path.name: path.read_bytes() for path in sorted((root / "export").iterdir())} for root in (tmp_path, saved[0])
    )
    assert exported.keys() == expected.keys()
    # The arguments have the name of the key and the output directory, and the configuration that of the library.
    differing = {name for name, content in exported.items() if content != expected[name]}
    named = {"config.json", "flex_checksums.json"} if copied.name == "paddlefleet" else set()
    assert differing == {"training_args.json", *named}
    assert exported["config.json"].replace(b"paddlefleet", b"paddleformers") == expected["config.json"]


def test_a_copy_resumes_what_the_installed_library_saved_and_the_reverse(
    copied: Copy, ranks: ForkServer, saved: tuple[Path, list[float]], tmp_path: Path
) -> None:
    there = settings(DP2, tmp_path / "there", saved[0] / "checkpoint-2")
    first = copied.ranks.run(JOB, 2, there).values[0]["losses"]
    back = settings(DP2, tmp_path / "back", tmp_path / "there/checkpoint-4", max_steps=6)
    onwards = ranks.run(JOB, 2, back).values[0]["losses"]
    assert len(onwards) == 2
    assert first == saved[1][2:]
    last, expected = (list(canonical_digests(root / "checkpoint-4")) for root in (tmp_path / "there", saved[0]))
    assert last == expected


def one_rank(sonic: bool, output_dir: Path, steps: int, resume: Path | None = None, **arguments: Any) -> dict[str, Any]:
    """The keyword arguments of a training of stacked experts, saved at every second step."""
    given = {"max_steps": steps, "save_steps": 2, "flex_unknown_versions": "warn", **arguments}
    resumed = {} if resume is None else {"resume": str(resume)}
    return {"sonic": sonic, "switched": sonic, "output_dir": str(output_dir), "arguments": given, **resumed}


@pytest.mark.parametrize("copied", ["paddlefleet"], indirect=True)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_experts_that_a_library_switches_in_every_step_are_saved_as_they_are_between_steps(
    copied: Copy, tmp_path: Path, asynchronous: bool
) -> None:
    def train(*given: Any, **arguments: Any) -> dict[str, Any]:
        values: list[dict[str, Any]] = copied.ranks.run(
            "tests.trainer.alternating_jobs:run", 1, one_rank(*given, **arguments)
        ).values
        return values[0]

    plain = train(False, tmp_path / "plain", 4)
    switched = train(True, tmp_path / "switched", 4, flex_async_save=asynchronous)
    assert switched["losses"] == pytest.approx(plain["losses"], abs=2e-5)
    assert (plain["passes_change_weights"], switched["passes_change_weights"]) == (False, True)
    # No step is trained: a model without the option saves what it has loaded.
    train(False, tmp_path / "again", 2, tmp_path / "switched/checkpoint-2")
    first, second = (list(canonical_digests(tmp_path / one / "checkpoint-2")) for one in ("again", "switched"))
    assert first == second
    onwards = train(True, tmp_path / "on", 4, tmp_path / "switched/checkpoint-2")
    assert (onwards["losses"], onwards["stack"]) == (switched["losses"][2:], switched["stack"])
    exported = load_file(tmp_path / "switched/export/model.safetensors")
    for expert, stack in enumerate(np.array(switched["stack"], "float32")):
        gate, up = np.split(stack, 2, axis=1)
        assert np.array_equal(exported[EXPERT.format(expert, "gate")], gate.T)
        assert np.array_equal(exported[EXPERT.format(expert, "up")], up.T)


@pytest.mark.slow
def test_our_command_line_trains_and_resumes_with_a_copy(copied: Copy, ranks: ForkServer, tmp_path: Path) -> None:
    ranks.run("tests.trainer.entry_jobs:write_corpus", 1, {"directory": str(tmp_path), "text": str(ROOT / "LICENSE")})
    path = write_yaml(tmp_path, tmp_path / "out", flex_unknown_versions="warn")
    environment = {**os.environ, "PYTHONPATH": f"{copied.directory}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).with_name("paddleformers-fc")), "train", str(path), "--nproc", "2"]
    for steps, resume in (("2", "false"), ("4", "true")):
        given = [*command, f"max_steps={steps}", f"resume_from_checkpoint={resume}"]
        done = subprocess.run(given, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert sorted(one.name for one in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
