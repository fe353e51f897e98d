"""The picture of a matrix: a reader sees right and wrong by colour, and rounding by shade."""

from __future__ import annotations

import colorsys
from pathlib import Path

import numpy as np

from verification.matrix.picture import EQUAL, NOT_RUN, WRONG, colour_of, draw


def hue(text: str) -> float:
    return colorsys.rgb_to_hsv(*colour_of(text))[0]


def test_right_has_one_hue_that_is_darker_with_more_rounding_and_wrong_has_another() -> None:
    right = [EQUAL, "1.0e-09", "4.8e-07", "6.9e-03", "2.0e-01 ¹"]
    assert max(map(hue, right)) - min(map(hue, right)) < 0.02
    assert abs(hue(WRONG) - hue(EQUAL)) > 0.3
    shades = [sum(colour_of(text)) for text in (EQUAL, "1.0e-07", "4.8e-07", "2.0e-05", "1.0e-02")]
    assert shades == sorted(shades, reverse=True)
    assert len(set(shades)) == len(shades)
    assert sum(colour_of(EQUAL)) - sum(colour_of("4.8e-07")) < 0.5
    assert len({round(one, 3) for one in colour_of(NOT_RUN)}) == 1


def test_the_cells_of_a_picture_have_these_colours(tmp_path: Path) -> None:
    from matplotlib import image

    draw("title", ["a", "b"], ["c", "d"], [[EQUAL, "4.8e-07"], [WRONG, NOT_RUN]], tmp_path / "one.png")
    pixels = np.round(image.imread(tmp_path / "one.png")[..., :3], 2).reshape(-1, 3)
    for text in (EQUAL, "4.8e-07", WRONG, NOT_RUN):
        share = np.isclose(pixels, colour_of(text), atol=0.011).all(axis=1).mean()
        assert share > 0.05, text
