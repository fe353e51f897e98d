"""A training loop without PaddleFormers' Trainer: saved under one layout, loaded under another, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddleformers_fc
from paddleformers_fc.errors import FlexError, MappingError, MismatchError, OptionError
from paddleformers_fc.execute.digest import TensorDigest
from tests.harness.tiny import DP2, SD2V1, SD2V2, SINGLE, TP2, MatrixLayout
from tests.trainer.loop_jobs import fused_rules
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

AXES = ("dp", "tp", "pp", "sharding", "ep", "sep", "cp")


def hop(
    ranks: ForkServer, job: str, layout: MatrixLayout, place: Path, source: Path | None = None, **settings: Any
) -> Path:
    """Run a job that has to succeed, and return the checkpoint that it saves."""
    refused = outcomes(ranks, job, layout, place, source, **settings)
    assert not any(refused), refused
    return place / "checkpoint-3"


def outcomes(
    ranks: ForkServer, job: str, layout: MatrixLayout, place: Path, source: Path | None, **settings: Any
) -> list[list[str]]:
    given: Mapping[str, Any] = {"layout": layout.to_json(), "output_dir": str(place / "run"), **settings}
    paths = {"target": str(place / "checkpoint-3"), "source": None if source is None else str(source)}
    return list(ranks.run(f"tests.trainer.loop_jobs:{job}", layout.nproc, {**given, **paths}).values)


def digests(checkpoint: Path) -> list[TensorDigest]:
    return list(canonical_digests(checkpoint))


def test_a_hand_written_loop_resumes_bitwise_on_one_and_two_ranks(ranks: ForkServer, tmp_path: Path) -> None:
    single = hop(ranks, "run", SINGLE, tmp_path / "single")
    split = hop(ranks, "run", TP2, tmp_path / "split", single)
    again = hop(ranks, "run", SINGLE, tmp_path / "again", split)
    expected = digests(single)
    assert {one.role for one in expected} == {"model_state", "optimizer_state"}
    assert digests(split) == digests(again) == expected
    for checkpoint, tp in ((again, 1), (split, 2)):
        job = paddleformers_fc.open(checkpoint).metadata.job
        assert job is not None
        assert (job.step, job.consumed_samples) == (3, 6)
        assert job.parallel == dict.fromkeys(AXES, 1) | {"tp": tp}


def test_a_load_makes_four_exchanges(ranks: ForkServer, tmp_path: Path) -> None:
    saved = hop(ranks, "run_plain", SINGLE, tmp_path / "saved", kind="mlp")
    for exchanges in outcomes(ranks, "list_exchanges", DP2, tmp_path / "again", saved):
        assert exchanges == ["beginning a load", "opening checkpoint-3", "planning", "reading checkpoint-3"]


def test_a_checkpoint_by_name_loads_with_a_family_under_another_tensor_parallel_degree(
    ranks: ForkServer, tmp_path: Path
) -> None:
    single = hop(ranks, "run", SINGLE, tmp_path / "single", model_type="ernie4_5_moe")
    named = hop(ranks, "run_bare", TP2, tmp_path / "named", single, saves_by_name=True)
    again = hop(ranks, "run_bare", SINGLE, tmp_path / "again", named)
    fused = {"model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.up_gate_proj.weight"}
    assert fused <= {one.name for one in digests(named)}
    assert digests(again) == digests(single)


@pytest.mark.parametrize("kind", ["mlp", "staged"])
def test_layers_of_paddle_resume_by_name_under_data_parallelism_sharding_and_stages(
    ranks: ForkServer, tmp_path: Path, kind: str
) -> None:
    layouts = {"mlp": [SINGLE, SD2V1, SD2V2, DP2], "staged": [SINGLE, DP2, SINGLE]}[kind]
    checkpoints: list[Path] = []
    for number, layout in enumerate(layouts):
        source = checkpoints[-1] if checkpoints else None
        checkpoints.append(hop(ranks, "run_plain", layout, tmp_path / f"{number}", source, kind=kind))
    expected = digests(checkpoints[0])
    assert {one.role for one in expected} == {"model_state", "optimizer_state"}
    for one in checkpoints[1:]:
        assert digests(one) == expected
    assert paddleformers_fc.open(checkpoints[-1]).verify().passed


def test_another_tensor_parallel_degree_is_refused_by_name_on_all_ranks(ranks: ForkServer, tmp_path: Path) -> None:
    single = hop(ranks, "run_plain", SINGLE, tmp_path / "single", kind="fused")
    split = hop(ranks, "run_plain", TP2, tmp_path / "split", kind="fused")
    again = hop(ranks, "run_plain", TP2, tmp_path / "again", split, kind="fused")
    assert digests(again) == digests(split)
    to_one = outcomes(ranks, "run_plain", SINGLE, tmp_path / "to_one", split, kind="fused")
    to_two = outcomes(ranks, "run_plain", TP2, tmp_path / "to_two", single, kind="fused")
    assert len(to_two) == 2
    assert to_two[0] == to_two[1]
    for refused, before, now in ((to_one[0], "1 x 2", "1 x 1"), (to_two[0], "1 x 1", "1 x 2")):
        assert refused[0] == "MismatchError"
        assert f"gate_up.weight: stored in {before} shards, the model has {now}" in refused
        assert all(word in refused[-1] for word in ("family=", "mapping=", "aoa_config="))
    assert not (tmp_path / "to_one/checkpoint-3").exists()


FUSED = "gate_up.weight -> gate_up.weight, fused_ffn"
WHOLE = "down.weight -> down.weight"


@pytest.mark.parametrize(
    "settings",
    [{"load": {"aoa_config": {"aoa_statements": [FUSED, WHOLE]}}}, {"rounds": 0}],
    ids=["aoa_config", "mapping"],
)
def test_statements_and_rules_carry_a_fused_layer_to_another_tensor_parallel_degree(
    ranks: ForkServer, tmp_path: Path, settings: dict[str, Any]
) -> None:
    single = hop(ranks, "run_plain", SINGLE, tmp_path / "single", kind="fused")
    rounds = {"rounds": 1} if "rounds" in settings else settings
    split = hop(ranks, "run_plain", TP2, tmp_path / "split", single, kind="fused", **rounds)
    back = {"rounds": 2} if "rounds" in settings else settings
    again = hop(ranks, "run_plain", SINGLE, tmp_path / "again", split, kind="fused", **back)
    assert digests(again) == digests(single)
    before, after = paddleformers_fc.open(single), paddleformers_fc.open(split)
    for suffix, role in (("", "model_state"), (".moment1_0", "optimizer_state")):
        alone, held = (one.read(f"gate_up.weight{suffix}", role=role) for one in (before, after))
        interleaved = np.concatenate([np.split(alone, 4, axis=1)[quarter] for quarter in (0, 2, 1, 3)], axis=1)
        np.testing.assert_array_equal(held, interleaved)


def test_a_statement_about_one_tensor_excuses_no_other(ranks: ForkServer, tmp_path: Path) -> None:
    split = hop(ranks, "run_plain", TP2, tmp_path / "split", kind="fused")
    given = {"load": {"aoa_config": {"aoa_statements": [WHOLE]}}}
    (refused,) = outcomes(ranks, "run_plain", SINGLE, tmp_path / "to_one", split, kind="fused", **given)
    assert "gate_up.weight: stored in 1 x 2 shards, the model has 1 x 1" in refused
    assert not any(line.startswith("down.weight") for line in refused)


INVALID_SAVES: list[dict[str, Any]] = [
    {"step": -1},
    {"step": "4"},
    {"step": 1 << 53},
    {"consumed_samples": 2.0},
    {"parallel": "tp2"},
    {"parallel": {"tp": 0}},
    {"family": 5},
    {"config": "config.json"},
    {"mapping": {}},
    {"directory": 5},
    {"optimizer": "adam"},
]


def test_an_invalid_argument_of_a_save_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    import paddle

    given: dict[str, Any] = {"directory": tmp_path / "checkpoint-4", "model": paddle.nn.Linear(2, 2)}
    for invalid in INVALID_SAVES:
        ((name, value),) = invalid.items()
        with pytest.raises(OptionError, match=re.escape(f"Invalid argument: {name}={value!r}.")) as raised:
            paddleformers_fc.save(**given | invalid)
        assert raised.value.next_step
    assert not list(tmp_path.iterdir())


def test_arguments_that_are_invalid_on_one_rank_are_refused_alike_on_all(ranks: ForkServer, tmp_path: Path) -> None:
    first, last = ranks.run("tests.trainer.loop_jobs:refuse_on_the_last_rank", 2, {"output_dir": str(tmp_path)}).values
    assert first == last
    assert all("rank 1" in text for text in first.values()), first
    assert all("\n  next: " in text for text in first.values()), first


UNUSABLE: dict[str, Any] = {
    "a class": lambda: __import__("paddle").nn.Linear,
    "a layer without tensors": lambda: __import__("paddle").nn.Layer(),
    "a state dict without tensors": dict,
    "a state dict whose keys are numbers": lambda: {1: __import__("paddle").zeros([2])},
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_model_without_named_tensors_is_not_saved(tmp_path: Path, kind: str) -> None:
    with pytest.raises((OptionError, MismatchError)) as raised:
        paddleformers_fc.save(tmp_path / "checkpoint-4", UNUSABLE[kind]())
    assert raised.value.next_step
    assert not list(tmp_path.iterdir())


def test_a_file_is_not_replaced_by_a_checkpoint(tmp_path: Path) -> None:
    import paddle

    (tmp_path / "checkpoint-4").write_text("a note")
    with pytest.raises(OptionError, match="is a file"):
        paddleformers_fc.save(tmp_path / "checkpoint-4", paddle.nn.Linear(2, 2))
    assert (tmp_path / "checkpoint-4").read_text() == "a note"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("path", [".", "..", "/", "file:///"])
def test_a_directory_that_cannot_be_renamed_is_no_place_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    import paddle

    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match="has no name") as raised:
        paddleformers_fc.save(path, paddle.nn.Linear(2, 2))
    assert raised.value.next_step
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_numbers_without_axes_is_verified_and_loaded(tmp_path: Path) -> None:
    import paddle

    paddleformers_fc.save(tmp_path / "checkpoint-4", {"scale": paddle.to_tensor(3.0)})
    assert paddleformers_fc.open(tmp_path / "checkpoint-4").verify().passed
    loaded = {"scale": paddle.to_tensor(0.0)}
    paddleformers_fc.load(tmp_path / "checkpoint-4", loaded)
    assert loaded["scale"].item() == 3.0


@pytest.mark.parametrize("path", ["a\0b", Path("a\0b"), "\ud800", "~a\0b"], ids=repr)
def test_a_path_that_no_file_system_has_is_refused_by_saves_and_loads(path: str | Path) -> None:
    import paddle

    for call in (paddleformers_fc.save, paddleformers_fc.load):
        with pytest.raises(OptionError, match="Invalid path") as raised:
            call(path, paddle.nn.Linear(2, 2))
        assert raised.value.next_step


def test_the_path_of_an_object_is_the_one_that_it_states(tmp_path: Path) -> None:
    import paddle

    class Stated:
        def __fspath__(self) -> str:
            return str(tmp_path / "checkpoint-4")

    layer = paddle.nn.Linear(2, 2)
    paddleformers_fc.save(Stated(), layer)
    assert paddleformers_fc.open(Stated()).metadata.path == str(tmp_path / "checkpoint-4")
    paddleformers_fc.load(Stated(), layer)


def test_a_configuration_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "llama", "function": print}
    with pytest.raises(OptionError, match="config") as raised:
        paddleformers_fc.save(tmp_path / "checkpoint-4", {}, config=config)
    assert raised.value.next_step


INVALID_LOADS: dict[str, dict[str, Any]] = {
    "Invalid argument: directory=None.": {"directory": None},
    "Invalid argument: threads='4'.": {"threads": "4"},
    "Invalid argument: threads=1000000.": {"threads": 10**6},
    "Invalid argument: optimizer='adam'.": {"optimizer": "adam"},
    "Invalid argument: allow_casts='yes'.": {"allow_casts": "yes"},
    "Unknown verification level 'quick'.": {"verify": "quick"},
    "aoa_config is not a mapping.": {"aoa_config": "a -> b"},
}


@pytest.mark.parametrize("problem", INVALID_LOADS)
def test_an_invalid_argument_of_a_load_is_refused_before_the_checkpoint_is_opened(tmp_path: Path, problem: str) -> None:
    import paddle

    given: dict[str, Any] = {"directory": tmp_path / "missing", "model": paddle.nn.Linear(2, 2)}
    with pytest.raises(FlexError) as raised:
        paddleformers_fc.load(**given | INVALID_LOADS[problem])
    assert raised.value.what == problem
    assert raised.value.next_step


@pytest.mark.parametrize(
    ("problem", "call"),
    [
        ("model=5", lambda there: paddleformers_fc.load_open_weights(5, there)),
        ("trainer=5", lambda there: paddleformers_fc.save_ema(5, there)),
        ("trainer=5", lambda _: paddleformers_fc.averaged_weights(5).__enter__()),
    ],
)
def test_an_object_of_another_class_is_refused_by_functions_of_a_trainer(
    tmp_path: Path, problem: str, call: Callable[[Path], object]
) -> None:
    with pytest.raises(OptionError, match=f"Invalid argument: {problem}"):
        call(tmp_path / "there")


def test_a_checkpoint_without_a_family_is_refused_where_a_family_is_required(tmp_path: Path) -> None:
    import paddle

    place = tmp_path / "checkpoint-1"
    paddleformers_fc.save(place, paddle.nn.Linear(2, 2), step=1)
    checkpoint = paddleformers_fc.open(place)
    assert checkpoint.metadata.job is not None
    assert checkpoint.metadata.job.parallel == dict.fromkeys(AXES, 1)
    with pytest.raises(MappingError, match="was saved without a family") as raised:
        checkpoint.plan("tp=2")
    assert "paddleformers_fc.load" in raised.value.next_step


def test_a_family_and_rules_are_refused_together(tmp_path: Path) -> None:
    import paddle

    place = tmp_path / "checkpoint-1"
    with pytest.raises(OptionError, match="family and mapping both define the rules of a model"):
        paddleformers_fc.save(place, paddle.nn.Linear(2, 2), family="llama", mapping=fused_rules(1, 1))
    assert not place.exists()


def test_states_that_a_checkpoint_would_not_contain_or_not_replace_are_refused(
    ranks: ForkServer, tmp_path: Path
) -> None:
    (found,) = ranks.run("tests.trainer.loop_jobs:refuse_states", 1, {"output_dir": str(tmp_path)}).values
    refused = {
        "stale": "0.bias (beta1_pow_acc_0, beta2_pow_acc_0, moment1_0, moment2_0)",
        "fresh": "missing: optimizer_state of AdamW",
        "contains": "inner_optimizer: paddle.optimizer.adamw.AdamW",
        "adds": "average",
        "keeps": "state: [4, 2]",
        "waits": "16 states of the optimizer wait for the first step",
        "waits in part": "8 states of the optimizer wait for the first step",
    }
    assert {case for case, text in found.items() if text} == set(refused)
    for case, text in refused.items():
        assert text in found[case], case
