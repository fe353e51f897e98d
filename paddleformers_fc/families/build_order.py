"""The order in which a model builds its parameters, from their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from paddleformers_fc.families.declarations import BUILT


def built_order(names: Iterable[str], last_parts: Sequence[str] = ()) -> list[str]:
    """Return names in the order in which a model builds its parameters, on which sharding depends.

    The parameters of a module are adjacent, and a layer has its norms last. Everything else keeps the order given.

    Args:
        names: names of parameters.
        last_parts: ``built`` of the model's family.
    """
    tree: _Node = {}
    for name in names:
        node = tree
        for piece in name.split("."):
            node = node.setdefault(piece, {})
    return list(_walked(tree, "", "", (*BUILT, *last_parts)))


_Node = dict[str, Any]


def _walked(node: _Node, name: str, last: str, sections: Sequence[str]) -> Iterator[str]:
    if not node:
        yield name
    for piece in sorted(node, key=lambda piece: _position(piece, last, sections)):
        yield from _walked(node[piece], f"{name}.{piece}" if name else piece, piece, sections)


def _position(piece: str, parent: str, sections: Sequence[str]) -> int:
    if piece.isdecimal():
        return int(piece)
    if parent == "model":
        return next((place for place, start in enumerate(sections) if piece.startswith(start)), len(sections))
    return int(parent.isdecimal() and "norm" in piece)
