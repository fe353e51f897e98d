"""Differences between the configuration that a checkpoint was saved with and the configuration of the live model.

Names and shapes can match although two configurations use the weights differently: with another ``rope_theta`` or
``hidden_act``, the same weights are a different model. :data:`GROUPS` lists the keys that change the meaning of
weights, with the reason. Such a change is an error unless the user allows its key. All other changes are only reported.

Resolved configurations, with all defaults, are compared value by value. Keys of nested configurations have dots, such
as ``rope_scaling.factor``. Keys in :data:`LEFT_OUT` are not compared.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import msgspec
import xxhash

from paddleformers_fc.errors import MismatchError, OptionError
from paddleformers_fc.families.description import ALTERNATES, IS_NLP, Adapters, ModelDescription
from paddleformers_fc.families.exported import exported_config, is_of_source
from paddleformers_fc.families.names import family_keys
from paddleformers_fc.families.registry import family_for, is_known
from paddleformers_fc.text import suggestion

OPTION = "flex_allow_config_changes"
"""The option that lists the keys that may change."""

ABSENT = "not set"
_LONGEST = 48

MODEL_TYPE = "model_type"

ADAPTERS = "lora"
"""The prefix of adapter settings, which are not configuration keys."""

_POSITIONS = "positions are encoded differently"
GROUPS: Mapping[str, tuple[str, ...]] = {
    "adapters have another rank, scaling or target, were trained on another base, or only one side has them": (
        ADAPTERS,
    ),
    "the class of the model": (MODEL_TYPE,),
    _POSITIONS: (
        *("rope_*", "rotary*", "partial_rotary_factor", "no_rope*", "mrope*", "position_embedding_type"),
        *("original_max_position_embeddings", "*_rope_theta", "use_alibi", "alibi", "tokens_per_second"),
        *("indexer_rotary_interleaved", "csa_compress_rotary_base"),
    ),
    "layers apply another activation function": (
        *("*hidden_act", "hidden_activation", "activation", "activation_func*", "act_fn", "gated_linear_unit"),
        *("swiglu_limit", "swiglu_alpha"),
    ),
    "activations are normalized differently": (
        *("*norm_eps", "*norm_epsilon", "norm_type", "normalization", "use_rmsnorm", "use_rms_norm", "*qk_norm*"),
        *("*qk_layernorm*", "*zero_centered*", "use_gemma_norm", "apply_residual_connection_post_layernorm"),
    ),
    "tokens are routed to other experts, or with other weights": (
        *("moe_k", "moe_topk", "num_experts_per_tok", "norm_topk_prob", "moe_norm_gate_logits", "moe_norm_min"),
        *("scoring_func", "topk_method", "n_group", "topk_group", "routed_scaling_factor", "moe_router_*"),
        *("moe_capacity", "moe_expert_capacity_factor", "moe_token_drop_policy", "moe_reverse_token_drop"),
        *("moe_gate*", "moe_use_hard_gate", "moe_use_aux_free", "use_routing_bias", "sinkhorn_*"),
        *("first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers"),
        *("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", "moe_group_experts"),
        *("moe_n_hash_layers", "moe_dense_experts_token_type_id"),
    ),
    "attention is computed differently": (
        *("query_pre_attn_scalar", "attention_multiplier", "softmax_scale", "softmax_type", "scale_qk_coeff"),
        *("*softcap*", "use_sliding_window", "sliding_window*", "max_window_layers", "window_size", "layer_types"),
        *("attn_type_list", "attention_chunk_size", "fullatt_block_indexes", "use_bidirectional_attention"),
        *(
            "num_attention_heads",
            "num_key_value_heads",
            "num_heads",
            "linear_num_key_heads",
            "is_causal",
            "multi_latent_attention",
        ),
        *("attention_window_size", "use_attn_sink*", "attn_scale*", "attention_scal*", "use_parallel_residual"),
        *("index_topk", "csa_window_size", "csa_compress_ratios", "csa_dense_mode", "o_groups"),
        "parallel_attn",
    ),
    "embeddings, logits or residuals are scaled differently, or shared": (
        *("tie_word_embeddings", "embedding_multiplier", "logits_scaling", "logit_scale", "residual_multiplier"),
        *("scale_emb", "scale_depth", "dim_model_base", "embedding_scale", "use_embedding_scaling"),
        *("deepstack_visual_indexes", "mhc_sinkhorn_iterations"),
    ),
}
"""The changes that must be allowed: reasons, with their keys. ``*`` matches any text."""

_REPORTED_ONLY = ("moe_router_load_balancing_type", "moe_router_bias_update_rate")
"""Keys that match a group but affect only the training loss or later updates."""

_OF_TRAINING = frozenset(f"{ADAPTERS}.{name}" for name in ("dropout", "plus_scale", "location"))
"""Adapter settings that do not affect how the weights are used."""

_PATTERNS = frozenset(f"{ADAPTERS}.{name}" for name in ("target_modules", "trainable_modules", "trainable_bias"))
"""Adapter settings that select tensors."""

LEFT_OUT = (
    # The parallel layout, and a rank's part of the model.
    *("*parallel_size", "*parallel_rank", "*parallel_degree", "tensor_parallel*", "sequence_parallel"),
    *("num_empty_layers_*", "pp_seg_method", "ep_size", "moe_group", "moe_group_origin", "moe_rank"),
    *("moe_world_size", "disable_ffn_model_parallel", "num_acc_steps", "micro_batch_size", "cp_balance_mode"),
    # Versions and names.
    *(IS_NLP, ALTERNATES),
    *("*_version", "architectures", "name_or_path", "auto_map", "torchscript"),
    # The precision is compared tensor by tensor.
    *("dtype", "torch_dtype"),
    # How a result is computed or returned.
    *("use_cache", "fuse_*", "*_fusion", "use_fused_*", "recompute*", "no_recompute_layers", "gradient_checkpointing"),
    *("*attn_implementation", "use_flash_attention", "use_flash_attn", "flashmask_*", "output_*", "return_dict*"),
    *("moe_subbatch_*", "loss_subbatch_*", "moe_token_dispatcher_type", "moe_deepep_*", "use_unified_moe"),
    *("moe_use_fusion_node", "moe_deep_gemm", "moe_ep_barrier", "moe_shared_expert_overlap", "using_sonic_moe"),
    *("moe_multimodal_dispatch_use_allgather", "use_single_model_implementation", "enable_mtp_magic_send"),
    *("enable_delay_scale_loss", "fd_fallback", "using_flex_token"),
    # The initialization of weights, which the checkpoint replaces.
    *("initializer_*", "*init_method*", "perform_initialization"),
)
"""Keys that are not compared."""

_SAME = (
    frozenset({"moe_k", "moe_topk", "num_experts_per_tok"}),
    frozenset({"hidden_act", "hidden_activation"}),
    frozenset({"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}),
)
"""Keys under which configurations repeat one value."""

_ROTARY = ("rope_parameters", "rope_scaling")
"""Nested values that repeat keys of each other and of the configuration."""

_LENGTH = "max_position_embeddings"
_SCALED_BY_LENGTH = ("dynamic", "longrope", "yarn")
"""Kinds of rotary embeddings that depend on :data:`_LENGTH`."""


class Change(msgspec.Struct, frozen=True):
    """A value that differs.

    Args:
        key: its name; for a nested value, the path with dots.
        saved: the stored value as text.
        now: the live value as text.
        keys: every key under which the configuration repeats this value, including ``key``.
        because: why the change must be allowed; empty if it is only reported.
    """

    key: str
    saved: str
    now: str
    keys: frozenset[str] = frozenset()
    because: str = ""

    def is_named_in(self, named: Collection[str]) -> bool:
        """Return whether ``named`` contains one of its keys, or a parent of one."""
        return any(key == one or key.startswith(f"{one}.") for key in self.keys for one in named)


def config_changes(stored: ModelDescription, live: ModelDescription, complete: bool) -> list[Change]:
    """List the differences between two configurations; changes that must be allowed come first.

    Args:
        stored: the model of a checkpoint.
        live: the model that it is loaded into.
        complete: whether ``stored`` contains every key; otherwise only its keys are compared.
    """
    saved, now = dict(_values(stored.config)), dict(_values(live.config))
    if (IS_NLP in stored.config) != (IS_NLP in live.config):
        # The description of a PaddleNLP class has keys of both libraries (``trainer/nlp_models.py``).
        saved, now = ({key: one[key] for key in one if key in other} for one, other in ((saved, now), (now, saved)))
    if not complete:
        now = {key: value for key, value in now.items() if _has_key(key, stored.config)}
    saved, now = saved | dict(_adapter_values(stored)), now | dict(_adapter_values(live))
    changed = {}
    for key in sorted(saved.keys() | now.keys()):
        if not _is_left_out(key) and not _is_equal(saved.get(key), now.get(key)):
            changed[key] = value_text(saved.get(key, ABSENT)), value_text(now.get(key, ABSENT))
    groups: dict[tuple[str, str, str], set[str]] = {}
    for key, texts in changed.items():
        groups.setdefault((_spelled_once(key), *texts), set()).add(key)
    changes = []
    for (_, old, new), keys in groups.items():
        shortest = min(keys, key=lambda key: (key.count("."), key))
        because = next(filter(None, map(_because, sorted(keys))), "")
        if shortest.endswith(_LENGTH) and (_is_scaled_by_length(saved) or _is_scaled_by_length(now)):
            because = _POSITIONS
        changes.append(Change(shortest, old, new, frozenset(keys), because))
    return sorted(changes, key=lambda change: (not change.because, change.key))


def contradictions(config: Mapping[str, Any], model: ModelDescription) -> list[str]:
    """Return one line for every value of a ``config.json`` that contradicts the stored description of the model.

    A save writes the file with the keys of an export. A configuration from a caller or a conversion is stored unchanged
    in both places.

    Args:
        config: the content of the file.
        model: the description in ``mapping.json``.
    Raises:
        MappingError: the description contradicts itself.
    """
    if not is_known(model.config):
        return []
    if all(model.config[key] == value for key, value in config.items() if key in model.config):
        return []
    family = family_for(model.config)
    read = family_keys(family)
    expected = exported_config(family, model.config, model, {})
    return [
        f"{key}: {value_text(one)} in config.json, {value_text(other)} in mapping.json"
        for key, one, other in _unequal(config, expected)
        # Libraries use different names for the ``model_type`` of a nested configuration.
        if key in read or not (_is_left_out(key) or is_of_source(key, other) or key.endswith(".model_type"))
    ]


def _unequal(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the common keys of two configurations whose values differ."""
    for key in sorted(one.keys() & other.keys()):
        first, second = one[key], other[key]
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            yield from _unequal(first, second, f"{prefix}{key}.")
        elif not _is_equal(first, second):
            yield f"{prefix}{key}", first, second


def of_adapters(changes: Iterable[Change]) -> list[Change]:
    """Return the changes of adapter settings, which explain missing tensors and different shapes."""
    return [change for change in changes if change.key.startswith(f"{ADAPTERS}.")]


def without_patterns(changes: Iterable[Change]) -> list[Change]:
    """Return the changes without patterns that select tensors.

    Different patterns can select the same layers, and layer names differ between classes of a model, such as pipelines.
    Equal tensors on both sides prove that the patterns are equivalent.
    """
    return [change for change in changes if change.key not in _PATTERNS]


def check_adapters_on_both_sides(stored: ModelDescription, trains_adapters: bool, where: str) -> None:
    """Check that checkpoint and run both have adapters, or both a complete model.

    Args:
        stored: the model of the checkpoint.
        trains_adapters: whether the model of this run has adapters.
        where: the checkpoint.

    Raises:
        MismatchError: only one of them has adapters.
    """
    if (stored.adapters is not None) == trains_adapters:
        return
    if stored.adapters is None:
        what = "The checkpoint contains a complete model, and this run trains adapters (LoRA)."
        next_step = (
            f"To train adapters on these weights, export them with paddleformers-fc export {where} DIRECTORY, set "
            "model_name_or_path to that directory and output_dir to a new one. To continue training the complete "
            "model, do not use LoRA."
        )
    else:
        what = "The checkpoint contains adapters (LoRA), and this run trains a complete model."
        base = stored.adapters.base.location or "BASE"
        next_step = (
            "To continue training the adapters, use LoRA as in the run that saved them. To train the complete model "
            f"from here, merge them with paddleformers-fc export {where} DIRECTORY --base {base}, set "
            "model_name_or_path to that directory and output_dir to a new one."
        )
    raise MismatchError(f"{what} No weight was changed.", where=where, next_step=next_step)


def check_keys_known(allowed: Iterable[str], stored: ModelDescription, live: ModelDescription) -> None:
    """Check that every key that a user allows to change exists: in one of two configurations, or for adapters.

    Args:
        allowed: the keys that the user allows to change.
        stored: the model of a checkpoint.
        live: the model that it is loaded into.

    Raises:
        OptionError: lists the unknown keys, with similar known ones.
    """
    known = {f"{ADAPTERS}.{name}" for name in (*Adapters.__struct_fields__, "location")}
    for model in (stored, live):
        known.update(model.config, dict(_values(model.config)), dict(_adapter_values(model)))
    unknown = [name for name in allowed if not any(key == name or key.startswith(f"{name}.") for key in known)]
    if unknown:
        raise OptionError(
            f"Unknown key in {OPTION}.",
            where=OPTION,
            evidence=[": ".join((name, *suggestion(name, known))) for name in unknown],
            next_step="Correct the key or remove it. Keys of nested values have dots, such as rope_scaling.factor.",
        )


def check_changes_allowed(changes: Sequence[Change], allowed: Collection[str], where: str, fits: bool = True) -> None:
    """Check that the user allows all changes that alter the meaning of weights.

    Args:
        changes: the result of :func:`config_changes`.
        allowed: the keys that the user allows to change.
        where: the checkpoint.
        fits: whether names and shapes of the tensors match; if not, allowing the keys would not help.

    Raises:
        MismatchError: with a table of the changes that are not allowed; or the checkpoint contains another model.
    """
    rejected = [change for change in changes if change.because and not change.is_named_in(allowed)]
    if not rejected:
        return
    for change in rejected:
        if change.key == MODEL_TYPE:
            raise MismatchError(
                f"The checkpoint contains another model: {change.saved}, not {change.now}. No weight was changed.",
                where=where,
                evidence=table(rejected),
                next_step=f"Use the model that the checkpoint was saved with, or a checkpoint of {change.now}.",
            )
    reasons = dict.fromkeys(change.because for change in rejected)
    effective = (name for name in allowed if any(change.is_named_in([name]) for change in changes))
    keys = ", ".join(sorted({*effective, *(change.key for change in rejected)}))
    named = f", or name every changed key for the Trainer: {OPTION}: [{keys}]"
    raise MismatchError(
        "The model's configuration gives the stored weights another meaning. No weight was changed.",
        where=where,
        evidence=[*table(rejected), *(f"{_of(rejected, reason)}: {reason}" for reason in reasons)],
        next_step="Resume with the configuration that the checkpoint was saved with"
        + (named if fits else "; its tensors do not fit this one."),
    )


def table(changes: Sequence[Change]) -> list[str]:
    """Format changes as a table with the columns key, saved and now."""
    rows = [("key", "saved", "now"), *((change.key, change.saved, change.now) for change in changes)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return [f"{key:{widths[0]}}  {saved:{widths[1]}}  {now}" for key, saved, now in rows]


def value_text(value: object) -> str:
    """Format a value as JSON; a long value becomes its beginning and a digest."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    if len(text) <= _LONGEST:
        return text
    digest = xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))
    return f"{text[: _LONGEST // 2]}... ({len(text)} characters, xxh3_64 {digest[:8]})"


def _of(changes: Sequence[Change], because: str) -> str:
    return ", ".join(change.key for change in changes if change.because == because)


def _values(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _has_key(key: str, config: Mapping[str, Any]) -> bool:
    """Return whether a configuration has a key, or the nested value that contains it."""
    first, _, rest = key.partition(".")
    nested = config.get(first)
    if rest and first.endswith("_config") and isinstance(nested, Mapping):
        return _has_key(rest, nested)
    return first in config


def _adapter_values(model: ModelDescription) -> Iterator[tuple[str, Any]]:
    if model.adapters is not None:
        yield from _values(model.adapters.settings, f"{ADAPTERS}.")


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two values are the same; an absent one is None."""
    if isinstance(one, bool) != isinstance(other, bool):
        return {one, other} == {None, False} if None in (one, other) else False
    return bool(one == other)


def _spelled_once(key: str) -> str:
    """Return one name for all keys that repeat the same value."""
    head, _, last = key.rpartition(".")
    parents = [one for one in head.split(".") if one and one not in _ROTARY]
    known = next((min(names) for names in _SAME if last in names), last)
    return ".".join([*parents, known])


def _because(key: str) -> str:
    """Return why a change of a key must be allowed; empty if it need not be."""
    parts = key.split(".")
    if key in _OF_TRAINING or _matches(parts, _REPORTED_ONLY):
        return ""
    return next((because for because, patterns in GROUPS.items() if _matches(parts, patterns)), "")


def _is_scaled_by_length(values: Mapping[str, Any]) -> bool:
    kinds = [value for key, value in values.items() if key.rpartition(".")[2] in ("rope_type", "type")]
    return any(kind in _SCALED_BY_LENGTH for kind in kinds)


def _is_left_out(key: str) -> bool:
    # Adapter settings contain names of files, and are not configuration keys.
    return not key.startswith(f"{ADAPTERS}.") and _matches(key.split("."), LEFT_OUT)


def _matches(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(part, pattern) for part in parts for pattern in patterns)
