"""Jobs of a hand-written training loop, run inside rank processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.harness import tiny


def run(
    layout: Mapping[str, Any],
    output_dir: str,
    target: str,
    source: str | None = None,
    model_type: str = "llama",
    model: Mapping[str, Any] | None = None,
) -> list[str]:
    """Train a model for three steps, or load ``source`` after one, and save ``target``; the names that were fresh.

    Args:
        layout: a ``MatrixLayout`` as JSON.
        output_dir: for PaddleFormers' arguments, which initialise the parallel environment.
        target: the checkpoint to save.
        source: the checkpoint to load over weights and states of another history.
        model_type: ``llama`` or ``ernie4_5_moe``.
        model: overrides of its configuration.
    """
    args = tiny.training_arguments(layout, output_dir)
    built = tiny.build(model_type, layout, args, **(model or {}))
    return _hop(built, lambda tokens: built(input_ids=tokens, labels=tokens)[0], target, source, {}, {})


def list_exchanges(layout: Mapping[str, Any], output_dir: str, target: str, source: str) -> list[str]:
    """What the ranks exchange in the load of :func:`run_plain`."""
    from paddleformers_fc.distributed.communicator import Communicator

    doing: list[str] = []
    gather = Communicator.gather

    def noting(self: Any, what: str, *args: Any, **kwargs: Any) -> Any:
        doing.append(what)
        return gather(self, what, *args, **kwargs)

    Communicator.gather = noting  # type: ignore[method-assign]
    assert not run_plain("mlp", layout, output_dir, target, source)
    return doing[: doing.index("checking the arguments of a save")]


def run_bare(
    layout: Mapping[str, Any], output_dir: str, target: str, source: str | None = None, saves_by_name: bool = False
) -> list[str]:
    """As :func:`run`, with an ERNIE in a layer that has no configuration; its family is given to the load.

    Args:
        saves_by_name: whether to save the layer that has no configuration, instead of the ERNIE itself.
    """
    import paddle

    class Bare(paddle.nn.Layer):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.__dict__["inner"] = model

        def sharded_state_dict(self, structured_name_prefix: str = "") -> Any:
            return self.__dict__["inner"].sharded_state_dict(structured_name_prefix)

    args = tiny.training_arguments(layout, output_dir)
    model = tiny.build("ernie4_5_moe", layout, args)
    given = {"family": "ernie4_5_moe", "config": model.config}
    bare = Bare(model)
    saved = bare if saves_by_name else model
    return _hop(model, lambda tokens: model(input_ids=tokens, labels=tokens)[0], target, source, given, {}, bare, saved)


def run_plain(
    kind: str,
    layout: Mapping[str, Any],
    output_dir: str,
    target: str,
    source: str | None = None,
    load: Mapping[str, Any] | None = None,
    rounds: int = 0,
) -> list[str]:
    """As :func:`run`, with layers of Paddle alone; the text of the error where the load is refused.

    Args:
        kind: a name of :data:`KINDS`.
        load: arguments of the load.
        rounds: gives ``mapping`` to the load: ``gate_up`` is stored in so many rounds.
    """
    tiny.training_arguments(layout, output_dir)
    model, forward = KINDS[kind]()
    given = dict(load or {})
    if rounds:
        given["mapping"] = fused_rules(rounds, int(layout.get("tp", 1)))
    return _hop(model, forward, target, source, given, layout)


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


def refuse_on_the_last_rank(output_dir: str) -> dict[str, str]:
    """The errors of all ranks for arguments that are invalid on the last one alone, by case."""
    import paddle

    import paddleformers_fc
    from paddleformers_fc.errors import FlexError

    tiny.training_arguments(tiny.DP2.to_json(), output_dir)
    checkpoint, model = f"{output_dir}/checkpoint-1", paddle.nn.Linear(2, 2)
    paddleformers_fc.save(checkpoint, model, step=1)
    valid: dict[str, Any] = {"directory": checkpoint, "model": model}
    cases: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "save: directory": (paddleformers_fc.save, {"directory": 5}),
        "save: remote": (paddleformers_fc.save, {"directory": "s3://bucket/checkpoint-1"}),
        "save: step": (paddleformers_fc.save, {"step": -1}),
        "save: parallel": (paddleformers_fc.save, {"parallel": "dp2"}),
        "save: model": (paddleformers_fc.save, {"model": 5}),
        "save: family": (paddleformers_fc.save, {"family": 5}),
        "load: directory": (paddleformers_fc.load, {"directory": 5}),
        "load: scheme": (paddleformers_fc.load, {"directory": "nowhere://bucket/checkpoint-1"}),
        "load: threads": (paddleformers_fc.load, {"threads": 0}),
        "load: aoa_config": (paddleformers_fc.load, {"aoa_config": "a -> b"}),
        "load: model": (paddleformers_fc.load, {"model": 5}),
        "load: config": (paddleformers_fc.load, {"config": 5}),
    }
    found = {}
    for case, (function, invalid) in cases.items():
        try:
            function(**valid | (invalid if paddle.distributed.get_rank() == 1 else {}))
            found[case] = ""
        except FlexError as error:
            found[case] = error.render()
    return found


SHAPES = {"gate_up.weight": (8, 32), "down.weight": (16, 8)}


def _hop(
    model: Any,
    forward: Callable[[Any], Any],
    target: str,
    source: str | None,
    load: Mapping[str, Any],
    layout: Mapping[str, Any],
    shown: Any = None,
    saved: Any = None,
) -> list[str]:
    import paddle

    import paddleformers_fc
    from paddleformers_fc.errors import FlexError

    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    wrapped, stepping = model, optimizer
    if layout.get("sharding", 1) > 1:
        from paddle.distributed import fleet

        wrapped, stepping = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    for step in range(1 if source else 3):
        paddle.seed(step)
        forward(paddle.randint(0, 64, [2, 8])).square().mean().backward()
        if stepping is not optimizer:
            stepping.reduce_gradients(list(model.parameters()), fleet.get_hybrid_communicate_group())
        stepping.step()
        stepping.clear_grad()
    fresh: list[str] = []
    if source:
        before = {name: one.local_tensor.numpy() for name, one in (shown or wrapped).sharded_state_dict().items()}
        try:
            fresh = list(paddleformers_fc.load(source, shown or wrapped, stepping, **load).fresh)
        except FlexError as error:
            for name, one in (shown or wrapped).sharded_state_dict().items():
                assert (one.local_tensor.numpy() == before[name]).all(), name
            return [type(error).__name__, error.what, *error.evidence, error.next_step]
    paddleformers_fc.save(target, saved or shown or wrapped, stepping, step=3, consumed_samples=6)
    return fresh


def _mlp() -> tuple[Any, Callable[[Any], Any]]:
    """Three layers and a buffer; the first and the last share a weight."""
    import paddle
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
    model = Mlp()
    return model, model


def _fused() -> tuple[Any, Callable[[Any], Any]]:
    """A feed-forward layer whose gate and up lie in one tensor; tensor parallel where the job is."""
    import numpy as np
    import paddle
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
    return model, model


def _staged() -> tuple[Any, Callable[[Any], Any]]:
    """Two layers, of which each of two ranks holds one, as the stages of a pipeline do."""
    import paddle

    ranks = range(2) if paddle.distributed.get_world_size() == 1 else (paddle.distributed.get_rank(),)
    model = paddle.nn.Layer()
    for index in ranks:
        paddle.seed(index)
        model.add_sublayer(f"stage_{index}", paddle.nn.Linear(8, 8))

    def forward(tokens: Any) -> Any:
        values = paddle.cast(tokens, "float32")
        return sum(layer(values) for layer in model.children())

    return model, forward


KINDS: Mapping[str, Callable[[], tuple[Any, Callable[[Any], Any]]]] = {"mlp": _mlp, "fused": _fused, "staged": _staged}


def refuse_states(output_dir: str) -> dict[str, str]:
    """The errors of states that a checkpoint would not contain or not replace, by case; empty if there was none."""
    import paddle

    import paddleformers_fc
    from paddleformers_fc.errors import FlexError

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
            self.norms = [paddle.ones([3])]
            self.by_size = {4: self._parameter_list}

        def state_dict(self) -> dict[str, Any]:
            return dict(super().state_dict())

    paddleformers_fc.register_optimizer(paddle.incubate.LookAhead, like_parameter=["slow"])

    def trained(kind: Any = paddle.optimizer.AdamW, steps: int = 1) -> tuple[Any, Any]:
        with paddle.utils.unique_name.guard():
            model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 2))
            optimizer = kind(parameters=model.parameters(), learning_rate=paddle.optimizer.lr.StepDecay(0.1, 2))
            for _ in range(steps):
                _step(model, optimizer)
        return model, optimizer

    def _step(model: Any, optimizer: Any) -> None:
        model(paddle.ones([2, 4])).sum().backward()
        optimizer.step()
        optimizer.clear_grad()

    def error_of(function: Callable[..., Any], name: str, *given: Any, **options: Any) -> str:
        try:
            function(f"{output_dir}/{name}/checkpoint-1", *given, **options)
        except FlexError as error:
            return error.render()
        return ""

    found = {"weights": error_of(paddleformers_fc.save, "weights", trained()[0])}
    found["stale"] = error_of(paddleformers_fc.load, "weights", *trained(), allow_casts=True)
    found["fresh"] = error_of(paddleformers_fc.load, "weights", *trained(steps=0), allow_casts=True)
    paddleformers_fc.register_optimizer(paddle.optimizer.SGD)
    found["without states"] = error_of(paddleformers_fc.load, "weights", *trained(paddle.optimizer.SGD))
    found["not passed"] = error_of(paddleformers_fc.load, "weights", trained()[0])
    model = paddle.nn.Linear(2, 2)
    ahead = paddle.incubate.LookAhead(paddle.optimizer.AdamW(parameters=model.parameters()))
    found["contains"] = error_of(paddleformers_fc.save, "contains", model, ahead)
    found["adds"] = error_of(paddleformers_fc.save, "adds", *trained(Averaged))
    found["keeps"] = error_of(paddleformers_fc.save, "keeps", *trained(Kept))
    found["overrides"] = error_of(paddleformers_fc.save, "overrides", *trained(Looked))
    states = trained()[1].state_dict()
    model, optimizer = trained(steps=0)
    optimizer.set_state_dict(states)
    found["waits"] = error_of(paddleformers_fc.save, "waits", model, optimizer)
    with paddle.utils.unique_name.guard():
        model[1](paddle.ones([2, 4])).sum().backward()
        optimizer.step()
    found["waits in part"] = error_of(paddleformers_fc.save, "waits", model, optimizer)
    model, optimizer = trained()
    optimizer.set_state_dict(states)
    found["given"] = error_of(paddleformers_fc.save, "given", model, optimizer)
    model, optimizer = trained(steps=0)
    optimizer.set_state_dict({**trained(steps=2)[1].state_dict(), "other": paddle.ones([1])})
    optimizer._accumulators_holder.pop(next(iter(states)))
    found["replaced"] = error_of(paddleformers_fc.load, "given", model, optimizer)
    _step(model, optimizer)
    return found
