"""The tiny models and their data are what other tests take them for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from paddleformers_fc.cpu_runtime.forkserver import ForkServer
from tests.harness import tiny

HEADS = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)


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


def test_a_weight_depends_on_its_name_alone() -> None:
    first, second = tiny.weight("a.weight", [3, 4]), tiny.weight("b.weight", [3, 4])
    np.testing.assert_array_equal(first, tiny.weight("a.weight", [3, 4]))
    assert not np.array_equal(first, second)
    assert abs(tiny.weight("norm.weight", [64]).mean() - 1) < 0.1


def test_query_key_and_value_are_fused_by_key_value_head() -> None:
    fused = tiny.model_weight("x.qkv_proj.weight", [2, 16], HEADS)
    query, key, value = (tiny.weight(f"x.{part}_proj.weight", [2, n]) for part, n in zip("qkv", (8, 4, 4), strict=True))
    expected = [query[:, :4], key[:, :2], value[:, :2], query[:, 4:], key[:, 2:], value[:, 2:]]
    np.testing.assert_array_equal(fused, np.concatenate(expected, axis=1))


@pytest.mark.parametrize("tp", [1, 2])
def test_gate_and_up_are_fused_by_tensor_parallel_rank(tp: int) -> None:
    fused = tiny.model_weight("x.up_gate_proj.weight", [2, 8], HEADS, tp)
    gates, ups = (np.split(tiny.weight(f"x.{part}_proj.weight", [2, 4]), tp, axis=1) for part in ("gate", "up"))
    expected = [part for pair in zip(gates, ups, strict=True) for part in pair]
    np.testing.assert_array_equal(fused, np.concatenate(expected, axis=1))


def test_a_layout_survives_json() -> None:
    assert tiny.layout_from(tiny.PP4VPP2.to_json()) == tiny.PP4VPP2
    assert tiny.TP2SD2V2.data_parallel == 2


def test_tensor_parallel_ranks_hold_the_parts_of_one_model(
    ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kwargs = {"layout": tiny.TP2.to_json(), "output_dir": str(tmp_path_factory.mktemp("tp2"))}
    halves = ranks.run("tests.harness.jobs_tiny:columns_of_the_first_gate", 2, kwargs).values
    whole = tiny.weight("model.layers.0.mlp.gate_proj.weight", [64, 128])
    np.testing.assert_allclose(np.concatenate([np.array(half) for half in halves], axis=1), whole, rtol=1e-6)


def test_a_job_is_told_its_arguments_class_and_trainer_class(
    ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kwargs = {"output_dir": str(tmp_path_factory.mktemp("classes"))}
    assert ranks.run("tests.harness.jobs_tiny:classes", 1, kwargs).values == (["MyArguments", "MyTrainer"],)
