"""``python -m verification.demo [OUTPUT_DIR]``: train, resume under other layouts, export, compare."""

from __future__ import annotations

import sys
from pathlib import Path

from verification import exit_code
from verification.demo import DEFAULT_OUTPUT, demo

if __name__ == "__main__":
    sys.exit(exit_code(lambda: demo(*(map(Path, sys.argv[1:2]) or (DEFAULT_OUTPUT,)))))
