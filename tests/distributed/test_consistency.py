"""Differences between ranks are reported on every rank before anything is read or written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from safetensors.numpy import save_file

from paddleformers_fc import __version__
from paddleformers_fc.distributed.channel import ALONE, format_ranks, group_by_value, run_on_all
from paddleformers_fc.distributed.consistency import ConsistencyCheck, software_versions
from paddleformers_fc.errors import FlexError, PeerError
from paddleformers_fc.execute.load import LoadReport, load_checkpoint
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.storage.executor import ReadOptions
from tests.execute.simulated import (
    ARRAYS,
    CONFIG,
    MODEL,
    Loader,
    attempt,
    canonical,
    flex,
    job,
    live,
    open_weights,
    save,
    succeed,
)


def call(channel: Any, facts: dict[str, object]) -> None:
    """Work that succeeds, with a consistency check."""
    run_on_all(channel, "working", lambda: None, ConsistencyCheck("a test", facts))


def test_ranks_are_named_in_runs() -> None:
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([5, 1, 0, 2]) == "ranks 0-2, 5"
    assert format_ranks(range(1000)) == "ranks 0-999"


def test_the_value_of_the_fewest_comes_last_and_many_values_are_counted() -> None:
    assert group_by_value(["b", "a", "a", "a"]) == "a on ranks 1-3; b on rank 0"
    many = group_by_value([str(rank) for rank in range(100)])
    assert many.count(" on ") == 8
    assert many.endswith("93 more values on other ranks")


@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.parametrize(
    ("subject", "usual", "other"),
    [
        ("versions.paddleformers_fc", "0.1.0", "0.2.0"),
        ("versions.paddle", "3.3.1", "3.4.0"),
        ("config.hidden_size", 16, 32),
        ("config.tie_word_embeddings", False, True),
        ("flex_verify", "size", "full"),
        ("aoa_config.aoa_statements", ["a -> b"], ["a -> c"]),
        ("step", 3, 4),
    ],
)
def test_a_difference_is_reported_with_its_values_and_ranks(
    odd: int, subject: str, usual: object, other: object
) -> None:
    def work(channel: Any) -> None:
        facts: dict[str, object] = {"equal": "everywhere", "versions": {"else": 1}}
        value = other if channel.rank == odd else usual
        outer, _, inner = subject.partition(".")
        call(channel, {**facts, outer: {inner: value} if inner else value})

    error = job(4, work).error(PeerError)
    (line,) = error.evidence
    assert line.startswith(subject)
    assert line.endswith(f" on rank {odd}")
    assert "everywhere" not in str(error)


def test_a_fact_that_one_rank_lacks_is_reported() -> None:
    error = job(2, lambda channel: call(channel, {"a": 1} if channel.rank else {})).error()
    assert error.evidence == ("a: not set on rank 0; 1 on rank 1",)


def test_a_difference_takes_precedence_over_its_consequences() -> None:
    def work(channel: Any) -> None:
        def fail() -> None:
            raise FlexError("What came of another configuration.")

        check = ConsistencyCheck("a test", {"a": channel.rank})
        run_on_all(channel, "planning", fail if channel.rank == 1 else lambda: None, check)

    assert job(3, work).error().evidence == ("a: 0 on rank 0; 1 on rank 1; 2 on rank 2",)


@pytest.mark.parametrize("works", [True, False])
def test_a_fact_that_cannot_be_encoded_is_an_error_on_every_rank(works: bool) -> None:
    def work() -> None:
        if not works:
            raise PeerError("The work failed.")

    def call_with(channel: Any) -> None:
        facts: dict[str, object] = {"statements": [{1: "a", "b": "c"}] if channel.rank == 1 else []}
        run_on_all(channel, "working", work, ConsistencyCheck("a test", facts))

    assert ("TypeError while working" if works else "The work failed.") in str(job(3, call_with).error())


def test_equal_ranks_continue_after_one_exchange_and_long_values_are_compared_to_their_end() -> None:
    def work(channel: Any) -> int:
        call(channel, {"long": "x" * 5000})
        return int(channel.exchanges)

    assert succeed(3, work) == [1] * 3
    error = job(3, lambda channel: call(channel, {"long": "x" * 5000 + str(channel.rank // 2)})).error()
    assert len(error.evidence[0]) < 600
    call(ALONE, {"anything": object()})


def test_the_reported_versions_are_those_of_the_imported_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paddleformers", paddle)
    found = software_versions()
    assert found["paddleformers_fc"] == __version__
    assert found["paddle"] == paddle.__version__
    assert set(found) == {"paddleformers_fc", "paddle", "paddleformers"}
    monkeypatch.delitem(sys.modules, "paddle")
    monkeypatch.delitem(sys.modules, "paddleformers")
    assert set(software_versions()) == {"paddleformers_fc"}


def test_ranks_in_different_steps_are_distinguished() -> None:
    doing = ("loading", "loading", "saving")
    error = job(3, lambda channel: run_on_all(channel, doing[channel.rank], lambda: None)).error(PeerError)
    assert error.evidence == ("loading on ranks 0-1; saving on rank 2",)


def test_a_rank_of_another_version_is_distinguished() -> None:
    def work(channel: Any) -> None:
        if channel.rank == 1:
            for _ in range(2):
                assert channel.gather("a test", b"of another version") is None
        else:
            run_on_all(channel, "loading", lambda: None)

    outcomes = job(3, work)
    assert outcomes[1] is None
    assert "not every rank is loading" in str(outcomes.error(ranks=[0, 2]))


# ---- Through save and load.


@pytest.mark.parametrize(
    ("step", "heads", "line"),
    [(1, 0, "step: 3 on rank 0; 4 on rank 1"), (0, 2, "config.num_key_value_heads: 2 on rank 0; 4 on rank 1")],
    ids=["step", "configuration"],
)
def test_a_save_of_different_steps_or_configurations_writes_nothing(
    tmp_path: Path, step: int, heads: int, line: str
) -> None:
    def work(channel: Any) -> None:
        model = ModelDescription({**CONFIG, "num_key_value_heads": 2 + heads * channel.rank})
        files = {"config.json": config_bytes(model.config)} if channel.rank == 0 else {}
        record = JobRecord(3 + step * channel.rank, 24, {})
        save_checkpoint(tmp_path / "checkpoint-3", live(ARRAYS, 2, channel.rank), model, files, record, channel)

    assert line in str(job(2, work).error())
    assert list(tmp_path.iterdir()) == []


def read_once(place: Path, roles: Any, channel: Any) -> LoadReport:
    return flex(options=ReadOptions(replicas="once" if channel.rank == 1 else "each"))(place, roles, channel)


@pytest.mark.parametrize(
    ("loader", "steps", "line"),
    [
        (read_once, (3, 3), "flex_read: each on rank 0; once on rank 1"),
        (flex(), (3, 3, 3, 4), "checkpoint-4 on rank 3"),
    ],
    ids=["flex_read", "directories"],
)
def test_differing_load_options_of_ranks_are_rejected_before_a_weight_changes(
    tmp_path: Path, loader: Loader, steps: tuple[int, ...], line: str
) -> None:
    for step in (3, 4):
        save(tmp_path / f"checkpoint-{step}")
    places = [tmp_path / f"checkpoint-{step}" for step in steps]
    assert line in str(attempt(places, len(places), loader=loader).error())


@pytest.mark.parametrize("odd", [0, 1])
def test_another_checkpoint_under_the_same_name_is_refused_by_its_checksum(tmp_path: Path, odd: int) -> None:
    here, there = tmp_path / "checkpoint-3", tmp_path / "elsewhere"
    save(here, canonical(seed=1))
    opened = open_on_all_ranks(here, ALONE)
    here.rename(there)
    save(here)

    def load_either(place: Path, roles: Any, channel: Any) -> LoadReport:
        checkpoint = opened if channel.rank == odd else open_on_all_ranks(place, ALONE)
        return load_checkpoint(checkpoint, roles, MODEL, channel)

    (line,) = attempt(here, 2, loader=load_either).error().evidence
    assert line.startswith("manifest: ")
    assert f"on rank {odd}" in line


@pytest.mark.parametrize("odd", [0, 1])
def test_ranks_that_see_different_open_weights_under_one_name_are_refused(tmp_path: Path, odd: int) -> None:
    places = [tmp_path / str(rank) / "hf" for rank in range(2)]
    for rank, place in enumerate(places):
        place.mkdir(parents=True)
        dtype = np.float16 if rank == odd else np.float32
        save_file({name: array.astype(dtype) for name, array in ARRAYS.items()}, place / "model.safetensors")
    (line,) = attempt(places, 2, only="model_state", loader=open_weights()).error().evidence
    assert line.startswith("open_weights.model.safetensors: ")
    assert f"on rank {odd}" in line
