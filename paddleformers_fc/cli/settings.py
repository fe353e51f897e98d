"""Read training settings: a YAML or JSON file of PaddleFormers, and overrides on the command line.

YAML is read as PaddleFormers reads it, except that errors name the file and that duplicate keys are errors. PyYAML
silently keeps the last of two equal keys.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from paddleformers_fc.errors import OptionError
from paddleformers_fc.storage.json_io import parse_json, read_document

_MERGE = "tag:yaml.org,2002:merge"


def read_settings(config: Path) -> dict[str, Any]:
    """Return the keys of a configuration file as PaddleFormers' command line reads it.

    Raises:
        OptionError: the file is neither YAML nor JSON, or not a mapping.
        CheckpointError, StorageError: the file is missing, too long, or cannot be read.
    """
    raw = read_document(config)
    try:
        if config.suffix in (".yaml", ".yml"):
            settings = _load_yaml(raw.decode("utf-8"), config.name)
        elif config.suffix == ".json":
            settings = parse_json(raw)
        else:
            raise ValueError("its name does not end in .yaml, .yml or .json")
        if not isinstance(settings, dict):
            raise ValueError("it contains no keys")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise OptionError(
            "The configuration cannot be read.",
            where=str(config),
            evidence=[str(error)],
            next_step="Name a file that ends in .yaml, .yml or .json, one key and value per line, as in recipes/.",
        ) from error
    return settings


def places_of_keys(config: Path) -> dict[str, str]:
    """Return file and line of every key of a file that :func:`read_settings` accepts; of a JSON file only its path."""
    if config.suffix == ".json":
        return dict.fromkeys(read_settings(config), str(config))
    root = yaml.compose(read_document(config), Loader=_Loader)
    return {key.value: f"{config}, line {key.start_mark.line + 1}" for key, _ in root.value}


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse ``key=value`` arguments, whose values are YAML.

    Raises:
        OptionError: an argument has no key, no ``=``, or an invalid value.
    """
    pairs = [(text, *text.partition("=")) for text in overrides]
    wrong = [text for text, key, equals, _ in pairs if not key or not equals]
    if wrong:
        raise OptionError(
            "Invalid override: the form is key=value.",
            evidence=[repr(text) for text in wrong],
            next_step="Write an override such as max_steps=10.",
        )
    try:
        return {key: _load_yaml(value, key, _OverrideLoader) for _, key, _, value in pairs}
    except (yaml.YAMLError, RecursionError) as error:
        raise OptionError(
            "The value of an override is not valid YAML.",
            evidence=[str(error)],
            next_step="Quote the value for the shell and for YAML, such as 'key=\"a: b\"'.",
        ) from error


def with_overrides(settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with overrides, as PaddleFormers merges them.

    A dotted key sets one key of a mapping, and a mapping replaces only the keys that it contains.

    Args:
        settings: the result of :func:`read_settings`.
        overrides: the result of :func:`parse_overrides`.
    """
    merged = dict(settings)
    for name, value in overrides.items():
        key, dot, rest = name.partition(".")
        changes, old = {rest: value} if dot else value, merged.get(key)
        is_mapping = isinstance(changes, dict)
        merged[key] = with_overrides(old if isinstance(old, dict) else {}, changes) if is_mapping else changes
    return merged


class _Loader(yaml.SafeLoader):
    """The loader of ``yaml.safe_load`` that rejects duplicate keys."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Compose a mapping. Merged keys (``<<``) may be overridden, and are added only later.

        Raises:
            ConstructorError: a duplicate key, with both positions.
        """
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], yaml.Node] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            earlier = first.setdefault((key.tag, key.value), key)
            if earlier is not key:
                raise yaml.constructor.ConstructorError(
                    f"duplicate key {key.value}: first", earlier.start_mark, "and again", key.start_mark
                )
        return node


class _OverrideLoader(_Loader):
    """The loader of overrides. PaddleFormers reads them with OmegaConf, for which ``1e-5`` is a number."""


_OverrideLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _load_yaml(text: str, name: str, kind: type[_Loader] = _Loader) -> Any:
    """Return the value of a YAML document.

    Args:
        text: the document.
        name: its name in errors.
        kind: the loader.
    Raises:
        yaml.YAMLError: the document is invalid, or has a duplicate key.
    """
    stream = io.StringIO(text)
    stream.name = name
    return yaml.load(stream, Loader=kind)
