"""Simulated ranks with real bytes: from any layout of Qwen3-MoE to any other and back, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.errors import OptionError, PeerError
from paddleformers_fc.families import family_for
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.layout.live import describe_roles
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model
from tests.families.spaces import model_of
from tests.trainer.lora_jobs import fingerprint
from verification import simulate_ranks, temporary_directory


@pytest.fixture
def fast() -> Iterator[Path]:
    """A directory in memory, where there is one."""
    with temporary_directory() as path:
        yield path


def laid_out(grid: str, config: dict[str, Any], dtype: str = "bfloat16") -> SimulatedModel:
    """A tiny model over a grid."""
    return declared_model(family_for(config), model_of(config), parse_grid(grid), dtype)


def round_trip(row: str, column: str, directory: Path) -> simulate_ranks.RoundTrip:
    """One hop of the tiny Qwen3-MoE."""
    config = {**simulate_ranks.QWEN3_MOE.config, "is_fleet": True}
    alone, source, target = (laid_out(grid, config) for grid in ("dp=1", row, column))
    (hop,) = simulate_ranks.round_trips(alone, {row: source}, {column: target}, directory)
    return hop


def test_a_hop_keeps_every_bit_and_one_that_changes_on_the_way_is_a_difference(
    fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = simulate_ranks.load

    def faulty(directory: Path, model: SimulatedModel) -> list[simulate_ranks.Roles]:
        held = original(directory, model)
        if directory.name == "source":
            array = held[0]["optimizer_state"]["model.norm.weight.moment1_0"].local_tensor.array
            array.view(np.uint8)[0] ^= 1
        return held

    hop = round_trip("sharding=2,split=true,ep=2", "tp=4", fast)
    assert (hop.source, hop.target, hop.differences) == ("sharding=2,split=true,ep=2", "tp=4", ())
    # 77 weights, of which three routers are float32 and have no master weights, four states and an average of each.
    assert (hop.equal, hop.tensors) == (True, 77 + 74 + 5 * 77)
    assert not list(fast.iterdir())
    monkeypatch.setattr(simulate_ranks, "load", faulty)
    hop = round_trip("tp=2", "sharding=4", fast)
    assert not hop.equal
    assert "there: optimizer_state model.norm.weight.moment1_0 has another md5" in hop.differences
    assert "rank 0: optimizer_state model.norm.weight.moment1_0 came back with other bits" in hop.differences


LARGER = {**simulate_ranks.QWEN3_MOE.config, "is_fleet": True, "hidden_size": 256, "vocab_size": 2048}


@pytest.mark.parametrize(
    ("one", "other", "change"),
    [
        ("sharding=2,split=true", "sharding=2,split=true,buffer=1", {}),
        ("pp=2", "pp=2", {"pp_seg_method": "[0, 2, 7]"}),
        ("sharding=2,stage=3", "sharding=2,stage=3,slice_above=1000", {}),
    ],
)
def test_a_layout_of_the_same_name_that_owns_other_boxes_is_resharded(
    fast: Path, one: str, other: str, change: dict[str, Any]
) -> None:
    first, second = laid_out(one, LARGER), laid_out(other, {**LARGER, **change})
    prints = [fingerprint(model.roles(rank) for rank in range(2)) for model in (first, second)]
    assert prints[0] != prints[1]
    alone = laid_out("dp=1", LARGER)
    simulate_ranks.save(fast / "alone", [simulate_ranks.filled(alone.roles(0), simulate_ranks.value_of)], alone)
    simulate_ranks.save(fast / "first", simulate_ranks.load(fast / "alone", first), first)
    held = simulate_ranks.load(fast / "first", second)
    assert fingerprint(describe_roles(roles) for roles in held) == prints[1]
    for rank, roles in enumerate(held):
        expected = simulate_ranks.filled(second.roles(rank), simulate_ranks.value_of)
        for role, weights in expected.items():
            for name, weight in weights.items():
                assert weight.local_tensor.array.tobytes() == roles[role][name].local_tensor.array.tobytes(), name


def test_every_error_of_a_rank_ends_the_job() -> None:
    def refuse(channel: Channel) -> None:
        if channel.rank == 1:
            raise OptionError("No.")
        channel.gather("a test", b"")

    def fail(channel: Channel) -> None:
        if channel.rank == 1:
            raise ZeroDivisionError("by zero")
        channel.gather("a test", b"")

    with pytest.raises(OptionError, match=r"No\."):
        simulate_ranks.run_threads(3, refuse)
    with pytest.raises(PeerError, match="ZeroDivisionError: by zero"):
        simulate_ranks.run_threads(3, fail)
