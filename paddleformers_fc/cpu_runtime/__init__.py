"""Hybrid parallelism on a machine without an accelerator, for rehearsals and tests.

Paddle's CPU build trains data parallel only. After :func:`activate`, tensor, pipeline, sharding (stage 1 both
versions, 2 and 3) and expert parallelism run over gloo through PaddleFormers' own Trainer: real ranks, real
collectives, real checkpoints, slowly. On an accelerator this package has no effect.

===============================  ======================================================================
``patches``                      the table of patches, one row per fault of the CPU build
``collectives``, ``p2p``         operations that gloo lacks; point-to-point messages over sockets
``groups``, ``stores``           one store per process group; an interruptible store client
``mpu``                          tensor parallel operators and input data
``sharding``, ``half``           sharding stages; bfloat16 training
``device``, ``formers``          device queries and OpenMP; assumptions of PaddleFormers' Trainer
``ernie_moe``                    ERNIE 4.5 MoE without fused kernels
``launch``, ``ranks``            start and supervise ranks of this machine
``rankmain``                     the main program of a rank
===============================  ======================================================================

:mod:`paddleformers_fc.upstream` lists the functions that the patches replace or read; activation is refused if one is
missing or different. Importing this package does not import Paddle; :func:`activate` does (1 s, 2.5 s with
PaddleFormers).
"""

from __future__ import annotations

import logging

from .. import upstream
from ..upstream.hooks import Hook

__all__ = ["activate"]

_log = logging.getLogger(__name__)
_applied: tuple[str, ...] | None = None


def activate() -> tuple[str, ...]:
    """Patch Paddle and PaddleFormers so that hybrid parallelism runs on this process' CPU.

    Call it before ``fleet.init`` and before the Trainer's arguments are made. A second call does nothing and returns
    what the first returned.

    Returns:
        The names of the patches in force; empty on an accelerator, where nothing is patched.

    Raises:
        EnvironmentMismatch: a function that the patches replace or read is missing or different; nothing was patched. A
            version alone is a warning here and refused with ``flex_checkpoint: true``, see ``flex_unknown_versions``.
    """
    global _applied
    if _applied is None:
        _applied = _activate()
    return _applied


def needed() -> tuple[Hook, ...]:
    """Return the upstream hooks that :func:`activate` will depend on; none after its call, and none on an
    accelerator."""
    return upstream.cpu_runtime_hooks() if _applied is None else ()


def _activate() -> tuple[str, ...]:
    hooks = upstream.cpu_runtime_hooks()
    if not hooks:
        return ()
    upstream.require(hooks)
    for line in upstream.unknown_versions():
        _log.warning("CPU runtime: %s. The patches are written for the known version.", line)
    from . import patches

    names = patches.apply_all()
    _log.warning("CPU runtime: %d patches for hybrid parallelism over gloo (%s).", len(names), ", ".join(names))
    return names
