"""Jobs of several ranks inside one process: each rank is a thread, and its weights are real tensors.

The shards of a rank are cut out of one set of canonical weights, so that every layout of a job holds the same numbers.
The fused layouts are built here in numpy and share no code with the package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import paddle

from paddleformers_fc.errors import FlexError
from paddleformers_fc.execute.load import LoadReport, load_checkpoint, prepare_weights
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.save import JobRecord, SaveReport, config_bytes, save_checkpoint
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.storage.executor import DEFAULT_OPTIONS, ReadOptions
from paddleformers_fc.storage.paths import AnyPath
from tests.storage.support import flip as flip
from verification.thread_ranks import Outcomes, ThreadChannel, job

HIDDEN, INTERMEDIATE, VOCABULARY, HEADS, GROUPS, HEAD = 16, 24, 32, 4, 2, 4
CONFIG = {
    "model_type": "ernie4_5",
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD,
    "tie_word_embeddings": False,
}
MODEL = ModelDescription(CONFIG)
Arrays = dict[str, np.ndarray[Any, Any]]
Roles = dict[str, dict[str, Any]]


def succeed(ranks: int, work: Callable[[ThreadChannel], Any]) -> list[Any]:
    """As :func:`job`, for work that no rank may fail in."""
    return job(ranks, work).results()


def canonical(layers: int = 2, seed: int = 0) -> Arrays:
    """Weights in canonical names, [out, in]."""
    random = np.random.RandomState(seed)
    arrays: Arrays = {}

    def add(name: str, *shape: int) -> None:
        arrays[name] = random.randn(*shape).astype(np.float32)

    add("model.embed_tokens.weight", VOCABULARY, HIDDEN)
    add("model.norm.weight", HIDDEN)
    add("lm_head.weight", VOCABULARY, HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        add(f"{prefix}.self_attn.q_proj.weight", HEADS * HEAD, HIDDEN)
        add(f"{prefix}.self_attn.k_proj.weight", GROUPS * HEAD, HIDDEN)
        add(f"{prefix}.self_attn.v_proj.weight", GROUPS * HEAD, HIDDEN)
        add(f"{prefix}.self_attn.o_proj.weight", HIDDEN, HEADS * HEAD)
        add(f"{prefix}.input_layernorm.weight", HIDDEN)
        add(f"{prefix}.post_attention_layernorm.weight", HIDDEN)
        add(f"{prefix}.mlp.gate_proj.weight", INTERMEDIATE, HIDDEN)
        add(f"{prefix}.mlp.up_proj.weight", INTERMEDIATE, HIDDEN)
        add(f"{prefix}.mlp.down_proj.weight", HIDDEN, INTERMEDIATE)
    return arrays


def model(arrays: Arrays, tp: int) -> dict[str, tuple[np.ndarray[Any, Any], int | None]]:
    """The same weights in the model's names: fused, [in, out], each with its tensor-parallel axis."""
    made: dict[str, tuple[np.ndarray[Any, Any], int | None]] = {}
    for name, array in arrays.items():
        if name.endswith("q_proj.weight"):
            q, k, v = (arrays[name.replace("q_proj", f"{x}_proj")].T for x in "qkv")
            made[name.replace("q_proj", "qkv_proj")] = (_dealt([q, k, v], GROUPS), 1)
        elif name.endswith("gate_proj.weight"):
            gate, up = array.T, arrays[name.replace("gate_proj", "up_proj")].T
            made[name.replace("gate_proj", "up_gate_proj")] = (_dealt([gate, up], tp), 1)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            made[name] = (array.T, 0)
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            made[name] = (array, 0)
        elif name.endswith("norm.weight"):
            made[name] = (array, None)
    return made


def _dealt(parts: list[np.ndarray[Any, Any]], rounds: int) -> np.ndarray[Any, Any]:
    cut = [np.split(part, rounds, axis=1) for part in parts]
    return np.concatenate([piece for group in zip(*cut, strict=True) for piece in group], axis=1)


def live(arrays: Arrays, tp: int, rank: int, empty: bool = False, sharded: int = 1) -> Roles:
    """One rank's live weights and AdamW states.

    Args:
        arrays: canonical weights.
        tp: tensor-parallel degree; rank r is tensor-parallel rank ``r % tp``.
        rank: this rank.
        empty: zeros instead of the values, for a model that is about to be loaded.
        sharded: optimizer states are flattened ranges over this many ranks (sharding stage 1 v2).
    """
    roles: Roles = {"model_state": {}, "optimizer_state": {}}
    for name, (array, axis) in model(arrays, tp).items():
        local, offset = array, [0] * array.ndim
        if axis is not None:
            size = array.shape[axis] // tp
            offset[axis] = size * (rank % tp)
            local = np.take(array, range(offset[axis], offset[axis] + size), axis)
        fields = {"local_shape": local.shape, "global_shape": array.shape, "global_offset": tuple(offset)}
        roles["model_state"][name] = _weight(name, local, empty, **fields)
        share = -(-local.size // sharded)
        begin = min(share * (rank // tp), local.size)
        part = slice(begin, min(begin + share, local.size)) if sharded > 1 else None
        for number in (1, 2):
            state = local * (10 * number)
            if part is None:
                roles["optimizer_state"][f"{name}.moment{number}_0"] = _weight(name, state, empty, **fields)
            elif part.stop > part.start:
                flat = state.ravel()[part]
                made = _weight(name, flat, empty, is_flattened=True, flattened_range=part, **fields)
                roles["optimizer_state"][f"{name}.moment{number}_0"] = made
            power = np.array([0.9**number], np.float32)
            scalar = {"local_shape": (1,), "global_shape": (1,), "global_offset": (0,)}
            roles["optimizer_state"][f"{name}.beta{number}_pow_acc_0"] = _weight(name, power, empty, **scalar)
    return roles


def _weight(name: str, array: np.ndarray[Any, Any], empty: bool, **fields: Any) -> SimpleNamespace:
    values = np.zeros_like(array) if empty else np.ascontiguousarray(array)
    fields = {"is_flattened": False, "flattened_range": None, **fields}
    return SimpleNamespace(key=name, local_tensor=paddle.to_tensor(values), **fields)


ARRAYS = canonical()
"""The weights that most jobs hold."""
Loader = Callable[[AnyPath, Roles, ThreadChannel], LoadReport]
Places = Path | Sequence[Path]


def save(
    directory: Places,
    arrays: Arrays = ARRAYS,
    tp: int = 1,
    sharded: int = 1,
    *,
    step: int = 3,
    files: Callable[[int], Mapping[str, bytes]] = lambda rank: {},
) -> list[SaveReport]:
    """Save on threads, into one directory or one of each rank, with some files of each rank."""

    def held(rank: int) -> Roles:
        return live(arrays, tp, rank, sharded=sharded)

    return attempt_save(directory, held, tp * sharded, step=step, files=files).results()


def attempt_save(
    directory: Places,
    held: Callable[[int], Roles],
    ranks: int = 2,
    *,
    described: ModelDescription = MODEL,
    step: int = 3,
    files: Callable[[int], Mapping[str, bytes]] = lambda rank: {},
    replicas: str = "warn",
    parallel: Mapping[str, int] = MappingProxyType({}),
) -> Outcomes:
    """Save what each rank holds; return the report or exception of each rank."""

    def work(channel: ThreadChannel) -> SaveReport:
        place = directory if isinstance(directory, Path) else directory[channel.rank]
        config = {"config.json": config_bytes(described.config)} if channel.rank == 0 else {}
        given, record = {**config, **files(channel.rank)}, JobRecord(step, step * 8, dict(parallel))
        return save_checkpoint(place, held(channel.rank), described, given, record, channel, replicas)

    return job(ranks, work)


def load(directory: AnyPath | Sequence[AnyPath], *layout: int, **options: Any) -> list[LoadReport]:
    """As :func:`attempt`, for loads that no rank may fail in."""
    return attempt(directory, *layout, **options).results()


def attempt(
    directory: AnyPath | Sequence[AnyPath],
    tp: int = 1,
    sharded: int = 1,
    *,
    ranks: int | None = None,
    arrays: Arrays = ARRAYS,
    expected: Arrays | None = None,
    only: str | None = None,
    loader: Loader | None = None,
    **options: Any,
) -> Outcomes:
    """Load into zeros on threads; what each rank reported or raised.

    Every bit is compared. What a refused load was to fill is still zero unless the error says that it is undefined.

    Args:
        directory: what is loaded, by all ranks or by each.
        tp: tensor-parallel degree.
        sharded: as for :func:`live`.
        ranks: how many, if some of them hold the same.
        arrays: weights of the model that is loaded.
        expected: what it holds afterwards, if that is something else.
        only: the one role that is loaded.
        loader: by default :func:`flex` with these options.
        options: of :func:`flex`.
    """
    load_into = loader or flex(**options)

    def held(weights: Arrays, rank: int, empty: bool = False) -> Roles:
        roles = live(weights, tp, rank, empty, sharded)
        return {role: names for role, names in roles.items() if only in (None, role)}

    def work(channel: ThreadChannel) -> LoadReport:
        place = directory[channel.rank] if isinstance(directory, Sequence) else directory
        roles = held(arrays, channel.rank, empty=True)
        try:
            report = load_into(place, roles, channel)
        except FlexError as error:
            filled = [one for names in roles.values() for one in names.values() if one.local_tensor.numpy().any()]
            may_be_filled = "are undefined" in error.what
            assert may_be_filled or not filled, "refused, and tensors have changed"
            raise
        assert same_values(held(expected or arrays, channel.rank), roles)
        return report

    return job(ranks or tp * sharded, work)


def flex(
    verify: str = "size",
    options: ReadOptions = DEFAULT_OPTIONS,
    described: ModelDescription = MODEL,
    statements: Sequence[str] = (),
) -> Loader:
    """The load of a flex checkpoint."""
    stated = {"aoa_statements": list(statements)} if statements else None
    return lambda place, roles, channel: load_checkpoint(
        open_on_all_ranks(place, channel, verify), roles, described, channel, options, aoa_config=stated
    )


def open_weights(verify: str = "full", options: ReadOptions = DEFAULT_OPTIONS) -> Loader:
    """The load of open weights."""
    return lambda place, roles, channel: prepare_weights(place, roles, MODEL, channel, options, verify).fill()


def same_values(one: Roles, other: Roles) -> bool:
    """Whether two sets of live weights hold the same bits under the same names."""
    return all(
        np.array_equal(one[role][name].local_tensor.numpy(), other[role][name].local_tensor.numpy())
        for role in one
        for name in one[role]
    ) and all(one[role].keys() == other[role].keys() for role in one)
