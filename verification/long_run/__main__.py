"""``python -m verification.long_run``: run what is left, and write the page."""

from __future__ import annotations

import sys
from pathlib import Path

from verification.long_run.report import PAGE, PICTURE, draw, page
from verification.long_run.running import RECIPES, run


def main(arguments: list[str]) -> None:
    """Write the page.

    Args:
        arguments: the directory of the page, and that of the runs; both optional.
    """
    target, root = (Path(one) for one in (*arguments, *("docs/results", "out/long_run")[len(arguments) :]))
    findings = [run(recipe, root) for recipe in RECIPES]
    (target / PAGE).write_text(page(findings), encoding="utf-8")
    draw(findings, target / PICTURE)


if __name__ == "__main__":
    main(sys.argv[1:])
