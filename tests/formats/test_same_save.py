"""Files that are of another run, or have the name of another rank, are found by the numbers in them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import paddleformers_fc
from paddleformers_fc.errors import Corrupt
from paddleformers_fc.formats.registry import open_checkpoint
from tests.formats.damage import assert_refused, contents
from tests.formats.runs import Runs
from tests.formats.test_rank_checkpoints import ERNIE, STOCK, WAYS

RUNS: Mapping[str, tuple[str, Mapping[str, Any], bool, Mapping[str, str]]] = {
    "half": ("tp2", STOCK, True, {}),
    "half of another run": ("tp2", {**STOCK, "learning_rate": 0.3}, True, {}),
    "canonical": ("tp2", WAYS["canonical"], True, {}),
    "slices": ("sd2s3", STOCK, False, {}),
    "experts": ("sd2(ep2)", STOCK, True, ERNIE),
}
"""Layout, arguments, whether weights are bfloat16, and the model."""


def swap(directory: Path, one: str, other: str) -> None:
    (directory / one).rename(directory / "swapped")
    (directory / other).rename(directory / one)
    (directory / "swapped").rename(directory / other)


def repeat(directory: Path, one: str, other: str) -> None:
    shutil.copy(directory / one, directory / other)


MODELS = ("model_state.tp00.pdparams", "model_state.tp01.pdparams")
STATES = ("optimizer.tp00.pdopt", "optimizer.tp01.pdopt")
EXPERTS = ("model_state.moe_sharding00.pdparams", "model_state.moe_sharding01.pdparams")
EXPERT_STATES = ("optimizer.shard00.pdopt", "optimizer.shard01.pdopt")


@pytest.mark.parametrize(
    ("run", "change", "names", "evidence"),
    [
        ("half", swap, STATES, "model_state.tp00.pdparams and optimizer.tp00.pdopt are not from one save"),
        ("half", repeat, MODELS, "model_state.tp01.pdparams contains the values of model_state.tp00.pdparams"),
        ("canonical", swap, STATES, "model.tp00.safetensors and optimizer.tp00.pdopt are not from one save"),
        ("slices", repeat, EXPERT_STATES, f"{EXPERT_STATES[1]} contains the values of {EXPERT_STATES[0]}"),
        ("experts", swap, EXPERT_STATES, f"{EXPERTS[1]} and {EXPERT_STATES[1]} are not from one save"),
    ],
    ids=lambda value: getattr(value, "__name__", value[0] if isinstance(value, tuple) else value),
)
def test_files_of_ranks_under_other_names_are_refused(
    run: str,
    change: Callable[[Path, str, str], None],
    names: tuple[str, str],
    evidence: str,
    runs: Runs,
    tmp_path: Path,
) -> None:
    copy = shutil.copytree(runs(*RUNS[run]), tmp_path / "checkpoint-2")
    assert open_checkpoint(copy).catalog.count
    change(copy, *names)
    several = "files of several saves, or under the names of other ranks"
    assert_refused(lambda: open_checkpoint(copy), Corrupt, several, evidence)


def test_weights_with_optimizer_states_of_another_run_are_rejected(runs: Runs, tmp_path: Path) -> None:
    copy = shutil.copytree(runs(*RUNS["half"]), tmp_path / "checkpoint-2")
    for name in MODELS:
        shutil.copy(runs(*RUNS["half of another run"]) / name, copy)
    before = contents(copy)
    with pytest.raises(Corrupt, match="files of several saves") as caught:
        open_checkpoint(copy)
    assert len(caught.value.evidence) == 2
    assert contents(copy) == before


@pytest.mark.parametrize(
    ("change", "evidence"),
    [
        (lambda directory: (directory / "rng_state_1.pth").unlink(), "missing: rng_state_1.pth"),
        (lambda directory: swap(directory, "rng_state_0.pth", "rng_state_1.pth"), "the seed of local_seed is"),
    ],
    ids=["missing", "exchanged"],
)
def test_random_generators_of_another_rank_or_of_some_ranks_alone_are_refused(
    runs: Runs, tmp_path: Path, change: Callable[[Path], object], evidence: str
) -> None:
    directory = Path(shutil.copytree(runs(*RUNS["half"]), tmp_path / "checkpoint-2"))
    paddleformers_fc.open(directory).verify()
    change(directory)
    opened = paddleformers_fc.open(directory)
    for work in (opened.verify, lambda: opened.convert(tmp_path / "flex")):
        assert_refused(work, Corrupt, "random generators of", evidence)
