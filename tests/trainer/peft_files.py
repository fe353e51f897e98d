"""``python -m tests.trainer.peft_files DIRECTORY``: exports of adapters whose logits are compared with those of PEFT.

``tools/peft_fixtures.py`` reads them with PEFT.
"""

from __future__ import annotations

import sys
from pathlib import Path

import paddleformers_fc
from tests.harness.tiny import SINGLE
from tests.trainer.export_jobs import weights_of
from verification.forkserver import ForkServer


def write(ranks: ForkServer, directory: Path) -> None:
    """Write ``base``, ``adapter`` and ``merged``, and the logits of PaddleFormers as ``adapter.npy``."""
    weights_of(ranks, directory, "llama", {}).rename(directory / "base")
    job = {
        "layout": SINGLE.to_json(),
        "output_dir": str(directory / "run"),
        "base": str(directory / "base"),
        "target": str(directory / "adapter"),
        "checkpoint": str(directory / "checkpoint-1"),
    }
    ranks.run("tests.trainer.lora_jobs:export_initial", 1, job)
    paddleformers_fc.open(directory / "checkpoint-1").export(directory / "merged", base=directory / "base")


if __name__ == "__main__":
    from tests.harness.fixtures import PATIENT

    with ForkServer(PATIENT) as server:
        write(server, Path(sys.argv[1]))
