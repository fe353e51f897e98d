"""The mapping of every family is the one of earlier versions: checkpoints and open weights keep their meaning."""

from __future__ import annotations

import hashlib

import pytest

from paddleformers_fc.families import ModelDescription, bind, enumerate_tensors
from paddleformers_fc.families.description import IS_NLP
from paddleformers_fc.families.registry import tiny_models
from tests.families.spaces import BY_NAME

CHANGES = (
    {},
    {"tie_word_embeddings": True},
    {"fd_fallback": True},
    {"moe_expert_fusion": True, "num_hidden_layers": 4},
)
DIGESTS = {
    "deepseek_v3": "f71a562b5dc8f811",
    "deepseek_v32": "595f4a199c90389f",
    "deepseek_v4": "ed350a2d444a8892",
    "ernie4_5": "5dfc0bed309a3f09",
    "ernie4_5_moe": "fc9cf0c259fc19a6",
    "ernie4_5_moe_vl": "7e4a187b5e14744d",
    "gemma3_text": "ff19d5c171f8ff1d",
    "glm4_moe": "830460589e967061",
    "glm4v_moe": "e0339ff308b8707f",
    "glm_moe_dsa": "88cb087e26d52511",
    "glm_ocr": "47e3b6769de6875a",
    "gpt_oss": "af8885655937c950",
    "kimi_k2": "d5ad0815a42fed13",
    "llama": "e243574e47130477",
    "minimax_m2": "e43af952f1c46d3c",
    "paddleocr_vl": "5e4432d644c49e00",
    "phi3": "21832729e2e11060",
    "qwen2": "008891843bf0e8e0",
    "qwen2_5_vl": "ed3bb89495ba3e6a",
    "qwen2_moe": "6b6d542cd89ad14d",
    "qwen3": "87f8e2dce4cf995f",
    "qwen3_5": "b2fdd5c9bd03db50",
    "qwen3_5_moe": "3127fa93ab115205",
    "qwen3_moe": "4a7c871d25704adf",
    "qwen3_next": "8abf9b3a7337c7c1",
    "qwen3_vl": "a08f253c73aeb1f3",
    "qwen3_vl_moe": "445e7f78ebc08b40",
}
NLP_DIGESTS = {"llama": "ac0b26d263556720", "qwen2": "4e14913bfc62f951"}


def digest(tiny_ones: list[ModelDescription]) -> str:
    """A digest of all tensors and rules of a family's tiny models, under 1, 2 and 4 tensor-parallel ranks."""
    lines = []
    family = BY_NAME[tiny_ones[0].model_type]
    for tiny in tiny_ones:
        for change in CHANGES:
            model = ModelDescription({**tiny.config, **change}, tiny.is_fleet)
            declared = sorted(enumerate_tensors(family, model), key=lambda one: one.name)
            lines += [f"{one.name} {one.shape} {one.dtype} {one.cut} {one.expert_axis}" for one in declared]
            for tp in (1, 2, 4):
                rules = bind(family, model, [one.under(tp) for one in declared])
                lines += [repr(one) for one in (*sorted(rules.rules, key=repr), rules.ties, sorted(rules.fresh))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", BY_NAME)
def test_the_mapping_of_a_family_does_not_change(name: str) -> None:
    assert digest([one for one in tiny_models(BY_NAME[name]) if IS_NLP not in one.config]) == DIGESTS[name]


@pytest.mark.parametrize("name", NLP_DIGESTS)
def test_the_mapping_of_a_class_of_paddlenlp_does_not_change(name: str) -> None:
    assert digest([one for one in tiny_models(BY_NAME[name]) if IS_NLP in one.config]) == NLP_DIGESTS[name]
