"""A run whose copies of a tied weight diverge: what it saves, deletes and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from paddleformers_fc.errors import Diverged
from paddleformers_fc.storage.manifest import read_manifest
from tests.harness.on_ranks import on_ranks, run_on_ranks
from tests.harness.tiny import DP2, PP2, PP2SD2V2, MatrixLayout
from tests.trainer.jobs import flex_trainer
from tests.trainer.test_trainer import settings
from tests.trainer.tied_jobs import copies, run_and_part_copies
from verification.forkserver import ForkServer, JobResult

NEVER = 10**6
PP4 = MatrixLayout("pp4", nproc=4, pp=4)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SAID = "Copies of tied tensors differ between pipeline stages"


def train(
    ranks: ForkServer,
    layout: MatrixLayout,
    output_dir: Path,
    after: int,
    resume: Path | bool | None = None,
    **arguments: Any,
) -> JobResult:
    given = settings(layout, output_dir, resume, **{"save_steps": 1, "max_grad_norm": 0.0, **arguments})
    return ranks.attempt("tests.trainer.tied_jobs:run_and_part_copies", layout.nproc, {**given, "after": after})


def diverged(output_dir: Path) -> dict[str, bool]:
    """Whether every checkpoint has a record of diverged copies."""
    return {path.name: bool(read_manifest(path).ties) for path in sorted(output_dir.glob("checkpoint-*"))}


@pytest.mark.parametrize("layout", [PP2, PP4, PP2SD2V2], ids=lambda layout: layout.name)
def test_the_last_whole_checkpoint_of_a_run_stays_and_is_resumed(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    given: dict[str, Any] = {"max_steps": 4, "save_total_limit": 1, "flex_check_replicas": "off"}
    result = train(ranks, layout, tmp_path, 3, **given)
    assert result.ok
    assert diverged(tmp_path) == {"checkpoint-2": False, "checkpoint-4": True}
    assert [log.read_text().count(SAID) for log in result.logs] == [2] + [0] * (layout.nproc - 1)
    resumed = train(ranks, layout, tmp_path, NEVER, True, **given)
    assert resumed.ok
    assert len(resumed.values[0]["losses"]) == 2
    assert "checkpoint-4" in resumed.logs[0].read_text()
    assert diverged(tmp_path)["checkpoint-4"] is False


def refuse_and_choose(output_dir: Path) -> list[Any]:
    """Save parted copies, resume them without and with a choice; the copies of this rank before and after."""
    given = {"max_steps": 2, "max_grad_norm": 0.0}
    layout, saving, later = PP2.to_json(), {**given, "save_steps": 1}, {**given, "save_steps": 100}
    first = run_and_part_copies(2, layout, output_dir=str(output_dir), arguments=saving)
    source, other = str(output_dir / "checkpoint-2"), str(output_dir / "other")
    refused = run_and_part_copies(NEVER, layout, resume=source, output_dir=other, arguments=later)
    assert refused["error"] == "Diverged"
    assert "flex_tied: first or last" in refused["text"]
    chosen = {**later, "flex_tied": "first"}
    again = run_and_part_copies(NEVER, layout, resume=source, output_dir=other, arguments=chosen)
    return [first["copies"], [*again["copies"].values()]]


def test_a_named_one_is_refused_and_read_where_a_stage_is_chosen_and_never_the_newest(
    ranks: ForkServer, tmp_path: Path
) -> None:
    values = run_on_ranks(ranks, 2, refuse_and_choose, output_dir=tmp_path)
    copy = {name: bits for held, _ in values for name, bits in held.items()}
    assert copy[EMBEDDING] != copy[HEAD]
    assert [after for _, after in values] == [[copy[EMBEDDING]]] * 2
    given: dict[str, Any] = {"max_steps": 2, "flex_tied": "last"}
    result = train(ranks, DP2, tmp_path / "b", NEVER, tmp_path / "checkpoint-2", save_steps=100, **given)
    assert [{*one["copies"].values()} for one in result.values] == [{copy[HEAD]}] * 2
    assert "flex_tied: last" in result.logs[0].read_text()
    resumed = train(ranks, PP2, tmp_path, NEVER, True, **given)
    assert len(resumed.values[0]["losses"]) == 1


def test_master_weights_of_both_stages_are_compared(ranks: ForkServer, tmp_path: Path) -> None:
    """The copies are changed in bfloat16 alone, and the next step makes them equal again out of master weights."""
    layout = MatrixLayout("pp2bf16", nproc=2, pp=2, bf16=True)
    assert train(ranks, layout, tmp_path, NEVER, max_steps=2).ok
    assert diverged(tmp_path) == {"checkpoint-1": False, "checkpoint-2": False}


@on_ranks(layout=PP2)
def test_an_export_of_a_live_model_takes_the_copy_that_is_chosen(layout: MatrixLayout, tmp_path: Path) -> None:
    for tied, name in (("refuse", ""), ("first", EMBEDDING), ("last", HEAD)):
        place, model = tmp_path / tied, {"tie_word_embeddings": True}
        trainer = flex_trainer(layout.to_json(), str(place), {"flex_tied": tied}, model=model)
        held = copies(trainer.model)
        if HEAD in held:
            held[HEAD].set_value(held[HEAD] * 1.5)
        if tied == "refuse":
            with pytest.raises(Diverged):
                trainer.save_model(str(place / "export"))
            assert not (place / "export").exists()
            continue
        trainer.save_model(str(place / "export"))
        exported = load_file(place / "export" / "model.safetensors")
        assert HEAD not in exported
        assert name not in held or exported[EMBEDDING].tobytes() == held[name].numpy().tobytes()
