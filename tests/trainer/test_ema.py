"""The moving average of a run's weights: kept on every layout, saved, resumed and reported."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import paddleformers_fc
from paddleformers_fc.errors import FlexError, OptionError
from paddleformers_fc.storage.block_checksums import digest_of
from paddleformers_fc.trainer.live_roles import UpdateBarrier
from tests.cli.support import md5_of
from tests.harness import tiny
from tests.harness.on_ranks import job_on_ranks, on_ranks, run_on_ranks
from tests.harness.patching import precede
from tests.harness.tiny import DP2, EP2, PP2, SD2S2, SD2S3, SD2V1, SD2V2, SINGLE, TP2, MatrixLayout
from tests.harness.waiting import pause
from tests.trainer import jobs
from tests.trainer.jobs import callback, failing, few_samples, flex_trainer, logged, trained
from tests.trainer.test_lora import trainer_of
from tests.trainer.test_trainer import bf16 as half
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

DECAY = 0.9
EVERY_STEP = {"max_steps": 6, "save_steps": 1, "logging_steps": 1}
AVERAGE = {"flex_ema_decay": DECAY}


def run(
    ranks: ForkServer, layout: MatrixLayout, output_dir: Path, job: Callable[..., Any] = jobs.run, **given: Any
) -> Any:
    """Run a job on the ranks of a layout; what its ranks return, and the log of the first."""
    arguments = {**EVERY_STEP, **AVERAGE, **given.pop("arguments", {})}
    settings = {"layout": layout, "output_dir": output_dir, "arguments": arguments, **given}
    result = job_on_ranks(ranks.run, layout.nproc, job, **settings)
    return result.values, result.logs[0].read_text(errors="replace")


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


EXPERTS = {"model_type": "ernie4_5_moe"}
TIED = {"model": {"tie_word_embeddings": True}}
LLAMAS = [(layout, {}) for layout in (*map(half, (SD2V2, DP2, TP2, PP2, SD2V1, SD2S2, SD2S3)), SINGLE, SD2S3)]
TIES = [(layout, TIED) for layout in (half(PP2), PP2, TP2)]


def cases(chosen: list[Any], slow: list[Any]) -> pytest.MarkDecorator:
    """Parameters ``layout`` and ``given``."""
    marked = [(one, pytest.mark.chosen) for one in chosen] + [(one, pytest.mark.slow) for one in slow]
    parameters = [pytest.param(*one, marks=mark) for one, mark in marked]
    return pytest.mark.parametrize(
        ("layout", "given"), parameters, ids=lambda one: one.name if isinstance(one, MatrixLayout) else "".join(one)
    )


@cases([LLAMAS[0], (EP2, EXPERTS)], [*LLAMAS[1:], *TIES, (TP2, EXPERTS)])
def test_an_average_is_that_of_the_weights_and_continues_bitwise(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, given: dict[str, Any]
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    values, _ = run(ranks, layout, whole, **given)
    found, wanted = averages(whole / "checkpoint-6"), reference(whole, [1, 2, 3, 4, 5, 6])
    assert given == EXPERTS or found.keys() == wanted.keys()
    assert_averages(found, {name: wanted[name] for name in found})
    again, log = run(ranks, layout, resumed, resume=str(whole / "checkpoint-3"), **given)
    assert "moving average" not in log
    assert [rank["losses"] for rank in again] == [rank["losses"][3:] for rank in values]
    assert list(canonical_digests(resumed / "checkpoint-6")) == list(canonical_digests(whole / "checkpoint-6"))
    last = paddleformers_fc.open(resumed / "checkpoint-6")
    assert last.verify().passed
    if not given:
        assert_planned(last)


def assert_planned(checkpoint: paddleformers_fc.Checkpoint) -> None:
    """A plan of one rank reads every stored tensor whole, and so do the ranks of another layout together."""
    sizes = {"float32": 4, "bfloat16": 2}
    held = sum(int(np.prod(one.shape)) * sizes[one.dtype] for one in checkpoint.tensors() if one.shape)
    plan = checkpoint.plan("dp=1")
    assert plan.dropped == []
    assert plan.bytes == plan.read == held
    assert checkpoint.plan("tp=2,pp=2,sharding=2,split=true").dropped == []


TOURS = {
    "bfloat16": ([*map(half, (DP2, SD2S3, PP2, SD2V2, TP2, SD2S2, SD2V1, SINGLE))], {}),
    "experts": ((EP2, SINGLE, TP2, EP2), EXPERTS),
    "tied": ((PP2, SD2S3, TP2, SD2S3, PP2), TIED),
    "tied bfloat16": ((half(PP2), half(SD2S3), half(PP2)), TIED),
}


CHOSEN = ("bfloat16", "experts")


@pytest.mark.parametrize(
    "tour", [pytest.param(one, marks=pytest.mark.chosen if one in CHOSEN else pytest.mark.slow) for one in TOURS]
)
def test_an_average_is_loaded_under_every_layout(ranks: ForkServer, tmp_path: Path, tour: str) -> None:
    (source, *others), given = TOURS[tour]
    steps = {"max_steps": 3, "save_steps": 3}
    run(ranks, source, tmp_path / "0", arguments=steps, **given)
    expected = list(canonical_digests(tmp_path / "0" / "checkpoint-3"))
    assert {"ema_state", "model_state", "optimizer_state"} <= {one.role for one in expected}
    for number, layout in enumerate(others, 1):
        there = {"resume": str(tmp_path / f"{number - 1}/checkpoint-3"), "arguments": {"max_steps": 3}, **given}
        _, log = run(ranks, layout, tmp_path / str(number), jobs.resume_and_save_again, **there)
        assert list(canonical_digests(tmp_path / f"{number}/checkpoint-3")) == expected, layout.name
        assert "This run differs from the run that saved step" not in log


# ---- The averaged weights in use.


def digest_on_ranks(trainer: Any) -> str:
    """A digest of the weights that all ranks hold together; the same under every layout."""
    from paddleformers_fc.execute.digest import digest_live
    from paddleformers_fc.trainer import live_roles
    from paddleformers_fc.trainer.description import describe_model
    from paddleformers_fc.trainer.session import channel_of

    weights = live_roles.model_roles(trainer.model)["model_state"]
    return digest_live(weights, describe_model(trainer.model), channel_of(trainer.args))


def bits(trainer: Any) -> str:
    """A digest of the weights of this rank, bit by bit."""
    from paddleformers_fc.execute.memory import host_pieces
    from paddleformers_fc.trainer import live_roles

    digest = hashlib.md5()
    for name, weight in sorted(live_roles.model_roles(trainer.model)["model_state"].items()):
        tensor = weight.local_tensor
        for piece in host_pieces(tensor, 0, int(tensor.size)):
            digest.update(name.encode() + piece.tobytes())
    return digest.hexdigest()


def use_the_average(layout: MatrixLayout, output_dir: Path, adapters: bool = False, **given: Any) -> None:
    """Train, evaluate the averaged weights in a block that ends with an error, export them, and resume from them."""
    from paddleformers_fc import averaged_weights, save_ema

    averaged = []

    def swap(*_: Any, **__: Any) -> None:
        before = bits(trainer)
        with contextlib.suppress(ZeroDivisionError), averaged_weights(trainer):
            assert bits(trainer) != before
            averaged.append(digest_on_ranks(trainer))
            trainer.evaluate(few_samples())
            with pytest.raises(OptionError, match="neither trained nor saved"):
                trainer._save_checkpoint(trainer.model)
            raise ZeroDivisionError
        assert bits(trainer) == before
        save_ema(trainer, str(output_dir / "live"))

    arguments = {"max_steps": 3, "save_steps": 3, **AVERAGE}
    build = trainer_of if adapters else flex_trainer
    trainer = build(layout, output_dir, arguments, **given, callbacks=[callback(on_train_end=swap)])
    trainer.train()
    if not adapters:
        arguments = {"max_steps": 3, "sharded_model_from_ema": True, **AVERAGE}
        again = trained(layout, output_dir / "again", arguments, **given, resume=output_dir / "checkpoint-3")
        assert [digest_on_ranks(again)] == averaged


def assert_exported(output_dir: Path) -> None:
    """The export of the live model is that of its checkpoint."""
    target = output_dir / "stored"
    report = paddleformers_fc.open(output_dir / "checkpoint-3").export(target, role="ema_state", md5=True)
    assert report.md5 == md5_of((target / name).read_bytes() for name in report.files)
    assert report.digests() == {name: digest_of(output_dir / "live" / name) for name in report.files}


@cases(LLAMAS[:1], [(half(SD2S3), {}), (SD2S2, {}), *TIES])
def test_averaged_weights_are_in_the_model_and_the_former_ones_come_back(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, given: dict[str, Any]
) -> None:
    run_on_ranks(ranks, layout.nproc, use_the_average, layout=layout, output_dir=tmp_path, **given)
    assert_exported(tmp_path)
    live, third = paddleformers_fc.open(tmp_path / "live"), tmp_path / "checkpoint-3"
    dtype = paddleformers_fc.open(third).tensors()[0].dtype
    for name, values in averages(third).items():
        exported = live.read(name)
        assert str(exported.dtype) == dtype
        np.testing.assert_array_equal(exported, values.astype(exported.dtype))


def evaluated(layout: MatrixLayout, output_dir: Path, arguments: dict[str, Any], fail: bool = False) -> dict[str, Any]:
    """Train with an evaluation after every step; losses of both.

    Args:
        fail: whether an evaluation of the averaged weights fails in the middle of a pass before every later step;
            returns whether the weights are then those of before.
    """
    from paddleformers_fc import averaged_weights

    losses: list[float] = []
    restored: list[bool] = []

    def evaluate_and_fail(args: Any, state: Any, *_: Any, **__: Any) -> None:
        if fail and state.global_step:
            before = bits(trainer)
            layer = trainer.model.model.layers[2].mlp.down_proj
            with contextlib.suppress(ZeroDivisionError), averaged_weights(trainer), failing(layer):
                trainer.evaluate()
            restored.append(bits(trainer) == before)

    def note(*_: Any, metrics: Any = None, **__: Any) -> None:
        losses.append(float(metrics["eval_loss"]))

    given = {"eval_dataset": tiny.Samples(), "callbacks": [callback(on_step_begin=evaluate_and_fail, on_evaluate=note)]}
    arguments = {"evaluation_strategy": "steps", "eval_steps": 1, "do_eval": True, **arguments}
    trainer = flex_trainer(layout, output_dir, arguments, **given)
    trainer.train()
    trainer.save_model(str(output_dir / "exported"))
    return {"losses": trainer.losses, "evaluated": losses, "restored": restored}


def evaluated_before_weights_arrive(**settings: Any) -> dict[str, Any]:
    """As :func:`evaluated`, with an export at the end, on ranks that receive nothing before they wait for it.

    A device with streams may receive the weights of an overlapped broadcast or gather as late. With gloo they arrive
    at once.
    """
    import paddle
    from paddle.base import core

    pending: list[Any] = []
    broadcast, gather = paddle.distributed.broadcast, core.ProcessGroupGloo.all_gather

    class Arrival:
        def __init__(self, receive: Any) -> None:
            self.receive = receive
            pending.append(self)

        def wait(self) -> None:
            self.receive()
            self.receive = lambda: None

    def begin(tensor: Any, src: int = 0, group: Any = None, sync_op: bool = True) -> Any:
        arrival = Arrival(lambda: broadcast(tensor, src, group, True))
        return arrival.wait() if sync_op else arrival

    def begin_gather(group: Any, part: Any, whole: Any, *more: Any, **named: Any) -> Any:
        if more or named:  # Not the call by which sharding stage 1 v2 receives its parameters.
            return gather(group, part, whole, *more, **named)
        return Arrival(lambda: gather(group, part, whole).wait())

    def synchronize() -> None:
        while pending:
            pending.pop(0).wait()

    paddle.distributed.broadcast, paddle.device.synchronize = begin, synchronize
    core.ProcessGroupGloo.all_gather = begin_gather
    return evaluated(**settings)


@on_ranks(layout=SD2S3)  # Each pass moves its slices of weights.
def test_an_evaluation_has_the_averages_and_training_continues_as_before(tmp_path: Path) -> None:
    def evaluate(name: str, **arguments: Any) -> tuple[dict[str, Any], int]:
        given = {"max_steps": 3, "flex_ema_evaluate": True, **arguments}
        with logged() as lines:
            found = evaluated(SD2S3, tmp_path / name, given)
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
    steps = {"eval_steps": 2, "save_steps": 3, "max_steps": 5}  # Evaluation, save and export happen at different steps.
    for train, overlap in ((evaluated, False), (evaluated_before_weights_arrive, True)):
        place = tmp_path / str(overlap)
        given = {**steps, **arguments, option: overlap}
        losses = train(layout=layout, output_dir=place, arguments=given)
        found.append((losses, [list(canonical_digests(place / one)) for one in ("checkpoint-3", "exported")]))
    assert found[0] == found[1]


def test_adapters_are_averaged_and_exported(ranks: ForkServer, tmp_path: Path) -> None:
    run_on_ranks(ranks, 2, use_the_average, layout=TP2, output_dir=tmp_path, adapters=True)
    assert_exported(tmp_path)
    third = paddleformers_fc.open(tmp_path / "checkpoint-3")
    names = {one.name for one in third.tensors() if one.role == "model_state"}
    assert averages(tmp_path / "checkpoint-3").keys() == names
    assert all("lora_" in name for name in names)
    stored = {name: digest_of(tmp_path / "stored" / name) for name in third.export(tmp_path / "plain").files}
    assert stored != {name: digest_of(tmp_path / "plain" / name) for name in stored}
    with pytest.raises(OptionError, match="'optimizer_state' contains no weights"):
        third.export(tmp_path / "states", role="optimizer_state")


def test_frozen_parameters_have_no_average_until_they_are_trained(ranks: ForkServer, tmp_path: Path) -> None:
    frozen = "model.embed_tokens.weight"
    run(ranks, DP2, tmp_path, jobs.run_with_frozen, frozen=[frozen], arguments={"max_steps": 2})
    second = tmp_path / "checkpoint-2"
    assert averages(second).keys() == weights(second).keys() - {frozen}
    paddleformers_fc.open(second).export(tmp_path / "export", role="ema_state")
    exported = paddleformers_fc.open(tmp_path / "export")
    np.testing.assert_array_equal(exported.read(frozen), weights(second)[frozen])
    again = tmp_path / "again"
    given = {"resume": str(second), "arguments": {"max_steps": 3}}
    _, log = run(ranks, TP2, again, jobs.run_with_frozen, frozen=[], **given)
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
    before, after = (paddleformers_fc.open(one / "checkpoint-6") for one in (tmp_path, again))
    assert before.diff(after, role="ema_state").equal


@on_ranks(1)
def test_a_run_that_starts_or_ends_an_average_or_changes_it_reports_it(tmp_path: Path) -> None:
    def train(name: str, resume: str | None = None, **arguments: Any) -> str:
        given = {**EVERY_STEP, **AVERAGE, **arguments}
        with logged() as lines:
            trained(SINGLE, tmp_path / name, given, resume=resume and tmp_path / resume)
        return "\n".join(lines)

    three = {"max_steps": 3, "save_steps": 3}
    train("without", **three, flex_ema_decay=0.0)
    with pytest.raises(OptionError, match="no moving average"):
        paddleformers_fc.open(tmp_path / "without" / "checkpoint-3").export(tmp_path / "export", role="ema_state")
    train("with", **three)
    third, one = "with/checkpoint-3", {"max_steps": 4, "save_steps": 4}
    assert "checkpoint-3 has no moving average. It starts as a copy" in train("late", "without/checkpoint-3")
    off = train("off", third, **one, flex_ema_decay=0.0)
    assert "checkpoint-3 has a moving average of 39 tensors, and this run has none" in off
    assert (tmp_path / "off" / "checkpoint-4").exists()
    assert not (tmp_path / "off" / "checkpoint-4" / "ema_state").exists()
    begun = train("new", third, save_steps=100, max_steps=1, ignore_load_lr_and_optim=True)
    assert "checkpoint-3 is not continued, because ignore_load_lr_and_optim starts a new run" in begun
    assert re.search(r"flex_ema_decay +.*0\.9 .*0\.5", train("changed", third, **one, flex_ema_decay=0.5))
    late = tmp_path / "late"
    assert_averages(averages(late / "checkpoint-6"), reference(late, [4, 5, 6]))


@on_ranks(layout=DP2)
def test_an_average_that_fails_on_one_rank_stops_all_at_the_next_save(tmp_path: Path) -> None:
    from paddleformers_fc.trainer import ema

    trainer = flex_trainer(DP2, tmp_path, {"max_steps": 6, "save_steps": 3, **AVERAGE})

    def fail(*_: Any) -> None:
        if trainer.args.process_index == 1 and trainer.state.global_step >= 2:
            raise MemoryError("no memory for the average")

    precede(ema, "update_averages", fail)
    with pytest.raises(FlexError, match="no memory for the average") as caught:
        trainer.train()
    assert all(text in caught.value.render() for text in ("MemoryError", "on rank 1"))
    assert trainer.state.global_step == 3
    assert not (tmp_path / "checkpoint-3").exists()


def test_options_that_receive_weights_in_passes_are_found_in_paddlenlps_text() -> None:
    from paddleformers_fc.trainer import live_roles

    texts = ["enable_stage1_broadcast_overlap", "split_param,enable_stage1_allgather_overlap", "enable_stage2_overlap"]
    assert all(live_roles.receives_in_passes(SimpleNamespace(sharding_parallel_config=text)) for text in texts)
    assert not live_roles.receives_in_passes(SimpleNamespace(sharding_parallel_config="split_param enable_overlap"))


def test_the_next_update_waits_for_all_reads_and_leaves_their_errors_to_others() -> None:
    may_end, log = threading.Event(), []
    reads = UpdateBarrier(lambda: False)
    with ThreadPoolExecutor(2) as threads:
        reads.add(threads.submit(lambda: [].pop()))
        reads.add(threads.submit(lambda: (may_end.wait(), log.append("read"))))
        update = threads.submit(lambda: (reads.finish(), log.append("updated")))
        pause()
        assert log == []
        may_end.set()
        update.result()
    assert log == ["read", "updated"]
    assert reads.waited > 0


def test_a_read_is_waited_for_at_once_where_the_passes_change_weights() -> None:
    log: list[str] = []
    with ThreadPoolExecutor(1) as threads:
        UpdateBarrier(lambda: True).add(threads.submit(lambda: (pause(), log.append("read"))))
        assert log == ["read"]
