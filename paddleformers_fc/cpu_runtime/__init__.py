"""Hybrid parallelism on a machine without an accelerator, for rehearsals and tests.

Paddle's CPU build only supports data parallelism. After :func:`activate`, tensor, pipeline, expert parallelism and
sharding (both versions of stage 1, stages 2 and 3) also run over gloo in PaddleFormers' own Trainer, with real ranks,
collectives and checkpoints, but slowly. On an accelerator this package has no effect.

===============================  ======================================================================
``patches``                      the table of patches, one row per fault of the CPU build
``collectives``, ``p2p``         operations that gloo lacks; point-to-point messages over sockets
``groups``, ``stores``           one store per process group; a fast rendezvous
``mpu``                          tensor parallel operators and input data
``sharding``, ``half``           sharding stages; bfloat16 training
``device``, ``formers``          device queries and OpenMP; assumptions of PaddleFormers' Trainer
``ernie_moe``                    ERNIE 4.5 MoE without fused kernels
``launch``, ``ranks``            start and supervise ranks on this machine
``rankmain``                     the main program of a rank
===============================  ======================================================================

:mod:`paddleformers_fc.upstream` lists the functions that the patches replace or read; :func:`activate` raises if one is
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
    """Patch Paddle and PaddleFormers so that hybrid parallelism runs on the CPU, in this process.

    Call it before ``fleet.init`` and before the training arguments are constructed. Further calls do nothing and return
    the first result.

    Returns:
        The names of the applied patches; empty on an accelerator.

    Raises:
        EnvironmentMismatch: a function that the patches replace or read is missing or different; nothing was patched.
            An untested version alone is only a warning here; see ``flex_unknown_versions`` for training.
    """
    global _applied
    if _applied is None:
        _applied = _activate()
    return _applied


def needed() -> tuple[Hook, ...]:
    """Return the upstream hooks of a pending :func:`activate`; none after the call, and none on an accelerator."""
    return upstream.cpu_runtime_hooks() if _applied is None else ()


def _activate() -> tuple[str, ...]:
    hooks = upstream.cpu_runtime_hooks()
    if not hooks:
        return ()
    upstream.require(hooks)
    for line in upstream.unknown_versions():
        _log.warning("CPU runtime: %s. The patches are written for the tested version.", line)
    from . import patches

    names = patches.apply_all()
    _log.warning("CPU runtime: %d patches for hybrid parallelism over gloo (%s).", len(names), ", ".join(names))
    return names
