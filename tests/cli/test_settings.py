"""A YAML or JSON file of a training, and overrides, are read as PaddleFormers reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from paddleformers_fc.cli.settings import parse_overrides, read_settings
from paddleformers_fc.errors import OptionError


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("a.yaml", "a: [1"), ("a.yaml", "- 1"), ("a.yaml", ""), ("a.yaml", "\xff"), ("a.yaml", "[" * 600)),
        *(("a.json", "{"), ("a.json", "[]"), ("a.json", '{"a": 1, "a": 2}'), ("a.json", '{"a": \xff}')),
        ("a.toml", "a = 1"),
    ],
)
def test_an_unreadable_configuration_is_refused_with_its_path(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(OptionError) as caught:
        read_settings(path)
    assert caught.value.where == str(path)


def test_a_fault_of_a_yaml_is_reported_with_file_and_line(tmp_path: Path) -> None:
    for text, message in (("a: 1\nb: [1\n", 'in "job.yaml", line 2'), ("a: \0", 'in "job.yaml", position 3')):
        (tmp_path / "job.yaml").write_text(text)
        with pytest.raises(OptionError) as caught:
            read_settings(tmp_path / "job.yaml")
        assert message in caught.value.render()
        assert "unicode string" not in caught.value.render()
    with pytest.raises(OptionError, match='in "max_steps", line 1'):
        parse_overrides(["max_steps=[3"])


def test_a_duplicate_key_of_a_yaml_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    for text in ("a: 1\nseed: 3\nb: 2\n'seed': 4\n", "a: 1\nb: {c: 1,\n  d: 2,\n\n  d: 3}\n"):
        path.write_text(text)
        with pytest.raises(OptionError) as caught:
            read_settings(path)
        message = caught.value.render()
        assert f"duplicate key {'seed' if 'seed' in text else 'd'}: first" in message
        lines = (2, 4) if "seed" in text else (3, 5)
        assert all(f'in "job.yaml", line {line}, column' in message for line in lines)


def test_a_key_that_replaces_a_merged_one_is_not_a_duplicate(tmp_path: Path) -> None:
    for name in ("a.yml", "a.json"):
        (tmp_path / name).write_text(json.dumps({"max_steps": 3}))
        assert read_settings(tmp_path / name) == {"max_steps": 3}
    path = tmp_path / "job.yaml"
    path.write_text("b: &b {x: 1, y: 1}\na: &a {<<: *b, x: 2}\nc: {<<: *a, y: 3}\nd: [*a, 1, '1']\ne: {1: 1, '1': 2}\n")
    assert read_settings(path) == yaml.safe_load(path.read_text())


def test_numbers_with_an_exponent_are_numbers_in_overrides_as_for_paddleformers() -> None:
    given = {"learning_rate": "1e-5", "weight_decay": "2E3", "min_lr": "1.0e1", "adam_epsilon": "-1e-8"}
    given |= {"run_name": "1e-5x", "max_grad_norm": "1.5", "num_train_epochs": "3", "b": "true", "c": "x=y", "d": ""}
    overrides = [f"{key}={value}" for key, value in given.items()]
    assert parse_overrides(overrides) == OmegaConf.to_container(OmegaConf.from_cli(overrides))
    assert parse_overrides(["a=1", "b=true", "c=x=y", "d="]) == {"a": 1, "b": True, "c": "x=y", "d": None}
