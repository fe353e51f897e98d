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
from paddleformers_fc.trainer.position import changes_text, check_same_samples
from tests.harness.on_ranks import run_on_ranks
from tests.harness.tiny import DP2, EP2, PP2, SD2S2, SD2S3, SD2V2, SINGLE, TP2, MatrixLayout
from tests.trainer.jobs import frozen_trainer, logged
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

JOBS = "tests.trainer.jobs"
DIFFERS = "This run differs from the one that saved step"


def settings(layout: MatrixLayout, output_dir: Path, resume: Path | None = None, **others: Any) -> dict[str, Any]:
    found = {"layout": layout.to_json(), "output_dir": str(output_dir), **others}
    return found if resume is None else {**found, "resume": str(resume)}


def save_two(ranks: ForkServer, output_dir: Path, layout: MatrixLayout, **others: Any) -> Path:
    arguments = {"max_steps": 2, "save_steps": 2, **others.pop("arguments", {})}
    ranks.run(f"{JOBS}:run", layout.nproc, settings(layout, output_dir, arguments=arguments, **others))
    return output_dir / "checkpoint-2"


@pytest.fixture(scope="module")
def saved(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_two(ranks, tmp_path_factory.mktemp("single"), SINGLE)


def table(log: str) -> dict[str, tuple[str, str]]:
    """The rows of the warning in a log, by key."""
    lines = COLOUR.sub("", log).partition(DIFFERS)[2].splitlines()[2:]
    rows = (re.split("  +", line.strip()) for line in itertools.takewhile(lambda line: line.startswith("  "), lines))
    return {key: (saved, now) for key, saved, now in rows}


def test_what_changes_the_meaning_of_weights_is_refused_on_every_rank(
    ranks: ForkServer, saved: Path, tmp_path: Path
) -> None:
    for starts_anew in (False, True):
        arguments = {"max_steps": 3, "ignore_load_lr_and_optim": starts_anew}
        given = settings(PP2, tmp_path, saved, model={"hidden_act": "gelu"}, arguments=arguments)
        for found in ranks.run(f"{JOBS}:refused", 2, given).values:
            assert found["error"] == "MismatchError"
            assert "flex_allow_config_changes: [hidden_act]" in found["text"]
            assert not found["changed"]


@pytest.mark.parametrize("continued", [True, False], ids=["resumed", "weights"])
def test_a_change_that_is_allowed_is_in_the_table(
    ranks: ForkServer, saved: Path, tmp_path: Path, continued: bool
) -> None:
    arguments = {
        "max_steps": 2,
        "ignore_load_lr_and_optim": not continued,
        "flex_allow_config_changes": ["rope_theta"],
    }
    model = {"rope_theta": 20000.0, "attention_dropout": 0.1}
    given = settings(DP2, tmp_path, saved, model=model, arguments=arguments)
    logs = [log.read_text() for log in ranks.run(f"{JOBS}:run", 2, given).logs]
    assert table(logs[0]) == {"rope_theta": ("10000.0", "20000.0"), "attention_dropout": ("0.0", "0.1")}
    assert [log.count(DIFFERS) for log in logs] == [1, 0]


# A Llama in every layout: test_ema.py.
@pytest.mark.slow
def test_another_layout_alone_is_no_change(ranks: ForkServer, tmp_path: Path) -> None:
    third = save_two(ranks, tmp_path / "saved", DP2, model_type="ernie4_5_moe")
    for layout in (EP2, TP2, PP2, SINGLE):
        given = settings(layout, tmp_path / layout.name, third, model_type="ernie4_5_moe", arguments={"max_steps": 2})
        assert DIFFERS not in ranks.run(f"{JOBS}:run", layout.nproc, given).logs[0].read_text(), layout.name


def test_changed_arguments_of_a_run_are_one_table(ranks: ForkServer, saved: Path, tmp_path: Path) -> None:
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
    arguments = {name: now for name, (_, now) in changed.items()}
    log = ranks.run(f"{JOBS}:run", 1, settings(SINGLE, tmp_path, saved, arguments=arguments)).logs[0].read_text()
    expected = {name: (str(was), str(now)) for name, (was, now) in changed.items()}
    assert table(log) == {**expected, "samples per step": ("8", "4")}
    assert log.count(DIFFERS) == 1
    assert "number of samples per step has changed" in log


def test_another_seed_and_corpus_are_reported_and_the_rate_of_the_first_step_is_that_of_the_new_schedule(
    ranks: ForkServer, saved: Path, tmp_path: Path
) -> None:
    arguments = {"max_steps": 3, "save_steps": 3, "learning_rate": 0.0, "seed": 43, "ignore_data_skip": True}
    log = ranks.run(f"{JOBS}:run", 1, settings(SINGLE, tmp_path, saved, arguments=arguments)).logs[0].read_text()
    assert table(log) == {"seed": ("42", "43"), "max_steps": ("2", "3"), "learning_rate": ("0.01", "0.0")}
    before, after = (
        {one.name: one.md5 for one in canonical_digests(directory) if one.role == "model_state"}
        for directory in (saved, tmp_path / "checkpoint-3")
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
    ],
)
def test_settings_that_make_other_samples_of_the_data_are_refused(
    saved: dict[str, Any], now: dict[str, Any], fault: str
) -> None:
    with pytest.raises(OptionError) as caught:
        check_same_samples(saved, {**saved, **now}, "out/checkpoint-3")
    assert caught.value.evidence == (fault,)
    assert "ignore_data_skip: true" in caught.value.next_step


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (UNPACKED, {"max_seq_len": 128}),
        ({**PACKED, "random_shuffle": False}, {"seed": 24}),
        (PACKED, {"train_dataset_path": "elsewhere"}),
        ({**PACKED, "dataset_type": "pretrain"}, {"max_seq_len": 128}),
        ({"seed": 23}, {"seed": 24}),
    ],
)
def test_settings_that_may_keep_the_samples_are_not_refused(saved: dict[str, Any], now: dict[str, Any]) -> None:
    check_same_samples(saved, {**saved, **now}, "out/checkpoint-3")
    check_same_samples({}, {**saved, **now}, "out/checkpoint-3")


FREEZABLE = "model.layers.1.mlp.down_proj.weight"


def train_frozen_and_unfrozen(layout: MatrixLayout, output_dir: Path) -> None:
    warning = "1 trained parameter has no optimizer states"

    def train(name: str, frozen: list[str], resume: str | None, steps: int) -> list[str]:
        arguments = {"max_steps": steps, "save_steps": steps}
        trainer = frozen_trainer(
            frozen, layout=layout.to_json(), output_dir=str(output_dir / name), arguments=arguments
        )
        with logged() as lines:
            trainer.train(resume_from_checkpoint=None if resume is None else str(output_dir / resume))
        return lines

    train("frozen", [FREEZABLE], None, 2)
    same = train("same", [FREEZABLE], "frozen/checkpoint-2", 3)
    assert not any(warning in line for line in same)
    unfrozen = train("unfrozen", [], "frozen/checkpoint-2", 3)
    said = [line for line in unfrozen if warning in line]
    assert len(said) == (int(os.environ["PADDLE_TRAINER_ID"]) == 0)
    assert all(f"  - {FREEZABLE}" in line for line in said)
    with pytest.raises(FlexError, match=FREEZABLE):
        train("again", [FREEZABLE], "unfrozen/checkpoint-3", 4)


@pytest.mark.parametrize("layout", [SD2V2, PP2, SD2S2, SD2S3], ids=lambda layout: layout.name)
def test_a_parameter_that_is_unfrozen_is_reported_and_one_that_is_frozen_is_refused_with_its_states(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    run_on_ranks(ranks, layout.nproc, train_frozen_and_unfrozen, layout=layout, output_dir=tmp_path)


@pytest.mark.parametrize("value", ["rope_theta", [1], [""], None])
def test_the_option_is_a_list_of_keys(value: Any) -> None:
    with pytest.raises(OptionError, match="flex_allow_config_changes"):
        FlexFields(flex_allow_config_changes=value)
