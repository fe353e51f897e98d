"""Loads with plans from before: they fill the same bits, and a cache that is wrong is as good as none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.execute import load as loading
from paddleformers_fc.execute.load import load_checkpoint
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.families import family_for
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.plan.cache import CachedPlan, PlanCache
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors
from paddleformers_fc.verification.simulate_ranks import QWEN3_MOE, Roles, filled, run_threads, save, value_of


def laid_out(grid: str) -> SimulatedModel:
    return declared_model(family_for(QWEN3_MOE.config), QWEN3_MOE, parse_grid(grid), "bfloat16")


def zeros(role: str, shard: Shard) -> Any:
    return value_of(role, shard).astype(to_numpy(to_safetensors(shard.dtype))) * 0


def loaded(directory: Path, model: SimulatedModel, plans: PlanCache) -> list[Roles]:
    held = [filled(model.roles(rank), zeros) for rank in range(model.grid.world_size)]

    def work(channel: Channel) -> None:
        load_checkpoint(open_on_all_ranks(directory, channel), held[channel.rank], model.model, channel, plans=plans)

    run_threads(model.grid.world_size, work)
    return held


def bits(held: list[Roles]) -> list[dict[tuple[str, str], bytes]]:
    return [
        {(role, name): one.local_tensor.array.tobytes() for role, found in roles.items() for name, one in found.items()}
        for roles in held
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plans") / "checkpoint-1"
    model = laid_out("sharding=2,split=true,ep=2")
    save(directory, [filled(model.roles(rank), value_of) for rank in range(2)], model)
    return directory


def no_planning(*unused: object) -> NoReturn:
    raise AssertionError("This load was planned before.")


def test_a_plan_from_the_directory_fills_the_same_bits_and_nothing_is_planned(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = laid_out("tp=2")
    expected = bits(loaded(checkpoint, model, PlanCache()))
    assert bits(loaded(checkpoint, model, PlanCache(tmp_path))) == expected
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(loading, "plan_reads", no_planning)
    monkeypatch.setattr(loading, "resume_source", no_planning)
    assert bits(loaded(checkpoint, model, PlanCache(tmp_path))) == expected


def test_files_that_were_changed_are_planned_again_and_replaced(tmp_path: Path, checkpoint: Path) -> None:
    model = laid_out("tp=2")
    expected = bits(loaded(checkpoint, model, PlanCache()))
    loaded(checkpoint, model, PlanCache(tmp_path))
    written = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for path, data in written.items():
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 255]) + data[-8:])
    assert bits(loaded(checkpoint, model, PlanCache(tmp_path))) == expected
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == written


def without_a_part(planned: CachedPlan) -> CachedPlan:
    items = planned.plan.items
    part = next(item for item in items if sum((one.role, one.name) == (item.role, item.name) for one in items) > 1)
    return replace(planned, plan=replace(planned.plan, items=tuple(one for one in items if one is not part)))


def test_a_plan_that_does_not_fit_is_as_good_as_none_though_its_file_is_sound(tmp_path: Path, checkpoint: Path) -> None:
    model, known = laid_out("dp=1"), PlanCache()
    expected = bits(loaded(checkpoint, model, known))
    ((key, planned),) = known._plans.items()
    PlanCache(tmp_path).keep(key, without_a_part(planned))
    (forged,) = (path.read_bytes() for path in tmp_path.iterdir())
    assert bits(loaded(checkpoint, model, PlanCache(tmp_path))) == expected
    (written,) = (path.read_bytes() for path in tmp_path.iterdir())
    assert written != forged


def test_another_checkpoint_of_the_same_layout_takes_the_place_of_the_first(tmp_path: Path, checkpoint: Path) -> None:
    model, other = laid_out("tp=2"), laid_out("dp=1")
    expected = bits(loaded(checkpoint, model, PlanCache()))
    another, plans = tmp_path / "checkpoint-2", tmp_path / "plans"
    save(another, loaded(checkpoint, other, PlanCache()), other)
    for directory in (checkpoint, another, checkpoint):
        assert bits(loaded(directory, model, PlanCache(plans))) == expected
    assert len(list(plans.iterdir())) == 2
