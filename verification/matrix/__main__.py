"""``python -m verification.matrix RECIPE.yaml``: verify that every layout resumes every other."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verification import exit_code
from verification.matrix import PROGRAM, run_matrix


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a matrix, and return its exit code: 0 if every cell was right, 1 if not, 2 if it cannot be run."""
    parser = argparse.ArgumentParser(prog=PROGRAM)
    parser.add_argument("recipe", type=Path, metavar="RECIPE.yaml", help="a matrix of layouts")
    parser.add_argument("--only", metavar="'FROM->TO'", help="run these cells only; * matches any layout")
    parser.add_argument("--work", type=Path, default=Path("out/matrix"), help="results of an earlier run are kept")
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="gets the table")
    given = parser.parse_args(arguments)
    return exit_code(lambda: run_matrix(given.recipe, given.only, given.work, given.output))


if __name__ == "__main__":
    sys.exit(main())
