"""Files of the Trainer: states as JSON, states of schedulers and scalers, files of tokenizers, records of ranks."""

from __future__ import annotations

import json
import os
import pprint
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from paddleformers_fc.errors import FormatError, MismatchError
from paddleformers_fc.formats.registry import open_checkpoint
from paddleformers_fc.storage.state_json import decode_object, encode, readable
from paddleformers_fc.trainer import documents
from paddleformers_fc.trainer.documents import TokenizerFiles, check_alike, read_progress, tokenizer_files
from paddleformers_fc.trainer.rank_records import RECORDS, begin_record, read_records, update_record
from tests.cli.support import save
from tests.execute.simulated import canonical
from tests.harness.sampling import thorough

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


def test_a_state_without_a_value_is_taken_unless_it_is_a_number_of_steps() -> None:
    check_alike({**CURRENT, "last_lr": None}, CURRENT, Path("scheduler.json"))
    with pytest.raises(FormatError, match="last_epoch: NoneType in place of int"):
        check_alike({**CURRENT, "last_epoch": None}, CURRENT, Path("scheduler.json"))


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


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text().filter(lambda key: not key.startswith("__")), inner)
    ),
    max_leaves=20,
)


def text(value: Any) -> str:
    """All of a value, with the kinds and signs of its numbers, and keys in order."""
    return pprint.pformat(value)


@thorough(100)
@given(VALUES)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert text(decode_object(encode({"value": value}, "x"), "x")["value"]) == text(value)


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint32", "int64", "bool", "float16"])
def test_an_array_comes_back_bit_for_bit(dtype: str) -> None:
    array = np.random.default_rng(0).integers(0, 255, size=(3, 16), dtype=np.uint8).view(dtype)
    back = decode_object(encode({"a": array}, "x"), "x")["a"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    np.testing.assert_array_equal(back, array)


def test_numbers_of_numpy_become_plain_numbers_and_an_ordered_dict_a_dict() -> None:
    value = OrderedDict(b=[np.float32(0.1), np.int64(7), np.bool_(True)], a=2)
    assert text(decode_object(encode(value, "x"), "x")) == text({"a": 2, "b": [float(np.float32(0.1)), 7, True]})


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": {"b": [1, object()]}}, "state.a.b[1]"),
        ({"a": ("x", {1, 2})}, "state.a[1]"),
        ({"a": {3: "x"}}, "state.a"),
        ({"a": b"raw"}, "state.a"),
        ({"a": np.array(["text"])}, "state.a"),
        ({"a": {"__array__": 1}}, "state.a"),
    ],
)
def test_a_value_that_json_cannot_hold_is_rejected_with_its_path(value: Any, place: str) -> None:
    with pytest.raises(FormatError) as caught:
        encode(value, "state")
    assert caught.value.where == place


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\x80\x04K\x01.",
        b'{"__array__": "x", "values": [], "shape": []}',
        b'{"__array__": "<U9", "values": ["1"], "shape": [1]}',
        b'{"__array__": "<f8", "values": [1, 2], "shape": [3]}',
        b'{"__array__": "<f8", "values": [1, 2], "shape": [-1]}',
        b'{"__array__": "<f8", "values": [1], "shape": [1], "more": 1}',
        b'{"__tuple__": {}}',
        b'{"__tuple__": [], "more": 1}',
    ],
)
def test_a_damaged_document_is_named(raw: bytes) -> None:
    for document in (b'{"value": ' + raw + b"}", b"[1]"):
        with pytest.raises(FormatError) as caught:
            decode_object(document, "checkpoint-3/trainer/state.json")
        assert caught.value.where == "checkpoint-3/trainer/state.json"


def test_a_description_is_json_whatever_it_describes() -> None:
    described = readable({1: {"a"}, "b": [np.float32(2), object(), None]})
    assert json.loads(json.dumps(described))["b"][0] == 2.0
    assert described["1"] == ["a"]


def test_a_rank_record_lost_to_a_full_disk_is_rewritten_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "records"
    directory.mkdir()
    monkeypatch.setenv(RECORDS, str(directory))
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    begin_record()
    (path,) = directory.iterdir()
    path.write_bytes(b"")
    assert [record.process for record in read_records(directory)] == [None]
    update_record(step=3)
    assert [(record.process, record.step) for record in read_records(directory)] == [(os.getpid(), 3)]
    shutil.rmtree(directory)
    update_record(step=4)
    assert [(record.process, record.step) for record in read_records(directory)] == [(os.getpid(), 4)]
