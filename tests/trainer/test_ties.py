"""A run whose copies of a tied weight diverge: what it saves and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from paddleformers_fc.errors import Diverged
from paddleformers_fc.storage.manifest import read_manifest
from tests.harness import tiny
from tests.harness.on_ranks import job_on_ranks, on_ranks, run_on_ranks
from tests.harness.tiny import DP2, PP2, MatrixLayout
from tests.trainer.jobs import flex_trainer, logged
from tests.trainer.test_trainer import settings
from verification.forkserver import ForkServer, JobResult

NEVER = 10**6
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def run_and_part_copies(
    after: int, layout: MatrixLayout, resume: str | bool | None = None, ours: bool = True, **settings: Any
) -> dict[str, Any]:
    """Train a tied Llama over a pipeline; from a step on, the copy of the last stage is another one.

    Args:
        after: the first step behind which the copies differ.
        ours: with this package, or the stock Trainer.

    Returns:
        the losses, the steps that were trained, and this rank's copy as hex; or the error.
    """
    from paddleformers.trainer import TrainerCallback

    tied = {"tie_word_embeddings": True}

    class PartCopies(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            import paddle

            head = copies(model).get(HEAD)
            if state.global_step >= after and head is not None:
                with paddle.no_grad():
                    head.set_value(head * 1.5)

    callbacks = [PartCopies()]
    if ours:
        trainer = flex_trainer(layout, model=tied, callbacks=callbacks, **settings)
    else:
        args = tiny.training_arguments(layout, settings["output_dir"], **settings["arguments"])
        trainer = tiny.trainer(tiny.build("llama", layout, args, **tied), args, callbacks=callbacks)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}
    bits = {name: one.numpy().tobytes().hex() for name, one in copies(trainer.model).items()}
    return {"step": trainer.state.global_step, "losses": trainer.losses, "copies": bits}


def copies(model: Any) -> dict[str, Any]:
    """This rank's copies of a tied embedding."""
    from paddleformers.transformers.model_utils import unwrap_model

    held = unwrap_model(model).state_dict()
    return {name: held[name] for name in (EMBEDDING, HEAD) if name in held}


def train(
    ranks: ForkServer,
    layout: MatrixLayout,
    output_dir: Path,
    after: int,
    resume: Path | bool | None = None,
    **arguments: Any,
) -> JobResult:
    given = settings(layout, output_dir, resume, **{"save_steps": 1, "max_grad_norm": 0.0, **arguments})
    return job_on_ranks(ranks.attempt, layout.nproc, run_and_part_copies, **given, after=after)


def refuse_and_choose(output_dir: Path) -> list[Any]:
    """Save parted copies, resume them without and with a choice; the copies of this rank before and after."""
    given: dict[str, Any] = {"max_steps": 2, "max_grad_norm": 0.0}

    def train(name: str, after: int = NEVER, resume: str | None = None, **more: Any) -> dict[str, Any]:
        return run_and_part_copies(after, PP2, resume, output_dir=output_dir / name, arguments={**given, **more})

    with logged() as lines:
        first = train("first", 2, save_steps=1)
    said = sum("Copies of tied tensors differ between pipeline stages" in line for line in lines)
    source = str(output_dir / "first/checkpoint-2")
    refused = train("other", resume=source)
    assert refused["error"] == "Diverged"
    assert "flex_tied: first or last" in refused["text"]
    again = train("other", resume=source, flex_tied="first")
    return [first["copies"], [*again["copies"].values()], said]


# Rotation keeps a complete checkpoint: tests/corruption/test_several_ranks.py.
def test_a_diverged_checkpoint_needs_a_chosen_stage_and_is_never_the_newest(ranks: ForkServer, tmp_path: Path) -> None:
    values = run_on_ranks(ranks, 2, refuse_and_choose, output_dir=tmp_path)
    copy = {name: bits for held, *_ in values for name, bits in held.items()}
    assert copy[EMBEDDING] != copy[HEAD]
    assert [after for _, *after in values] == [[[copy[EMBEDDING]], 1], [[copy[EMBEDDING]], 0]]
    given: dict[str, Any] = {"max_steps": 2, "flex_tied": "last"}
    saved = tmp_path / "first"
    result = train(ranks, DP2, tmp_path / "b", NEVER, saved / "checkpoint-2", save_steps=100, **given)
    assert [{*one["copies"].values()} for one in result.values] == [{copy[HEAD]}] * 2
    assert "flex_tied: last" in result.logs[0].read_text()
    resumed = train(ranks, PP2, saved, NEVER, True, **given)
    assert len(resumed.values[0]["losses"]) == 1


def test_master_weights_of_both_stages_are_compared(ranks: ForkServer, tmp_path: Path) -> None:
    """The copies are changed in bfloat16 alone, and the next step makes them equal again out of master weights."""
    layout = MatrixLayout("pp2bf16", nproc=2, pp=2, bf16=True)
    assert train(ranks, layout, tmp_path, NEVER, max_steps=2).ok
    assert not any(read_manifest(tmp_path / f"checkpoint-{step}").ties for step in (1, 2))


@on_ranks(layout=PP2)
def test_an_export_of_a_live_model_takes_the_copy_that_is_chosen(layout: MatrixLayout, tmp_path: Path) -> None:
    for tied, name in (("refuse", ""), ("first", EMBEDDING), ("last", HEAD)):
        export = tmp_path / tied / "export"
        trainer = flex_trainer(layout, tmp_path / tied, {"flex_tied": tied}, model={"tie_word_embeddings": True})
        held = copies(trainer.model)
        if HEAD in held:
            held[HEAD].set_value(held[HEAD] * 1.5)
        if tied == "refuse":
            with pytest.raises(Diverged):
                trainer.save_model(str(export))
            assert not export.exists()
            continue
        trainer.save_model(str(export))
        exported = load_file(export / "model.safetensors")
        assert HEAD not in exported
        assert name not in held or exported[EMBEDDING].tobytes() == held[name].numpy().tobytes()
