"""State dicts of Paddle's semi-automatic parallelism, loaded from and saved as checkpoints of hybrid parallelism.

The table of the page is made of the losses that these tests measure. ``make semi-auto`` writes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest

import paddleformers_fc
from paddleformers_fc.errors import FlexError
from tests.formats import jobs
from tests.harness import tiny
from tests.harness.on_ranks import on_ranks, run_on_ranks
from tests.harness.tiny import DP2, PP2, SD2S3, SD2V1, SD2V2, SINGLE, TP2, TP2SD2V2, MatrixLayout
from tests.trainer.jobs import TO_BEST, callback, few_samples, run
from verification.digests import canonical_digests
from verification.forkserver import ForkServer
from verification.matrix.layouts import parse_layout

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "semi-auto.md"
WRITE = "FLEX_WRITE_SEMI_AUTO"
BEGIN, END = "<!-- semi-auto: losses -->\n", "<!-- end -->\n"


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


@on_ranks(4)
def test_boxes_are_those_of_paddles_own_local_values() -> None:
    import numpy as np
    import paddle
    import paddle.distributed as dist

    from paddleformers_fc.trainer.dist_tensors import shard_of_rank

    dist.init_parallel_env()
    meshes = [dist.ProcessMesh(ranks) for ranks in ([[0, 1], [2, 3]], [[3, 1], [0, 2]], [3, 1, 0, 2], [1, 2])]
    count = 0
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
            np.testing.assert_array_equal(own, mine, f"{shape} on {mesh.process_ids} {placements}")
    assert count > 200


def load(source: Path, weights: Path | None, scheme: str, model_type: str, target: Path) -> int:
    """Load a state dict of ``DistTensors``, whose local values are Paddle's own shards of a load into one device.

    Args:
        source: a checkpoint.
        weights: a directory of open weights, which are loaded once more.
        scheme: a name of :data:`SCHEMES`.
        model_type: ``llama`` or ``ernie4_5_moe``.
        target: where to save the state dict afterwards.

    Returns:
        the number of local values.
    """
    import paddle
    import paddle.distributed as dist

    from paddleformers_fc.trainer import live_roles

    dist.init_parallel_env()
    alone = one_device(model_type)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=alone.parameters())
    paddleformers_fc.load(source, alone, optimizer)
    roles = live_roles.LiveModel(alone, optimizer).roles().values()
    wholes = {name: one.local_tensor.numpy() for role in roles for name, one in role.items()}
    model = semi_auto(scheme, model_type)
    state_dict = dict(model.state_dict())
    if scheme != "stages2":  # Paddle's CPU build crashes where it creates states of parameters of other ranks.
        state_dict |= dist.shard_optimizer(paddle.optimizer.AdamW(0.01, parameters=model.parameters())).state_dict()
    for tensor in state_dict.values():
        if tensor._is_initialized():
            tensor._local_value().fill_(7.0)
    paddleformers_fc.load(state_dict, source)
    named = {parameter.name: name for name, parameter in sorted(model.state_dict().items(), reverse=True)}
    count = 0
    for key, tensor in state_dict.items():
        if dist.get_rank() not in tensor.process_mesh.process_ids:
            continue
        static = next((one for one in named if key.startswith(f"{one}_")), None)
        name = key if static is None else f"{named[static]}.{key.removeprefix(f'{static}_')}"
        own = dist.shard_tensor(paddle.to_tensor(wholes[name]), tensor.process_mesh, tensor.placements)
        count += 1
        assert own._local_value().numpy().tobytes() == tensor._local_value().numpy().tobytes(), name
    paddleformers_fc.save(state_dict, target, step=1, config=model.config)
    if weights is not None:
        mine = {name: one for name, one in model.state_dict().items() if one._is_initialized()}
        before = {name: one._local_value().numpy().copy() for name, one in mine.items()}
        for tensor in mine.values():
            tensor._local_value().fill_(7.0)
        paddleformers_fc.load(model.state_dict(), weights)
        assert [name for name, one in mine.items() if (one._local_value().numpy() != before[name]).any()] == []
    return count


@pytest.mark.parametrize(
    ("layout", "scheme", "nproc", "model_type"),
    [
        pytest.param(PP2, "mp2", 2, "llama", marks=pytest.mark.chosen),
        pytest.param(TP2, "mp2", 2, "ernie4_5_moe", marks=pytest.mark.chosen),
        (SINGLE, "both2x2", 4, "llama"),
        (SD2V1, "rows3", 3, "llama"),
        (SD2S3, "stages2", 2, "llama"),
        pytest.param(TP2SD2V2, "dp2mp2", 4, "llama", marks=pytest.mark.slow),
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_every_local_shard_is_loaded_from_hybrid_parallelism_and_saved(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, scheme: str, nproc: int, model_type: str
) -> None:
    """Also of fused layers, which tensor-parallel ranks lay out in another way than one device."""
    given = {"layout": layout, "output_dir": tmp_path, "arguments": {"max_steps": 1, "save_steps": 1}}
    run_on_ranks(ranks, layout.nproc, run, **given, model_type=model_type)
    source, target, weights = tmp_path / "checkpoint-1", tmp_path / "again/checkpoint-1", None
    if model_type == "llama":
        weights = paddleformers_fc.open(source).export(tmp_path / "hf").directory
    settings = {"source": source, "weights": weights, "scheme": scheme, "model_type": model_type, "target": target}
    assert sum(run_on_ranks(ranks, nproc, load, **settings)) >= 39
    again = {(one.role, one.name): one.md5 for one in canonical_digests(target)}
    kept = [one for one in canonical_digests(source) if one.role == "model_state" or scheme != "stages2"]
    assert again == {(one.role, one.name): one.md5 for one in kept}


@on_ranks(2)
def test_a_state_dict_is_loaded_by_name_under_other_placements_or_refused_with_the_reason(tmp_path: Path) -> None:
    import paddle
    import paddle.distributed as dist

    dist.init_parallel_env()
    mesh = dist.ProcessMesh([0, 1])
    part = dist.auto_parallel.api.dtensor_from_local(paddle.ones([2, 4]), mesh, [dist.Partial()])
    cut = dist.shard_tensor(paddle.ones([8, 4]), mesh, [dist.Shard(0, split_factor=2)])
    values = paddle.arange(32, dtype="float32").reshape([8, 4])
    good = dist.shard_tensor(values, mesh, [dist.Shard(0)])
    local = paddle.ones([2, 2])
    local.is_distributed = True
    orphan = "linear_0.w_0.dist_moment1_0"
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"w": part}, ("Partial(reduce_type=SUM)", "the tensor is the sum of the local values", "distributed.reshard")),
        ({"w": cut}, ("split_factor", "is not one box")),
        ({"w": good, orphan: good}, (f"{orphan}: the state dict has no weight for this state", "**model.state_dict()")),
        ({"model": {"w": good}, "other": {"w": good}}, ("w: 2 entries",)),
        ({"w": good, "epoch": 3}, ("Invalid entry 'epoch'", "type int")),
        ({"w": local}, ("tensor-parallel layer", "Pass the layer")),
    ]
    for state_dict, texts in cases:
        with pytest.raises(FlexError) as refused:
            paddleformers_fc.save(state_dict, tmp_path / "checkpoint-1")
        assert all(text in refused.value.render() for text in texts), refused.value.render()
    assert not (tmp_path / "checkpoint-1").exists()
    paddleformers_fc.save({"model": {"w": good}}, tmp_path / "checkpoint-2", step=2)
    other = dist.shard_tensor(paddle.zeros([8, 4]), mesh, [dist.Shard(1)])
    assert not paddleformers_fc.load({"w": other}, tmp_path / "checkpoint-2").fresh
    mine = slice(2) if dist.get_rank() == 0 else slice(2, 4)
    assert (other._local_value().numpy() == values.numpy()[:, mine]).all()


# ---- Losses.

LIMIT = 1e-5
"""The largest difference of a loss; published are 1e-6 to 5e-5 for PaddleNLP's converter."""

STRATEGIES = ("dp2", "tp2", "pp2", "sd2v1", "sd2s2", "sd2v2", "sd2s3")
STRATEGIES += ("pp4vpp2+tp2", "tp2+sd2v1", "tp2+pp2+sd2v1", "tp2+pp2+sd2v2")
"""Layouts of hybrid runs."""

STOCK = {"save_checkpoint_format": "", "load_checkpoint_format": "", "save_to_hf": False}
OF_OTHERS = {
    "legacy hybrid": ("tp2", "pp2", "sd2v2", "tp2+pp2+sd2v1"),
    "sharding_io": ("sd2v2",),
    "Paddle's FlexCheckpoint": ("tp2", "sd2v2"),
}
"""The strategies of the other formats; the tests of formats compare all of them."""

FORMATS: Mapping[str, Mapping[str, Any] | None] = {
    "flex checkpoint": None,
    "legacy hybrid": STOCK,
    "sharding_io": {**STOCK, "save_sharded_model": True},
    "Paddle's FlexCheckpoint": {},
}
"""Formats, with the arguments under which PaddleFormers' Trainer writes them; None is ours."""

CASES = [
    (strategy, kind)
    for kind in FORMATS
    for strategy in STRATEGIES
    if kind == "flex checkpoint" or strategy in OF_OTHERS[kind]
]


SAMPLE = ("sd2v2", "Paddle's FlexCheckpoint")


def is_slow(strategy: str, kind: str) -> bool:
    """Four hybrid ranks, and formats whose reading the tests of formats prove."""
    return "+" in strategy or kind in ("legacy hybrid", "sharding_io")


def write_batches(output_dir: Path, target: Path) -> None:
    """Write the tokens and labels that the Trainer gives to every layout in steps 3 to 5 as ``.npz``."""
    import numpy as np

    args = tiny.training_arguments(SINGLE, str(output_dir))
    loader = tiny.trainer(tiny.build("llama", SINGLE, args), args).get_train_dataloader()
    found = [*islice(loader, 2, 5)]
    np.savez(target, **{key: np.stack([one[key].numpy() for one in found]) for key in ("input_ids", "labels")})


@pytest.fixture(scope="module")
def data(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The batches of steps 3 to 5."""
    place = tmp_path_factory.mktemp("batches")
    run_on_ranks(ranks, 1, write_batches, output_dir=place / "run", target=place / "batches.npz")
    return place / "batches.npz"


def train_on(batches: Path, source: Path, model: dict[str, Any]) -> list[float]:
    """Resume a checkpoint on a mesh of two ranks in a loop; the losses.

    Args:
        batches: what :func:`write_batches` has written.
        source: the checkpoint.
        model: overrides of the model's configuration.
    """
    import numpy as np
    import paddle
    import paddle.distributed as dist

    layer = semi_auto("mp2", **model)
    clip = paddle.nn.ClipGradByGlobalNorm(1.0)
    plain = paddle.optimizer.AdamW(0.01, parameters=layer.parameters(), weight_decay=0.0, grad_clip=clip)
    optimizer = dist.shard_optimizer(plain)
    # Checkpoints of stock Trainers do not contain the configuration.
    paddleformers_fc.load({**layer.state_dict(), **optimizer.state_dict()}, source, config=layer.config)
    data, mesh, losses = np.load(batches), dist.ProcessMesh([0, 1]), []
    for tokens, labels in zip(data["input_ids"], data["labels"], strict=True):
        placed = [dist.shard_tensor(paddle.to_tensor(one), mesh, [dist.Replicate()]) for one in (tokens, labels)]
        loss = layer(input_ids=placed[0], labels=placed[1])[0]
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses


def losses(
    ranks: ForkServer, data: Path, place: Path, strategy: str, kind: str
) -> tuple[Sequence[float], Sequence[float]]:
    """The losses of steps 3 to 5 of a hybrid run, and of a semi-automatic one that resumes its checkpoint of step 2."""
    layout, options = parse_layout(strategy), FORMATS[kind]
    model = {"num_hidden_layers": 8} if "vpp" in strategy else {}
    arguments = {"max_steps": 5, "save_steps": 2, **(options or {})}
    given = {"layout": layout, "output_dir": place, "model": model, "arguments": arguments}
    hybrid = run_on_ranks(ranks, layout.nproc, jobs.train, **given, ours=options is None)[-1]
    assert "error" not in hybrid, hybrid
    resume = {"batches": data, "source": place / "checkpoint-2", "model": model}
    found = run_on_ranks(ranks, 2, train_on, **resume)
    assert found[0] == found[1]
    return hybrid["losses"][2:], found[0]


HEADER = (
    "| hybrid run | its checkpoint | its losses at steps 3, 4, 5 | losses of the semi-automatic run | difference |\n"
    "|---|---|---|---|---|\n"
)


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[tuple[str, str], str]]:
    """The rows of the table by case; all of them replace those of the page at the end."""
    found: dict[tuple[str, str], str] = {}
    yield found
    if os.environ.get(WRITE) and found.keys() == set(CASES):
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        table = HEADER + "".join(found[case] for case in CASES)
        PAGE.write_text(f"{before}{BEGIN}{table}{END}{after}", encoding="utf-8")


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        pytest.param(*case, marks=pytest.mark.slow if is_slow(*case) else [pytest.mark.chosen] * (case == SAMPLE))
        for case in CASES
    ],
)
def test_a_semi_automatic_run_continues_the_losses_of_a_hybrid_one(
    ranks: ForkServer, data: Path, tmp_path: Path, rows: dict[tuple[str, str], str], strategy: str, kind: str
) -> None:
    hybrid, semi_auto = losses(ranks, data, tmp_path, strategy, kind)
    assert len(hybrid) == 3
    difference = max(abs(one - other) for one, other in zip(hybrid, semi_auto, strict=True))
    texts = (", ".join(f"{loss:.6f}" for loss in one) for one in (hybrid, semi_auto))
    rows[strategy, kind] = f"| {strategy} | {kind} | {' | '.join(texts)} | {difference:.1e} |\n"
    assert semi_auto == pytest.approx(hybrid, rel=0, abs=LIMIT)


def test_the_page_has_the_losses_of_every_strategy_and_format() -> None:
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert table.startswith(HEADER)
    cells = [line.strip("| \n").split(" | ") for line in table.removeprefix(HEADER).splitlines()]
    assert [(strategy, kind) for strategy, kind, *_ in cells] == CASES
    assert all(float(difference) <= LIMIT for *_, difference in cells)


# ---- PaddleFormers' Trainer.


def run_trainer(
    layout: MatrixLayout,
    output_dir: Path,
    semi_auto: bool,
    arguments: dict[str, Any],
    resume: Path | None = None,
    any_order: bool = True,
) -> list[float]:
    """Train with the Trainer, and save what was loaded before the first step; the losses.

    Args:
        semi_auto: whether to use the semi-automatic mode.
        any_order: whether to train on one sample alone.
    """

    def save(*_: Any, **__: Any) -> None:
        if resume is not None:
            trainer._save_checkpoint(trainer.model)

    data = {"train_dataset": OneSample()} if any_order else {}
    given = {"max_steps": 5, **arguments}
    trainer = trainer_of(layout, output_dir, semi_auto, given, callbacks=[callback(on_train_begin=save)], **data)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    losses: list[float] = trainer.losses
    return losses


def train(ranks: ForkServer, layout: MatrixLayout, place: Path, semi_auto: bool, **settings: Any) -> list[float]:
    """The losses of a Trainer on every rank, which are equal."""
    given = {"layout": layout, "output_dir": place, "semi_auto": semi_auto, **settings}
    first, *others = run_on_ranks(ranks, layout.nproc, run_trainer, **given)
    assert all(one == first for one in others)
    return list(first)


def test_the_semi_automatic_trainer_resumes_its_own_run(ranks: ForkServer, tmp_path: Path) -> None:
    given = {"arguments": {"save_steps": 2}, "any_order": False}
    whole = train(ranks, DP2, tmp_path / "whole", True, **given)
    source = tmp_path / "whole/checkpoint-2"
    assert train(ranks, DP2, tmp_path / "again", True, resume=source, **given) == whole[2:]
    assert list(canonical_digests(tmp_path / "again/checkpoint-2")) == list(canonical_digests(source))


@on_ranks(layout=DP2)
def test_the_best_weights_of_a_semi_automatic_run_are_evaluated_after_it(tmp_path: Path) -> None:
    """The evaluation before has left the last layers gathered."""
    trainer = trainer_of(DP2, tmp_path, True, {**TO_BEST, "max_steps": 3}, eval_dataset=few_samples())
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric


@pytest.mark.parametrize("layout", [SD2V2, PP2], ids=lambda one: one.name)
def test_the_trainer_goes_to_semi_automatic_and_back(ranks: ForkServer, tmp_path: Path, layout: MatrixLayout) -> None:
    saving, skipping = {"save_steps": 2}, {"ignore_data_skip": True}
    hybrid = train(ranks, layout, tmp_path / "hybrid", False, arguments=saving)
    source, between = tmp_path / "hybrid/checkpoint-2", tmp_path / "there/checkpoint-2"
    there = train(ranks, DP2, tmp_path / "there", True, resume=source, arguments=skipping)
    back = train(ranks, layout, tmp_path / "back", False, resume=between, arguments=skipping)
    assert there == pytest.approx(hybrid[2:], rel=0, abs=LIMIT)
    assert back == pytest.approx(hybrid[2:], rel=0, abs=LIMIT)
    expected = list(canonical_digests(source))
    assert list(canonical_digests(between)) == expected
    assert list(canonical_digests(tmp_path / "back/checkpoint-2")) == expected
