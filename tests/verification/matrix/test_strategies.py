"""Every strategy of the matrices through the real Trainer: loaded, saved as loaded, trained on, and loaded back.

The cells are those of the published matrices, with an average of the weights; ``tests/trainer`` resumes under every
single strategy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from verification.digests import canonical_digests
from verification.matrix.recipe import SAVED_AT, Recipe, cells_of
from verification.matrix.report import reason
from verification.matrix.running import Workshop

LLAMA = Recipe(
    title="Llama",
    text="",
    model_type="llama",
    model={"num_hidden_layers": 8, "num_key_value_heads": 4},
    sources=("dp2",),
    targets=(
        *("sd2v1", "sd2v2", "sd2s2", "sd2s3", "tp2", "pp2", "pp4vpp2", "sd2s2+tp2", "tp2+pp2+sd2v1", "tp2+pp2+sd2"),
    ),
    arguments={"learning_rate": 0.002, "flex_ema_decay": 0.9},
)
ERNIE = structs.replace(
    LLAMA,
    title="ERNIE",
    model_type="ernie4_5_moe",
    model={"num_key_value_heads": 4, "num_nextn_predict_layers": 1},
    targets=("sd2(ep2)", "tp2(ep2)", "sd2+tp2(ep2)", "pp2", "tp2(ep2)+pp2"),
    arguments={**LLAMA.arguments, "max_grad_norm": 0.0},
    micro_batch=1,
)
# Gradients are rounded to eight bits before they are added up, so that layouts differ by more than a float32.
HALF: dict[str, Any] = {"bf16": True, "tolerance": 2e-3}
# On a CPU only the backward of multi-token prediction cannot be had in bfloat16: it has no kernel for concat_grad.
HALF_ERNIE: dict[str, Any] = {**HALF, "targets": ("tp2(ep2)+pp2",)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        LLAMA,
        ERNIE,
        structs.replace(LLAMA, **HALF, targets=("sd2s3", "tp2+pp2+sd2")),
        structs.replace(ERNIE, **HALF_ERNIE),
    ],
    ids=["llama", "ernie", "llama in bfloat16", "ernie in bfloat16"],
)
def test_every_strategy_takes_over_what_another_saved_and_gives_it_back(recipe: Recipe, tmp_path: Path) -> None:
    cells = cells_of(recipe)
    with Workshop(recipe, tmp_path) as workshop:
        outcomes = list(workshop.run(cells))
    assert [(one.name, reason(one)) for one in outcomes if not one.right(recipe.tolerance)] == []
    assert all(len(one.losses) == 3 for one in outcomes)
    roles = {"model_state", "optimizer_state", "ema_state", *(["master_weight"] if recipe.bf16 else [])}
    sources = list(tmp_path.glob(f"sources/*/run/checkpoint-{SAVED_AT}"))
    for source in sources:
        assert {digest.role for digest in canonical_digests(source)} == roles
    assert len(sources) == len({cell.hold_predictions for cell in cells})
    if len(sources) == 2:
        held, trained = (predictions(one) for one in sorted(sources, key=lambda one: "held" not in str(one)))
        assert held.keys() == trained.keys()
        assert len(held) == 12
        assert not held.items() & trained.items()


def predictions(checkpoint: Path) -> dict[str, str]:
    """Digests of the layers of multi-token prediction, which are held and not trained where a side is a pipeline."""
    found = canonical_digests(checkpoint, roles=["model_state"])
    return {one.name: one.md5 for one in found if "mtp_" in one.name}
