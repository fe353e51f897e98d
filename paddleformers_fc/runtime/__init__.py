"""Hybrid parallelism on a machine without an accelerator, for rehearsal and for tests.

Paddle's CPU build trains data parallel only. After :func:`activate` tensor, pipeline, sharding (stage 1 both
versions, 2 and 3) and expert parallelism run on it over gloo, through PaddleFormers' own Trainer: real ranks, real
collectives, real checkpoints, slowly. On an accelerator this package does nothing.

Idea: each fault of the CPU build is mended in one named unit (the table is :mod:`.patches`), known for one version
of Paddle and one of PaddleFormers; with any other, activation refuses instead of guessing.

Importing this package is cheap and does not import Paddle; :func:`activate` does (about 1 s, 2.5 s with
PaddleFormers). :mod:`.launch` starts ranks, :mod:`.forkserver` starts them fast and often.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging

from ..errors import EnvironmentMismatch

__all__ = ["activate"]

PADDLE_VERSION = "3.3.1"
PADDLEFORMERS_VERSION = "1.2.0"

_log = logging.getLogger(__name__)
_applied: tuple[str, ...] | None = None


def activate() -> tuple[str, ...]:
    """Mend Paddle and PaddleFormers so that hybrid parallelism runs on this process' CPU.

    Call it before ``fleet.init`` and before the Trainer's arguments are made. A second call does nothing and returns
    what the first returned.

    Returns:
        The names of the patches in force; empty when Paddle computes on an accelerator, where nothing is mended.

    Raises:
        EnvironmentMismatch: a version of Paddle or PaddleFormers that the patches were not written for.
    """
    global _applied
    if _applied is None:
        _applied = _activate()
    return _applied


def _activate() -> tuple[str, ...]:
    import paddle

    if paddle.device.get_device() != "cpu":
        return ()
    _check_version("paddle", paddle.__version__, PADDLE_VERSION)
    if importlib.util.find_spec("paddleformers") is not None:
        _check_version("paddleformers", importlib.metadata.version("paddleformers"), PADDLEFORMERS_VERSION)
    from . import patches

    names = patches.apply_all()
    _log.warning("CPU runtime: %d patches for hybrid parallelism over gloo (%s).", len(names), ", ".join(names))
    return names


def _check_version(package: str, found: str, known: str) -> None:
    if found != known:
        raise EnvironmentMismatch(
            f"The CPU runtime knows {package} {known}, and this is {package} {found}.",
            where=f"the installed package {package}",
            evidence=[f"known: {known}", f"installed: {found}"],
            next_step=f"Install {package}=={known}, or train on an accelerator, where the CPU runtime is not needed.",
        )
