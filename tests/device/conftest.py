"""The ranks of the tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.device.running import Ranks, device_ranks


@pytest.fixture(scope="session", name="device_ranks")
def start_device_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Start jobs whose tensors live on the device under test."""
    with device_ranks(tmp_path_factory.mktemp("device")) as started:
        yield started
