"""PaddleNLP's Trainer with flex checkpoints: save, resume under another layout, export, exchange with PaddleFormers."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddleformers_fc
from tests.harness.limits import LIMIT
from tests.harness.tiny import DP2, PP2, SD2V1, SD2V2, SINGLE, TP2, TP2PP2
from verification.digests import canonical_digests
from verification.forkserver import ForkServer
from verification.matrix.layouts import MatrixLayout

JOBS = "tests.nlp.jobs"
ROOT = Path(__file__).parents[2]
PRELOAD = (
    "paddleformers_fc.cpu_runtime:activate",
    "paddlenlp.transformers.llama.modeling_pp",
    "paddlenlp.transformers.qwen2.modeling_pp",
    "paddleformers_fc.trainer.entry",
    "paddleformers_fc.trainer.nlp_arguments",
    "tests.harness.limits:be_patient",
)
BF16 = replace(SD2V2, name="bf16", bf16=True)

FUSED = {"fuse_attention_qkv": True, "fuse_attention_ffn": True}
TIED = {"tie_word_embeddings": True}
NO_SETTINGS: Mapping[str, Any] = {}


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkServer]:
    """Forks ranks in which PaddleNLP is imported and the CPU runtime is active."""
    with ForkServer(PRELOAD, grace=60, patience=LIMIT) as server:
        yield server


class Runs:
    """Trainings of four steps, which save at steps 2 and 4, of one model; each layout once."""

    def __init__(self, ranks: ForkServer, directory: Path) -> None:
        self._ranks = ranks
        self._directory = directory
        self._done: dict[str, Any] = {}

    def whole(self, name: str, layout: MatrixLayout, model: Mapping[str, Any]) -> tuple[Path, list[float]]:
        """Train without an interruption; the output directory and the losses."""
        key = f"{name}-{layout.name}-{'-'.join(model)}"
        if key not in self._done:
            self._done[key] = self._train(name, layout, model, self._directory / key, None)
        return self._directory / key, self._done[key]

    def resumed(
        self, name: str, layout: MatrixLayout, model: Mapping[str, Any], checkpoint: Path, output_dir: Path
    ) -> list[float]:
        """Resume step 2; saves what was loaded as ``checkpoint-2`` of the output directory."""
        return self._train(name, layout, model, output_dir, str(checkpoint))

    def loaded(self, layout: MatrixLayout, checkpoint: Path, output_dir: Path) -> Path:
        """Load a checkpoint of a Llama of PaddleFormers, whose data has another order; what was loaded, saved again."""
        self._train("llama", layout, {}, output_dir, str(checkpoint), {"ignore_data_skip": True})
        return output_dir / "checkpoint-2"

    def _train(
        self,
        name: str,
        layout: MatrixLayout,
        model: Mapping[str, Any],
        output_dir: Path,
        resume: str | None,
        settings: Mapping[str, Any] = NO_SETTINGS,
    ) -> list[float]:
        # In a pipeline PaddleNLP counts a tied embedding twice in the norm of the gradients.
        clip = {"max_grad_norm": 0.0} if "tie_word_embeddings" in model else {}
        job = {
            "model_type": name,
            "layout": layout.to_json(),
            "output_dir": str(output_dir),
            "resume": resume,
            "settings": {"max_steps": 4, "save_steps": 2, **clip, **settings},
            "model": dict(model),
            "export": None if resume else str(output_dir / "export"),
        }
        values = self._ranks.run(f"{JOBS}:train", layout.nproc, job).values
        assert values[0]["saved"] == ["checkpoint-2", "checkpoint-4"]
        losses: list[float] = values[0]["losses"]
        return losses


@pytest.fixture(scope="module")
def runs(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The trainings of this module."""
    return Runs(ranks, tmp_path_factory.mktemp("runs"))


def digests(checkpoint: Path) -> dict[tuple[str, str], str]:
    """The md5 of every canonical tensor by role and name."""
    return {(one.role, one.name): one.md5 for one in canonical_digests(checkpoint)}


@pytest.mark.parametrize(
    ("name", "saved", "wanted", "model", "other"),
    [
        ("llama", SINGLE, DP2, {}, {}),
        ("llama", DP2, TP2, {}, {}),
        ("llama", TP2, PP2, {}, {}),
        ("llama", PP2, SD2V2, {}, {}),
        ("llama", SD2V2, SD2V1, {}, {}),
        ("llama", SD2V1, TP2PP2, {}, {}),
        ("llama", TP2PP2, SINGLE, {}, FUSED),
        ("llama", SINGLE, PP2, TIED, TIED),
        ("qwen2", TP2, SD2V2, FUSED, {}),
        ("qwen2", BF16, TP2, {}, {}),
    ],
    ids=lambda one: one.name if isinstance(one, MatrixLayout) else one if isinstance(one, str) else "-".join(one),
)
def test_a_checkpoint_of_one_layout_resumes_under_another(
    runs: Runs,
    tmp_path: Path,
    name: str,
    saved: MatrixLayout,
    wanted: MatrixLayout,
    model: Mapping[str, Any],
    other: Mapping[str, Any],
) -> None:
    if saved.bf16:
        wanted = replace(wanted, bf16=True)
    output, losses = runs.whole(name, saved, model)
    resumed = runs.resumed(name, wanted, other, output / "checkpoint-2", tmp_path)
    assert digests(tmp_path / "checkpoint-2") == digests(output / "checkpoint-2")
    np.testing.assert_allclose(resumed, losses[2:], rtol=0, atol=0.02 if saved.bf16 else 5e-6)


@pytest.mark.parametrize(
    ("name", "layout", "model"),
    [("llama", SINGLE, {}), ("llama", TP2, {}), ("qwen2", TP2, FUSED)],
    ids=lambda one: one.name if isinstance(one, MatrixLayout) else one if isinstance(one, str) else "-".join(one),
)
def test_an_export_has_the_weights_that_paddlenlp_merges(
    runs: Runs, name: str, layout: MatrixLayout, model: Mapping[str, Any]
) -> None:
    output, _ = runs.whole(name, layout, model)
    exported = paddleformers_fc.open(str(output / "export"))
    merged = _canonical(_merged(output / "export-paddlenlp"), name)
    assert {tensor.name for tensor in exported.tensors()} == merged.keys()
    for tensor, value in merged.items():
        np.testing.assert_array_equal(exported.read(tensor), value, err_msg=tensor)
    checkpoint = paddleformers_fc.open(str(output / "checkpoint-4"))
    assert checkpoint.diff(exported, role="model_state").equal


def _merged(directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    """PaddleNLP's own merged weights."""
    (file,) = directory.glob("*.pdparams")
    with file.open("rb") as stream:
        values = pickle.load(stream)
    return {name: np.asarray(value) for name, value in values.items() if isinstance(value, np.ndarray)}


def _canonical(weights: Mapping[str, np.ndarray[Any, Any]], name: str) -> dict[str, np.ndarray[Any, Any]]:
    """The names and layouts of open weights, as PaddleNLP's documentation describes its fused layers."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for key, value in weights.items():
        canonical = key.replace(f"{name}.", "model.", 1)
        if ".qkv_proj." in key:
            parts: Sequence[np.ndarray[Any, Any]] = _by_kv_head(value, heads=4, kv_heads=2)
            names = [canonical.replace("qkv_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
        elif ".gate_up_fused_proj." in key:
            parts = np.split(value, 2, axis=-1)
            names = [canonical.replace("gate_up_fused_proj", part) for part in ("gate_proj", "up_proj")]
        else:
            parts, names = [value], [canonical]
        turned = "embed_tokens" not in key
        found |= {one: part.T if turned else part for one, part in zip(names, parts, strict=True)}
    return found


def _by_kv_head(value: np.ndarray[Any, Any], heads: int, kv_heads: int) -> list[np.ndarray[Any, Any]]:
    size = value.shape[-1] // (heads + 2 * kv_heads)
    share = heads // kv_heads
    grouped = value.reshape(*value.shape[:-1], kv_heads, share + 2, size)
    parts = grouped[..., :share, :], grouped[..., share : share + 1, :], grouped[..., share + 1 :, :]
    return [part.reshape(*value.shape[:-1], -1) for part in parts]


def test_checkpoints_are_exchanged_with_paddleformers_both_ways(runs: Runs, tmp_path: Path) -> None:
    python = os.environ["FLEX_FORMERS_PYTHON"]
    ours, _ = runs.whole("llama", TP2, {})
    jobs: list[dict[str, Any]] = [
        {"model": {}, "output_dir": str(tmp_path / "formers")},
        {"model": {}, "output_dir": str(tmp_path / "from-nlp"), "resume": str(ours / "checkpoint-2")},
    ]
    lines = "".join(f"{json.dumps(job)}\n" for job in jobs)
    theirs = subprocess.run(
        [python, "-m", "tests.nlp.formers"], cwd=ROOT, input=lines, capture_output=True, text=True, timeout=LIMIT
    )
    assert theirs.returncode == 0, theirs.stderr[-4000:]
    assert digests(tmp_path / "from-nlp" / "checkpoint-2") == digests(ours / "checkpoint-2")
    loaded = runs.loaded(PP2, tmp_path / "formers" / "checkpoint-2", tmp_path / "from-formers")
    assert digests(loaded) == digests(tmp_path / "formers" / "checkpoint-2")


def test_averages_are_saved_blocking_and_asynchronously_and_loaded_under_another_layout(
    ranks: ForkServer, tmp_path: Path
) -> None:
    averaged = {"max_steps": 4, "save_steps": 2, "flex_ema_decay": 0.9}
    job = {"model_type": "llama", "layout": BF16.to_json(), "settings": averaged}
    found = []
    for name, more in (("in", {}), ("beside", {"flex_async_save": True})):
        given = {**job, "output_dir": str(tmp_path / name), "settings": {**averaged, **more}}
        losses = ranks.run(f"{JOBS}:train", 2, given).values[0]["losses"]
        found.append((losses, *(digests(tmp_path / name / f"checkpoint-{step}") for step in (2, 4))))
    assert found[0] == found[1]
    stored = found[0][1]
    assert sum(role == "ema_state" for role, _ in stored) == sum(role == "model_state" for role, _ in stored)
    there = {"layout": replace(TP2, bf16=True).to_json(), "output_dir": str(tmp_path / "there")}
    ranks.run(f"{JOBS}:train", 2, {**job, **there, "resume": str(tmp_path / "in" / "checkpoint-2")})
    assert digests(tmp_path / "there" / "checkpoint-2") == stored


def test_an_evaluation_has_the_averaged_weights(ranks: ForkServer, tmp_path: Path) -> None:
    def losses(**settings: Any) -> list[float]:
        given = {"max_steps": 2, "evaluation_strategy": "steps", "eval_steps": 1, "do_eval": True, **settings}
        job = {"model_type": "llama", "layout": SD2V2.to_json(), "output_dir": str(tmp_path), "settings": given}
        return list(ranks.run(f"{JOBS}:train", 2, job).values[0]["evaluated"])

    plain, averaged = losses(), losses(flex_ema_decay=0.9, flex_ema_evaluate=True)
    assert plain[0] == averaged[0], "the first update is a copy"
    assert plain[1] != averaged[1]


def test_open_weights_are_read_under_tensor_parallelism(runs: Runs, ranks: ForkServer, tmp_path: Path) -> None:
    output, _ = runs.whole("llama", SINGLE, {})
    job = {"directory": str(output / "export"), "layout": TP2.to_json(), "output_dir": str(tmp_path)}
    ranks.run(f"{JOBS}:from_open_weights", TP2.nproc, job)
    exported = paddleformers_fc.open(str(tmp_path / "export"))
    assert exported.diff(paddleformers_fc.open(str(output / "export")), role="model_state").equal


def test_unsupported_options_are_rejected_by_name(ranks: ForkServer, tmp_path: Path) -> None:
    (errors,) = ranks.run(f"{JOBS}:refusals", 1, {"output_dir": str(tmp_path)}).values
    texts = {
        "stage2": "sharding",
        "adafactor": "optim",
        "linear": "rope_scaling_type",
        "experts": "models of type qwen2_moe of PaddleNLP",
        "mistral": "No family declares model_type 'mistral'",
        "adapters": "adapters",
        "no Trainer": "Mine is not a Trainer of PaddleNLP",
    }
    for name, error in errors.items():
        assert texts.get(name, name) in error, f"{name}: {error}"
    assert not list(tmp_path.glob("checkpoint-*"))


def test_install_is_enough_for_the_trainer_of_paddlenlp(ranks: ForkServer, tmp_path: Path) -> None:
    job = {"model_type": "llama", "layout": SINGLE.to_json(), "settings": {"max_steps": 1, "save_steps": 1}}
    ranks.run(f"{JOBS}:train", 1, {**job, "output_dir": str(tmp_path), "is_installed": True})
    assert (tmp_path / "checkpoint-1/flex_checkpoint.json").is_file()


def test_the_installed_paddlenlp_is_the_one_of_the_table_of_hooks(ranks: ForkServer) -> None:
    (lines,) = ranks.run(f"{JOBS}:hooks", 1, {}).values
    assert lines == []
