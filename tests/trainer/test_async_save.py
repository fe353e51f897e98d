"""Saves beside training: what they write, what training sees of them, and what it waits for."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.storage.checksum import INDEX_NAME
from paddleformers_fc.storage.manifest import MANIFEST_NAME, read_manifest, verify_files
from tests.harness.tiny import DP2, EP2, PP2, SD2S2, SD2S3, SD2V1, SD2V2, SINGLE, TP2, MatrixLayout
from tests.trainer.jobs import TO_BEST
from tests.trainer.test_trainer import bf16, settings
from verification.forkserver import ForkServer

JOBS = "tests.trainer.jobs"
BESIDE = "tests.trainer.beside_jobs"
EVERY_STEP = {"max_steps": 4, "save_steps": 1}
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


@pytest.mark.parametrize(
    ("layout", "arguments"),
    [(SINGLE, {**AVERAGED, **ACCUMULATED}), (bf16(SD2V2), AVERAGED)],
    ids=["one process, accumulation", "bfloat16, split_param"],
)
def test_a_late_copy_is_that_of_the_saved_step(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, arguments: dict[str, Any]
) -> None:
    compare(ranks, tmp_path, layout, arguments=arguments)


@pytest.mark.parametrize(
    "layout", [SINGLE, pytest.param(bf16(SD2V2), marks=pytest.mark.slow)], ids=lambda one: one.name
)
def test_a_save_beside_an_evaluation_of_averages_has_the_trained_weights(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    compare(ranks, tmp_path, layout, "tests.trainer.ema_jobs:swap_between_steps", arguments=AVERAGED)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{}, ACCUMULATED, AVERAGED], ids=["plain", "accumulation", "average"])
@pytest.mark.parametrize(
    "layout",
    [DP2, TP2, PP2, EP2, SD2V1, SD2V2, SD2S2, SD2S3, bf16(TP2), bf16(SD2V1), bf16(SD2S2), bf16(SD2S3)],
    ids=lambda layout: layout.name,
)
def test_a_late_copy_is_that_of_the_saved_step_under_every_layout(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, arguments: dict[str, Any]
) -> None:
    if layout.ep > 1:
        compare(ranks, tmp_path, layout, arguments=arguments, model_type="ernie4_5_moe")
    else:
        compare(ranks, tmp_path, layout, arguments=arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "job", "given"),
    [
        (DP2, "tests.trainer.lora_jobs:run", {}),
        (TP2, "tests.trainer.lora_jobs:run", {"arguments": AVERAGED}),
        (SD2V2, f"{JOBS}:run_with_frozen", {"frozen": ["model.embed_tokens.weight", "model.norm.weight"]}),
        (SINGLE, f"{JOBS}:run_past_a_layer", {}),
        (SINGLE, f"{JOBS}:run_with_scaler", {"initial": 4.0}),
        (bf16(SINGLE), f"{JOBS}:run", {"arguments": {"tensorwise_offload_optimizer": True}}),
    ],
    ids=["LoRA", "LoRA, average", "frozen", "unused", "scaler", "offloaded"],
)
def test_a_late_copy_is_that_of_the_saved_step_of_every_kind_of_training(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, job: str, given: dict[str, Any]
) -> None:
    compare(ranks, tmp_path, layout, job, **given)


@pytest.mark.parametrize("odd", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_all_ranks_copy_under_a_new_plan_when_shards_of_one_have_changed(
    ranks: ForkServer, tmp_path: Path, odd: int
) -> None:
    found = []
    for name, options in (("in", {}), ("beside", ASYNC)):
        given = {"odd": odd, "at": 3, **settings(PP2, tmp_path / name, **EVERY_STEP, **options)}
        ran = ranks.run(f"{BESIDE}:change_shards", 2, given)
        found.append((all_contents(tmp_path / name), [rank["losses"] for rank in ran.values]))
    assert found[0] == found[1]


def test_the_documents_of_a_save_describe_its_step_whatever_a_script_changes_during_it(
    ranks: ForkServer, tmp_path: Path
) -> None:
    found = []
    for name, options in (("in", {}), ("beside", ASYNC)):
        given = settings(SINGLE, tmp_path / name, **{**EVERY_STEP, "max_steps": 2}, **options)
        ranks.run(f"{BESIDE}:change_meanwhile", 1, given)
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

AHEAD = ["planned before training", "allocated before training"]


def preparations(
    ranks: ForkServer, output_dir: Path, layout: MatrixLayout, job: str = f"{JOBS}:run", **given: Any
) -> list[list[str]]:
    arguments = {**EVERY_STEP, **ASYNC, **given.pop("arguments", {})}
    job_settings = {"job": job, **settings(layout, output_dir, **arguments), **given}
    return list(ranks.run(f"{BESIDE}:note_preparations", layout.nproc, job_settings).values)


@pytest.mark.parametrize(
    "layout",
    [
        SINGLE,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (DP2, TP2, PP2, EP2, SD2V1, SD2V2, SD2S2, SD2S3)),
        *(pytest.param(bf16(one), marks=pytest.mark.slow) for one in (SINGLE, TP2, SD2V1, SD2S2, SD2S3)),
        bf16(SD2V2),
    ],
    ids=lambda layout: layout.name,
)
def test_saves_are_planned_and_their_memory_is_allocated_before_training(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    model = {"model_type": "ernie4_5_moe"} if layout.ep > 1 else {}
    found = preparations(ranks, tmp_path / "new", layout, arguments=AVERAGED, **model)
    assert found == [AHEAD] * layout.nproc
    given = {"resume": str(tmp_path / "new" / "checkpoint-2"), **model}
    found = preparations(ranks, tmp_path / "resumed", layout, arguments=AVERAGED, **given)
    assert found == [AHEAD] * layout.nproc


def test_a_lack_of_memory_on_one_rank_is_an_error_of_all_ranks_before_the_first_step(
    ranks: ForkServer, tmp_path: Path
) -> None:
    given = {"victim": 1, **settings(DP2, tmp_path, **EVERY_STEP, **ASYNC)}
    for found in ranks.run(f"{BESIDE}:train_without_memory", 2, given).values:
        assert "Asynchronous saves of this process need" in found["error"]
        assert "Cannot allocate memory" in found["error"]
        assert "rank 1" in found["error"]
        assert found["step"] == 0


# ---- What training sees.


def listened(ranks: ForkServer, output_dir: Path, layout: MatrixLayout, **given: Any) -> Any:
    hold = given.pop("hold", False)
    result = ranks.run(f"{BESIDE}:with_events", layout.nproc, {"hold": hold, **settings(layout, output_dir, **given)})
    assert all(rank == result.values[0] for rank in result.values[1:])
    return result.values[0]


def test_a_save_that_is_due_where_the_last_one_is_reported_is_made(ranks: ForkServer, tmp_path: Path) -> None:
    found = listened(ranks, tmp_path, SINGLE, hold=True, **EVERY_STEP, **ASYNC)
    steps = list(range(1, 5))
    assert sorted(all_contents(tmp_path)) == [f"checkpoint-{step}" for step in steps]
    assert [one[:2] for one in found["seen"]] == [[event, step] for step in steps for event in ("saved", "on_save")]


def test_a_save_is_committed_during_an_evaluation_and_reported_at_the_next_step_end(
    ranks: ForkServer, tmp_path: Path
) -> None:
    evaluated = {"evaluation_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 1}
    given = settings(SINGLE, tmp_path, max_steps=4, save_steps=2, **evaluated, **ASYNC)
    (seen,) = ranks.run(f"{BESIDE}:commit_in_evaluation", 1, given).values
    assert seen == [["committed", 3], ["saved", 2, 4], ["saved", 4, 4]]


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
    "best": {**TO_BEST, "max_steps": 4, "learning_rate": 0.01},
    "worse": {**TO_BEST, "max_steps": 4},
    "limit": {"max_steps": 5, "save_steps": 1, "save_total_limit": 2, "flex_verify": "full"},
}


@pytest.mark.parametrize(
    ("layout", "run"),
    [
        (SINGLE, "best"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [(SINGLE, "worse"), (DP2, "best"), (TP2, "limit")]),
    ],
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


def test_saves_open_no_group_and_no_connection_and_their_threads_never_communicate(
    ranks: ForkServer, tmp_path: Path
) -> None:
    given = settings(DP2, tmp_path, **EVERY_STEP, **ASYNC, **AVERAGED, save_total_limit=2)
    for found in ranks.run(f"{BESIDE}:note_communication", 2, given).values:
        assert found["opened"] == []
        assert found["threads"] == ["MainThread"]
        # Preparing, looking for the directory, writing, committing, deleting.
        assert found["exchanges"][1:3] == [5, 5]


def test_saves_are_committed_in_their_order_and_a_further_one_waits(ranks: ForkServer, tmp_path: Path) -> None:
    given = {"held": 1, "until": 2, **settings(SINGLE, tmp_path, **EVERY_STEP, **ASYNC)}
    (found,) = ranks.run(f"{BESIDE}:hold_the_first_save", 1, given).values
    assert found["committed"] == [1, 2, 3, 4]
    assert found["captured"] == [True]
    assert any(" s for the save of step 1, before step 2 can be saved." in line for line in found["lines"])


# ---- Errors.


@pytest.mark.parametrize(
    ("layout", "kind", "victim", "text"),
    [
        (SINGLE, "read-only", 0, "Read-only file system"),
        (DP2, "disk full", 1, "No space left on device"),
        pytest.param(SD2V2, "disk full", 0, "No space left on device", marks=pytest.mark.slow),
        pytest.param(DP2, "copy", 1, "a broken copy", marks=pytest.mark.slow),
        pytest.param(DP2, "read-only", 0, "Read-only file system", marks=pytest.mark.slow),
    ],
    ids=lambda value: value.name if isinstance(value, MatrixLayout) else str(value).replace(" ", "-"),
)
def test_an_error_of_a_save_is_raised_on_all_ranks_at_one_step_and_a_later_run_saves(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, kind: str, victim: int, text: str
) -> None:
    plain = ranks.run(f"{JOBS}:run", layout.nproc, settings(layout, tmp_path / "plain", **EVERY_STEP)).values
    out = tmp_path / "broken"
    given = {"kind": kind, "victim": victim, "step": 2, **settings(layout, out, **EVERY_STEP, **ASYNC)}
    found = ranks.run(f"{BESIDE}:fail_and_go_on", layout.nproc, given).values
    assert all(text in rank["text"] for rank in found)
    assert len({(rank["text"], rank["raised"]) for rank in found}) == 1
    assert found[victim]["cause"] != "None" or layout.nproc == 1
    assert found[0]["raised"] >= 2
    assert found[0]["there"] == ["checkpoint-1"]
    assert [rank["losses"] for rank in found] == [rank["losses"][1:] for rank in plain]
    expected = all_contents(tmp_path / "plain")
    assert all_contents(out) == expected


@pytest.mark.parametrize(
    ("layout", "victims", "kind"),
    [
        (SINGLE, [0], "KeyboardInterrupt"),
        pytest.param(DP2, [0, 1], "ValueError", marks=pytest.mark.slow),
        (DP2, [1], "KeyError"),
        pytest.param(DP2, [0], "SystemExit", marks=pytest.mark.slow),
    ],
    ids=lambda value: value.name if isinstance(value, MatrixLayout) else str(value),
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
