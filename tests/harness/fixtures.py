"""Fixtures of the whole suite: the fork servers, which live as long as the session, and interrupts."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.harness.limits import LIMIT
from verification.forkserver import PRELOAD, ForkServer

PATIENT = (*PRELOAD, "tests.harness.limits:be_patient")

OURS = (
    "paddleformers_fc.trainer.startup",
    "paddleformers_fc.trainer.pretrained",
    "paddleformers_fc.trainer.entry",
    "paddleformers_fc.trainer.loop",
    "paddleformers_fc.trainer.streaming",
    "tests.trainer.test_lora",
)
"""What most jobs import: half of a short job's time, where each of its ranks imports it."""

THEIRS = ("paddleformers.trainer.trainer", "paddleformers.transformers.auto.modeling")
"""What PaddleFormers imports when it is first used."""

COMMAND_LINE = ("paddleformers.cli.launcher", "paddleformers.cli.train.tuner")
WARM = "tests.harness.fixtures:warm_up"
FREEZE = "gc:freeze"
"""Ranks need not look through what their server has imported."""


def warm_up() -> None:
    """Let a server read upstream's functions and prove the families of most jobs, which each rank would do again."""
    from paddleformers_fc import upstream
    from paddleformers_fc.families.registry import family_for
    from paddleformers_fc.upstream.hooks import PADDLEFORMERS, TRAINERS

    upstream.differences((*TRAINERS[PADDLEFORMERS], *upstream.cpu_runtime_hooks()))
    for model_type in ("llama", "ernie4_5_moe"):
        family_for({"model_type": model_type})


@pytest.fixture(scope="session")
def ranks() -> Iterator[ForkServer]:
    """Forks ranks in which Paddle and PaddleFormers are imported and the CPU runtime is active."""
    with ForkServer((*PATIENT, *OURS, *COMMAND_LINE, WARM, FREEZE)) as server:
        yield server


@pytest.fixture(scope="session")
def patient_ranks(ranks: ForkServer) -> ForkServer:
    """The same ranks, which live on when one of them has failed: for tests of what the others then do."""
    return ranks.with_grace(LIMIT)


@pytest.fixture(scope="session")
def bare_ranks() -> Iterator[ForkServer]:
    """The same without the CPU runtime: what Paddle and PaddleFormers do by themselves."""
    with ForkServer(preload=[*(entry for entry in PRELOAD if ":" not in entry), *THEIRS, FREEZE]) as server:
        yield server


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restore Python's own handling of interrupts, which a process in the background of a shell ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
