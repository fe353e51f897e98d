"""The file for ``custom_register_path``: it teaches the stock ``paddleformers-cli`` flex checkpoints.

The command line runs it in every worker process, by its path and under another module's name, before it parses the
YAML. Its path, for the YAML, is printed by::

    python -m paddleformers_fc.trainer.register
"""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).resolve()
"""What ``custom_register_path`` has to name."""


def register() -> None:
    """Let the stock Trainer and argument parser know ``flex_checkpoint``; on a CPU, mend Paddle for training."""
    from paddleformers_fc.runtime import activate
    from paddleformers_fc.trainer.install import install

    activate()
    install()


if __name__ == "__main__":
    print(PATH)
elif __name__ != "paddleformers_fc.trainer.register":
    register()
