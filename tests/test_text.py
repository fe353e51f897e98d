"""Numbers as a person reads them."""

from __future__ import annotations

import pytest

from paddleformers_fc.text import count_text, size_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (5 * 10**9, "5 GB"),
        (123 * 10**18, "1.23e+05 PB"),
    ],
)
def test_sizes_have_three_digits_and_powers_of_a_thousand(count: int, text: str) -> None:
    assert size_text(count) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 files"), (1, "1 file"), (1024, "1,024 files")])
def test_counts_agree_with_their_noun(count: int, text: str) -> None:
    assert count_text(count, "file") == text
