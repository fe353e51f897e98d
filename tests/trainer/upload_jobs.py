"""What ranks do in the tests of uploads."""

from __future__ import annotations

import os
from typing import Any

from tests.trainer import jobs


def run(environment: dict[str, str], endpoint: str, **settings: Any) -> dict[str, Any]:
    """Train as :func:`.jobs.run`, with the S3 store of a test."""
    import fsspec

    os.environ.update(environment)
    fsspec.config.conf["s3"] = {"endpoint_url": endpoint}
    return jobs.run(**settings)
