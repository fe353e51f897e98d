"""State dicts of Paddle's semi-automatic parallelism, loaded from and saved as checkpoints of hybrid parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paddleformers_fc
from paddleformers_fc.cpu_runtime.forkserver import ForkServer
from paddleformers_fc.execute.digest import canonical_digests
from tests.harness.tiny import PP2, SD2S3, SD2V1, SD2V2, SINGLE, TP2, TP2SD2V2, MatrixLayout

JOBS = "tests.trainer.semi_auto_jobs"


def test_boxes_are_those_of_paddles_own_local_values(ranks: ForkServer) -> None:
    for count, wrong in ranks.run(f"{JOBS}:boxes", 4).values:
        assert not wrong
        assert count > 200


def saved(ranks: ForkServer, layout: MatrixLayout, place: Path, **settings: Any) -> Path:
    """A checkpoint of hybrid parallelism after one step, and all of its tensors beside it."""
    given = {"layout": layout.to_json(), "output_dir": str(place), "arguments": {"max_steps": 1, "save_steps": 1}}
    ranks.run("tests.trainer.jobs:run", layout.nproc, {**given, **settings})
    checkpoint = place / "checkpoint-1"
    whole = {"source": str(checkpoint), "target": str(place / "whole.npz")}
    ranks.run(f"{JOBS}:whole", 1, whole | {"model_type": settings.get("model_type", "llama")})
    return checkpoint


@pytest.mark.parametrize(
    ("layout", "scheme", "nproc"),
    [
        (SINGLE, "both2x2", 4),
        (TP2, "mp2", 2),
        (PP2, "mp2", 2),
        (SD2V1, "rows3", 3),
        (SD2V2, "mp2", 2),
        (SD2S3, "stages2", 2),
        (TP2SD2V2, "dp2mp2", 4),
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_every_local_shard_is_loaded_from_hybrid_parallelism_and_saved(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, scheme: str, nproc: int
) -> None:
    source = saved(ranks, layout, tmp_path)
    given = {"source": str(source), "expected": str(tmp_path / "whole.npz"), "scheme": scheme}
    given |= {"target": str(tmp_path / "again/checkpoint-1")}
    found = ranks.run(f"{JOBS}:load", nproc, given).values
    assert [wrong for _, wrong in found] == [[]] * nproc
    assert sum(count for count, _ in found) >= 39
    again = {(one.role, one.name): one.md5 for one in canonical_digests(tmp_path / "again/checkpoint-1")}
    weights_alone = scheme == "stages2"
    kept = [one for one in canonical_digests(source) if one.role == "model_state" or not weights_alone]
    assert again == {(one.role, one.name): one.md5 for one in kept}


def test_fused_layers_of_tensor_parallel_ranks_become_those_of_one_device(ranks: ForkServer, tmp_path: Path) -> None:
    source = saved(ranks, TP2, tmp_path, model_type="ernie4_5_moe")
    given = {"source": str(source), "expected": str(tmp_path / "whole.npz"), "scheme": "mp2"}
    given |= {"target": str(tmp_path / "again/checkpoint-1"), "model_type": "ernie4_5_moe"}
    assert [wrong for _, wrong in ranks.run(f"{JOBS}:load", 2, given).values] == [[], []]
    assert list(canonical_digests(tmp_path / "again/checkpoint-1")) == list(canonical_digests(source))


def test_tensors_without_a_family_are_loaded_by_name_under_other_placements(ranks: ForkServer, tmp_path: Path) -> None:
    places = [tmp_path / "first/checkpoint-1", tmp_path / "second/checkpoint-1"]
    found = ranks.run(f"{JOBS}:by_name", 2, {"target": str(places[0]), "again": str(places[1])}).values
    whole = [[3.0 * row + column for column in range(3)] for row in range(7)]
    for rank, (fresh, (a, b, c)) in enumerate(found):
        assert not fresh
        assert a == [row[:2] if rank == 0 else row[2:] for row in whole]
        assert (b, c) == ([0, 1, 2, 3, 4], [1])
    assert paddleformers_fc.open(places[0]).diff(paddleformers_fc.open(places[1])).equal


@pytest.mark.parametrize(
    ("case", "texts"),
    {
        "partial": ("Partial(reduce_type=SUM)", "the tensor is the sum of all ranks", "distributed.reshard"),
        "split": ("split_factor", "is not one box"),
        "orphan": ("linear_0.w_0.dist_moment1_0: no weight in the state dict has this state", "**model.state_dict()"),
        "twice": ("w: 2 entries",),
        "number": ("Invalid entry 'epoch'", "type int"),
        "local": ("tensor-parallel layer", "Pass the layer"),
    }.items(),
)
def test_a_state_dict_that_cannot_be_placed_is_refused_with_the_reason(
    refusals: dict[str, str], case: str, texts: tuple[str, ...]
) -> None:
    assert all(text in refusals[case] for text in texts), refusals[case]


@pytest.fixture(scope="module")
def refusals(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The errors of all cases; every rank has the same ones, and no checkpoint is saved."""
    place = tmp_path_factory.mktemp("refused")
    found = ranks.run(f"{JOBS}:refused", 2, {"output_dir": str(place)}).values
    assert found[0] == found[1]
    assert not list(place.glob("*/checkpoint-1"))
    return dict(found[0])
