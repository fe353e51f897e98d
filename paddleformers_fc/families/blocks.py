"""The parts that many families are built of: ends, norms, attention, feed-forward, experts, prediction layers.

Each is a few statements under a given name, with shapes, tensor-parallel axes and conditions; a family adds what is its
own. A *column* is a linear layer whose outputs tensor parallelism cuts, a *row* one whose inputs it cuts. ``bias``
is the condition under which a layer has a bias, empty for never.

Two classes of models have names of their own: PaddleFormers' layers, and those of PaddleFleet, which keep the
embedding in ``model.embedding`` and the head in ``model.lm_head``.
"""

from __future__ import annotations

from dataclasses import replace

from paddleformers_fc.families.declarations import (
    Geometry,
    Numbers,
    Statements,
    TiedName,
    as_stored,
    declared,
    fused,
    linear,
    only,
    renamed,
    same,
    stacked,
)

LAYER = "model.layers.{layer}"
PREDICTION = "model.layers.{mtp}.transformer_layer"

_EMPTY_LAYERS = "num_empty_layers_add_in_head or 0"


def fleet_numbers(shift: str = _EMPTY_LAYERS) -> tuple[Numbers, ...]:
    """The numbers of layers and prediction layers of a PaddleFleet class, which counts empty layers as well."""
    return (Numbers("layer", "layers", shift=shift), Numbers("mtp", "mtp_layers", start="layers", shift=shift))


def either_numbers() -> tuple[Numbers, ...]:
    """The same of a family that has a class of both kinds; PaddleFormers' has no empty layers before the first."""
    return fleet_numbers(f"({_EMPTY_LAYERS}) * is_fleet")


TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}
"""What most tiny configurations share; every size is divisible by 4 ranks."""

TINY_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}
"""The tiny configuration of a latent attention."""

STEPPED = "layer not in (mlp_only_layers or ()) and (layer + 1) % decoder_sparse_step == 0"
"""Which layers have experts, where a configuration excepts some and takes every n-th of the others."""

EXPORTED_PREDICTION = {"num_nextn_predict_layers": "mtp_layers"}
"""A key that canonical configurations have. PaddleFormers drops it, as if it were a setting of a run."""

TIED_HEAD = TiedName("lm_head.weight", "model.embed_tokens.weight")
TIED_FLEET_HEAD = TiedName("model.lm_head.weight", "model.embedding.embed_tokens.weight")


def ends(embedding_cut: int | None = 0, head_bias: str = "lm_head_bias") -> Statements:
    """Embedding, last norm and head of a PaddleFormers model."""
    vocabulary = ("vocab", "hidden")
    return declared(
        same("model.embed_tokens.weight", shape=vocabulary, cut=embedding_cut),
        norm("model.norm"),
        same("lm_head.weight", shape=vocabulary, cut=0),
        only(head_bias, same("lm_head.bias", shape=("vocab",), cut=0)),
    )


def fleet_ends() -> Statements:
    """Embedding, last norm and head of a PaddleFleet model."""
    vocabulary = ("vocab", "hidden")
    return declared(
        same("model.embedding.embed_tokens.weight", "model.embed_tokens.weight", shape=vocabulary, cut=0),
        norm("model.norm"),
        same("model.lm_head.weight", "lm_head.weight", shape=vocabulary, cut=0),
    )


def either_ends() -> Statements:
    """Ends of a family that has a class of both kinds; ``is_fleet`` says which a model is of."""
    return declared(only("is_fleet", fleet_ends()), only("not is_fleet", ends()))


def norm(name: str, size: str = "hidden", bias: str = "") -> Statements:
    """A norm over ``size``; it is not cut."""
    return declared(same(f"{name}.weight", shape=(size,)), only(bias or "False", same(f"{name}.bias", shape=(size,))))


def column(name: str, inputs: str, outputs: str, bias: str = "") -> Statements:
    """A linear layer whose outputs are cut."""
    return declared(
        linear(f"{name}.weight", shape=(inputs, outputs), cut=1),
        only(bias or "False", same(f"{name}.bias", shape=(outputs,), cut=0)),
    )


def row(name: str, inputs: str, outputs: str, bias: str = "") -> Statements:
    """A linear layer whose inputs are cut; its bias is whole on every rank."""
    return declared(
        linear(f"{name}.weight", shape=(inputs, outputs), cut=0),
        only(bias or "False", same(f"{name}.bias", shape=(outputs,))),
    )


def replicated(name: str, inputs: str, outputs: str, bias: str = "") -> Statements:
    """A linear layer that is whole on every rank."""
    return declared(
        linear(f"{name}.weight", shape=(inputs, outputs)), only(bias or "False", same(f"{name}.bias", shape=(outputs,)))
    )


def attention(prefix: str, bias: str = "") -> Statements:
    """Query, key, value and output, each a layer of its own."""
    return declared(qkv(prefix, bias), attention_output(prefix, bias))


def fused_attention(prefix: str, bias: str = "", output_bias: str = "") -> Statements:
    """Query, key and value in one layer, as [q..q k v] per kv head, and the output."""
    return declared(fused_qkv(prefix, bias=bias), attention_output(prefix, output_bias))


def qkv(prefix: str, bias: str = "") -> Statements:
    """Query, key and value, each a layer of its own."""
    return declared(
        column(f"{prefix}.q_proj", "hidden", "q", bias), column(f"{prefix}.{{k,v}}_proj", "hidden", "kv", bias)
    )


def fused_qkv(
    prefix: str,
    canonical: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
    bias: str = "",
    geometry: Geometry = Geometry.FUSED_QKV,
) -> Statements:
    """``qkv_proj`` under ``prefix``, of the layers ``canonical`` there: three, or one that is fused itself."""
    weights, biases = ([f"{prefix}.{name}.{leaf}" for name in canonical] for leaf in ("weight", "bias"))
    width = "q + 2 * kv"
    return declared(
        fused(f"{prefix}.qkv_proj.weight", weights, geometry, ("hidden", width), 1),
        only(bias or "False", fused(f"{prefix}.qkv_proj.bias", biases, geometry, (width,), 0)),
    )


def attention_output(prefix: str, bias: str = "") -> Statements:
    """The output layer of an attention."""
    return row(f"{prefix}.o_proj", "q", "hidden", bias)


def either_head_norms(prefix: str) -> Statements:
    """Norms over the heads of query and key, which a PaddleFleet class calls ``layernorm``."""
    canonical = f"{prefix}.{{q,k}}_norm.weight"
    return declared(
        only("not is_fleet", same(canonical, shape=("head",))),
        only("is_fleet", same(f"{prefix}.{{q,k}}_layernorm.weight", canonical, shape=("head",))),
    )


def latent_attention(prefix: str, down_bias: str = "") -> Statements:
    """Attention whose query, key and value go through a narrow layer that is whole on every rank."""
    return declared(
        only("q_lora_rank", replicated(f"{prefix}.q_a_proj", "hidden", "q_lora_rank", down_bias)),
        only(
            "q_lora_rank", column(f"{prefix}.q_b_proj", "q_lora_rank", "heads * (qk_nope_head_dim + qk_rope_head_dim)")
        ),
        only("q_lora_rank", norm(f"{prefix}.q_a_layernorm", "q_lora_rank")),
        only("not q_lora_rank", column(f"{prefix}.q_proj", "hidden", "heads * (qk_nope_head_dim + qk_rope_head_dim)")),
        replicated(f"{prefix}.kv_a_proj_with_mqa", "hidden", "kv_lora_rank + qk_rope_head_dim", down_bias),
        norm(f"{prefix}.kv_a_layernorm", "kv_lora_rank"),
        column(f"{prefix}.kv_b_proj", "kv_lora_rank", "heads * (qk_nope_head_dim + v_head_dim)"),
        row(f"{prefix}.o_proj", "heads * v_head_dim", "hidden", down_bias),
    )


def ffn(prefix: str, size: str = "ffn", bias: str = "") -> Statements:
    """Gate, up and down, each a layer of its own."""
    return declared(gate_and_up(prefix, size, bias), down(prefix, size, bias))


def fused_ffn(prefix: str, size: str = "ffn", bias: str = "") -> Statements:
    """Gate and up in one layer, as [gate | up] per tensor-parallel rank, and down."""
    return declared(gate_up(prefix, size, bias=bias), down(prefix, size, bias))


def gate_and_up(prefix: str, size: str = "ffn", bias: str = "") -> Statements:
    """Gate and up, each a layer of its own."""
    return column(f"{prefix}.{{gate,up}}_proj", "hidden", size, bias)


def gate_up(
    prefix: str,
    size: str = "ffn",
    canonical: tuple[str, ...] = ("gate_proj", "up_proj"),
    bias: str = "",
    name: str = "up_gate_proj",
) -> Statements:
    """The fused layer ``name`` under ``prefix``, of the layers ``canonical`` there: two, or a fused one."""
    weights, biases = ([f"{prefix}.{part}.{leaf}" for part in canonical] for leaf in ("weight", "bias"))
    return declared(
        fused(f"{prefix}.{name}.weight", weights, Geometry.FUSED_FFN, ("hidden", f"2 * {size}"), 1),
        only(bias or "False", fused(f"{prefix}.{name}.bias", biases, Geometry.FUSED_FFN, (f"2 * {size}",), 0)),
    )


def down(prefix: str, size: str = "ffn", bias: str = "") -> Statements:
    """The last layer of a feed-forward."""
    return row(f"{prefix}.down_proj", size, "hidden", bias)


def whole(group: Statements) -> Statements:
    """The same statements of layers that tensor parallelism does not cut, as routed experts."""
    return tuple(replace(one, cut=None) for one in group)


def experts(prefix: str, bias: str = "") -> Statements:
    """Routed experts one by one under ``prefix``, gate and up fused."""
    return whole(fused_ffn(f"{prefix}.experts.{{expert}}", "expert_ffn", bias))


def grouped_experts(prefix: str, first: str, second: str) -> Statements:
    """Routed experts of a layer in two tensors, one expert behind the other on the first axis.

    Args:
        prefix: the canonical experts are ``prefix.experts.{expert}``.
        first: the name under ``prefix`` of all fused gate and up layers.
        second: the name under ``prefix`` of all down layers.
    """
    up, last = (one for one in experts(prefix) if one.target.endswith(".weight"))
    return declared(stacked(f"{prefix}.{first}", 0, False, (up,)), stacked(f"{prefix}.{second}", 0, False, (last,)))


def fleet_experts(prefix: str) -> Statements:
    """Routed experts of a PaddleFleet class: one by one, grouped, or grouped and kept [out, in]."""
    kept = (as_stored((one,)) for one in experts(prefix) if one.target.endswith(".weight"))
    names = (f"{prefix}.grouped_gemm_experts.weight{number}" for number in (1, 2))
    return declared(
        only("not moe_expert_fusion and not using_sonic_moe", experts(prefix)),
        only(
            "moe_expert_fusion and not using_sonic_moe",
            grouped_experts(prefix, "grouped_gemm_experts.weight1", "grouped_gemm_experts.weight2"),
        ),
        only("using_sonic_moe", *(stacked(name, 0, False, one) for name, one in zip(names, kept, strict=True))),
    )


def either_experts(prefix: str) -> Statements:
    """Routed experts of a family that has a class of both kinds; PaddleFormers' are cut, or stacked whole."""
    return declared(
        only("is_fleet", fleet_experts(prefix)),
        only("not is_fleet and not fd_fallback", fused_ffn(f"{prefix}.experts.{{expert}}", "expert_ffn")),
        only("not is_fleet and fd_fallback", grouped_experts(prefix, "experts.gate_up_proj", "experts.down_proj")),
    )


def router(name: str) -> Statements:
    """A router's weight kept [experts, hidden] as in canonical files, in float32 whatever the model's dtype is."""
    return same(f"{name}.weight", shape=("experts", "hidden"), dtype="float32")


def turned_router(name: str) -> Statements:
    """A router's weight turned as that of any linear layer, in float32 whatever the model's dtype is."""
    return linear(f"{name}.weight", shape=("hidden", "experts"), dtype="float32")


def either_router(name: str) -> Statements:
    """A router of a family that has a class of both kinds; only PaddleFormers' is turned."""
    return declared(only("is_fleet", router(name)), only("not is_fleet", turned_router(name)))


def score_correction(name: str) -> Statements:
    """The bias that evens out the load of experts, in float32."""
    return same(f"{name}.e_score_correction_bias", shape=("experts",), dtype="float32")


def fleet_prediction(transformer: Statements) -> Statements:
    """A PaddleFleet layer of multi-token prediction: numbered after the last layer, around a transformer layer.

    Args:
        transformer: the layer inside, named ``model.layers.{mtp}.transformer_layer``.
    """
    layer = "model.layers.{mtp}"
    return declared(
        renamed({".transformer_layer": ""}, transformer),
        column(f"{layer}.eh_proj", "2 * hidden", "hidden"),
        norm(f"{layer}.{{enorm,hnorm}}"),
        same(f"{layer}.norm.weight", f"{layer}.shared_head.norm.weight", shape=("hidden",)),
    )
