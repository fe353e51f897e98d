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
from paddleformers_fc.errors import FlexError
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
        pytest.param(PP2, "mp2", 2, marks=pytest.mark.chosen),
        (SINGLE, "both2x2", 4),
        (SD2V1, "rows3", 3),
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
    paddleformers_fc.open(source).export(tmp_path / "hf")
    given |= {"target": str(tmp_path / "again/checkpoint-1"), "weights": str(tmp_path / "hf")}
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


@on_ranks(2)
def test_tensors_without_a_family_are_loaded_by_name_under_other_placements(tmp_path: Path) -> None:
    import numpy as np
    import paddle
    import paddle.distributed as dist

    dist.init_parallel_env()
    mesh = dist.ProcessMesh([0, 1])
    values = {"a": np.arange(21, dtype="float32").reshape(7, 3), "b": np.arange(5, dtype="float32"), "c": np.ones(1)}

    def placed(zero: bool, **axes: int) -> dict[str, Any]:
        return {
            name: dist.shard_tensor(
                paddle.to_tensor(value * (not zero)),
                mesh,
                [dist.Shard(axes[name])] if name in axes else [dist.Replicate()],
            )
            for name, value in values.items()
        }

    first, second = (tmp_path / name / "checkpoint-1" for name in ("first", "second"))
    paddleformers_fc.save({"model": placed(False, a=0, b=0)}, first, step=1)
    other = placed(True, a=1)
    assert not paddleformers_fc.load(other, first).fresh
    paddleformers_fc.save(second, other, step=1)
    mine = slice(2) if dist.get_rank() == 0 else slice(2, 3)
    for name, part in (("a", values["a"][:, mine]), ("b", values["b"]), ("c", values["c"])):
        assert (other[name]._local_value().numpy() == part).all()
    assert paddleformers_fc.open(first).diff(paddleformers_fc.open(second)).equal


@on_ranks(2)
def test_a_state_dict_that_cannot_be_placed_is_refused_with_the_reason(tmp_path: Path) -> None:
    import paddle
    import paddle.distributed as dist

    dist.init_parallel_env()
    mesh = dist.ProcessMesh([0, 1])
    part = dist.auto_parallel.api.dtensor_from_local(paddle.ones([2, 4]), mesh, [dist.Partial()])
    cut = dist.shard_tensor(paddle.ones([8, 4]), mesh, [dist.Shard(0, split_factor=2)])
    good = dist.shard_tensor(paddle.ones([8, 4]), mesh, [dist.Shard(0)])
    local = paddle.ones([2, 2])
    local.is_distributed = True
    orphan = "linear_0.w_0.dist_moment1_0"
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"w": part}, ("Partial(reduce_type=SUM)", "the tensor is the sum of the local values", "distributed.reshard")),
        ({"w": cut}, ("split_factor", "is not one box")),
        ({"w": good, orphan: good}, (f"{orphan}: the state dict has no weight for this state", "**model.state_dict()")),
        ({"model": {"w": good}, "other": {"w": good}}, ("w: 2 entries",)),
        ({"w": good, "epoch": 3}, ("Invalid entry 'epoch'", "type int")),
        ({"w": local}, ("tensor-parallel layer", "Pass the layer")),
    ]
    for state_dict, texts in cases:
        with pytest.raises(FlexError) as refused:
            paddleformers_fc.save(state_dict, tmp_path / "checkpoint-1")
        assert all(text in refused.value.render() for text in texts), refused.value.render()
    assert not (tmp_path / "checkpoint-1").exists()


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


SAMPLE = ("sd2v2", "Paddle's FlexCheckpoint")


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
    [
        pytest.param(*case, marks=pytest.mark.slow if is_slow(*case) else [pytest.mark.chosen] * (case == SAMPLE))
        for case in CASES
    ],
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


@pytest.mark.parametrize(("scheme", "layout"), [("mp2", TP2), ("dp2mp2", SINGLE)], ids=["mp2", "dp2mp2"])
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


@pytest.mark.parametrize("layout", [SD2V2, PP2], ids=lambda one: one.name)
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
