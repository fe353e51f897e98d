"""Names of the directories beside a checkpoint.

====================================  =================================================================================
``checkpoint-500``                    a checkpoint; 500 is the step
``.checkpoint-500.unfinished-TOKEN``  a staging directory, of a running save or of a process that died
``.checkpoint-500.aside-TOKEN``       an older checkpoint while a newer one takes its name
``.checkpoint-500.removed-TOKEN``     a checkpoint that is being deleted
``kept-TOKEN.checkpoint-500``         files of other programs that had the name; never deleted here
====================================  =================================================================================

No name but the first matches ``checkpoint-*``, so that people and the Trainer's rotation do not take the others for
checkpoints.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import TypeVar

from paddleformers_fc.errors import OptionError
from paddleformers_fc.storage.paths import AnyPath, RemotePath

_P = TypeVar("_P", Path, RemotePath, AnyPath)

UNFINISHED = "unfinished"
ASIDE = "aside"
REMOVED = "removed"

_CHECKPOINT = re.compile(r"checkpoint-([0-9]+)")
_KEPT = re.compile(r"kept-[0-9a-f]+\.(.+)", re.DOTALL)
_BESIDE = re.compile(rf"\.(.+)\.({UNFINISHED}|{ASIDE}|{REMOVED})-[0-9a-f]+", re.DOTALL)


def hidden_name(target: Path, state: str) -> Path:
    """Return a fresh name next to ``target`` for a directory in one of the three hidden states.

    Raises:
        OptionError: the target has no name that another directory can take.
    """
    if target.name in ("", ".."):
        raise OptionError(
            f"{target} has no name of its own, and a checkpoint is renamed when it is complete.",
            where=str(target),
            next_step="Name a directory such as checkpoint-3; nothing was written.",
        )
    return target.with_name(f".{target.name}.{state}-{secrets.token_hex(6)}")


def backup_name(target: Path) -> Path:
    """Return a fresh name next to ``target`` for files that were there before and are not ours."""
    return target.with_name(f"kept-{secrets.token_hex(6)}.{target.name}")


def parse_hidden(path: _P) -> tuple[_P, str] | None:
    """Return ``(target, state)`` of a directory in one of the hidden states; None for any other name."""
    match = _BESIDE.fullmatch(path.name)
    return (path.with_name(match[1]), match[2]) if match else None


def parse_kept(path: _P) -> _P | None:
    """Return the name that a backup directory (:func:`backup_name`) was made from; None for any other name."""
    match = _KEPT.fullmatch(path.name)
    return path.with_name(match[1]) if match else None


def parse_step(path: AnyPath) -> int | None:
    """Return the step of a directory called ``checkpoint-N``; None for any other name."""
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else None
