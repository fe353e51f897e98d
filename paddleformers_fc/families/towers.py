"""Vision towers that several families share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paddleformers_fc.families import language as lang
from paddleformers_fc.families.declarations import Statements, Tower

_NONE: Mapping[str, Any] = {}
_NAMES = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2", "self_attn.qkv": "attn.qkv"}
_NAMES |= {"self_attn.o_proj": "attn.proj", "up_gate_proj": "linear_fc1", "down_proj": "linear_fc2"}

EMBEDDINGS = lang.declared(
    lang.patches("patch_embed.proj", "True"),
    lang.same("pos_embed.weight", shape=("num_position_embeddings", "hidden")),
)
"""The embeddings of patches and of their positions."""

BLOCK = lang.declared(
    lang.norm("norm{1,2}", bias="True"),
    lang.replicated("attn.qkv", "hidden", "3 * hidden", "True"),
    lang.replicated("attn.proj", "hidden", "hidden", "True"),
    lang.replicated("mlp.linear_fc1", "hidden", "ffn", "True"),
    lang.replicated("mlp.linear_fc2", "ffn", "hidden", "True"),
)
"""A layer of Qwen 3's tower in PaddleFormers' classes, which is whole on every rank."""

FLEET_BLOCK = lang.renamed(
    _NAMES,
    lang.norm("{input,post_attention}_layernorm", bias="True"),
    lang.fused_qkv("self_attn", ("qkv",), "True"),
    lang.row("self_attn.o_proj", "hidden", "hidden", "True"),
    lang.column("mlp.up_gate_proj", "hidden", "ffn", "True"),
    lang.row("mlp.down_proj", "ffn", "hidden", "True"),
)
"""The same layer in PaddleFleet's classes: query, key and value lie per head, and in files side by side."""


def merger(name: str, size: str) -> Statements:
    """Declare the layers that turn ``merged`` patches into one token, after a norm over ``size``."""
    return lang.declared(
        lang.norm(f"{name}.norm", size, "True"),
        lang.replicated(f"{name}.linear_fc1", "merged", "merged", "True"),
        lang.replicated(f"{name}.linear_fc2", "merged", "out_hidden_size", "True"),
    )


MERGERS = lang.declared(merger("merger", "hidden"), merger("deepstack_merger_list.{deep}", "merged"))
DEEP = lang.Numbers("deep", "len(vision.deepstack_visual_indexes)")
"""The mergers of Qwen 3 VL: one behind the tower, others behind the layers of ``deepstack_visual_indexes``."""

QWEN3_VL = lang.tower(
    "vision",
    "vision_config",
    "model",
    layers="visual.blocks.{block}",
    layer=[lang.of_class(lang.FORMERS, BLOCK)],
    outside=[
        lang.of_class(lang.FORMERS, lang.within("visual", EMBEDDINGS, MERGERS)),
        lang.of_class(
            lang.FLEET,
            lang.within("vision_model", EMBEDDINGS, canonical="visual"),
            lang.within("vision_model.decoder", MERGERS, canonical="visual"),
            lang.within("vision_model.decoder.layers.{block}", FLEET_BLOCK, canonical="visual.blocks.{block}"),
        ),
    ],
    sizes=lang.VISION_SIZES,
    defaults={**lang.VISION_DEFAULTS, "patch_size": 16, "num_position_embeddings": 2304},
)
"""The tower of Qwen 3 VL, dense and MoE."""


_MERGED = {"merger.mlp.up_gate_proj": "merger.linear_fc1", "merger.mlp.down_proj": "merger.linear_fc2"}
_MERGED |= {"patch_embed.": "patch_embed.proj."}
QWEN3_5 = lang.tower(
    "vision",
    "vision_config",
    "model",
    layers="vision_model.layers.{block}",
    layer=[],
    outside=[
        lang.within(
            "vision_model",
            lang.renamed(
                _MERGED,
                lang.patches("patch_embed", "True"),
                lang.same("pos_embed.weight", shape=("num_position_embeddings", "hidden")),
                lang.norm("merger.norm", bias="True"),
                lang.column("merger.mlp.up_gate_proj", "merged", "merged", "True"),
                lang.row("merger.mlp.down_proj", "merged", "out_hidden_size", "True"),
            ),
            canonical="visual",
        ),
        lang.within("vision_model.layers.{block}", FLEET_BLOCK, canonical="visual.blocks.{block}"),
    ],
    sizes=lang.VISION_SIZES,
    defaults={**lang.VISION_DEFAULTS, "patch_size": 16, "num_position_embeddings": 2304},
)
"""The tower of Qwen 3.5, dense and MoE, in PaddleFleet's class."""


def glm(
    merger_size: str,
    *,
    layer: Iterable[Statements],
    outside: Iterable[Statements] = (),
    output_bias: str = "",
    defaults: Mapping[str, Any] = _NONE,
) -> Tower:
    """Declare the tower of GLM's models, which is whole on every rank.

    Args:
        merger_size: the inner size of the feed-forward that follows the tower.
        layer: the parts of a layer beside norms, query, key, value and output.
        outside: the parts of the tower outside of layers that not all models have.
        output_bias: the condition under which the output of the attention has a bias.
        defaults: the values of the model's class for keys that not all models have.
    """
    width = "out_hidden_size"
    return lang.tower(
        "vision",
        "vision_config",
        "model.visual",
        layers="blocks.{block}",
        layer=[
            lang.norm("norm{1,2}"),
            lang.replicated("attn.qkv", "hidden", "3 * hidden", "attention_bias"),
            lang.replicated("attn.proj", "hidden", "hidden", output_bias),
            *layer,
        ],
        outside=[
            lang.patches("patch_embed.proj", "True"),
            lang.norm("post_layernorm"),
            lang.same("downsample.weight", shape=(width, "hidden", "spatial_merge_size", "spatial_merge_size")),
            lang.same("downsample.bias", shape=(width,)),
            lang.replicated("merger.proj", width, width),
            lang.norm("merger.post_projection_norm", width, "True"),
            lang.replicated("merger.{gate,up}_proj", width, merger_size),
            lang.replicated("merger.down_proj", merger_size, width),
            *outside,
        ],
        sizes=lang.VISION_SIZES,
        defaults={**lang.VISION_DEFAULTS, "patch_size": 14, "image_size": 336, **defaults},
    )


ERNIE = lang.tower(
    "vision",
    "vision_config",
    "vision_model",
    layers="blocks.{block}",
    layer=[
        lang.norm("norm{1,2}", bias="True"),
        lang.replicated("attn.qkv", "hidden", "3 * hidden", "True"),
        lang.replicated("attn.proj", "hidden", "hidden", "True"),
        lang.replicated("mlp.fc1", "hidden", "ffn", "True"),
        lang.replicated("mlp.fc2", "ffn", "hidden", "True"),
    ],
    outside=[
        lang.replicated("patch_embed.proj", "in_channels * patch_size * patch_size", "hidden"),
        lang.norm("ln", bias="True"),
    ],
    sizes={**lang.VISION_SIZES, "ffn": "intermediate_size or hidden * mlp_ratio"},
    defaults=lang.VISION_DEFAULTS,
)
"""The tower of ERNIE 4.5 VL, which is whole on every rank."""

RESAMPLER = lang.declared(
    lang.row("spatial_linear.0", "spatial", "spatial", "True"),
    lang.replicated("temporal_linear.0", "temporal", "spatial", "True"),
    lang.replicated("{spatial,temporal}_linear.2", "spatial", "spatial", "True"),
    lang.norm("{spatial,temporal}_linear.3", "spatial", "True"),
    lang.replicated("mlp", "spatial", "hidden", "True"),
    lang.norm("after_norm"),
)
"""The layers that turn the tower's patches of ERNIE 4.5 VL into tokens, over space and over time."""
