"""A checkpoint of version 0.1.0 before formats had a registry: it is verified, resumed and compared as it was then.

``tests/trainer/older`` contains a checkpoint of step 3 of a tiny Llama in bfloat16 with tensor parallelism 2, the
losses of the six steps of its run and the digests of its tensors, all written by the code of that time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import paddleformers_fc
from paddleformers_fc.execute.digest import canonical_digests
from tests.harness.tiny import SD2V2, TP2
from tests.trainer.test_trainer import JOBS, SIX_STEPS, bf16, settings
from verification.forkserver import ForkServer
from verification.matrix.layouts import MatrixLayout

OLDER = Path(__file__).parent / "older"
CHECKPOINT = OLDER / "checkpoint-3"
EXPECTED = json.loads((OLDER / "expected.json").read_text(encoding="utf-8"))


def digests_of(checkpoint: Path) -> list[list[Any]]:
    """The digests of all tensors, as the file of expected ones lists them."""
    found = canonical_digests(checkpoint, "full")
    return [[one.role, one.name, one.dtype, list(one.shape), one.md5] for one in found]


def test_an_older_checkpoint_has_the_numbers_that_it_had() -> None:
    assert digests_of(CHECKPOINT) == EXPECTED["digests"]
    assert paddleformers_fc.open(str(CHECKPOINT)).metadata.job.step == 3


@pytest.mark.parametrize("layout", [TP2, SD2V2], ids=lambda layout: layout.name)
def test_an_older_checkpoint_is_loaded_bitwise(ranks: ForkServer, tmp_path: Path, layout: MatrixLayout) -> None:
    given = {**settings(bf16(layout), tmp_path, CHECKPOINT, max_steps=3), "model": EXPECTED["model"]}
    ranks.run(f"{JOBS}:resume_and_save_again", 2, given)
    assert digests_of(tmp_path / "checkpoint-3") == EXPECTED["digests"]


def test_an_older_run_is_resumed_with_the_losses_that_it_had(ranks: ForkServer, tmp_path: Path) -> None:
    given = {**settings(bf16(TP2), tmp_path, CHECKPOINT, **SIX_STEPS), "model": EXPECTED["model"]}
    assert ranks.run(f"{JOBS}:run", 2, given).values[0]["losses"] == EXPECTED["losses"][3:]
