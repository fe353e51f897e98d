"""ERNIE 4.5 MoE without its fused kernels.

``Ernie4_5_MoeSparseMoeBlock.forward`` calls kernels that exist for accelerators only. The forward here computes the
same block with dense algebra on the same parameters: every expert processes every token, and the router weights its
output, with zero for tokens that did not choose it. Results differ from the fused kernels by rounding and by the
auxiliary loss, which is a plain one.

It also fixes faults that do not depend on the device: multi-token prediction misplaces arguments, the forward for
generation calls the loss without the logits, experts lack the group over which they are reduced, the expert parallel
optimizer needs a class that Paddle 3.3.1 lacks, and a pipeline does not accept the group that shares its experts.

Time: experts / top-k times the fused block. Memory: one expert's activations of all tokens at a time.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle.distributed import fleet

from ..upstream import LIBRARY
from .mpu import Collective

moe_alltoall_layer: Any = import_module(f"{LIBRARY}.nn.moe.moe_alltoall_layer")
pp_model: Any = import_module(f"{LIBRARY}.nn.pp_model")
moe_optimizer: Any = import_module(f"{LIBRARY}.utils.moe_hybrid_parallel_optimizer")
modeling: Any = import_module(f"{LIBRARY}.transformers.ernie4_5_moe.modeling")


def _copied(tensor: Any, group: Any) -> Any:
    return tensor.clone()


def _summed(tensor: Any, group: Any) -> Any:
    total = tensor.clone()
    group.process_group.all_reduce(total)
    return total


def _gathered(tensor: Any, group: Any) -> Any:
    out = paddle.empty([tensor.shape[0] * group.nranks, *tensor.shape[1:]], tensor.dtype)
    group.process_group.all_gather_into_tensor(out, tensor)
    return out


def _scattered(tensor: Any, group: Any) -> Any:
    out = paddle.empty([tensor.shape[0] // group.nranks, *tensor.shape[1:]], tensor.dtype)
    group.process_group.reduce_scatter_tensor(out, tensor)
    return out


def route(block: Any, tokens: Any) -> tuple[Any, Any, Any]:
    """Compute the router of one block.

    Args:
        block: the layer.
        tokens: ``[tokens, hidden]``.

    Returns:
        Weights ``[tokens, experts]`` that are zero except for the chosen experts and sum to one, the auxiliary loss,
        and the logits ``[tokens, experts]``; all float32.
    """
    logits = paddle.matmul(tokens.astype("float32"), block.gate.weight.astype("float32"))
    probabilities = F.softmax(logits, axis=-1)
    preference = probabilities.detach()
    if block.moe_statics is not None:
        # The correction bias affects which experts are chosen, but not their weights.
        preference = preference + block.moe_statics.e_score_correction_bias[0].detach()
    chosen = paddle.topk(preference, block.k, axis=-1)[1]
    weights = probabilities * F.one_hot(chosen, probabilities.shape[-1]).sum(1)
    weights = weights / weights.sum(-1, keepdim=True).clip(min=1e-12)
    balance = (probabilities.mean(0) ** 2).sum() * block.config.router_aux_loss_coef
    return weights, balance, logits


def dense_forward(block: Any, input: Any) -> tuple[Any, None, Any, Any]:
    """Compute the forward of ``Ernie4_5_MoeSparseMoeBlock``.

    Args:
        block: the layer.
        input: ``[..., hidden]``.

    Returns:
        Output of the same shape, None for the combine weights, the auxiliary loss, the router's logits.
    """
    tokens = input.reshape([-1, input.shape[-1]])
    weights, balance, logits = route(block, tokens)
    group = block.config.moe_group
    spread = group is not None and getattr(group, "nranks", 1) > 1
    seen, seen_weights = tokens, weights
    if spread:
        # Do not gather replicated tokens: the experts' gradients would count each token once per rank. If all ranks
        # have the same tokens, each rank's experts contribute a part of the output and of the gradient.
        enter, leave = (_copied, _summed) if _tokens_are_replicated(block.config, group) else (_gathered, _scattered)
        seen, seen_weights = (Collective.apply(one, group, enter, leave) for one in (tokens, weights))
    mixed = paddle.zeros_like(seen)
    for index, expert in enumerate(block.experts):
        if expert is not None:  # The list is global: None is an expert of another rank.
            mixed = mixed + expert(seen) * seen_weights[:, index : index + 1].astype(seen.dtype)
    if spread:
        mixed = Collective.apply(mixed, group, leave, enter)
    if block.shared_experts is not None:
        mixed = mixed + block.shared_experts(tokens)
    return mixed.reshape(input.shape), None, balance, logits


def _tokens_are_replicated(config: Any, group: Any) -> bool:
    """Return whether all ranks that share experts have the same tokens (tensor but not sequence parallelism)."""
    if config.sequence_parallel:
        return False
    return list(group.ranks) == list(fleet.get_hybrid_communicate_group().get_model_parallel_group().ranks)


def dense_experts() -> None:
    """Let the MoE block compute without fused kernels."""
    fused_forward = modeling.Ernie4_5_MoeSparseMoeBlock.forward

    @functools.wraps(fused_forward)
    def forward(self: Any, input: Any, token_type_ids: Any = None, use_dense_expert: bool = False) -> Any:
        return dense_forward(self, input)

    modeling.Ernie4_5_MoeSparseMoeBlock.forward = forward


def prediction_positions() -> None:
    """Pass the position embeddings to the blocks of multi-token prediction."""
    layer_forward = modeling.Ernie4_5_MoeDecoderLayer.forward
    latest: list[Any] = [None]

    @functools.wraps(layer_forward)
    def forward(
        self: Any,
        hidden_states: Any,
        attention_mask: Any = None,
        attn_mask_startend_row_indices: Any = None,
        position_ids: Any = None,
        position_embeddings: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        head = (hidden_states, attention_mask, attn_mask_startend_row_indices, position_ids)
        if isinstance(position_embeddings, bool):
            # The caller omits this argument, so it receives output_attentions. All layers share one embedding.
            return layer_forward(self, *head, latest[0], False, None, False)
        latest[0] = position_embeddings
        return layer_forward(self, *head, position_embeddings, *args, **kwargs)

    modeling.Ernie4_5_MoeDecoderLayer.forward = forward


def prediction_loss() -> None:
    """Pass the logits of multi-token prediction to its loss."""
    model_forward = modeling.Ernie4_5_MoeForCausalLM.forward

    @functools.wraps(model_forward)
    def forward_in_training(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            kwargs["return_dict"] = False  # With True, the model calls the loss without these logits.
        return model_forward(self, *args, **kwargs)

    modeling.Ernie4_5_MoeForCausalLM.forward = forward_in_training


def expert_gradients() -> None:
    """Under expert parallelism, reduce each expert only over the ranks that have the same expert.

    Sharding version 2 reduces a parameter over the group in its ``color``, or else over all sharding ranks. ERNIE's
    experts have no color, so expert 0 of one rank would be averaged with expert 2 of another.
    """
    original = moe_alltoall_layer.MOEAlltoAllLayer.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # Jobs without expert parallelism have no such groups, and a single process has no communicator.
        hcg: Any = getattr(fleet.fleet, "_hcg", None)
        if not hasattr(hcg, "get_expert_parallel_world_size") or hcg.get_expert_parallel_world_size() <= 1:
            return
        group = hcg.get_moe_sharding_parallel_group()
        for parameter in self.experts.parameters():
            parameter.color = {"color": "moe_expert", "group": group}

    moe_alltoall_layer.MOEAlltoAllLayer.__init__ = __init__


def expert_groups_in_pipelines() -> None:
    """Let a pipeline accept the group that shares its experts, and not only the group's name."""
    by_name = pp_model._parse_moe_group

    @functools.wraps(by_name)
    def _parse_moe_group(moe_group: Any) -> Any:
        return by_name(moe_group) if isinstance(moe_group, str) else moe_group

    pp_model._parse_moe_group = _parse_moe_group


def expert_parallel_optimizer() -> None:
    """Define the class that Paddle 3.3.1 lacks, for an ``isinstance`` test; it has no instances."""

    class AbsentOptimizer:
        pass

    if moe_optimizer.MuonShardingOptimizer is None:
        moe_optimizer.MuonShardingOptimizer = AbsentOptimizer
