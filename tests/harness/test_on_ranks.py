"""An assertion that fails on one rank fails the test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paddleformers_fc.errors import PeerError
from tests.harness.on_ranks import run_on_ranks
from verification.forkserver import ForkServer


def fail_on_the_last_rank(directory: Path) -> None:
    assert os.environ["PADDLE_TRAINER_ID"] != "1", directory


def test_an_assertion_that_fails_on_one_rank_fails_the_test(ranks: ForkServer, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"rank 1 returned 1") as raised:
        run_on_ranks(ranks, 2, fail_on_the_last_rank, directory=tmp_path)
    assert any(f"AssertionError: {tmp_path}" in line for line in raised.value.evidence)
