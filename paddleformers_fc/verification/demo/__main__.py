"""``python -m paddleformers_fc.verification.demo [OUTPUT_DIR]``: train, resume under other layouts, export, compare."""

from __future__ import annotations

import sys
from pathlib import Path

from paddleformers_fc.verification import exit_code
from paddleformers_fc.verification.demo import DEFAULT_OUTPUT, demo

if __name__ == "__main__":
    sys.exit(exit_code(lambda: demo(*(map(Path, sys.argv[1:2]) or (DEFAULT_OUTPUT,)))))
