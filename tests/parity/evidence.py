"""The evidence for every family beside its proof: logits compared with those of Transformers, layouts resumed.

The constants are results of the tests of this package, which compare them, and of the pages in ``docs/results``.
"""

from __future__ import annotations

from paddleformers_fc.families import Family
from paddleformers_fc.families.registry import NLP, family_classes

_FLEET = "no logits compared: PaddleFleet is on no public index"
_FLEET_LAYERS = "no logits compared: the class needs PaddleFleet, which is on no public index"

NOT_COMPARED = {
    **dict.fromkeys(("kimi_k2", "minimax_m2", "glm_moe_dsa", "deepseek_v32", "deepseek_v4"), _FLEET),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _FLEET_LAYERS),
}
"""Families whose logits are not compared with those of Transformers, and the reasons."""

FIXTURES = {
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "gemma3_text", "gpt_oss", "phi3", "deepseek_v3", "glm4_moe"), 3),
    **dict.fromkeys(("qwen2", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_next", "qwen3_moe", "glm4v_moe"), 3),
    **dict.fromkeys(("qwen2_moe", "glm_ocr", "paddleocr_vl", "ernie4_5_moe_vl"), 3),
    **dict.fromkeys(("llama", "qwen3"), 4),
}
"""Number of checkpoints of Transformers whose logits are compared."""

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

TRAINED = {
    "llama": "100 of 100 cells",
    "ernie4_5_moe": "64 of 64 cells",
    "qwen3": "16 of 16 cells",
    "qwen2_5_vl": "20 of 20 cells",
    "qwen3_moe": "16 of 16 cells",
}
"""Layouts of real ranks resumed under other ones, bit for bit, in ``docs/results``."""

SIMULATED = 16
"""Layouts of every class resumed under other ones by simulated ranks, in ``docs/results/simulated.md``."""


HEADINGS = ("family", "classes", "mapping", "logits compared", "layouts", "note")


def row(family: Family) -> tuple[str, ...]:
    """Return the texts of a family under :data:`HEADINGS`."""
    name, classes = family.name, family_classes(family)
    cells = SIMULATED * sum(kind != NLP for kind in classes)
    fixtures, degrees = FIXTURES.get(name, 0), "TP 1" if name in ONE_RANK else "TP 1, TP 2"
    compared = f"{fixtures} checkpoints, {degrees}" if fixtures else ""
    note = next((notes[name] for notes in (NOT_COMPARED, ONE_RANK, EXCEPT) if name in notes), "")
    verified = "trained" if name in TRAINED else "simulated"
    return name, ", ".join(classes), verified, compared, TRAINED.get(name, f"{cells} of {cells} cells"), note
