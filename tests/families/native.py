"""PaddleFormers' hand-written statements, read from its sources: no package needs to be imported that cannot be.

``_gen_aoa_config`` and ``_gen_inv_aoa_config`` are class methods that look at nothing but their class and the
configuration. They are cut out of the source file and called with stand-ins for both.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_FALSE = ("attention_bias", "fd_fallback", "mlp_bias", "moe_expert_fusion", "tie_word_embeddings", "use_bias")
_FALSE += ("using_sonic_moe", "add_full_attention_sink_bias", "add_swa_attention_sink_bias", "use_dense_mtp")
_FALSE += ("routed_scaling_factor_learnable", "use_gated_attn", "use_vha_attention")
_NONE = ("experimental_attention_variant", "fp8", "moe_latent_size", "sliding_window", "window_attn_skip_freq")
_ZERO = ("mtp_num_layers", "num_nextn_predict_layers", "num_empty_layers_add_in_head")
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(_FALSE, False),
    **dict.fromkeys(_NONE),
    **dict.fromkeys(_ZERO, 0),
    "tensor_model_parallel_size": 1,
    "moe_deep_gemm": True,
    "softmax_type": "vanilla",
}
"""What PaddleFormers' configurations contain by default."""

_QWEN = {"^visual": "model.visual", r"^model(?!.(language_model|visual))": "model.language_model"}
CONVERSIONS: dict[str, dict[str, str]] = {
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
}
"""What the classes of models with an image tower call ``_checkpoint_conversion_mapping``."""

FILES = {("qwen3_vl", True): "modeling_fleet.py"}
FILES[("qwen3_5_moe", False)] = "../qwen3_5/modeling.py"  # Its class is that of the dense model.
"""Files of statements that are not in ``modeling.py``, by model type and whether they are of PaddleFleet's class."""

MACRO = "_register_fused_in_proj_macro"
"""The function by which Qwen 3.5 teaches Paddle's engine a fused layout."""

# The module globals that these functions use. No model here has windows.
SCOPE = {"math": math, "is_layer_window_attention": lambda *_: False}


class Config(SimpleNamespace):
    """A configuration with the attributes that these functions read."""

    def get(self, name: str, default: Any = None) -> Any:
        """A field, or the default."""
        return getattr(self, name, default)


def statements(
    model_type: str, config: Mapping[str, Any], *, inverse: bool, fleet: bool = False, **attributes: Any
) -> list[str]:
    """The statements that PaddleFormers writes for a model.

    Args:
        model_type: the package of the model.
        config: the model's configuration.
        inverse: for the export instead of the load.
        fleet: of the PaddleFleet class.
        attributes: further attributes of the class.
    """
    functions = _functions(model_type, fleet)
    functions.get(MACRO, lambda: None)()
    function = functions["_gen_inv_aoa_config" if inverse else "_gen_aoa_config"]
    kind = SimpleNamespace(base_model_class=None, base_model_prefix="model", is_fleet=fleet, **attributes)
    kind._checkpoint_conversion_mapping = CONVERSIONS.get(model_type, {})
    kind._tied_weights_keys = ["lm_head.weight"]
    kind._inject_norm_dtype = lambda *_: None  # DeepSeek V3.2 casts its norms.
    kind.get_layer_attn_split_info = functions.get("get_layer_attn_split_info")
    return list(function(kind, _config(config))["aoa_statements"])


def _config(values: Mapping[str, Any]) -> Config:
    """A configuration, whose nested ones are configurations as well; it has the keys of its text."""
    nested = {key: one for key, one in values.items() if isinstance(one, Mapping) and key.endswith("_config")}
    configs = {key: _config(one) for key, one in nested.items()}
    return Config(**{**DEFAULTS, **nested.get("text_config", {}), **values, **configs})


def _functions(model_type: str, fleet: bool) -> dict[str, Any]:
    spec = importlib.util.find_spec("paddleformers")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    transformers = Path(spec.submodule_search_locations[0]) / "transformers"
    path = transformers / model_type / FILES.get((model_type, fleet), "modeling.py")
    shared = importlib.util.spec_from_file_location("aoa_config_base", transformers / "aoa_config_base.py")
    assert shared is not None
    assert shared.loader is not None
    module = sys.modules.setdefault(shared.name, importlib.util.module_from_spec(shared))
    shared.loader.exec_module(module)
    scope: dict[str, Any] = {**SCOPE, "MoEAOAConfigGenerator": module.MoEAOAConfigGenerator}
    wanted = ("_gen_aoa_config", "_gen_inv_aoa_config", "get_layer_attn_split_info", MACRO)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        # The first of each name is that of the base class.
        if isinstance(node, ast.FunctionDef) and node.name in wanted and node.name not in scope:
            node.decorator_list = []
            for argument in node.args.args:
                argument.annotation = None
            exec(compile(ast.Module([node], []), str(path), "exec"), scope)
    return scope
