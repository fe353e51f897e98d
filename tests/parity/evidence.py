"""The evidence for every family beside its proof: logits compared with those of Transformers, layouts resumed.

What PaddleFormers gets wrong is compared by the tests of this package.
"""

from __future__ import annotations

import re
from pathlib import Path

from paddleformers_fc.families import Family
from paddleformers_fc.families.registry import NLP, family_classes
from tests.parity import fixtures

_FLEET = "PaddleFleet is on no public index"

NOT_COMPARED = dict.fromkeys(
    ("kimi_k2", "minimax_m2", "glm_moe_dsa", "deepseek_v32", "deepseek_v4", "qwen3_5", "qwen3_5_moe"), _FLEET
)
"""Families whose logits are not compared with those of Transformers, and the reasons."""

# Faults of PaddleFormers that leave no logits to compare.
EVERY_LAYER = "model.layers.0.mlp.gate.weight: shape [32, 4] is declared for `stepped("
REFUSED = {
    "qwen2_moe-every_second_layer": EVERY_LAYER,  # It builds experts in layers that have none.
    "ernie4_5_moe_vl": "has no attribute 'AsyncLoad'",  # It copies the kinds of tokens from an accelerator.
    "glm_ocr-tied": "lm_head.weight",  # Its head is a parameter of its own, which tied files lack.
}
REFUSED_APART = REFUSED | {
    # Each rank describes its own sinks as those of all.
    **dict.fromkeys(
        ("gpt_oss", "gpt_oss-no_biases", "gpt_oss-tied"),
        "self_attn.sinks: is described as unsharded with shape [2]",
    ),
    # Its latent attention runs only with sequence parallelism, and that only with compressed queries.
    "deepseek_v3-whole_queries": "'DeepseekV3Attention' object has no attribute 'q_a_proj'",
    # Two layers of the projector are both cut by their outputs, which no rank gathers in between.
    **dict.fromkeys(
        ("paddleocr_vl", "paddleocr_vl-tied", "paddleocr_vl-biases"),
        "But receiving the [1]dimension of Input(X) is [64], and the [0] dimension of Input(Y) is [128]",
    ),
    # The resampler fuses a bias into a product, which Paddle has on GPUs alone.
    **dict.fromkeys([name for name in fixtures.names() if name.startswith("ernie4_5_moe_vl")], "fuse_matmul_bias=True"),
}

ONE_RANK = {
    "ernie4_5_moe_vl": "compared for text without experts; the rest runs only on GPUs",
    "gpt_oss": "no tensor parallelism: PaddleFormers describes sharded attention sinks as complete",
    "paddleocr_vl": "under tensor parallelism only exports are compared: PaddleFormers' forward pass fails",
}
"""Families whose logits are compared on one rank alone, and the reasons."""

EXCEPT = {
    "deepseek_v3": "TP 2 with q_lora_rank and sequence parallelism, which PaddleFormers requires",
    "glm_ocr": "files with tied embeddings are not supported: PaddleFormers never ties lm_head",
    "qwen2_moe": "dense layers are not supported: PaddleFormers builds experts in every layer",
}
"""Configurations that are not compared, and the reasons."""

_RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
_PAGES = {"llama": "llama2", **{name: name for name in ("ernie4_5_moe", "qwen3", "qwen2_5_vl", "qwen3_moe")}}
"""Pages with the layouts of real ranks that are resumed under other ones, bit for bit."""

SIMULATED = 16
"""Layouts of every class resumed under other ones by simulated ranks, in ``docs/results/simulated.md``."""


HEADINGS = ("family", "classes", "mapping", "equal logits", "layouts", "note")


def row(family: Family) -> tuple[str, ...]:
    """Return the texts of a family under :data:`HEADINGS`."""
    name, classes = family.name, family_classes(family)
    cells = SIMULATED * sum(kind != NLP for kind in classes)
    compared = [one for one in fixtures.names() if one.split("-")[0] == name and one not in REFUSED]
    logits = f"{len(compared)}, {'TP 1' if name in ONE_RANK else 'TP 1 and 2'}" if compared else "none"
    note = next((notes[name] for notes in (ONE_RANK, EXCEPT) if name in notes), "")
    if name not in _PAGES:
        return name, ", ".join(classes), "simulated", logits, f"{cells}/{cells}", note
    page = (_RESULTS / f"{_PAGES[name]}.md").read_text()
    found = re.search(r"^\* (\d+ of \d+) cells: every tensor", page, re.MULTILINE)
    assert found, name
    return name, ", ".join(classes), "trained", logits, found[1].replace(" of ", "/"), note
