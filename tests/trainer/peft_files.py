"""``python -m tests.trainer.peft_files DIRECTORY``: exports of adapters whose logits are compared with those of PEFT.

``tools/peft_fixtures.py`` reads them with PEFT.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.harness.fixtures import PATIENT
from tests.trainer.test_lora import write_for_peft
from verification.forkserver import ForkServer

if __name__ == "__main__":
    with ForkServer(PATIENT) as server:
        write_for_peft(server, Path(sys.argv[1]))
