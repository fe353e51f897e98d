"""Checkpoints of short runs of the stock Trainer and of ours: each is saved once, for all tests that read it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.formats.jobs import train
from tests.harness.on_ranks import run_on_ranks
from verification.forkserver import ForkServer
from verification.matrix.layouts import parse_layout
from verification.matrix.tiny import keys


class Runs:
    """The checkpoints of runs of two steps. A test that changes one changes a copy."""

    def __init__(self, ranks: ForkServer, root: Path) -> None:
        self._ranks, self._root = ranks, root
        self._saved: dict[str, Path] = {}

    def __call__(
        self,
        layout: str,
        options: Mapping[str, Any] | None,
        bf16: bool = False,
        model: Mapping[str, Any] | None = None,
        frozen: Sequence[str] = (),
    ) -> Path:
        """The checkpoint of a run of the stock Trainer with some options, or of ours for None.

        It has a ``config.json``, which Paddle's FlexCheckpoint lacks.
        """
        key = json.dumps([layout, options, bf16, model or {}, frozen], sort_keys=True)
        if key not in self._saved:
            used, model_type = replace(parse_layout(layout), bf16=bf16), (model or {}).get("model_type", "llama")
            output_dir = self._root / str(len(self._saved))
            given = {
                "layout": used,
                "output_dir": output_dir,
                "arguments": {"max_steps": 2, "save_steps": 2, **(options or {})},
                "ours": options is None,
                "model": {name: value for name, value in (model or {}).items() if name != "model_type"},
                "model_type": model_type,
                "frozen": frozen,
            }
            assert run_on_ranks(self._ranks, used.nproc, train, **given)[0]["step"] == 2
            self._saved[key] = output_dir / "checkpoint-2"
            if not (self._saved[key] / "config.json").exists():
                (self._saved[key] / "config.json").write_text(json.dumps({**keys(model_type), **(model or {})}))
        return self._saved[key]


@pytest.fixture(scope="session")
def runs(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The runs of this session."""
    return Runs(ranks, tmp_path_factory.mktemp("runs"))
