"""New processes of Python, for what an import costs, what is printed, and how a program ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.harness.limits import LIMIT, ROOT

WITHOUT_PADDLE = """
import sys

attempts = []

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"paddle", "paddleformers", "paddlefleet", "torch", "transformers"}:
            attempts.append(name)
            raise ModuleNotFoundError(f"{name} is blocked in this test", name=name)

sys.meta_path.insert(0, Blocked())
"""
"""The beginning of a program that cannot import Paddle. An attempt is noted even if its error is swallowed, because
behaviour must not depend on what is installed."""


def python(
    *arguments: object, cwd: Path = ROOT, check: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with these arguments and variables, and wait for its end.

    Args:
        arguments: of the interpreter.
        cwd: the working directory.
        check: fail if the process does not return 0.
        variables: of its environment, beside those of this process.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done
