"""Jobs of semi-automatic parallelism, run inside rank processes: models of Paddle's ``shard_tensor``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from tests.harness import tiny


def boxes() -> tuple[int, list[str]]:
    """Compare boxes with Paddle's own local values; the number of comparisons, and the differences."""
    import numpy as np
    import paddle
    import paddle.distributed as dist

    from paddleformers_fc.trainer.live_roles import shard_of_rank

    dist.init_parallel_env()
    meshes = [dist.ProcessMesh(ranks) for ranks in ([[0, 1], [2, 3]], [[3, 1], [0, 2]], [3, 1, 0, 2], [1, 2])]
    wrong, count = [], 0
    for mesh, shape in product(meshes, [(8, 4), (5, 4), (7, 3), (3, 6), (1, 4), (2, 2), (6,), (3, 5, 7)]):
        kinds = [dist.Replicate(), *(dist.Shard(axis) for axis in range(len(shape)))]
        cases = [list(one) for one in product(kinds, repeat=len(mesh.shape))]
        if len(mesh.shape) > 1:
            cases.append([dist.Shard(0, shard_order=1), dist.Shard(0, shard_order=0)])
        for placements in cases:
            whole = np.arange(np.prod(shape), dtype="float32").reshape(shape)
            try:
                tensor = dist.shard_tensor(paddle.to_tensor(whole), mesh, placements)
            except ValueError:
                continue  # Paddle cannot make a part that begins behind the end.
            shard, own, mine = shard_of_rank("w", tensor), np.empty(0), np.empty(0)
            if dist.get_rank() in mesh.process_ids:
                own = tensor._local_value().numpy().reshape(-1)
            if shard is not None:
                lengths = zip(shard.global_offset, shard.local_shape, strict=True)
                mine = whole[tuple(slice(begin, begin + size) for begin, size in lengths)].reshape(-1)
            count += 1
            if not np.array_equal(own, mine):
                wrong.append(f"{shape} on {mesh.process_ids} {placements}: {own} and {mine}")
    return count, wrong


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


def whole(source: str, target: str, model_type: str = "llama") -> None:
    """Load a checkpoint into one device, and write all tensors with their names as ``.npz``."""
    import numpy as np
    import paddle

    import paddleformers_fc
    from paddleformers_fc.trainer import live_roles

    model = one_device(model_type)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    paddleformers_fc.load(source, model, optimizer)
    roles = live_roles.run_roles(model, optimizer)
    np.savez(target, **{name: one.local_tensor.numpy() for role in roles.values() for name, one in role.items()})


def load(
    source: str, expected: str, scheme: str, target: str, model_type: str = "llama", weights: str | None = None
) -> list[Any]:
    """Load a state dict of ``DistTensors``; the number of local values, and those that differ from Paddle's own shards.

    Args:
        model_type: ``llama`` or ``ernie4_5_moe``.
        source: a checkpoint.
        expected: what :func:`whole` has written of it.
        scheme: a name of :data:`SCHEMES`.
        target: where to save the state dict afterwards.
        weights: a directory of open weights, which are loaded once more.
    """
    import numpy as np
    import paddle
    import paddle.distributed as dist

    import paddleformers_fc

    model = semi_auto(scheme, model_type)
    state_dict = dict(model.state_dict())
    if scheme != "stages2":  # Paddle's CPU build crashes where it creates states of parameters of other ranks.
        state_dict |= dist.shard_optimizer(paddle.optimizer.AdamW(0.01, parameters=model.parameters())).state_dict()
    for tensor in state_dict.values():
        if tensor._is_initialized():
            tensor._local_value().fill_(7.0)
    paddleformers_fc.load(state_dict, source)
    wholes, wrong, count = np.load(expected), [], 0
    named = {parameter.name: name for name, parameter in sorted(model.state_dict().items(), reverse=True)}
    for key, tensor in state_dict.items():
        if dist.get_rank() not in tensor.process_mesh.process_ids:
            continue
        static = next((one for one in named if key.startswith(f"{one}_")), None)
        name = key if static is None else f"{named[static]}.{key.removeprefix(f'{static}_')}"
        own = dist.shard_tensor(paddle.to_tensor(wholes[name]), tensor.process_mesh, tensor.placements)
        count += 1
        if own._local_value().numpy().tobytes() != tensor._local_value().numpy().tobytes():
            wrong.append(name)
    paddleformers_fc.save(state_dict, target, step=1, config=model.config)
    if weights is not None:
        mine = {name: one for name, one in model.state_dict().items() if one._is_initialized()}
        before = {name: one._local_value().numpy() for name, one in mine.items()}
        for tensor in mine.values():
            tensor._local_value().fill_(7.0)
        paddleformers_fc.load(model.state_dict(), weights)
        wrong += [name for name, one in mine.items() if (one._local_value().numpy() != before[name]).any()]
    return [count, wrong]


def batches(output_dir: str, target: str, steps: int) -> None:
    """Write the tokens and labels that the Trainer gives to every layout in its first steps as ``.npz``."""
    import numpy as np

    args = tiny.training_arguments(tiny.SINGLE, output_dir)
    loader = iter(tiny.trainer(tiny.build("llama", tiny.SINGLE, args), args).get_train_dataloader())
    found = [next(loader) for _ in range(steps)]
    np.savez(target, **{key: np.stack([one[key].numpy() for one in found]) for key in ("input_ids", "labels")})


def train(
    scheme: str,
    batches: str,
    steps: Sequence[int],
    source: str | None = None,
    target: str | None = None,
    model: Mapping[str, Any] | None = None,
) -> list[float]:
    """Train a model of semi-automatic parallelism in a loop; the losses.

    Args:
        scheme: a name of :data:`SCHEMES`; of a mesh with two axes, the first divides the samples.
        batches: what :func:`batches` has written.
        steps: the indices of the batches.
        source: the checkpoint to resume.
        target: where to save afterwards.
        model: overrides of the model's configuration.
    """
    import numpy as np
    import paddle
    import paddle.distributed as dist

    import paddleformers_fc

    layer = semi_auto(scheme, **(model or {}))
    optimizer = dist.shard_optimizer(_optimizer(layer))
    if source is not None:
        # Checkpoints of stock Trainers do not contain the configuration.
        paddleformers_fc.load({**layer.state_dict(), **optimizer.state_dict()}, source, config=layer.config)
    data, losses = np.load(batches), []
    mesh = dist.ProcessMesh(SCHEMES[scheme][0])
    placements = [dist.Replicate()] if len(mesh.shape) == 1 else [dist.Shard(0), dist.Replicate()]
    for step in steps:
        tokens, labels = (
            dist.shard_tensor(paddle.to_tensor(data[key][step]), mesh, placements) for key in ("input_ids", "labels")
        )
        losses.append(_step(layer, optimizer, tokens, labels))
    if target is not None:
        state_dict = {**layer.state_dict(), **optimizer.state_dict()}
        paddleformers_fc.save(state_dict, target, step=steps[-1] + 1, config=layer.config)
    return losses


def train_hybrid(
    layout: Mapping[str, Any], output_dir: str, batches: str, steps: Sequence[int], source: str
) -> list[float]:
    """Resume a checkpoint under hybrid parallelism in a loop; the losses.

    Args:
        layout: a ``MatrixLayout`` without data parallelism, as JSON.
        output_dir: for PaddleFormers' arguments, which initialise the parallel environment.
        batches: as for :func:`train`.
        steps: as for :func:`train`.
        source: the checkpoint.
    """
    import numpy as np
    import paddle
    from paddle.distributed import fleet

    import paddleformers_fc

    layer = tiny.build("llama", layout, tiny.training_arguments(layout, output_dir))
    optimizer = _optimizer(layer)
    if layout["tp"] > 1:
        layer, optimizer = fleet.distributed_model(layer), fleet.distributed_optimizer(optimizer)
    paddleformers_fc.load(source, layer, optimizer)
    data = np.load(batches)
    return [
        _step(layer, optimizer, *(paddle.to_tensor(data[key][step]) for key in ("input_ids", "labels")))
        for step in steps
    ]


def _optimizer(model: Any) -> Any:
    import paddle

    clip = paddle.nn.ClipGradByGlobalNorm(1.0)
    return paddle.optimizer.AdamW(0.01, parameters=model.parameters(), weight_decay=0.0, grad_clip=clip)


def _step(model: Any, optimizer: Any, tokens: Any, labels: Any) -> float:
    loss = model(input_ids=tokens, labels=labels)[0]
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return float(loss)


class OneSample:
    """The same sample at every index, because the semi-automatic mode reads samples in an order of its own."""

    def __len__(self) -> int:
        return tiny.SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return tiny.Samples()[5]


def trainer_of(
    layout: Mapping[str, Any], output_dir: str, semi_auto: bool, arguments: Mapping[str, Any], **given: Any
) -> Any:
    """A ``FlexTrainer`` over the tiny Llama, in the semi-automatic mode or without it; ``given`` is for the Trainer."""
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, **arguments}
    mode = {"enable_auto_parallel": True, "use_intermediate_api": True, "to_static": False} if semi_auto else {}
    args = tiny.training_arguments(layout, output_dir, **settings, **mode)
    # The semi-automatic mode has other layers if the configuration asks for them.
    model = tiny.build("llama", layout, args, **({"use_single_model_implementation": True} if semi_auto else {}))
    return tiny.trainer(model, args, cls=FlexTrainer, **given)


def run_trainer(
    layout: Mapping[str, Any],
    output_dir: str,
    semi_auto: bool,
    resume: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    any_order: bool = True,
) -> list[float]:
    """Train with the Trainer, and save what was loaded before the first step; the losses.

    Args:
        layout: a ``MatrixLayout`` as JSON.
        output_dir: of the Trainer.
        semi_auto: whether to use the semi-automatic mode.
        resume: the checkpoint to resume.
        arguments: overrides of the training arguments.
        any_order: whether to train on one sample alone.
    """
    from paddleformers.trainer import TrainerCallback

    class AsLoaded(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if resume is not None:
                trainer._save_checkpoint(trainer.model)

    data = {"train_dataset": OneSample()} if any_order else {}
    given = {"max_steps": 5, **(arguments or {})}
    trainer = trainer_of(layout, output_dir, semi_auto, given, callbacks=[AsLoaded()], **data)
    trainer.train(resume_from_checkpoint=resume)
    losses: list[float] = trainer.losses
    return losses
