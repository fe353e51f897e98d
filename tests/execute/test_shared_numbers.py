"""Numbers that fill the same memory: parameters in one fused buffer share the powers of beta."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paddleformers_fc.distributed.channel import ALONE
from paddleformers_fc.errors import MismatchError
from paddleformers_fc.execute.load import load_checkpoint
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.families import family_for
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.layout.roles import OPTIMIZER_STATE
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.plan.simulate import declared_model
from verification.simulate_ranks import QWEN3_MOE, filled, save

POWER = ".beta1_pow_acc_0"


@pytest.mark.parametrize("equal", [True, False])
def test_unequal_numbers_are_not_loaded_into_the_same_memory(tmp_path: Path, equal: bool) -> None:
    laid = declared_model(family_for(QWEN3_MOE.config), QWEN3_MOE, parse_grid("dp=1"))
    one, other, *_ = (name for name in laid.roles(0)[OPTIMIZER_STATE] if name.endswith(POWER))

    def numbers(role: str, shard: Shard) -> np.ndarray:  # type: ignore[type-arg]
        value = 0.5 if equal or shard.name != other else 0.25
        return np.full(shard.global_shape, value, np.float32)

    save(tmp_path / "checkpoint-3", [filled(laid.roles(0), numbers)], laid)
    live = filled(laid.roles(0), lambda role, shard: np.zeros(shard.global_shape, np.float32))
    states = live[OPTIMIZER_STATE]
    live[OPTIMIZER_STATE] = {**states, other: replace(states[other], local_tensor=states[one].local_tensor)}
    checkpoint = open_on_all_ranks(tmp_path / "checkpoint-3", ALONE)
    if equal:
        load_checkpoint(checkpoint, live, laid.model, ALONE)
        return
    with pytest.raises(MismatchError, match=r"differ|equal"):
        load_checkpoint(checkpoint, live, laid.model, ALONE)
