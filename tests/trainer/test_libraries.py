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
from tests.harness import tiny
from tests.harness.limits import LIMIT
from tests.harness.on_ranks import run_on_ranks
from tests.harness.tiny import DP2
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

SIZES = {"vocab_size": tiny.VOCABULARY, "hidden_size": 8, "moe_intermediate_size": 6, "num_experts": 3}
STACK = "model.layers.0.mlp.grouped_gemm_experts.weight1"
EXPERT = "model.layers.0.mlp.experts.{}.{}_proj.weight"


def build_experts(sonic: bool, switched: bool = False) -> Any:
    """The model. Its forward pass takes every expert for every token.

    Under ``using_sonic_moe`` an expert of PaddleFleet 0.3.0 is [out, in], and its rows of gate and up alternate once
    training has begun.

    Args:
        switched: as PaddleFleet's Trainer has them: so in the passes alone, and [in, out] between steps.
    """
    import paddle
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import build_sharded_state_dict
    from paddle.nn import Embedding, Layer, LayerList
    from paddle.nn.functional import cross_entropy, silu

    transformers: Any = import_module(f"{LIBRARY}.transformers")
    Qwen3MoeConfig = import_module(f"{LIBRARY}.transformers.qwen3_moe.configuration").Qwen3MoeConfig
    vocabulary, hidden, width, count = SIZES.values()
    shapes = ([2 * width, hidden], [hidden, width])

    class Experts(Layer):
        def __init__(self) -> None:
            super().__init__()
            first, second = ([count, *(shape if sonic and not switched else shape[::-1])] for shape in shapes)
            self.weight1, self.weight2 = self.create_parameter(first), self.create_parameter(second)

        def forward(self, states: Any) -> Any:
            # [expert, in, out] whatever the layout.
            first, second = ((one.transpose([0, 2, 1]) if sonic else one) for one in (self.weight1, self.weight2))
            gate, up = (first[..., ::2], first[..., 1::2]) if sonic else (first[..., :width], first[..., width:])
            states = states.unsqueeze(0)
            return ((silu(states @ gate) * (states @ up)) @ second).mean(0)

        def sharded_state_dict(self, structured_name_prefix: str = "") -> Any:
            held = {name: one.reshape([-1, one.shape[-1]]) for name, one in self.state_dict().items()}
            for name, one in self.state_dict().items():
                held[name].name = one.name
            return build_sharded_state_dict(held, None, structured_name_prefix)

    class SwitchedExperts(Experts):
        def convert_weights_to_sonic_layout(self) -> None:
            self._convert(True)

        def convert_weights_to_grouped_layout(self) -> None:
            self._convert(False)

        def _convert(self, to_sonic: bool) -> None:
            if (self.weight1.shape[1] == 2 * width) == to_sonic:
                return
            with paddle.no_grad():
                for number, parameter in enumerate((self.weight1, self.weight2)):
                    for one in (parameter, *([] if parameter.grad is None else [parameter.grad])):
                        turned = one.transpose([0, 2, 1])
                        if number == 0 and to_sonic:
                            turned = paddle.stack(turned.chunk(2, axis=1), axis=2).reshape(turned.shape)
                        elif number == 0:
                            turned = paddle.concat([turned[..., ::2], turned[..., 1::2]], axis=-1)
                        one.reshape_(turned.shape)
                        paddle.assign(turned.contiguous(), output=one)

        def forward(self, states: Any) -> Any:
            assert self.weight1.shape[1] == 2 * width, "not switched before the pass"
            return super().forward(states)

        def sharded_state_dict(self, structured_name_prefix: str = "") -> Any:
            assert self.weight1.shape[1] == hidden, "described in the passes"
            return super().sharded_state_dict(structured_name_prefix)

    class Model(transformers.PretrainedModel):
        config_class, base_model_prefix, is_fleet = Qwen3MoeConfig, "model", True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = model = Layer()
            model.embedding, model.norm, model.lm_head, layer = Layer(), Layer(), Layer(), Layer()
            model.embedding.embed_tokens = Embedding(vocabulary, hidden)
            model.norm.weight = model.norm.create_parameter([hidden])
            model.lm_head.weight = model.lm_head.create_parameter([vocabulary, hidden])
            layer.mlp = Layer()
            layer.mlp.grouped_gemm_experts = SwitchedExperts() if switched else Experts()
            model.layers = LayerList([layer])

        def forward(self, input_ids: Any, labels: Any) -> Any:
            states = self.model.embedding.embed_tokens(input_ids)
            flat = states.reshape([-1, hidden])
            flat = (flat + self.model.layers[0].mlp.grouped_gemm_experts(flat)) * self.model.norm.weight
            logits = flat @ self.model.lm_head.weight.T
            return (cross_entropy(logits, labels.reshape([-1])), logits)

        def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return Layer.sharded_state_dict(self, *args, **kwargs)

    config = Qwen3MoeConfig(**SIZES, num_hidden_layers=1, mlp_only_layers=[], tie_word_embeddings=False)
    config.using_sonic_moe, config.moe_expert_fusion = sonic, not sonic
    paddle.seed(0)
    return Model(config)


def run_experts(
    sonic: bool,
    output_dir: Path,
    arguments: dict[str, Any],
    weights: Path | None = None,
    resume: Path | None = None,
    switched: bool = False,
) -> dict[str, Any]:
    """Train, save again, and export.

    Args:
        switched: as for :func:`build_experts`.
        weights: open weights that the model starts with.

    Returns:
        the losses, and the stack of gate and up at the end.
    """
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments, load_open_weights
    from paddleformers_fc.trainer import startup

    given = {"cls": FlexTrainingArguments, "flex_checkpoint": True, "using_sonic_moe": sonic, **arguments}
    args = tiny.training_arguments(tiny.SINGLE, output_dir, **given)
    model = build_experts(sonic, switched)
    if weights is not None:
        load_open_weights(model, weights)
    trainer = tiny.trainer(model, args, cls=FlexTrainer)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    if not (output_dir / f"checkpoint-{trainer.state.global_step}").exists():
        trainer._save_checkpoint(trainer.model, metrics=None)
    trainer.save_model(str(output_dir / "export"))
    stack = trainer.model.state_dict()[STACK]
    return {
        "losses": trainer.losses,
        "stack": stack.numpy().tolist(),
        "passes_change_weights": startup._passes_change_weights(trainer),
    }


def train_experts(
    server: ForkServer,
    output_dir: Path,
    sonic: bool,
    steps: int,
    arguments: Mapping[str, Any] | None = None,
    **given: Any,
) -> dict[str, Any]:
    """Train in a new output directory, save every second step and the last one, and export."""
    given["arguments"] = {"max_steps": steps, "save_steps": 2, **(arguments or {})}
    found: dict[str, Any] = run_on_ranks(server, 1, run_experts, sonic=sonic, output_dir=output_dir, **given)[0]
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
