"""Resuming with PaddleFormers' own Trainer, and with ours."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.corruption.guarantees import Observed, fault
from tests.corruption.jobs import WORSE_AND_WORSE
from tests.harness.tiny import DP2, SINGLE, TP2, MatrixLayout
from tests.trainer.data_jobs import every_sample
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

JOB = "tests.corruption.jobs:train"
SIX: dict[str, Any] = {"max_steps": 6, "save_steps": 3}


def trained(
    ranks: ForkServer, layout: MatrixLayout, output_dir: Path, resume: Path | bool | None = None, **given: Any
) -> list[dict[str, Any]]:
    """What every rank of a training found."""
    kwargs = {"layout": layout.to_json(), "output_dir": str(output_dir), "arguments": SIX, **given}
    if resume is not None:
        kwargs["resume"] = resume if isinstance(resume, bool) else str(resume)
    return list(ranks.run(JOB, layout.nproc, kwargs).values)


@pytest.fixture(scope="module")
def stock_run(bare_ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of the stock Trainer on one process."""
    output_dir = tmp_path_factory.mktemp("stock")
    assert trained(bare_ranks, SINGLE, output_dir)[0]["step"] == 6
    return output_dir


@pytest.fixture(scope="module")
def our_run(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Six steps of our Trainer on one process, and their losses."""
    output_dir = tmp_path_factory.mktemp("ours")
    return output_dir, trained(ranks, SINGLE, output_dir, ours=True)[0]["losses"]


Ours = tuple[Path, list[float]]


def first_line(found: dict[str, Any], *hidden: Path) -> str:
    """An error of stock in one line, without the directories of this run."""
    text = str(found["error"]).splitlines()[0]
    for path in hidden:
        text = text.replace(str(path), "...")
    return f"`{text}`"


@pytest.mark.slow
@fault("T1", "a single process resumes")
def test_t1_a_single_process_resumes(
    bare_ranks: ForkServer, ranks: ForkServer, stock_run: Path, our_run: Ours, tmp_path: Path
) -> Observed:
    (found,) = trained(bare_ranks, SINGLE, tmp_path / "stock", stock_run / "checkpoint-3")
    assert "_hcg" in found["error"]
    output_dir, losses = our_run
    (resumed,) = trained(ranks, SINGLE, tmp_path / "ours", output_dir / "checkpoint-3", ours=True)
    assert resumed["losses"] == losses[3:]
    return Observed(first_line(found), "resumes; the losses are those of the run that was not interrupted")


@pytest.mark.slow
@fault("T2", "`resume_from_checkpoint: true`")
def test_t2_the_newest_checkpoint_is_resumed(
    bare_ranks: ForkServer, ranks: ForkServer, stock_run: Path, our_run: Ours, tmp_path: Path
) -> Observed:
    (found,) = trained(bare_ranks, SINGLE, stock_run, True)
    assert found["error"].startswith("TypeError")
    shutil.copytree(our_run[0] / "checkpoint-3", tmp_path / "checkpoint-3")
    (resumed,) = trained(ranks, SINGLE, tmp_path, True, ours=True)
    assert resumed["losses"] == our_run[1][3:]
    return Observed(first_line(found), "resumes from the newest finished one")


@pytest.mark.slow
@fault("T3", "the newest directory is empty")
def test_t3_an_empty_newest_directory_is_passed_over(
    bare_ranks: ForkServer, ranks: ForkServer, our_run: Ours, tmp_path: Path
) -> Observed:
    shutil.copytree(our_run[0] / "checkpoint-3", tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-9").mkdir()
    kwargs = {"output_dir": str(tmp_path)}
    (chosen,) = bare_ranks.run("tests.corruption.jobs:last_checkpoint", 1, kwargs).values
    assert chosen == "checkpoint-9"
    (resumed,) = trained(ranks, SINGLE, tmp_path, True, ours=True)
    assert resumed["losses"] == our_run[1][3:]
    return Observed("`get_last_checkpoint` chooses it", "passed over with a warning; the finished one is resumed")


@pytest.mark.slow
@fault("T4", "saved without the optimizer, loaded without it")
def test_t4_weights_saved_without_the_optimizer_can_be_used(ranks: ForkServer, tmp_path: Path) -> Observed:
    without = {"arguments": {**SIX, "ignore_save_lr_and_optim": True}}
    fresh_state = {
        "arguments": {"max_steps": 1, "save_steps": 1, "learning_rate": 0.0, "ignore_load_lr_and_optim": True}
    }
    trained(ranks, TP2, tmp_path / "stock", **without)
    found = trained(ranks, TP2, tmp_path / "out", tmp_path / "stock/checkpoint-3", **fresh_state)[0]
    assert found["error"].startswith("FileNotFoundError")
    trained(ranks, TP2, tmp_path / "ours", **without, ours=True)
    third = tmp_path / "ours/checkpoint-3"
    assert trained(ranks, TP2, tmp_path / "again", third, **fresh_state, ours=True)[0]["step"] == 1
    again = canonical_digests(tmp_path / "again/checkpoint-1", roles=["model_state"])
    assert list(again) == list(canonical_digests(third))
    return Observed(first_line(found, tmp_path), "a new run begins with these weights, bit for bit")


@pytest.mark.slow
@fault("T5", "`load_best_model_at_end: true`")
def test_t5_training_ends_with_the_best_weights(bare_ranks: ForkServer, ranks: ForkServer, tmp_path: Path) -> Observed:
    given = {"arguments": {**WORSE_AND_WORSE, "max_steps": 3}, "evaluate": True}
    (found,) = trained(bare_ranks, SINGLE, tmp_path / "stock", **given)
    assert found["at_end"] > found["best"] + 1
    (ended,) = trained(ranks, SINGLE, tmp_path / "ours", **given, ours=True)
    assert ended["at_end"] == pytest.approx(ended["best"], abs=1e-6)
    return Observed(
        "the weights of the last step stay, though an earlier one was better; no error",
        "ends with the weights of the best checkpoint",
    )


@pytest.mark.slow
@fault("T6", "`aoa_config` on a float32 run")
def test_t6_statements_apply_to_a_float32_run(ranks: ForkServer, our_run: Ours, tmp_path: Path) -> Observed:
    statements = {"aoa_statements": ["model.norm.weight -> model.norm.weight"]}
    given = {"arguments": {**SIX, "aoa_config": statements}}
    trained(ranks, DP2, tmp_path / "stock")
    found = trained(ranks, TP2, tmp_path / "out", tmp_path / "stock/checkpoint-3", **given)[0]
    assert found["error"].startswith("ValueError")
    resumed = trained(ranks, TP2, tmp_path / "ours", our_run[0] / "checkpoint-3", **given, ours=True)[0]
    assert resumed["losses"] == pytest.approx(our_run[1][3:], abs=1e-6)
    return Observed(
        first_line(found),
        "resumes; moments and master weights follow their parameter",
    )


@pytest.mark.slow
@fault("T7", "the data-parallel degree has changed on resume")
def test_t7_no_sample_is_repeated_or_lost_under_another_data_parallel_degree(
    ranks: ForkServer, tmp_path: Path
) -> Observed:
    # Half the ranks with the same steps per rank: the global batch is halved too.
    half = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    repeated: dict[bool, int] = {}
    for ours in (False, True):
        first = trained(ranks, DP2, tmp_path / f"a{ours}", arguments={"max_steps": 3, "save_steps": 3}, ours=ours)
        given = {"arguments": {"max_steps": 13, "save_steps": 100, **half}, "ours": ours}
        # Two ranks of tensor parallel are one of data parallel, which stock can resume.
        rest = trained(ranks, TP2, tmp_path / f"b{ours}", tmp_path / f"a{ours}/checkpoint-3", **given)[0]
        assert "error" not in rest, rest
        done = [*first[0]["samples"], *first[1]["samples"]]
        seen = sorted([*done, *rest["samples"]])
        expected = every_sample()
        repeated[ours] = sum(max(0, seen.count(one) - expected.count(one)) for one in set(seen))
        if ours:
            assert seen == expected
    assert repeated[False] > 0
    assert repeated[True] == 0
    return Observed(
        f"{repeated[False]} of 64 samples of an epoch are trained twice, as many never; no error",
        "every sample of the epoch is trained once",
    )


@pytest.mark.slow
@fault("T8", "the file of the Trainer's state is missing")
def test_t8_a_missing_state_of_the_trainer_is_refused(ranks: ForkServer, our_run: Ours, tmp_path: Path) -> Observed:
    trained(ranks, DP2, tmp_path / "stock")
    (tmp_path / "stock/checkpoint-3/trainer_state.bin").unlink()
    found = trained(ranks, DP2, tmp_path / "out", tmp_path / "stock/checkpoint-3")[0]
    assert len(found["losses"]) == 6
    broken = tmp_path / "checkpoint-3"
    shutil.copytree(our_run[0] / "checkpoint-3", broken)
    (broken / "trainer/state.json").unlink()
    kwargs = {"layout": DP2.to_json(), "output_dir": str(tmp_path / "ours"), "resume": str(broken)}
    refusals = ranks.run("tests.trainer.jobs:refused", 2, kwargs).values
    assert refusals[0] == refusals[1]
    assert refusals[0]["error"] == "Corrupt"
    assert "trainer/state.json is missing" in refusals[0]["text"]
    assert not refusals[0]["changed"]
    return Observed(
        "training begins again at step 1 with the loaded weights; no error",
        "refused on every rank: `Corrupt`, “trainer/state.json is missing”; nothing changed",
    )
