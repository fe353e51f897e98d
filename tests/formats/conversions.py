"""Conversions of a checkpoint into every format, and from there into a flex checkpoint."""

from __future__ import annotations

from pathlib import Path

from paddleformers_fc.execute.digest import TensorDigest
from paddleformers_fc.layout.roles import MASTER_WEIGHT, MODEL_STATE, OPTIMIZER_STATE
from tests.cli.support import run
from verification.digests import canonical_digests

_ROLES = {
    "flex": (MODEL_STATE, MASTER_WEIGHT, OPTIMIZER_STATE),
    "distcp": (MODEL_STATE, MASTER_WEIGHT, OPTIMIZER_STATE),
    "hf": (MODEL_STATE,),
}
"""The roles that each format contains."""


def assert_equal_after_conversions(source: Path, directory: Path) -> None:
    """Assert that the MD5 of every canonical tensor is equal there and back."""
    for target, roles in _ROLES.items():
        there, back = directory / target / source.name, directory / f"{target}-back" / source.name
        for one, other, format_ in ((source, there, target), (there, back, "flex")):
            outcome = run("convert", one, other, "--format", format_)
            assert outcome.code == 0, outcome.err
        expected = _digests(source, roles)
        assert any(one.role == MODEL_STATE for one in expected)
        assert _digests(there, roles) == _digests(back, roles) == expected


def _digests(directory: Path, roles: tuple[str, ...]) -> list[TensorDigest]:
    return list(canonical_digests(directory, roles=roles))
