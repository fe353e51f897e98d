"""Ranks that are not alike: another checkpoint under the same name, and replicas that have gone apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.storage.manifest import read_manifest
from tests.corruption.guarantees import Observed, fault
from tests.harness.on_ranks import on_ranks
from tests.harness.tiny import DP2, MatrixLayout
from tests.trainer.jobs import flex_trainer
from verification.forkserver import ForkServer, JobResult

APART = MatrixLayout("tp2ep2", nproc=2, tp=2, ep=2)


def started(ranks: ForkServer, layout: MatrixLayout, output_dir: Path, **settings: Any) -> JobResult:
    """A training, with what every rank returned and logged; it resumes ``checkpoint-3`` where directories are given."""
    given = {"layout": layout.to_json(), "output_dir": str(output_dir), **settings}
    resume = {"resume": "checkpoint-3"} if "directories" in settings else {}
    return ranks.run("tests.corruption.jobs:train", layout.nproc, {**given, **resume, "digests": True})


def run(ranks: ForkServer, layout: MatrixLayout, output_dir: Path, **settings: Any) -> list[dict[str, Any]]:
    """What every rank returned."""
    return list(started(ranks, layout, output_dir, **settings).values)


@pytest.mark.slow
@fault("T17", "one of two data-parallel ranks finds another run's checkpoint under the same name")
def test_t17_another_checkpoint_under_the_same_name_is_refused(ranks: ForkServer, tmp_path: Path) -> Observed:
    found = {}
    for ours in (False, True):
        places = [tmp_path / f"{ours}-{rank}" for rank in range(2)]
        for place, rate in zip(places, (1e-3, 1e-2), strict=True):
            run(ranks, DP2, place, arguments={"max_steps": 3, "save_steps": 3, "learning_rate": rate}, ours=ours)
        given = {"arguments": {"max_steps": 4}, "directories": list(map(str, places)), "ours": ours}
        found[ours] = run(ranks, DP2, tmp_path / "out", **given)
    one, other = found[False]
    assert one["step"] == other["step"] == 4
    differing = sum(one["weights"][name] != other["weights"][name] for name in one["weights"])
    assert differing > len(one["weights"]) // 2

    first, second = found[True]
    assert first == second
    assert first["error"].startswith("Corrupt: ")
    assert not first["changed"]
    assert "rank 0: step 3" in first["error"]
    assert "rank 1: step 3" in first["error"]
    return Observed(
        "training continues, and the two ranks have different weights; no error",
        "refused on every rank: `Corrupt`, with the checkpoints and the ranks that see them; nothing changed",
    )


@on_ranks(layout=DP2)
def test_a_save_that_is_to_refuse_replicas_that_differ_stops_every_rank(layout: MatrixLayout, tmp_path: Path) -> None:
    import paddle
    from paddleformers.trainer import TrainerCallback

    class Part(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if paddle.distributed.get_rank():
                with paddle.no_grad():
                    model.parameters()[0].scale_(1.5)

    given = {"max_steps": 1, "save_steps": 1, "flex_check_replicas": "refuse"}
    with pytest.raises(MismatchError, match="version 1 on rank 0; version 2 on rank 1"):
        flex_trainer(layout.to_json(), str(tmp_path), given, callbacks=[Part()]).train()
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.slow
@fault("T18", "ranks hold different numbers of the same weight, as clipping under tp2 with ep2 leaves them")
def test_t18_replicas_that_differ_are_reported(ranks: ForkServer, tmp_path: Path) -> Observed:
    arguments = {"max_steps": 1, "save_steps": 1, "max_grad_norm": 0.01}
    given = {"arguments": arguments, "model_type": "ernie4_5_moe"}
    one, other = run(ranks, APART, tmp_path / "stock", **given)
    name = "model.norm.weight"
    assert one["weights"][name] != other["weights"][name]
    assert (tmp_path / "stock/checkpoint-1").is_dir()

    twice = {**given, "arguments": {**arguments, "max_steps": 2}}
    logs = started(ranks, APART, tmp_path / "ours", **twice, ours=True).logs
    assert [log.read_text().count("Replicas differ: ranks hold different values") for log in logs] == [1, 0]
    for step in (2, 1):
        lines = read_manifest(tmp_path / f"ours/checkpoint-{step}").differences
        assert isinstance(lines, list)
        (line,) = [line for line in lines if line.startswith(f"model_state {name} ")]
    refusing = {**given, "arguments": {**arguments, "flex_check_replicas": "refuse"}}
    refused = run(ranks, APART, tmp_path / "refused", **refusing, ours=True)
    assert all(outcome["error"].startswith("MismatchError: ") for outcome in refused)
    assert line in refused[0]["error"]
    assert not list((tmp_path / "refused").glob("*checkpoint*"))
    return Observed(
        "one of them is saved; no error",
        f"recorded once in the log and in the checkpoint: “{line}”; refused under `flex_check_replicas: refuse`",
    )
