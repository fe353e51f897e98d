"""What differs between the model and run that saved a checkpoint and those that resume it, through the Trainer."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.cli.training import COLOUR
from paddleformers_fc.errors import FlexError, OptionError
from paddleformers_fc.families.changes import Change
from paddleformers_fc.trainer.options import FlexFields
from paddleformers_fc.trainer.run_changes import changes_text, check_same_samples
from tests.harness.on_ranks import on_ranks
from tests.harness.tiny import DP2, PP2, SD2S2, SD2S3, SD2V2, SINGLE, MatrixLayout
from tests.trainer.jobs import frozen_trainer, logged, refused, trained
from verification.digests import canonical_digests

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
        assert "rope_thta: is rope_theta meant?" in found["text"]
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
