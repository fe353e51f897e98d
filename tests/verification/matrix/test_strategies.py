"""Every strategy of the matrices through the real Trainer: loaded, saved as loaded, trained on, and loaded back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.execute.digest import TensorDigest
from paddleformers_fc.execute.export import export_checkpoint
from verification.digests import canonical_digests
from verification.forkserver import ForkServer
from verification.matrix.jobs import JOB, SAVED_AT, Training
from verification.matrix.layouts import MatrixLayout, parse_layout

LLAMA = Training(
    model_type="llama",
    model={"num_hidden_layers": 8, "num_key_value_heads": 4},
    arguments={"learning_rate": 0.002, "flex_ema_decay": 0.9},
    layout=parse_layout("dp2"),
    output_dir="",
)
ERNIE = Training(
    model_type="ernie4_5_moe",
    model={"num_key_value_heads": 4, "num_nextn_predict_layers": 1},
    arguments={"learning_rate": 0.002, "max_grad_norm": 0.0, "flex_ema_decay": 0.9},
    layout=parse_layout("dp2"),
    output_dir="",
    micro_batch=1,
)
HELD = replace(ERNIE, hold_predictions=True)
TOLERANCE = 1e-6
HALF_TOLERANCE = 2e-3

CELLS = [
    *((LLAMA, name) for name in ("dp4", "sd2v1", "sd2v2", "sd2s2", "sd2s3", "tp2", "pp2", "pp4vpp2")),
    *((LLAMA, name) for name in ("sd2+tp2", "sd2s2+tp2", "tp2+pp2", "tp2+pp2+sd2v1", "tp2+pp2+sd2")),
    *((ERNIE, name) for name in ("sd2(ep2)", "tp2(ep2)", "sd2+tp2(ep2)")),
    *((HELD, name) for name in ("pp2", "tp2(ep2)+pp2")),
]

CHOSEN = {(LLAMA.model_type, "tp2+pp2"), (ERNIE.model_type, "sd2(ep2)")}
"""What make test trains; tests/trainer resumes under every single strategy."""

# On a CPU only the backward of multi-token prediction cannot be had in bfloat16: it has no kernel for concat_grad.
HALF = [
    *((LLAMA, name) for name in ("pp4vpp2", "sd2s2+tp2", "sd2s3", "tp2+pp2+sd2")),
    (HELD, "tp2(ep2)+pp2"),
]


def half(name: str) -> MatrixLayout:
    """A layout in bfloat16 O2."""
    return replace(parse_layout(name), bf16=True)


@dataclass(frozen=True)
class Source:
    """A run that was not interrupted: its checkpoint, what is in it, its export, and the losses that follow."""

    checkpoint: Path
    digests: list[TensorDigest]
    exported: set[str]
    losses: list[float]


class Sources:
    """The sources of this module, each trained when it is first asked for."""

    def __init__(self, ranks: ForkServer, root: Path) -> None:
        self._ranks, self._root = ranks, root
        self._made: dict[tuple[str, bool, bool], Source] = {}

    def of(self, training: Training) -> Source:
        key = (training.model_type, training.hold_predictions, training.layout.bf16)
        if key not in self._made:
            directory = self._root / "-".join(map(str, key))
            losses = train(self._ranks, replace(training, output_dir=str(directory)))
            checkpoint = directory / "checkpoint-3"
            digests = list(canonical_digests(checkpoint))
            self._made[key] = Source(checkpoint, digests, exported(checkpoint, directory / "hf"), losses[SAVED_AT:])
        return self._made[key]


def train(ranks: ForkServer, training: Training) -> list[float]:
    losses: list[float] = ranks.run(JOB, training.layout.nproc, training.to_json()).values[0]
    return losses


def exported(checkpoint: Path, directory: Path) -> set[str]:
    return set(export_checkpoint(checkpoint, directory).digests().values())


@pytest.fixture(scope="module")
def sources(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(ranks, tmp_path_factory.mktemp("sources"))


@pytest.mark.parametrize(
    ("training", "name"),
    [
        pytest.param(one, name, marks=pytest.mark.chosen) if (one.model_type, name) in CHOSEN else (one, name)
        for one, name in CELLS
    ],
    ids=[f"{one.model_type}-{name}" for one, name in CELLS],
)
def test_every_strategy_takes_over_what_another_saved_and_gives_it_back(
    ranks: ForkServer, sources: Sources, tmp_path: Path, training: Training, name: str
) -> None:
    source = sources.of(training)
    forth = replace(
        training, layout=parse_layout(name), output_dir=str(tmp_path / "there"), resume=str(source.checkpoint)
    )
    losses = train(ranks, forth)
    there = tmp_path / "there" / "checkpoint-3"
    assert list(canonical_digests(there)) == source.digests
    assert exported(there, tmp_path / "hf") == source.exported
    assert losses == pytest.approx(source.losses, abs=TOLERANCE, rel=0)
    assert len(losses) == 3
    back = replace(training, output_dir=str(tmp_path / "back"), resume=str(there), last_step=SAVED_AT)
    assert train(ranks, back) == []
    assert list(canonical_digests(tmp_path / "back" / "checkpoint-3")) == source.digests


@pytest.mark.parametrize(("training", "name"), HALF, ids=[f"{one.model_type}-{name}" for one, name in HALF])
def test_bfloat16_and_its_master_weights_are_taken_over_by_every_mix_of_strategies(
    ranks: ForkServer, sources: Sources, tmp_path: Path, training: Training, name: str
) -> None:
    source = sources.of(replace(training, layout=half("dp2")))
    target = replace(training, layout=half(name), output_dir=str(tmp_path), resume=str(source.checkpoint))
    # Gradients are rounded to eight bits before they are added up, so that layouts differ by more than a float32.
    assert train(ranks, target) == pytest.approx(source.losses, abs=HALF_TOLERANCE, rel=0)
    roles = {"model_state", "master_weight", "optimizer_state", "ema_state"}
    assert {digest.role for digest in source.digests} == roles
    assert list(canonical_digests(tmp_path / "checkpoint-3")) == source.digests


@pytest.mark.slow
def test_prediction_layers_that_are_held_are_saved_and_stay_as_they_were(sources: Sources) -> None:
    def predictions(source: Source) -> dict[str, str]:
        return {one.name: one.md5 for one in source.digests if "mtp_" in one.name and one.role == "model_state"}

    held, trained = predictions(sources.of(HELD)), predictions(sources.of(ERNIE))
    assert held.keys() == trained.keys()
    assert len(held) == 12
    assert not held.items() & trained.items()


@pytest.mark.slow
@pytest.mark.parametrize(("training", "name"), [(LLAMA, "sd2s3"), (ERNIE, "tp2(ep2)")], ids=["llama", "ernie4_5_moe"])
def test_weights_and_states_set_by_hand_continue_as_those_that_were_loaded(
    ranks: ForkServer, sources: Sources, tmp_path: Path, training: Training, name: str
) -> None:
    source = sources.of(training)
    loaded: dict[str, Any] = {"layout": parse_layout(name), "resume": str(source.checkpoint)}
    runs = {
        by_hand: train(ranks, replace(training, output_dir=str(tmp_path / str(by_hand)), by_hand=by_hand, **loaded))
        for by_hand in (False, True)
    }
    assert runs[True] == runs[False]
    assert list(canonical_digests(tmp_path / "True" / "checkpoint-3")) == source.digests
