"""A resume under other settings, in another precision or with other names than the saved run had."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest

import paddleformers_fc
from paddleformers_fc.cli.training import COLOUR
from paddleformers_fc.errors import FlexError, MismatchError, OptionError
from paddleformers_fc.families.changes import Change
from paddleformers_fc.trainer.options import FlexFields
from paddleformers_fc.trainer.run_changes import changes_text, check_same_samples
from tests.harness import tiny
from tests.harness.on_ranks import job_on_ranks, on_ranks, run_on_ranks
from tests.harness.tiny import DP2, PP2, SD2S2, SD2S3, SD2V2, SINGLE, TP2, MatrixLayout
from tests.trainer.jobs import (
    frozen_trainer,
    logged,
    refused,
    resume_and_save_again,
    run,
    run_with_frozen,
    trained,
)
from tests.trainer.test_trainer import bf16, settings
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

TWO = {"max_steps": 2, "save_steps": 2}
DIFFERS = "This run differs from the run that saved step"


def resumed(layout: MatrixLayout, directory: Path, model: dict[str, Any] | None = None, **arguments: Any) -> str:
    """The log of a run in ``now`` that resumes the checkpoint of the one in ``saved``."""
    with logged() as lines:
        trained(layout, directory / "now", {**TWO, **arguments}, model=model, resume=directory / "saved/checkpoint-2")
    return COLOUR.sub("", "\n\n".join(lines))


def table(log: str) -> dict[str, tuple[str, str]]:
    """The rows of the warning in a log, by key."""
    lines = log.partition(DIFFERS)[2].splitlines()[2:]
    rows = (re.split("  +", line.strip()) for line in itertools.takewhile(lambda line: line.startswith("  "), lines))
    return {key: (saved, now) for key, saved, now in rows}


# A different layout is not a change: test_ema.py.
@on_ranks(layout=DP2)
def test_changes_of_the_meaning_of_weights_are_rejected_or_listed(tmp_path: Path) -> None:
    is_first = trained(DP2, tmp_path / "saved", TWO).args.process_index == 0
    for starts_anew in (False, True):
        new = {"ignore_load_lr_and_optim": starts_anew}
        given = {"layout": DP2, "output_dir": tmp_path / "refused", "arguments": {**TWO, **new}}
        found = refused(str(tmp_path / "saved/checkpoint-2"), **given, model={"hidden_act": "gelu"})
        assert (found["error"], found["changed"]) == ("MismatchError", False)
        assert "flex_allow_config_changes: [hidden_act]" in found["text"]
        given["arguments"] = {**TWO, **new, "flex_allow_config_changes": ["rope_thta"]}
        found = refused(str(tmp_path / "saved/checkpoint-2"), **given)
        assert (found["error"], found["changed"]) == ("OptionError", False)
        assert "rope_thta: did you mean rope_theta?" in found["text"]
        model = {"rope_theta": 20000.0, "attention_dropout": 0.1}
        log = resumed(DP2, tmp_path, model, flex_allow_config_changes=["rope_theta"], **new)
        rows = {"rope_theta": ("10000.0", "20000.0"), "attention_dropout": ("0.0", "0.1")}
        assert (table(log), log.count(DIFFERS)) == ((rows, 1) if is_first else ({}, 0))


@on_ranks(layout=SINGLE)
def test_changed_arguments_of_a_run_are_one_table(tmp_path: Path) -> None:
    trained(SINGLE, tmp_path / "saved", TWO)
    changed = {
        "adam_beta1": (0.9, 0.8),
        "adam_beta2": (0.999, 0.95),
        "adam_epsilon": (1e-08, 1e-06),
        "weight_decay": (0.0, 0.1),
        "max_grad_norm": (1.0, 0.5),
        "learning_rate": (0.01, 0.001),
        "lr_scheduler_type": ("constant", "cosine"),
        "warmup_steps": (0, 1),
        "min_lr": (0.0, 0.0001),
        "max_steps": (2, 4),
        "per_device_train_batch_size": (8, 4),
    }
    log = resumed(SINGLE, tmp_path, **{name: now for name, (_, now) in changed.items()})
    expected = {name: (str(was), str(now)) for name, (was, now) in changed.items()}
    assert table(log) == {**expected, "samples per step": ("8", "4")}
    assert log.count(DIFFERS) == 1
    assert "number of samples per step has changed" in log
    # The first step uses the learning rate of the new schedule.
    corpus = {"seed": 43, "ignore_data_skip": True}
    log = resumed(SINGLE, tmp_path, max_steps=3, save_steps=3, learning_rate=0.0, **corpus)
    assert table(log) == {"seed": ("42", "43"), "max_steps": ("2", "3"), "learning_rate": ("0.01", "0.0")}
    before, after = (
        {one.name: one.md5 for one in canonical_digests(tmp_path / directory) if one.role == "model_state"}
        for directory in ("saved/checkpoint-2", "now/checkpoint-3")
    )
    assert before == after


@pytest.mark.parametrize("key", ["seed", "dataloader_num_workers", "train_dataset_sizes", "mix_strategy", "packing"])
def test_a_stream_that_another_key_may_reorder_has_advice(key: str) -> None:
    changed = [Change("learning_rate", "0.1", "0.2"), Change(key, "1", "2")]
    assert f"If the order of the stream depends on {key}, some samples are repeated" in changes_text(
        3, changed, streams=True
    )
    assert "stream" not in changes_text(3, changed) + changes_text(3, changed[:1], streams=True)


PACKED = {"packing": True, "max_seq_len": 192, "random_shuffle": True, "seed": 23, "dataset_type": "iterator"}
UNPACKED = {**PACKED, "packing": False}


@pytest.mark.parametrize(
    ("saved", "now", "fault"),
    [
        (PACKED, {"max_seq_len": 128}, "max_seq_len was 192 and is 128, so that samples are packed differently"),
        (PACKED, {"packing": False}, "packing was true and is false, so that samples are packed differently"),
        (UNPACKED, {"seed": 24}, "seed was 23 and is 24, which shuffles the data differently"),
        (
            UNPACKED,
            {"random_shuffle": False},
            "random_shuffle was true and is false, which orders the data differently",
        ),
        (UNPACKED, {"max_seq_len": 128}, ""),
        ({**PACKED, "random_shuffle": False}, {"seed": 24}, ""),
        (PACKED, {"train_dataset_path": "elsewhere"}, ""),
        ({**PACKED, "dataset_type": "pretrain"}, {"max_seq_len": 128}, ""),
        ({"seed": 23}, {"seed": 24}, ""),
    ],
)
def test_only_settings_that_make_other_samples_are_refused(
    saved: dict[str, Any], now: dict[str, Any], fault: str
) -> None:
    check_same_samples({}, {**saved, **now}, "out/checkpoint-3")
    if not fault:
        check_same_samples(saved, {**saved, **now}, "out/checkpoint-3")
        return
    with pytest.raises(OptionError) as caught:
        check_same_samples(saved, {**saved, **now}, "out/checkpoint-3")
    assert caught.value.evidence == (fault,)
    assert "ignore_data_skip: true" in caught.value.next_step


@pytest.mark.parametrize("layout", [SD2V2, PP2, SD2S2, SD2S3], ids=lambda layout: layout.name)
@on_ranks(2)
def test_an_unfrozen_parameter_is_reported_and_a_frozen_one_with_states_refused(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    name, warning = "model.layers.1.mlp.down_proj.weight", "1 trained parameter has no optimizer states"

    def warnings(target: str, frozen: list[str], resume: str | None, steps: int) -> list[str]:
        arguments = {"max_steps": steps, "save_steps": steps}
        trainer = frozen_trainer(frozen, layout=layout, output_dir=tmp_path / target, arguments=arguments)
        with logged() as lines:
            trainer.train(resume_from_checkpoint=resume and str(tmp_path / resume))
        return [line for line in lines if warning in line]

    warnings("frozen", [name], None, 2)
    assert warnings("same", [name], "frozen/checkpoint-2", 3) == []
    reported = warnings("unfrozen", [], "frozen/checkpoint-2", 3)
    assert [f"  - {name}" in line for line in reported] == [True] * (os.environ["PADDLE_TRAINER_ID"] == "0")
    with pytest.raises(FlexError, match=name):
        warnings("again", [name], "unfrozen/checkpoint-3", 4)


@pytest.mark.parametrize("value", ["rope_theta", [1], [""], None])
def test_the_option_is_a_list_of_keys(value: Any) -> None:
    with pytest.raises(OptionError, match="flex_allow_config_changes"):
        FlexFields(flex_allow_config_changes=value)


# ---- Another precision.

HALF = bf16(SINGLE)


def given(layout: MatrixLayout, output_dir: Path, resume: Path | None = None, **arguments: Any) -> dict[str, Any]:
    """The keyword arguments of a job of two steps."""
    return settings(layout, output_dir, resume, max_steps=2, **arguments)


@pytest.fixture(scope="module")
def full(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint."""
    directory = tmp_path_factory.mktemp("full")
    run_on_ranks(ranks, 1, run, **given(SINGLE, directory, save_steps=2))
    return directory / "checkpoint-2"


def tensors(checkpoint: Path) -> dict[tuple[str, str], np.ndarray[Any, Any]]:
    opened = paddleformers_fc.open(checkpoint)
    return {(one.role, one.name): opened.read(one.name, role=one.role) for one in opened.tensors()}


def same(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def test_a_bfloat16_run_fills_master_weights_and_rounds_as_paddle(
    ranks: ForkServer, full: Path, tmp_path: Path
) -> None:
    for found in run_on_ranks(ranks, 2, refused, **given(bf16(SD2V2), tmp_path / "refused", full)):
        assert (found["error"], found["changed"]) == ("MismatchError", False)
        assert "set flex_allow_casts: true" in found["text"]
    half = given(bf16(SD2V2), tmp_path / "half", full, flex_allow_casts=True)
    result = job_on_ranks(ranks.run, 2, resume_and_save_again, **half)
    before, after = tensors(full), tensors(tmp_path / "half" / "checkpoint-2")
    weights = {name: one for (role, name), one in before.items() if role == "model_state"}
    for name, weight in weights.items():
        rounded = after["model_state", name]
        assert same(rounded, weight.astype(ml_dtypes.bfloat16))
        assert same(rounded, paddle.to_tensor(weight).astype("bfloat16").numpy().view(ml_dtypes.bfloat16))
        assert same(after["master_weight", f"{name}.w_0"], weight)
    states = {key: one for key, one in before.items() if key[0] == "optimizer_state"}
    assert all(same(after[key], one) for key, one in states.items())
    assert len(after) == 2 * len(weights) + len(states)
    log = result.logs[0].read_text(errors="replace")
    assert "precision changed on this rank: master_weight from model_state float32 to float32: " in log
    assert "model_state float32 to bfloat16: " in log
    # Back again without loss, because weights are read from master weights.
    back = given(TP2, tmp_path / "back", tmp_path / "half" / "checkpoint-2", flex_allow_casts=True)
    result = job_on_ranks(ranks.run, 2, resume_and_save_again, **back)
    assert list(canonical_digests(tmp_path / "back" / "checkpoint-2")) == list(canonical_digests(full))
    assert "model_state from master_weight float32 to float32: " in result.logs[0].read_text(errors="replace")


def test_a_master_weight_without_stored_states_is_read_from_its_weight(ranks: ForkServer, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    run_on_ranks(ranks, 1, run_with_frozen, **given(SINGLE, tmp_path / "full", save_steps=2), frozen=[name])
    checkpoint = tmp_path / "full" / "checkpoint-2"
    before = tensors(checkpoint)
    assert ("optimizer_state", f"{name}.moment1_0") not in before
    half = given(HALF, tmp_path / "half", checkpoint, flex_allow_casts=True)
    result = job_on_ranks(ranks.run, 1, resume_and_save_again, **half)
    after = tensors(tmp_path / "half" / "checkpoint-2")
    assert same(after["master_weight", f"{name}.w_0"], before["model_state", name])
    assert not after["optimizer_state", f"{name}.moment1_0"].any()
    assert "1 trained parameter has no optimizer states" in result.logs[0].read_text()


@on_ranks(layout=SINGLE)
def test_a_script_loads_in_another_precision_on_request(layout: MatrixLayout, tmp_path: Path) -> None:
    args = tiny.training_arguments(layout, str(tmp_path / "out"))

    def made(layout: MatrixLayout) -> tuple[Any, Any]:
        model = tiny.build("llama", layout, args)
        return model, paddle.optimizer.AdamW(parameters=model.parameters(), multi_precision=layout.bf16)

    def masters(model: Any, optimizer: Any) -> dict[str, bytes]:
        held = {name: one.local_tensor.name for name, one in model.sharded_state_dict().items()}
        return {name: optimizer._master_weights[own].numpy().tobytes() for name, own in held.items()}

    half, optimizer = made(HALF)
    block = paddle.base.framework.default_main_program().global_block()
    optimizer._create_accumulators(block, half.parameters())
    for master in optimizer._master_weights.values():
        master.set_value(master + 1e-4)  # Precision beyond bfloat16.
    first, second = tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"
    paddleformers_fc.save(first, half, optimizer, step=1)
    expected = masters(half, optimizer)
    full, other = made(layout)
    with pytest.raises(MismatchError) as refused:
        paddleformers_fc.load(first, full, other)
    assert "DTYPE: stored and target dtypes differ" in refused.value.render()
    report = paddleformers_fc.load(first, full, other, allow_casts=True)
    weights = {name: one.local_tensor.numpy().tobytes() for name, one in full.sharded_state_dict().items()}
    assert weights == expected
    assert list(report.casts) == [f"model_state from master_weight float32 to float32: {len(weights)} tensors"]
    # A bfloat16 model gets the full precision of its master weights from weights alone.
    paddleformers_fc.save(second, full, step=2)
    third, last = made(HALF)
    paddleformers_fc.load(second, third, last, allow_casts=True)
    assert masters(third, last) == expected


MORE_LAYERS = [
    statement
    for name in (
        *("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        *(f"self_attn.{part}_proj" for part in "qkvo"),
    )
    for statement in (
        f"model.layers.1.{name}.weight -> model.layers.2.{name}.weight",
        f"_ -> model.layers.1.{name}.weight",
    )
]
"""A new layer before the second of two."""


def all_bits(model: Any, optimizer: Any) -> dict[str, str]:
    """The bytes of every tensor and state, as hex."""
    from paddleformers_fc.trainer import live_roles

    roles = live_roles.model_roles(model) if optimizer is None else live_roles.LiveModel(model, optimizer).roles()
    tensors = [(name, one.local_tensor) for weights in roles.values() for name, one in weights.items()]
    return {name: tensor.astype("float32").numpy().tobytes().hex() for name, tensor in tensors}


@pytest.mark.parametrize("layout", [TP2, HALF], ids=["tp2", "bfloat16"])
@on_ranks()
def test_states_follow_their_parameters_through_statements_that_rename_them(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    """From a model of two layers into one of three."""
    steps = {"max_steps": 2, "save_steps": 2}
    saved = trained(layout, tmp_path / "few", steps, model={"num_hidden_layers": 2})
    resumed = {"model": {"num_hidden_layers": 3}, "resume": tmp_path / "few/checkpoint-2"}
    more = trained(layout, tmp_path / "more", {**steps, "aoa_config": {"aoa_statements": MORE_LAYERS}}, **resumed)
    held, found = (all_bits(one.model, one.optimizer) for one in (saved, more))
    stored = {name: name.replace("layers.2.", "layers.1.") for name in found if "layers.1." not in name}
    assert [new for new, name in stored.items() if found[new] != held[name]] == []
    assert sorted({*held} - {*stored.values()}) == []
    assert [name for name in found if "layers.1." in name and not name.endswith(".weight")] == []


@on_ranks(layout=SINGLE)
def test_master_weights_are_read_from_renamed_weights_without_stored_states(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    import paddle

    import paddleformers_fc

    args = tiny.training_arguments(layout, str(tmp_path / "out"))
    few = tiny.build("llama", layout, args, num_hidden_layers=2)
    paddleformers_fc.save(tmp_path / "checkpoint-1", few, step=1)
    more = tiny.build("llama", HALF, args, num_hidden_layers=3)
    optimizer = paddle.optimizer.AdamW(parameters=more.parameters(), multi_precision=True)
    given = {"aoa_config": {"aoa_statements": MORE_LAYERS}, "allow_casts": True}
    paddleformers_fc.load(tmp_path / "checkpoint-1", more, optimizer, **given)
    held, found = all_bits(few, None), all_bits(more, optimizer)
    names = {name: name.replace("layers.2.", "layers.1.") for name in more.sharded_state_dict() if ".1." not in name}
    assert [name for name, stored in names.items() if found.get(f"{name}.w_0") != held[stored]] == []
