"""A run whose copies of a tied weight diverge: what it saves, deletes and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from paddleformers_fc.storage.manifest import read_manifest
from tests.harness.tiny import DP2, PP2, MatrixLayout
from tests.trainer.test_trainer import settings
from verification.forkserver import ForkServer, JobResult

NEVER = 10**6
PP4 = MatrixLayout("pp4", nproc=4, pp=4)
PP2SD2V2 = MatrixLayout("pp2sd2v2", nproc=4, pp=2, sharding=2, split_param=True)
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


def test_a_named_one_is_refused_and_read_where_a_stage_is_chosen(ranks: ForkServer, tmp_path: Path) -> None:
    first = train(ranks, PP2, tmp_path, 2, max_steps=2)
    copy = {name: bits for held in first.values for name, bits in held["copies"].items()}
    assert copy[EMBEDDING] != copy[HEAD]
    source = tmp_path / "checkpoint-2"
    given: dict[str, Any] = {"max_steps": 2, "save_steps": 100}
    refused = train(ranks, PP2, tmp_path / "a", NEVER, source, **given).values
    assert {one["error"] for one in refused} == {"Diverged"}
    assert "flex_tied: first or last" in refused[0]["text"]
    for layout, tied, name in ((PP2, "first", EMBEDDING), (DP2, "last", HEAD)):
        result = train(ranks, layout, tmp_path / "b", NEVER, source, **given, flex_tied=tied)
        assert [{*one["copies"].values()} for one in result.values] == [{copy[name]}] * 2
        assert f"flex_tied: {tied}" in result.logs[0].read_text()


def test_a_choice_does_not_make_a_diverged_checkpoint_the_newest(ranks: ForkServer, tmp_path: Path) -> None:
    train(ranks, PP2, tmp_path, 2, max_steps=2)
    resumed = train(ranks, PP2, tmp_path, NEVER, True, max_steps=2, flex_tied="last")
    assert len(resumed.values[0]["losses"]) == 1


def test_master_weights_of_both_stages_are_compared(ranks: ForkServer, tmp_path: Path) -> None:
    """The copies are changed in bfloat16 alone, and the next step makes them equal again out of master weights."""
    layout = MatrixLayout("pp2bf16", nproc=2, pp=2, bf16=True)
    assert train(ranks, layout, tmp_path, NEVER, max_steps=2).ok
    assert diverged(tmp_path) == {"checkpoint-1": False, "checkpoint-2": False}


@pytest.mark.parametrize(("tied", "name"), [("refuse", ""), ("first", EMBEDDING), ("last", HEAD)])
def test_an_export_of_a_live_model_takes_the_copy_that_is_chosen(
    ranks: ForkServer, tmp_path: Path, tied: str, name: str
) -> None:
    given = settings(PP2, tmp_path, flex_tied=tied)
    values = ranks.run("tests.trainer.tied_jobs:export_of_parted_copies", 2, given).values
    if tied == "refuse":
        assert [one["error"] for one in values] == ["Diverged"] * 2
        assert not (tmp_path / "export").exists()
        return
    copy = {key: bits for held in values for key, bits in held["copies"].items()}
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported[EMBEDDING].tobytes().hex() == copy[name]
    assert HEAD not in exported
