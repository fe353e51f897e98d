"""Resuming with PaddleFormers' own Trainer and with ours: what was lost, damaged, or is another's."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.cli.training import COLOUR
from paddleformers_fc.errors import Corrupt
from paddleformers_fc.formats.registry import open_checkpoint
from paddleformers_fc.storage.manifest import read_manifest
from tests.cli.support import run as command
from tests.corruption.guarantees import Seen, fault, raised
from tests.corruption.jobs import SIX, WORSE_AND_WORSE, first_line, last_checkpoint, started, trained
from tests.harness.on_ranks import run_on_ranks
from tests.harness.sealing import reseal
from tests.harness.tiny import DP2, SINGLE, TP2, TP2SD2V2, MatrixLayout
from tests.storage.support import flip
from tests.trainer.jobs import every_sample
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

Ours = tuple[Path, list[float]]


@pytest.fixture(scope="module")
def stock_run(bare_ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of the stock Trainer on one process."""
    output_dir = tmp_path_factory.mktemp("stock")
    assert trained(bare_ranks, SINGLE, output_dir)[0]["step"] == 6
    return output_dir


@pytest.fixture(scope="module")
def our_run(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Ours:
    """Six steps of our Trainer on one process, and their losses."""
    output_dir = tmp_path_factory.mktemp("ours")
    return output_dir, trained(ranks, SINGLE, output_dir, ours=True)[0]["losses"]


@pytest.mark.slow
@fault("T1")
def test_t1_a_single_process_resumes(
    bare_ranks: ForkServer, ranks: ForkServer, stock_run: Path, our_run: Ours, tmp_path: Path
) -> Seen:
    (found,) = trained(bare_ranks, SINGLE, tmp_path / "stock", stock_run / "checkpoint-3")
    assert "_hcg" in found["error"]
    output_dir, losses = our_run
    (resumed,) = trained(ranks, SINGLE, tmp_path / "ours", output_dir / "checkpoint-3", ours=True)
    assert resumed["losses"] == losses[3:]
    return {"stock": first_line(found)}


@pytest.mark.slow
@fault("T2")
def test_t2_the_newest_complete_checkpoint_is_resumed(
    bare_ranks: ForkServer, ranks: ForkServer, stock_run: Path, our_run: Ours, tmp_path: Path
) -> Seen:
    (found,) = trained(bare_ranks, SINGLE, stock_run, True)
    assert found["error"].startswith("TypeError")
    shutil.copytree(our_run[0] / "checkpoint-3", tmp_path / "checkpoint-3")
    (resumed,) = trained(ranks, SINGLE, tmp_path, True, ours=True)
    assert resumed["losses"] == our_run[1][3:]
    return {"stock": first_line(found)}


@pytest.mark.slow
@fault("T3")
def test_t3_an_empty_newest_directory_is_skipped(
    bare_ranks: ForkServer, ranks: ForkServer, our_run: Ours, tmp_path: Path
) -> None:
    shutil.copytree(our_run[0] / "checkpoint-3", tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-9").mkdir()
    assert run_on_ranks(bare_ranks, 1, last_checkpoint, output_dir=tmp_path) == ("checkpoint-9",)
    (resumed,) = trained(ranks, SINGLE, tmp_path, True, ours=True)
    assert resumed["losses"] == our_run[1][3:]


@pytest.mark.slow
@fault("T4")
def test_t4_weights_saved_without_the_optimizer_start_a_new_run(ranks: ForkServer, tmp_path: Path) -> Seen:
    without = {"arguments": {**SIX, "ignore_save_lr_and_optim": True}}
    frozen = {"max_steps": 1, "save_steps": 1, "learning_rate": 0.0, "ignore_load_lr_and_optim": True}
    fresh_state = {"arguments": frozen}
    trained(ranks, TP2, tmp_path / "stock", **without)
    found = trained(ranks, TP2, tmp_path / "out", tmp_path / "stock/checkpoint-3", **fresh_state)[0]
    assert found["error"].startswith("FileNotFoundError")
    trained(ranks, TP2, tmp_path / "ours", **without, ours=True)
    third = tmp_path / "ours/checkpoint-3"
    assert trained(ranks, TP2, tmp_path / "again", third, **fresh_state, ours=True)[0]["step"] == 1
    again = canonical_digests(tmp_path / "again/checkpoint-1", roles=["model_state"])
    assert list(again) == list(canonical_digests(third))
    return {"stock": first_line(found, tmp_path)}


@pytest.mark.slow
@fault("T5")
def test_t5_training_ends_with_the_best_weights(bare_ranks: ForkServer, ranks: ForkServer, tmp_path: Path) -> None:
    given = {"arguments": {**WORSE_AND_WORSE, "max_steps": 3}, "evaluate": True}
    (found,) = trained(bare_ranks, SINGLE, tmp_path / "stock", **given)
    assert found["at_end"] > found["best"] + 1
    (ended,) = trained(ranks, SINGLE, tmp_path / "ours", **given, ours=True)
    assert ended["at_end"] == pytest.approx(ended["best"], abs=1e-6)


@pytest.mark.slow
@fault("T6")
def test_t6_statements_apply_to_a_float32_run(ranks: ForkServer, our_run: Ours, tmp_path: Path) -> Seen:
    statements = {"aoa_statements": ["model.norm.weight -> model.norm.weight"]}
    given = {"arguments": {**SIX, "aoa_config": statements}}
    trained(ranks, DP2, tmp_path / "stock")
    found = trained(ranks, TP2, tmp_path / "out", tmp_path / "stock/checkpoint-3", **given)[0]
    assert found["error"].startswith("ValueError")
    resumed = trained(ranks, TP2, tmp_path / "ours", our_run[0] / "checkpoint-3", **given, ours=True)[0]
    assert resumed["losses"] == pytest.approx(our_run[1][3:], abs=1e-6)
    return {"stock": first_line(found)}


@pytest.mark.slow
@fault("T7")
def test_t7_no_sample_is_repeated_or_skipped_when_the_data_parallel_degree_changes(
    ranks: ForkServer, tmp_path: Path
) -> Seen:
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
    return {"repeated": repeated[False]}


@pytest.mark.slow
@fault("T8")
def test_t8_a_missing_trainer_state_is_rejected(ranks: ForkServer, our_run: Ours, tmp_path: Path) -> None:
    trained(ranks, DP2, tmp_path / "stock")
    (tmp_path / "stock/checkpoint-3/trainer_state.bin").unlink()
    found = trained(ranks, DP2, tmp_path / "out", tmp_path / "stock/checkpoint-3")[0]
    assert len(found["losses"]) == 6
    broken = tmp_path / "checkpoint-3"
    shutil.copytree(our_run[0] / "checkpoint-3", broken)
    (broken / "trainer/state.json").unlink()
    one, other = trained(ranks, DP2, tmp_path / "ours", broken, ours=True, digests=True)
    assert one == other
    assert one["error"].startswith("Corrupt: ")
    assert "trainer/state.json is missing" in one["error"]
    assert not one["changed"]


STEP_THREE, STEP_FIVE = b"global_step\x94K\x03", b"global_step\x94K\x05"
"""The step in the pickle of PaddleFormers."""


@pytest.mark.slow
@fault("G50")
def test_g50_an_edited_trainer_state_is_rejected(ranks: ForkServer, tmp_path: Path) -> None:
    trained(ranks, DP2, tmp_path / "stock", arguments={**SIX, "max_steps": 3})
    path = tmp_path / "stock/checkpoint-3/trainer_state.bin"
    assert STEP_THREE in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(STEP_THREE, STEP_FIVE))
    found = trained(ranks, DP2, tmp_path / "out", tmp_path / "stock/checkpoint-3")[0]
    assert (found["step"], len(found["losses"])) == (6, 1)
    trained(ranks, DP2, tmp_path / "ours", arguments={**SIX, "max_steps": 3}, ours=True)
    for level in ("off", "size", "full"):
        broken = tmp_path / level / "checkpoint-3"
        shutil.copytree(tmp_path / "ours/checkpoint-3", broken)
        text = (broken / "trainer/state.json").read_text()
        assert '"global_step": 3' in text
        (broken / "trainer/state.json").write_text(text.replace('"global_step": 3', '"global_step": 5'))
        given = {"arguments": {"flex_verify": level}, "ours": True, "digests": True}
        one, other = trained(ranks, DP2, tmp_path / "again", broken, **given)
        assert one == other
        assert one["error"].startswith("Corrupt: ")
        assert "trainer/state.json does not match its checksum" in one["error"]
        assert not one["changed"]


WEIGHTS = "model_state/rank-00000.safetensors"
EACH_STEP = {"max_steps": 3, "save_steps": 1}


@pytest.mark.slow
@fault("G70")
def test_g70_the_newest_checkpoint_that_passes_verification_is_resumed(
    bare_ranks: ForkServer, ranks: ForkServer, tmp_path: Path
) -> Seen:
    trained(bare_ranks, SINGLE, tmp_path / "stock")
    (stock,) = trained(bare_ranks, SINGLE, tmp_path / "stock", True)
    trained(ranks, DP2, tmp_path, arguments=EACH_STEP, ours=True)
    newest = tmp_path / "checkpoint-3"
    reseal(newest, 1000)  # A block without the header.
    flip(newest / WEIGHTS, (newest / WEIGHTS).stat().st_size // 2)  # A byte of a tensor.
    for found in trained(ranks, DP2, tmp_path, newest, EACH_STEP, ours=True, digests=True):
        assert (found["error"].partition(":")[0], found["changed"]) == ("Corrupt", True)
    resumed = started(ranks, DP2, tmp_path, True, EACH_STEP, ours=True)
    assert [len(value["losses"]) for value in resumed.values] == [1, 1]
    (line,) = [line for line in resumed.logs[0].read_text().splitlines() if "fails verification" in line]
    assert "checkpoint-3 fails verification and is skipped: checkpoint-3 is damaged" in line
    assert f"{WEIGHTS} does not match its checksum in 1 of" in line
    return {"stock": first_line(stock)}


EVERY_SECOND: dict[str, Any] = {"max_steps": 3, "save_steps": 2}


@pytest.fixture(scope="module")
def runs(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The second step of the stock Trainer, and of ours, on two processes."""
    places = {ours: tmp_path_factory.mktemp(f"ours-{ours}") for ours in (False, True)}
    for ours, place in places.items():
        trained(ranks, TP2, place, arguments=EVERY_SECOND, ours=ours)
    return {ours: place / "checkpoint-2" for ours, place in places.items()}


def resumed(
    ranks: ForkServer, runs: dict[bool, Path], output_dir: Path, ours: bool, **given: Any
) -> tuple[dict[str, Any], str]:
    """What both ranks found, and the log of the first."""
    result = started(ranks, TP2, output_dir, runs[ours], ours=ours, **given)
    one, other = result.values
    assert one == other
    return one, COLOUR.sub("", result.logs[0].read_text())


@pytest.mark.slow
@fault("G60")
def test_g60_a_model_that_reads_the_weights_differently_is_rejected(
    ranks: ForkServer, runs: dict[bool, Path], tmp_path: Path
) -> None:
    other: dict[str, Any] = {"model": {"rope_theta": 500000.0}, "arguments": EVERY_SECOND}
    found, _ = resumed(ranks, runs, tmp_path / "stock", False, **other)
    assert found.get("step") == 3, found
    stopped, _ = resumed(ranks, runs, tmp_path / "ours", True, **other)
    assert "rope_theta  10000.0  500000.0" in stopped["error"]
    other["arguments"] = {**EVERY_SECOND, "flex_allow_config_changes": ["rope_theta"]}
    allowed, log = resumed(ranks, runs, tmp_path / "allowed", True, **other)
    assert allowed["step"] == 3
    assert "rope_theta  10000.0  500000.0" in log


@pytest.mark.slow
@fault("G61")
def test_g61_changed_training_settings_are_listed_in_one_table(
    ranks: ForkServer, runs: dict[bool, Path], tmp_path: Path
) -> Seen:
    arguments = {**EVERY_SECOND, "adam_beta2": 0.95, "weight_decay": 0.1, "max_grad_norm": 0.5}
    found, stock_log = resumed(ranks, runs, tmp_path / "stock", False, arguments=arguments)
    assert found.get("step") == 3, found
    assert "differs" not in stock_log
    _, log = resumed(ranks, runs, tmp_path / "ours", True, arguments=arguments)
    _, _, table = log.partition("This run differs from the run that saved step 2:\n")
    rows = [" ".join(line.split()) for line in table.splitlines()[:4]]
    assert rows == ["key saved now", "adam_beta2 0.999 0.95", "weight_decay 0.0 0.1", "max_grad_norm 1.0 0.5"]
    return {"rows": "`, `".join(rows)}


APART = MatrixLayout("tp2ep2", nproc=2, tp=2, ep=2)


@pytest.mark.slow
@fault("T17")
def test_t17_another_checkpoint_under_the_same_name_is_rejected(ranks: ForkServer, tmp_path: Path) -> None:
    found = {}
    for ours in (False, True):
        places = [tmp_path / f"{ours}-{rank}" for rank in range(2)]
        for place, rate in zip(places, (1e-3, 1e-2), strict=True):
            trained(ranks, DP2, place, arguments={"max_steps": 3, "save_steps": 3, "learning_rate": rate}, ours=ours)
        given = {"directories": list(map(str, places)), "ours": ours, "digests": True}
        found[ours] = trained(ranks, DP2, tmp_path / "out", "checkpoint-3", {"max_steps": 4}, **given)
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


@pytest.mark.slow
@fault("T18")
def test_t18_replicas_that_differ_are_reported(ranks: ForkServer, tmp_path: Path) -> Seen:
    arguments = {"max_steps": 1, "save_steps": 1, "max_grad_norm": 0.01}
    given = {"model_type": "ernie4_5_moe", "digests": True}
    one, other = trained(ranks, APART, tmp_path / "stock", arguments=arguments, **given)
    name = "model.norm.weight"
    assert one["weights"][name] != other["weights"][name]
    assert (tmp_path / "stock/checkpoint-1").is_dir()

    given["ours"] = True
    logs = started(ranks, APART, tmp_path / "ours", arguments={**arguments, "max_steps": 2}, **given).logs
    assert [log.read_text().count("Replicas differ: ranks hold different values") for log in logs] == [1, 0]
    for step in (2, 1):
        lines = read_manifest(tmp_path / f"ours/checkpoint-{step}").differences or ()
        (line,) = [line for line in lines if line.startswith(f"model_state {name} ")]
    refusing = {**arguments, "flex_check_replicas": "refuse"}
    refused = trained(ranks, APART, tmp_path / "refused", arguments=refusing, **given)
    assert all(outcome["error"].startswith("MismatchError: ") for outcome in refused)
    assert line in refused[0]["error"]
    assert not list((tmp_path / "refused").glob("*checkpoint*"))
    return {"line": line}


LAYOUT = replace(TP2SD2V2, bf16=True)
STATES = "optimizer_state/0_0.distcp"
FOUR = {"max_steps": 4}


@pytest.mark.slow
@fault("G116")
def test_g116_an_optimizer_state_file_of_another_step_is_rejected(ranks: ForkServer, tmp_path: Path) -> Seen:
    trained(ranks, LAYOUT, tmp_path / "run")
    for name in ("right", "mixed"):
        shutil.copytree(tmp_path / "run/checkpoint-3", tmp_path / name / "checkpoint-3")
    mixed = tmp_path / "mixed/checkpoint-3"
    shutil.copy(tmp_path / "run/checkpoint-6" / STATES, mixed / STATES)
    numbers = open_checkpoint(tmp_path / "right/checkpoint-3").catalog.roles["optimizer_state"]
    assert not any(one.offsets[0][0] == STATES for name, one in numbers.items() if name.endswith("beta1_pow_acc_0"))

    def resume(name: str, ours: bool) -> list[dict[str, Any]]:
        return trained(ranks, LAYOUT, tmp_path / "out", tmp_path / name / "checkpoint-3", FOUR, ours=ours, digests=True)

    right, wrong = (resume(name, ours=False)[0]["weights"] for name in ("right", "mixed"))
    differing = sum(right[name] != wrong[name] for name in right)
    assert 0 < differing < len(right)

    with pytest.raises(Corrupt) as caught:
        open_checkpoint(mixed)
    line = raised(caught.value, f"{STATES}: beta2_pow_acc_0 is ")
    for outcome in resume("mixed", ours=True):
        assert outcome["error"].startswith("Corrupt: ")
        assert not outcome["changed"]
        assert str(caught.value).splitlines()[2] in outcome["error"]
    for arguments in (("verify", mixed), ("convert", mixed, tmp_path / "flex/checkpoint-3")):
        outcome = command(*arguments)
        assert outcome.code == 1
        assert "contains files of different steps" in outcome.err
    return {"raised": line}
