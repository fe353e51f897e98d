"""States of schedulers and scalers, before anything is set to them; files of tokenizers that change between saves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from paddleformers_fc.errors import FormatError, MismatchError
from paddleformers_fc.formats.registry import open_checkpoint
from paddleformers_fc.trainer import documents
from paddleformers_fc.trainer.documents import TokenizerFiles, check_alike, read_progress, tokenizer_files
from tests.cli.support import save
from tests.execute.simulated import canonical

CURRENT: dict[str, Any] = {"last_epoch": 3, "last_lr": 0.1, "use_dynamic_loss_scaling": True}
IMPOSSIBLE = (-2, -65_536, 1 << 53, int("9" * 300), float("nan"), float("inf"))


def test_a_resume_of_what_a_script_saved_names_both_ways_to_use_it(tmp_path: Path) -> None:
    with pytest.raises(MismatchError) as raised:
        read_progress(open_checkpoint(save(tmp_path / "checkpoint-3", canonical())), None)
    assert "missing: trainer/state.json" in raised.value.evidence
    assert "ignore_load_lr_and_optim: true" in raised.value.next_step
    assert "paddleformers_fc.load" in raised.value.next_step


@pytest.mark.parametrize("steps", [-1, 0, 3, (1 << 53) - 1])
def test_a_state_with_a_number_of_steps_is_taken(steps: int) -> None:
    check_alike({**CURRENT, "last_epoch": steps}, CURRENT, Path("scheduler.json"))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        *(({"last_epoch": steps}, "last_epoch: invalid number of steps") for steps in IMPOSSIBLE),
        *(({name: None}, f"{name}: NoneType in place of {type(value).__name__}") for name, value in CURRENT.items()),
        ({"last_epoch": "3"}, "last_epoch: "),
        ({"last_lr": [0.1]}, "last_lr: "),
        ({"use_dynamic_loss_scaling": 1}, "use_dynamic_loss_scaling: "),
    ],
)
def test_a_state_that_no_run_can_have_saved_is_refused(changed: dict[str, Any], text: str) -> None:
    """None is a value that the state lacks."""
    saved = {key: value for key, value in {**CURRENT, **changed}.items() if value is not None}
    with pytest.raises(FormatError, match=text):
        check_alike(saved, CURRENT, Path("scheduler.json"))


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({}, "invalid: global_step is missing"),
        ({"global_step": -1}, "invalid: global_step: "),
        ({"global_step": 3, "epoch": "1"}, "invalid: epoch: "),
        ({"global_step": 3, "log_history": [1]}, "invalid: log_history: "),
        ({"global_step": 3, "other": 1}, "unknown: other"),
    ],
)
def test_a_trainer_state_of_another_version_is_refused(values: dict[str, Any], fault: str) -> None:
    assert documents._trainer_state({"global_step": 0, "epoch": None}, Path("state.json")).global_step == 0
    with pytest.raises(FormatError, match="another version of PaddleFormers") as caught:
        documents._trainer_state(values, Path("state.json"))
    (line,) = caught.value.evidence
    assert line.startswith(fault)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a template": lambda one: setattr(one, "chat_template", "{{ x }}"),
    "a token": lambda one: one.add_tokens(["new"]),
    "a maximum length": lambda one: setattr(one, "model_max_length", 7),
    "an argument": lambda one: one.init_kwargs.update(clean=True),
    "a normalizer": lambda one: setattr(one.backend_tokenizer, "normalizer", normalizers.Lowercase()),
    "a post-processor": lambda one: setattr(
        one.backend_tokenizer, "post_processor", processors.TemplateProcessing("w $A", special_tokens=[("w", 0)])
    ),
    "padding": lambda one: one.backend_tokenizer.enable_padding(length=8),
}


def tokenizer(token: str = "w") -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({token: 0, "[U]": 1}, "[U]")))


@pytest.mark.parametrize("change", CHANGES)
def test_files_of_a_tokenizer_that_has_changed_are_written_again(change: str) -> None:
    args, one = SimpleNamespace(save_tokenizer=True), tokenizer()
    trainer, files = SimpleNamespace(args=args, tokenizer=one, processing_class=None), TokenizerFiles()
    before = files.of(trainer)
    assert files.of(trainer) is before
    CHANGES[change](one)
    after = files.of(trainer)
    assert after != before
    assert after == TokenizerFiles().of(trainer)


def test_files_of_another_tokenizer_are_written() -> None:
    trainer = SimpleNamespace(args=SimpleNamespace(save_tokenizer=True), tokenizer=tokenizer(), processing_class=None)
    files = TokenizerFiles()
    before = files.of(trainer)
    trainer.tokenizer = tokenizer("v")
    assert files.of(trainer)["tokenizer.json"] != before["tokenizer.json"]


IMAGES = {"min_pixels": 3136, "max_pixels": 50176, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
IMAGES |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_processor_type": "Qwen2VLImageProcessor"}
PROCESSOR = {"processor_class": "Qwen2_5_VLProcessor"}
TOKENS = {"eos_token": "[U]", "additional_special_tokens": ["w"], "tokenizer_class": "PreTrainedTokenizerFast"}


def test_files_of_a_processor_name_the_classes_of_those_that_it_was_loaded_from(tmp_path: Path) -> None:
    from paddleformers.transformers import AutoProcessor

    tokenizer().save_pretrained(tmp_path)
    described = {"preprocessor_config.json": {**IMAGES, **PROCESSOR}, "tokenizer_config.json": {**TOKENS, **PROCESSOR}}
    for name, content in {**described, "config.json": {"model_type": "qwen2_5_vl"}}.items():
        (tmp_path / name).write_text(json.dumps(content))
    one = AutoProcessor.from_pretrained(str(tmp_path))
    one.image_processor.merge_size = 4
    trainer = SimpleNamespace(args=SimpleNamespace(save_tokenizer=True), tokenizer=one.tokenizer, processing_class=one)
    files = tokenizer_files(trainer)
    images, tokens = (json.loads(files[name]) for name in described)
    assert {key: images[key] for key in described["preprocessor_config.json"]} == {
        **described["preprocessor_config.json"],
        "merge_size": 4,
    }
    assert {key: tokens[key] for key in described["tokenizer_config.json"]} == described["tokenizer_config.json"]
    assert "extra_special_tokens" not in tokens
    assert None not in images.values()
    # After a round trip, it is written in the same way.
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    again = AutoProcessor.from_pretrained(str(tmp_path))
    trainer = SimpleNamespace(args=trainer.args, tokenizer=again.tokenizer, processing_class=again)
    assert tokenizer_files(trainer) == files
