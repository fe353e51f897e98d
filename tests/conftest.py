"""Fixtures that every room's tests may use."""

from tests.harness.fixtures import bare_ranks, ranks

__all__ = ["bare_ranks", "ranks"]
