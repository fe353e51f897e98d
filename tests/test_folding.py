"""Folding of indices in reports."""

from __future__ import annotations

from paddleformers_fc.text import fold


def test_a_run_of_layers_becomes_one_line() -> None:
    assert fold(f"model.layers.{i}.mlp.weight: gone" for i in range(4)) == ["model.layers.{0...3}.mlp.weight: gone"]


def test_layers_and_experts_fold_together() -> None:
    lines = [f"layers.{i}.experts.{e}.w" for i in (0, 1) for e in range(8)]
    assert fold(f"m.{line}" for line in lines) == ["m.layers.{0...1}.experts.{0...7}.w"]


def test_a_set_with_holes_is_listed_not_guessed() -> None:
    assert fold(f"a.{i}.b" for i in (0, 2, 5)) == ["a.{0,2,5}.b"]


def test_an_incomplete_grid_is_not_folded_into_more_than_it_is() -> None:
    lines = ["a.0.b.0.c", "a.0.b.1.c", "a.1.b.0.c"]
    assert fold(lines) == lines


def test_what_is_cut_off_is_counted() -> None:
    assert fold((f"name{chr(97 + i)}" for i in range(5)), limit=2) == ["namea", "nameb", "and 3 more"]


def test_braces_in_a_line_do_no_harm() -> None:
    assert fold(["x.1.y {} {0}", "x.2.y {} {0}"]) == ["x.{1...2}.y {} {0}"]
