"""Saves beside training: what they write, what training sees of them, and what it waits for."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.errors import FlexError
from paddleformers_fc.storage.checksum import INDEX_NAME
from paddleformers_fc.storage.manifest import MANIFEST_NAME, read_manifest, verify_files
from tests.crash.net import refusing
from tests.harness.on_ranks import job_on_ranks, on_ranks, run_on_ranks
from tests.harness.patching import precede
from tests.harness.tiny import DP2, EP2, PP2, SD2S2, SD2S3, SD2V1, SD2V2, SINGLE, TP2, MatrixLayout
from tests.trainer.jobs import (
    TO_BEST,
    callback,
    few_samples,
    flex_trainer,
    logged,
    outcome,
    run,
    run_with_frozen,
    run_with_scaler,
    trained,
)
from tests.trainer.test_lora import train_adapters
from tests.trainer.test_trainer import bf16, settings
from verification.forkserver import ForkServer

EVERY_STEP = {"max_steps": 3, "save_steps": 1}
ASYNC = {"flex_async_save": True}
LONG = 60.0
A_WHILE = 0.3

ARGUMENTS = ("training_args", "arguments")
"""Parts of the names of files that contain the options of a run."""


def contents(checkpoint: Path) -> dict[str, str]:
    """The digest of every file of a checkpoint without times, options, identities of a run, or checksums of these."""
    return {
        str(path.relative_to(checkpoint)): hashlib.md5(path.read_bytes()).hexdigest()
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file()
        and path.name not in (MANIFEST_NAME, INDEX_NAME)
        and not any(part in path.name for part in ARGUMENTS)
    }


def all_contents(output_dir: Path) -> dict[str, dict[str, str]]:
    """The contents of everything that is or looks like a checkpoint."""
    return {path.name: contents(path) for path in sorted(output_dir.iterdir()) if "checkpoint" in path.name}


# ---- A snapshot is that of its step.


def with_late_copies(job: Callable[..., Any], **settings: Any) -> Any:
    """Run a job whose snapshots are copied when the next update wants to begin, and after it if it does not wait.

    What a moving average reads is copied then too, or when someone waits for the average before that.
    """
    from paddleformers_fc.execute.async_snapshot import SnapshotCopy
    from paddleformers_fc.trainer import async_save
    from paddleformers_fc.trainer.ema import MovingAverage
    from paddleformers_fc.trainer.live_roles import UpdateBarrier
    from paddleformers_fc.trainer.session import LoopEvents

    wanted, average_wanted, updated = threading.Event(), threading.Event(), threading.Event()

    def wait_for_the_update(_: Any) -> None:
        is_average = threading.current_thread().name.startswith("flex-ema")
        assert (average_wanted if is_average else wanted).wait(LONG), "no update has followed"
        updated.wait(A_WHILE)

    def note(_: Any, event: str, *__: Any, **___: Any) -> None:
        if event == "on_optimizer_end":
            updated.set()

    precede(async_save, "prepare", lambda *_: [one.clear() for one in (wanted, average_wanted, updated)])
    precede(UpdateBarrier, "finish", lambda _: [one.set() for one in (wanted, average_wanted)])
    precede(MovingAverage, "wait_for_update", lambda _: average_wanted.set())
    precede(SnapshotCopy, "finish", wait_for_the_update)
    precede(LoopEvents, "call_event", note)
    return job(**settings)


def swap_between_steps(**settings: Any) -> list[float]:
    """Train with an evaluation of the averaged weights in every pass, while saves of the step before are under way."""
    from paddleformers_fc import averaged_weights

    def evaluate(args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step:
            with averaged_weights(trainer):
                trainer.evaluate()

    trainer = flex_trainer(**settings, callbacks=[callback(on_step_begin=evaluate)], eval_dataset=few_samples())
    trainer.train()
    return list(trainer.losses)


AVERAGED = {"flex_ema_decay": 0.9}
ACCUMULATED = {**AVERAGED, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
FROZEN = {"frozen": ["model.embed_tokens.weight", "model.norm.weight"]}
OFFLOADED = {"tensorwise_offload_optimizer": True}
TRAININGS = {
    "accumulation, evaluations": (SINGLE, swap_between_steps, ACCUMULATED, {}),
    "bfloat16, split_param": (bf16(SD2V2), run, AVERAGED, {}),
    "bfloat16, split_param, evaluations": (bf16(SD2V2), swap_between_steps, AVERAGED, {}),
    "LoRA, average": (TP2, train_adapters, AVERAGED, {}),
    "frozen": (SD2V2, run_with_frozen, {}, FROZEN),
    "scaler": (SINGLE, run_with_scaler, {}, {"initial": 4.0}),
    "offloaded": (bf16(SINGLE), run, OFFLOADED, {}),
    "experts": (EP2, run, ACCUMULATED, {"model_type": "ernie4_5_moe"}),
    **{layout.name: (layout, run, ACCUMULATED, {}) for layout in (PP2, *map(bf16, (TP2, SD2V1, SD2S2, SD2S3)))},
}
"""Layout, job, options and further arguments of the job."""
SAMPLE = ("accumulation, evaluations", "bfloat16, split_param")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.chosen if kind in SAMPLE else pytest.mark.slow) for kind in TRAININGS]
)
def test_a_late_copy_is_that_of_the_saved_step(ranks: ForkServer, tmp_path: Path, kind: str) -> None:
    """Saves in the steps, and beside them with copies that are made as late as the next update allows."""
    layout, job, options, given = TRAININGS[kind]
    found = []
    for name in ("in", "beside"):
        is_beside = {"use_flex_async_save": True} if name == "beside" else {}
        arguments = {**settings(layout, tmp_path / name, **EVERY_STEP, **options, **is_beside), **given}
        called, more = (with_late_copies, {"job": job}) if is_beside else (job, {})
        values = run_on_ranks(ranks, layout.nproc, called, **more, **arguments)
        found.append((values, all_contents(tmp_path / name)))
    assert len(found[0][1]) == EVERY_STEP["max_steps"]
    assert found[0] == found[1]


@on_ranks(layout=SINGLE)
def test_a_load_in_a_callback_waits_for_the_copy_of_a_save(tmp_path: Path) -> None:
    import paddleformers_fc
    from paddleformers_fc.execute.async_snapshot import SnapshotCopy
    from paddleformers_fc.trainer import async_save
    from paddleformers_fc.trainer.live_roles import UpdateBarrier

    wanted = threading.Event()

    def load(_: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step == 2:
            paddleformers_fc.load(tmp_path / "in/checkpoint-1", trainer.model)

    flex_trainer(SINGLE, tmp_path / "in", EVERY_STEP).train()
    precede(async_save, "prepare", lambda *_: wanted.clear())
    precede(UpdateBarrier, "finish", lambda _: wanted.set())
    precede(SnapshotCopy, "finish", lambda _: wanted.wait(LONG))
    trainer = flex_trainer(
        SINGLE, tmp_path / "beside", {**EVERY_STEP, **ASYNC}, callbacks=[callback(on_step_begin=load)]
    )
    trainer.train()
    saved, expected = all_contents(tmp_path / "beside"), all_contents(tmp_path / "in")
    assert saved["checkpoint-2"] == expected["checkpoint-2"]
    assert saved["checkpoint-3"] != expected["checkpoint-3"]


@on_ranks(1)
def test_captured_documents_describe_their_step_whatever_changes_until_they_are_encoded(tmp_path: Path) -> None:
    import random

    import numpy as np
    from paddleformers.generation import GenerationConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from paddleformers_fc import FlexTrainer
    from paddleformers_fc.trainer.save import capture_files
    from paddleformers_fc.trainer.session import session_of

    class CopiesFiles(FlexTrainer):
        def copy_custom_files(self, output_dir: str) -> None:
            (Path(output_dir) / "notes.txt").write_text(self.args.copy_custom_file_list)

    different: list[str] = []

    def capture_and_change(args: Any, state: Any, *_: Any, **__: Any) -> None:
        session, config, state.trial_params = session_of(trainer), trainer.model.config, {}
        expected, encode = capture_files(session)(), capture_files(session)
        config.task_specific_params["task"]["beams"] = config.bos_token_id = 7
        trainer.model.generation_config.temperature = 0.25
        trainer.tokenizer.add_tokens(["later"])
        args.copy_custom_file_list, args.seed = "later", 1234
        args.flex_allow_config_changes.append("rope_theta")
        state.trial_name, state.trial_params["later"] = "later", True
        random.random()
        np.random.random()
        assert encode() == expected
        changed = capture_files(session)()
        different.extend(name for name in expected if changed[name] != expected[name])

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"w": 0, "[U]": 1}, "[U]")))
    given = {"cls": CopiesFiles, "tokenizer": tokenizer, "callbacks": [callback(on_save=capture_and_change)]}
    trainer = flex_trainer(SINGLE, tmp_path, {"max_steps": 1, "save_steps": 1}, **given)
    trainer.args.copy_custom_file_list = "at the step"
    trainer.model.config.task_specific_params = {"task": {"beams": 3}}
    trainer.model.generation_config = GenerationConfig(temperature=0.5)
    trainer.train()
    own = {f"trainer/{name}.json" for name in ("arguments", "rng-00000", "state")}
    assert set(different) == {*own, "config.json", "generation_config.json", "notes.txt", "tokenizer.json"}


# ---- Plan and memory.


def note_preparations(layout: MatrixLayout, output_dir: Path, resume: Path | None) -> list[str]:
    """Train; where saves were planned and memory for snapshots was allocated."""
    from paddleformers_fc.execute import save
    from paddleformers_fc.execute.async_snapshot import SnapshotBuffer
    from paddleformers_fc.trainer.async_save import Saver

    noted, where, reserve = [], ["before training"], SnapshotBuffer.reserve

    def reserve_and_note(self: Any, *args: Any) -> bool:
        is_new = reserve(self, *args)
        noted.extend([f"allocated {where[-1]}"] if is_new else [])
        return is_new

    SnapshotBuffer.reserve = reserve_and_note
    precede(save, "new_plan", lambda *_: noted.append(f"planned {where[-1]}"))
    precede(Saver, "save", lambda *_: where.append("in a save"))
    model_type = "ernie4_5_moe" if layout.ep > 1 else "llama"
    trained(layout, output_dir, {**EVERY_STEP, **ASYNC, **AVERAGED}, model_type, resume=resume)
    return noted


@pytest.mark.parametrize(
    "layout",
    [SINGLE, *(pytest.param(one, marks=pytest.mark.slow) for one in (EP2, SD2S3, bf16(SD2V2)))],
    ids=lambda layout: layout.name,
)
def test_saves_are_planned_and_allocated_before_training(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    for name, resume in (("new", None), ("resumed", tmp_path / "new" / "checkpoint-2")):
        given = {"layout": layout, "output_dir": tmp_path / name, "resume": resume}
        for noted in run_on_ranks(ranks, layout.nproc, note_preparations, **given):
            assert noted == ["planned before training", "allocated before training"]


@on_ranks(layout=DP2)
def test_a_lack_of_memory_on_one_rank_stops_all_ranks_before_the_first_step(tmp_path: Path) -> None:
    import resource

    import paddle.distributed as dist

    from paddleformers_fc.execute.async_snapshot import SnapshotBuffer

    reserve = SnapshotBuffer.reserve

    def reserve_under_a_limit(self: Any, *args: Any) -> bool:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), limits[1]))
        try:
            return reserve(self, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)

    if dist.get_rank() == 1:
        SnapshotBuffer.reserve = reserve_under_a_limit
    trainer = flex_trainer(DP2, tmp_path, {**EVERY_STEP, **ASYNC})
    with pytest.raises(FlexError, match="Asynchronous saves of this process need") as caught:
        trainer.train()
    assert all(text in caught.value.render() for text in ("Cannot allocate memory", "rank 1"))
    assert trainer.state.global_step == 0


# ---- What training sees.


def with_events(layout: MatrixLayout, output_dir: Path, hold: bool = False, **arguments: Any) -> dict[str, Any]:
    """Train and evaluate; what callbacks and reporters see of every save, in order.

    Args:
        hold: whether every step but the first begins when the save of the one before can be reported.
    """
    from paddleformers_fc.trainer.session import session_of

    seen: list[Any] = []

    def saved(args: Any, report: Any) -> None:
        seen.append(["saved", report.step, (Path(report.directory) / MANIFEST_NAME).is_file()])

    def on_save(args: Any, state: Any, *_: Any, **__: Any) -> None:
        best, there = state.best_model_checkpoint, Path(args.output_dir) / f"checkpoint-{state.global_step}"
        facts = [best and Path(best).name, best is None or Path(best).is_dir(), state.best_metric]
        seen.append(["on_save", state.global_step, *facts, len(state.log_history), (there / MANIFEST_NAME).is_file()])

    def wait(*_: Any, **__: Any) -> None:
        saves = session_of(trainer).saver
        while hold and saves.under_way:
            saves.advance(session_of(trainer))

    noting = callback(on_checkpoint_saved=saved, on_save=on_save, on_step_begin=wait)
    trainer = flex_trainer(layout, output_dir, arguments, callbacks=[noting], eval_dataset=few_samples())
    trainer.train()
    best = trainer.state.best_model_checkpoint
    return {**outcome(trainer), "seen": seen, "best": best and Path(best).name, "metric": trainer.state.best_metric}


@on_ranks(1)
def test_a_save_that_is_due_where_the_last_one_is_reported_is_made(tmp_path: Path) -> None:
    found = with_events(SINGLE, tmp_path, hold=True, **EVERY_STEP, **ASYNC)
    steps = list(range(1, 4))
    assert sorted(all_contents(tmp_path)) == [f"checkpoint-{step}" for step in steps]
    assert [one[:2] for one in found["seen"]] == [[event, step] for step in steps for event in ("saved", "on_save")]


@on_ranks(layout=SINGLE)
def test_a_save_is_committed_in_an_evaluation_and_reported_at_the_next_step_end(tmp_path: Path) -> None:
    """Each batch of an evaluation waits for what the thread of a save does."""
    from paddleformers_fc.trainer.session import session_of

    seen: list[tuple[Any, ...]] = []

    def predict(args: Any, state: Any, *_: Any, **__: Any) -> None:
        saves = session_of(trainer).saver
        if saves.under_way:
            saves._save.done.exception()
        if not seen and any(tmp_path.glob("checkpoint-*")):
            seen.append(("committed", state.global_step))

    noting = callback(
        on_prediction_step=predict,
        on_checkpoint_saved=lambda _, report: seen.append(("saved", report.step, trainer.state.global_step)),
    )
    evaluated = {"evaluation_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 1}
    given = {"max_steps": 4, "save_steps": 2, **evaluated, **ASYNC}
    trainer = flex_trainer(SINGLE, tmp_path, given, callbacks=[noting], eval_dataset=few_samples())
    trainer.train()
    assert seen == [("committed", 3), ("saved", 2, 4), ("saved", 4, 4)]


def names_and_bests(output_dir: Path) -> list[Any]:
    """Every name in the output directory, and what the Trainer's states say of the best checkpoint."""
    states = [json.loads((path / "trainer/state.json").read_text()) for path in sorted(output_dir.glob("checkpoint-*"))]
    bests = [(Path(one["best_model_checkpoint"] or "").name, one["best_metric"]) for one in states]
    return [sorted(os.listdir(output_dir)), bests]


RUNS = {
    "best": {**TO_BEST, "max_steps": 3, "learning_rate": 0.01},
    "worse": {**TO_BEST, "max_steps": 3},
    "limit": {"max_steps": 5, "save_steps": 1, "save_total_limit": 2, "flex_verify": "full"},
}


@pytest.mark.parametrize(
    ("layout", "run"),
    [(SINGLE, "best"), *(pytest.param(*one, marks=pytest.mark.slow) for one in [(DP2, "worse"), (TP2, "limit")])],
    ids=str,
)
@on_ranks()
def test_callbacks_and_the_disk_are_as_after_blocking_saves(layout: MatrixLayout, tmp_path: Path, run: str) -> None:
    blocking = with_events(layout, tmp_path / "in", **RUNS[run])
    found = with_events(layout, tmp_path / "beside", **RUNS[run], **ASYNC)
    assert found == blocking
    assert all(event[-1] for event in found["seen"]), "only committed checkpoints are reported"
    assert names_and_bests(tmp_path / "in") == names_and_bests(tmp_path / "beside")


@on_ranks(layout=DP2)
def test_saves_open_no_group_or_connection_and_their_threads_never_communicate(tmp_path: Path) -> None:
    import paddle
    from paddle.base import core

    from paddleformers_fc.distributed.channel import PaddleChannel
    from paddleformers_fc.distributed.communicator import Communicator
    from paddleformers_fc.distributed.store_client import StoreClient
    from paddleformers_fc.trainer.async_save import Saver

    exchanges: list[int] = []
    threads: set[str] = set()
    opened: list[Any] = []

    def note(count: int, *_: Any, **__: Any) -> None:
        threads.add(threading.current_thread().name)
        exchanges[-1:] = [one + count for one in exchanges[-1:]]

    precede(Saver, "save", lambda *_: exchanges.append(0))
    precede(Communicator, "gather", partial(note, 1))
    precede(PaddleChannel, "all_to_all", partial(note, 1))
    for name in ("add", "wait"):
        precede(StoreClient, name, partial(note, 0))
    given = {**EVERY_STEP, "max_steps": 4, **ASYNC, **AVERAGED, "save_total_limit": 2}
    trainer = flex_trainer(DP2, tmp_path, given)
    for owner, name in (
        (StoreClient, "__init__"),
        (paddle.distributed, "new_group"),
        (core.ProcessGroupGloo, "create"),
    ):
        precede(owner, name, lambda *args, **_: opened.append(args))
    trainer.train()
    assert (opened, threads) == ([], {"MainThread"})
    # Preparing, looking for the directory, writing, committing, deleting.
    assert exchanges[1:3] == [5, 5]


@on_ranks(layout=SINGLE)
def test_saves_are_committed_in_their_order_and_a_further_one_waits(tmp_path: Path) -> None:
    """The first save is not written before the second one waits for it."""
    from paddleformers_fc.execute import save
    from paddleformers_fc.trainer import async_save
    from paddleformers_fc.trainer.async_save import Saver

    waits, committed, captured = threading.Event(), [], []

    def hold(planned: Any, *_: Any) -> None:
        assert planned.part.job.step != 1 or waits.wait(LONG)

    def note_the_wait(self: Any, session: Any, why: str) -> None:
        if session.trainer.state.global_step == 2 and self._save is not None and self._save.prepared.step == 1:
            captured.append(not session.barrier._reads)
            waits.set()

    precede(save, "_write_files", hold)
    precede(Saver, "_wait", note_the_wait)
    precede(async_save, "report_save", lambda session, prepared, *_: committed.append(prepared.step))
    with logged() as lines:
        trained(SINGLE, tmp_path, {**EVERY_STEP, **ASYNC})
    assert (committed, captured) == ([1, 2, 3], [True])
    assert any(" s for the save of step 1, before step 2 can be saved." in line for line in lines)


# ---- Errors.


@pytest.mark.parametrize(
    ("kind", "text"),
    [("disk full", "No space left on device"), pytest.param("copy", "a broken copy", marks=pytest.mark.slow)],
)
@on_ranks(2)
def test_an_error_of_a_save_on_one_rank_is_raised_on_all_at_one_step_and_a_later_run_saves(
    tmp_path: Path, kind: str, text: str
) -> None:
    """The second save fails. Then the same Trainer trains on from the newest checkpoint."""
    from paddleformers_fc.distributed.channel import job_channel
    from paddleformers_fc.execute.async_snapshot import SnapshotCopy

    plain = trained(DP2, tmp_path / "plain", EVERY_STEP)
    out, copies = tmp_path / "broken", Counter[str]()
    trainer = flex_trainer(DP2, out, {**EVERY_STEP, **ASYNC})
    has_fault = trainer.args.process_index == 1

    def break_the_second(_: Any) -> None:
        copies["made"] += 1
        if kind == "copy" and has_fault and copies["made"] == 2:
            raise ValueError("a broken copy")

    precede(SnapshotCopy, "finish", break_the_second)
    is_full = has_fault and kind == "disk full"
    with refusing("write", "checkpoint-2.unfinished", errno.ENOSPC) if is_full else contextlib.nullcontext():
        with pytest.raises(FlexError, match=text) as caught:
            trainer.train()
    assert caught.value.__cause__ is not None or not has_fault
    assert trainer.state.global_step >= 2
    raised = f"{trainer.state.global_step} {caught.value.render()}"
    assert len({bytes(one) for one in job_channel().gather("a test", raised.encode())}) == 1
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-1"]
    trainer.losses.clear()
    trainer.train(resume_from_checkpoint=True)
    assert trainer.losses == plain.losses[1:]
    assert all_contents(out) == all_contents(tmp_path / "plain")


def break_off(victims: list[int], kind: str, **settings: Any) -> None:
    """Train; some ranks raise an error of their own after step 2, while its save has not begun to write.

    Ranks that raise alone do not wait for the others for long.

    Args:
        victims: the ranks.
        kind: of the error, a built-in exception.
    """
    import builtins

    from paddleformers_fc.distributed import step_agreement
    from paddleformers_fc.execute import save

    is_victim = int(os.environ["PADDLE_TRAINER_ID"]) in victims
    step_agreement.ENDING_SECONDS = LONG if len(victims) == 2 else A_WHILE
    raised = threading.Event()

    def wait_for_the_error(planned: Any, *_: Any) -> None:
        assert not is_victim or planned.part.job.step != 2 or raised.wait(LONG)

    def fail(args: Any, state: Any, *_: Any, **__: Any) -> None:
        if is_victim and state.global_step == 2:
            raised.set()
            raise getattr(builtins, kind)("broken off")

    precede(save, "_write_files", wait_for_the_error)
    trained(**settings, callbacks=[callback(on_step_begin=fail)])


@pytest.mark.parametrize(
    ("victims", "kind", "committed"),
    [([0, 1], "KeyboardInterrupt", [1, 2]), pytest.param([1], "KeyError", [1], marks=pytest.mark.slow)],
    ids=["all", "one of two"],
)
def test_a_save_is_committed_before_an_error_of_training_on_all_ranks_ends_the_job(
    ranks: ForkServer, tmp_path: Path, victims: list[int], kind: str, committed: list[int]
) -> None:
    """If one rank fails alone, the other waits for it in its step, and the save is not committed."""
    given = settings(DP2, tmp_path, **EVERY_STEP, **ASYNC)
    ran = job_on_ranks(ranks.attempt, 2, break_off, victims=victims, kind=kind, **given)
    logs = [ran.logs[rank].read_text() for rank in victims]
    assert all(kind in log and "broken off" in log for log in logs)
    abandoned = "checkpoint-2 may not be committed: training has failed on some ranks"
    assert [abandoned in log for log in logs] == [2 not in committed] * len(victims)
    checkpoint = tmp_path / f"checkpoint-{committed[-1]}"
    verify_files(checkpoint, read_manifest(checkpoint), "full")
    # A rank that ends alone leaves the staging directory of another one, as a crash does.
    found = [name for name in sorted(all_contents(tmp_path)) if not name.startswith(".")]
    assert found == [f"checkpoint-{step}" for step in committed]
