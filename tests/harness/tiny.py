"""The tiny models of the verification matrices, and the layouts that tests run them under by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verification.matrix.layouts import MatrixLayout, layout_from  # noqa: F401
from verification.matrix.tiny import (  # noqa: F401
    GLOBAL_BATCH,
    SAMPLES,
    SEGMENT,
    SEQUENCE,
    VOCABULARY,
    ImageSamples,
    Samples,
    adapted,
    build,
    collate,
    config,
    model_weight,
    train,
    trainer,
    training_arguments,
    weight,
)

SINGLE = MatrixLayout("single")
DP2 = MatrixLayout("dp2", nproc=2)
TP2 = MatrixLayout("tp2", nproc=2, tp=2)
PP2 = MatrixLayout("pp2", nproc=2, pp=2)
SD2V1 = MatrixLayout("sd2v1", nproc=2, sharding=2)
SD2V2 = MatrixLayout("sd2v2", nproc=2, sharding=2, split_param=True)
SD2S2 = MatrixLayout("sd2stage2", nproc=2, sharding=2, stage=2)
SD2S3 = MatrixLayout("sd2stage3", nproc=2, sharding=2, stage=3)
PP4VPP2 = MatrixLayout("pp4vpp2", nproc=4, pp=4, vpp=2)
TP2PP2 = MatrixLayout("tp2pp2", nproc=4, tp=2, pp=2)
TP2SD2V2 = MatrixLayout("tp2sd2v2", nproc=4, tp=2, sharding=2, split_param=True)
PP2SD2V2 = MatrixLayout("pp2sd2v2", nproc=4, pp=2, sharding=2, split_param=True)
EP2 = MatrixLayout("ep2", nproc=2, sharding=2, split_param=True, ep=2)
TP2EP2PP2 = MatrixLayout("tp2ep2pp2", nproc=4, tp=2, pp=2, ep=2)


def by_role(weights: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return role -> name -> live ``ShardedWeight`` of weights and of the states that Paddle's optimizer describes."""
    roles: dict[str, dict[str, Any]] = {"model_state": dict(weights)}
    for name, state in states.items():
        roles.setdefault("master_weight" if name.endswith(".w_0") else "optimizer_state", {})[name] = state
    return roles
