"""A job that runs inside a rank process: a command line that builds a model of PaddleFormers."""

from __future__ import annotations

from typing import Any

from tests.cli.support import run


def command(arguments: list[str]) -> dict[str, Any]:
    """Run ``paddleformers-fc`` with these arguments: its exit code, and what it printed."""
    outcome = run(*arguments)
    return {"code": outcome.code, "out": outcome.out, "err": outcome.err}
