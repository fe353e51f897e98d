"""Numbers are the last judge: logits of PaddleFormers' models, filled by us, against those of Transformers.

Every fixture is a checkpoint that Transformers wrote, with logits that it computed on PyTorch. It is loaded through the
replaced ``from_pretrained``, and exported again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.families import own_families
from tests.harness import tiny
from tests.harness.on_ranks import run_on_ranks
from tests.harness.tiny import MatrixLayout
from tests.parity import fixtures
from tests.parity.evidence import NOT_COMPARED, REFUSED, REFUSED_APART
from tests.parity.jobs import compare, fill_built
from verification.forkserver import ForkServer

TOLERANCE = 2e-6
"""Of logits of order one in float32."""

NAMES = fixtures.names()
FIRST = [name for name in NAMES if "-" not in name]
"""The first fixture of every family."""
QUICK = ["llama", "ernie4_5_moe", "gpt_oss", "qwen2_5_vl", "qwen3_next"]
"""Fixtures that ``make test`` compares under tensor parallelism."""


def compared(ranks: ForkServer, names: list[str], layout: MatrixLayout, directory: Path) -> dict[str, dict[str, Any]]:
    """What a job finds for fixtures."""
    found, *_ = run_on_ranks(ranks, layout.nproc, compare, names=names, layout=layout, output_dir=directory)
    return dict(found)


def require_equal(found: dict[str, dict[str, Any]], refused: dict[str, str]) -> None:
    """Logits within the tolerance and equal exports, but of those that are refused for a reason."""
    for name in found.keys() & refused.keys():
        assert refused[name] in found[name].get("error", "no error"), name
        assert found[name].get("export", []) == []
    rest = {name: one for name, one in found.items() if name not in refused}
    wrong = {name: one for name, one in rest.items() if one.get("export") != [] or not one["logits"] < TOLERANCE}
    assert wrong == {}


def test_every_family_has_three_fixtures_or_a_reason() -> None:
    count = {family.name: sum(name.split("-")[0] == family.name for name in NAMES) for family in own_families()}
    assert {name for name, number in count.items() if number < 3} == NOT_COMPARED.keys() & count.keys()
    assert all((fixtures.DIRECTORY / f"{name}.npz").stat().st_size < 300_000 for name in NAMES)


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        pytest.param(tiny.SINGLE, FIRST, marks=pytest.mark.chosen),
        pytest.param(tiny.TP2, QUICK, marks=pytest.mark.chosen),
        pytest.param(tiny.SINGLE, [name for name in NAMES if name not in FIRST], marks=pytest.mark.slow),
        pytest.param(tiny.TP2, [name for name in NAMES if name not in QUICK], marks=pytest.mark.slow),
    ],
    ids=["of every family", "under tensor parallelism", "of further models", "of further models in parallel"],
)
def test_logits_and_exports_are_those_of_transformers(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, names: list[str]
) -> None:
    require_equal(compared(ranks, names, layout, tmp_path), REFUSED if layout.tp == 1 else REFUSED_APART)


def test_a_model_that_paddleformers_built_with_other_positions_than_its_weights_have_is_refused(
    ranks: ForkServer, tmp_path: Path
) -> None:
    (error,) = run_on_ranks(ranks, 1, fill_built, name="qwen3_vl", output_dir=tmp_path)
    assert "MismatchError: Qwen3VLConfig of PaddleFormers does not read the rotary embedding" in error
    _, _, evidence = error.partition("rope_parameters: ")
    stored, _, live = evidence.partition(" in config.json, ")
    assert "'mrope_section': [1, 1, 2]" in stored
    assert "1000000.0} in the model" in live
