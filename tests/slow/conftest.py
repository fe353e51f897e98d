"""Ranks whose metadata calls can be made slow, see :mod:`tests.slow`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slow import library
from verification.forkserver import ForkServer


@pytest.fixture(scope="session", name="slow_ranks")
def start_slow_ranks() -> Iterator[ForkServer]:
    """Start ranks under the library; a job says with the environment what is slow."""
    path = library()
    if path is None:
        pytest.skip("gcc is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(path))
        server = ForkServer().__enter__()
    try:
        yield server
    finally:
        server.__exit__(None, None, None)
