"""ERNIE's multi-token prediction layers, held by a model that does not train them.

PaddleFormers' pipeline of ERNIE 4.5 MoE has no layer for multi-token prediction. Its embedding joins the predictions'
inputs along the last axis, its decoder layers split them along the first, and no layer computes them. A pipeline can
therefore train only the rest of the model. A checkpoint must not lose the prediction layers for that. A pipeline
therefore gets a stage member that holds their weights and passes activations through, and any model can train without
them.

Idea: a layer reads the number of prediction layers from its configuration each time it computes. After the model is
built with all of them, the layers are set to none, and the model itself keeps the true number, which its
checkpoints describe.

Importing this module imports PaddleFormers. This module needs no time or memory beside the weights.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import paddle
from paddleformers.nn.criterion.interface import ALL_LOSS_FUNCTIONS
from paddleformers.nn.linear import Linear
from paddleformers.nn.norm import Norm
from paddleformers.transformers import Ernie4_5_MoeForCausalLMPipe
from paddleformers.transformers.ernie4_5_moe.modeling import Ernie4_5_MoeDecoderLayer

NUMBER = "num_nextn_predict_layers"


class HeldPredictions(paddle.nn.Layer):
    """One member of a pipeline stage with the weights of all prediction layers, under their own names."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        numbers = range(getattr(config, NUMBER))
        size = config.hidden_size
        self.mtp_block = paddle.nn.LayerList([Ernie4_5_MoeDecoderLayer(config, number) for number in numbers])
        self.mtp_hidden_norm = paddle.nn.LayerList([_norm(config) for _ in numbers])
        self.mtp_emb_norm = paddle.nn.LayerList([_norm(config) for _ in numbers])
        self.mtp_linear_proj = paddle.nn.LayerList(
            [
                Linear.create(size * 2, size, has_bias=config.use_bias, config=config, linear_type="default")
                for _ in numbers
            ]
        )

    def forward(self, activations: Any) -> Any:
        """Return the activations as they came."""
        return activations


def _norm(config: Any) -> Any:
    return Norm.create(
        config=config,
        norm_type="rms_norm",
        hidden_size=config.hidden_size,
        has_bias=config.use_bias,
        norm_eps=config.rms_norm_eps,
        input_is_parallel=config.sequence_parallel,
    )


class PipeThatHoldsPredictions(Ernie4_5_MoeForCausalLMPipe):
    """PaddleFormers' pipeline of ERNIE 4.5 MoE with :class:`HeldPredictions` before its head."""

    _mtp_layer_pipe_cls = HeldPredictions

    def add_sequential_layer(self, layer_desc: Any, name_prefix: str = "") -> None:
        """As PaddleFormers does it; the predictions' names begin with ``model``."""
        of_predictions = getattr(layer_desc, "layer_func", None) is HeldPredictions
        super().add_sequential_layer(layer_desc, "model" if of_predictions else name_prefix)


def train_without(model: Any) -> None:
    """Let a model that has prediction layers train as if it had none; it saves and loads them as before."""
    described = deepcopy(model.config)
    for layer in model.sublayers(include_self=True):
        own = getattr(layer, "config", None)
        if getattr(own, NUMBER, 0):
            setattr(own, NUMBER, 0)
        if getattr(layer, "loss_type", None) == "mtp_sft":  # It has chosen its function by the number already.
            layer.loss_type, layer.loss_foward_fn = "sft", ALL_LOSS_FUNCTIONS["sft"]
    model.config = described
