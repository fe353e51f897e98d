"""The tiny models and their data are what other tests take them for."""

from __future__ import annotations

import numpy as np
import pytest

from tests.harness import tiny
from verification.forkserver import ForkServer


@pytest.mark.parametrize("extra", [0, 1])
def test_no_sample_holds_the_padding_token(extra: int) -> None:
    samples = [tiny.Samples(extra)[index] for index in range(tiny.SAMPLES)]
    for sample in samples:
        for field in ("input_ids", "labels"):
            assert sample[field].shape == (tiny.SEQUENCE + extra,)
            assert sample[field].min() > 0
            assert sample[field].max() < tiny.VOCABULARY


def test_samples_are_the_same_every_time_and_differ_from_each_other() -> None:
    once, again = (np.stack([tiny.Samples()[index]["input_ids"] for index in range(tiny.SAMPLES)]) for _ in range(2))
    np.testing.assert_array_equal(once, again)
    assert len({row.tobytes() for row in once}) > tiny.SAMPLES // 2


def test_labels_are_the_next_tokens() -> None:
    sample = tiny.Samples()[3]
    np.testing.assert_array_equal(sample["input_ids"][1:], sample["labels"][:-1])


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


def test_a_job_receives_its_arguments_class_and_trainer_class(
    ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kwargs = {"output_dir": str(tmp_path_factory.mktemp("classes"))}
    assert ranks.run("tests.harness.jobs_tiny:classes", 1, kwargs).values == (["MyArguments", "MyTrainer"],)
