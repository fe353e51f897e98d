"""A checkpoint is resumed by another model of the same shapes, or by a run with other settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.cli.training import COLOUR
from tests.corruption.guarantees import Observed, fault
from tests.harness.tiny import TP2
from verification.forkserver import ForkServer

JOB = "tests.corruption.jobs:train"
THREE: dict[str, Any] = {"max_steps": 3, "save_steps": 2}


@pytest.fixture(scope="module")
def stock_run(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of the stock Trainer on two processes."""
    output_dir = tmp_path_factory.mktemp("stock")
    ranks.run(JOB, 2, {"layout": TP2.to_json(), "output_dir": str(output_dir), "arguments": THREE})
    return output_dir / "checkpoint-2"


@pytest.fixture(scope="module")
def our_run(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of our Trainer on two processes."""
    output_dir = tmp_path_factory.mktemp("ours")
    ranks.run(JOB, 2, {"layout": TP2.to_json(), "output_dir": str(output_dir), "arguments": THREE, "ours": True})
    return output_dir / "checkpoint-2"


def resumed(ranks: ForkServer, checkpoint: Path, output_dir: Path, **given: Any) -> tuple[list[dict[str, Any]], str]:
    """What every rank found, and the log of the first."""
    settings = {"layout": TP2.to_json(), "output_dir": str(output_dir), "resume": str(checkpoint), **given}
    result = ranks.run(JOB, 2, settings)
    return list(result.values), COLOUR.sub("", result.logs[0].read_text())


@pytest.mark.slow
@fault("G60", "the model that resumes has another `rope_theta`")
def test_g60_a_model_in_which_the_weights_mean_something_else_is_refused(
    ranks: ForkServer, stock_run: Path, our_run: Path, tmp_path: Path
) -> Observed:
    other = {"model": {"rope_theta": 500000.0}, "arguments": THREE}
    found, _ = resumed(ranks, stock_run, tmp_path / "stock", **other)
    assert found[0].get("step") == 3, found[0]
    refused, _ = resumed(ranks, our_run, tmp_path / "ours", ours=True, **other)
    assert len({one["error"] for one in refused}) == 1
    assert "rope_theta  10000.0  500000.0" in refused[0]["error"]
    arguments = {**THREE, "flex_allow_config_changes": ["rope_theta"]}
    allowed, log = resumed(ranks, our_run, tmp_path / "allowed", ours=True, **{**other, "arguments": arguments})
    assert allowed[0]["step"] == 3
    assert "rope_theta  10000.0  500000.0" in log
    return Observed(
        "resumes without a word",
        "refused on every rank: “The model's configuration gives the stored weights another meaning.”, with the table "
        "`rope_theta 10000.0 500000.0`; a warning with it where `flex_allow_config_changes: [rope_theta]` allows it",
    )


@pytest.mark.slow
@fault("G61", "the run that resumes has another `adam_beta2`, `weight_decay` and `max_grad_norm`")
def test_g61_other_settings_of_a_run_are_one_table(
    ranks: ForkServer, stock_run: Path, our_run: Path, tmp_path: Path
) -> Observed:
    arguments = {**THREE, "adam_beta2": 0.95, "weight_decay": 0.1, "max_grad_norm": 0.5}
    found, stock_log = resumed(ranks, stock_run, tmp_path / "stock", arguments=arguments)
    assert found[0].get("step") == 3, found[0]
    assert "differs" not in stock_log
    _, log = resumed(ranks, our_run, tmp_path / "ours", ours=True, arguments=arguments)
    _, _, table = log.partition("This run differs from the one that saved step 2:\n")
    rows = [" ".join(line.split()) for line in table.splitlines()[:4]]
    assert rows == ["key saved now", "adam_beta2 0.999 0.95", "weight_decay 0.0 0.1", "max_grad_norm 1.0 0.5"]
    return Observed("resumes without a word", f"resumes, with one warning: `{'`, `'.join(rows)}`")
