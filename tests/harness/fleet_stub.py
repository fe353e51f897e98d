"""The stand-in for PaddleFleet of the verification matrices, in tests."""

from verification.matrix.fleet_stub import install

__all__ = ["install"]
