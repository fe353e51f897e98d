"""Fixtures that every room's tests may use."""

from tests.harness.fixtures import bare_ranks, ranks
from tests.storage.buckets import bucket, s3

__all__ = ["bare_ranks", "bucket", "ranks", "s3"]
