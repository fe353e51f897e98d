"""Fixtures that every room's tests may use, and what Hypothesis may not judge: how long something takes."""

from hypothesis import HealthCheck, settings

from tests.harness.fixtures import bare_ranks, interruptible, patient_ranks, ranks
from tests.storage.buckets import bucket, s3

pytest_plugins = ["tests.harness.sampling", "tests.harness.ordering"]

settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")

__all__ = ["bare_ranks", "bucket", "interruptible", "patient_ranks", "ranks", "s3"]
