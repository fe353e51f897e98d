"""A training loop without PaddleFormers' Trainer: saved under one layout, loaded under another, bit for bit."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.distributed import ShardedWeight

import paddleformers_fc
from paddleformers_fc import load, save
from paddleformers_fc.errors import FlexError, MappingError, OptionError
from paddleformers_fc.execute.digest import TensorDigest
from tests.harness import tiny
from tests.harness.on_ranks import on_ranks, run_on_ranks
from tests.harness.patching import precede
from tests.harness.tiny import DP2, SD2V1, SD2V2, SINGLE, TP2, MatrixLayout
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

AXES = ("dp", "tp", "pp", "sharding", "ep", "sep", "cp")
SHAPES = {"gate_up.weight": (8, 32), "down.weight": (16, 8)}


def run(
    layout: MatrixLayout,
    output_dir: Path,
    target: Path,
    source: Path | None = None,
    kind: str = "llama",
    load: dict[str, Any] | None = None,
    rounds: int = 0,
) -> list[str]:
    """Train a model for three steps, or load ``source`` after one, and save ``target``.

    Args:
        output_dir: for PaddleFormers' arguments, which initialise the parallel environment.
        target: the checkpoint to save.
        source: the checkpoint to load over weights and states of another history.
        kind: a key of :data:`KINDS` or a tiny model; or ``bare``, an ERNIE that is loaded into a layer without a
            configuration, with its family, and ``named``, where that layer is saved as well.
        load: arguments of the load.
        rounds: gives ``mapping`` to the load: ``gate_up`` is stored in so many rounds.

    Returns:
        the names that were not loaded; or the text of the error, after which no weight has changed.
    """
    from paddle.distributed import fleet

    args, given = tiny.training_arguments(layout, output_dir), dict(load or {})
    is_bare = kind in ("bare", "named")
    name = "ernie4_5_moe" if is_bare else kind
    built = KINDS[kind]() if kind in KINDS else tiny.build(name, layout, args)
    optimizer = stepping = paddle.optimizer.AdamW(0.01, parameters=built.parameters())
    filled = saved = built
    if is_bare:
        filled = _bare(built)
        saved = filled if kind == "named" else built
        given |= {"family": "ernie4_5_moe", "config": built.config}
    elif layout.sharding > 1:
        filled = saved = fleet.distributed_model(built)
        stepping = fleet.distributed_optimizer(optimizer)
    if rounds:
        given["mapping"] = fused_rules(rounds, layout.tp)
    for step in range(1 if source else 3):
        paddle.seed(step)
        tokens = paddle.randint(0, 64, [2, 8])
        outcome = built(tokens) if kind in KINDS else built(input_ids=tokens, labels=tokens)[0]
        outcome.square().mean().backward()
        if stepping is not optimizer:
            stepping.reduce_gradients(list(built.parameters()), fleet.get_hybrid_communicate_group())
        stepping.step()
        stepping.clear_grad()
    fresh: list[str] = []
    if source:
        before = {name: one.local_tensor.numpy() for name, one in filled.sharded_state_dict().items()}
        try:
            fresh = list(paddleformers_fc.load(source, filled, stepping, **given).fresh)
        except FlexError as error:
            for name, one in filled.sharded_state_dict().items():
                assert (one.local_tensor.numpy() == before[name]).all(), name
            return [type(error).__name__, error.what, *error.evidence, error.next_step]
    paddleformers_fc.save(target, saved, stepping, step=3, consumed_samples=6)
    return fresh


def list_exchanges(**given: Any) -> list[str]:
    """What the ranks exchange in the load of :func:`run`."""
    from paddleformers_fc.distributed.communicator import Communicator

    doing: list[str] = []
    precede(Communicator, "gather", lambda _, what, *__, **___: doing.append(what))
    assert not run(**given)
    return doing[: doing.index("checking the arguments of a save")]


def fused_rules(before: int, now: int) -> Any:
    """The rules of the kind ``fused``, whose ``gate_up`` is stored in some rounds and lies in others."""
    from paddleformers_fc.mapping import Rule, RuleSet, TensorSpec

    fused, down, bias = "gate_up.weight", "down.weight", "down.bias"
    return RuleSet(
        targets={name: TensorSpec(shape, "float32") for name, shape in (*SHAPES.items(), (bias, (8,)))},
        rules=(
            Rule((fused,), (fused,), (16, 16), 1, (0, 1), source_blocks=before, target_blocks=now),
            Rule((down,), (down,), (8,), 1, (0, 1)),
            Rule((bias,), (bias,), (8,), 0, (0,)),
        ),
    )


def _bare(model: Any) -> Any:
    """A layer that has the tensors of a model, and no configuration."""

    class Bare(paddle.nn.Layer):
        def sharded_state_dict(self, structured_name_prefix: str = "") -> Any:
            return model.sharded_state_dict(structured_name_prefix)

    return Bare()


def _mlp() -> Any:
    """Three layers and a buffer; the first and the last share a weight."""
    from paddle import nn

    class Mlp(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 8)
            self.mix = nn.Linear(8, 8)
            self.head = nn.Linear(64, 8, bias_attr=False)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", paddle.full([3], 1.5))
            self.register_buffer("number", paddle.to_tensor(2.5))

        def forward(self, tokens: Any) -> Any:
            hidden = paddle.nn.functional.relu(self.mix(self.embed(tokens)))
            return paddle.matmul(hidden, self.head.weight, transpose_y=True) * self.number

    paddle.seed(5)
    return Mlp()


def _fused() -> Any:
    """A feed-forward layer whose gate and up lie in one tensor; tensor parallel where the job is."""
    from paddle.distributed.fleet.meta_parallel import ColumnParallelLinear, RowParallelLinear

    degree, rank = paddle.distributed.get_world_size(), paddle.distributed.get_rank()

    class Fused(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            if degree == 1:
                self.gate_up, self.down = paddle.nn.Linear(8, 32, bias_attr=False), paddle.nn.Linear(16, 8)
                return
            self.gate_up = ColumnParallelLinear(8, 32, has_bias=False, gather_output=False)
            self.down = RowParallelLinear(16, 8, has_bias=True, input_is_parallel=True)

        def forward(self, tokens: Any) -> Any:
            gate, up = self.gate_up(paddle.cast(tokens, "float32")).chunk(2, axis=-1)
            return self.down(paddle.nn.functional.sigmoid(gate) * up)

    model = Fused()
    numbers = np.random.default_rng(7)
    gate, up = (numbers.standard_normal((8, 16)).astype("float32") / 8 for _ in range(2))
    down = numbers.standard_normal((16, 8)).astype("float32")
    mine = [np.split(one, degree, axis=1)[rank] for one in (gate, up)]
    model.gate_up.weight.set_value(np.concatenate(mine, axis=1))
    model.down.weight.set_value(np.split(down, degree, axis=0)[rank])
    return model


def _staged() -> Any:
    """Two layers, of which each of two ranks holds one, as the stages of a pipeline do."""

    class Staged(paddle.nn.Layer):
        def forward(self, tokens: Any) -> Any:
            values = paddle.cast(tokens, "float32")
            return sum(layer(values) for layer in self.children())

    model = Staged()
    for index in range(2) if paddle.distributed.get_world_size() == 1 else (paddle.distributed.get_rank(),):
        paddle.seed(index)
        model.add_sublayer(f"stage_{index}", paddle.nn.Linear(8, 8))
    return model


KINDS: dict[str, Callable[[], Any]] = {"mlp": _mlp, "fused": _fused, "staged": _staged}


def outcomes(
    ranks: ForkServer, layout: MatrixLayout, place: Path, source: Path | None = None, job: Any = run, **settings: Any
) -> list[list[str]]:
    """What a loop on every rank returns that loads a checkpoint and saves ``checkpoint-3``."""
    given = {"layout": layout, "output_dir": place / "run", "target": place / "checkpoint-3", "source": source}
    return list(run_on_ranks(ranks, layout.nproc, job, **given, **settings))


def hop(ranks: ForkServer, layout: MatrixLayout, place: Path, source: Path | None = None, **settings: Any) -> Path:
    """As :func:`outcomes`, of a loop that has to succeed; the checkpoint that it saves."""
    refused = outcomes(ranks, layout, place, source, **settings)
    assert not any(refused), refused
    return place / "checkpoint-3"


def digests(checkpoint: Path) -> list[TensorDigest]:
    return list(canonical_digests(checkpoint))


def test_a_hand_written_loop_resumes_bitwise_on_one_and_two_ranks(ranks: ForkServer, tmp_path: Path) -> None:
    single = hop(ranks, SINGLE, tmp_path / "single")
    split = hop(ranks, TP2, tmp_path / "split", single)
    again = hop(ranks, SINGLE, tmp_path / "again", split)
    expected = digests(single)
    assert {one.role for one in expected} == {"model_state", "optimizer_state"}
    assert digests(split) == digests(again) == expected
    for checkpoint, tp in ((again, 1), (split, 2)):
        job = paddleformers_fc.open(checkpoint).metadata.job
        assert job is not None
        assert (job.step, job.consumed_samples) == (3, 6)
        assert job.parallel == dict.fromkeys(AXES, 1) | {"tp": tp}


def test_a_checkpoint_by_name_loads_with_a_family_under_another_tensor_parallel_degree(
    ranks: ForkServer, tmp_path: Path
) -> None:
    single = hop(ranks, SINGLE, tmp_path / "single", kind="ernie4_5_moe")
    named = hop(ranks, TP2, tmp_path / "named", single, kind="named")
    again = hop(ranks, SINGLE, tmp_path / "again", named, kind="bare")
    fused = {"model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.up_gate_proj.weight"}
    assert fused <= {one.name for one in digests(named)}
    assert digests(again) == digests(single)


LAYERS = {"mlp": [SINGLE, SD2V1, SD2V2, DP2], "staged": [SINGLE, DP2, SINGLE]}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_of_paddle_resume_by_name_under_data_parallelism_sharding_and_stages(
    ranks: ForkServer, tmp_path: Path, kind: str
) -> None:
    checkpoints: list[Path] = []
    for number, layout in enumerate(LAYERS[kind]):
        source = checkpoints[-1] if checkpoints else None
        checkpoints.append(hop(ranks, layout, tmp_path / f"{number}", source, kind=kind))
    expected = digests(checkpoints[0])
    assert {one.role for one in expected} == {"model_state", "optimizer_state"}
    assert all(digests(one) == expected for one in checkpoints)
    assert paddleformers_fc.open(checkpoints[-1]).verify().passed
    if kind == "mlp":
        for exchanges in outcomes(ranks, DP2, tmp_path / "again", checkpoints[0], list_exchanges, kind=kind):
            assert exchanges == ["beginning a load", "opening checkpoint-3", "planning", "reading checkpoint-3"]


GATE_UP, DOWN = "gate_up.weight -> gate_up.weight, fused_ffn", "down.weight -> down.weight"
STATED, NOT_DOWN = ({"load": {"aoa_config": {"aoa_statements": lines}}} for lines in ([GATE_UP, DOWN], [GATE_UP]))


@pytest.mark.parametrize(
    ("there", "back"), [(STATED, STATED), ({"rounds": 1}, {"rounds": 2})], ids=["aoa_config", "mapping"]
)
def test_statements_and_rules_carry_a_fused_layer_to_another_tensor_parallel_degree_and_names_do_not(
    ranks: ForkServer, tmp_path: Path, there: dict[str, Any], back: dict[str, Any]
) -> None:
    single = hop(ranks, SINGLE, tmp_path / "single", kind="fused")
    split = hop(ranks, TP2, tmp_path / "split", single, kind="fused", **there)
    assert digests(hop(ranks, TP2, tmp_path / "same", split, kind="fused")) == digests(split)
    again = hop(ranks, SINGLE, tmp_path / "again", split, kind="fused", **back)
    assert digests(again) == digests(single)
    before, after = paddleformers_fc.open(single), paddleformers_fc.open(split)
    for suffix, role in (("", "model_state"), (".moment1_0", "optimizer_state")):
        alone, held = (one.read(f"gate_up.weight{suffix}", role=role) for one in (before, after))
        interleaved = np.concatenate([np.split(alone, 4, axis=1)[quarter] for quarter in (0, 2, 1, 3)], axis=1)
        np.testing.assert_array_equal(held, interleaved)
    refused, *others = outcomes(ranks, TP2, tmp_path / "refused", single, kind="fused", **NOT_DOWN)
    assert others == [refused]
    assert refused[0] == "MismatchError"
    assert "down.weight: stored in 1 x 1 shards, the model has 2 x 1" in refused
    assert all(word in refused[-1] for word in ("family=", "mapping=", "aoa_config="))
    assert not (tmp_path / "refused/checkpoint-3").exists()


# ---- Arguments.


def linear() -> Any:
    return paddle.nn.Linear(2, 2)


def configured() -> Any:
    model = linear()
    model.config = SimpleNamespace()
    return model


class Half(paddle.nn.Linear):
    """Describes its weight as half of a larger one."""

    def sharded_state_dict(self, structured_name_prefix: str = "") -> dict[str, Any]:
        return {"weight": ShardedWeight("weight", self.weight, (2, 2), (4, 2), (0, 0))}


PATHS: list[tuple[Any, str]] = [
    *((path, "Invalid path") for path in ("a\0b", Path("a\0b"), "\ud800", "~a\0b")),
    *((path, "has no name") for path in (".", "..", "/", "file:///")),
    ("note", "is a file"),
]
INVALID: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    *(
        (save, {name: value}, f"Invalid argument: {name}={value!r}.")
        for name, value in (
            *(("step", -1), ("step", "4"), ("step", 1 << 53), ("consumed_samples", 2.0), ("parallel", "tp2")),
            *(("parallel", {"tp": 0}), ("family", 5), ("config", "config.json"), ("mapping", {}), ("directory", 5)),
            ("optimizer", "adam"),
        )
    ),
    *(
        (load, {name: value}, f"Invalid argument: {name}={value!r}.")
        for name, value in (
            *(("directory", None), ("threads", "4"), ("threads", 10**6), ("optimizer", "adam")),
            *(("allow_casts", "yes"), ("config", 5)),
        )
    ),
    *((save, {"directory": path}, text) for path, text in PATHS),
    *((load, {"directory": path}, text) for path, text in PATHS[:4]),
    (save, {"directory": "s3://bucket/checkpoint-1"}, "A checkpoint that is saved cannot be written to s3://"),
    (load, {"directory": "nowhere://bucket/checkpoint-1"}, "nowhere"),
    (load, {"model": 5}, "int has no sharded_state_dict"),
    (load, {"verify": "quick"}, "Unknown verification level 'quick'."),
    (load, {"aoa_config": "a -> b"}, "aoa_config is not a mapping."),
    (save, {"config": {"model_type": "llama", "function": print}}, "config"),
    (save, {"family": "llama", "mapping": fused_rules(1, 1)}, "family and mapping both define the rules of a model"),
    (save, {"model": paddle.nn.Linear}, ""),
    (save, {"model": paddle.nn.Layer()}, ""),
    (save, {"model": Half(2, 2)}, ""),
    (save, {"model": {}}, ""),
    (save, {"model": {1: paddle.zeros([2])}}, ""),
    (lambda directory, model: paddleformers_fc.load_open_weights(5, directory), {}, "Invalid argument: model=5"),
    (
        lambda directory, model: paddleformers_fc.load_open_weights(configured(), "nowhere://b/c", verify="quick"),
        {},
        "Unknown verification level 'quick'.",
    ),
    (lambda directory, model: paddleformers_fc.save_ema(5, directory), {}, "Invalid argument: trainer=5"),
    (lambda directory, model: paddleformers_fc.averaged_weights(5).__enter__(), {}, "Invalid argument: trainer=5"),
]


@pytest.mark.parametrize(("call", "invalid", "problem"), INVALID)
def test_an_invalid_argument_is_refused_before_anything_is_read_or_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[..., object],
    invalid: dict[str, Any],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "note").write_text("kept")
    with pytest.raises(FlexError) as raised:
        call(**{"directory": tmp_path / "checkpoint-4", "model": linear()} | invalid)
    assert problem in raised.value.render()
    assert raised.value.next_step
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"note": "kept"}


def refuse_on_the_last_rank(output_dir: Path) -> list[str]:
    """The errors of this rank for arguments that are invalid on the last one alone."""
    tiny.training_arguments(DP2, str(output_dir))
    os.chdir(output_dir)
    Path("note").touch()
    valid: dict[str, Any] = {"directory": output_dir / "checkpoint-1", "model": linear()}
    save(**valid, step=1)
    errors = []
    for call, invalid, problem in INVALID:
        if call in (save, load) and problem:
            with pytest.raises(FlexError) as raised:
                call(**valid | (invalid if paddle.distributed.get_rank() == 1 else {}))
            errors.append(raised.value.render())
    return errors


def test_arguments_that_are_invalid_on_one_rank_are_refused_alike_on_all(ranks: ForkServer, tmp_path: Path) -> None:
    first, last = run_on_ranks(ranks, 2, refuse_on_the_last_rank, output_dir=tmp_path)
    assert first == last
    assert all("rank 1" in text and "\n  next: " in text for text in first), first


def test_the_path_of_an_object_is_the_one_that_it_states(tmp_path: Path) -> None:
    class Stated:
        def __fspath__(self) -> str:
            return str(tmp_path / "checkpoint-4")

    layer = linear()
    save(Stated(), layer)
    metadata = paddleformers_fc.open(Stated()).metadata
    assert (metadata.path, metadata.job and metadata.job.step) == (str(tmp_path / "checkpoint-4"), 4)
    load(Stated(), layer)


def test_nothing_is_saved_into_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-1", linear())
    with pytest.raises(OptionError, match="The directory is a checkpoint"):
        save(tmp_path / "checkpoint-1/checkpoint-2", linear())
    assert paddleformers_fc.open(tmp_path / "checkpoint-1").verify().passed


def test_a_checkpoint_without_a_family_is_refused_where_a_family_is_required(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-1", linear(), step=1)
    checkpoint = paddleformers_fc.open(tmp_path / "checkpoint-1")
    assert checkpoint.metadata.job is not None
    assert checkpoint.metadata.job.parallel == dict.fromkeys(AXES, 1)
    with pytest.raises(MappingError, match="was saved without a family") as raised:
        checkpoint.plan("tp=2")
    assert "paddleformers_fc.load" in raised.value.next_step


@on_ranks(1)
def test_states_that_a_checkpoint_would_not_contain_or_not_replace_are_refused(tmp_path: Path) -> None:
    class Averaged(paddle.optimizer.AdamW):
        """Adds states to its dictionary alone."""

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "average": paddle.ones([2])}

    class Kept(paddle.optimizer.AdamW):
        """Keeps states in a dictionary of its own."""

        def step(self) -> None:
            super().step()
            self.state = {one.name: {"slow": one.clone()} for one in self._parameter_list}

    class Looked(paddle.optimizer.AdamW):
        """Changes nothing."""

        def step(self) -> None:
            super().step()
            self.norms: list[Any] = [paddle.ones([3])]
            self.norms.append(self.norms)
            self.by_size = {4: self._parameter_list}

        def state_dict(self) -> dict[str, Any]:
            return dict(super().state_dict())

    def trained(kind: Any = paddle.optimizer.AdamW, steps: int = 1, grouped: bool = False) -> tuple[Any, Any]:
        with paddle.utils.unique_name.guard():
            model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 2))
            parameters = [{"params": layer.parameters()} for layer in model] if grouped else model.parameters()
            optimizer = kind(parameters=parameters, learning_rate=paddle.optimizer.lr.StepDecay(0.1, 2))
            for _ in range(steps):
                step(model, optimizer)
        return model, optimizer

    def step(model: Any, optimizer: Any) -> None:
        model(paddle.ones([2, 4])).sum().backward()
        optimizer.step()
        optimizer.clear_grad()

    def refused(reason: str, call: Callable[..., object], *given: Any, **options: Any) -> None:
        with pytest.raises(FlexError) as raised:
            call(*given, **options)
        assert reason in raised.value.render()

    weights, whole = tmp_path / "weights/checkpoint-1", tmp_path / "given/checkpoint-1"
    save(weights, trained()[0])
    stale = "0.bias (beta1_pow_acc_0, beta2_pow_acc_0, moment1_0, moment2_0)"
    refused(stale, load, weights, *trained(), allow_casts=True)
    refused("missing: optimizer_state of AdamW", load, weights, *trained(steps=0), allow_casts=True)
    load(weights, trained()[0])
    paddleformers_fc.register_optimizer(paddle.optimizer.SGD)
    load(weights, *trained(paddle.optimizer.SGD))

    paddleformers_fc.register_optimizer(paddle.incubate.LookAhead, like_parameter=["slow"])
    model = linear()
    ahead = paddle.incubate.LookAhead(paddle.optimizer.AdamW(parameters=model.parameters()))
    other = tmp_path / "other/checkpoint-1"
    refused("inner_optimizer: paddle.optimizer.adamw.AdamW", save, other, model, ahead)
    refused("average", save, other, *trained(Averaged))
    refused("state: [4, 2]", save, other, *trained(Kept))
    save(other, *trained(Looked))
    grouped = tmp_path / "grouped/checkpoint-1"
    save(grouped, *trained(grouped=True))
    load(grouped, *trained(steps=0, grouped=True))

    states = trained()[1].state_dict()
    model, optimizer = trained(steps=0)
    optimizer.set_state_dict(states)
    refused("16 states of the optimizer wait for the first step", save, whole, model, optimizer)
    with paddle.utils.unique_name.guard():
        model[1](paddle.ones([2, 4])).sum().backward()
        optimizer.step()
    refused("8 states of the optimizer wait for the first step", save, whole, model, optimizer)
    model, optimizer = trained()
    optimizer.set_state_dict(states)
    save(whole, model, optimizer)
    model, optimizer = trained(steps=0)
    optimizer.set_state_dict({**trained(steps=2)[1].state_dict(), "other": paddle.ones([1])})
    optimizer._accumulators_holder.pop(next(iter(states)))
    load(whole, model, optimizer)
    step(model, optimizer)


@on_ranks(1)
def test_a_number_without_axes_is_saved_and_loaded_but_not_compared_exported_or_streamed(tmp_path: Path) -> None:
    model = paddle.nn.Linear(2, 3)
    model.scale = model.create_parameter([])
    for number, value in (("one", 1.0), ("two", 2.0)):
        model.scale.set_value(paddle.full([], value))
        save(tmp_path / number, model)
    one, two = (paddleformers_fc.open(tmp_path / number) for number in ("one", "two"))
    assert one.verify().passed
    with pytest.raises(OptionError, match="1 tensor without axes or elements") as caught:
        one.diff(two)
    assert caught.value.evidence == ("scale",)
    with pytest.raises(OptionError, match="1 tensor without axes or elements"):
        one.export(tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    with pytest.raises(OptionError, match="1 tensor of the model without axes"):
        list(paddleformers_fc.stream(model))
    ((name, weight),) = paddleformers_fc.stream(model, names=["weight"])
    assert (name, weight.tolist()) == ("weight", model.weight.tolist())
    load(tmp_path / "one", model)
    assert float(model.scale) == 1.0


@on_ranks(1)
def test_a_tensor_without_elements_is_neither_saved_nor_streamed(tmp_path: Path) -> None:
    model = paddle.nn.Linear(2, 3)
    model.none, model.rows = model.create_parameter([0]), model.create_parameter([0, 2])
    with pytest.raises(OptionError, match="2 tensors of the model without elements") as caught:
        save(tmp_path / "one", model)
    assert caught.value.evidence == ("none", "rows")
    assert not (tmp_path / "one").exists()
    with pytest.raises(OptionError, match="2 tensors of the model without elements"):
        list(paddleformers_fc.stream(model))


@on_ranks(1)
def test_parameters_of_equal_static_names_are_not_tied(tmp_path: Path) -> None:
    model = paddle.nn.Layer()
    for name in ("one", "two"):
        with paddle.utils.unique_name.guard():
            setattr(model, name, paddle.nn.Linear(2, 2))
    model.three = model.two
    values = {name: value.numpy() for name, value in model.state_dict().items()}
    assert model.one.weight.name == model.two.weight.name
    save(tmp_path / "checkpoint-1", model)
    for parameter in model.parameters():
        parameter.set_value(paddle.zeros_like(parameter))
    load(tmp_path / "checkpoint-1", model)
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value, values[name])


@on_ranks(2)
def test_a_save_warns_of_replicas_that_differ(tmp_path: Path) -> None:
    rank = tiny.training_arguments(DP2, str(tmp_path)).process_index
    model = linear()
    model.weight.set_value(paddle.ones([2, 2]))
    model.bias.set_value(paddle.full([2], float(rank)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = save(tmp_path / "checkpoint-1", model, parallel={"dp": 2})
    (difference,) = report.differences
    texts = [str(one.message) for one in caught if "Replicas differ" in str(one.message)]
    assert [text.splitlines()[1:] for text in texts] == ([[f"  - {difference}"]] if rank == 0 else [])
