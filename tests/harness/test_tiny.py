"""The tiny models and their data are what other tests take them for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.harness import tiny
from tests.harness.on_ranks import on_ranks


@pytest.mark.parametrize("extra", [0, 1])
def test_samples_are_the_same_every_time_without_the_padding_token_and_labels_are_the_next_tokens(extra: int) -> None:
    samples = [tiny.Samples(extra)[index] for index in range(tiny.SAMPLES)]
    again = [tiny.Samples(extra)[index] for index in range(tiny.SAMPLES)]
    rows = {sample["input_ids"].tobytes() for sample in samples}
    assert [sample["input_ids"].tobytes() for sample in again] == [sample["input_ids"].tobytes() for sample in samples]
    assert len(rows) > tiny.SAMPLES // 2
    for sample in samples:
        np.testing.assert_array_equal(sample["input_ids"][1:], sample["labels"][:-1])
        for field in ("input_ids", "labels"):
            assert sample[field].shape == (tiny.SEQUENCE + extra,)
            assert sample[field].min() > 0
            assert sample[field].max() < tiny.VOCABULARY


def test_samples_with_images_have_the_tokens_and_the_patches_of_one_image() -> None:
    samples = [tiny.ImageSamples()[index] for index in range(tiny.SAMPLES)]
    for sample in samples:
        begin = len(tiny.IMAGE)
        np.testing.assert_array_equal(sample["input_ids"][:begin], tiny.IMAGE)
        np.testing.assert_array_equal(sample["input_ids"][1:], sample["labels"][:-1])
        assert not set(sample["input_ids"][begin:]) & {0, *tiny.IMAGE}
    batch = tiny.collate(samples[:2])
    assert batch["image_grid_thw"].tolist() == [[1, 4, 4]] * 2
    assert batch["pixel_values"].shape == [2 * 16, 96]


def test_a_weight_depends_on_its_name_alone() -> None:
    first, second = tiny.weight("a.weight", [3, 4]), tiny.weight("b.weight", [3, 4])
    np.testing.assert_array_equal(first, tiny.weight("a.weight", [3, 4]))
    assert not np.array_equal(first, second)
    assert abs(tiny.weight("norm.weight", [64]).mean() - 1) < 0.1


@on_ranks(1)
def test_arguments_and_trainer_have_the_classes_that_are_asked_for(tmp_path: Path) -> None:
    from paddleformers.trainer import Trainer, TrainingArguments

    arguments, trainer = (type(f"My{kind.__name__}", (kind,), {}) for kind in (TrainingArguments, Trainer))
    args = tiny.training_arguments(tiny.SINGLE, str(tmp_path), cls=arguments)
    assert type(args) is arguments
    assert type(tiny.trainer(tiny.build("llama", tiny.SINGLE, args), args, cls=trainer)) is trainer
