"""Kept plans: equal to those that are made, and never those of anything else."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from paddleformers_fc.aoa import AoaTensor
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.formats import Catalog, OpenedCheckpoint
from paddleformers_fc.formats.checkpoint import StoredModel
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.plan import plan_reads, resume_source
from paddleformers_fc.plan.cache import CachedPlan, PlanCache, PlanKey, encode_plan, fits, plan_key
from paddleformers_fc.plan.items import ReadItem
from paddleformers_fc.plan.simulate import SimulatedModel
from paddleformers_fc.storage.file_checksums import FileChecksum
from tests.plan.stored import checkpoint_of
from tests.plan.test_forecast import MOE, laid_out


@pytest.fixture(scope="module")
def stored() -> OpenedCheckpoint:
    return checkpoint_of(laid_out("sharding=2,split=true,ep=2"))


@pytest.fixture(scope="module")
def model() -> SimulatedModel:
    return laid_out("tp=2")


def made(stored: OpenedCheckpoint, model: SimulatedModel, rank: int = 0) -> tuple[PlanKey, CachedPlan]:
    source, report = resume_source(stored, model.rules)
    plan = plan_reads(source, model.roles(rank))
    assert plan.report.empty
    assert report.empty
    assert len(plan.items) > 100
    return plan_key(stored, model.model, model.roles(rank)), CachedPlan(plan, frozenset({"b", "a"}))


def test_a_plan_is_kept_in_the_process(stored: OpenedCheckpoint, model: SimulatedModel) -> None:
    key, planned = made(stored, model)
    plans = PlanCache()
    assert plans.find(key) is None
    plans.keep(key, planned)
    assert plans.find(plan_key(stored, model.model, model.roles(0))) is planned


def test_another_process_finds_the_plan_in_the_directory(
    tmp_path: Path, stored: OpenedCheckpoint, model: SimulatedModel
) -> None:
    directory = tmp_path / "new" / "plans"
    key, planned = made(stored, model)
    PlanCache(directory).keep(key, planned)
    assert PlanCache(directory).find(key) == planned
    assert [path.suffix for path in directory.iterdir()] == [".plan"]


def test_only_a_plan_of_the_directory_that_fits_is_taken_and_kept(
    tmp_path: Path, stored: OpenedCheckpoint, model: SimulatedModel
) -> None:
    key, planned = made(stored, model)
    PlanCache(tmp_path).keep(key, planned)
    plans = PlanCache(tmp_path)
    assert plans.find(key, lambda found: False) is None
    assert plans.find(key, lambda found: found == planned) == planned
    assert plans.find(key, lambda found: False) == planned, "it has passed, and is in the process now"


def test_the_oldest_plans_leave_the_process_first(stored: OpenedCheckpoint, model: SimulatedModel) -> None:
    (first, planned), (second, other) = made(stored, model), made(stored, model, 1)
    plans = PlanCache(most_items=len(planned.plan.items) + len(other.plan.items))
    plans.keep(first, planned)
    plans.keep(second, other)
    assert plans.find(first) is planned
    third = msgspec.structs.replace(first, version="0")
    plans.keep(third, planned)
    assert (plans.find(first), plans.find(second), plans.find(third)) == (planned, None, planned)


def test_every_changed_byte_of_a_file_is_noticed(
    tmp_path: Path, stored: OpenedCheckpoint, model: SimulatedModel
) -> None:
    key, planned = made(stored, model)
    PlanCache(tmp_path).keep(key, planned)
    (path,) = tmp_path.iterdir()
    written = path.read_bytes()
    for place in [*range(60), *range(60, len(written), len(written) // 100), len(written) - 1]:
        path.write_bytes(written[:place] + bytes([written[place] ^ 1]) + written[place + 1 :])
        assert PlanCache(tmp_path).find(key) is None, place
    for length in (0, 5, 20, len(written) // 2, len(written) - 1):
        path.write_bytes(written[:length])
        assert PlanCache(tmp_path).find(key) is None, length
    path.write_bytes(written + b"\0")
    assert PlanCache(tmp_path).find(key) is None
    PlanCache(tmp_path).keep(key, planned)
    assert path.read_bytes() == written


def test_a_file_that_holds_another_key_is_ignored_and_replaced(
    tmp_path: Path, stored: OpenedCheckpoint, model: SimulatedModel
) -> None:
    key, planned = made(stored, model)
    older = msgspec.structs.replace(key, version="0.0.1")
    (tmp_path / f"{key.wanted}.plan").write_bytes(encode_plan(older, planned))
    plans = PlanCache(tmp_path)
    assert plans.find(key) is None
    plans.keep(key, planned)
    assert PlanCache(tmp_path).find(key) == planned
    assert PlanCache(tmp_path).find(older) is None


def test_a_directory_that_cannot_be_written_is_worth_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stored: OpenedCheckpoint, model: SimulatedModel
) -> None:
    key, planned = made(stored, model)
    (tmp_path / "file").write_text("in the way")
    plans = PlanCache(tmp_path / "file" / "plans")
    with caplog.at_level(logging.WARNING):
        plans.keep(key, planned)
    assert "A load plan could not be written to" in caplog.text
    assert plans.find(key) is planned


def changed_checkpoints(stored: OpenedCheckpoint) -> dict[str, OpenedCheckpoint]:
    """The checkpoint with one thing changed that a plan may depend on."""
    role, name = "model_state", "model.norm.weight"
    tensor = stored.catalog.roles[role][name]
    ((file, begin),) = tensor.offsets

    def with_tensor(**changes: Any) -> OpenedCheckpoint:
        roles = {**stored.catalog.roles, role: dict(stored.catalog.roles[role])}
        roles[role][name] = msgspec.structs.replace(tensor, **changes)
        return replace(stored, catalog=Catalog(stored.catalog.root, roles))

    checksum = FileChecksum(file, 8, "0" * 32, 4, ["0" * 16] * 2)
    rules, description = stored.rules, stored.known

    def with_model(rules: RuleSet, description: ModelDescription | None) -> OpenedCheckpoint:
        return replace(stored, describe=lambda: StoredModel(rules, description))

    return {
        "offset": with_tensor(offsets=((file, begin + 2),)),
        "file": with_tensor(offsets=((file + "x", begin),)),
        "dtype": with_tensor(form=replace(tensor.form, dtype="float16")),
        "boxes": with_tensor(form=replace(tensor.form, boxes=())),
        "manifest": replace(stored, commit_record=msgspec.structs.replace(stored.manifest, files=[checksum])),
        "step": replace(stored, commit_record=msgspec.structs.replace(stored.manifest, step=2)),
        "rules": with_model(replace(rules, rules=tuple(reversed(rules.rules))), description),
        "fresh": with_model(replace(rules, fresh=("x",)), description),
        "config": with_model(rules, ModelDescription({**description.config, "num_attention_heads": 1})),
        "class": with_model(rules, ModelDescription(description.config, is_fleet=True)),
    }


def test_whatever_a_plan_depends_on_changes_its_key(stored: OpenedCheckpoint, model: SimulatedModel) -> None:
    roles = model.roles(0)
    shard = roles["model_state"]["model.norm.weight"]

    def wanting(**changes: Any) -> PlanKey:
        other = msgspec.structs.replace(shard, **changes)
        weights = {**roles["model_state"], "model.norm.weight": other}
        return plan_key(stored, model.model, {**roles, "model_state": weights})

    keys = {what: plan_key(one, model.model, roles) for what, one in changed_checkpoints(stored).items()}
    keys["live config"] = plan_key(
        stored, replace(model.model, config={**model.model.config, "num_key_value_heads": 1}), roles
    )
    keys["live class"] = plan_key(stored, replace(model.model, is_fleet=True), roles)
    keys["wanted dtype"] = wanting(dtype="float16")
    keys["wanted range"] = wanting(flat=(0, 1))
    keys["wanted order"] = plan_key(stored, model.model, dict(reversed(roles.items())))
    keys["another rank"] = plan_key(stored, model.model, model.roles(1))
    keys["fewer roles"] = plan_key(stored, model.model, {"model_state": roles["model_state"]})
    tensors = {"a": AoaTensor((2, 2), "float32", (1, 1))}
    keys["statements"] = plan_key(stored, model.model, roles, {"aoa_statements": ["a -> b"]}, tensors)
    keys["other statements"] = plan_key(stored, model.model, roles, {"aoa_statements": ["a -> c"]}, tensors)
    cut = {"a": AoaTensor((2, 2), "float32", (2, 1))}
    keys["other tensors"] = plan_key(stored, model.model, roles, {"aoa_statements": ["a -> b"]}, cut)
    keys["as it is"] = plan_key(stored, model.model, roles)
    assert len(set(keys.values())) == len(keys)
    assert (
        plan_key(stored, replace(model.model, config=dict(reversed(model.model.config.items()))), roles)
        == keys["as it is"]
    )
    assert MOE.items() <= model.model.config.items()


def test_what_a_family_declares_is_part_of_the_key(
    monkeypatch: pytest.MonkeyPatch, stored: OpenedCheckpoint, model: SimulatedModel
) -> None:
    from paddleformers_fc.plan import cache

    before = plan_key(stored, model.model, model.roles(0))
    monkeypatch.setattr(cache, "family_for", lambda config: replace(model.family, tied=()))
    assert plan_key(stored, model.model, model.roles(0)) != before
    monkeypatch.undo()
    monkeypatch.setattr(cache, "__version__", "0.0.0")
    assert plan_key(stored, model.model, model.roles(0)).version == "0.0.0"


def _moved(box: Box, by: int) -> Box:
    return Box(tuple(low + by for low in box.lo), tuple(high + by for high in box.hi))


Forge = Callable[[ReadItem], ReadItem]
FORGED: dict[str, Forge] = {
    "a box outside what is stored": lambda item: structs.replace(
        item, stored=structs.replace(item.stored, part=_moved(item.stored.part, 1_000_000))
    ),
    "a box before what is stored": lambda item: structs.replace(
        item, stored=structs.replace(item.stored, part=_moved(item.stored.part, -1))
    ),
    "a box outside what is wanted": lambda item: structs.replace(item, part=_moved(item.part, 1_000_000)),
    "a fragment before the buffer": lambda item: structs.replace(item, start=-1),
    "a place before the file": lambda item: structs.replace(item, stored=structs.replace(item.stored, begin=-1)),
    "an axis twice": lambda item: structs.replace(item, axes=(0,) * len(item.axes)),
    "another element type": lambda item: structs.replace(item, stored=structs.replace(item.stored, dtype="object")),
}
OTHER: dict[str, Forge] = {
    "a file outside": lambda item: structs.replace(item, stored=structs.replace(item.stored, file="../secret")),
    "a file by its whole path": lambda item: structs.replace(
        item, stored=structs.replace(item.stored, file="/dev/zero")
    ),
    "a shard that is not wanted": lambda item: structs.replace(item, name="unheard of"),
    "a role that is not wanted": lambda item: structs.replace(item, role="unheard of"),
    "a fragment behind the buffer": lambda item: structs.replace(item, start=1_000_000_000),
}


def forged(planned: CachedPlan, change: Forge) -> CachedPlan:
    first = next(item for item in planned.plan.items if len(item.shape) == 2)
    items = tuple(change(item) if item is first else item for item in planned.plan.items)
    return replace(planned, plan=replace(planned.plan, items=items))


@pytest.mark.parametrize("name", FORGED)
def test_a_file_that_reads_or_fills_outside_of_boxes_is_as_good_as_none(
    tmp_path: Path, stored: OpenedCheckpoint, model: SimulatedModel, name: str
) -> None:
    key, planned = made(stored, model)
    PlanCache(tmp_path).keep(key, forged(planned, FORGED[name]))
    assert PlanCache(tmp_path).find(key) is None


@pytest.mark.parametrize("name", OTHER)
def test_a_plan_of_other_files_or_shards_does_not_fit(
    stored: OpenedCheckpoint, model: SimulatedModel, name: str
) -> None:
    _, planned = made(stored, model)
    assert fits(planned, model.roles(0), stored.files)
    assert not fits(forged(planned, OTHER[name]), model.roles(0), stored.files)


def test_a_plan_that_leaves_elements_of_a_shard_unread_does_not_fit(
    stored: OpenedCheckpoint, model: SimulatedModel
) -> None:
    _, planned = made(stored, model)
    counts = Counter((item.role, item.name) for item in planned.plan.items)
    left = next(item for item in planned.plan.items if counts[item.role, item.name] > 1)
    items = tuple(item for item in planned.plan.items if item is not left)
    assert not fits(replace(planned, plan=replace(planned.plan, items=items)), model.roles(0), stored.files)
