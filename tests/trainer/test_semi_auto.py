"""State dicts of Paddle's semi-automatic parallelism, loaded from and saved as checkpoints of hybrid parallelism.

The table of the page is made of the losses that these tests measure. ``make semi-auto`` writes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import paddleformers_fc
from tests.harness.on_ranks import on_ranks
from tests.harness.tiny import DP2, PP2, SD2S3, SD2V1, SD2V2, SINGLE, TP2, TP2SD2V2, MatrixLayout
from tests.trainer.jobs import TO_BEST, few_samples
from tests.trainer.semi_auto_jobs import trainer_of
from verification.digests import canonical_digests
from verification.forkserver import ForkServer
from verification.matrix.layouts import parse_layout

JOBS = "tests.trainer.semi_auto_jobs"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "semi-auto.md"
WRITE = "FLEX_WRITE_SEMI_AUTO"
BEGIN, END = "<!-- semi-auto: losses -->\n", "<!-- end -->\n"


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
        pytest.param(TP2SD2V2, "dp2mp2", 4, marks=pytest.mark.slow),
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


def test_open_weights_are_a_source_of_weights(ranks: ForkServer, tmp_path: Path) -> None:
    source = saved(ranks, SINGLE, tmp_path)
    paddleformers_fc.open(source).export(tmp_path / "hf")
    given = {"source": str(source), "weights": str(tmp_path / "hf"), "scheme": "mp2"}
    assert ranks.run(f"{JOBS}:load_weights", 2, given).values == ([], [])


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


# ---- Losses.

LIMIT = 1e-5
"""The largest difference of a loss; published are 1e-6 to 5e-5 for PaddleNLP's converter."""

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "dp2": {},
    "tp2": {},
    "pp2": {},
    "sd2v1": {},
    "sd2s2": {},
    "sd2v2": {},
    "sd2s3": {},
    "pp4vpp2+tp2": {"num_hidden_layers": 8},
    "tp2+sd2v1": {},
    "tp2+pp2+sd2v1": {},
    "tp2+pp2+sd2v2": {},
}
"""Layouts of hybrid runs, with overrides of the model's configuration."""

STOCK = {"save_checkpoint_format": "", "load_checkpoint_format": "", "save_to_hf": False}
OF_OTHERS = {"sharding_io": ("sd2v1", "sd2v2", "tp2+sd2v1"), "Paddle's FlexCheckpoint": ("tp2", "sd2v2")}
"""The strategies of the other formats; the tests of formats compare all of them."""

FORMATS: Mapping[str, Mapping[str, Any] | None] = {
    "flex checkpoint": None,
    "legacy hybrid": STOCK,
    "sharding_io": {**STOCK, "save_sharded_model": True},
    "Paddle's FlexCheckpoint": {},
}
"""Formats, with the arguments under which PaddleFormers' Trainer writes them; None is ours."""

CASES = [
    (strategy, kind)
    for kind in FORMATS
    for strategy in STRATEGIES
    if kind in ("flex checkpoint", "legacy hybrid") or strategy in OF_OTHERS[kind]
]


def is_slow(strategy: str, kind: str) -> bool:
    """Four hybrid ranks, and formats whose reading the tests of formats prove."""
    return "+" in strategy or kind in ("legacy hybrid", "sharding_io")


@pytest.fixture(scope="module")
def data(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The batches of the first five steps."""
    place = tmp_path_factory.mktemp("batches")
    given = {"output_dir": str(place / "run"), "target": str(place / "batches.npz"), "steps": 5}
    ranks.run(f"{JOBS}:batches", 1, given)
    return place / "batches.npz"


def losses(
    ranks: ForkServer, data: Path, place: Path, strategy: str, kind: str
) -> tuple[Sequence[float], Sequence[float]]:
    """The losses of steps 3 to 5 of a hybrid run, and of a semi-automatic one that resumes its checkpoint of step 2."""
    layout, model, options = parse_layout(strategy), STRATEGIES[strategy], FORMATS[kind]
    arguments = {"max_steps": 5, "save_steps": 2, **(options or {})}
    given = {"layout": layout.to_json(), "output_dir": str(place), "model": model, "arguments": arguments}
    hybrid = ranks.run("tests.formats.jobs:train", layout.nproc, {**given, "ours": options is None}).values[-1]
    assert "error" not in hybrid, hybrid
    resume = {"scheme": "mp2", "batches": str(data), "steps": [2, 3, 4], "source": str(place / "checkpoint-2")}
    found = ranks.run(f"{JOBS}:train", 2, {**resume, "model": model}).values
    assert found[0] == found[1]
    return hybrid["losses"][2:], found[0]


HEADER = (
    "| hybrid run | its checkpoint | its losses at steps 3, 4, 5 | losses of the semi-automatic run | difference |\n"
    "|---|---|---|---|---|\n"
)


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[tuple[str, str], str]]:
    """The rows of the table by case; all of them replace those of the page at the end."""
    found: dict[tuple[str, str], str] = {}
    yield found
    if os.environ.get(WRITE) and found.keys() == set(CASES):
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        table = HEADER + "".join(found[case] for case in CASES)
        PAGE.write_text(f"{before}{BEGIN}{table}{END}{after}", encoding="utf-8")


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [pytest.param(*case, marks=pytest.mark.slow) if is_slow(*case) else case for case in CASES],
)
def test_a_semi_automatic_run_continues_the_losses_of_a_hybrid_one(
    ranks: ForkServer, data: Path, tmp_path: Path, rows: dict[tuple[str, str], str], strategy: str, kind: str
) -> None:
    hybrid, semi_auto = losses(ranks, data, tmp_path, strategy, kind)
    assert len(hybrid) == 3
    difference = max(abs(one - other) for one, other in zip(hybrid, semi_auto, strict=True))
    texts = (", ".join(f"{loss:.6f}" for loss in one) for one in (hybrid, semi_auto))
    rows[strategy, kind] = f"| {strategy} | {kind} | {' | '.join(texts)} | {difference:.1e} |\n"
    assert semi_auto == pytest.approx(hybrid, rel=0, abs=LIMIT)


@pytest.mark.parametrize("layout", [SINGLE, TP2], ids=lambda one: one.name)
@pytest.mark.parametrize("scheme", ["mp2", "dp2mp2"])
def test_a_hybrid_run_continues_the_losses_of_a_semi_automatic_one(
    ranks: ForkServer, data: Path, tmp_path: Path, scheme: str, layout: MatrixLayout
) -> None:
    nproc, saved_at = (2 if scheme == "mp2" else 4), tmp_path / "checkpoint-2"
    first = {"scheme": scheme, "batches": str(data), "steps": [0, 1], "target": str(saved_at)}
    ranks.run(f"{JOBS}:train", nproc, first)
    rest = {"scheme": scheme, "batches": str(data), "steps": [2, 3, 4], "source": str(saved_at)}
    expected = ranks.run(f"{JOBS}:train", nproc, rest).values[0]
    given = {"layout": layout.to_json(), "output_dir": str(tmp_path), "batches": str(data), "steps": [2, 3, 4]}
    found = ranks.run(f"{JOBS}:train_hybrid", layout.nproc, {**given, "source": str(saved_at)}).values[0]
    assert found == pytest.approx(expected, rel=0, abs=LIMIT)


def test_the_page_has_the_losses_of_every_strategy_and_format() -> None:
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert table.startswith(HEADER)
    cells = [line.strip("| \n").split(" | ") for line in table.removeprefix(HEADER).splitlines()]
    assert [(strategy, kind) for strategy, kind, *_ in cells] == CASES
    assert all(float(difference) <= LIMIT for *_, difference in cells)


# ---- PaddleFormers' Trainer.


def train(ranks: ForkServer, layout: MatrixLayout, place: Path, semi_auto: bool, **settings: Any) -> list[float]:
    """The losses of a Trainer on every rank, which are equal."""
    given = {"layout": layout.to_json(), "output_dir": str(place), "semi_auto": semi_auto, **settings}
    first, *others = ranks.run(f"{JOBS}:run_trainer", layout.nproc, given).values
    assert all(one == first for one in others)
    return list(first)


def test_the_semi_automatic_trainer_resumes_its_own_run(ranks: ForkServer, tmp_path: Path) -> None:
    given = {"arguments": {"save_steps": 2}, "any_order": False}
    whole = train(ranks, DP2, tmp_path / "whole", True, **given)
    source = tmp_path / "whole/checkpoint-2"
    assert train(ranks, DP2, tmp_path / "again", True, resume=str(source), **given) == whole[2:]
    assert list(canonical_digests(tmp_path / "again/checkpoint-2")) == list(canonical_digests(source))


@on_ranks(layout=DP2)
def test_the_best_weights_of_a_semi_automatic_run_are_evaluated_after_it(layout: MatrixLayout, tmp_path: Path) -> None:
    """The evaluation before has left the last layers gathered."""
    trainer = trainer_of(layout.to_json(), str(tmp_path), True, {**TO_BEST, "max_steps": 3}, eval_dataset=few_samples())
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric


@pytest.mark.parametrize("layout", [TP2, SD2V2, PP2], ids=lambda one: one.name)
def test_the_trainer_goes_from_hybrid_to_semi_automatic_parallelism_and_back(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    saving, skipping = {"save_steps": 2}, {"ignore_data_skip": True}
    hybrid = train(ranks, layout, tmp_path / "hybrid", False, arguments=saving)
    source = tmp_path / "hybrid/checkpoint-2"
    there = train(ranks, DP2, tmp_path / "there", True, resume=str(source), arguments=skipping)
    back = train(
        ranks, layout, tmp_path / "back", False, resume=str(tmp_path / "there/checkpoint-2"), arguments=skipping
    )
    assert there == pytest.approx(hybrid[2:], rel=0, abs=LIMIT)
    assert back == pytest.approx(hybrid[2:], rel=0, abs=LIMIT)
    expected = list(canonical_digests(source))
    assert list(canonical_digests(tmp_path / "there/checkpoint-2")) == expected
    assert list(canonical_digests(tmp_path / "back/checkpoint-2")) == expected


def test_options_that_the_semi_automatic_mode_does_not_support_are_refused(ranks: ForkServer, tmp_path: Path) -> None:
    arguments = {"tensor_model_parallel_size": 2, "bf16": True, "flex_async_save": True, "flex_ema_decay": 0.9}
    given = {"output_dir": str(tmp_path), "arguments": {**arguments, "sharding": "stage1"}}
    (text,) = ranks.run(f"{JOBS}:refuse_option", 1, given).values
    assert all(f"{name}: " in text for name in (*arguments, "sharding"))
