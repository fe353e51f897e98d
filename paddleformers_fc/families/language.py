"""The language of family declarations: :func:`family` and the layers that many families have in common.

Layer functions return a few statements under a given name, with shapes, tensor-parallel axes and conditions. Names are
relative: :func:`family` places the statements of ``layer`` in every layer of the model, :func:`tower` those of a
tower in its scope. In a *column* linear layer tensor parallelism cuts the outputs, in a *row* linear layer the inputs.
``bias`` is the condition under which a layer has a bias, empty for never.

PaddleFormers' and PaddleFleet's classes differ in names and layouts. The layer functions declare both; :func:`family`
selects those of the classes that the family supports. Declarations do not depend on the class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from paddleformers_fc.families.declarations import (
    DIVIDED,
    FLEET as FLEET,
    FORMERS as FORMERS,
    PLACEHOLDER,
    SIZES,
    Family,
    Geometry,
    ModelClass,
    Numbers as Numbers,
    Stage as Stage,
    Statements,
    TiedName,
    Tower,
    as_stored,
    at as at,
    choice as choice,
    declared as declared,
    fresh as fresh,
    fused,
    held_together as held_together,
    linear as linear,
    of_class as of_class,
    only as only,
    renamed as renamed,
    renumbered as renumbered,
    same as same,
    stack_of_files as stack_of_files,
    stacked,
    uncut as uncut,
    untrained,
    within as within,
)
from paddleformers_fc.families.description import ALTERNATES, IS_NLP
from paddleformers_fc.mapping.rules import flat

PREDICTION = "model.layers.{mtp}"

STEPPED = "layer not in (mlp_only_layers or ()) and (layer + 1) % decoder_sparse_step == 0"
"""Layers with experts, where a configuration excludes some layers and takes every n-th of the others."""

AFTER_DENSE = "layer >= first_k_dense_replace or layer >= layers"
"""Layers with experts, where the first ones have none. Prediction layers, which follow the last layer, have experts."""

PER_RANK = Geometry.FUSED_QKV_PER_RANK
"""Query, key and value side by side for every tensor-parallel rank."""

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}
"""Part of every tiny configuration; every size is divisible by 4 ranks."""

TINY_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}
"""The tiny configuration of a latent attention."""

TINY_MOE = {"n_routed_experts": 4, "moe_intermediate_size": 16}
"""The tiny configuration of routed experts."""

IS_LINEAR = "layer_types[layer] == 'linear_attention' if layer_types else (layer + 1) % full_attention_interval != 0"
"""Layers with linear attention, by a list of all layers, or all but every n-th one."""

DELTA_SIZES = {
    "linear_keys": "linear_num_key_heads * linear_key_head_dim",
    "linear_values": "linear_num_value_heads * linear_value_head_dim",
}
"""Sizes of a gated delta net."""

TINY_DELTA = {
    "head_dim": 8,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 2,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 4,
}
"""The tiny configuration of layers with linear and with full attention."""

VISION_SIZES = {
    "layers": "depth",
    "heads": "num_heads",
    "merged": "hidden * spatial_merge_size * spatial_merge_size",
}
"""Sizes of a vision tower; ``merged`` is the length of the patches that one token of the text replaces."""

VISION_DEFAULTS = {"in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2}
"""The values of most classes for keys that the configuration of a vision tower lacks."""

TINY_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 4,
    "patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 4,
}
"""The tiny configuration of a vision tower."""

MTP_LAYERS = "mtp_num_layers or num_nextn_predict_layers or 0"
"""The number of prediction layers where a configuration has two keys for it."""

_PREDICTION_KEY = {"num_nextn_predict_layers": "mtp_layers"}
"""A key of canonical configurations. PaddleFormers drops it as a setting of a run."""

_CONDITIONS = {FLEET: "is_fleet", FORMERS: "not is_fleet"}
_TEXT = "text"
_TIE = "tie_word_embeddings"
_TIE_OF_EITHER = f"{_TIE} if {_TIE} != None else {_TEXT}.{_TIE}"
"""Some classes copy the key to the nested configuration of the text."""


def ends(
    embedding_cut: int | None = 0,
    head_bias: str = "lm_head_bias",
    scope: str = "model",
    canonical: str | None = None,
) -> Statements:
    """Declare embedding, last norm and head.

    Args:
        embedding_cut: the axis of a PaddleFormers embedding that tensor parallelism cuts.
        head_bias: the condition under which a PaddleFormers head has a bias.
        scope: the prefix of embedding and norm in the model.
        canonical: their prefix in files, if that differs.
    """
    shape, head = ("vocab", "hidden"), "lm_head.weight"
    return declared(
        within(
            scope,
            at(Stage.NORM, norm("norm")),
            at(Stage.FIRST, of_class(FORMERS, same("embed_tokens.weight", shape=shape, cut=embedding_cut))),
            at(
                Stage.FIRST, of_class(FLEET, same("embedding.embed_tokens.weight", "embed_tokens.weight", shape, cut=0))
            ),
            canonical=canonical,
        ),
        of_class(FORMERS, same(head, shape=shape, cut=0)),
        of_class(FORMERS, only(head_bias, same("lm_head.bias", shape=("vocab",), cut=0))),
        of_class(FLEET, same(f"{scope}.{head}", head, shape, cut=0)),
    )


_NONE: Mapping[str, Any] = {}


def family(
    name: str,
    *,
    classes: tuple[ModelClass, ...] = (FORMERS,),
    scope: str = "model",
    canonical: str | None = None,
    key: str = "",
    layer: Iterable[Statements] = (),
    prediction: Iterable[Statements] = (),
    outside: Iterable[Statements] | None = None,
    nlp: Iterable[Statements] = (),
    towers: tuple[Tower, ...] = (),
    optional: tuple[str, ...] = (),
    sizes: Mapping[str, str] = _NONE,
    numbers: tuple[Numbers, ...] = (),
    defaults: Mapping[str, Any] = _NONE,
    tiny: Mapping[str, Any] = _NONE,
    exported: Mapping[str, str] = _NONE,
    built: tuple[str, ...] = (),
    divided: tuple[str, ...] = tuple(DIVIDED),
) -> Family:
    """Declare a family.

    Args:
        name: its name, which is the ``model_type`` of its configurations.
        classes: the model classes that the family has.
        scope: the prefix of its layers and ends in the model.
        canonical: their prefix in files, if that differs; empty for none.
        key: the path of their nested configuration, such as ``text_config``. The layers are then tower ``text``:
            others refer to their sizes as ``text.hidden``. Files without a nested configuration have its keys outside.
        layer: the parts of every layer, named relative to it.
        prediction: the parts of the transformer layer in PaddleFleet's multi-token prediction layers, which follow the
            last layer. In their conditions ``layer`` is the number of the prediction layer. Files may lack them.
        outside: the parts outside of layers, with full names; by default embedding, last norm and head.
        nlp: the parts of every layer of PaddleNLP's class, named relative to it; empty if the family has none. The
            scope of its layers and ends is the name of the family.
        towers: towers of :func:`tower`.
        optional: prefixes of canonical names that a file may lack, as in :class:`Family`.
        sizes: sizes that differ from :data:`SIZES`.
        numbers: placeholders beside ``layer`` and ``expert``.
        defaults: the values of the model's class for keys that a ``config.json`` lacks.
        tiny: changes of :data:`TINY`, the configuration on which the family is proved. Where the class has a default
            head size, the tiny one is 8.
        exported: keys of an exported ``config.json`` and the expressions of their values.
        built: the parts of the model behind its last norm, as in :class:`Family`.
        divided: sizes that the class compares with the degree of tensor parallelism, as in :class:`Family`.
    """
    outside = (ends(scope=scope, canonical=canonical),) if outside is None else outside
    layers = within(scope, within("layers.{layer}", *layer), canonical=canonical)
    statements = _for_classes(classes, declared(*outside, layers))
    tied = tuple(_tied(one, scope) for one in (FORMERS, FLEET) if one in classes)
    if nlp := tuple(nlp):
        theirs = _paddlenlp(name, canonical or scope, nlp)
        statements = declared(only(f"not {IS_NLP}", statements), only(IS_NLP, theirs))
        owner = TiedName("lm_head.weight", f"{name}.embed_tokens.weight", where=IS_NLP)
        tied = (*(replace(one, where=f"not {IS_NLP}") for one in tied), owner)
    sizes = dict(sizes)
    if prediction := tuple(prediction):
        statements += _for_classes((FLEET,), _prediction(scope, canonical or scope, prediction))
        numbers += _fleet_numbers(classes)
        optional = (*optional, f"{canonical or scope}.layers.{{mtp}}.")
        if FORMERS in classes:
            # PaddleFormers' classes of such families build no prediction layer.
            sizes["mtp_layers"] = f"({sizes.get('mtp_layers', SIZES['mtp_layers'])}) * is_fleet"
    if any("mtp_layers" in one.count for one in numbers):
        exported = {**_PREDICTION_KEY, **exported}
    small = {**TINY, **({"head_dim": 8} if "head_dim" in defaults else {})}
    tiny = {**tiny, key: {**small, **tiny.get(key, {})}} if key else {**small, **tiny}
    if key:
        text = tuple(replace(one, tower=_TEXT) for one in statements)
        towers = (Tower(_TEXT, key, text, Numbers("layer", "text.layers"), sizes, defaults, flat=True), *towers)
        statements, defaults = (), {}
        sizes = {size: f"text.{size}" for size in ("layers", "experts", "mtp_layers")} | {_TIE: _TIE_OF_EITHER}
    return Family(
        name,
        (name,),
        declared(statements, *(_for_classes(classes, one.statements) for one in towers)),
        tied=tied,
        optional=optional,
        sizes=sizes,
        numbers=(*(one.numbers for one in towers), *numbers),
        defaults=defaults,
        tiny=tiny,
        exported=exported,
        towers=towers,
        built=built,
        divided=divided,
    )


def _paddlenlp(scope: str, canonical: str, layer: Iterable[Statements]) -> Statements:
    """Declare PaddleNLP's class: embedding, layers, last norm, and a head that is transposed unless it is tied."""
    return declared(
        within(
            scope,
            at(Stage.NORM, norm("norm")),
            at(Stage.FIRST, same("embed_tokens.weight", shape=("vocab", "hidden"), cut=0)),
            within("layers.{layer}", *layer),
            canonical=canonical,
        ),
        turned_head(),
    )


def turned_head(bias: str = "") -> Statements:
    """Declare a head that is transposed unless it is tied."""
    head, rows = "lm_head.weight", ("vocab", "hidden")
    return declared(
        choice("tie_word_embeddings", same(head, shape=rows, cut=0), linear(head, shape=rows[::-1], cut=1)),
        _bias(bias, same("lm_head.bias", shape=("vocab",), cut=0)),
    )


def _tied(model_class: ModelClass, scope: str) -> TiedName:
    if model_class is FORMERS:
        return TiedName("lm_head.weight", f"{scope}.embed_tokens.weight")
    return TiedName(f"{scope}.lm_head.weight", f"{scope}.embedding.embed_tokens.weight")


def tower(
    name: str,
    key: str,
    scope: str,
    *,
    layers: str,
    layer: Iterable[Statements],
    outside: Iterable[Statements] = (),
    canonical: str | None = None,
    sizes: Mapping[str, str] = _NONE,
    defaults: Mapping[str, Any] = _NONE,
    stage: Stage = Stage.FIRST,
) -> Tower:
    """Declare a tower: a part of a model with layers, sizes and a nested configuration of its own.

    Args:
        name: its name, by which other expressions of the family refer to its sizes: ``vision.hidden``.
        key: the path of its nested configuration.
        scope: the prefix of its tensors in the model.
        layers: the scope of one layer within the tower, with its own placeholder: ``blocks.{block}``.
        layer: the parts of every layer, named relative to it.
        outside: the parts of the tower outside of layers, named relative to the tower.
        canonical: the prefix of its canonical tensors, if that differs.
        sizes: sizes that differ from :data:`SIZES`; ``layers`` is the number of layers.
        defaults: the values of the model's class for keys that the nested configuration lacks.
        stage: its place in a pipeline. Tensors of ``{layer}`` are placed with their layers.
    """
    statements = within(scope, *outside, within(layers, *layer), canonical=canonical)
    (placeholder,) = PLACEHOLDER.findall(layers)
    numbers = Numbers(placeholder, f"{name}.layers")
    placed = tuple(replace(one, tower=name, stage=one.stage or stage) for one in statements)
    return Tower(name, key, placed, numbers, sizes, defaults)


def _for_classes(classes: tuple[ModelClass, ...], statements: Statements) -> Statements:
    """Select the statements of these classes; of several classes, add a condition on the class."""
    known = [one for one in statements if one.model_class is None or one.model_class in classes]
    return tuple(
        replace(only(_CONDITIONS[one.model_class], (one,))[0], model_class=None)
        if one.model_class is not None and len(classes) > 1
        else replace(one, model_class=None)
        for one in known
    )


def _fleet_numbers(classes: tuple[ModelClass, ...]) -> tuple[Numbers, ...]:
    """Return the numbers of layers and prediction layers; only PaddleFleet's classes count empty layers as well."""
    shift = "num_empty_layers_add_in_head or 0"
    if FORMERS in classes:
        shift = f"({shift}) * is_fleet"
    return (Numbers("layer", "layers", shift=shift), Numbers("mtp", "mtp_layers", start="layers", shift=shift))


def _prediction(scope: str, canonical: str, parts: Iterable[Statements]) -> Statements:
    """Declare a multi-token prediction layer of PaddleFleet around the parts of a transformer layer."""
    return within(
        f"{scope}.layers.{{mtp}}",
        renumbered("mtp", within("transformer_layer", *parts, canonical="")),
        column("eh_proj", "2 * hidden", "hidden"),
        norm("{enorm,hnorm}"),
        same("norm.weight", "shared_head.norm.weight", shape=("hidden",)),
        canonical=f"{canonical}.layers.{{mtp}}",
    )


def norm(name: str, size: str = "hidden", bias: str = "") -> Statements:
    """Declare a norm over ``size``; it is not cut."""
    return declared(same(f"{name}.weight", shape=(size,)), _bias(bias, same(f"{name}.bias", shape=(size,))))


def column(name: str, inputs: str, outputs: str, bias: str = "") -> Statements:
    """Declare a linear layer whose outputs are cut."""
    weight = linear(f"{name}.weight", shape=(inputs, outputs), cut=1)
    return declared(weight, _bias(bias, same(f"{name}.bias", shape=(outputs,), cut=0)))


def row(name: str, inputs: str, outputs: str, bias: str = "") -> Statements:
    """Declare a linear layer whose inputs are cut; its bias is whole on every rank."""
    weight = linear(f"{name}.weight", shape=(inputs, outputs), cut=0)
    return declared(weight, _bias(bias, same(f"{name}.bias", shape=(outputs,))))


def replicated(name: str, inputs: str, outputs: str, bias: str = "") -> Statements:
    """Declare a linear layer that is whole on every rank."""
    return uncut(column(name, inputs, outputs, bias))


def _bias(condition: str, statements: Statements) -> Statements:
    # A bias that is declared for no configuration still has a name that binding accepts.
    return only(condition or "False", statements)


def patches(name: str, bias: str = "", frames: str = "temporal_patch_size") -> Statements:
    """Declare the convolution that embeds the patches of images. Convolutions are equal in both spaces.

    Args:
        name: its scope.
        bias: the condition under which it has a bias.
        frames: the number of images in a patch; empty for a convolution of two axes.
    """
    shape = ("hidden", "in_channels", *([frames] if frames else []), "patch_size", "patch_size")
    return declared(same(f"{name}.weight", shape=shape), _bias(bias, same(f"{name}.bias", shape=("hidden",))))


def attention(prefix: str, bias: str = "", output_bias: str = "", fused_where: str = "") -> Statements:
    """Declare query, key, value and output, each a layer, or fused as :func:`fused_qkv` where ``fused_where`` holds."""
    separate = declared(
        column(f"{prefix}.q_proj", "hidden", "q", bias), column(f"{prefix}.{{k,v}}_proj", "hidden", "kv", bias)
    )
    inputs = choice(fused_where, fused_qkv(prefix, bias=bias), separate) if fused_where else separate
    return declared(inputs, row(f"{prefix}.o_proj", "q", "hidden", output_bias))


def fused_attention(prefix: str, bias: str = "", output_bias: str = "") -> Statements:
    """Declare query, key and value in one layer, as [q..q k v] per kv head, and the output."""
    return declared(fused_qkv(prefix, bias=bias), row(f"{prefix}.o_proj", "q", "hidden", output_bias))


def fused_qkv(
    prefix: str,
    canonical: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
    bias: str = "",
    geometry: Geometry = Geometry.FUSED_QKV,
    name: str = "qkv_proj",
    parts: tuple[str | tuple[str, ...], ...] = (),
    groups: str = "",
) -> Statements:
    """Declare the fused layer ``name`` of the layers ``canonical`` in the same scope: one per part, or a fused one.

    ``parts`` are the lengths of query, key and value where they are not heads of one size, as of queries with a gate;
    a layer that holds several parts has a tuple. It interleaves them in ``groups`` groups.
    """
    fused_layers = _fused(prefix, name, canonical, geometry, " + ".join(flat(parts)) or "q + 2 * kv", bias)
    return tuple(replace(one, parts=parts, groups=groups) for one in fused_layers)


def _fused(prefix: str, name: str, canonical: tuple[str, ...], geometry: Geometry, width: str, bias: str) -> Statements:
    weights, biases = ([f"{prefix}.{part}.{leaf}" for part in canonical] for leaf in ("weight", "bias"))
    weight = fused(f"{prefix}.{name}.weight", weights, geometry, ("hidden", width), 1)
    return declared(weight, _bias(bias, fused(f"{prefix}.{name}.bias", biases, geometry, (width,), 0)))


def head_norms(prefix: str) -> Statements:
    """Declare norms over the heads of query and key, which PaddleFleet's classes call ``layernorm``."""
    canonical = f"{prefix}.{{q,k}}_norm.weight"
    return declared(
        of_class(FORMERS, same(canonical, shape=("head",))),
        of_class(FLEET, same(f"{prefix}.{{q,k}}_layernorm.weight", canonical, shape=("head",))),
    )


def latent_attention(prefix: str, down_bias: str = "") -> Statements:
    """Declare attention whose query, key and value pass through a narrow layer that is whole on every rank."""
    query = "heads * (qk_nope_head_dim + qk_rope_head_dim)"
    narrow = declared(
        replicated(f"{prefix}.q_a_proj", "hidden", "q_lora_rank", down_bias),
        column(f"{prefix}.q_b_proj", "q_lora_rank", query),
        norm(f"{prefix}.q_a_layernorm", "q_lora_rank"),
    )
    return declared(
        choice("q_lora_rank", narrow, column(f"{prefix}.q_proj", "hidden", query)),
        replicated(f"{prefix}.kv_a_proj_with_mqa", "hidden", "kv_lora_rank + qk_rope_head_dim", down_bias),
        norm(f"{prefix}.kv_a_layernorm", "kv_lora_rank"),
        column(f"{prefix}.kv_b_proj", "kv_lora_rank", "heads * (qk_nope_head_dim + v_head_dim)"),
        row(f"{prefix}.o_proj", "heads * v_head_dim", "hidden", down_bias),
    )


def indexer(prefix: str) -> Statements:
    """Declare the indexer of a sparse latent attention in PaddleFleet's classes; it is whole on every rank."""
    name = f"{prefix}.core_attention.indexer"
    parts = declared(
        replicated(f"{name}.wq_b", "q_lora_rank", "index_n_heads * index_head_dim"),
        replicated(f"{name}.wk", "hidden", "index_head_dim"),
        replicated(f"{name}.weights_proj", "hidden", "index_n_heads"),
        norm(f"{name}.k_norm", "index_head_dim", bias="True"),
    )
    return renamed({".core_attention.": "."}, parts)


def delta_net(prefix: str) -> Statements:
    """Declare a gated delta net, whose projections lie per key head in both spaces; it is whole on every rank."""
    return declared(
        same(f"{prefix}.{{A_log,dt_bias}}", shape=("linear_num_value_heads",)),
        same(f"{prefix}.conv1d.weight", shape=("2 * linear_keys + linear_values", "1", "linear_conv_kernel_dim")),
        replicated(f"{prefix}.in_proj_qkvz", "hidden", "2 * linear_keys + 2 * linear_values"),
        replicated(f"{prefix}.in_proj_ba", "hidden", "2 * linear_num_value_heads"),
        norm(f"{prefix}.norm", "linear_value_head_dim"),
        replicated(f"{prefix}.out_proj", "linear_values", "hidden"),
    )


def fleet_delta_net(prefix: str) -> Statements:
    """Declare a gated delta net of PaddleFleet: query, key, value, gate, beta and alpha side by side for every rank."""
    mixed, heads = ("linear_keys", "linear_keys", "linear_values"), "linear_num_value_heads"
    conv = fused(
        f"{prefix}.conv1d.weight", [f"{prefix}.conv1d.weight"], PER_RANK, ("", "1", "linear_conv_kernel_dim"), 0
    )
    canonical = tuple(f"in_proj_{part}" for part in ("qkv", "z", "b", "a"))
    return declared(
        same(f"{prefix}.{{A_log,dt_bias}}", shape=(heads,), cut=0, dtype="float32"),
        tuple(replace(one, turned=False, parts=mixed, shape=(" + ".join(mixed), *one.shape[1:])) for one in conv),
        fused_qkv(prefix, canonical, "", PER_RANK, "in_proj", (mixed, "linear_values", heads, heads)),
        renamed({"out_norm": "norm"}, norm(f"{prefix}.out_norm", "linear_value_head_dim")),
        row(f"{prefix}.out_proj", "linear_values", "hidden"),
    )


def ffn(
    prefix: str, size: str = "ffn", bias: str = "", fused_where: str = "", name: str = "up_gate_proj"
) -> Statements:
    """Declare gate, up and down, each a layer, or gate and up fused as ``name`` where ``fused_where`` holds."""
    separate = column(f"{prefix}.{{gate,up}}_proj", "hidden", size, bias)
    inputs = choice(fused_where, gate_up(prefix, size, bias=bias, name=name), separate) if fused_where else separate
    return declared(inputs, row(f"{prefix}.down_proj", size, "hidden", bias))


def fused_ffn(prefix: str, size: str = "ffn", bias: str = "") -> Statements:
    """Declare gate and up in one layer, as [gate | up] per tensor-parallel rank, and down."""
    return declared(gate_up(prefix, size, bias=bias), row(f"{prefix}.down_proj", size, "hidden", bias))


def gate_up(
    prefix: str,
    size: str = "ffn",
    canonical: tuple[str, ...] = ("gate_proj", "up_proj"),
    bias: str = "",
    name: str = "up_gate_proj",
) -> Statements:
    """Declare the fused layer ``name`` of the layers ``canonical`` in the same scope: two, or one that is fused."""
    return _fused(prefix, name, canonical, Geometry.FUSED_FFN, f"2 * {size}", bias)


def routed_ffn(prefix: str, shared: str = "", correction: bool = False, turned: bool = True) -> Statements:
    """Declare a router and routed experts.

    Args:
        prefix: the scope of router and experts.
        shared: how many shared experts the configuration gives, as one wide feed-forward; empty for none.
        correction: as of :func:`router`.
        turned: as of :func:`router`.
    """
    return declared(
        router(f"{prefix}.gate", turned, correction),
        experts(prefix),
        fused_ffn(f"{prefix}.shared_experts", f"expert_ffn * {shared}") if shared else (),
    )


def router(name: str, turned: bool = True, correction: bool = False) -> Statements:
    """Declare a router, in float32 whatever the model's dtype is.

    Args:
        name: the scope of the router.
        turned: whether PaddleFormers' class transposes the weight; PaddleFleet's keeps [experts, hidden].
        correction: whether the router has a load-balancing bias.
    """
    kept = same(f"{name}.weight", shape=("experts", "hidden"), dtype="float32")
    formers = linear(f"{name}.weight", shape=("hidden", "experts"), dtype="float32") if turned else kept
    return declared(of_class(FLEET, kept), of_class(FORMERS, formers), balance(name) if correction else ())


def balance(name: str, shape: tuple[str, ...] = ("experts",)) -> Statements:
    """Declare a load-balancing bias, which is set by counting: an optimizer has no states of it."""
    return untrained(same(f"{name}.e_score_correction_bias", shape=shape, dtype="float32"))


def outside_pipelines(*groups: Statements) -> Statements:
    """Declare tensors beside the layers that the class for pipelines does not build."""
    return at(Stage.ABSENT, *groups)


def experts(prefix: str, formers: Statements = ()) -> Statements:
    """Declare routed experts: one per tensor, or those of a layer in two tensors.

    PaddleFleet has grouped experts, also kept [out, in]; PaddleFormers has grouped ones under ``fd_fallback``. Where
    rows of gate and up alternate, one of each is declared as a row of twice the length: the same order in memory.

    Args:
        prefix: the scope of ``experts`` in both spaces.
        formers: a single expert of PaddleFormers; by default gate and up are fused, and tensor parallelism cuts it.
    """
    single = fused_ffn(f"{prefix}.experts.{{expert}}", "expert_ffn")
    fallback = _grouped(f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj", single)
    names = f"{prefix}.grouped_gemm_experts.weight1", f"{prefix}.grouped_gemm_experts.weight2"
    up, down = _grouped(*names, as_stored(single))
    alternating = replace(up, geometry=Geometry.ALTERNATING_FFN, shape=("experts * (expert_ffn)", "2 * hidden"))
    return declared(
        of_class(FORMERS, choice("fd_fallback", fallback, formers or single)),
        of_class(
            FLEET,
            only("not moe_expert_fusion and not using_sonic_moe", uncut(single)),
            only("moe_expert_fusion and not using_sonic_moe", _grouped(*names, single)),
            only("using_sonic_moe", choice(ALTERNATES, (alternating,), (up,)), (down,)),
        ),
    )


def _grouped(first: str, second: str, single: Statements) -> Statements:
    """Place all experts of a layer in two tensors, in order along the first axis: gate and up, and down."""
    up, down = (one for one in uncut(single) if one.target.endswith(".weight"))
    return declared(stacked(first, 0, False, (up,)), stacked(second, 0, False, (down,)))
