"""Libraries and layers that no index has: copies of the installed PaddleFormers, and experts of PaddleFleet.

The copies have the names of their public sources. One is the package ``paddlefleet``, with the renamed key and the
callback of its Trainer, where PaddleFormers cannot be imported. The other one is a PaddleFormers with the renamed key,
as its development branch is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import paddleformers_fc
from paddleformers_fc.errors import OptionError
from paddleformers_fc.upstream import LIBRARY
from tests.harness.limits import LIMIT
from tests.harness.on_ranks import run_on_ranks
from tests.harness.tiny import DP2
from tests.trainer.alternating_jobs import SIZES
from tests.trainer.jobs import trained
from tests.trainer.test_entry_points import ROOT, write_recipe
from verification.demo.assets import prepare
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

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
    """A copy of PaddleFormers: its package, the directory to name in PYTHONPATH, and ranks that start with it."""

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


def train(output_dir: Path, resume: Path | None) -> dict[str, Any]:
    """Train by the library of this process, with its own optimizer; save the steps 2 and 4, and export.

    Returns:
        the losses, and the package of the Trainer.
    """
    arguments = {"optim": "adamw_custom", "max_steps": 4, "save_steps": 2, "flex_unknown_versions": "warn"}
    trainer = trained(DP2, output_dir, arguments, resume=resume)
    trainer.save_model(str(output_dir / "export"))
    kind = import_module(f"{LIBRARY}.trainer").Trainer
    assert isinstance(trainer, kind)
    return {"losses": trainer.losses, "library": kind.__module__.partition(".")[0]}


def train_by(server: ForkServer, output_dir: Path, resume: Path | None = None) -> dict[str, Any]:
    found: dict[str, Any] = run_on_ranks(server, 2, train, output_dir=output_dir, resume=resume)[0]
    return found


@pytest.fixture(scope="module")
def saved(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run of the installed PaddleFormers on two ranks: the output directory and the losses."""
    output_dir = tmp_path_factory.mktemp("saved")
    return output_dir, train_by(ranks, output_dir)["losses"]


def test_a_copy_trains_saves_and_exports_as_the_installed_library_and_each_resumes_the_other(
    copied: Copy, ranks: ForkServer, saved: tuple[Path, list[float]], tmp_path: Path
) -> None:
    installed, losses = saved
    assert train_by(copied.ranks, tmp_path) == {"losses": losses, "library": copied.name}
    exported, expected = (
        {path.name: path.read_bytes() for path in sorted((root / "export").iterdir())} for root in (tmp_path, installed)
    )
    assert exported.keys() == expected.keys()
    # The arguments have the name of the key and the output directory, and the configuration that of the library.
    differing = {name for name, content in exported.items() if content != expected[name]}
    named = {"config.json", "flex_checksums.json"} if copied.name == "paddlefleet" else set()
    assert differing == {"training_args.json", *named}
    assert exported["config.json"].replace(b"paddlefleet", b"paddleformers") == expected["config.json"]
    there, back = tmp_path / "there", tmp_path / "back"
    assert train_by(copied.ranks, there, installed / "checkpoint-2")["losses"] == losses[2:]
    assert train_by(ranks, back, tmp_path / "checkpoint-2")["losses"] == losses[2:]
    last = list(canonical_digests(installed / "checkpoint-4"))
    assert all(list(canonical_digests(root / "checkpoint-4")) == last for root in (tmp_path, there, back))


@pytest.mark.slow
@pytest.mark.parametrize("copied", ["paddlefleet"], indirect=True)
def test_our_command_line_trains_and_resumes_with_a_copy(copied: Copy, tmp_path: Path) -> None:
    path = write_recipe("llama_pt", prepare(tmp_path / "assets"), tmp_path / "out", flex_unknown_versions="warn")
    environment = {**os.environ, "PYTHONPATH": f"{copied.directory}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).with_name("paddleformers-fc")), "train", str(path), "--nproc", "2"]
    for steps, resume in (("3", "false"), ("6", "true")):
        given = [*command, f"max_steps={steps}", f"resume_from_checkpoint={resume}"]
        done = subprocess.run(given, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert sorted(one.name for one in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]


# ---- Experts of ``using_sonic_moe``, whose rows of gate and up alternate.

EXPERT = "model.layers.0.mlp.experts.{}.{}_proj.weight"


def train_experts(
    server: ForkServer,
    output_dir: Path,
    sonic: bool,
    steps: int,
    arguments: Mapping[str, Any] | None = None,
    **given: Any,
) -> dict[str, Any]:
    """Train in a new output directory, save every second step and the last one, and export."""
    job = {"sonic": sonic, "output_dir": output_dir, **given}
    sent = {name: str(value) if isinstance(value, Path) else value for name, value in job.items()}
    sent["arguments"] = {"max_steps": steps, "save_steps": 2, **(arguments or {})}
    found: dict[str, Any] = server.run("tests.trainer.alternating_jobs:run", 1, sent).values[0]
    return found


def digests(directory: Path) -> list[object]:
    return list(canonical_digests(directory / "checkpoint-2"))


@pytest.fixture(scope="module")
def runs(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Path, Any]]:
    """Four steps from the same weights without and with the option: the output directory and the outcome."""
    root = tmp_path_factory.mktemp("runs")
    train_experts(ranks, root / "first", False, 1)
    places = {sonic: root / str(sonic) for sonic in (False, True)}
    weights = root / "first/export"
    return {sonic: (place, train_experts(ranks, place, sonic, 4, weights=weights)) for sonic, place in places.items()}


def test_both_layouts_train_the_same_model(runs: dict[bool, tuple[Path, Any]]) -> None:
    # With rows in the wrong order, the first forward pass would use gate as up.
    assert runs[True][1]["losses"] == pytest.approx(runs[False][1]["losses"], abs=2e-5)
    assert len(runs[True][1]["losses"]) == 4


@pytest.mark.parametrize("source", [False, True])
@pytest.mark.parametrize("sonic", [False, True])
def test_a_run_of_either_layout_resumes_the_other_bit_by_bit(
    ranks: ForkServer, runs: dict[bool, tuple[Path, Any]], tmp_path: Path, sonic: bool, source: bool
) -> None:
    checkpoint = runs[source][0] / "checkpoint-2"
    # No step is trained, so the second save contains the loaded state, including moments.
    train_experts(ranks, tmp_path / "again", sonic, 2, resume=checkpoint)
    assert digests(tmp_path / "again") == digests(runs[source][0])
    resumed = train_experts(ranks, tmp_path / "on", sonic, 4, resume=checkpoint)
    expected = runs[sonic][1]["losses"][2:]
    assert resumed["losses"] == (expected if sonic == source else pytest.approx(expected, abs=2e-5))
    if sonic == source:
        assert resumed["stack"] == runs[sonic][1]["stack"]


def test_gate_and_up_alternate_and_are_exported_apart_but_not_into_a_format_that_does_not_record_the_order(
    runs: dict[bool, tuple[Path, Any]], tmp_path: Path
) -> None:
    stack, last = np.array(runs[True][1]["stack"], "float32"), runs[True][0] / "checkpoint-4"
    exported = load_file(runs[True][0] / "export/model.safetensors")
    for expert in range(SIZES["num_experts"]):
        for first, part in enumerate(("gate", "up")):
            assert np.array_equal(stack[expert, first::2], exported[EXPERT.format(expert, part)])
    paddleformers_fc.open(last).convert(tmp_path / "hf", format="hf")
    again = load_file(tmp_path / "hf/model.safetensors")
    assert again.keys() == exported.keys()
    assert all(again[name].tobytes() == one.tobytes() for name, one in exported.items())
    with pytest.raises(OptionError) as caught:
        paddleformers_fc.open(last).convert(tmp_path / "distcp", format="distcp")
    assert "using_sonic_moe" in caught.value.what


@pytest.mark.parametrize("copied", ["paddlefleet"], indirect=True)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_experts_that_a_library_switches_in_every_step_are_saved_as_they_are_between_steps(
    copied: Copy, tmp_path: Path, asynchronous: bool
) -> None:
    def run(name: str, sonic: bool, steps: int, resume: Path | None = None, **more: Any) -> dict[str, Any]:
        given = {"flex_unknown_versions": "warn", **more}
        return train_experts(copied.ranks, tmp_path / name, sonic, steps, given, switched=sonic, resume=resume)

    plain = run("plain", False, 4)
    switched = run("switched", True, 4, flex_async_save=asynchronous)
    assert switched["losses"] == pytest.approx(plain["losses"], abs=2e-5)
    assert (plain["passes_change_weights"], switched["passes_change_weights"]) == (False, True)
    # No step is trained: a model without the option saves what it has loaded.
    run("again", False, 2, tmp_path / "switched/checkpoint-2")
    assert digests(tmp_path / "again") == digests(tmp_path / "switched")
    onwards = run("on", True, 4, tmp_path / "switched/checkpoint-2")
    assert (onwards["losses"], onwards["stack"]) == (switched["losses"][2:], switched["stack"])
    exported = load_file(tmp_path / "switched/export/model.safetensors")
    for expert, stack in enumerate(np.array(switched["stack"], "float32")):
        gate, up = np.split(stack, 2, axis=1)
        assert np.array_equal(exported[EXPERT.format(expert, "gate")], gate.T)
        assert np.array_equal(exported[EXPERT.format(expert, "up")], up.T)
