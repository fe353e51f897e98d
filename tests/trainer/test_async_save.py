"""Saves beside training: what they write, what training sees of them, and what it waits for."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.errors import FlexError
from paddleformers_fc.storage.checksum import INDEX_NAME
from paddleformers_fc.storage.manifest import MANIFEST_NAME, read_manifest, verify_files
from tests.harness.on_ranks import on_ranks, run_on_ranks
from tests.harness.tiny import DP2, EP2, PP2, SD2S2, SD2S3, SD2V1, SD2V2, SINGLE, TP2, MatrixLayout
from tests.trainer.beside_jobs import LONG
from tests.trainer.jobs import TO_BEST, few_samples, flex_trainer, logged, outcome
from tests.trainer.test_trainer import bf16, settings
from verification.forkserver import ForkServer

JOBS = "tests.trainer.jobs"
BESIDE = "tests.trainer.beside_jobs"
EVERY_STEP = {"max_steps": 3, "save_steps": 1}
ASYNC = {"flex_async_save": True}

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


def compare(ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, job: str = f"{JOBS}:run", **given: Any) -> None:
    """Save in the steps, and beside them with copies that are made as late as the next update allows."""
    arguments, found, losses = {**EVERY_STEP, **given.pop("arguments", {})}, [], []
    for name in ("in", "beside"):
        output_dir = tmp_path / name
        options = {**arguments, "use_flex_async_save": True} if name == "beside" else arguments
        job_settings = {**settings(layout, output_dir, **options), **given}
        if name == "beside":
            ran = ranks.run(f"{BESIDE}:with_late_copies", layout.nproc, {"job": job, **job_settings})
        else:
            ran = ranks.run(job, layout.nproc, job_settings)
        losses.append(list(ran.values))
        found.append(all_contents(output_dir))
    assert losses[0] == losses[1]
    assert len(found[0]) == arguments["max_steps"]
    assert found[0] == found[1]


ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
AVERAGED = {"flex_ema_decay": 0.9}
EVALUATED = "tests.trainer.ema_jobs:swap_between_steps"
"""An evaluation of the averaged weights in every pass."""


@pytest.mark.parametrize(
    ("layout", "job", "arguments"),
    [
        pytest.param(SINGLE, EVALUATED, {**AVERAGED, **ACCUMULATED}, marks=pytest.mark.chosen),
        pytest.param(bf16(SD2V2), f"{JOBS}:run", AVERAGED, marks=pytest.mark.chosen),
        (bf16(SD2V2), EVALUATED, AVERAGED),
    ],
    ids=["one process, accumulation, evaluations", "bfloat16, split_param", "bfloat16, split_param, evaluations"],
)
def test_a_late_copy_is_that_of_the_saved_step(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, job: str, arguments: dict[str, Any]
) -> None:
    compare(ranks, tmp_path, layout, job, arguments=arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [DP2, TP2, PP2, EP2, SD2V1, SD2V2, SD2S2, SD2S3, bf16(TP2), bf16(SD2V1), bf16(SD2S2), bf16(SD2S3)],
    ids=lambda layout: layout.name,
)
def test_a_late_copy_is_that_of_the_saved_step_under_every_layout(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    model = {"model_type": "ernie4_5_moe"} if layout.ep > 1 else {}
    compare(ranks, tmp_path, layout, arguments={**AVERAGED, **ACCUMULATED}, **model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "job", "given"),
    [
        (TP2, "tests.trainer.lora_jobs:run", {"arguments": AVERAGED}),
        (SD2V2, f"{JOBS}:run_with_frozen", {"frozen": ["model.embed_tokens.weight", "model.norm.weight"]}),
        (SINGLE, f"{JOBS}:run_past_a_layer", {}),
        (SINGLE, f"{JOBS}:run_with_scaler", {"initial": 4.0}),
        (bf16(SINGLE), f"{JOBS}:run", {"arguments": {"tensorwise_offload_optimizer": True}}),
    ],
    ids=["LoRA, average", "frozen", "unused", "scaler", "offloaded"],
)
def test_a_late_copy_is_that_of_the_saved_step_of_every_kind_of_training(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, job: str, given: dict[str, Any]
) -> None:
    compare(ranks, tmp_path, layout, job, **given)


@on_ranks(layout=PP2)
def test_all_ranks_copy_under_a_new_plan_when_shards_of_one_have_changed(layout: MatrixLayout, tmp_path: Path) -> None:
    """The last rank lacks a state in the first save, as one that is created in the second step."""
    from paddleformers_fc.trainer import save

    roles, found = save._roles, []
    for name, options in (("in", {}), ("beside", ASYNC)):
        trainer = flex_trainer(layout.to_json(), str(tmp_path / name), {**EVERY_STEP, **options})

        def without_one(*args: Any, trainer: Any = trainer) -> Any:
            held = roles(*args)
            if os.environ["PADDLE_TRAINER_ID"] == "1" and trainer.state.global_step < 2:
                states = dict(held["optimizer_state"])
                del states[max(states)]
                held = {**held, "optimizer_state": states}
            return held

        save._roles = without_one
        trainer.train()
        found.append((outcome(trainer), all_contents(tmp_path / name)))
    assert found[0] == found[1]


def change_meanwhile(output_dir: Path, options: dict[str, Any]) -> None:
    """Train and save; in the pass after the first save all that its documents describe changes, before their encoding.

    A save in the step has encoded them then.
    """
    import random

    import numpy as np
    from paddleformers.generation import GenerationConfig
    from paddleformers.trainer import TrainerCallback
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from paddleformers_fc import FlexTrainer
    from paddleformers_fc.trainer import save as async_save

    changed, capture = threading.Event(), async_save.capture_files

    def encoded_late(trainer: Any) -> Any:
        encode = capture(trainer)
        return lambda: (changed.wait(LONG), encode())[1]

    class CopiesFiles(FlexTrainer):
        def copy_custom_files(self, output_dir: str) -> None:
            (Path(output_dir) / "notes.txt").write_text(self.args.copy_custom_file_list)

    class Change(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            state.trial_params = {}

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step != 1:
                return
            config = trainer.model.config
            config.task_specific_params["task"]["beams"] = config.bos_token_id = 7
            trainer.model.generation_config.temperature = 0.25
            trainer.tokenizer.add_tokens(["later"])
            args.copy_custom_file_list, args.seed = "later", 1234
            args.flex_allow_config_changes.append("rope_theta")
            state.trial_name, state.trial_params["later"] = "later", True
            random.random()
            np.random.random()
            changed.set()

    async_save.capture_files = encoded_late
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"w": 0, "[U]": 1}, "[U]")))
    given = {**EVERY_STEP, "max_steps": 2, **options}
    trainer = flex_trainer(
        SINGLE.to_json(), str(output_dir), given, cls=CopiesFiles, callbacks=[Change()], tokenizer=tokenizer
    )
    trainer.args.copy_custom_file_list = "at the step"
    trainer.model.config.task_specific_params = {"task": {"beams": 3}}
    trainer.model.generation_config = GenerationConfig(temperature=0.5)
    trainer.train()


def test_the_documents_of_a_save_describe_its_step_whatever_a_script_changes_during_it(
    ranks: ForkServer, tmp_path: Path
) -> None:
    found = []
    for name, options in (("in", {}), ("beside", ASYNC)):
        run_on_ranks(ranks, 1, change_meanwhile, output_dir=tmp_path / name, options=options)
        found.append([documents(tmp_path / name / f"checkpoint-{step}") for step in (1, 2)])
    first, second = found[0]
    assert [name for name in first if first[name] == second[name]] == []
    assert found[1] == found[0]


def documents(checkpoint: Path) -> dict[str, Any]:
    """The small files that change within the run, of the options those that are the same in runs of all kinds."""
    options = json.loads((checkpoint / "trainer" / "arguments.json").read_text())
    names = ("config.json", "generation_config.json", "notes.txt", "tokenizer.json", "trainer/state.json")
    return {
        **{name: (checkpoint / name).read_text() for name in (*names, "trainer/rng-00000.json")},
        "options": {key: options[key] for key in ("seed", "flex_allow_config_changes")},
    }


# ---- Plan and memory.


def note_preparations(layout: MatrixLayout, output_dir: Path, resume: Path | None) -> list[str]:
    """Train; where saves were planned and memory for snapshots was allocated."""
    from paddleformers_fc.execute import save
    from paddleformers_fc.execute.async_snapshot import SnapshotBuffer
    from paddleformers_fc.trainer.save import AsyncSaves

    plan, reserve, begin = save.new_plan, SnapshotBuffer.reserve, AsyncSaves.save
    noted, where = [], ["before training"]

    def plan_and_note(*args: Any) -> Any:
        noted.append(f"planned {where[0]}")
        return plan(*args)

    def reserve_and_note(self: Any, *args: Any) -> bool:
        is_new = reserve(self, *args)
        noted.extend([f"allocated {where[0]}"] if is_new else [])
        return is_new

    def save_and_note(self: Any, *args: Any) -> None:
        where[0] = "in a save"
        begin(self, *args)

    save.new_plan, SnapshotBuffer.reserve, AsyncSaves.save = plan_and_note, reserve_and_note, save_and_note
    model = {"model_type": "ernie4_5_moe"} if layout.ep > 1 else {}
    trainer = flex_trainer(layout.to_json(), str(output_dir), {**EVERY_STEP, **ASYNC, **AVERAGED}, **model)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return noted


@pytest.mark.parametrize(
    "layout",
    [SINGLE, *(pytest.param(one, marks=pytest.mark.slow) for one in (PP2, EP2, SD2V1, SD2S3, bf16(SD2V2)))],
    ids=lambda layout: layout.name,
)
def test_saves_are_planned_and_their_memory_is_allocated_before_training(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    for name, resume in (("new", None), ("resumed", tmp_path / "new" / "checkpoint-2")):
        given = {"layout": layout, "output_dir": tmp_path / name, "resume": resume}
        for noted in run_on_ranks(ranks, layout.nproc, note_preparations, **given):
            assert noted == ["planned before training", "allocated before training"]


@on_ranks(layout=DP2)
def test_a_lack_of_memory_on_one_rank_is_an_error_of_all_ranks_before_the_first_step(
    layout: MatrixLayout, tmp_path: Path
) -> None:
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
    trainer = flex_trainer(layout.to_json(), str(tmp_path), {**EVERY_STEP, **ASYNC})
    with pytest.raises(FlexError, match="Asynchronous saves of this process need") as caught:
        trainer.train()
    assert all(text in caught.value.render() for text in ("Cannot allocate memory", "rank 1"))
    assert trainer.state.global_step == 0


# ---- What training sees.


def with_events(layout: MatrixLayout, output_dir: Path, arguments: dict[str, Any], hold: bool) -> dict[str, Any]:
    """Train and evaluate; what callbacks and reporters see of every save, in order.

    Args:
        hold: whether every step but the first begins when the save of the one before can be reported.
    """
    from paddleformers.trainer import TrainerCallback

    from paddleformers_fc import FlexCheckpointCallback
    from paddleformers_fc.trainer.session import session_of

    seen: list[Any] = []

    class Listener(FlexCheckpointCallback):
        def on_checkpoint_saved(self, args: Any, report: Any) -> None:
            seen.append(["saved", report.step, (Path(report.directory) / MANIFEST_NAME).is_file()])

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            best, there = state.best_model_checkpoint, Path(args.output_dir) / f"checkpoint-{state.global_step}"
            found = [
                best and Path(best).name,
                best is None or Path(best).is_dir(),
                state.best_metric,
                len(state.log_history),
                (there / MANIFEST_NAME).is_file(),
            ]
            seen.append(["on_save", state.global_step, *found])

    class Hold(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saves = session_of(trainer).saver
            while hold and saves.under_way:
                saves.advance(session_of(trainer))

    given = {"callbacks": [Listener(), Hold()], "eval_dataset": few_samples()}
    trainer = flex_trainer(layout.to_json(), str(output_dir), arguments, **given)
    trainer.train()
    state = trainer.state
    best = state.best_model_checkpoint
    return {**outcome(trainer), "seen": seen, "best": best and Path(best).name, "metric": state.best_metric}


def listened(
    ranks: ForkServer, output_dir: Path, layout: MatrixLayout, hold: bool = False, **arguments: Any
) -> dict[str, Any]:
    given = {"layout": layout, "output_dir": output_dir, "arguments": arguments, "hold": hold}
    first, *others = run_on_ranks(ranks, layout.nproc, with_events, **given)
    assert all(rank == first for rank in others)
    return dict(first)


def test_a_save_that_is_due_where_the_last_one_is_reported_is_made(ranks: ForkServer, tmp_path: Path) -> None:
    found = listened(ranks, tmp_path, SINGLE, hold=True, **EVERY_STEP, **ASYNC)
    steps = list(range(1, 4))
    assert sorted(all_contents(tmp_path)) == [f"checkpoint-{step}" for step in steps]
    assert [one[:2] for one in found["seen"]] == [[event, step] for step in steps for event in ("saved", "on_save")]


@on_ranks(layout=SINGLE)
def test_a_save_is_committed_during_an_evaluation_and_reported_at_the_next_step_end(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    """Each batch of an evaluation waits for what the thread of a save does."""
    from paddleformers_fc import FlexCheckpointCallback
    from paddleformers_fc.trainer.session import session_of

    seen: list[tuple[Any, ...]] = []

    class Listener(FlexCheckpointCallback):
        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saves = session_of(trainer).saver
            if saves.under_way:
                saves._save.done.exception()
            if not seen and any(Path(args.output_dir).glob("checkpoint-*")):
                seen.append(("committed", state.global_step))

        def on_checkpoint_saved(self, args: Any, report: Any) -> None:
            seen.append(("saved", report.step, trainer.state.global_step))

    evaluated = {"evaluation_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 1}
    given = {"max_steps": 4, "save_steps": 2, **evaluated, **ASYNC}
    samples = few_samples()
    trainer = flex_trainer(layout.to_json(), str(tmp_path), given, callbacks=[Listener()], eval_dataset=samples)
    trainer.train()
    assert seen == [("committed", 3), ("saved", 2, 4), ("saved", 4, 4)]


def names_and_states(output_dir: Path) -> dict[str, Any]:
    """Every name in the output directory, and the Trainer's states without times and places."""
    found: dict[str, Any] = {path.name: None for path in output_dir.iterdir()}
    for path in output_dir.glob("checkpoint-*"):
        state = json.loads((path / "trainer" / "state.json").read_text())
        best = state["best_model_checkpoint"]
        found[path.name] = {
            **state,
            "best_model_checkpoint": best and Path(best).name,
            "log_history": [
                {key: value for key, value in line.items() if not any(one in key for one in TIMES)}
                for line in state["log_history"]
            ],
        }
    return found


TIMES = ("runtime", "per_second")
"""Parts of the names of measurements."""

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
def test_callbacks_and_the_disk_are_as_after_saves_in_the_steps(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, run: str
) -> None:
    found = [
        listened(ranks, tmp_path / name, layout, **RUNS[run], **options)
        for name, options in (("in", {}), ("beside", ASYNC))
    ]
    assert found[0] == found[1]
    assert all(event[-1] for event in found[1]["seen"]), "only committed checkpoints are reported"
    assert names_and_states(tmp_path / "in") == names_and_states(tmp_path / "beside")


@on_ranks(layout=DP2)
def test_saves_open_no_group_and_no_connection_and_their_threads_never_communicate(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    import paddle
    from paddle.base import core

    from paddleformers_fc.distributed.channel import PaddleChannel
    from paddleformers_fc.distributed.communicator import Communicator
    from paddleformers_fc.distributed.store_client import StoreClient
    from paddleformers_fc.trainer.save import AsyncSaves

    exchanges: list[int] = []
    threads: set[str] = set()
    opened: list[str] = []
    save = AsyncSaves.save

    def noting(native: Callable[..., Any], is_exchange: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            threads.add(threading.current_thread().name)
            if is_exchange and exchanges:
                exchanges[-1] += 1
            return native(*args, **kwargs)

        return call

    def opening(native: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            opened.append(name)
            return native(*args, **kwargs)

        return call

    def save_and_count(self: Any, *args: Any) -> None:
        exchanges.append(0)
        save(self, *args)

    AsyncSaves.save = save_and_count
    for kind, names in ((Communicator, ["gather"]), (PaddleChannel, ["all_to_all"]), (StoreClient, ["add", "wait"])):
        for name in names:
            setattr(kind, name, noting(getattr(kind, name), kind is not StoreClient))
    given = {**EVERY_STEP, "max_steps": 4, **ASYNC, **AVERAGED, "save_total_limit": 2}
    trainer = flex_trainer(layout.to_json(), str(tmp_path), given)
    StoreClient.__init__ = opening(StoreClient.__init__, "connection")
    paddle.distributed.new_group = opening(paddle.distributed.new_group, "group")
    core.ProcessGroupGloo.create = opening(core.ProcessGroupGloo.create, "group")
    trainer.train()
    assert (opened, threads) == ([], {"MainThread"})
    # Preparing, looking for the directory, writing, committing, deleting.
    assert exchanges[1:3] == [5, 5]


@on_ranks(layout=SINGLE)
def test_saves_are_committed_in_their_order_and_a_further_one_waits(layout: MatrixLayout, tmp_path: Path) -> None:
    """The first save is not written before the second one waits for it."""
    from paddleformers_fc.execute import save
    from paddleformers_fc.trainer import save as async_save
    from paddleformers_fc.trainer.save import AsyncSaves

    waits, committed, captured = threading.Event(), [], []
    write, wait, report = save._write_files, AsyncSaves._wait, async_save.report_save

    def write_held(planned: Any, *args: Any) -> Any:
        if planned.part.job.step == 1:
            assert waits.wait(LONG)
        return write(planned, *args)

    def report_and_note(session: Any, prepared: Any, *args: Any) -> None:
        committed.append(prepared.step)
        report(session, prepared, *args)

    def wait_and_note(self: Any, session: Any, why: str) -> None:
        if session.trainer.state.global_step == 2 and self._save is not None and self._save.prepared.step == 1:
            captured.append(not session.barrier._reads)
            waits.set()
        wait(self, session, why)

    save._write_files, AsyncSaves._wait, async_save.report_save = write_held, wait_and_note, report_and_note
    with logged() as lines:
        flex_trainer(layout.to_json(), str(tmp_path), {**EVERY_STEP, **ASYNC}).train()
    assert (committed, captured) == ([1, 2, 3], [True])
    assert any(" s for the save of step 1, before step 2 can be saved." in line for line in lines)


# ---- Errors.


def fail_and_go_on(layout: MatrixLayout, output_dir: Path, kind: str, victim: int) -> list[Any]:
    """Train; the second save fails on one rank. Then train on in the same Trainer from the newest checkpoint.

    Returns:
        the error and its cause, the step at which it was raised, and what was saved then.
    """
    from paddleformers_fc.execute.async_snapshot import SnapshotCopy
    from tests.crash.net import Net, Open, Operation, cast

    plain = flex_trainer(layout.to_json(), str(output_dir / "plain"), EVERY_STEP)
    plain.train()
    has_fault = [os.environ.get("PADDLE_TRAINER_ID", "0") == str(victim)]
    copy, copies = SnapshotCopy.finish, Counter[str]()

    class Refuse(Open):
        def before(self, operation: Operation) -> None:
            wanted = {"disk full": "write", "read-only": "mkdir"}.get(kind)
            if has_fault[0] and operation.kind == wanted and "checkpoint-2.unfinished" in operation.path:
                number = errno.ENOSPC if wanted == "write" else errno.EROFS
                raise OSError(number, os.strerror(number), operation.path)

    def broken(self: Any) -> Any:
        copies["made"] += 1
        if kind == "copy" and has_fault[0] and copies["made"] == 2:
            raise ValueError("a broken copy")
        return copy(self)

    SnapshotCopy.finish = broken
    out = output_dir / "broken"
    trainer = flex_trainer(layout.to_json(), str(out), {**EVERY_STEP, **ASYNC})
    with cast(Net(Refuse())):
        with pytest.raises(FlexError) as caught:
            trainer.train()
        has_fault[0] = False
        found = [
            caught.value.render(),
            repr(caught.value.__cause__),
            trainer.state.global_step,
            sorted(path.name for path in out.glob("checkpoint-*")),
        ]
        trainer.losses.clear()
        trainer.train(resume_from_checkpoint=True)
    assert trainer.losses == plain.losses[1:]
    return found


@pytest.mark.parametrize(
    ("layout", "kind", "victim", "text"),
    [
        (DP2, "disk full", 1, "No space left on device"),
        pytest.param(SINGLE, "read-only", 0, "Read-only file system", marks=pytest.mark.slow),
        pytest.param(DP2, "copy", 1, "a broken copy", marks=pytest.mark.slow),
    ],
    ids=["disk full", "read-only", "copy"],
)
def test_an_error_of_a_save_is_raised_on_all_ranks_at_one_step_and_a_later_run_saves(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, kind: str, victim: int, text: str
) -> None:
    given = {"layout": layout, "output_dir": tmp_path, "kind": kind, "victim": victim}
    found = run_on_ranks(ranks, layout.nproc, fail_and_go_on, **given)
    assert len({(rendered, step) for rendered, _, step, _ in found}) == 1
    assert found[0][-1] == ["checkpoint-1"]
    rendered, cause, step, _ = found[victim]
    assert text in rendered
    assert cause != "None" or layout.nproc == 1
    assert step >= 2
    assert all_contents(tmp_path / "broken") == all_contents(tmp_path / "plain")


@pytest.mark.parametrize(
    ("layout", "victims", "kind"),
    [(DP2, [0, 1], "KeyboardInterrupt"), pytest.param(DP2, [1], "KeyError", marks=pytest.mark.slow)],
    ids=["all", "one of two"],
)
def test_a_save_is_committed_before_an_error_of_training_on_all_ranks_ends_the_job(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, victims: list[int], kind: str
) -> None:
    given = {"at": 2, "victims": victims, "kind": kind, **settings(layout, tmp_path, **EVERY_STEP, **ASYNC)}
    ran = ranks.attempt(f"{BESIDE}:break_off", layout.nproc, given)
    committed = [1, 2]
    if len(victims) == layout.nproc:
        assert ran.values == ({"error": kind, "committed": True},) * layout.nproc
    else:
        assert not ran.ok
        committed = [1]  # The other rank waits for this one in its step.
        assert (
            "checkpoint-2 may not be committed: training has failed on some ranks" in ran.logs[victims[0]].read_text()
        )
    checkpoint = tmp_path / f"checkpoint-{committed[-1]}"
    verify_files(checkpoint, read_manifest(checkpoint), "full")
    # A rank that ends alone leaves the staging directory of another one, as a crash does.
    found = [name for name in sorted(all_contents(tmp_path)) if not name.startswith(".")]
    assert found == [f"checkpoint-{step}" for step in committed]
