"""The Trainer with flex checkpoints, in real processes: saving, resuming, refusing, exporting."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.formats.flex import indexed_files, open_flex
from paddleformers_fc.storage.manifest import read_manifest
from tests.harness import tiny
from tests.harness.on_ranks import on_ranks
from tests.harness.tiny import DP2, EP2, PP2, PP2SD2V2, SD2S2, SD2S3, SD2V1, SD2V2, SINGLE, TP2, MatrixLayout
from tests.trainer.data_jobs import every_sample
from tests.trainer.jobs import failing, flex_trainer
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

JOBS = "tests.trainer.jobs"
DATA = "tests.trainer.data_jobs"
EXPORT = "tests.trainer.export_jobs"
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


def train_six(ranks: ForkServer, output_dir: Path, layout: MatrixLayout) -> Saved:
    settings = {"layout": layout.to_json(), "output_dir": str(output_dir), "arguments": SIX_STEPS}
    result = ranks.run(f"{JOBS}:run", layout.nproc, settings)
    return Saved(output_dir, result.values[0]["losses"])


@pytest.fixture(scope="module")
def saved(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Data parallel on two ranks, float32."""
    return train_six(ranks, tmp_path_factory.mktemp("dp2"), DP2)


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


# ---- Resuming.


# Every layout of the matrices, and all ways between them: tests/verification/matrix/test_strategies.py.
@pytest.mark.parametrize("layout", [SINGLE, DP2], ids=lambda layout: layout.name)
def test_a_run_that_resumes_continues_as_if_uninterrupted(
    ranks: ForkServer, saved: Saved, tmp_path: Path, layout: MatrixLayout
) -> None:
    result = ranks.run(f"{JOBS}:run", layout.nproc, settings(layout, tmp_path, saved.third, **SIX_STEPS))
    assert result.values[0]["losses"] == pytest.approx(saved.losses[3:], abs=1e-6)
    assert result.values[0]["consumed"] == 6 * tiny.GLOBAL_BATCH


@pytest.mark.parametrize("layout", [SINGLE, TP2, SD2V1], ids=lambda layout: layout.name)
def test_what_is_loaded_is_bitwise_what_was_saved_in_bfloat16(
    ranks: ForkServer, saved_bf16: Saved, tmp_path: Path, layout: MatrixLayout
) -> None:
    given = settings(bf16(layout), tmp_path, saved_bf16.third, max_steps=3)
    ranks.run(f"{JOBS}:resume_and_save_again", layout.nproc, given)
    expected = list(canonical_digests(saved_bf16.third))
    assert {digest.role for digest in expected} == {"model_state", "optimizer_state", "master_weight"}
    assert list(canonical_digests(tmp_path / "checkpoint-3")) == expected


@pytest.mark.parametrize("layout", [SINGLE, SD2V2, SD2S2, SD2S3], ids=lambda layout: layout.name)
def test_a_bfloat16_run_continues_exactly(ranks: ForkServer, tmp_path: Path, layout: MatrixLayout) -> None:
    whole = train_six(ranks, tmp_path / "whole", bf16(layout))
    result = ranks.run(
        f"{JOBS}:run", layout.nproc, settings(bf16(layout), tmp_path / "resumed", whole.third, **SIX_STEPS)
    )
    assert result.values[0]["losses"] == whole.losses[3:]


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
def test_only_the_owner_of_a_state_gets_it_back(ranks: ForkServer, tmp_path: Path, layout: MatrixLayout) -> None:
    source = settings(layout, tmp_path / "a", max_steps=3, save_steps=3)
    saved = ranks.run(f"{JOBS}:run_and_count_states", 2, source).values
    again = settings(layout, tmp_path / "b", tmp_path / "a" / "checkpoint-3", max_steps=3)
    assert ranks.run(f"{JOBS}:run_and_count_states", 2, again).values == saved
    assert all(count > 0 for count in saved)


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
def test_flattened_states_are_filled_where_they_lie_though_a_slice_of_them_is_a_copy(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    # A parameter whose length is no multiple of the alignment is padded, and Paddle describes a slice of its states.
    source = settings(layout, tmp_path / "a", max_steps=3, save_steps=3)
    saved = ranks.run(f"{JOBS}:run_without_strided_kernels", 2, source).values
    again = settings(layout, tmp_path / "b", tmp_path / "a" / "checkpoint-3", max_steps=3)
    loaded = ranks.run(f"{JOBS}:run_without_strided_kernels", 2, again).values
    differing = [name for one, other in zip(saved, loaded, strict=True) for name in one if one[name] != other.get(name)]
    assert differing == []


def test_a_tilde_is_the_home_directory_as_in_an_output_directory(
    ranks: ForkServer, saved: Saved, tmp_path: Path
) -> None:
    shutil.copytree(saved.third, tmp_path / "checkpoint-3")
    given = settings(DP2, Path("~/out"), Path("~/checkpoint-3"), **SIX_STEPS)
    resumed = ranks.run(f"{JOBS}:run_at_home", 2, {**given, "home": str(tmp_path)}).values[0]
    assert resumed["losses"] == saved.losses[3:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "out"]


def test_the_state_of_a_resumed_run_is_that_of_the_uninterrupted_one(ranks: ForkServer, tmp_path: Path) -> None:
    arguments = {"max_steps": 11, "save_steps": 3, "lr_scheduler_type": "cosine", "warmup_steps": 2}
    whole = ranks.run(f"{JOBS}:run", 1, settings(SINGLE, tmp_path / "whole", **arguments))
    third = tmp_path / "whole" / "checkpoint-3"
    resumed = ranks.run(f"{JOBS}:run", 1, settings(SINGLE, tmp_path / "resumed", third, **arguments))
    expected = whole.values[0]
    assert resumed.values[0] == {**expected, "losses": expected["losses"][3:]}
    ninth = [
        json.loads((tmp_path / name / "checkpoint-9" / "trainer" / "data.json").read_text())
        for name in ("whole", "resumed")
    ]
    assert ninth[0] == ninth[1]
    assert ninth[0]["position"] == {"epoch": 1, "samples": 8, "consumed": 72, "waiting": 0, "ended": False}


def test_a_finished_run_trains_no_further_step(ranks: ForkServer, saved: Saved, tmp_path: Path) -> None:
    result = ranks.run(f"{JOBS}:run", 1, settings(SINGLE, tmp_path, saved.third, max_steps=3, save_steps=1))
    assert result.values[0]["losses"] == []
    assert result.values[0]["epoch"] == how_far(saved.output_dir, 3)[0] > 0
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_step_that_was_saved_before_is_replaced(ranks: ForkServer, saved: Saved, tmp_path: Path) -> None:
    shutil.copytree(saved.output_dir, tmp_path, dirs_exist_ok=True)
    before = list(canonical_digests(tmp_path / "checkpoint-6"))
    ranks.run(f"{JOBS}:run", 2, settings(TP2, tmp_path, tmp_path / "checkpoint-3", **SIX_STEPS))
    assert read_manifest(tmp_path / "checkpoint-6").parallel["tp"] == 2
    assert [one.name for one in canonical_digests(tmp_path / "checkpoint-6")] == [one.name for one in before]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-6"]


def test_random_generators_of_another_number_of_ranks_are_reported_once(
    ranks: ForkServer, saved: Saved, tmp_path: Path
) -> None:
    alone = ranks.run(f"{JOBS}:run", 1, settings(SINGLE, tmp_path / "one", saved.third, **SIX_STEPS))
    assert alone.logs[0].read_text().count("Random generators are not restored") == 1
    again = ranks.run(f"{JOBS}:run", 2, settings(DP2, tmp_path / "two", saved.third, **SIX_STEPS))
    assert not any("Random generators are not restored" in log.read_text() for log in again.logs)


def test_random_generators_come_back_as_they_were(ranks: ForkServer) -> None:
    (found,) = ranks.run(f"{JOBS}:random_states", 1).values
    expected = {"same": True, "moved": True, "restored": True, "elsewhere": False, "untouched": True}
    assert found == {**expected, "damaged": "trainer/rng-00000.json"}


@pytest.fixture(scope="module")
def saved_ernie(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """ERNIE 4.5 MoE, data parallel on two ranks."""
    output_dir = tmp_path_factory.mktemp("ernie")
    given = {**settings(DP2, output_dir, **SIX_STEPS), "model_type": "ernie4_5_moe"}
    return Saved(output_dir, ranks.run(f"{JOBS}:run", 2, given).values[0]["losses"])


@pytest.mark.parametrize("layout", [SINGLE, EP2], ids=lambda layout: layout.name)
def test_a_mixture_of_experts_resumes_under_another_layout(
    ranks: ForkServer, saved_ernie: Saved, tmp_path: Path, layout: MatrixLayout
) -> None:
    given = {**settings(layout, tmp_path, saved_ernie.third, **SIX_STEPS), "model_type": "ernie4_5_moe"}
    resumed = ranks.run(f"{JOBS}:run", layout.nproc, given).values[0]
    assert resumed["losses"] == pytest.approx(saved_ernie.losses[3:], abs=1e-6)


@pytest.mark.parametrize("layout", [PP2, SD2S3], ids=lambda layout: layout.name)
def test_tied_embeddings_resume_under_another_layout_and_back(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    # A pipeline counts a tied weight twice in the gradient norm, so nothing is clipped here.
    arguments = {**SIX_STEPS, "max_grad_norm": 0.0}
    model = {"tie_word_embeddings": True}
    whole = ranks.run(f"{JOBS}:run", 1, {**settings(SINGLE, tmp_path / "a", **arguments), "model": model}).values[0]
    there = settings(layout, tmp_path / "b", tmp_path / "a" / "checkpoint-3", **{**arguments, "max_steps": 5})
    there["arguments"]["save_steps"] = 5
    first = ranks.run(f"{JOBS}:run", layout.nproc, {**there, "model": model}).values[0]["losses"]
    back = settings(SINGLE, tmp_path / "c", tmp_path / "b" / "checkpoint-5", **arguments)
    second = ranks.run(f"{JOBS}:run", 1, {**back, "model": model}).values[0]["losses"]
    assert first + second == pytest.approx(whole["losses"][3:], abs=1e-6)


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
    count, epoch = 61, 8
    trained: list[int] = []
    resume = None
    for layout, last in ((SINGLE, 3), (DP2, 5), (SINGLE, epoch)):
        run = settings(layout, tmp_path, resume, max_steps=last, save_steps=last)
        for indices in ranks.run(f"{DATA}:run_and_watch_samples", layout.nproc, {**run, "count": count}).values:
            trained.extend(indices)
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
    """The epoch of a checkpoint, and its position in the data."""
    trainer = output_dir / f"checkpoint-{step}" / "trainer"
    state, data = (json.loads((trainer / name).read_text()) for name in ("state.json", "data.json"))
    return state["epoch"], data["position"]


@pytest.mark.parametrize("step", [4, 8, 9], ids=["in the middle", "at its end", "in the second round"])
def test_a_stream_resumes_with_the_next_sample_and_begins_again_at_its_end(
    ranks: ForkServer, tmp_path: Path, step: int
) -> None:
    assert tiny.SAMPLES == 8 * tiny.GLOBAL_BATCH
    once, again = tmp_path / "once", tmp_path / "again"
    given: dict[str, Any] = {"output_dir": str(once), "arguments": {"max_steps": 11, "save_steps": 1}}
    whole = ranks.run(f"{DATA}:run_on_stream", 1, given).values[0]
    assert len(whole["losses"]) == 11
    given |= {"output_dir": str(again), "resume": str(once / f"checkpoint-{step}")}
    assert ranks.run(f"{DATA}:run_on_stream", 1, given).values[0] == {
        **whole,
        "losses": whole["losses"][step:],
    }
    left = range(step + 1, 12)
    assert [how_far(again, one) for one in left] == [how_far(once, one) for one in left]


def test_a_stream_that_may_come_in_another_order_is_reported_at_the_resume(ranks: ForkServer, tmp_path: Path) -> None:
    given: dict[str, Any] = {"output_dir": str(tmp_path / "once"), "arguments": {"max_steps": 2, "save_steps": 2}}
    ranks.run(f"{DATA}:run_on_stream", 1, given)
    resume = {"resume": str(tmp_path / "once" / "checkpoint-2")}
    logs = []
    for seed in (42, 7):
        arguments = {"max_steps": 3, "seed": seed}
        result = ranks.run(
            f"{DATA}:run_on_stream",
            1,
            {"output_dir": str(tmp_path / "again"), "arguments": arguments, **resume},
        )
        logs.append(result.logs[0].read_text().count("If its order depends on seed"))
    assert logs == [0, 1]


def test_passes_after_the_last_step_of_an_epoch_are_made_as_in_the_run_that_was_saved(
    ranks: ForkServer, tmp_path: Path
) -> None:
    # Of 8 passes 2 make no step; PaddleFormers adds their gradients to those of the next epoch's first step.
    arguments = {"max_steps": 5, "save_steps": 2, "gradient_accumulation_steps": 3, "evaluation_strategy": "no"}
    whole = ranks.run(f"{JOBS}:run", 1, settings(SINGLE, tmp_path / "once", **arguments)).values[0]
    resume = tmp_path / "once" / "checkpoint-2"
    assert how_far(tmp_path / "once", 2)[1] == {"epoch": 0, "samples": 48, "consumed": 48, "waiting": 0, "ended": False}
    again = ranks.run(f"{JOBS}:run", 1, settings(SINGLE, tmp_path / "again", resume, **arguments)).values[0]
    assert again == {**whole, "losses": whole["losses"][2:]}
    assert how_far(tmp_path / "again", 4) == how_far(tmp_path / "once", 4)


@pytest.mark.parametrize("layout", [SINGLE, PP2, SD2S2, SD2S3], ids=lambda layout: layout.name)
def test_a_step_that_broke_off_leaves_nothing_to_a_resume_in_the_same_process(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    ranks_with_data = 1 if layout in (SINGLE, PP2) else 2
    batch = {"per_device_train_batch_size": 4 // ranks_with_data, "gradient_accumulation_steps": 2}
    arguments = {"max_steps": 4, "save_steps": 1, **batch}
    whole = ranks.run(f"{JOBS}:run", layout.nproc, settings(layout, tmp_path / "once", **arguments)).values[0]
    given = {**settings(layout, tmp_path / "again", **arguments), "at": 2}
    again = ranks.run(f"{JOBS}:break_off_and_resume", layout.nproc, given).values[0]
    assert again == {**whole, "losses": whole["losses"][2:]}


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

    def losses(output_dir: Path, resume: Path | None = None) -> list[float]:
        given = {"max_steps": 4, "save_steps": 2}
        trainer = flex_trainer(
            layout.to_json(), str(output_dir), given, "qwen2_5_vl", train_dataset=tiny.ImageSamples()
        )
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return list(trainer.losses)

    whole = losses(tmp_path / "whole")
    assert losses(tmp_path / "resumed", tmp_path / "whole" / "checkpoint-2") == whole[2:]


def test_batches_that_wait_in_a_pipeline_wait_again_in_a_run_that_resumes(ranks: ForkServer, tmp_path: Path) -> None:
    # Of 8 passes 2 make no step; PaddleFormers trains them with the first pass of the next epoch, and so on.
    batch = {"per_device_train_batch_size": tiny.GLOBAL_BATCH, "gradient_accumulation_steps": 3}
    arguments = {"max_steps": 6, "save_steps": 1, "evaluation_strategy": "no", **batch}
    whole = ranks.run(f"{JOBS}:run", 2, settings(PP2, tmp_path / "once", **arguments)).values[0]
    for step, waiting in ((3, {"waiting": 2}), (5, {"waiting": 1})):
        assert how_far(tmp_path / "once", step)[1].items() >= waiting.items()
        resume, output_dir = tmp_path / "once" / f"checkpoint-{step}", tmp_path / f"from-{step}"
        again = ranks.run(f"{JOBS}:run", 2, settings(PP2, output_dir, resume, **arguments)).values[0]
        assert again == {**whole, "losses": whole["losses"][step:]}
        assert how_far(output_dir, 6) == how_far(tmp_path / "once", 6)


@pytest.mark.parametrize("layout", [SINGLE, PP2], ids=lambda layout: layout.name)
def test_a_checkpoint_of_an_epochs_end_continues_as_the_run_did_and_is_not_saved_again(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    batch = {"per_device_train_batch_size": tiny.GLOBAL_BATCH, "gradient_accumulation_steps": 3}
    arguments = {"max_steps": 6, "save_strategy": "epoch", **batch}
    whole = ranks.run(f"{JOBS}:run", layout.nproc, settings(layout, tmp_path / "once", **arguments)).values[0]
    for step, later in ((2, {"checkpoint-4", "checkpoint-6"}), (4, {"checkpoint-6"})):
        resume, output_dir = tmp_path / "once" / f"checkpoint-{step}", tmp_path / f"from-{step}"
        again = ranks.run(f"{JOBS}:run", layout.nproc, settings(layout, output_dir, resume, **arguments)).values[0]
        losses = [loss for loss in again["losses"] if loss]  # An end without a step logs a zero.
        assert {**again, "losses": losses} == {**whole, "losses": whole["losses"][step:]}
        assert {path.name for path in output_dir.iterdir()} == later
        assert how_far(output_dir, 6) == how_far(tmp_path / "once", 6)


def test_random_generators_of_an_epochs_end_come_back_for_the_next_epoch(ranks: ForkServer, tmp_path: Path) -> None:
    arguments = {"max_steps": 4, "save_strategy": "epoch", "gradient_accumulation_steps": 3}
    (whole,) = ranks.run(f"{DATA}:run_and_draw", 1, settings(SINGLE, tmp_path / "once", **arguments)).values
    resume = tmp_path / "once" / "checkpoint-2"
    (again,) = ranks.run(f"{DATA}:run_and_draw", 1, settings(SINGLE, tmp_path / "again", resume, **arguments)).values
    assert [len(of_epoch) for of_epoch in again] == [2, 4]
    assert again[1] == whole[1]
    batch = {**arguments, "per_device_train_batch_size": tiny.GLOBAL_BATCH // 2}
    result = ranks.run(f"{DATA}:run_and_draw", 2, settings(DP2, tmp_path / "two", resume, **batch))
    assert [len(of_epoch) for of_epoch in result.values[0]] == [2, 4]
    assert result.logs[0].read_text().count("Random generators are not restored") == 1


def test_samples_that_are_left_out_at_the_end_of_an_epoch_stay_left_out(ranks: ForkServer, tmp_path: Path) -> None:
    assert tiny.SAMPLES == 8 * tiny.GLOBAL_BATCH
    arguments = {"max_steps": 10, "save_strategy": "epoch", "skip_data_intervals": [[7, 8]]}
    whole = ranks.run(f"{JOBS}:run", 1, settings(SINGLE, tmp_path / "once", **arguments)).values[0]
    ended = {"epoch": 0, "samples": 64, "consumed": 64, "waiting": 0, "ended": True}
    assert how_far(tmp_path / "once", 8)[1] == ended
    resume = tmp_path / "once" / "checkpoint-8"
    again = ranks.run(f"{JOBS}:run", 1, settings(SINGLE, tmp_path / "again", resume, **arguments)).values[0]
    assert again["losses"] == whole["losses"][8:]
    assert how_far(tmp_path / "again", 10) == how_far(tmp_path / "once", 10)


# In make test: test_a_rank_that_reads_for_others_does_so_in_the_saved_order.
@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP2, PP2], ids=lambda layout: layout.name)
def test_data_that_one_rank_reads_for_others_resumes_with_the_next_sample(
    ranks: ForkServer, saved: Saved, tmp_path: Path, layout: MatrixLayout
) -> None:
    whole = ranks.run(f"{DATA}:run_with_one_reader", 2, settings(layout, tmp_path / "whole", **SIX_STEPS)).values[0]
    assert whole == pytest.approx(saved.losses, abs=1e-6)
    third = tmp_path / "whole" / "checkpoint-3"
    again = ranks.run(f"{DATA}:run_with_one_reader", 2, settings(layout, tmp_path / "again", third, **SIX_STEPS))
    assert again.values[0] == whole[3:]


def test_a_batch_that_does_not_fit_the_samples_trained_is_refused(
    ranks: ForkServer, saved: Saved, tmp_path: Path
) -> None:
    batch = {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 1}
    (found,) = ranks.run(f"{JOBS}:refused", 1, settings(SINGLE, tmp_path, saved.third, **SIX_STEPS, **batch)).values
    assert found["error"] == "OptionError"
    assert "24 samples" in found["text"]
    assert "ignore_data_skip: true" in found["text"]


def test_a_resume_with_another_number_of_samples_per_step_is_warned(
    ranks: ForkServer, saved: Saved, tmp_path: Path
) -> None:
    whole = ranks.run(f"{JOBS}:run", 1, settings(SINGLE, tmp_path / "a", saved.third, max_steps=4))
    less = {"per_device_train_batch_size": 4, "max_steps": 4}
    half = ranks.run(f"{JOBS}:run", 1, settings(SINGLE, tmp_path / "b", saved.third, **less))
    warning = "another number of samples per step"
    assert warning not in whole.logs[0].read_text()
    assert warning in half.logs[0].read_text()


def test_an_accumulation_that_paddleformers_lowers_to_an_epoch_is_no_other_batch(
    ranks: ForkServer, tmp_path: Path
) -> None:
    arguments = {"max_steps": 3, "save_steps": 1, "gradient_accumulation_steps": 9}
    whole = ranks.run(f"{JOBS}:run", 1, settings(SINGLE, tmp_path / "once", **arguments))
    assert "changing accumulation step from `9` to `8`" in whole.logs[0].read_text()
    resume = tmp_path / "once" / "checkpoint-1"
    again = ranks.run(f"{JOBS}:run", 1, settings(SINGLE, tmp_path / "again", resume, **arguments))
    assert "This run differs" not in again.logs[0].read_text()
    assert again.values[0] == {**whole.values[0], "losses": whole.values[0]["losses"][1:]}


def test_a_run_from_the_beginning_warns_of_checkpoints_of_another_run(ranks: ForkServer, tmp_path: Path) -> None:
    given = settings(SINGLE, tmp_path, max_steps=1, save_steps=1)
    first = ranks.run(f"{JOBS}:run", 1, given)
    run = read_manifest(tmp_path / "checkpoint-1").saved_by.id
    second = ranks.run(f"{JOBS}:run", 1, given)
    assert "holds checkpoints of others" not in first.logs[0].read_text()
    assert f"holds checkpoints of others: checkpoint-1 of run {run}" in second.logs[0].read_text()


@pytest.mark.parametrize(("kind", "made"), [("Adam", "script"), ("SGD", "trainer")])
def test_an_undeclared_optimizer_is_refused_before_the_first_step(
    ranks: ForkServer, tmp_path: Path, kind: str, made: str
) -> None:
    job = {"output_dir": str(tmp_path), "kind": kind, "options": {}, "made": made}
    (found,) = ranks.run(f"{JOBS}:refused_optimizer", 1, job).values
    assert found["error"] == "OptionError"
    assert f"does not support the optimizer {kind}, which is not declared" in found["text"]
    assert found["steps"] == 0


def test_adamw_from_a_script_is_not_refused(ranks: ForkServer, tmp_path: Path) -> None:
    for made in ("script", "trainer"):
        job = {"output_dir": str(tmp_path / made), "kind": "AdamW", "options": {}, "made": made}
        assert ranks.run(f"{JOBS}:refused_optimizer", 1, job).values == ({"error": None},)


def test_any_optimizer_may_train_weights_that_are_saved_alone(ranks: ForkServer, tmp_path: Path) -> None:
    ranks.run(f"{JOBS}:train_weights_alone_by_sgd", 1, {"output_dir": str(tmp_path)})
    assert not (tmp_path / "checkpoint-2" / "optimizer_state").exists()


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_states_of_fused_parameters_are_saved_and_loaded_by_parameter(
    ranks: ForkServer, saved: Saved, saved_bf16: Saved, tmp_path: Path, half: bool
) -> None:
    layout, unfused = (bf16(SD2V1), saved_bf16) if half else (SD2V1, saved)
    fused = {**SIX_STEPS, "stage1_tensor_fusion": True}
    whole = ranks.run(f"{JOBS}:run", 2, settings(layout, tmp_path / "whole", **fused)).values
    third = tmp_path / "whole" / "checkpoint-3"
    again = ranks.run(f"{JOBS}:run", 2, settings(layout, tmp_path / "again", third, **fused)).values
    assert again[0]["losses"] == whole[0]["losses"][3:]
    last = [list(canonical_digests(tmp_path / name / "checkpoint-6")) for name in ("whole", "again")]
    assert last[0] == last[1]
    # Into fused buffers and back again.
    for name, source, arguments in (("in", unfused.third, fused), ("out", tmp_path / "in" / "checkpoint-3", {})):
        given = settings(layout, tmp_path / name, source, **{**arguments, "max_steps": 3})
        ranks.run(f"{JOBS}:resume_and_save_again", 2, given)
        assert list(canonical_digests(tmp_path / name / "checkpoint-3")) == list(canonical_digests(unfused.third))


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


def test_gradients_may_be_fused_while_they_travel(ranks: ForkServer, saved_bf16: Saved, tmp_path: Path) -> None:
    overlapped = settings(bf16(SD2V1), tmp_path, saved_bf16.third, **SIX_STEPS, stage1_overlap=True)
    result = ranks.run(f"{JOBS}:run", 2, overlapped)
    assert result.values[0]["losses"] == pytest.approx(saved_bf16.losses[3:], abs=1e-2)


def test_the_data_may_start_from_its_beginning(ranks: ForkServer, saved: Saved, tmp_path: Path) -> None:
    (indices,) = ranks.run(
        f"{DATA}:run_and_watch_samples",
        1,
        settings(SINGLE, tmp_path, saved.third, max_steps=11, ignore_data_skip=True, seed=7),
    ).values
    assert sorted(indices) == every_sample()


# ---- What is refused.


def test_every_option_that_is_compared_exists_in_paddleformers(ranks: ForkServer) -> None:
    from paddleformers_fc.trainer.options import CONFLICTS, DEVELOPMENT, FIELD_NAMES, WITHOUT_EFFECT

    ((of_scripts, of_command_line),) = ranks.run(f"{JOBS}:field_names", 1).values
    compared = {*FIELD_NAMES, *(one.key for one in (*CONFLICTS, *WITHOUT_EFFECT))}
    later = {one.key for one in DEVELOPMENT} - {"sharding"}
    assert later.isdisjoint(of_command_line)
    compared -= later | {"save_safetensors"}  # The name of save_to_hf in PaddleFleet.
    assert compared <= set(of_command_line)
    assert compared - set(of_scripts) == {"ref_model_update_steps"}  # An argument of preference training alone.


# ---- Weights without the rest of a run.


def test_a_run_saved_without_optimizer_gives_its_weights_and_nothing_else(ranks: ForkServer, tmp_path: Path) -> None:
    ranks.run(f"{JOBS}:run", 1, settings(SINGLE, tmp_path, max_steps=3, save_steps=3, ignore_save_lr_and_optim=True))
    third = tmp_path / "checkpoint-3"
    assert not (third / "optimizer_state").exists()
    (refused,) = ranks.run(f"{JOBS}:refused", 1, settings(SINGLE, tmp_path / "a", third)).values
    assert refused["error"] == "MismatchError"
    assert "ignore_load_lr_and_optim: true" in refused["text"]
    (started,) = ranks.run(
        f"{JOBS}:run", 1, settings(SINGLE, tmp_path / "b", third, max_steps=2, ignore_load_lr_and_optim=True)
    ).values
    assert started["step"] == 2
    assert started["consumed"] == 2 * tiny.GLOBAL_BATCH


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


def test_saving_and_resuming_use_no_pickle(ranks: ForkServer, tmp_path: Path) -> None:
    arguments = {"max_steps": 2, "save_steps": 1}
    ranks.run(f"{JOBS}:run_without_pickle", 2, settings(TP2, tmp_path, **arguments))
    resume = tmp_path / "checkpoint-1"
    result = ranks.run(f"{JOBS}:run_without_pickle", 2, settings(TP2, tmp_path / "out", resume, **arguments))
    assert result.values == (2, 2)


def test_a_checkpoint_holds_json_and_safetensors_and_nothing_else(saved: Saved) -> None:
    files = sorted(path.relative_to(saved.third).as_posix() for path in saved.third.rglob("*") if path.is_file())
    assert {name.rpartition(".")[2] for name in files} == {"json", "safetensors"}
    for name in files:
        if name.endswith(".json"):
            json.loads((saved.third / name).read_bytes())
    assert {"config.json", "trainer/state.json", "trainer/rng-00001.json", "flex_checkpoint.json"} <= set(files)


def test_a_checkpoint_describes_the_job(saved: Saved) -> None:
    manifest = read_manifest(saved.third)
    assert (manifest.step, manifest.consumed_samples, manifest.world_size) == (3, 24, 2)
    assert manifest.parallel == {"dp": 2, "tp": 1, "pp": 1, "sharding": 1, "ep": 1, "sep": 1, "cp": 1}
    arguments = json.loads((saved.third / "trainer" / "arguments.json").read_text())
    assert (arguments["flex_checkpoint"], arguments["max_steps"], arguments["optim"]) == (True, 6, "adamw")


def test_secrets_are_not_saved(ranks: ForkServer, tmp_path: Path) -> None:
    ranks.run(f"{JOBS}:run", 1, settings(SINGLE, tmp_path, max_steps=1, save_steps=1, wandb_api_key="open sesame"))
    for path in (tmp_path / "checkpoint-1").rglob("*.json"):
        assert "open sesame" not in path.read_text()


def test_the_best_checkpoint_is_found_again_where_a_run_was_moved(ranks: ForkServer, tmp_path: Path) -> None:
    (first,) = ranks.run(f"{JOBS}:go_on_to_best", 1, {"output_dir": str(tmp_path / "out"), "steps": 3}).values
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    best = moved / Path(first["checkpoint"]).name
    given = {"output_dir": str(moved), "steps": 4, "resume": str(moved / "checkpoint-3")}
    (again,) = ranks.run(f"{JOBS}:go_on_to_best", 1, given).values
    assert again == {**first, "checkpoint": str(best)}
    assert set(moved.glob("checkpoint-*")) == {best, moved / "checkpoint-4"}


def test_a_missing_best_checkpoint_is_reported_at_the_resume_and_the_next_one_replaces_it(
    ranks: ForkServer, tmp_path: Path
) -> None:
    (first,) = ranks.run(f"{JOBS}:go_on_to_best", 1, {"output_dir": str(tmp_path), "steps": 3}).values
    shutil.rmtree(first["checkpoint"])
    given = {"output_dir": str(tmp_path), "steps": 5, "resume": str(tmp_path / "checkpoint-3")}
    result = ranks.run(f"{JOBS}:go_on_to_best", 1, given)
    (again,) = result.values
    assert Path(again["checkpoint"]).name in ("checkpoint-4", "checkpoint-5")
    assert again["at_end"] == pytest.approx(again["best"], rel=1e-5)
    warning = f"Missing best checkpoint: neither {first['checkpoint']}"
    assert result.logs[0].read_text().count(warning) == 1


def test_a_checkpoint_whose_metric_is_not_a_number_does_not_stay_the_best(ranks: ForkServer, tmp_path: Path) -> None:
    given = {"output_dir": str(tmp_path), "steps": 3, "undefined": 1}
    (found,) = ranks.run(f"{JOBS}:go_on_to_best", 1, given).values
    assert Path(found["checkpoint"]).name in ("checkpoint-2", "checkpoint-3")
    assert found["at_end"] == pytest.approx(found["best"], rel=1e-5)
    assert not (tmp_path / "checkpoint-1").exists()


def test_a_metric_that_no_evaluation_has_is_refused_with_those_that_it_has(ranks: ForkServer, tmp_path: Path) -> None:
    (text,) = ranks.run(f"{JOBS}:refused_metric", 1, {"output_dir": str(tmp_path), "metric": "accuracy"}).values
    assert "metric_for_best_model" in text
    assert "eval_accuracy" in text
    assert "eval_loss" in text
    (known,) = ranks.run(f"{JOBS}:refused_metric", 1, {"output_dir": str(tmp_path), "metric": "loss"}).values
    assert known == ""


@pytest.mark.parametrize("layout", [SINGLE, TP2, SD2S3], ids=lambda layout: layout.name)
def test_an_export_is_what_from_pretrained_reads(
    ranks: ForkServer, saved: Saved, tmp_path: Path, layout: MatrixLayout
) -> None:
    found = ranks.run(
        f"{EXPORT}:export",
        layout.nproc,
        {"output_dir": str(tmp_path), "layout": layout.to_json(), "resume": str(saved.third)},
    ).values[0]
    files = ["config.json", "flex_checksums.json", "model.safetensors", "training_args.json"]
    assert found["save_model"] == found["save_pretrained"] == files
    assert "model.safetensors.index.json" in found["in_many_files"]
    assert "model-00002-of-00003.safetensors" in found["in_many_files"]
    assert found.get("same", True)
    expected = [one for one in canonical_digests(saved.third) if one.role == "model_state"]
    assert list(canonical_digests(tmp_path / "save_pretrained")) == expected


@pytest.mark.slow
def test_the_export_is_the_same_whatever_the_layout(ranks: ForkServer, saved: Saved, tmp_path: Path) -> None:
    contents: list[tuple[dict[str, bytes], dict[str, Any]]] = []
    for layout in (SINGLE, TP2, PP2, SD2V2):
        output_dir = tmp_path / layout.name
        given = {"output_dir": str(output_dir), "layout": layout.to_json(), "resume": str(saved.third)}
        ranks.run(f"{EXPORT}:export", layout.nproc, given)
        files = sorted((output_dir / "in_many_files").glob("*model*"))
        config = json.loads((output_dir / "in_many_files" / "config.json").read_text())
        # A pipeline overwrites this one when it is built; nothing reads it once there are weights.
        del config["initializer_range"]
        contents.append(({path.name: path.read_bytes() for path in files}, config))
    assert contents[1:] == contents[:1] * 3


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


def test_every_save_and_load_is_one_line_in_the_log(ranks: ForkServer, saved: Saved, tmp_path: Path) -> None:
    result = ranks.run(f"{JOBS}:run", 2, settings(TP2, tmp_path, saved.third, max_steps=4, save_steps=4))
    lines = result.logs[0].read_text().splitlines()
    (loaded,) = [line for line in lines if f"Resumed step 3 (saved as dp=2, now tp=2) from {saved.third}: " in line]
    (written,) = [line for line in lines if f"Saved step 4 to {tmp_path / 'checkpoint-4'}: " in line]
    assert re.search(f"{TOTAL}; {phases('open', 'plan', 'agree', 'read', 'finish')}", loaded)
    assert re.search(f"{TOTAL}; {phases('plan', 'capture', 'write', 'agree', 'commit')}", written)
    assert any(f"Resuming from {saved.third}" in line for line in lines)
    # The mean of the losses of this run, which has one step.
    assert any(f"train_loss: {result.values[0]['losses'][-1]:.4f}"[:-1] in line for line in lines)
    assert any(f"Saving step 4 (tp=2) to {tmp_path / 'checkpoint-4'}" in line for line in lines)
    assert not any("Saved step" in line for line in result.logs[1].read_text().splitlines())


@pytest.mark.parametrize("is_async", [False, True])
def test_a_callback_of_the_user_gets_the_reports_with_their_phases(
    ranks: ForkServer, saved: Saved, tmp_path: Path, is_async: bool
) -> None:
    job = {"output_dir": str(tmp_path), "resume": str(saved.third), "flex_async_save": is_async}
    (reported,) = ranks.run(f"{JOBS}:reports", 1, job).values
    assert reported == [
        ["loaded", 3, "checkpoint-3", True, "open", "plan", "agree", "read", "finish"],
        ["saved", 4, "checkpoint-4", True, "plan", "capture", "write", "agree", "commit"],
    ]


def test_a_trainer_that_ignores_the_option_is_refused(ranks: ForkServer, tmp_path: Path) -> None:
    (error,) = ranks.run(
        "tests.trainer.entry_jobs:stock_trainer_with_our_callback", 1, {"output_dir": str(tmp_path)}
    ).values
    assert "this Trainer ignores it" in error


def test_the_loss_scaler_of_a_run_continues_where_it_was(ranks: ForkServer, tmp_path: Path) -> None:
    given = {**settings(SINGLE, tmp_path / "whole", **SIX_STEPS), "initial": 1024.0}
    (whole,) = ranks.run(f"{JOBS}:run_with_scaler", 1, given).values
    assert whole["scaler"]["scale"] == 1024 * 2**3
    third = tmp_path / "whole" / "checkpoint-3"
    # Half way to the next doubling, and from another scale than the one that it is made with.
    given = {**settings(SINGLE, tmp_path / "again", third, **SIX_STEPS), "initial": 2.0}
    (again,) = ranks.run(f"{JOBS}:run_with_scaler", 1, given).values
    assert again["scaler"] == whole["scaler"]
    assert again["losses"] == whole["losses"][3:]


def test_no_rank_waits_longer_than_its_timeout(ranks: ForkServer, tmp_path: Path) -> None:
    reported, _ = ranks.run(f"{JOBS}:left_alone", 2, {"output_dir": str(tmp_path)}).values
    assert "Not every rank has arrived for a test within flex_timeout: 100 s." in reported
    assert "rank 1 did not arrive" in reported
