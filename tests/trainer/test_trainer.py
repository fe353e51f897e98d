"""The Trainer with flex checkpoints, in real processes: resuming, data, what is written, logged and reported."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddleformers_fc.errors import FormatError, OptionError, PeerError
from paddleformers_fc.execute.phases import Phases, Slowest
from paddleformers_fc.formats.flex import indexed_files, open_flex
from paddleformers_fc.storage.manifest import read_manifest
from paddleformers_fc.trainer import documents, save, session
from paddleformers_fc.trainer.options import FlexFields, check_options
from paddleformers_fc.trainer.session import SESSION, CheckpointReport, FlexCheckpointCallback, ReportFigures
from tests.harness import tiny
from tests.harness.clocks import keep_time
from tests.harness.on_ranks import job_on_ranks, on_ranks, run_on_ranks
from tests.harness.patching import precede
from tests.harness.tiny import DP2, PP2, PP2SD2V2, SD2S2, SD2S3, SD2V1, SD2V2, SINGLE, TP2, MatrixLayout
from tests.storage.serving import serving
from tests.trainer.jobs import (
    TO_BEST,
    callback,
    every_sample,
    failing,
    flex_trainer,
    logged,
    outcome,
    resume_and_save_again,
    run,
    run_and_watch_samples,
    run_past_a_layer,
    run_with_scaler,
    train_and_resume,
    trained,
)
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

SIX_STEPS = {"max_steps": 6, "save_steps": 3}


def bf16(layout: MatrixLayout) -> MatrixLayout:
    return MatrixLayout(**{**layout.to_json(), "name": f"{layout.name}-bf16", "bf16": True})


@dataclass(frozen=True)
class Saved:
    """An uninterrupted run of six steps that saved at 3 and 6: its output directory and losses."""

    output_dir: Path
    losses: list[float]

    @property
    def third(self) -> Path:
        return self.output_dir / "checkpoint-3"


def train_six(ranks: ForkServer, output_dir: Path, layout: MatrixLayout, **arguments: Any) -> Saved:
    found = run_on_ranks(ranks, layout.nproc, run, **settings(layout, output_dir, **SIX_STEPS, **arguments))
    return Saved(output_dir, found[0]["losses"])


@pytest.fixture(scope="module")
def saved(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Data parallel on two ranks, float32."""
    return train_six(ranks, tmp_path_factory.mktemp("dp2"), DP2, wandb_api_key="open sesame")


def settings(
    layout: MatrixLayout, output_dir: Path, resume: Path | str | bool | None = None, **arguments: Any
) -> dict[str, Any]:
    """The keyword arguments of a job."""
    given: dict[str, Any] = {"layout": layout, "output_dir": output_dir, "arguments": arguments}
    if resume is not None:
        given["resume"] = resume if isinstance(resume, bool) else str(resume)
    return given


# ---- Resuming. Under every layout: test_ema.py; all ways between layouts: tests/verification/matrix.


# In bfloat16, and where vectors are not sliced: tests/verification/matrix/test_strategies.py.
def test_stage_three_is_saved_as_slices_and_resumes_under_another_layout(ranks: ForkServer, tmp_path: Path) -> None:
    source = {**settings(SD2S3, tmp_path / "source", **SIX_STEPS), "segment": 32}
    whole = run_on_ranks(ranks, 2, run, **source)[0]["losses"]
    third, there = tmp_path / "source/checkpoint-3", tmp_path / "there/checkpoint-3"
    index = indexed_files(open_flex(third)).index
    paths = sorted(path for path in index.files if path.startswith("model_state/"))
    shards = [shard for path in paths for shard, *_ in index.shards(path)]
    # A vector of 64 elements is the first rank's slice, and padding on the second.
    for name, ranges in (("model.norm.weight", [(0, 64)]), ("lm_head.weight", [(0, 4096), (4096, 8192)])):
        assert [shard.flat and tuple(shard.flat) for shard in shards if shard.name == name] == ranges
    run_on_ranks(ranks, 2, resume_and_save_again, **settings(SD2V2, tmp_path / "there", third, max_steps=3))
    assert list(canonical_digests(there)) == list(canonical_digests(third))
    back = {**settings(SD2S3, tmp_path / "back", there, **SIX_STEPS), "segment": 32}
    assert run_on_ranks(ranks, 2, run, **back)[0]["losses"] == whole[3:]


@pytest.mark.parametrize(
    ("layout", "strided"),
    [(SD2S2, True), (SD2S3, True), (SD2V2, False), (bf16(SD2V2), False)],
    ids=["stage 2", "stage 3", "slices are copies", "slices are copies in bfloat16"],
)
@on_ranks()
def test_a_run_that_resumes_its_last_step_gets_back_its_states_and_trains_no_further_one(
    layout: MatrixLayout, strided: bool, tmp_path: Path
) -> None:
    """Only the owner of a state gets it, and a flattened one is filled where it lies."""
    import paddle

    # A parameter whose length is no multiple of the alignment is padded, and Paddle describes a slice of its states.
    if not strided:
        paddle.set_flags({"FLAGS_use_stride_kernel": 0})
    found = []
    for name, every, resume in (("a", 3, None), ("b", 1, tmp_path / "a/checkpoint-3")):
        trainer = trained(layout, tmp_path / name, {"max_steps": 3, "save_steps": every}, resume=resume)
        held = trainer.optimizer.state_dict()
        held.pop("LR_Scheduler")
        states = [*held.pop("master_weights", {}).values(), *held.values()]
        found.append((trainer.state.epoch, sorted(float(one.astype("float64").sum()) for one in states)))
    assert found[0] == found[1]
    assert all(found[0])
    assert not list((tmp_path / "b").glob("checkpoint-*"))


@pytest.mark.parametrize("layout", [SD2V1, SD2V2, SD2S2], ids=lambda layout: layout.name)
@on_ranks()
def test_parameters_without_gradients_take_no_states_from_their_neighbours(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    """Stage 2 then makes states on ranks that do not own a parameter, of gradients that were not reduced."""
    third = tmp_path / "whole/checkpoint-3"
    given: dict[str, Any] = {"layout": layout, "arguments": SIX_STEPS}
    whole = run_past_a_layer(output_dir=tmp_path / "whole", **given)
    again = run_past_a_layer(str(third), output_dir=tmp_path / "again", **given)
    assert again["losses"] == whole["losses"][3:]
    assert not read_manifest(third).differences


@pytest.mark.parametrize("read", ["each", "once"])
def test_a_run_resumed_from_a_url_continues_as_if_uninterrupted(
    ranks: ForkServer, saved: Saved, tmp_path: Path, read: str
) -> None:
    with serving(saved.output_dir) as served:
        given = settings(SD2V2, tmp_path, f"{served.url}/checkpoint-3", flex_read=read, **SIX_STEPS)
        found = run_on_ranks(ranks, 2, run, **given)
        assert served.ranges
    assert found[0]["losses"] == pytest.approx(saved.losses[3:], abs=1e-6)


@on_ranks(1)
def test_random_generators_come_back_as_they_were() -> None:
    import random

    import numpy as np
    import paddle
    from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

    from paddleformers_fc.trainer import rng

    get_rng_state_tracker().add("model_parallel_rng", 11)

    def draw() -> list[Any]:
        with get_rng_state_tracker().rng_state("model_parallel_rng"):
            tracked = paddle.rand([2]).tolist()
        plain = [random.random(), random.gauss(0, 1), np.random.randn(2).tolist(), paddle.rand([2]).tolist()]
        return [*plain, paddle.randperm(9).tolist(), tracked]

    draw()
    captured = rng.capture_generators(world_size=2, hybrid=True)()
    first, second = draw(), draw()
    assert rng.restore_generators(captured, "rng", world_size=2, hybrid=True, tensor_parallel=True)
    assert draw() == first != second
    assert not rng.restore_generators(captured, "rng", world_size=1, hybrid=True, tensor_parallel=True)
    with pytest.raises(FormatError) as caught:
        rng.restore_generators(b'{"world_size": 2}', "trainer/rng-00000.json", 2, True, True)
    assert caught.value.where == "trainer/rng-00000.json"
    assert draw() == second


# ---- The data of a resumed run.


def test_data_of_any_length_is_trained_once_though_ranks_and_batches_change_within_the_epoch(
    ranks: ForkServer, tmp_path: Path
) -> None:
    """The last ranks see the same samples, and one of them reads these for both."""
    count, half = 61, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    seen: list[int] = []
    resume = None
    for layout, last, given in ((SINGLE, 3, {}), (DP2, 5, half), (TP2, 9, {"distributed_dataloader": True})):
        job = settings(layout, tmp_path, resume, max_steps=last, save_steps=last, **given)
        values = run_on_ranks(ranks, layout.nproc, run_and_watch_samples, **job, count=count)
        if layout is TP2:
            assert values[0] == values[1]
            values = values[:1]
        seen += [index for indices in values for index in indices]
        resume = tmp_path / f"checkpoint-{last}"
    assert sorted(seen) == every_sample(count)
    data = json.loads((tmp_path / "checkpoint-5/trainer/data.json").read_text())
    assert (data["order"]["length"], data["order"]["samples"], data["position"]["consumed"]) == (count, count, 32)


@pytest.mark.parametrize(("micro_batch", "drop_last", "steps"), [(3, False, 4), (4, True, 2)], ids=["kept", "dropped"])
def test_an_epoch_ends_with_its_last_batch_although_upstream_counts_one_more(
    ranks: ForkServer, tmp_path: Path, micro_batch: int, drop_last: bool, steps: int
) -> None:
    # Each of two ranks has 6 or 7 of the samples, and PaddleFormers counts 7 or 8.
    arguments = {
        "max_steps": -1,
        "num_train_epochs": 2,
        "save_steps": steps // 2,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": 1,
        "dataloader_drop_last": drop_last,
    }
    count = 15 if drop_last else 13
    whole = run_on_ranks(ranks, 2, run_and_watch_samples, **settings(DP2, tmp_path, **arguments), count=count)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{steps // 2}", f"checkpoint-{steps}"}
    resumed = settings(DP2, tmp_path / "resumed", tmp_path / f"checkpoint-{steps // 2}", **arguments)
    rest = run_on_ranks(ranks, 2, run_and_watch_samples, **resumed, count=count)
    assert rest == tuple(indices[len(indices) // 2 :] for indices in whole)
    # The rest of this epoch on one rank, in the order of two, is a batch that is not full.
    arguments["per_device_train_batch_size"] = 2 * micro_batch
    last = settings(SINGLE, tmp_path / "single", tmp_path / f"checkpoint-{steps}", **arguments)
    (left,) = run_on_ranks(ranks, 1, run_and_watch_samples, **last, count=count)
    assert len(left) == (0 if drop_last else 1)


def how_far(output_dir: Path, step: int) -> tuple[Any, Any]:
    """The epoch of a checkpoint, and what it records of the data: position, batch sizes and order."""
    trainer = output_dir / f"checkpoint-{step}" / "trainer"
    state, data = (json.loads((trainer / name).read_text()) for name in ("state.json", "data.json"))
    return state["epoch"], data


FULL = {"per_device_train_batch_size": tiny.GLOBAL_BATCH, "gradient_accumulation_steps": 3}
SCHEDULE = {"lr_scheduler_type": "cosine", "warmup_steps": 2}
RAMPED = "a callback changes the batch size"
IN_FIRST, IN_SECOND = ({"epoch": epoch, "waiting": 0, "ended": False} for epoch in (0, 1))
# Of 8 passes 2 make no step. PaddleFormers adds their gradients to those of the next epoch's first step, and trains
# the batches of a pipeline with the first pass of that epoch, and so on.
EPOCHS: dict[str, tuple[MatrixLayout, dict[str, Any], dict[int, dict[str, Any]]]] = {
    "in the second round": (
        SINGLE,
        {"max_steps": 11, "save_steps": 3, **SCHEDULE},
        {3: {**IN_FIRST, "samples": 24}, 9: {**IN_SECOND, "samples": 8, "consumed": 72}},
    ),
    "passes without a step": (
        SINGLE,
        {"max_steps": 5, "save_steps": 2, "gradient_accumulation_steps": 3},
        {2: {**IN_FIRST, "samples": 48, "consumed": 48}},
    ),
    "waiting batches": (PP2, {"max_steps": 6, "save_steps": 1, **FULL}, {3: {"waiting": 2}, 5: {"waiting": 1}}),
    "at the end": (SINGLE, {"max_steps": 6, "save_strategy": "epoch", **FULL}, {2: {}, 4: {}}),
    "at the end in a pipeline": (PP2, {"max_steps": 6, "save_strategy": "epoch", **FULL}, {2: {}, 4: {}}),
    "samples left out": (
        SINGLE,
        {"max_steps": 10, "save_strategy": "epoch", "skip_data_intervals": [[7, 8]]},
        {8: {"epoch": 0, "samples": 64, "consumed": 64, "waiting": 0, "ended": True}},
    ),
    # In the middle, at the end, in the second round of a dataset that is iterated.
    "a stream": (SINGLE, {"max_steps": 11, "save_steps": 1}, {4: {}, 8: {}, 9: {}}),
    # PaddleFormers lowers it to the 8 passes of an epoch.
    "accumulation beyond the epoch": (
        SINGLE,
        {"max_steps": 3, "save_steps": 1, "gradient_accumulation_steps": 9},
        {1: {"consumed": tiny.SAMPLES}},
    ),
    RAMPED: (
        SINGLE,
        {"max_steps": 6, "save_steps": 1, "per_device_train_batch_size": 2},
        {3: {**IN_FIRST, "samples": 6}, 5: {**IN_FIRST, "samples": 14, "consumed": 14}},
    ),
}


def ramp(args: Any, state: Any, *_: Any, **__: Any) -> None:
    """Double the batch size after the third step."""
    args.gradient_accumulation_steps = 1 if state.global_step < 3 else 2


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        pytest.param(layout, name, id=name, marks=[] if name == "at the end in a pipeline" else [pytest.mark.chosen])
        for name, (layout, *_) in EPOCHS.items()
    ],
)
@on_ranks()
def test_a_run_resumes_in_its_epoch_and_saves_what_it_would_have(
    layout: MatrixLayout, case: str, tmp_path: Path
) -> None:
    from paddle.io import IterableDataset

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            samples = tiny.Samples()
            return (samples[index] for index in range(len(samples)))

    _, arguments, steps = EPOCHS[case]
    given: dict[str, Any] = {"layout": layout, **({"train_dataset": Stream()} if case == "a stream" else {})}
    if case == RAMPED:
        given["callbacks"] = [callback(on_train_begin=ramp, on_step_end=ramp)]
    with logged() as lines:
        whole, *resumed = train_and_resume(tmp_path, [*steps], arguments=arguments, **given)
    assert any("This run differs" in line for line in lines) == (case == RAMPED)
    names = {int(path.name.rpartition("-")[2]) for path in (tmp_path / "whole").glob("checkpoint-*")}
    for (step, position), again in zip(steps.items(), resumed, strict=True):
        assert how_far(tmp_path / "whole", step)[1]["position"].items() >= position.items()
        losses = [loss for loss in again["losses"] if loss]  # A run without a step logs a zero loss at its end.
        assert {**again, "losses": losses} == {**whole, "losses": whole["losses"][step:]}
        later, there = sorted(name for name in names if name > step), tmp_path / f"from-{step}"
        assert {path.name for path in there.glob("*")} == {f"checkpoint-{one}" for one in later}
        assert [how_far(there, one) for one in later] == [how_far(tmp_path / "whole", one) for one in later]
    if case == "a stream":
        for number, again in enumerate((True, False)):
            new = {"seed": 7, "ignore_data_skip": again}
            with logged() as lines:
                resume = tmp_path / "whole/checkpoint-4"
                trained(output_dir=tmp_path / str(number), arguments=new, resume=resume, **given)
            assert sum("If the order of the stream depends on seed" in line for line in lines) == number


@pytest.mark.parametrize(
    ("layout", "moment"),
    [
        *((layout, "between passes") for layout in (SINGLE, PP2, SD2S2)),
        # A pass that fails forward leaves a parameter gathered, one that fails backward has prefetched another.
        pytest.param(SD2S3, "forward", marks=pytest.mark.chosen),
        (SD2S3, "backward"),
    ],
    ids=lambda one: one.name if isinstance(one, MatrixLayout) else one,
)
@on_ranks()
def test_the_state_of_an_aborted_step_is_discarded_by_a_resume_in_the_same_process(
    layout: MatrixLayout, moment: str, tmp_path: Path
) -> None:
    def break_off(_: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step == 2 and moment == "between passes" and trainer.is_to_break:
            raise ZeroDivisionError

    batch = {"per_device_train_batch_size": 4 // layout.data_parallel, "gradient_accumulation_steps": 2}
    arguments = {"max_steps": 4, "save_steps": 1, **batch}
    whole = trained(layout, tmp_path / "once", arguments)
    trainer = flex_trainer(layout, tmp_path / "again", arguments, callbacks=[callback(on_substep_end=break_off)])
    trainer.is_to_break = True
    with contextlib.ExitStack() as stack:
        if moment != "between passes":
            layer = trainer.model.model.layers[0]
            failed = layer.self_attn.q_proj if moment == "forward" else layer.input_layernorm
            stack.enter_context(failing(failed, lambda: trainer.state.global_step == 2, moment == "backward"))
        with pytest.raises((ZeroDivisionError, OSError)):
            trainer.train()
    assert trainer.state.global_step == 2
    trainer.is_to_break = False
    trainer.losses.clear()
    # Remains of the second step's weights would show in the losses.
    trainer.train(resume_from_checkpoint=str(tmp_path / "again/checkpoint-1"))
    assert outcome(trainer) == {**outcome(whole), "losses": whole.losses[1:]}


@on_ranks(layout=SINGLE)
def test_a_save_by_a_callback_before_after_or_between_steps_is_resumed(layout: MatrixLayout, tmp_path: Path) -> None:
    """Of a resumed run before its first step, when a step ends, and after one that is skipped."""

    def save_at(step: int) -> Callable[..., object]:
        return lambda *_, **__: trainer.state.global_step == step and trainer._save_checkpoint(trainer.model)

    saving = callback(on_train_begin=save_at(2), on_step_end=save_at(2), on_step_begin=save_at(3))
    given = {"max_steps": 4, "save_steps": 4, "skip_data_intervals": [[3, 3]], "flex_ema_decay": 0.5}
    ends = []
    for number, resume in enumerate((None, "0/checkpoint-2", "1/checkpoint-2", "0/checkpoint-3")):
        trainer = flex_trainer(layout, tmp_path / str(number), given, callbacks=[saving])
        trainer.train(resume_from_checkpoint=None if resume is None else str(tmp_path / resume))
        ends.append((list(canonical_digests(tmp_path / f"{number}/checkpoint-4")), trainer.state.consumed_samples))
    assert {one.role for one in ends[0][0]} >= {"ema_state", "optimizer_state"}
    assert ends[1:] == ends[:1] * 3


@on_ranks(layout=SD2S3)
def test_stage_three_trains_a_first_layer_whose_backward_pass_is_not_the_last(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    """With images that is the embedding of texts. The tower's last backward pass prefetches it after its own one."""
    given = {"model_type": "qwen2_5_vl", "train_dataset": tiny.ImageSamples()}
    arguments = {"max_steps": 4, "save_steps": 2}
    whole, again = train_and_resume(tmp_path, [2], layout=layout, arguments=arguments, **given)
    assert again["losses"] == whole["losses"][2:]


@on_ranks(layout=SINGLE)
def test_random_generators_of_an_epochs_end_come_back_for_the_next_epoch(layout: MatrixLayout, tmp_path: Path) -> None:
    """Numbers are drawn in every pass, as dropout would. Other ranks: test_other_formats.py."""
    import random

    import paddle

    drawn: list[Any] = []
    drawing = callback(
        on_epoch_begin=lambda *_, **__: drawn.append([]),
        on_substep_end=lambda *_, **__: drawn[-1].append([random.random(), paddle.rand([1]).item()]),
    )
    given = {"max_steps": 4, "save_strategy": "epoch", **FULL}
    trained(layout, tmp_path / "once", given, callbacks=[drawing])
    with logged() as lines:
        trained(layout, tmp_path / "again", given, callbacks=[drawing], resume=tmp_path / "once/checkpoint-2")
    _, second, begun, again = drawn
    assert (len(begun), again) == (2, second)
    assert len(again) == 4
    assert not any("Random generators are not restored" in line for line in lines)


def test_the_data_may_start_from_its_beginning(ranks: ForkServer, saved: Saved, tmp_path: Path) -> None:
    given = settings(SINGLE, tmp_path, saved.third, max_steps=11, ignore_data_skip=True, seed=7)
    (indices,) = run_on_ranks(ranks, 1, run_and_watch_samples, **given)
    assert sorted(indices) == every_sample()


def test_a_run_from_the_beginning_warns_of_checkpoints_of_another_run(ranks: ForkServer, tmp_path: Path) -> None:
    given = settings(SINGLE, tmp_path, max_steps=1, save_steps=1)
    first = job_on_ranks(ranks.run, 1, run, **given)
    other = read_manifest(tmp_path / "checkpoint-1").saved_by.id
    second = job_on_ranks(ranks.run, 1, run, **given)
    assert "contains checkpoints of other runs" not in first.logs[0].read_text()
    assert f"contains checkpoints of other runs: checkpoint-1 of run {other}" in second.logs[0].read_text()


# ---- Optimizer states in buffers.


@pytest.mark.parametrize(
    ("layout", "option"),
    [
        (SD2V1, "stage1_tensor_fusion"),
        (bf16(SD2V1), "stage1_tensor_fusion"),
        # Gradients are fused for communication.
        pytest.param(bf16(SD2V1), "stage1_overlap", marks=pytest.mark.slow),
        # States do not exist before the first step.
        pytest.param(bf16(PP2SD2V2), "pp_sharding_comm_overlap", marks=pytest.mark.slow),
    ],
    ids=lambda one: one.name if isinstance(one, MatrixLayout) else one,
)
@on_ranks()
def test_a_run_whose_states_are_in_buffers_or_created_late_resumes_bit_by_bit_with_and_without_them(
    layout: MatrixLayout, option: str, tmp_path: Path
) -> None:
    whole, again = train_and_resume(tmp_path, [3], layout=layout, arguments={**SIX_STEPS, option: True})
    assert again["losses"] == whole["losses"][3:]
    last, resumed = (list(canonical_digests(tmp_path / name / "checkpoint-6")) for name in ("whole", "from-3"))
    assert resumed == last
    # Fused states are stored by parameter: a run without the option loads and saves the same, and so does one with it.
    third, hops = tmp_path / "whole/checkpoint-3", []
    if option == "stage1_tensor_fusion":
        hops = [("out", third, False), ("in", tmp_path / "out/checkpoint-3", True)]
    for name, source, is_on in hops:
        given = {"layout": layout, "output_dir": tmp_path / name, "arguments": {"max_steps": 3, option: is_on}}
        resume_and_save_again(str(source), **given)
        assert list(canonical_digests(tmp_path / name / "checkpoint-3")) == list(canonical_digests(third))


@on_ranks(layout=SINGLE)
def test_the_loss_scaler_of_a_run_continues_where_it_was(layout: MatrixLayout, tmp_path: Path) -> None:
    given: dict[str, Any] = {"layout": layout, "arguments": SIX_STEPS}
    whole = run_with_scaler(1024.0, output_dir=tmp_path / "whole", **given)
    assert whole["scaler"]["scale"] == 1024 * 2**3
    # Half way to the next doubling, with a scale other than the initial one.
    again = run_with_scaler(2.0, str(tmp_path / "whole/checkpoint-3"), output_dir=tmp_path / "again", **given)
    assert again == {"scaler": whole["scaler"], "losses": whole["losses"][3:]}


# ---- Weights without the rest of a run.


# In float32, and without optimizer states: tests/corruption/test_trainer_faults.py.
@on_ranks(layout=bf16(SD2V2))
def test_a_new_run_begins_with_the_weights_of_a_checkpoint(layout: MatrixLayout, tmp_path: Path) -> None:
    one_step = {"max_steps": 1, "save_steps": 1}
    trained(layout, tmp_path / "first", one_step)
    restarted = {**one_step, "learning_rate": 0.0, "ignore_load_lr_and_optim": True}
    trained(layout, tmp_path / "new", restarted, resume=tmp_path / "first/checkpoint-1")
    roles = ("model_state", "master_weight")
    first, new = (list(canonical_digests(tmp_path / one / "checkpoint-1", roles=roles)) for one in ("first", "new"))
    assert new == first


# ---- What is written.


def test_a_checkpoint_contains_safetensors_and_json_without_secrets(saved: Saved) -> None:
    files = {path.relative_to(saved.third).as_posix(): path for path in saved.third.rglob("*") if path.is_file()}
    assert {path.suffix for path in files.values()} == {".json", ".safetensors"}
    texts = {name: path.read_text() for name, path in files.items() if path.suffix == ".json"}
    contents = {name: json.loads(text) for name, text in texts.items()}
    assert not any("open sesame" in text for text in texts.values())
    assert {"config.json", "trainer/state.json", "trainer/rng-00001.json", "flex_checkpoint.json"} <= contents.keys()
    manifest = read_manifest(saved.third)
    assert (manifest.step, manifest.consumed_samples, manifest.world_size) == (3, 24, 2)
    assert manifest.parallel == {"dp": 2, "tp": 1, "pp": 1, "sharding": 1, "ep": 1, "sep": 1, "cp": 1}
    arguments = contents["trainer/arguments.json"]
    assert (arguments["flex_checkpoint"], arguments["max_steps"], arguments["optim"]) == (True, 6, "adamw")


def test_neither_checkpoints_nor_exports_are_written_to_a_url() -> None:
    options = FlexFields()
    options.output_dir = "https://ann:secret@host/out"  # type: ignore[attr-defined]
    check_options(options)
    options.flex_checkpoint = True
    trainer = SimpleNamespace(args=options, **{SESSION: "not read"})
    writes: dict[str, Callable[[], object]] = {
        "A checkpoint cannot be written to https://***@host/out": lambda: check_options(options),
        "An export cannot be written to memory://hf": lambda: save.save_model(trainer, pytest.fail, "memory://hf"),
        "An export cannot be written to s3://a/hf": lambda: save.save_pretrained(trainer, pytest.fail, "s3://a/hf"),
    }
    for what, write in writes.items():
        with pytest.raises(OptionError) as caught:
            write()
        assert what in caught.value.what
        assert "secret" not in caught.value.render()
        assert "upload its files" in caught.value.next_step


def test_a_password_is_not_written_into_a_checkpoint() -> None:
    arguments = {"resume_from_checkpoint": "sftp://ann:secret@host/run/checkpoint-3", "output_dir": "out"}
    written = documents.capture_arguments(SimpleNamespace(to_dict=lambda: arguments))()
    assert b"secret" not in written
    assert json.loads(written)["resume_from_checkpoint"] == "sftp://***@host/run/checkpoint-3"


def go_on_to_best(output_dir: Path, steps: int, resume: Path | None = None, undefined: int = 0) -> dict[str, Any]:
    """Train beyond the best checkpoint, up to a step; what is best, and what the model is at the end.

    Args:
        undefined: the step at which the metric is NaN.
    """
    from paddleformers_fc import FlexTrainer

    class Trainer(FlexTrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            metrics = super().evaluate(*args, **kwargs)
            return {**metrics, "eval_loss": math.nan} if self.state.global_step == undefined else metrics

    given: Mapping[str, Any] = {"cls": Trainer, "eval_dataset": tiny.Samples(), "resume": resume}
    trainer = trained(SINGLE, output_dir, {**TO_BEST, "max_steps": steps}, **given)
    best = Path(trainer.state.best_model_checkpoint)
    return {"best": trainer.state.best_metric, "checkpoint": best, "at_end": trainer.evaluate()["eval_loss"]}


@on_ranks(1)
def test_the_best_checkpoint_is_found_where_a_run_was_moved_and_replaced_where_it_is_missing(tmp_path: Path) -> None:
    first = go_on_to_best(tmp_path / "out", 3)
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    best = moved / first["checkpoint"].name
    again = go_on_to_best(moved, 4, moved / "checkpoint-3")
    assert again == {**first, "checkpoint": best}
    assert set(moved.glob("checkpoint-*")) == {best, moved / "checkpoint-4"}
    shutil.rmtree(best)
    with logged() as lines:
        other = go_on_to_best(moved, 6, moved / "checkpoint-4")
    assert other["checkpoint"].name in ("checkpoint-5", "checkpoint-6")
    assert other["at_end"] == pytest.approx(other["best"], rel=1e-5)
    assert sum(f"Missing best checkpoint: neither {best}" in line for line in lines) == 1


@on_ranks(1)
def test_a_metric_must_be_one_that_evaluations_have_and_is_never_the_best_as_nan(tmp_path: Path) -> None:
    found = go_on_to_best(tmp_path / "undefined", 3, undefined=1)
    assert found["checkpoint"].name in ("checkpoint-2", "checkpoint-3")
    assert found["at_end"] == pytest.approx(found["best"], rel=1e-5)
    assert not (tmp_path / "undefined" / "checkpoint-1").exists()
    arguments = {**TO_BEST, "load_best_model_at_end": False, "max_steps": 1}
    given: dict[str, Any] = {"eval_dataset": tiny.Samples()}
    trained(SINGLE, tmp_path / "loss", {**arguments, "metric_for_best_model": "loss"}, **given)
    with pytest.raises(OptionError, match="metric_for_best_model") as refused:
        trained(SINGLE, tmp_path / "accuracy", {**arguments, "metric_for_best_model": "accuracy"}, **given)
    assert all(name in refused.value.render() for name in ("eval_accuracy", "eval_loss"))


def test_asynchronous_exports_have_their_own_directories(ranks: ForkServer, tmp_path: Path) -> None:
    arguments = {"max_steps": 4, "save_hf_steps": 1, "save_hf_total_limit": 2}
    run_on_ranks(ranks, 2, run, **settings(DP2, tmp_path, **arguments))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf_checkpoint-3", "hf_checkpoint-4"]
    assert (tmp_path / "hf_checkpoint-4" / "model.safetensors").exists()


# ---- The callback, and waiting.


def test_a_run_under_another_layout_replaces_later_steps_and_logs_every_load_and_save_in_a_line(
    ranks: ForkServer, saved: Saved, tmp_path: Path
) -> None:
    shutil.copytree(saved.output_dir, tmp_path, dirs_exist_ok=True)
    third, sixth = tmp_path / "checkpoint-3", tmp_path / "checkpoint-6"
    names = [one.name for one in canonical_digests(sixth)]
    result = job_on_ranks(ranks.run, 2, run, **settings(TP2, tmp_path, third, **SIX_STEPS))
    assert result.values[0]["losses"] == pytest.approx(saved.losses[3:], abs=1e-6)
    assert read_manifest(sixth).parallel["tp"] == 2
    assert [one.name for one in canonical_digests(sixth)] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-6"]
    lines = result.logs[0].read_text().splitlines()
    for text in (f"Resumed step 3 (saved as dp=2, now tp=2) from {third}: ", f"Saved step 6 to {sixth}: "):
        assert sum(text in line for line in lines) == 1
    assert any(f"Resuming from {third}" in line for line in lines)
    # The mean of the losses of this run.
    (mean,) = {float(found) for line in lines for found in re.findall(r"train_loss: ([\d.]+)", line)}
    assert mean == pytest.approx(sum(result.values[0]["losses"]) / 3, abs=1e-5)
    assert any(f"Saving step 6 (tp=2) to {sixth}" in line for line in lines)
    assert not any("Saved step" in line for line in result.logs[1].read_text().splitlines())


@on_ranks(layout=SINGLE)
def test_a_callback_of_the_user_gets_the_reports_with_their_phases(layout: MatrixLayout, tmp_path: Path) -> None:
    from paddleformers.trainer.integrations import VisualDLCallback
    from visualdl import LogWriter

    reported: list[tuple[Any, ...]] = []

    def note(_: Any, report: Any) -> None:
        seconds = report.phases.seconds
        assert min(seconds.values()) >= 0
        assert sum(seconds.values()) <= report.seconds
        reported.append((report.step, report.directory.name, report.bytes > 0, *seconds))

    given: dict[str, Any] = {"callbacks": [callback(on_checkpoint_saved=note, on_checkpoint_loaded=note)]}
    reporter = VisualDLCallback(LogWriter(logdir=str(tmp_path / "curves")))
    trained(layout, tmp_path, {"max_steps": 3, "save_steps": 3}, callbacks=[*given["callbacks"], reporter])
    assert [step for step, _ in scalars(tmp_path / "curves")["train/checkpoint_save_bytes"]] == [3]
    later = {"max_steps": 4, "save_steps": 4, "flex_async_save": True}
    trained(layout, tmp_path, later, resume=tmp_path / "checkpoint-3", **given)
    of_save = ("plan", "capture", "write", "agree", "commit")
    assert reported == [
        (3, "checkpoint-3", True, *of_save),
        (3, "checkpoint-3", True, "open", "plan", "agree", "read", "finish"),
        (4, "checkpoint-4", True, *of_save),
    ]


@on_ranks(layout=DP2)
def test_no_rank_waits_longer_than_its_timeout(layout: MatrixLayout, tmp_path: Path) -> None:
    from paddleformers_fc.trainer.session import channel_of

    channel = channel_of(flex_trainer(layout, tmp_path, {"flex_timeout": 100}).args)
    if channel.rank:
        return
    keep_time(tmp_path, ranks=1)  # The other one lives until this one ends, and never waits.
    with pytest.raises(PeerError) as caught:
        channel.gather("a test", b"")
    assert "Not every rank has arrived for a test within flex_timeout: 100 s." in str(caught.value)
    assert "rank 1 did not arrive" in str(caught.value)


# ---- Figures of saves and loads in the reporters of PaddleFormers.

REPORT = CheckpointReport(
    7,
    Path("out/checkpoint-7"),
    2.0,
    10**9,
    blocked=0.5,
    phases=Phases({"plan": 0.25, "agree": 1.75}, Slowest("write", 37, 1.5)),
)

Scalars = dict[str, list[tuple[int, float]]]
"""The points of every curve: steps and values."""


def scalars(directory: Path) -> Scalars:
    """The curves that VisualDL has written."""
    from visualdl import LogReader

    found: Scalars = {}
    for file in directory.glob("vdlrecords.*"):
        reader = LogReader(file_path=str(file))
        for tag in reader.get_tags().get("scalar", ()):
            found[tag] = [(one.id, one.value) for one in reader.get_data("scalar", tag)]
    return found


@pytest.fixture
def reporting(tmp_path: Path) -> Any:
    """A Trainer's parts that are read, two steps later, with VisualDL's own callback and one for a terminal."""
    from paddleformers.trainer.integrations import VisualDLCallback
    from paddleformers.trainer.trainer_callback import PrinterCallback
    from visualdl import LogWriter

    handler = SimpleNamespace(callbacks=[PrinterCallback(), VisualDLCallback(LogWriter(logdir=str(tmp_path)))])
    state = SimpleNamespace(global_step=9, is_world_process_zero=True)
    return SimpleNamespace(args=None, state=state, control=None, model=None, callback_handler=handler)


def points(kind: str, **more: float) -> Scalars:
    """The figures of the report."""
    shared = {"bytes": 10**9, "seconds": 2.0, "gb_per_second": 0.5, "slowest_write_seconds": 1.5}
    figures = {**shared, "plan_seconds": 0.25, "agree_seconds": 1.75, **more}
    return {f"train/checkpoint_{kind}_{name}": [(7, value)] for name, value in figures.items()}


def test_a_save_is_a_point_of_every_curve_and_other_callbacks_get_no_figures(reporting: Any, tmp_path: Path) -> None:
    reporting.callback_handler.callbacks[0].on_log = lambda *_, **__: pytest.fail("called")
    ReportFigures(reporting).saved(REPORT)
    assert scalars(tmp_path) == points("save", blocked_seconds=0.5)
    assert reporting.state.global_step == 9


def test_a_load_is_reported_once_training_has_begun(reporting: Any, tmp_path: Path) -> None:
    figures = ReportFigures(reporting)
    figures.loaded(REPORT)
    assert scalars(tmp_path) == {}
    for _ in range(2):
        figures.send_loaded()
    assert scalars(tmp_path) == points("load")


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (replace(REPORT, layouts=("dp=2", "tp=2")), "Resumed step 7 (saved as dp=2, now tp=2) from out/checkpoint-7: "),
        (replace(REPORT, layouts=("", "tp=2")), "Resumed step 7 (now tp=2) from out/checkpoint-7: "),
        (replace(REPORT, layouts=None), "Resumed step 7 from out/checkpoint-7: 1 GB in 2.00 s, 500 MB/s, training"),
        (
            replace(REPORT, blocked=REPORT.seconds),
            "Resumed step 7 from out/checkpoint-7: 1 GB in 2.00 s, 500 MB/s; plan",
        ),
    ],
)
def test_the_line_of_a_report_has_the_layouts_that_are_recorded_and_for_how_long_a_save_blocked(
    monkeypatch: pytest.MonkeyPatch, report: CheckpointReport, text: str
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(session, "logger", SimpleNamespace(info=lines.append))
    FlexCheckpointCallback().on_checkpoint_loaded(SimpleNamespace(should_log=True), report)
    FlexCheckpointCallback().on_checkpoint_saved(SimpleNamespace(should_log=True), report)
    resumed, saved = lines
    assert resumed.startswith(text)
    assert saved == resumed.replace("Resumed", "Saved").replace(" from ", " to ")


class Terminal(io.StringIO):
    """Text that a terminal has shown."""

    def isatty(self) -> bool:
        return True


@on_ranks(2)
def test_saves_and_loads_show_their_bytes_on_a_terminal(tmp_path: Path) -> None:
    from paddleformers_fc import progress_display

    meters: list[Any] = []
    precede(progress_display.Meter, "__init__", meters.append)
    os.environ["TERM"] = "xterm"
    before, sys.stderr = sys.stderr, (screen := Terminal())
    try:
        train_and_resume(tmp_path, [2], layout=DP2, arguments={"max_steps": 2, "save_steps": 2})
    finally:
        sys.stderr = before
    if os.environ["PADDLE_TRAINER_ID"] == "1":
        assert (meters, "checkpoint-2 \u2026" in screen.getvalue()) == ([], False)
        return
    assert all(line in screen.getvalue() for line in ("saving checkpoint-2", "loading checkpoint-2"))
    stored = sum(path.stat().st_size for path in (tmp_path / "whole/checkpoint-2").glob("*/*.safetensors"))
    writing, reading = meters
    assert 0 < writing.expected == writing.done < stored
    assert 0 < reading.expected <= reading.done
