"""Run first the packages and files that take long, so that no worker has a long file left when the others are done.

Packages of the same place keep their order. ``make test`` passes ``--no-loadscope-reorder``, because xdist would put
the files with the most tests first, which are short.
"""

from __future__ import annotations

import pytest

LONG = (
    "tests/nodes/",
    "tests/trainer/",
    "tests/device/",
    "tests/corruption/",
    "tests/crash/",
    "tests/verification/",
    "tests/formats/",
    "tests/cli/",
    "tests/cpu_runtime/",
    "tests/execute/",
    "tests/families/",
    "tests/storage/",
    "tests/mapping/",
)
"""Packages, or files of packages whose others are short."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by the place of their package."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    return next((place for place, package in enumerate(LONG) if item.nodeid.startswith(package)), len(LONG))
