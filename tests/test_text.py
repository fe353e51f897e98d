"""Text as a person reads it: numbers, folded names, and what reaches a screen."""

from __future__ import annotations

import difflib
import io
import sys
from collections.abc import Iterable

import pytest

from paddleformers_fc.output import console
from paddleformers_fc.text import count_text, fold, similar_word, size_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1234, "1.23 kB"), (999_499, "999 kB"), (999_500, "1 MB")),
        *((5 * 10**9, "5 GB"), (123 * 10**18, "1.23e+05 PB")),
    ],
)
def test_sizes_have_three_digits_and_powers_of_a_thousand(count: int, text: str) -> None:
    assert size_text(count) == text


def test_counts_agree_with_their_noun() -> None:
    assert [count_text(count, "file") for count in (0, 1, 1024)] == ["0 files", "1 file", "1,024 files"]


@pytest.mark.parametrize(
    ("lines", "folded"),
    [
        ([f"model.layers.{i}.mlp.weight: gone" for i in range(4)], ["model.layers.{0...3}.mlp.weight: gone"]),
        ([f"m.{i}.experts.{e}.w" for i in (0, 1) for e in range(8)], ["m.{0...1}.experts.{0...7}.w"]),
        ([f"a.{i}.b" for i in (0, 2, 5)], ["a.{0,2,5}.b"]),
        (["a.0.b.0.c", "a.0.b.1.c", "a.1.b.0.c"], ["a.0.b.0.c", "a.0.b.1.c", "a.1.b.0.c"]),
        (["x.1.y {} {0}", "x.2.y {} {0}"], ["x.{1...2}.y {} {0}"]),
        (["a" * 2_000, "b" * 800], [f"{'a' * 397} ... {'a' * 397}", "b" * 800]),
        ([f"name{letter}" for letter in "abcdefgh"], [f"name{letter}" for letter in "abcde"] + ["and 3 more"]),
    ],
    ids=[
        "layers",
        "layers and experts",
        "a set with holes",
        "an incomplete grid",
        "braces",
        "long names",
        "what is cut off",
    ],
)
def test_names_that_differ_by_indices_are_one_line(lines: list[str], folded: list[str]) -> None:
    assert fold(lines, limit=5) == folded


def test_names_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    console().print("[bold]a[/bold] :smile: " + "x" * 300)
    assert stream.getvalue() == "[bold]a[/bold] :smile: " + "x" * 300 + "\n"


def test_names_with_other_numbers_are_not_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in range(30)
        for expert in range(128)
        for part in ("up", "gate", "down")
    ]
    real, compared = difflib.get_close_matches, []

    def counted(word: str, known: Iterable[str], n: int) -> list[str]:
        compared.extend(known)
        return real(word, list(known), n)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    assert similar_word("Model.layers.3.mlp.expert.17.up_proj.weights", names) == names[(3 * 128 + 17) * 3]
    assert len(compared) == 3
    assert similar_word("model.layers.3.up.weight", ["model.layers.2.up.weight"]) == "model.layers.2.up.weight"
    assert similar_word("nothing", names) == ""
