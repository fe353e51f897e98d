"""The reference of the language: its examples run, print the documented output, and have the same meaning in Paddle."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddleformers_fc import aoa
from paddleformers_fc.mapping import TensorMapping
from tests.aoa import stock
from tests.harness.documents import run_examples
from tests.mapping.numbers import moved, numbered

DOCUMENT = Path(__file__).parents[2] / "docs" / "aoa.md"


def test_the_examples_print_the_output_in_the_document_and_paddle_moves_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accepted: list[tuple[list[str], stock.Tensors, stock.Tensors, TensorMapping]] = []
    parse = aoa.parse

    def noted(statements: list[str], left: stock.Tensors, right: stock.Tensors) -> TensorMapping:
        mapping = parse(statements, left, right)
        accepted.append((list(statements), left, right, mapping))
        return mapping

    monkeypatch.setattr(aoa, "parse", noted)
    assert run_examples(DOCUMENT) == 5
    assert len(accepted) == 5
    for statements, left, right, mapping in accepted:
        arrays = numbered(mapping)
        ours, theirs = moved(mapping, arrays), stock.moved(stock.plan(statements, left, right), arrays, right)
        assert all((ours[name] == theirs[name]).all() for name in ours), statements
