"""The position in the data of a resumed run: counted in samples, refused if it is not determined."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from paddleformers_fc.errors import FormatError, OptionError
from paddleformers_fc.trainer.position import (
    BatchSizes,
    Position,
    SampleOrder,
    Start,
    batch_sizes_of,
    covered,
    epochs_left,
    from_document,
    start_after,
    to_document,
)

SHUFFLED = SampleOrder(indexed=True, length=64, shuffled=True, seed=42)
STREAM = SampleOrder(indexed=False, length=0, shuffled=False, seed=0)
DP2 = BatchSizes(micro_batch=4, accumulation=1, ranks=2)
HALFWAY = Position(epoch=1, samples=24, consumed=88)


def test_a_position_survives_its_document() -> None:
    saved = (HALFWAY, DP2, SHUFFLED)
    assert from_document(to_document(*saved), "data.json") == saved


@pytest.mark.parametrize(
    "document", [{}, {"position": {"epoch": 1}}, {"position": {"weeks": 1}}, {"position": 3, "pace": 4, "order": 5}]
)
def test_a_damaged_document_is_named(document: dict[str, object]) -> None:
    with pytest.raises(FormatError) as caught:
        from_document(document, "checkpoint-3/trainer/data.json")
    assert caught.value.where == "checkpoint-3/trainer/data.json"


def test_the_pace_multiplies_ranks_micro_batch_and_accumulation() -> None:
    args = SimpleNamespace(per_device_train_batch_size=3, gradient_accumulation_steps=5, dataset_world_size=2)
    assert (batch_sizes_of(args).per_pass, batch_sizes_of(args).per_step) == (6, 30)
    assert batch_sizes_of(args, 4).per_step == 24
    assert batch_sizes_of(args, 6).per_step == batch_sizes_of(args, 0).per_step == 30


def test_the_same_settings_resume_with_the_next_sample() -> None:
    assert start_after((HALFWAY, DP2, SHUFFLED), DP2, SHUFFLED, 8) == Start(HALFWAY, 3)


@pytest.mark.parametrize(
    ("pace", "passes"),
    [
        (BatchSizes(8, 1, 1), 3),
        (BatchSizes(2, 2, 2), 6),
        (BatchSizes(2, 1, 4), 3),
        (BatchSizes(1, 1, 2), 12),
        (BatchSizes(12, 1, 2), 1),
    ],
)
def test_another_global_batch_resumes_with_the_next_sample(pace: BatchSizes, passes: int) -> None:
    assert start_after((HALFWAY, DP2, SHUFFLED), pace, SHUFFLED, 64 // pace.per_pass) == Start(HALFWAY, passes)


def test_a_stream_is_taken_up_by_passes() -> None:
    assert start_after((HALFWAY, DP2, STREAM), BatchSizes(1, 1, 2), STREAM, None) == Start(HALFWAY, 12)


def test_passes_that_are_left_of_an_epoch_are_made_though_they_are_too_few_for_a_step() -> None:
    last = Position(epoch=1, samples=56, consumed=120)
    assert start_after((last, DP2, SHUFFLED), BatchSizes(4, 2, 2), SHUFFLED, 8) == Start(last, 7)


WAITING = Position(epoch=1, samples=24, consumed=88, waiting=2)


@pytest.mark.parametrize("position", [WAITING, replace(HALFWAY, ended=True)])
def test_rare_states_are_in_the_document(position: Position) -> None:
    assert from_document(to_document(position, DP2, SHUFFLED), "data.json")[0] == position


def test_batches_cannot_wait_that_were_not_taken() -> None:
    document = to_document(replace(WAITING, waiting=4), DP2, SHUFFLED)
    with pytest.raises(FormatError, match="more samples wait than were read"):
        from_document(document, "data.json")


def test_batches_that_wait_do_so_again_in_a_pipeline_of_the_same_pace() -> None:
    assert start_after((WAITING, DP2, SHUFFLED), DP2, SHUFFLED, 8, pipeline=True) == Start(WAITING, 3)


@pytest.mark.parametrize(("pace", "pipeline", "passes"), [(DP2, False, 1), (BatchSizes(2, 1, 2), True, 2)])
def test_where_batches_cannot_wait_a_run_resumes_at_the_first_of_them(
    pace: BatchSizes, pipeline: bool, passes: int
) -> None:
    start = start_after((WAITING, DP2, SHUFFLED), pace, SHUFFLED, 64 // pace.per_pass, pipeline=pipeline)
    assert start == Start(Position(epoch=1, samples=8, consumed=72), passes)


def test_batches_that_wait_at_the_end_of_an_epoch_are_not_lost_with_it() -> None:
    last = Position(epoch=1, samples=64, consumed=128, waiting=1)
    assert start_after((last, DP2, SHUFFLED), DP2, SHUFFLED, 8, pipeline=True) == Start(last, 8)


def test_an_epoch_with_no_pass_left_is_over() -> None:
    used_up = Position(epoch=1, samples=64, consumed=128)
    start = start_after((used_up, DP2, SHUFFLED), DP2, SHUFFLED, 8)
    assert start == Start(Position(epoch=2, samples=0, consumed=128), 0)


def test_the_beginning_of_an_epoch_may_be_resumed_with_anything() -> None:
    start = start_after((Position(2, 0, 128), DP2, SHUFFLED), BatchSizes(5, 1, 3), STREAM, None)
    assert start == Start(Position(2, 0, 128), 0)


@pytest.mark.parametrize(
    ("pace", "order", "evidence"),
    [
        (BatchSizes(5, 1, 1), SHUFFLED, "read 5 per pass"),
        (BatchSizes(1, 1, 5), SHUFFLED, "read 5 per pass"),
        (DP2, replace(SHUFFLED, seed=43), "seed was 42 and is 43"),
        (DP2, replace(SHUFFLED, length=63), "64 samples were shuffled and 63 are now"),
        (DP2, SampleOrder(True, 64, False, 0), "dataloader_shuffle was true and is false"),
        (DP2, STREAM, "was a map and is a stream now"),
    ],
)
def test_data_that_comes_otherwise_is_refused(pace: BatchSizes, order: SampleOrder, evidence: str) -> None:
    with pytest.raises(OptionError) as caught:
        start_after((HALFWAY, DP2, SHUFFLED), pace, order, 8)
    assert any(evidence in line for line in caught.value.evidence)
    assert "ignore_data_skip: true" in caught.value.next_step


ODD = replace(SHUFFLED, length=66, samples=67)


def test_the_rest_of_an_epoch_is_read_in_the_saved_order_if_other_ranks_round_its_length_otherwise() -> None:
    alone, four = BatchSizes(8, 1, 1), BatchSizes(2, 1, 4)
    now = replace(ODD, length=67)
    start = start_after((HALFWAY, DP2, ODD), alone, now, 9)
    assert start == Start(HALFWAY, 3, replace(now, parts=(66,)))
    # A third layout resumes the same epoch.
    assert start.order is not None
    saved = from_document(to_document(HALFWAY, alone, start.order), "data.json")
    assert start_after(saved, four, replace(ODD, length=64), 8) == start
    # The first one may have had every sample.
    saved = from_document(to_document(HALFWAY, DP2, now), "data.json")
    assert start_after(saved, four, replace(ODD, length=64), 8) == Start(HALFWAY, 3, now)


def test_an_epoch_in_the_saved_order_is_over_when_no_rank_has_a_pass_left() -> None:
    last = Position(epoch=1, samples=64, consumed=128)
    saved = (last, BatchSizes(8, 1, 1), replace(ODD, length=67))
    assert start_after(saved, BatchSizes(32, 1, 2), ODD, 3).passes == 1
    assert start_after(saved, BatchSizes(64, 1, 1), replace(ODD, length=66), 1) == Start(
        last, 1, replace(ODD, length=67)
    )
    assert start_after(saved, BatchSizes(1, 1, 64), replace(ODD, length=64), 1) == Start(Position(2, 0, 128), 0)


INDEXED = SampleOrder(True, 64, True, 42, samples=64, corpus="of 64")


def test_data_that_was_lengthened_is_trained_behind_the_rest_of_what_was_permuted() -> None:
    longer = replace(INDEXED, length=100, samples=100)
    start = start_after((HALFWAY, DP2, INDEXED), DP2, longer, 13)
    assert start == Start(HALFWAY, 3, replace(longer, parts=(64,)))
    # All of them may have been trained.
    last = Position(epoch=0, samples=64, consumed=64)
    assert start_after((last, DP2, INDEXED), DP2, longer, 13) == Start(last, 8, replace(longer, parts=(64,)))
    assert start.order is not None
    saved = from_document(to_document(HALFWAY, DP2, start.order), "data.json")
    longest = replace(longer, length=120, samples=120)
    again = start_after(saved, DP2, longest, 15)
    assert again == Start(HALFWAY, 3, replace(longest, parts=(64, 100)))


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("length", [64, 100])
def test_a_corpus_that_is_distributed_to_other_samples_is_refused(shuffled: bool, length: int) -> None:
    before = replace(INDEXED, shuffled=shuffled)
    now = replace(before, length=length, samples=length, corpus="other")
    with pytest.raises(OptionError) as caught:
        start_after((HALFWAY, DP2, before), DP2, now, 13)
    assert any(
        "number of passes over it that max_steps and the global batch need" in line for line in caught.value.evidence
    )


def test_a_length_beyond_the_data_is_not_permuted() -> None:
    forged = replace(ODD, length=2**60)
    with pytest.raises(OptionError, match="do not fit"):
        start_after((HALFWAY, DP2, forged), BatchSizes(2, 1, 4), replace(ODD, length=64), 8)


def test_unshuffled_data_needs_the_identity_of_what_was_trained_and_shuffled_data_of_all() -> None:
    assert covered(HALFWAY, INDEXED) == 64
    assert covered(HALFWAY, replace(INDEXED, shuffled=False)) == HALFWAY.samples


def test_parts_of_an_order_that_overlap_are_refused() -> None:
    document = to_document(HALFWAY, DP2, replace(INDEXED, parts=(70,)))
    with pytest.raises(FormatError, match="parts overlap"):
        from_document(document, "data.json")


def in_steps(steps: int, pace: BatchSizes) -> Any:
    """The position that a checkpoint of another format has."""
    document = {"steps": steps, "consumed": steps * pace.per_step, "pace": asdict(pace)}
    return from_document(document, "data.json")


@pytest.mark.parametrize(("drop_last", "position"), [(True, Position(1, 4, 16)), (False, Position(1, 0, 16))])
def test_steps_of_another_batch_size_leave_out_the_last_batch_as_the_saved_run_did(
    drop_last: bool, position: Position
) -> None:
    order = SampleOrder(True, 15, True, 42, samples=15)
    assert in_steps(4, BatchSizes(4, 1, 1)).under(BatchSizes(2, 1, 1), order, 8, drop_last)[0] == position


def test_the_rest_of_an_epoch_of_steps_has_the_order_of_the_ranks_that_saved_them() -> None:
    alone, two = BatchSizes(2, 1, 1), BatchSizes(2, 1, 2)
    order = SampleOrder(True, 13, True, 42, samples=13)
    start = start_after(in_steps(2, two).under(alone, order, 7), alone, order, 7)
    assert (start.position, start.order) == (Position(0, 8, 8), replace(order, parts=(12,)))
    rounded = replace(order, length=12)
    start = start_after(in_steps(4, alone).under(two, rounded, 3), two, rounded, 3)
    assert (start.position, start.order) == (Position(0, 8, 8), order)


@pytest.mark.parametrize("samples", [0, 68, 69])
def test_data_of_another_size_is_refused_though_its_length_is_rounded(samples: int) -> None:
    now = replace(ODD, length=64, samples=samples)
    with pytest.raises(OptionError, match="do not fit"):
        start_after((HALFWAY, DP2, ODD), BatchSizes(2, 1, 4), now, 8)


def test_unshuffled_data_may_have_grown() -> None:
    ordered = SampleOrder(True, 64, False, 0)
    assert start_after((HALFWAY, DP2, ordered), DP2, replace(ordered, length=80), 10) == Start(HALFWAY, 3)


@given(
    old=st.builds(BatchSizes, st.integers(1, 6), st.integers(1, 3), st.integers(1, 4)),
    new=st.builds(BatchSizes, st.integers(1, 6), st.integers(1, 3), st.integers(1, 4)),
    steps=st.integers(1, 10),
)
def test_no_sample_is_repeated_or_lost(old: BatchSizes, new: BatchSizes, steps: int) -> None:
    trained = steps * old.per_step
    order = SampleOrder(True, trained + 1000, True, 1)
    saved = (Position(0, trained, trained), old, order)
    if trained % new.per_pass:
        with pytest.raises(OptionError):
            start_after(saved, new, order, None)
    else:
        assert start_after(saved, new, order, None).passes * new.per_pass == trained


@pytest.mark.parametrize(
    ("bounded", "done", "left"), [(True, False, sys.maxsize), (False, False, 2), (True, True, 0), (False, True, 0)]
)
def test_the_loop_makes_the_epochs_that_are_left(bounded: bool, done: bool, left: int) -> None:
    assert epochs_left(Start(HALFWAY, 3), 3, bounded, done) == left
