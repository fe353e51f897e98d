"""The functions that declare families.

They declare tensors or linear layers by their names in PaddleFormers' class. ``file`` is the canonical name and
``fleet`` the name in PaddleFleet's class, if these differ. The function implies the order of the elements and the axis
that tensor parallelism cuts:

========== ============================================================================================
same       a tensor that is equal in model and files, such as a norm
transposed a tensor whose two axes are exchanged
linear     a linear layer that is replicated on every rank: [out, in] in files, [in, out] in Paddle
column     a linear layer whose outputs are cut
row        a linear layer whose inputs are cut; its bias is replicated
qkv        query, key and value in one layer: for every kv head its queries, its key and its value
gate_up    gate and up in one layer, side by side for every tensor-parallel rank
gated      gate and up in one layer, and the following down projection
attention  query, key, value and output in separate layers
mlp        gate, up and down in separate layers
fused_if   a fused layer whose parts are separate layers unless the configuration fuses them
experts    routed experts, one by one or all of a layer in one tensor
decoder    a text model: embedding, layers, last norm and head
ends       embedding, last norm and head
========== ============================================================================================

``bias`` is the condition under which a layer has a bias. Binding also accepts a bias if the condition is false.
:mod:`paddleformers_fc.families.sizes` describes sizes and conditions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import structs

from paddleformers_fc.errors import OptionError
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
    OptionalName,
    Part,
    Parts,
    Stack,
    Stage,
    Statement,
    Statements,
    TiedName,
    Tower,
)
from paddleformers_fc.families.description import ALTERNATES, IS_FLEET, IS_NLP
from paddleformers_fc.families.sizes import Condition, Conditions, OneOf as OneOf, Size as Size, names_of
from paddleformers_fc.mapping.rules import flat

FIRST, NORM = Stage.FIRST, Stage.NORM
Shape = tuple[Size, ...]
Group = tuple["Part | Group", ...]
"""Results of these functions, also in nested tuples."""

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}
"""Part of every tiny configuration; 4 ranks divide every size."""

TINY_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}
"""The tiny configuration of latent attention."""

TINY_MOE = {"n_routed_experts": 4, "moe_intermediate_size": 16}
"""The tiny configuration of routed experts."""

TINY_DELTA = {
    "head_dim": 8,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 2,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 4,
}
"""The tiny configuration of layers with linear and with full attention."""

_VISION_SIZES: Mapping[str, Size] = {
    "layers": "depth",
    "heads": "num_heads",
    "merged": lambda hidden, spatial_merge_size: hidden * spatial_merge_size * spatial_merge_size,
    "positions": lambda image_size, patch_size: (image_size // patch_size) * (image_size // patch_size),
}
"""Sizes of vision towers; ``merged`` is the length of the patches that one token of the text replaces."""

_VISION_DEFAULTS = {"in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2}
"""Defaults of most classes for the configuration of a vision tower."""

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

_PREDICTION_KEY: Mapping[str, Size] = {"num_nextn_predict_layers": "mtp_layers"}
"""A key of canonical configurations that PaddleFormers drops because it is also a training setting."""

_NO_SIZES: Mapping[str, Size] = {}
_NONE: Mapping[str, Any] = {}
_TEXT, _TIE = "text", "tie_word_embeddings"
_OF_CLASS: Mapping[ModelClass, Conditions] = {FLEET: ((IS_FLEET, True),), FORMERS: ((IS_FLEET, False),)}


def stepped(layer: int, mlp_only_layers: Any, decoder_sparse_step: int) -> bool:
    """Return whether a layer has experts, if the configuration excludes layers and takes every n-th of the others."""
    return layer not in (mlp_only_layers or ()) and (layer + 1) % decoder_sparse_step == 0


def after_dense(layer: int, first_k_dense_replace: int, layers: int) -> bool:
    """Return whether a layer has experts, if the first layers have none. Prediction layers have experts."""
    return layer >= first_k_dense_replace or layer >= layers


def mtp_layers(mtp_num_layers: Any, num_nextn_predict_layers: Any) -> Any:
    """Return the number of prediction layers, if a configuration has two keys for it."""
    return mtp_num_layers or num_nextn_predict_layers or 0


def same(
    *names: str,
    file: str = "",
    fleet: str = "",
    shape: Shape = ("hidden",),
    cut: int | None = None,
    dtype: str = "",
    stage: Stage | None = None,
    trained: bool = True,
) -> Statements:
    """Declare tensors that are equal in model and files.

    Args:
        names: the names in the model.
        file: the canonical name of a single tensor, if it differs.
        fleet: the name of a single tensor in PaddleFleet's class, if it differs.
        shape: the size of every axis.
        cut: the axis that tensor parallelism cuts.
        dtype: the dtype, if it differs from the model's.
        stage: the pipeline stage, for tensors outside of layers.
        trained: whether an optimizer updates them.
    """
    if len(names) > 1 and (file or fleet):
        raise _misuse(f"{', '.join(names)} cannot share one other name.", "Declare each tensor by itself.")
    if not isinstance(shape, tuple):
        raise _misuse(f"{names[0]}: shape {shape!r} is not a tuple.", 'Pass the size of every axis: ("head",).')
    kinds: list[tuple[str, str, ModelClass | None]] = [(name, name, FORMERS if fleet else None) for name in names]
    kinds += [(fleet, names[0], FLEET)] if fleet else []
    return tuple(
        Statement(name, (file or own,), shape=shape, cut=cut, dtype=dtype, model_class=of, stage=stage, trained=trained)
        for name, own, of in kinds
    )


def transposed(*names: str, file: str = "", fleet: str = "", shape: Shape, dtype: str = "") -> Statements:
    """Declare tensors that are [out, in] in files and [in, out] in Paddle. The arguments are those of :func:`same`."""
    return tuple(
        structs.replace(one, geometry=Geometry.LINEAR)
        for one in same(*names, file=file, fleet=fleet, shape=shape, dtype=dtype)
    )


def linear(
    *names: str,
    inputs: Size = "hidden",
    outputs: Size = "hidden",
    file: str = "",
    fleet: str = "",
    bias: Condition = False,
) -> Statements:
    """Declare linear layers that are replicated on every rank.

    Args:
        names: the names in the model, without ``.weight``.
        inputs: the number of inputs.
        outputs: the number of outputs.
        file: the canonical name of a single layer, if it differs.
        fleet: the name of a single layer in PaddleFleet's class, if it differs.
        bias: the condition of the bias.
    """
    weights, biases = ([_part(name, leaf) for name in (file, fleet, *names)] for leaf in ("weight", "bias"))
    return (
        *transposed(*weights[2:], file=weights[0], fleet=weights[1], shape=(inputs, outputs)),
        *when(bias, same(*biases[2:], file=biases[0], fleet=biases[1], shape=(outputs,))),
    )


def column(*names: str, **given: Any) -> Statements:
    """Declare linear layers whose outputs are cut. The arguments are those of :func:`linear`."""
    return tuple(structs.replace(one, cut=len(one.shape) - 1) for one in linear(*names, **given))


def row(*names: str, **given: Any) -> Statements:
    """Declare linear layers whose inputs are cut. The arguments are those of :func:`linear`."""
    return tuple(structs.replace(one, cut=0 if len(one.shape) == 2 else None) for one in linear(*names, **given))


def qkv(
    name: str,
    *files: str,
    bias: Condition = False,
    parts: tuple[str | tuple[str, ...], ...] = (),
    groups: Size = 1,
    per_rank: bool = False,
) -> Statements:
    """Declare query, key and value in one layer, whose outputs are cut.

    Args:
        name: the layer of the model.
        files: query, key and value in files; or one layer with all three one after the other.
        bias: the condition of the bias.
        parts: the lengths of query, key and value if they are not heads of one size, such as queries with a gate. A
            tuple lists several parts of one layer in files.
        groups: the number of groups in which such a layer interleaves its parts.
        per_rank: whether the three lie side by side for every tensor-parallel rank, not for every kv head.
    """
    geometry = Geometry.FUSED_QKV_PER_RANK if per_rank else Geometry.FUSED_QKV
    found = _joined(name, files, flat(parts) or ("q", "kv", "kv"), geometry, bias)
    return tuple(structs.replace(one, parts=parts, groups=groups) for one in found)


def gate_up(name: str, *files: str, size: Size = "ffn", bias: Condition = False) -> Statements:
    """Declare gate and up in one layer, whose outputs are cut.

    Args:
        name: the layer of the model.
        files: gate and up in files; or one layer with both one after the other.
        size: the number of outputs of each.
        bias: the condition of the bias.
    """
    return _joined(name, files, (size, size), Geometry.FUSED_FFN, bias)


def gated(
    name: str, gate: str, up: str, down: str, size: Size = "ffn", *, file: str = "", bias: Condition = False
) -> Statements:
    """Declare a gated feed-forward: gate and up in one layer, and the down projection.

    Args:
        name: the layer of the model with gate and up.
        gate: the gate in files.
        up: the up projection in files.
        down: the down projection in the model.
        size: the number of inputs of the down projection.
        file: the canonical name of the down projection, if it differs.
        bias: the condition of the biases.
    """
    return (*gate_up(name, gate, up, size=size, bias=bias), *row(down, file=file, inputs=size, bias=bias))


def _joined(
    name: str, files: tuple[str, ...], outputs: Size, geometry: Geometry, bias: Condition = False
) -> Statements:
    """Declare a fused layer. Files have one layer per part, or one fused layer."""
    weights, biases = (tuple(f"{file}.{leaf}" for file in files) for leaf in ("weight", "bias"))
    return (
        Statement(f"{name}.weight", weights, geometry, shape=("hidden", outputs), cut=1),
        *when(bias, (Statement(f"{name}.bias", biases, geometry, shape=(outputs,), cut=0),)),
    )


def attention(query: str, key: str, value: str, output: str, bias: Condition = False) -> Statements:
    """Declare separate query, key and value layers, whose outputs are cut, and the output layer."""
    return (
        *column(query, outputs="q", bias=bias),
        *column(key, value, outputs="kv", bias=bias),
        *row(output, inputs="q", bias=bias),
    )


def mlp(gate: str, up: str, down: str, size: Size = "ffn", bias: Condition = False) -> Statements:
    """Declare a gated feed-forward with separate layers, of which ``size`` is the number of inputs of the last."""
    return (*column(gate, up, outputs=size, bias=bias), *row(down, inputs=size, bias=bias))


def fused_if(condition: Condition, fused: Statements) -> Statements:
    """Declare a fused layer of models that meet a condition, and its parts as in files for other models.

    Args:
        condition: the condition of the fusion.
        fused: the result of :func:`qkv` or :func:`gate_up`, from one layer in files per part.
    """
    return (*unless(condition, separate(fused)), *when(condition, fused))


def separate(fused: Statements) -> Statements:
    """Declare the parts of fused layers as separate layers with the names in files. Other layers are kept."""
    found: list[Statement] = []
    for one in fused:
        outputs = one.shape[-1]
        if len(one.sources) == 1 or not isinstance(outputs, tuple):
            found.append(one)
            continue
        geometry = Geometry.LINEAR if len(one.shape) == 2 else Geometry.SAME
        alone = structs.replace(one, geometry=geometry, parts=(), groups=1, siblings=())
        for source, size in zip(one.sources, outputs, strict=True):
            found.append(structs.replace(alone, target=source, sources=(source,), shape=(*one.shape[:-1], size)))
    return tuple(found)


def stored_in_one(*names: str, file: str, shape: Shape) -> Statements:
    """Declare tensors of one scope that files store concatenated in one tensor."""
    siblings = tuple(name.rpartition(".")[2] for name in names)
    return tuple(Statement(name, (file,), shape=shape, siblings=siblings) for name in names)


def router(name: str, file: str = "") -> Statements:
    """Declare a router, which is float32 for any model dtype. PaddleFleet's class keeps [experts, hidden]."""
    weight, source = f"{name}.weight", f"{file or name}.weight"
    return (
        *of_class(FLEET, same(weight, file=source, shape=("experts", "hidden"), dtype="float32")),
        *of_class(FORMERS, transposed(weight, file=source, shape=("hidden", "experts"), dtype="float32")),
    )


def balance(name: str, file: str = "", shape: Shape = ("experts",)) -> Statements:
    """Declare a load-balancing bias. It is set by counting tokens, so the optimizer has no state for it."""
    return same(name, file=file, shape=shape, dtype="float32", trained=False)


def patches(
    name: str, *, file: str = "", bias: Condition = False, frames: Shape = ("temporal_patch_size",)
) -> Statements:
    """Declare the convolution that embeds image patches. Convolutions are equal in model and files.

    Args:
        name: the layer.
        file: its canonical name, if it differs.
        bias: the condition of the bias.
        frames: the axis of frames in a patch; empty for a 2D convolution.
    """
    shape = ("hidden", "in_channels", *frames, "patch_size", "patch_size")
    return (
        *same(f"{name}.weight", file=_part(file, "weight"), shape=shape),
        *when(bias, same(f"{name}.bias", file=_part(file, "bias"))),
    )


def ends(
    embedding: str,
    norm: str,
    head: str,
    *,
    files: tuple[str, str, str] | None = None,
    cut: int | None = 0,
    bias: Condition = "lm_head_bias",
) -> Parts:
    """Declare embedding, last norm and head. Embedding and head may be tied.

    In PaddleFleet's class the embedding is in a layer ``embedding``, and the head in the scope of the norm.

    Args:
        embedding: the embedding.
        norm: the last norm.
        head: the head.
        files: the canonical names, if they differ.
        cut: the axis of a PaddleFormers embedding that tensor parallelism cuts.
        bias: the condition of the bias of a PaddleFormers head.
    """
    scope, _, leaf = embedding.rpartition(".")
    canonical = files or (embedding, norm, head)
    sources = [f"{name}.weight" for name in canonical]
    first, last = f"{embedding}.weight", f"{head}.weight"
    shape: Shape = ("vocab", "hidden")
    return (
        *same(f"{norm}.weight", file=sources[1], stage=NORM),
        *of_class(FORMERS, same(first, file=sources[0], shape=shape, cut=cut, stage=FIRST)),
        *of_class(FLEET, same(f"{scope}.embedding.{leaf}.weight", file=sources[0], shape=shape, cut=0, stage=FIRST)),
        *of_class(FORMERS, same(last, file=sources[2], shape=shape, cut=0)),
        *of_class(
            FORMERS,
            when(bias, same(f"{head}.bias", file=f"{(files or ('', '', head))[2]}.bias", shape=("vocab",), cut=0)),
        ),
        *of_class(FLEET, same(f"{scope}.{last}", file=sources[2], shape=shape, cut=0)),
        *tied(sources[2], sources[0]),
    )


def decoder(embedding: str, scope: str, norm: str, head: str, *groups: Group) -> Parts:
    """Declare a text model: the ends of :func:`ends`, and its layers in a scope with ``{layer}``."""
    return (*ends(embedding, norm, head), *layer(scope, *groups))


def transposed_head(bias: Condition = False) -> Statements:
    """Declare a head that is transposed unless it is tied."""
    head = "lm_head.weight"
    return (
        *when(_TIE, same(head, shape=("vocab", "hidden"), cut=0)),
        *unless(_TIE, (structs.replace(transposed(head, shape=("hidden", "vocab"))[0], cut=1),)),
        *when(bias, same("lm_head.bias", shape=("vocab",), cut=0)),
    )


def tied(alias: str, owner: str) -> Parts:
    """Declare an alias of the owner for configurations that tie word embeddings. Both names are canonical."""
    return (TiedName(alias, owner),)


def optional(*beginnings: str) -> Parts:
    """Declare prefixes of canonical names that a file may lack, as described at :class:`Family`."""
    return tuple(map(OptionalName, beginnings))


def alias(*groups: Group) -> Statements:
    """Accept names that no configuration has, such as names in other classes of the family, or names only in files."""
    return when(False, *groups)


def fresh(*names: str, shape: Shape = ("hidden",)) -> Statements:
    """Declare tensors that canonical files never contain. They keep their initial values and are not exported."""
    return tuple(Statement(name, (), shape=shape) for name in names)


def experts(
    scope: str,
    *single: Group,
    file: str | None = None,
    formers: Group = (),
) -> Statements:
    """Declare routed experts: one expert per tensor, or all experts of a layer stacked in two tensors.

    PaddleFleet has stacks in either orientation, PaddleFormers has stacks under ``fd_fallback``. If rows of gate and up
    alternate, a pair of rows is declared as one row of twice the length, which has the same order in memory.

    Args:
        scope: the scope of a single expert, with ``{expert}``.
        single: its layers, named relative to it: :func:`gated`, or :func:`gate_up` and :func:`row`.
        file: the scope in files, if it differs.
        formers: the layers of a single expert in PaddleFormers' class, if they differ.
    """
    one, others = layer(scope, *single, file=file), layer(scope, formers, file=file)
    weights = [each for each in one if each.target.endswith(".weight")]
    is_fused = [each.geometry is Geometry.FUSED_FFN for each in weights]
    if is_fused != [True, False] or "{expert}" not in scope:
        raise _misuse(
            f"{scope}: experts need {{expert}} in their scope and two layers, gate and up fused and then down.",
            "Declare the layers of a single expert with gated.",
        )
    up, down = weights
    fused = (*stacked("mlp.experts.gate_up_proj", up), *stacked("mlp.experts.down_proj", down))
    grouped = tuple((f"mlp.grouped_gemm_experts.weight{number}", each) for number, each in ((1, up), (2, down)))
    first, second = (stacked(name, _as_stored(each)) for name, each in grouped)
    alternating = structs.replace(
        first[0], geometry=Geometry.ALTERNATING_FFN, shape=("expert_ffn", ("hidden", "hidden"))
    )
    return (
        *of_class(FORMERS, when("fd_fallback", fused), unless("fd_fallback", others or one)),
        *of_class(
            FLEET,
            unless("moe_expert_fusion", unless("using_sonic_moe", uncut(one))),
            when("moe_expert_fusion", unless("using_sonic_moe", *(stacked(name, each) for name, each in grouped))),
            when("using_sonic_moe", when(ALTERNATES, (alternating,)), unless(ALTERNATES, first), second),
        ),
    )


def stacked(name: str, expert: Statement, new: bool = False) -> Statements:
    """Stack the experts of a layer in one tensor, which tensor parallelism does not cut.

    Args:
        name: the name of the stack in the model.
        expert: a single expert.
        new: stack along a new axis; otherwise concatenate along the first axis.
    """
    return (structs.replace(expert, target=name, stack=Stack.NEW_AXIS if new else Stack.ROWS, cut=None),)


def stack_of_files(name: str, *, file: str = "", shape: Shape, transposed: bool = False) -> Statements:
    """Declare a stack of experts on a new first axis that is also a stack in canonical files.

    Args:
        name: the name of the stack in the model.
        file: its canonical name, if it differs.
        shape: the size of every axis of a single expert in the model.
        transposed: whether a single expert is transposed, like the weight of a linear layer.
    """
    geometry = Geometry.LINEAR if transposed else Geometry.SAME
    return (Statement(name, (file or name,), geometry, stack=Stack.NEW_AXIS, shape=shape),)


def layer(scope: str, *groups: Group, file: str | None = None) -> Statements:
    """Prefix the names of statements with a scope, such as ``model.layers.{layer}``.

    Args:
        scope: the prefix in the model.
        groups: statements with names relative to it.
        file: the prefix of canonical names, if it differs; empty for none.
    """
    if not isinstance(scope, str):
        raise _misuse(f"A {type(scope).__name__} is not a scope.", 'Pass the prefix of names first: "model.visual".')
    other = scope if file is None else file
    prefix = f"{other}." if other else ""
    return tuple(
        structs.replace(one, target=f"{scope}.{one.target}", sources=tuple(prefix + source for source in one.sources))
        for one in _all(groups)
    )


def prediction(scope: str, *groups: Group) -> Parts:
    """Declare multi-token prediction layers of PaddleFleet, from the parts of a transformer layer.

    They follow the last layer, and files may lack them. Conditions get the number of the prediction layer as ``layer``.
    """
    own = layer(
        scope,
        renumbered("mtp", layer("transformer_layer", *groups, file="")),
        column("eh_proj", inputs=("hidden", "hidden")),
        same("enorm.weight", "hnorm.weight"),
        same("norm.weight", file="shared_head.norm.weight"),
    )
    return (
        *of_class(FLEET, tuple(one for one in own if one.model_class is not FORMERS)),
        *optional(f"{scope}."),
    )


def renumbered(number: Size, *groups: Group) -> Statements:
    """Pass another number to conditions and shapes as ``layer``, such as the number of a prediction layer."""
    return tuple(structs.replace(one, layer=number) for one in _all(groups))


def when(condition: Condition, *groups: Group) -> Statements:
    """Restrict statements to models, or to layers, that meet a condition."""
    return _only(((condition, True),), groups)


def unless(condition: Condition, *groups: Group) -> Statements:
    """Restrict statements to models, or to layers, that do not meet a condition."""
    return _only(((condition, False),), groups)


def of_class(model_class: ModelClass, *groups: Group) -> Statements:
    """Restrict statements to one class of models."""
    return tuple(structs.replace(one, model_class=model_class) for one in _all(groups))


def uncut(*groups: Group) -> Statements:
    """Exclude layers from tensor parallelism, such as routed experts."""
    return tuple(structs.replace(one, cut=None) for one in _all(groups))


def at(stage: Stage, *groups: Group) -> Statements:
    """Set the pipeline stage of tensors outside of layers."""
    return tuple(structs.replace(one, stage=stage) for one in _all(groups))


def tower(
    name: str,
    scope: str,
    *groups: Group,
    file: str | None = None,
    number: str = "block",
    sizes: Mapping[str, Size] = _NO_SIZES,
    defaults: Mapping[str, Any] = _NONE,
) -> Tower:
    """Declare a tower: a part of a model with its own layers, sizes and nested configuration.

    The configuration key is the name of the tower followed by ``_config``. In a pipeline, its tensors are on the first
    stage; tensors with ``{layer}`` are with their layers.

    Args:
        name: its name; other sizes of the family refer to its sizes as ``vision.hidden``.
        scope: the prefix of its tensors in the model.
        groups: its tensors, with names relative to the scope.
        file: the prefix of canonical names, if it differs.
        number: the placeholder of its layers.
        sizes: sizes that differ from :data:`SIZES`; ``layers`` is the number of layers.
        defaults: the class's values for keys that the nested configuration lacks.
    """
    own = layer(scope, *groups, file=file)
    placed = tuple(structs.replace(one, tower=name, stage=one.stage or FIRST) for one in own)
    return Tower(name, f"{name}_config", placed, Numbers(number, f"{name}.layers"), sizes, defaults)


def vision(
    scope: str,
    *groups: Group,
    file: str | None = None,
    sizes: Mapping[str, Size] = _NO_SIZES,
    defaults: Mapping[str, Any] = _NONE,
) -> Tower:
    """Declare a vision tower with the usual keys. The arguments are those of :func:`tower`."""
    sizes, defaults = {**_VISION_SIZES, **sizes}, {**_VISION_DEFAULTS, **defaults}
    return tower("vision", scope, *groups, file=file, sizes=sizes, defaults=defaults)


def family(
    name: str,
    *groups: Group,
    classes: tuple[ModelClass, ...] = (FORMERS,),
    key: str = "",
    nlp: Group = (),
    towers: tuple[Tower, ...] = (),
    sizes: Mapping[str, Size] = _NO_SIZES,
    numbers: tuple[Numbers, ...] = (),
    defaults: Mapping[str, Any] = _NONE,
    tiny: Mapping[str, Any] = _NONE,
    exported: Mapping[str, Size] = _NO_SIZES,
    built: tuple[str, ...] = (),
    divided: tuple[str, ...] = tuple(DIVIDED),
) -> Family:
    """Declare a family.

    Args:
        name: its name, which is the ``model_type`` of its configurations.
        groups: its parts: results of the functions of this module.
        classes: the model classes that the family has.
        key: the path of their nested configuration, such as ``text_config``. The parts are then tower ``text``, with
            sizes such as ``text.hidden``. Files without a nested configuration have its keys on the top level.
        nlp: the parts of every layer in PaddleNLP's class, named relative to it; empty if there is no such class. The
            scope of its layers and ends is the name of the family.
        towers: towers of :func:`tower`.
        sizes: sizes that differ from :data:`SIZES`.
        numbers: placeholders other than ``layer``, ``expert`` and, for PaddleFleet's prediction layers, ``mtp``.
        defaults: the class's values for keys that a ``config.json`` lacks.
        tiny: changes to :data:`TINY`, the configuration on which the family is proved. If the class has a default head
            size, the tiny head size is 8.
        exported: keys of an exported ``config.json`` and their values.
        built: the parts of the model after its last norm, as in :class:`Family`.
        divided: sizes that the class checks against the degree of tensor parallelism, as in :class:`Family`.
    """
    parts = tuple(_parts(groups))
    own = tuple(one for one in parts if isinstance(one, Statement))
    ties = _ties(classes, own, (one for one in parts if isinstance(one, TiedName)))
    statements, sizes = _for_classes(classes, own), dict(sizes)
    if theirs := _paddlenlp(name, nlp):
        statements = (*unless(IS_NLP, statements), *when(IS_NLP, theirs))
        owner = TiedName("lm_head.weight", f"{name}.embed_tokens.weight", ((IS_NLP, True),))
        ties = (*(structs.replace(one, where=((IS_NLP, False),)) for one in ties), owner)
    holes = {hole for one in statements for hole in PLACEHOLDER.findall(one.target)}
    if "mtp" in holes and all(one.name != "mtp" for one in numbers):
        numbers = (*numbers, *_fleet_numbers(classes, sizes))
    if any("mtp_layers" in name for one in numbers for name in names_of(one.count)):
        exported = {**_PREDICTION_KEY, **exported}
    small = {**TINY, **({"head_dim": 8} if "head_dim" in defaults else {})}
    tiny = {**tiny, key: {**small, **tiny.get(key, {})}} if key else {**small, **tiny}
    if key:
        text = tuple(structs.replace(one, tower=_TEXT) for one in statements)
        towers = (Tower(_TEXT, key, text, Numbers("layer", "text.layers"), sizes, defaults, flat=True), *towers)
        statements, defaults = (), {}
        sizes = {size: f"text.{size}" for size in ("layers", "experts", "mtp_layers")}
        sizes |= {"text_tie": f"text.{_TIE}", _TIE: _tie_of_either}
    return Family(
        name,
        (*statements, *(one for part in towers for one in _for_classes(classes, part.statements))),
        tied=ties,
        optional=tuple(one.beginning for one in parts if isinstance(one, OptionalName)),
        sizes=sizes,
        numbers=(*(one.numbers for one in towers), *numbers),
        defaults=defaults,
        tiny=tiny,
        exported=exported,
        towers=towers,
        built=built,
        divided=divided,
    )


def _tie_of_either(tie_word_embeddings: Any, text_tie: Any) -> Any:
    """Return whether embeddings are tied. Some classes copy the key to the nested configuration of the text."""
    return text_tie if tie_word_embeddings is None else tie_word_embeddings


def _parts(groups: Group) -> Iterator[Part]:
    for one in groups:
        yield from _parts(one) if isinstance(one, tuple) else (one,)


def _all(groups: Group) -> Iterator[Statement]:
    for one in _parts(groups):
        if not isinstance(one, Statement):
            raise _misuse(
                f"{type(one).__name__} is no statement of a tensor.",
                "Pass results of functions of this module, or tuples of them; ends, tied and optional belong to the "
                "family.",
            )
        yield one


def _misuse(what: str, next_step: str) -> OptionError:
    """Return the error about an argument of these functions."""
    return OptionError(what, where="declaration of a family", next_step=next_step)


def _only(conditions: Conditions, groups: Group) -> Statements:
    return tuple(structs.replace(one, where=(*one.where, *conditions)) for one in _all(groups))


def _part(layer: str, leaf: str) -> str:
    """Return the name of a tensor of a layer; empty for no layer."""
    return f"{layer}.{leaf}" if layer else ""


def _as_stored(one: Statement) -> Statement:
    """Keep the orientation [out, in] of canonical files; the parts then lie along the first axis."""
    return structs.replace(one, transposed=False, shape=one.shape[::-1])


def _for_classes(classes: tuple[ModelClass, ...], statements: Statements) -> Statements:
    """Select the statements of these classes; if there are several, add a condition on the class."""
    return tuple(
        structs.replace(
            one, model_class=None, where=(*one.where, *(_OF_CLASS[one.model_class] if len(classes) > 1 else ()))
        )
        if one.model_class is not None
        else one
        for one in statements
        if one.model_class is None or one.model_class in classes
    )


def _ties(classes: tuple[ModelClass, ...], statements: Statements, names: Iterable[TiedName]) -> tuple[TiedName, ...]:
    """Return ties with the names of the classes instead of canonical names."""
    targets = {
        (one.sources, kind): one.target
        for one in reversed(statements)
        for kind in (FORMERS, FLEET)
        if one.model_class in (kind, None)
    }
    return tuple(
        TiedName(targets[(one.alias,), kind], targets[(one.owner,), kind])
        for one in names
        for kind in (FORMERS, FLEET)
        if kind in classes
    )


def _paddlenlp(scope: str, parts: Group) -> Statements:
    """Declare PaddleNLP's class: embedding, layers, last norm, and a head that is transposed unless it is tied."""
    ends = (
        *same("norm.weight", stage=NORM),
        *same("embed_tokens.weight", shape=("vocab", "hidden"), cut=0, stage=FIRST),
    )
    return (*layer(scope, ends, layer("layers.{layer}", parts), file="model"), *transposed_head()) if parts else ()


def _fleet_numbers(classes: tuple[ModelClass, ...], sizes: dict[str, Size]) -> tuple[Numbers, ...]:
    """Return the numbers of layers and prediction layers. PaddleFormers' class has no prediction or empty layers."""
    if FORMERS in classes:
        sizes["fleet_mtp_layers"] = sizes.get("mtp_layers", SIZES["mtp_layers"])
        sizes["mtp_layers"] = lambda fleet_mtp_layers, is_fleet: fleet_mtp_layers * is_fleet
        sizes["shift"] = lambda empty, is_fleet: empty * is_fleet
    shift = "shift" if FORMERS in classes else "empty"
    return (Numbers("layer", "layers", shift=shift), Numbers("mtp", "mtp_layers", start="layers", shift=shift))
