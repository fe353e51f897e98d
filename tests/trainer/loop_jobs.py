"""A hand-written training loop: its models, and a job of the fork server that trains, loads and saves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.harness import tiny
from tests.harness.patching import precede

SHAPES = {"gate_up.weight": (8, 32), "down.weight": (16, 8)}


def run(
    layout: Mapping[str, Any],
    output_dir: str,
    target: str,
    source: str | None = None,
    kind: str = "llama",
    model: Mapping[str, Any] | None = None,
    load: Mapping[str, Any] | None = None,
    rounds: int = 0,
) -> list[str]:
    """Train a model for three steps, or load ``source`` after one, and save ``target``.

    Args:
        layout: a ``MatrixLayout`` as JSON.
        output_dir: for PaddleFormers' arguments, which initialise the parallel environment.
        target: the checkpoint to save.
        source: the checkpoint to load over weights and states of another history.
        kind: a key of :data:`KINDS` or a tiny model; or ``bare``, an ERNIE that is loaded into a layer without a
            configuration, with its family, and ``named``, where that layer is saved as well.
        model: overrides of the tiny model's configuration.
        load: arguments of the load.
        rounds: gives ``mapping`` to the load: ``gate_up`` is stored in so many rounds.

    Returns:
        the names that were not loaded; or the text of the error, after which no weight has changed.
    """
    import paddle
    from paddle.distributed import fleet

    import paddleformers_fc
    from paddleformers_fc.errors import FlexError

    args, given = tiny.training_arguments(layout, output_dir), dict(load or {})
    is_bare = kind in ("bare", "named")
    name = "ernie4_5_moe" if is_bare else kind
    built = KINDS[kind]() if kind in KINDS else tiny.build(name, layout, args, **(model or {}))
    optimizer = stepping = paddle.optimizer.AdamW(0.01, parameters=built.parameters())
    filled = saved = built
    if is_bare:
        filled = _bare(built)
        saved = filled if kind == "named" else built
        given |= {"family": "ernie4_5_moe", "config": built.config}
    elif layout["sharding"] > 1:
        filled = saved = fleet.distributed_model(built)
        stepping = fleet.distributed_optimizer(optimizer)
    if rounds:
        given["mapping"] = fused_rules(rounds, layout["tp"])
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
    import paddle

    class Bare(paddle.nn.Layer):
        def sharded_state_dict(self, structured_name_prefix: str = "") -> Any:
            return model.sharded_state_dict(structured_name_prefix)

    return Bare()


def _mlp() -> Any:
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
    return Mlp()


def _fused() -> Any:
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
    return model


def _staged() -> Any:
    """Two layers, of which each of two ranks holds one, as the stages of a pipeline do."""
    import paddle

    class Staged(paddle.nn.Layer):
        def forward(self, tokens: Any) -> Any:
            values = paddle.cast(tokens, "float32")
            return sum(layer(values) for layer in self.children())

    model = Staged()
    for index in range(2) if paddle.distributed.get_world_size() == 1 else (paddle.distributed.get_rank(),):
        paddle.seed(index)
        model.add_sublayer(f"stage_{index}", paddle.nn.Linear(8, 8))
    return model


KINDS: Mapping[str, Callable[[], Any]] = {"mlp": _mlp, "fused": _fused, "staged": _staged}
