"""The runs that tests of formats read."""

from tests.formats.runs import runs

__all__ = ["runs"]
