"""The Trainer with flex checkpoints, in real processes: saving, resuming, refusing, exporting."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.errors import FormatError, OptionError, PeerError
from paddleformers_fc.formats.flex import indexed_files, open_flex
from paddleformers_fc.storage.manifest import read_manifest
from tests.harness import tiny
from tests.harness.on_ranks import on_ranks, run_on_ranks
from tests.harness.tiny import DP2, PP2, PP2SD2V2, SD2S2, SD2S3, SD2V1, SD2V2, SINGLE, TP2, MatrixLayout
from tests.trainer.data_jobs import every_sample
from tests.trainer.jobs import TO_BEST, failing, flex_trainer, logged, outcome, train_and_resume, weights_of
from tests.trainer.lost_jobs import keep_time
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

JOBS = "tests.trainer.jobs"
DATA = "tests.trainer.data_jobs"
SIX_STEPS = {"max_steps": 6, "save_steps": 3}


def bf16(layout: MatrixLayout) -> MatrixLayout:
    return MatrixLayout(**{**layout.to_json(), "name": f"{layout.name}-bf16", "bf16": True})


class Saved:
    """An uninterrupted run of six steps that saved at 3 and 6.

    Args:
        output_dir: where.
        losses: of its six steps.
    """

    def __init__(self, output_dir: Path, losses: list[float]) -> None:
        self.output_dir = output_dir
        self.losses = losses
        self.third = output_dir / "checkpoint-3"


def train_six(ranks: ForkServer, output_dir: Path, layout: MatrixLayout, **arguments: Any) -> Saved:
    result = ranks.run(f"{JOBS}:run", layout.nproc, settings(layout, output_dir, **SIX_STEPS, **arguments))
    return Saved(output_dir, result.values[0]["losses"])


@pytest.fixture(scope="module")
def saved(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Data parallel on two ranks, float32."""
    return train_six(ranks, tmp_path_factory.mktemp("dp2"), DP2, wandb_api_key="open sesame")


@pytest.fixture(scope="module")
def saved_bf16(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Data parallel on two ranks, bfloat16 with master weights."""
    return train_six(ranks, tmp_path_factory.mktemp("dp2-bf16"), bf16(DP2))


def settings(
    layout: MatrixLayout, output_dir: Path, resume: Path | bool | None = None, **arguments: Any
) -> dict[str, Any]:
    """The keyword arguments of a job."""
    given: dict[str, Any] = {"layout": layout.to_json(), "output_dir": str(output_dir), "arguments": arguments}
    if resume is not None:
        given["resume"] = resume if isinstance(resume, bool) else str(resume)
    return given


def flat_ranges(checkpoint: Path, name: str) -> list[list[int] | None]:
    """The ranges in which a tensor of a model is stored; None for a shard that is not flattened."""
    index = indexed_files(open_flex(checkpoint)).index
    paths = sorted(path for path in index.files if path.startswith("model_state/"))
    return [shard.flat and [*shard.flat] for path in paths for shard, *_ in index.shards(path) if shard.name == name]


# ---- Resuming. Under every layout: test_ema.py; all ways between layouts: tests/verification/matrix.


@pytest.mark.parametrize("layout", [SINGLE, DP2], ids=lambda layout: layout.name)
def test_a_run_that_resumes_continues_as_if_uninterrupted(
    ranks: ForkServer, saved: Saved, tmp_path: Path, layout: MatrixLayout
) -> None:
    result = ranks.run(f"{JOBS}:run", layout.nproc, settings(layout, tmp_path, saved.third, **SIX_STEPS))
    assert result.values[0]["losses"] == pytest.approx(saved.losses[3:], abs=1e-6)
    assert result.values[0]["consumed"] == 6 * tiny.GLOBAL_BATCH
    log = "".join(one.read_text() for one in result.logs)
    assert log.count("Random generators are not restored") == (layout is SINGLE)
    assert "number of samples per step has changed" not in log


@pytest.mark.parametrize(("half", "segment"), [(False, 32), (True, tiny.SEGMENT)], ids=["float32", "bfloat16"])
def test_stage_three_is_saved_as_slices_and_resumes_under_another_layout(
    ranks: ForkServer, tmp_path: Path, half: bool, segment: int
) -> None:
    sliced, other = (bf16(layout) if half else layout for layout in (SD2S3, SD2V2))
    source = settings(sliced, tmp_path / "source", **SIX_STEPS)
    whole = ranks.run(f"{JOBS}:run", 2, {**source, "segment": segment}).values[0]["losses"]
    third = tmp_path / "source" / "checkpoint-3"
    # A vector of 64 elements is the first rank's slice, and padding on the second; above 1000 there are no vectors.
    assert (flat_ranges(third, "model.norm.weight"), flat_ranges(third, "lm_head.weight")) == (
        [[0, 64]] if segment == 32 else [None],
        [[0, 4096], [4096, 8192]],
    )
    ranks.run(f"{JOBS}:resume_and_save_again", 2, settings(other, tmp_path / "there", third, max_steps=3))
    there = tmp_path / "there" / "checkpoint-3"
    assert list(canonical_digests(there)) == list(canonical_digests(third))
    back = settings(sliced, tmp_path / "back", there, **SIX_STEPS)
    assert ranks.run(f"{JOBS}:run", 2, {**back, "segment": segment}).values[0]["losses"] == whole[3:]


@pytest.mark.parametrize("layout", [SD2S2, SD2S3], ids=lambda layout: layout.name)
@on_ranks(2)
def test_only_the_owner_of_a_state_gets_it_back(layout: MatrixLayout, tmp_path: Path) -> None:
    counts = []
    for name, resume in (("a", None), ("b", str(tmp_path / "a" / "checkpoint-3"))):
        trainer = flex_trainer(layout.to_json(), str(tmp_path / name), {"max_steps": 3, "save_steps": 3})
        trainer.train(resume_from_checkpoint=resume)
        held = trainer.optimizer.state_dict()
        states = [one for key, one in held.items() if key not in ("LR_Scheduler", "master_weights")]
        counts.append(sum(tensor.numel().item() for tensor in states))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("layout", [SD2V1, SD2V2, SD2S2], ids=lambda layout: layout.name)
def test_parameters_without_gradients_take_no_states_from_their_neighbours(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    """Stage 2 then makes states on ranks that do not own a parameter, of gradients that were not reduced."""
    job = f"{JOBS}:run_past_a_layer"
    whole = ranks.run(job, 2, settings(layout, tmp_path / "whole", **SIX_STEPS)).values[0]["losses"]
    third = tmp_path / "whole" / "checkpoint-3"
    again = ranks.run(job, 2, settings(layout, tmp_path / "again", third, **SIX_STEPS)).values[0]["losses"]
    assert again == whole[3:]
    assert not read_manifest(third).differences


@pytest.mark.parametrize("layout", [SD2V2, bf16(SD2V2)], ids=["float32", "bfloat16"])
@on_ranks(2)
def test_flattened_states_are_filled_where_they_lie_though_a_slice_of_them_is_a_copy(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    # A parameter whose length is no multiple of the alignment is padded, and Paddle describes a slice of its states.
    import paddle

    paddle.set_flags({"FLAGS_use_stride_kernel": 0})
    sums = []
    for name, resume in (("a", None), ("b", str(tmp_path / "a" / "checkpoint-3"))):
        trainer = flex_trainer(layout.to_json(), str(tmp_path / name), {"max_steps": 3, "save_steps": 3})
        trainer.train(resume_from_checkpoint=resume)
        held = trainer.optimizer.state_dict()
        held.pop("LR_Scheduler")
        states = [*held.pop("master_weights", {}).values(), *held.values()]
        sums.append([float(one.astype("float64").sum()) for one in states])
    assert sums[0] == sums[1] != []


def test_a_finished_run_trains_no_further_step(ranks: ForkServer, saved: Saved, tmp_path: Path) -> None:
    result = ranks.run(f"{JOBS}:run", 1, settings(SINGLE, tmp_path, saved.third, max_steps=3, save_steps=1))
    assert result.values[0]["losses"] == []
    assert result.values[0]["epoch"] == how_far(saved.output_dir, 3)[0] > 0
    assert not list(tmp_path.glob("checkpoint-*"))


@on_ranks(1)
def test_random_generators_come_back_as_they_were() -> None:
    import random

    import numpy as np
    import paddle
    from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

    from paddleformers_fc.trainer import documents

    get_rng_state_tracker().add("model_parallel_rng", 11)

    def draw() -> list[Any]:
        with get_rng_state_tracker().rng_state("model_parallel_rng"):
            tracked = paddle.rand([2]).tolist()
        plain = [random.random(), random.gauss(0, 1), np.random.randn(2).tolist(), paddle.rand([2]).tolist()]
        return [*plain, paddle.randperm(9).tolist(), tracked]

    draw()
    captured = documents.capture_generators(world_size=2, hybrid=True)()
    first, second = draw(), draw()
    assert documents.restore_generators(captured, "rng", world_size=2, hybrid=True, tensor_parallel=True)
    assert draw() == first != second
    assert not documents.restore_generators(captured, "rng", world_size=1, hybrid=True, tensor_parallel=True)
    with pytest.raises(FormatError) as caught:
        documents.restore_generators(b'{"world_size": 2}', "trainer/rng-00000.json", 2, True, True)
    assert caught.value.where == "trainer/rng-00000.json"
    assert draw() == second


# ---- The data of a resumed run.


@pytest.mark.parametrize(
    ("layout", "micro_batch", "accumulation"), [(SINGLE, 2, 2), (SINGLE, 4, 1), (DP2, 2, 1)], ids=["a", "b", "c"]
)
def test_another_global_batch_neither_repeats_nor_loses_a_sample(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, micro_batch: int, accumulation: int
) -> None:
    first = ranks.run(f"{DATA}:run_and_watch_samples", 2, settings(DP2, tmp_path, max_steps=3, save_steps=3))
    batch = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": accumulation}
    rest = ranks.run(
        f"{DATA}:run_and_watch_samples",
        layout.nproc,
        settings(layout, tmp_path, tmp_path / "checkpoint-3", max_steps=13, save_steps=13, **batch),
    )
    trained = [index for indices in (*first.values, *rest.values) for index in indices]
    assert sorted(trained) == every_sample()
    assert read_manifest(tmp_path / "checkpoint-13").consumed_samples == tiny.SAMPLES


def test_data_of_any_length_is_trained_once_though_its_ranks_change_within_the_epoch(
    ranks: ForkServer, tmp_path: Path
) -> None:
    """The last ranks see the same samples, and one of them reads these for both."""
    count, epoch = 61, 8
    trained: list[int] = []
    resume = None
    for layout, last, reading in ((SINGLE, 3, {}), (DP2, 5, {}), (TP2, epoch, {"distributed_dataloader": True})):
        run = settings(layout, tmp_path, resume, max_steps=last, save_steps=last, **reading)
        values = ranks.run(f"{DATA}:run_and_watch_samples", layout.nproc, {**run, "count": count}).values
        if layout is TP2:
            assert values[0] == values[1]
            values = values[:1]
        trained += [index for indices in values for index in indices]
        resume = tmp_path / f"checkpoint-{last}"
    assert sorted(trained) == every_sample(count)
    order = json.loads((tmp_path / "checkpoint-5/trainer/data.json").read_text())["order"]
    assert (order["length"], order["samples"]) == (count, count)


@pytest.mark.parametrize(("micro_batch", "drop_last", "steps"), [(3, False, 4), (4, True, 2)], ids=["kept", "dropped"])
def test_an_epoch_is_over_with_its_last_batch_though_upstream_counts_one_more(
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
    job, count = f"{DATA}:run_and_watch_samples", 15 if drop_last else 13
    whole = ranks.run(job, 2, {**settings(DP2, tmp_path, **arguments), "count": count}).values
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{steps // 2}", f"checkpoint-{steps}"}
    resumed = settings(DP2, tmp_path / "resumed", tmp_path / f"checkpoint-{steps // 2}", **arguments)
    rest = ranks.run(job, 2, {**resumed, "count": count}).values
    assert rest == tuple(indices[len(indices) // 2 :] for indices in whole)
    # The rest of this epoch on one rank, in the order of two, is a batch that is not full.
    arguments["per_device_train_batch_size"] = 2 * micro_batch
    last = settings(SINGLE, tmp_path / "single", tmp_path / f"checkpoint-{steps}", **arguments)
    (left,) = ranks.run(job, 1, {**last, "count": count}).values
    assert len(left) == (0 if drop_last else 1)


def how_far(output_dir: Path, step: int) -> tuple[Any, Any]:
    """The epoch of a checkpoint, and what it records of the data: position, batch sizes and order."""
    trainer = output_dir / f"checkpoint-{step}" / "trainer"
    state, data = (json.loads((trainer / name).read_text()) for name in ("state.json", "data.json"))
    return state["epoch"], data


FULL = {"per_device_train_batch_size": tiny.GLOBAL_BATCH, "gradient_accumulation_steps": 3}
SCHEDULE = {"lr_scheduler_type": "cosine", "warmup_steps": 2}
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
    # PaddleFormers lowers it to the 8 passes of an epoch.
    "accumulation beyond the epoch": (
        SINGLE,
        {"max_steps": 3, "save_steps": 1, "gradient_accumulation_steps": 9},
        {1: {"consumed": tiny.SAMPLES}},
    ),
}


@pytest.mark.parametrize(
    ("layout", "arguments", "steps"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.chosen] if name != "at the end in a pipeline" else [])
        for name, case in EPOCHS.items()
    ],
)
def test_a_run_resumes_in_its_epoch_and_saves_what_it_would_have(
    ranks: ForkServer,
    tmp_path: Path,
    layout: MatrixLayout,
    arguments: dict[str, Any],
    steps: dict[int, dict[str, Any]],
) -> None:
    given = {**settings(layout, tmp_path, **arguments, evaluation_strategy="no"), "steps": [*steps]}
    result = ranks.run(f"{JOBS}:train_and_resume", layout.nproc, given)
    whole, *resumed = result.values[0]
    names = {int(path.name.rpartition("-")[2]) for path in (tmp_path / "whole").glob("checkpoint-*")}
    for (step, position), again in zip(steps.items(), resumed, strict=True):
        assert how_far(tmp_path / "whole", step)[1]["position"].items() >= position.items()
        losses = [loss for loss in again["losses"] if loss]  # An end without a step logs a zero.
        assert {**again, "losses": losses} == {**whole, "losses": whole["losses"][step:]}
        later = sorted(name for name in names if name > step)
        assert {path.name for path in (tmp_path / f"from-{step}").glob("*")} == {f"checkpoint-{one}" for one in later}
        assert [how_far(tmp_path / f"from-{step}", one) for one in later] == [
            how_far(tmp_path / "whole", one) for one in later
        ]
    assert "This run differs" not in result.logs[0].read_text()


@on_ranks(layout=SINGLE)
def test_a_stream_resumes_with_the_next_sample_and_begins_again_at_its_end(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    from paddle.io import IterableDataset

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            samples = tiny.Samples()
            return (samples[index] for index in range(len(samples)))

    assert tiny.SAMPLES == 8 * tiny.GLOBAL_BATCH
    steps = (4, 8, 9)  # In the middle, at the end, in the second round.
    given = {"layout": layout.to_json(), "train_dataset": Stream()}
    with logged() as lines:
        whole, *resumed = train_and_resume(str(tmp_path), steps, arguments={"max_steps": 11, "save_steps": 1}, **given)
    assert len(whole["losses"]) == 11
    for step, again in zip(steps, resumed, strict=True):
        assert again == {**whole, "losses": whole["losses"][step:]}
        for later in range(step + 1, 12):
            assert how_far(tmp_path / f"from-{step}", later) == how_far(tmp_path / "whole", later)
    reordered = "If the order of the stream depends on seed"
    assert not any(reordered in line for line in lines)
    other = flex_trainer(output_dir=str(tmp_path / "other"), arguments={"max_steps": 5, "seed": 7}, **given)
    with logged() as lines:
        other.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert sum(reordered in line for line in lines) == 1


def break_off_and_resume(layout: MatrixLayout, output_dir: Path) -> None:
    from paddleformers.trainer import TrainerCallback

    class BreakOff(TrainerCallback):
        broken = False

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2 and not self.broken:
                self.broken = True
                raise KeyError("broken off")

    ranks_with_data = 1 if layout in (SINGLE, PP2) else 2
    batch = {"per_device_train_batch_size": 4 // ranks_with_data, "gradient_accumulation_steps": 2}
    arguments = {"max_steps": 4, "save_steps": 1, **batch}
    whole = flex_trainer(layout.to_json(), str(output_dir / "once"), arguments)
    whole.train()
    trainer = flex_trainer(layout.to_json(), str(output_dir / "again"), arguments, callbacks=[BreakOff()])
    with contextlib.suppress(KeyError):
        trainer.train()
    assert trainer.state.global_step == 2
    trainer.losses.clear()
    trainer.train(resume_from_checkpoint=True)
    assert outcome(trainer) == {**outcome(whole), "losses": whole.losses[2:]}


@pytest.mark.parametrize(
    "layout",
    [SINGLE, PP2, SD2S2, pytest.param(SD2S3, marks=pytest.mark.chosen)],
    ids=lambda layout: layout.name,
)
def test_a_step_that_broke_off_leaves_nothing_to_a_resume_in_the_same_process(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    run_on_ranks(ranks, layout.nproc, break_off_and_resume, layout=layout, output_dir=tmp_path)


@on_ranks(layout=SINGLE)
def test_what_a_resumed_run_saves_before_its_first_step_is_resumed(layout: MatrixLayout, tmp_path: Path) -> None:
    from paddleformers.trainer import TrainerCallback

    class SaveAtOnce(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step:
                trainer._save_checkpoint(trainer.model)

    losses: list[list[float]] = []
    resume = None
    for name in ("first", "second", "third"):
        given = {"max_steps": 3, "save_steps": 2 if name == "first" else 100}
        trainer = flex_trainer(layout.to_json(), str(tmp_path / name), given, callbacks=[SaveAtOnce()])
        trainer.train(resume_from_checkpoint=resume)
        losses.append(trainer.losses)
        resume = str(tmp_path / name / "checkpoint-2")
    assert losses[1] == losses[2] == losses[0][2:]


@on_ranks(layout=SINGLE)
def test_what_a_callback_saves_when_a_step_ends_or_after_a_skipped_one_is_resumed(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    from paddleformers.trainer import TrainerCallback

    class SaveFirst(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                trainer._save_checkpoint(trainer.model)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                trainer._save_checkpoint(trainer.model)

    given = {"max_steps": 4, "save_steps": 4, "skip_data_intervals": [[3, 3]], "flex_ema_decay": 0.5}
    ends = []
    for resume in (None, "checkpoint-2", "checkpoint-3"):
        source = None if resume is None else str(tmp_path / "None" / resume)
        trainer = flex_trainer(layout.to_json(), str(tmp_path / str(resume)), given, callbacks=[SaveFirst()])
        trainer.train(resume_from_checkpoint=source)
        ends.append((list(canonical_digests(tmp_path / str(resume) / "checkpoint-4")), trainer.state.consumed_samples))
    assert {one.role for one in ends[0][0]} >= {"ema_state", "optimizer_state"}
    assert ends[1] == ends[2] == ends[0]


@on_ranks(layout=SD2S3)
def test_what_a_failed_pass_has_gathered_is_not_used_after_a_resume_in_the_same_process(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    """A pass that fails forward leaves a parameter gathered, one that fails backward has prefetched another."""
    arguments = {"max_steps": 4, "save_steps": 1}
    whole = flex_trainer(layout.to_json(), str(tmp_path / "whole"), arguments)
    whole.train()
    first = str(tmp_path / "whole" / "checkpoint-1")
    trainer = flex_trainer(layout.to_json(), str(tmp_path / "again"), arguments)
    layer = trainer.model.model.layers[0]
    for failed, backward in ((layer.self_attn.q_proj, False), (layer.input_layernorm, True)):
        with (
            failing(failed, lambda: trainer.state.global_step == 2, backward),
            pytest.raises((ZeroDivisionError, OSError), match="ZeroDivisionError" if backward else ""),
        ):
            trainer.train(resume_from_checkpoint=first)
    trainer.losses.clear()
    trainer.train(resume_from_checkpoint=first)
    assert trainer.losses == whole.losses[1:]


@on_ranks(layout=SD2S3)
def test_stage_three_trains_a_first_layer_whose_backward_pass_is_not_the_last(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    """With images that is the embedding of texts. The tower's last backward pass prefetches it after its own one."""
    given = {"model_type": "qwen2_5_vl", "train_dataset": tiny.ImageSamples()}
    arguments = {"max_steps": 4, "save_steps": 2}
    whole, again = train_and_resume(str(tmp_path), [2], layout=layout.to_json(), arguments=arguments, **given)
    assert again["losses"] == whole["losses"][2:]


def draw(layout: MatrixLayout, output_dir: Path, resume: Path | None, micro_batch: int) -> list[Any]:
    """Train with numbers drawn in every pass, as dropout would; the numbers by epoch, and the warnings of a resume."""
    import random

    import paddle
    from paddleformers.trainer import TrainerCallback

    drawn: list[Any] = []

    class Draw(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            drawn.append([])

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            drawn[-1].append([random.random(), paddle.rand([1]).item()])

    batch = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": 3}
    arguments = {"max_steps": 4, "save_strategy": "epoch", **batch}
    with logged() as lines:
        trainer = flex_trainer(layout.to_json(), str(output_dir), arguments, callbacks=[Draw()])
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return [drawn, sum("Random generators are not restored" in line for line in lines)]


def test_random_generators_of_an_epochs_end_come_back_for_the_next_epoch(ranks: ForkServer, tmp_path: Path) -> None:
    def run(name: str, layout: MatrixLayout, resume: Path | None) -> Any:
        given = {"output_dir": tmp_path / name, "resume": resume, "micro_batch": tiny.GLOBAL_BATCH // layout.nproc}
        return run_on_ranks(ranks, layout.nproc, draw, layout=layout, **given)[0]

    resume = tmp_path / "once" / "checkpoint-2"
    whole, _ = run("once", SINGLE, None)
    again, reported = run("again", SINGLE, resume)
    assert [len(of_epoch) for of_epoch in again] == [2, 4]
    assert (again[1], reported) == (whole[1], 0)
    other, reported = run("two", DP2, resume)
    assert ([len(of_epoch) for of_epoch in other], reported) == ([2, 4], 1)


# In make test: test_data_of_any_length_is_trained_once_though_its_ranks_change_within_the_epoch.
@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP2, PP2], ids=lambda layout: layout.name)
def test_data_that_one_rank_reads_for_others_resumes_with_the_next_sample(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    def losses(name: str, resume: Path | None = None, **arguments: Any) -> list[float]:
        given = settings(layout, tmp_path / name, resume, **SIX_STEPS, **arguments)
        found: list[float] = ranks.run(f"{DATA}:run_with_one_reader", 2, given).values[0]
        return found

    whole = losses("whole")
    assert whole == losses("each", distributed_dataloader=False), "as if every rank reads its own data"
    assert losses("again", tmp_path / "whole" / "checkpoint-3") == whole[3:]


def test_the_data_may_start_from_its_beginning(ranks: ForkServer, saved: Saved, tmp_path: Path) -> None:
    (indices,) = ranks.run(
        f"{DATA}:run_and_watch_samples",
        1,
        settings(SINGLE, tmp_path, saved.third, max_steps=11, ignore_data_skip=True, seed=7),
    ).values
    assert sorted(indices) == every_sample()


def test_a_run_from_the_beginning_warns_of_checkpoints_of_another_run(ranks: ForkServer, tmp_path: Path) -> None:
    given = settings(SINGLE, tmp_path, max_steps=1, save_steps=1)
    first = ranks.run(f"{JOBS}:run", 1, given)
    run = read_manifest(tmp_path / "checkpoint-1").saved_by.id
    second = ranks.run(f"{JOBS}:run", 1, given)
    assert "contains checkpoints of other runs" not in first.logs[0].read_text()
    assert f"contains checkpoints of other runs: checkpoint-1 of run {run}" in second.logs[0].read_text()


# ---- Optimizer states in buffers.


def resume_into_fused_buffers(layout: MatrixLayout, unfused: Path, output_dir: Path) -> None:
    fused = {**SIX_STEPS, "stage1_tensor_fusion": True}
    whole, again = train_and_resume(str(output_dir), [3], layout=layout.to_json(), arguments=fused)
    assert again["losses"] == whole["losses"][3:]
    # Into fused buffers and back again.
    for name, source, arguments in (("in", unfused, fused), ("out", output_dir / "in" / "checkpoint-3", {})):
        trainer = flex_trainer(layout.to_json(), str(output_dir / name), {**arguments, "max_steps": 3})
        trainer.train(resume_from_checkpoint=str(source))
        trainer._save_checkpoint(trainer.model)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_states_of_fused_parameters_are_saved_and_loaded_by_parameter(
    ranks: ForkServer, request: pytest.FixtureRequest, tmp_path: Path, half: bool
) -> None:
    unfused = request.getfixturevalue("saved_bf16" if half else "saved").third
    layout = bf16(SD2V1) if half else SD2V1
    run_on_ranks(ranks, 2, resume_into_fused_buffers, layout=layout, unfused=unfused, output_dir=tmp_path)
    last = [list(canonical_digests(tmp_path / name / "checkpoint-6")) for name in ("whole", "from-3")]
    assert last[0] == last[1]
    for name in ("in", "out"):
        assert list(canonical_digests(tmp_path / name / "checkpoint-3")) == list(canonical_digests(unfused))


@pytest.mark.slow
def test_states_that_do_not_exist_before_the_first_step_are_created_before_a_load(
    ranks: ForkServer, tmp_path: Path
) -> None:
    overlapped = {**SIX_STEPS, "pp_sharding_comm_overlap": True}
    whole = ranks.run(f"{JOBS}:run", 4, settings(bf16(PP2SD2V2), tmp_path / "whole", **overlapped)).values
    resume = tmp_path / "whole" / "checkpoint-3"
    again = ranks.run(f"{JOBS}:run", 4, settings(bf16(PP2SD2V2), tmp_path / "again", resume, **overlapped)).values
    assert again[0]["losses"] == whole[0]["losses"][3:]
    last = [list(canonical_digests(tmp_path / name / "checkpoint-6")) for name in ("whole", "again")]
    assert last[0] == last[1]


# In make test: test_states_of_fused_parameters_are_saved_and_loaded_by_parameter.
@pytest.mark.slow
def test_gradients_may_be_fused_while_they_travel(ranks: ForkServer, saved_bf16: Saved, tmp_path: Path) -> None:
    overlapped = settings(bf16(SD2V1), tmp_path, saved_bf16.third, **SIX_STEPS, stage1_overlap=True)
    result = ranks.run(f"{JOBS}:run", 2, overlapped)
    assert result.values[0]["losses"] == pytest.approx(saved_bf16.losses[3:], abs=1e-2)


@on_ranks(layout=SINGLE)
def test_the_loss_scaler_of_a_run_continues_where_it_was(layout: MatrixLayout, tmp_path: Path) -> None:
    from tests.trainer.jobs import run_with_scaler

    given = {"layout": layout.to_json(), "arguments": SIX_STEPS}
    whole = run_with_scaler(1024.0, output_dir=str(tmp_path / "whole"), **given)
    assert whole["scaler"]["scale"] == 1024 * 2**3
    # Half way to the next doubling, and from another scale than the one that it is made with.
    third = str(tmp_path / "whole" / "checkpoint-3")
    again = run_with_scaler(2.0, third, output_dir=str(tmp_path / "again"), **given)
    assert again == {"scaler": whole["scaler"], "losses": whole["losses"][3:]}


# ---- Options.


@on_ranks(1)
def test_every_option_that_is_compared_exists_in_paddleformers() -> None:
    import dataclasses

    from paddleformers_fc import FlexTrainingArguments
    from paddleformers_fc.trainer.cli_arguments import FlexFinetuningArguments
    from paddleformers_fc.trainer.options import CONFLICTS, DEVELOPMENT, FIELD_NAMES, WITHOUT_EFFECT

    of_scripts, of_command_line = (
        {one.name for one in dataclasses.fields(kind)} for kind in (FlexTrainingArguments, FlexFinetuningArguments)
    )
    compared = {*FIELD_NAMES, *(one.key for one in (*CONFLICTS, *WITHOUT_EFFECT))}
    later = {one.key for one in DEVELOPMENT} - {"sharding"}
    assert later.isdisjoint(of_command_line)
    compared -= later | {"save_safetensors"}  # The name of save_to_hf in PaddleFleet.
    assert compared <= of_command_line
    assert compared - of_scripts == {"ref_model_update_steps"}  # An argument of preference training alone.


# ---- Weights without the rest of a run.


@on_ranks(layout=SINGLE)
def test_a_run_saved_without_optimizer_gives_its_weights_and_nothing_else(layout: MatrixLayout, tmp_path: Path) -> None:
    """So an optimizer that nothing declares may train it."""
    import paddle

    from paddleformers_fc import FlexTrainer
    from paddleformers_fc.errors import MismatchError

    class Trainer(FlexTrainer):
        def create_optimizer(self, lr_scheduler: Any = None) -> Any:
            self.optimizer = paddle.optimizer.SGD(parameters=self.model.parameters(), learning_rate=0.01)

    given = {"max_steps": 3, "save_steps": 3, "ignore_save_lr_and_optim": True}
    flex_trainer(layout.to_json(), str(tmp_path / "saved"), given, cls=Trainer).train()
    third = tmp_path / "saved" / "checkpoint-3"
    assert not (third / "optimizer_state").exists()
    trainer = flex_trainer(layout.to_json(), str(tmp_path / "a"))
    before = weights_of(trainer.model)
    with pytest.raises(MismatchError, match="ignore_load_lr_and_optim: true"):
        trainer.train(resume_from_checkpoint=str(third))
    assert weights_of(trainer.model) == before
    started = flex_trainer(layout.to_json(), str(tmp_path / "b"), {"max_steps": 2, "ignore_load_lr_and_optim": True})
    started.train(resume_from_checkpoint=str(third))
    assert (started.state.global_step, started.state.consumed_samples) == (2, 2 * tiny.GLOBAL_BATCH)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_a_new_run_begins_with_the_weights_of_a_checkpoint(
    ranks: ForkServer, request: pytest.FixtureRequest, tmp_path: Path, half: bool
) -> None:
    source: Saved = request.getfixturevalue("saved_bf16" if half else "saved")
    layout = bf16(SD2V2) if half else SD2V2
    arguments = {"max_steps": 1, "save_steps": 1, "learning_rate": 0.0, "ignore_load_lr_and_optim": True}
    ranks.run(f"{JOBS}:run", 2, settings(layout, tmp_path, source.third, **arguments))
    weights = ("model_state", "master_weight")
    expected = [digest for digest in canonical_digests(source.third) if digest.role in weights]
    assert [one for one in canonical_digests(tmp_path / "checkpoint-1") if one.role in weights] == expected


# ---- What is written.


@on_ranks(layout=TP2)
def test_saving_and_resuming_use_no_pickle(layout: MatrixLayout, tmp_path: Path) -> None:
    import pickle
    from unittest import mock

    arguments = {"max_steps": 2, "save_steps": 1}
    for name, resume in (("first", None), ("second", str(tmp_path / "first" / "checkpoint-1"))):
        trainer = flex_trainer(layout.to_json(), str(tmp_path / name), arguments)
        unusable = dict.fromkeys(("dump", "dumps", "load", "loads", "Pickler", "Unpickler"))
        with mock.patch.multiple(pickle, **unusable):
            trainer.train(resume_from_checkpoint=resume)
            trainer.save_model(str(tmp_path / name / "exported"))
        assert trainer.state.global_step == 2


def test_a_checkpoint_holds_json_and_safetensors_without_secrets_and_nothing_else(saved: Saved) -> None:
    files = sorted(path.relative_to(saved.third).as_posix() for path in saved.third.rglob("*") if path.is_file())
    assert {name.rpartition(".")[2] for name in files} == {"json", "safetensors"}
    for name in files:
        if name.endswith(".json"):
            text = (saved.third / name).read_text()
            json.loads(text)
            assert "open sesame" not in text
    assert {"config.json", "trainer/state.json", "trainer/rng-00001.json", "flex_checkpoint.json"} <= set(files)


def test_a_checkpoint_describes_the_job(saved: Saved) -> None:
    manifest = read_manifest(saved.third)
    assert (manifest.step, manifest.consumed_samples, manifest.world_size) == (3, 24, 2)
    assert manifest.parallel == {"dp": 2, "tp": 1, "pp": 1, "sharding": 1, "ep": 1, "sep": 1, "cp": 1}
    arguments = json.loads((saved.third / "trainer" / "arguments.json").read_text())
    assert (arguments["flex_checkpoint"], arguments["max_steps"], arguments["optim"]) == (True, 6, "adamw")


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

    given: Mapping[str, Any] = {"cls": Trainer, "eval_dataset": tiny.Samples()}
    trainer = flex_trainer(SINGLE.to_json(), str(output_dir), {**TO_BEST, "max_steps": steps}, **given)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    state = trainer.state
    best = Path(state.best_model_checkpoint)
    return {"best": state.best_metric, "checkpoint": best, "at_end": trainer.evaluate()["eval_loss"]}


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
    for metric in ("accuracy", "loss"):
        given = {**arguments, "metric_for_best_model": metric}
        trainer = flex_trainer(SINGLE.to_json(), str(tmp_path / metric), given, eval_dataset=tiny.Samples())
        if metric == "loss":
            trainer.train()
            continue
        with pytest.raises(OptionError, match="metric_for_best_model") as refused:
            trainer.train()
        assert all(name in refused.value.render() for name in ("eval_accuracy", "eval_loss"))


def export(resume: Path, output_dir: Path) -> dict[str, list[str]]:
    """Export in the three ways that a Trainer has; the files of each."""
    from paddleformers.transformers import AutoModelForCausalLM

    trainer = flex_trainer(SINGLE.to_json(), str(output_dir), {"max_steps": 3})
    trainer.train(resume_from_checkpoint=str(resume))
    targets = {name: str(output_dir / name) for name in ("save_model", "save_pretrained", "in_many_files")}
    trainer.save_model(targets["save_model"], last_fc_to_hf=True)
    trainer.model.save_pretrained(targets["save_pretrained"])
    trainer.model.save_pretrained(targets["in_many_files"], max_shard_size="300kB")
    reloaded = AutoModelForCausalLM.from_pretrained(targets["in_many_files"], convert_from_hf=True)
    assert weights_of(reloaded) == weights_of(trainer.model)
    return {name: sorted(path.name for path in Path(target).iterdir()) for name, target in targets.items()}


# Under every layout: test_stream.py.
def test_an_export_is_what_from_pretrained_reads(ranks: ForkServer, saved: Saved, tmp_path: Path) -> None:
    (found,) = run_on_ranks(ranks, 1, export, resume=saved.third, output_dir=tmp_path)
    files = ["config.json", "flex_checksums.json", "model.safetensors", "training_args.json"]
    assert found["save_model"] == found["save_pretrained"] == files
    assert {"model.safetensors.index.json", "model-00002-of-00003.safetensors"} <= set(found["in_many_files"])
    expected = [one for one in canonical_digests(saved.third) if one.role == "model_state"]
    assert list(canonical_digests(tmp_path / "save_pretrained")) == expected


def test_exports_beside_the_steps_have_their_own_directories(ranks: ForkServer, tmp_path: Path) -> None:
    arguments = {"max_steps": 4, "save_hf_steps": 1, "save_hf_total_limit": 2}
    ranks.run(f"{JOBS}:run", 2, settings(DP2, tmp_path, **arguments))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf_checkpoint-3", "hf_checkpoint-4"]
    assert (tmp_path / "hf_checkpoint-4" / "model.safetensors").exists()


# ---- The callback, and waiting.


TOTAL = r" in \d+\.\d\d s, [\d.e+-]+ [kMG]?B/s"


def phases(*names: str) -> str:
    """Return a pattern of the phases of a log line."""
    return ", ".join(rf"{name} \d+\.\d\d s" for name in names)


def test_a_run_under_another_layout_replaces_later_steps_and_logs_every_load_and_save_in_a_line(
    ranks: ForkServer, saved: Saved, tmp_path: Path
) -> None:
    shutil.copytree(saved.output_dir, tmp_path, dirs_exist_ok=True)
    third, sixth = tmp_path / "checkpoint-3", tmp_path / "checkpoint-6"
    names = [one.name for one in canonical_digests(sixth)]
    result = ranks.run(f"{JOBS}:run", 2, settings(TP2, tmp_path, third, **SIX_STEPS))
    assert read_manifest(sixth).parallel["tp"] == 2
    assert [one.name for one in canonical_digests(sixth)] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-6"]
    lines = result.logs[0].read_text().splitlines()
    (loaded,) = [line for line in lines if f"Resumed step 3 (saved as dp=2, now tp=2) from {third}: " in line]
    (written,) = [line for line in lines if f"Saved step 6 to {sixth}: " in line]
    assert re.search(f"{TOTAL}; {phases('open', 'plan', 'agree', 'read', 'finish')}", loaded)
    assert re.search(f"{TOTAL}; {phases('plan', 'capture', 'write', 'agree', 'commit')}", written)
    assert any(f"Resuming from {third}" in line for line in lines)
    # The mean of the losses of this run.
    (mean,) = {float(found) for line in lines for found in re.findall(r"train_loss: ([\d.]+)", line)}
    assert mean == pytest.approx(sum(result.values[0]["losses"]) / 3, abs=1e-5)
    assert any(f"Saving step 6 (tp=2) to {sixth}" in line for line in lines)
    assert not any("Saved step" in line for line in result.logs[1].read_text().splitlines())


def reports(resume: Path, output_dir: Path) -> list[list[Any]]:
    """Resume and save once, in the step and next to it; what a callback gets of every report."""
    from paddleformers_fc import FlexCheckpointCallback

    reported: list[list[Any]] = []

    class Remember(FlexCheckpointCallback):
        def on_checkpoint_saved(self, args: Any, report: Any) -> None:
            self.note("saved", report)

        def on_checkpoint_loaded(self, args: Any, report: Any) -> None:
            self.note("loaded", report)

        def note(self, what: str, report: Any) -> None:
            seconds = report.phases.seconds
            assert min(seconds.values()) >= 0
            assert sum(seconds.values()) <= report.seconds
            reported.append([what, report.step, report.directory.name, report.bytes > 0, *seconds])

    for is_async in (False, True):
        arguments = {"max_steps": 4, "save_steps": 4, "flex_async_save": is_async}
        place = str(output_dir / str(is_async))
        flex_trainer(SINGLE.to_json(), place, arguments, callbacks=[Remember()]).train(str(resume))
    return reported


def test_a_callback_of_the_user_gets_the_reports_with_their_phases(
    ranks: ForkServer, saved: Saved, tmp_path: Path
) -> None:
    (reported,) = run_on_ranks(ranks, 1, reports, resume=saved.third, output_dir=tmp_path)
    assert reported == 2 * [
        ["loaded", 3, "checkpoint-3", True, "open", "plan", "agree", "read", "finish"],
        ["saved", 4, "checkpoint-4", True, "plan", "capture", "write", "agree", "commit"],
    ]


@on_ranks(layout=DP2)
def test_no_rank_waits_longer_than_its_timeout(layout: MatrixLayout, tmp_path: Path) -> None:
    from paddleformers_fc.trainer.session import channel_of

    channel = channel_of(flex_trainer(layout.to_json(), str(tmp_path), {"flex_timeout": 100}).args)
    if channel.rank:
        return
    keep_time(tmp_path, ranks=1)  # The other one lives until this one ends, and never waits.
    with pytest.raises(PeerError) as caught:
        channel.gather("a test", b"")
    assert "Not every rank has arrived for a test within flex_timeout: 100 s." in str(caught.value)
    assert "rank 1 did not arrive" in str(caught.value)
