"""Checkpoints that are saved once per session. A test that damages one copies it first."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.support import SIZES, run, save
from tests.execute.simulated import canonical


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, saved by one rank (``one``) and by four (``four``: tensor parallel 2, optimizer sharded
    over 2), and exported into several files (``open``)."""
    root = tmp_path_factory.mktemp("kept")
    save(root / "one", canonical())
    save(root / "four", canonical(), tp=2, sharded=2)
    assert run("export", root / "one", root / "open", "--max-shard-size", "8kB").code == 0
    return root


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four ranks with the sizes of its model, alone in an output directory."""
    return save(tmp_path_factory.mktemp("stored") / "checkpoint-3", canonical(), tp=2, sharded=2, config=SIZES)


@pytest.fixture
def one(kept: Path) -> Path:
    """A checkpoint of one rank."""
    return kept / "one"


@pytest.fixture
def four(kept: Path) -> Path:
    """The same weights, saved by four ranks."""
    return kept / "four"


@pytest.fixture
def weights(kept: Path) -> Path:
    """The same weights as Hugging Face files."""
    return kept / "open"


@pytest.fixture
def copy(four: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint of four ranks, to be damaged."""
    return Path(shutil.copytree(four, tmp_path / "checkpoint-3"))


@pytest.fixture
def weights_copy(weights: Path, tmp_path: Path) -> Path:
    """A copy of the Hugging Face files, to be damaged."""
    return Path(shutil.copytree(weights, tmp_path / "open"))
