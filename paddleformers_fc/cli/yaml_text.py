"""YAML as PaddleFormers reads it, with two differences: errors name the file, and duplicate keys are refused.

PyYAML silently keeps the last of two equal keys, so that a run would have other settings than a reader sees.
"""

from __future__ import annotations

from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """What ``yaml.safe_load`` uses, with keys that may not come twice."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """A mapping as it is written: what ``<<`` brings, which an own key may replace, comes in later.

        Raises:
            ConstructorError: a key is there twice, with both places.
        """
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], yaml.Node] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            earlier = first.setdefault((key.tag, key.value), key)
            if earlier is not key:
                raise yaml.constructor.ConstructorError(
                    f"the key {key.value} is there", earlier.start_mark, "and again", key.start_mark
                )
        return node


def load_yaml(text: str, name: str) -> Any:
    """The value of a YAML document.

    Args:
        text: the document.
        name: what its faults call it.
    Raises:
        yaml.YAMLError: it cannot be read, or has a key twice.
    """
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        error.name = name
        raise
    loader.name = name
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
