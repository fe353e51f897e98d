"""States of schedulers and scalers, before anything is set to them; files of tokenizers that change between saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from paddleformers_fc.errors import FormatError
from paddleformers_fc.trainer.documents import TokenizerFiles, refuse_unlike

CURRENT: dict[str, Any] = {"last_epoch": 3, "last_lr": 0.1, "use_dynamic_loss_scaling": True}


@pytest.mark.parametrize("steps", [-1, 0, 3, (1 << 53) - 1])
def test_a_state_with_a_number_of_steps_is_taken(steps: int) -> None:
    refuse_unlike({**CURRENT, "last_epoch": steps}, CURRENT, Path("scheduler.json"))


@pytest.mark.parametrize("steps", [-2, -65_536, 1 << 53, int("9" * 300), float("nan"), float("inf")])
def test_a_state_with_steps_that_no_run_can_have_made_is_refused(steps: float) -> None:
    with pytest.raises(FormatError, match="last_epoch: invalid number of steps"):
        refuse_unlike({**CURRENT, "last_epoch": steps}, CURRENT, Path("scheduler.json"))


@pytest.mark.parametrize("name", CURRENT)
def test_a_state_that_lacks_a_value_is_refused(name: str) -> None:
    saved = {key: value for key, value in CURRENT.items() if key != name}
    with pytest.raises(FormatError, match=f"{name}: NoneType in place of {type(CURRENT[name]).__name__}"):
        refuse_unlike(saved, CURRENT, Path("scheduler.json"))


@pytest.mark.parametrize("other", [{"last_epoch": "3"}, {"last_lr": [0.1]}, {"use_dynamic_loss_scaling": 1}])
def test_a_state_of_another_kind_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=f"{next(iter(other))}: "):
        refuse_unlike({**CURRENT, **other}, CURRENT, Path("scheduler.json"))


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
