"""Differences between ranks are reported on every rank before anything is read or written."""

from __future__ import annotations

import sys
from collections.abc import Callable
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
from paddleformers_fc.execute.load import load_checkpoint, prepare_weights
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
from paddleformers_fc.families import ModelDescription
from tests.corruption import ours
from tests.execute.simulated import CONFIG, MODEL, canonical, job, live, same_values, succeed


def the_one_report(outcomes: list[Any]) -> FlexError:
    """The error that every rank raised alike."""
    first = outcomes[0]
    assert isinstance(first, FlexError), first
    assert len({str(outcome) for outcome in outcomes}) == 1
    return first


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

    error = the_one_report(job(4, work))
    assert isinstance(error, PeerError)
    (line,) = error.evidence
    assert line.startswith(subject)
    assert line.endswith(f" on rank {odd}")
    assert "everywhere" not in str(error)


def test_a_fact_that_one_rank_lacks_is_reported() -> None:
    error = the_one_report(job(2, lambda channel: call(channel, {"a": 1} if channel.rank else {})))
    assert error.evidence == ("a: not set on rank 0; 1 on rank 1",)


def test_what_differs_counts_before_what_became_of_it() -> None:
    def work(channel: Any) -> None:
        def fail() -> None:
            raise FlexError("What came of another configuration.")

        run_on_all(
            channel,
            "planning",
            fail if channel.rank == 1 else lambda: None,
            ConsistencyCheck("a test", {"a": channel.rank}),
        )

    error = the_one_report(job(3, work))
    assert error.evidence == ("a: 0 on rank 0; 1 on rank 1; 2 on rank 2",)


@pytest.mark.parametrize("works", [True, False])
def test_a_fact_that_cannot_be_encoded_is_an_error_on_every_rank(works: bool) -> None:
    untold: dict[str, object] = {"statements": [{1: "a", "b": "c"}]}

    def work() -> None:
        if not works:
            raise PeerError("The work failed.")

    def call_with(channel: Any) -> None:
        run_on_all(
            channel, "working", work, ConsistencyCheck("a test", untold if channel.rank == 1 else {"statements": []})
        )

    report = str(the_one_report(job(3, call_with)))
    assert ("TypeError while working" in report) == works
    assert ("The work failed." in report) == (not works)


def test_a_roll_costs_no_exchange_of_its_own() -> None:
    def work(channel: Any) -> int:
        call(channel, {"equal": "everywhere"})
        return int(channel.exchanges)

    assert succeed(3, work) == [1] * 3


def test_equal_ranks_continue_and_long_values_are_compared_to_their_end() -> None:
    succeed(3, lambda channel: call(channel, {"long": "x" * 5000}))
    error = the_one_report(job(3, lambda channel: call(channel, {"long": "x" * 5000 + str(channel.rank // 2)})))
    assert len(error.evidence[0]) < 600


def test_a_process_alone_calls_no_roll() -> None:
    call(ALONE, {"anything": object()})


def test_the_software_is_that_which_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paddleformers", paddle)
    found = software_versions()
    assert found["paddleformers_fc"] == __version__
    assert found["paddle"] == paddle.__version__
    assert set(found) == {"paddleformers_fc", "paddle", "paddleformers"}
    monkeypatch.delitem(sys.modules, "paddle")
    monkeypatch.delitem(sys.modules, "paddleformers")
    assert set(software_versions()) == {"paddleformers_fc"}


def test_ranks_in_different_steps_are_distinguished() -> None:
    error = the_one_report(
        job(3, lambda channel: run_on_all(channel, "saving" if channel.rank == 2 else "loading", lambda: None))
    )
    assert isinstance(error, PeerError)
    assert error.evidence == ("loading on ranks 0-1; saving on rank 2",)


def test_a_rank_of_another_version_is_distinguished() -> None:
    def work(channel: Any) -> None:
        if channel.rank == 1:
            for _ in range(2):
                assert channel.gather("a test", b"of another version") is None
        else:
            run_on_all(channel, "loading", lambda: None)

    first, silent, third = job(3, work)
    assert silent is None
    assert "not every rank is loading" in str(the_one_report([first, third]))


# ---- Through save and load.


def test_a_save_of_different_steps_or_configurations_writes_nothing(tmp_path: Path) -> None:
    def step(channel: Any) -> None:
        attempt(channel, JobRecord(3 + channel.rank, 24, {}), MODEL)

    def config(channel: Any) -> None:
        attempt(
            channel, JobRecord(3, 24, {}), ModelDescription({**CONFIG, "num_key_value_heads": 2 + 2 * channel.rank})
        )

    def attempt(channel: Any, record: JobRecord, model: ModelDescription) -> None:
        files = {"config.json": config_bytes(model.config)} if channel.rank == 0 else {}
        save_checkpoint(tmp_path / "checkpoint-3", live(ours.ARRAYS, 2, channel.rank), model, files, record, channel)

    assert "step: 3 on rank 0; 4 on rank 1" in str(the_one_report(job(2, step)))
    assert "config.num_key_value_heads: 2 on rank 0; 4 on rank 1" in str(the_one_report(job(2, config)))
    assert list(tmp_path.iterdir()) == []


def refused(ranks: int, work: Callable[[Any, dict[str, Any]], None]) -> FlexError:
    """The one report of a load on several ranks, none of whose weights has changed."""

    def attempt(channel: Any) -> None:
        roles = live(ours.ARRAYS, ranks, channel.rank, empty=True)
        try:
            work(channel, roles)
        finally:
            assert same_values(roles, live(ours.ARRAYS, ranks, channel.rank, empty=True))

    return the_one_report(job(ranks, attempt))


@pytest.mark.parametrize("odd", [0, 1])
def test_another_checkpoint_under_the_same_name_is_refused_by_its_checksum(tmp_path: Path, odd: int) -> None:
    here, there = tmp_path / "checkpoint-3", tmp_path / "elsewhere"
    ours.save(there, canonical(seed=1))
    usual_one = open_and_move(there, here)
    ours.save(here)

    def work(channel: Any, roles: dict[str, Any]) -> None:
        checkpoint = usual_one if channel.rank == odd else open_on_all_ranks(here, ALONE)
        load_checkpoint(checkpoint, roles, MODEL, channel)

    error = refused(2, work)
    (line,) = error.evidence
    assert line.startswith("manifest: ")
    assert f"on rank {odd}" in line


def open_and_move(source: Path, name: Path) -> Any:
    """A checkpoint that was opened under a name which then goes to another one."""
    source.rename(name)
    opened = open_on_all_ranks(name, ALONE)
    name.rename(source)
    return opened


def test_statements_on_one_rank_alone_are_refused(tmp_path: Path) -> None:
    ours.save(tmp_path / "checkpoint-3")

    def work(channel: Any, roles: dict[str, Any]) -> None:
        stated = {"aoa_statements": ["model.norm.weight -> model.norm.weight"]} if channel.rank == 1 else None
        checkpoint = open_on_all_ranks(tmp_path / "checkpoint-3", channel)
        load_checkpoint(checkpoint, roles, MODEL, channel, aoa_config=stated)

    assert "aoa_config" in str(refused(2, work))


def test_ranks_that_resume_from_different_directories_are_listed(tmp_path: Path) -> None:
    for step in (3, 4):
        ours.save(tmp_path / f"checkpoint-{step}")

    def work(channel: Any, roles: dict[str, Any]) -> None:
        checkpoint = open_on_all_ranks(tmp_path / f"checkpoint-{3 + channel.rank // 3}", channel)
        load_checkpoint(checkpoint, roles, MODEL, channel)

    assert "checkpoint-4 on rank 3" in str(refused(4, work))


@pytest.mark.parametrize("odd", [0, 1])
def test_ranks_that_see_different_open_weights_under_one_name_are_refused(tmp_path: Path, odd: int) -> None:
    for place, dtype in (("usual", np.float32), ("odd", np.float16)):
        (tmp_path / place / "hf").mkdir(parents=True)
        held = {name: array.astype(dtype) for name, array in canonical().items()}
        save_file(held, tmp_path / place / "hf" / "model.safetensors")

    def work(channel: Any, roles: dict[str, Any]) -> None:
        seen = tmp_path / ("odd" if channel.rank == odd else "usual") / "hf"
        prepare_weights(seen, {"model_state": roles["model_state"]}, MODEL, channel).fill()

    (line,) = refused(2, work).evidence
    assert line.startswith("open_weights.model.safetensors: ")
    assert f"on rank {odd}" in line
