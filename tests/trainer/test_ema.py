"""The moving average of a run's weights: kept on every layout, saved, resumed and reported."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import paddleformers_fc
from paddleformers_fc.errors import FlexError, OptionError
from paddleformers_fc.storage.block_checksums import digest_of
from tests.harness.on_ranks import on_ranks, run_on_ranks
from tests.harness.tiny import DP2, EP2, PP2, SD2S2, SD2S3, SD2V1, SD2V2, SINGLE, TP2, MatrixLayout
from tests.trainer import ema_jobs
from tests.trainer.jobs import flex_trainer, logged
from tests.trainer.test_trainer import bf16 as half
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

JOBS = "tests.trainer.jobs"
EMA_JOBS = "tests.trainer.ema_jobs"
DECAY = 0.9
EVERY_STEP = {"max_steps": 6, "save_steps": 1, "logging_steps": 1}
AVERAGE = {"flex_ema_decay": DECAY}
UNSAVED = {"save_steps": 100}


def run(ranks: ForkServer, layout: MatrixLayout, output_dir: Path, job: str = "run", **given: Any) -> Any:
    """Run a job on the ranks of a layout; what its ranks return, and the log of the first."""
    arguments = {**EVERY_STEP, **AVERAGE, **given.pop("arguments", {})}
    settings = {"layout": layout.to_json(), "output_dir": str(output_dir), "arguments": arguments, **given}
    result = ranks.run(f"{JOBS}:{job}", layout.nproc, settings)
    return result.values, result.logs[0].read_text(errors="replace")


def digests(checkpoint: Path, role: str = "ema_state") -> list[Any]:
    """The digests of the canonical tensors of one role."""
    return [one for one in canonical_digests(checkpoint) if one.role == role]


def weights(checkpoint: Path) -> dict[str, Any]:
    """The weights in full precision by canonical name: master weights, or float32 weights without one."""
    opened = paddleformers_fc.open(checkpoint)
    names = {one.name: one.role for one in opened.tensors() if one.role in ("model_state", "master_weight")}
    masters = {name.removesuffix(".w_0"): name for name, role in names.items() if role == "master_weight"}
    return {
        name: opened.read(masters.get(name, name), role="master_weight" if name in masters else "model_state")
        for name, role in names.items()
        if role == "model_state"
    }


def averages(checkpoint: Path) -> dict[str, Any]:
    """The averages by canonical name."""
    opened = paddleformers_fc.open(checkpoint)
    return {one.name: opened.read(one.name, role="ema_state") for one in opened.tensors() if one.role == "ema_state"}


def reference(output_dir: Path, steps: list[int]) -> dict[str, Any]:
    """The average in float64 of the weights that were saved after some steps."""
    first, *others = (
        {n: v.astype(np.float64) for n, v in weights(output_dir / f"checkpoint-{step}").items()} for step in steps
    )
    for later in others:
        first = {name: before + (1 - DECAY) * (later[name] - before) for name, before in first.items()}
    return first


def assert_averages(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in found.items():
        assert values.dtype == np.float32
        error = np.linalg.norm(values - wanted[name]) / np.linalg.norm(wanted[name])
        assert error <= 1e-6, name


OTHERS = [
    *(SINGLE, SD2S3, DP2, half(DP2), TP2, half(TP2), PP2, half(PP2), SD2V1, half(SD2V1), SD2V2),
    *(SD2S2, half(SD2S2), half(SD2S3)),
]


@pytest.mark.parametrize(
    "layout",
    [half(SD2V2), *(pytest.param(layout, marks=pytest.mark.slow) for layout in OTHERS)],
    ids=lambda layout: layout.name,
)
def test_an_average_is_that_of_the_weights_and_continues_bitwise(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    values, _ = run(ranks, layout, whole)
    assert_averages(averages(whole / "checkpoint-6"), reference(whole, [1, 2, 3, 4, 5, 6]))
    again, log = run(ranks, layout, resumed, resume=str(whole / "checkpoint-3"))
    assert "moving average" not in log
    assert [rank["losses"] for rank in again] == [rank["losses"][3:] for rank in values]
    assert list(canonical_digests(resumed / "checkpoint-6")) == list(canonical_digests(whole / "checkpoint-6"))
    first, second = (paddleformers_fc.open(one / "checkpoint-6") for one in (whole, resumed))
    assert first.verify().passed
    assert first.diff(second, role="ema_state").equal
    assert_planned(second)


def assert_planned(checkpoint: paddleformers_fc.Checkpoint) -> None:
    """A plan of one rank reads every stored tensor whole, and so do the ranks of another layout together."""
    sizes = {"float32": 4, "bfloat16": 2}
    held = sum(int(np.prod(one.shape)) * sizes[one.dtype] for one in checkpoint.tensors() if one.shape)
    plan = checkpoint.plan("dp=1")
    assert plan.dropped == []
    assert plan.bytes == plan.read == held
    assert checkpoint.plan("tp=2,pp=2,sharding=2,split=true").dropped == []


@pytest.mark.parametrize("bf16", [True, False], ids=["bfloat16", "float32"])
def test_an_average_is_loaded_under_every_layout(ranks: ForkServer, tmp_path: Path, bf16: bool) -> None:
    def chosen(layout: MatrixLayout) -> MatrixLayout:
        return half(layout) if bf16 else layout

    source = chosen(DP2)
    run(ranks, source, tmp_path / "dp2", arguments={"max_steps": 3, "save_steps": 3})
    expected = list(canonical_digests(tmp_path / "dp2" / "checkpoint-3"))
    assert {"ema_state", "model_state", "optimizer_state"} <= {one.role for one in expected}
    before = tmp_path / "dp2"
    for layout in (SD2S3, PP2, SD2V2, TP2, SD2S2, SD2V1, SINGLE):
        there = tmp_path / layout.name
        given = {"resume": str(before / "checkpoint-3"), "arguments": {"max_steps": 3}}
        _, log = run(ranks, chosen(layout), there, "resume_and_save_again", **given)
        assert list(canonical_digests(there / "checkpoint-3")) == expected, layout.name
        assert "This run differs from the one that saved step" not in log
        before = there


# ---- The averaged weights in use.


def swap(ranks: ForkServer, layout: MatrixLayout, directory: Path, **given: Any) -> list[dict[str, Any]]:
    settings = {"layout": layout.to_json(), "output_dir": str(directory), "export": str(directory / "live"), **given}
    arguments = {"max_steps": 3, "save_steps": 3, **AVERAGE}
    values: list[dict[str, Any]] = ranks.run(
        f"{EMA_JOBS}:swap", layout.nproc, {**settings, "arguments": arguments}
    ).values
    return values


@pytest.mark.parametrize(
    "layout",
    [half(SD2V2), *(pytest.param(layout, marks=pytest.mark.slow) for layout in OTHERS)],
    ids=lambda layout: layout.name,
)
def test_averaged_weights_are_in_the_model_and_the_former_ones_come_back(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    found = swap(ranks, layout, tmp_path)
    third = tmp_path / "checkpoint-3"
    for rank in found:
        assert rank["before"] == rank["after"] != rank["inside"]
        assert "neither trained nor saved" in rank["refused"]
    resumed = {
        "layout": replace(SINGLE, bf16=layout.bf16).to_json(),
        "output_dir": str(tmp_path / "resumed"),
        "arguments": {"max_steps": 3, "sharded_model_from_ema": True, **AVERAGE},
        "resume": str(third),
    }
    (digest,) = ranks.run(f"{EMA_JOBS}:resumed_from_average", 1, resumed).values
    assert {rank["averaged"] for rank in found} == {digest}
    opened = paddleformers_fc.open(third)
    report = opened.export(tmp_path / "stored", role="ema_state")
    live = paddleformers_fc.open(tmp_path / "live")
    assert live.diff(paddleformers_fc.open(tmp_path / "stored"), role="model_state").equal
    assert report.digests() == {name: digest_of(tmp_path / "live" / name) for name in report.files}
    dtype = opened.tensors()[0].dtype
    for name, values in averages(third).items():
        exported = live.read(name)
        assert str(exported.dtype) == dtype
        np.testing.assert_array_equal(exported, values.astype(exported.dtype))


@on_ranks(layout=SD2S3)  # Each pass moves its slices of weights.
def test_an_evaluation_has_the_averaged_weights_and_training_continues_as_before(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    def evaluate(name: str, **arguments: Any) -> tuple[dict[str, Any], int]:
        given = {"max_steps": 3, "flex_ema_evaluate": True, **arguments}
        with logged() as lines:
            found = ema_jobs.evaluated(layout.to_json(), str(tmp_path / name), given)
        reported = "flex_ema_evaluate: flex_ema_decay is 0, so the weights themselves are evaluated."
        return found, sum(reported in line for line in lines)

    plain, reports = evaluate("plain")
    assert reports == (os.environ["PADDLE_TRAINER_ID"] == "0")
    averaged, reports = evaluate("averaged", **AVERAGE)
    assert (reports, averaged["losses"]) == (0, plain["losses"])
    # The first update is a copy.
    assert averaged["evaluated"][0] == plain["evaluated"][0]
    assert averaged["evaluated"][1] > plain["evaluated"][1]


@pytest.mark.parametrize(
    ("layout", "option", "arguments"),
    [
        (half(SD2V2), "stage1_allgather_overlap", {"flex_ema_evaluate": True, **AVERAGE}),
        (SD2V1, "stage1_broadcast_overlap", {"flex_ema_evaluate": True, **AVERAGE}),
        (SD2V1, "stage1_broadcast_overlap", {"flex_async_save": True}),
    ],
    ids=["gather-average", "broadcast-average", "broadcast-async"],
)
@on_ranks(2)
def test_weights_that_are_received_in_the_next_pass_are_waited_for(
    layout: MatrixLayout, tmp_path: Path, option: str, arguments: dict[str, Any]
) -> None:
    found = []
    steps = {"eval_steps": 2, "save_steps": 3, "max_steps": 5}  # Evaluation, save and export at a step of their own.
    for train, overlap in ((ema_jobs.evaluated, False), (ema_jobs.evaluated_before_weights_arrive, True)):
        place = tmp_path / str(overlap)
        given = {**steps, **arguments, option: overlap}
        losses = train(layout=layout.to_json(), output_dir=str(place), arguments=given)
        found.append((losses, [list(canonical_digests(place / one)) for one in ("checkpoint-3", "exported")]))
    assert found[0] == found[1]


def test_adapters_are_averaged_and_exported(ranks: ForkServer, tmp_path: Path) -> None:
    found = swap(ranks, TP2, tmp_path, adapters=True)
    assert all(rank["before"] == rank["after"] != rank["inside"] for rank in found)
    third = tmp_path / "checkpoint-3"
    names = {one.name for one in paddleformers_fc.open(third).tensors() if one.role == "model_state"}
    assert averages(third).keys() == names
    assert all("lora_" in name for name in names)
    report = paddleformers_fc.open(third).export(tmp_path / "stored", role="ema_state")
    assert report.digests() == {name: digest_of(tmp_path / "live" / name) for name in report.files}
    plain = paddleformers_fc.open(third).export(tmp_path / "plain")
    assert plain.digests() != report.digests()
    with pytest.raises(OptionError, match="'optimizer_state' contains no weights"):
        paddleformers_fc.open(third).export(tmp_path / "states", role="optimizer_state")


def test_frozen_parameters_have_no_average_until_they_are_trained(ranks: ForkServer, tmp_path: Path) -> None:
    frozen = "model.embed_tokens.weight"
    run(ranks, DP2, tmp_path, "run_with_frozen", frozen=[frozen], arguments={"max_steps": 2})
    second = tmp_path / "checkpoint-2"
    assert averages(second).keys() == weights(second).keys() - {frozen}
    paddleformers_fc.open(second).export(tmp_path / "export", role="ema_state")
    exported = paddleformers_fc.open(tmp_path / "export")
    np.testing.assert_array_equal(exported.read(frozen), weights(second)[frozen])
    again = tmp_path / "again"
    given = {"resume": str(second), "arguments": {"max_steps": 3}}
    _, log = run(ranks, TP2, again, "run_with_frozen", frozen=[], **given)
    assert "Their states start at zero, and their moving averages as copies of the weights." in log
    found, before, now = averages(again / "checkpoint-3"), averages(second), weights(again / "checkpoint-3")
    np.testing.assert_array_equal(found[frozen], now[frozen])
    other = "model.norm.weight"
    np.testing.assert_allclose(found[other], before[other] + (1 - DECAY) * (now[other] - before[other]), rtol=1e-6)


# ---- When it is updated, and what is reported.


def test_an_average_is_updated_when_it_is_due(ranks: ForkServer, tmp_path: Path) -> None:
    """After the first step, and after every multiple of the interval, by the keys of PaddleFormers."""
    keys = {"flex_ema_decay": 0.0, "zcc_save_ema_coef": DECAY, "zcc_ema_interval": 3}
    values, _ = run(ranks, SINGLE, tmp_path, arguments=keys)
    assert len(values[0]["losses"]) == 6
    assert_averages(averages(tmp_path / "checkpoint-2"), weights(tmp_path / "checkpoint-1"))
    assert_averages(averages(tmp_path / "checkpoint-6"), reference(tmp_path, [1, 3, 6]))
    again = tmp_path / "from-2"
    _, log = run(ranks, SINGLE, again, resume=str(tmp_path / "checkpoint-2"), arguments=keys)
    assert "moving average" not in log
    assert digests(again / "checkpoint-6") == digests(tmp_path / "checkpoint-6")


def resume_with_and_without(output_dir: Path) -> None:
    """Resume a run that has no average with one, and one that has an average without it or with another one."""

    def train(name: str, resume: str | None = None, **arguments: Any) -> str:
        given = {**EVERY_STEP, **AVERAGE, **arguments}
        trainer = flex_trainer(SINGLE.to_json(), str(output_dir / name), given)
        with logged() as lines:
            trainer.train(resume_from_checkpoint=resume and str(output_dir / resume))
        return "\n".join(lines)

    three = {"max_steps": 3, "save_steps": 3}
    train("without", **three, flex_ema_decay=0.0)
    with pytest.raises(OptionError, match="no moving average"):
        paddleformers_fc.open(output_dir / "without" / "checkpoint-3").export(output_dir / "export", role="ema_state")
    late = train("late", "without/checkpoint-3")
    assert "checkpoint-3 has no moving average. It starts as a copy" in late
    train("with", **three)
    third, one = "with/checkpoint-3", {"max_steps": 4, "save_steps": 4}
    off = train("off", third, **one, flex_ema_decay=0.0)
    assert "checkpoint-3 has a moving average of 39 tensors, and this run has none" in off
    assert (output_dir / "off" / "checkpoint-4").exists()
    assert not (output_dir / "off" / "checkpoint-4" / "ema_state").exists()
    begun = train("new", third, **UNSAVED, max_steps=1, ignore_load_lr_and_optim=True)
    assert "checkpoint-3 is not continued, because ignore_load_lr_and_optim starts a new run" in begun
    changed = train("changed", third, **UNSAVED, max_steps=4, flex_ema_decay=0.5)
    assert re.search(r"flex_ema_decay +.*0\.9 .*0\.5", changed)


def test_a_run_that_starts_or_ends_an_average_or_changes_it_reports_it(ranks: ForkServer, tmp_path: Path) -> None:
    run_on_ranks(ranks, 1, resume_with_and_without, output_dir=tmp_path)
    late = tmp_path / "late"
    assert_averages(averages(late / "checkpoint-6"), reference(late, [4, 5, 6]))


@on_ranks(layout=DP2)
def test_an_average_that_fails_on_one_rank_stops_all_ranks_at_the_next_save(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    import paddle.distributed as dist

    from paddleformers_fc.trainer import ema

    trainer = flex_trainer(layout.to_json(), str(tmp_path), {"max_steps": 6, "save_steps": 3, **AVERAGE})
    original = ema.update_averages

    def update(*given: Any) -> None:
        if dist.get_rank() == 1 and trainer.state.global_step >= 2:
            raise MemoryError("no memory for the average")
        original(*given)

    ema.update_averages = update
    with pytest.raises(FlexError, match="no memory for the average") as caught:
        trainer.train()
    assert all(text in caught.value.render() for text in ("MemoryError", "on rank 1"))
    assert trainer.state.global_step == 3
    assert not (tmp_path / "checkpoint-3").exists()


@pytest.mark.parametrize("layout", [EP2, pytest.param(TP2, marks=pytest.mark.slow)], ids=lambda layout: layout.name)
def test_experts_are_averaged_loaded_under_another_layout_and_back_and_trained_on(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    # Under expert parallelism Paddle clips by a norm that depends on the layout.
    given = {"model_type": "ernie4_5_moe", "arguments": {"max_grad_norm": 0.0}}
    values, _ = run(ranks, layout, tmp_path / "there", **given)
    sixth = tmp_path / "there" / "checkpoint-6"
    found, wanted = averages(sixth), reference(tmp_path / "there", [1, 2, 3, 4, 5, 6])
    assert_averages(found, {name: values for name, values in wanted.items() if name in found})
    loaded, expected = sixth, list(canonical_digests(sixth))
    for name, one in (("elsewhere", SINGLE), ("back", layout)):
        _, log = run(ranks, one, tmp_path / name, "resume_and_save_again", resume=str(loaded), **given)
        assert "This run differs from the one that saved step" not in log
        loaded = tmp_path / name / "checkpoint-6"
        assert list(canonical_digests(loaded)) == expected
    again, _ = run(ranks, SINGLE, tmp_path / "again", resume=str(tmp_path / "there/checkpoint-4"), **given)
    assert again[0]["losses"] == pytest.approx(values[0]["losses"][4:], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [half(PP2), PP2, TP2], ids=lambda layout: layout.name)
def test_tied_parameters_are_averaged_on_every_stage_that_holds_them(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    given = {"model": {"tie_word_embeddings": True}}
    run(ranks, layout, tmp_path / "there", **given)
    sixth = tmp_path / "there" / "checkpoint-6"
    assert_averages(averages(sixth), reference(tmp_path / "there", [1, 2, 3, 4, 5, 6]))
    other, loaded = replace(SD2S3, bf16=layout.bf16), sixth
    for name, one in (("elsewhere", other), ("back", layout)):
        again = {**given, "resume": str(loaded), "arguments": {"max_steps": 6}}
        run(ranks, one, tmp_path / name, "resume_and_save_again", **again)
        loaded = tmp_path / name / "checkpoint-6"
        assert list(canonical_digests(loaded)) == list(canonical_digests(sixth))
    found = swap(ranks, layout, tmp_path / "swapped", **given)
    assert all(rank["before"] == rank["after"] != rank["inside"] for rank in found)


def test_options_that_receive_weights_in_passes_are_found_in_paddlenlps_text() -> None:
    from paddleformers_fc.trainer import live_roles

    texts = ["enable_stage1_broadcast_overlap", "split_param,enable_stage1_allgather_overlap", "enable_stage2_overlap"]
    assert all(live_roles.receives_in_passes(SimpleNamespace(sharding_parallel_config=text)) for text in texts)
    assert not live_roles.receives_in_passes(SimpleNamespace(sharding_parallel_config="split_param enable_overlap"))
