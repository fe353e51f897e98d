"""A model with stacked experts as PaddleFleet holds them, with and without ``using_sonic_moe``: jobs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from paddleformers_fc.upstream import LIBRARY
from tests.harness import tiny

SIZES = {"vocab_size": tiny.VOCABULARY, "hidden_size": 8, "moe_intermediate_size": 6, "num_experts": 3}
STACK = "model.layers.0.mlp.grouped_gemm_experts.weight1"


def build(sonic: bool, switched: bool = False) -> Any:
    """The model. Its forward pass takes every expert for every token.

    Under ``using_sonic_moe`` an expert of PaddleFleet 0.3.0 is [out, in], and its rows of gate and up alternate once
    training has begun.

    Args:
        switched: as PaddleFleet's Trainer has them: so in the passes alone, and [in, out] between steps.
    """
    import paddle
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import build_sharded_state_dict
    from paddle.nn import Embedding, Layer, LayerList
    from paddle.nn.functional import cross_entropy, silu

    transformers: Any = import_module(f"{LIBRARY}.transformers")
    Qwen3MoeConfig = import_module(f"{LIBRARY}.transformers.qwen3_moe.configuration").Qwen3MoeConfig
    vocabulary, hidden, width, count = SIZES.values()
    shapes = ([2 * width, hidden], [hidden, width])

    class Experts(Layer):
        def __init__(self) -> None:
            super().__init__()
            first, second = ([count, *(shape if sonic and not switched else shape[::-1])] for shape in shapes)
            self.weight1, self.weight2 = self.create_parameter(first), self.create_parameter(second)

        def forward(self, states: Any) -> Any:
            # [expert, in, out] whatever the layout.
            first, second = ((one.transpose([0, 2, 1]) if sonic else one) for one in (self.weight1, self.weight2))
            gate, up = (first[..., ::2], first[..., 1::2]) if sonic else (first[..., :width], first[..., width:])
            states = states.unsqueeze(0)
            return ((silu(states @ gate) * (states @ up)) @ second).mean(0)

        def sharded_state_dict(self, structured_name_prefix: str = "") -> Any:
            held = {name: one.reshape([-1, one.shape[-1]]) for name, one in self.state_dict().items()}
            for name, one in self.state_dict().items():
                held[name].name = one.name
            return build_sharded_state_dict(held, None, structured_name_prefix)

    class SwitchedExperts(Experts):
        def convert_weights_to_sonic_layout(self) -> None:
            self._convert(True)

        def convert_weights_to_grouped_layout(self) -> None:
            self._convert(False)

        def _convert(self, to_sonic: bool) -> None:
            if (self.weight1.shape[1] == 2 * width) == to_sonic:
                return
            with paddle.no_grad():
                for number, parameter in enumerate((self.weight1, self.weight2)):
                    for one in (parameter, *([] if parameter.grad is None else [parameter.grad])):
                        turned = one.transpose([0, 2, 1])
                        if number == 0 and to_sonic:
                            turned = paddle.stack(turned.chunk(2, axis=1), axis=2).reshape(turned.shape)
                        elif number == 0:
                            turned = paddle.concat([turned[..., ::2], turned[..., 1::2]], axis=-1)
                        one.reshape_(turned.shape)
                        paddle.assign(turned.contiguous(), output=one)

        def forward(self, states: Any) -> Any:
            assert self.weight1.shape[1] == 2 * width, "not switched before the pass"
            return super().forward(states)

        def sharded_state_dict(self, structured_name_prefix: str = "") -> Any:
            assert self.weight1.shape[1] == hidden, "described in the passes"
            return super().sharded_state_dict(structured_name_prefix)

    class Model(transformers.PretrainedModel):
        config_class, base_model_prefix, is_fleet = Qwen3MoeConfig, "model", True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = model = Layer()
            model.embedding, model.norm, model.lm_head, layer = Layer(), Layer(), Layer(), Layer()
            model.embedding.embed_tokens = Embedding(vocabulary, hidden)
            model.norm.weight = model.norm.create_parameter([hidden])
            model.lm_head.weight = model.lm_head.create_parameter([vocabulary, hidden])
            layer.mlp = Layer()
            layer.mlp.grouped_gemm_experts = SwitchedExperts() if switched else Experts()
            model.layers = LayerList([layer])

        def forward(self, input_ids: Any, labels: Any) -> Any:
            states = self.model.embedding.embed_tokens(input_ids)
            flat = states.reshape([-1, hidden])
            flat = (flat + self.model.layers[0].mlp.grouped_gemm_experts(flat)) * self.model.norm.weight
            logits = flat @ self.model.lm_head.weight.T
            return (cross_entropy(logits, labels.reshape([-1])), logits)

        def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return Layer.sharded_state_dict(self, *args, **kwargs)

    config = Qwen3MoeConfig(**SIZES, num_hidden_layers=1, mlp_only_layers=[], tie_word_embeddings=False)
    config.using_sonic_moe, config.moe_expert_fusion = sonic, not sonic
    paddle.seed(0)
    return Model(config)


def run(
    sonic: bool,
    output_dir: str,
    arguments: Mapping[str, Any],
    weights: str | None = None,
    resume: str | None = None,
    switched: bool = False,
) -> dict[str, Any]:
    """Train, save again, and export.

    Args:
        switched: as for :func:`build`.
        weights: open weights that the model starts with.

    Returns:
        the losses, and the stack of gate and up at the end.
    """
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments, load_open_weights
    from paddleformers_fc.trainer import startup

    given = {"cls": FlexTrainingArguments, "flex_checkpoint": True, "using_sonic_moe": sonic, **arguments}
    args = tiny.training_arguments(tiny.SINGLE, output_dir, **given)
    model = build(sonic, switched)
    if weights is not None:
        load_open_weights(model, weights)
    trainer = tiny.trainer(model, args, cls=FlexTrainer)
    trainer.train(resume_from_checkpoint=resume)
    if not Path(output_dir, f"checkpoint-{trainer.state.global_step}").exists():
        trainer._save_checkpoint(trainer.model, metrics=None)
    trainer.save_model(str(Path(output_dir) / "export"))
    stack = trainer.model.state_dict()[STACK]
    return {
        "losses": trainer.losses,
        "stack": stack.numpy().tolist(),
        "passes_change_weights": startup._passes_change_weights(trainer),
    }
