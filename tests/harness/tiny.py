"""The tiny models of the verification matrices, and the layouts that tests run them under by name."""

from __future__ import annotations

from paddleformers_fc.cli.matrix.layouts import Layout, layout_from
from paddleformers_fc.cli.matrix.tiny import (
    GLOBAL_BATCH,
    SAMPLES,
    SEGMENT,
    SEQUENCE,
    VOCABULARY,
    Samples,
    build,
    collate,
    config,
    initialise,
    model_weight,
    train,
    trainer,
    training_arguments,
    weight,
)

__all__ = [
    "GLOBAL_BATCH",
    "SAMPLES",
    "SEGMENT",
    "SEQUENCE",
    "VOCABULARY",
    "Layout",
    "Samples",
    "build",
    "collate",
    "config",
    "initialise",
    "layout_from",
    "model_weight",
    "train",
    "trainer",
    "training_arguments",
    "weight",
]

SINGLE = Layout("single")
DP2 = Layout("dp2", nproc=2)
TP2 = Layout("tp2", nproc=2, tp=2)
PP2 = Layout("pp2", nproc=2, pp=2)
SD2V1 = Layout("sd2v1", nproc=2, sharding=2)
SD2V2 = Layout("sd2v2", nproc=2, sharding=2, split_param=True)
SD2S2 = Layout("sd2stage2", nproc=2, sharding=2, stage=2)
SD2S3 = Layout("sd2stage3", nproc=2, sharding=2, stage=3)
PP4VPP2 = Layout("pp4vpp2", nproc=4, pp=4, vpp=2)
TP2PP2 = Layout("tp2pp2", nproc=4, tp=2, pp=2)
TP2SD2V2 = Layout("tp2sd2v2", nproc=4, tp=2, sharding=2, split_param=True)
PP2SD2V2 = Layout("pp2sd2v2", nproc=4, pp=2, sharding=2, split_param=True)
EP2 = Layout("ep2", nproc=2, sharding=2, split_param=True, ep=2)
TP2EP2PP2 = Layout("tp2ep2pp2", nproc=4, tp=2, pp=2, ep=2)
