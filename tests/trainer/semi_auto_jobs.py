"""Models of Paddle's ``shard_tensor`` and their trainings, inside rank processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.harness import tiny

SCHEMES: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "mp2": ([0, 1], {"column": "1", "row": "0"}),
    "dp2mp2": ([[0, 1], [2, 3]], {"column": "r1", "row": "r0"}),
    "rows3": ([0, 1, 2], {"column": "0", "row": "0", "other": "0"}),
    "both2x2": ([[3, 1], [0, 2]], {"column": "01", "row": "10", "other": "r0"}),
    "stages2": ([0, 1], {}),
}
"""Meshes, and by kind of layer a letter per axis of the mesh: ``r`` for replicas, else the tensor's axis that is cut.

Under ``stages2`` each rank is the mesh of half of the layers.
"""


def one_device(model_type: str = "llama", **overrides: Any) -> Any:
    """A tiny model as one device has it, in a job of any number of ranks."""
    from types import SimpleNamespace

    arguments = SimpleNamespace(tensor_parallel_rank=0, sequence_parallel=False)
    return tiny.build(model_type, tiny.SINGLE, arguments, **overrides)


def semi_auto(scheme: str, model_type: str = "llama", **overrides: Any) -> Any:
    """The same model of semi-automatic parallelism: every parameter has a mesh and placements of a scheme."""
    import paddle.distributed as dist

    dist.init_parallel_env()
    model = one_device(model_type, **overrides)
    place(model, scheme)
    return model


def place(model: Any, scheme: str) -> None:
    """Replace the parameters of a model by ``DistTensors``."""
    import paddle.distributed as dist

    ranks, kinds = SCHEMES[scheme]
    mesh = dist.ProcessMesh(ranks)
    made: dict[int, Any] = {}
    for prefix, layer in model.named_sublayers(include_self=True):
        for name, parameter in list(layer._parameters.items()):
            if parameter is None:
                continue
            if scheme == "stages2":
                mesh = dist.ProcessMesh([int(".layers.2" in prefix or ".layers.3" in prefix or "lm_head" in prefix)])
            column = any(part in prefix for part in ("qkv_proj", "q_proj", "k_proj", "v_proj", "gate", "up_proj"))
            kind = "column" if column else "row" if len(parameter.shape) == 2 else "other"
            letters = kinds.get(kind, "r" * len(mesh.shape))
            placements = [dist.Replicate() if one == "r" else dist.Shard(int(one)) for one in letters]
            if id(parameter) not in made:
                made[id(parameter)] = dist.shard_tensor(parameter, mesh, placements)
            layer._parameters[name] = made[id(parameter)]


class OneSample:
    """The same sample at every index, because the semi-automatic mode reads samples in an order of its own."""

    def __len__(self) -> int:
        return tiny.SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return tiny.Samples()[5]


def trainer_of(
    layout: tiny.MatrixLayout, output_dir: Path, semi_auto: bool, arguments: Mapping[str, Any], **given: Any
) -> Any:
    """A ``FlexTrainer`` over the tiny Llama, in the semi-automatic mode or without it; ``given`` is for the Trainer."""
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, **arguments}
    mode = {"enable_auto_parallel": True, "use_intermediate_api": True, "to_static": False} if semi_auto else {}
    args = tiny.training_arguments(layout, str(output_dir), **settings, **mode)
    # The semi-automatic mode has other layers if the configuration asks for them.
    model = tiny.build("llama", layout, args, **({"use_single_model_implementation": True} if semi_auto else {}))
    return tiny.trainer(model, args, cls=FlexTrainer, **given)
