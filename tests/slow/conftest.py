"""Ranks whose metadata calls can be made slow, see :mod:`tests.slow`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.compiling import CannotCompile, shared_library
from verification.forkserver import ForkServer


@pytest.fixture(scope="session", name="slow_ranks")
def start_slow_ranks() -> Iterator[ForkServer]:
    """Start ranks under the library; a job says with the environment what is slow."""
    try:
        library = shared_library("metadata", "gcc", [Path(__file__).with_name("metadata.c")], ["-O1", "-ldl"])
    except CannotCompile as reason:
        pytest.skip(str(reason))
    with ForkServer(variables={"LD_PRELOAD": str(library)}) as server:
        yield server
