"""Variables without a table of names that no single assignment fits are refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from paddleformers_fc.formats.legacy.canonical_ranks import assign_variables
from paddleformers_fc.formats.legacy.rank_files import RankContent
from paddleformers_fc.formats.stock_checkpoint import FileArray

LAYER = {
    "model.layers.{}.self_attn.q_proj.weight": (8, 8),
    "model.layers.{}.self_attn.k_proj.weight": (8, 4),
    "model.layers.{}.mlp.down_proj.weight": (16, 8),
    "model.layers.{}.input_layernorm.weight": (8,),
}
PARAMETERS = {
    "model.embed_tokens.weight": (32, 8),
    **{name.format(layer): shape for layer in (4, 5) for name, shape in LAYER.items()},
    "model.norm.weight": (8,),
    "lm_head.weight": (32, 8),
}
VARIABLES = {
    "embedding_0.w_0": (32, 8),
    "linear_0.w_0": (8, 8),
    "linear_1.w_0": (8, 4),
    "linear_2.w_0": (16, 8),
    "create_parameter_0.w_0": (8,),
    "linear_3.w_0": (8, 8),
    "linear_4.w_0": (8, 4),
    "linear_10.w_0": (16, 8),
    "create_parameter_1.w_0": (8,),
    "create_parameter_2.w_0": (8,),
    "lm_head_pipe_0.w_0": (32, 8),
}


def optimizer(variables: Mapping[str, tuple[int, ...]]) -> RankContent:
    """The content of an optimizer's file with these variables, in another order than that of building."""
    arrays = {}
    for name, shape in sorted(variables.items()):
        arrays[f"{name}_fp32_master_0_moment1_0"] = FileArray("optimizer.pdopt", 0, shape, "float32")
        arrays[f"{name}_fp32_master_0_beta1_pow_acc_0"] = FileArray("optimizer.pdopt", 0, (1,), "float32")
    return RankContent(arrays)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"linear_1.w_0": (4, 8)}, "no order of the classes"),
        ({"linear_11.w_0": (8, 8)}, "12 variables, and the model has 11 parameters"),
    ],
    ids=str,
)
def test_variables_that_do_not_fit_are_refused(change: Mapping[str, tuple[int, ...]], reason: str) -> None:
    found = assign_variables([optimizer({**VARIABLES, **change})], PARAMETERS)
    assert isinstance(found, str)
    assert reason in found


def test_two_possible_assignments_are_refused() -> None:
    twin = {name.replace("create_parameter_2", "rms_norm_0"): shape for name, shape in VARIABLES.items()}
    parameters = {**PARAMETERS, "model.other.weight": (8,)}
    found = assign_variables([optimizer({**twin, "layer_norm_0.w_0": (8,)})], parameters)
    assert isinstance(found, str)
    assert "model.norm.weight can be" in found


def test_states_that_fit_every_order_of_many_classes_are_refused_after_some_orders() -> None:
    letters = "abcdefghijklmnop"
    parameters = {**{f"model.{one}.weight": (4,) for one in letters}, "lm_head.weight": (4,)}
    numbers = {
        f"{one}_0.w_0_beta1_pow_acc_0": FileArray("optimizer.pdopt", 0, (1,), "float32") for one in letters + "q"
    }
    found = assign_variables([RankContent(numbers)], parameters)
    assert isinstance(found, str)
    assert "more than 4096 orders" in found
