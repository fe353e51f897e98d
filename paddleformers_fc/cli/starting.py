"""What ``train`` can see to be wrong before it starts a rank: seconds and hundreds of lines earlier than a rank would.

Only what is sure is refused. A name that may be one of a hub is left to PaddleFormers.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paddleformers_fc.cli.stock_keys import stock_keys
from paddleformers_fc.errors import EnvironmentMismatch, OptionError
from paddleformers_fc.storage.manifest import read_manifest, verify_files
from paddleformers_fc.storage.places import at_home, place
from paddleformers_fc.trainer.options import FIELD_NAMES
from paddleformers_fc.trainer.resume import refuse_no_checkpoint

INSTALL = 'In the root of this repository run pip install -c constraints.txt ".[cpu]", or ".[gpu]" for NVIDIA devices.'
_DEGREES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "sep_parallel_size",
    "sharding_parallel_size",
)
_PATH = "model_name_or_path"
_LISTS_OF_PATHS = {"train_dataset_path": "train_dataset_prob", "eval_dataset_path": "eval_dataset_prob"}
"""Of files, each of which may end in ``#`` and how many samples are to be taken of it; and of their probabilities."""


def require_paddleformers(doing: str) -> None:
    """Refuse what needs PaddleFormers where it is not installed.

    Args:
        doing: what needs it, as the beginning of a sentence.

    Raises:
        EnvironmentMismatch: it is not installed.
    """
    if importlib.util.find_spec("paddleformers") is None:
        raise EnvironmentMismatch(
            f"{doing} needs PaddleFormers, which is not installed.", where=sys.executable, next_step=INSTALL
        )


def refuse_unknown_keys(settings: Mapping[str, Any], may_be_more: bool) -> None:
    """Refuse keys that neither PaddleFormers nor this package knows.

    Args:
        settings: the configuration with its overrides.
        may_be_more: a file of the user's runs first and may add keys; then only those that begin like ours are judged.

    Raises:
        OptionError: with all of them, and for each the key that it resembles.
    """
    # A dot or a bracket in an override reaches into the value of a key.
    names = sorted({re.split(r"[.\[]", str(key))[0] for key in settings} - set(FIELD_NAMES))
    stock = None if may_be_more else stock_keys()
    if stock is None:
        # PaddleFormers has keys of its own that begin with flex_ckpt.
        unknown = [name for name in names if name.startswith("flex_") and not name.startswith("flex_ckpt")]
    else:
        unknown = [name for name in names if name not in stock]
    if unknown:
        known = (*FIELD_NAMES, *sorted(stock or ()))
        raise OptionError(
            "The configuration has a key that does not exist.",
            where="training arguments",
            evidence=[_suggestion(name, known) for name in unknown],
            next_step=f"Correct the key or remove it. This package has {', '.join(FIELD_NAMES)}.",
        )


def _suggestion(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key.lower(), known, n=1)
    return f"{key}: is {close[0]} meant?" if close else key


def refuse_missing_paths(settings: Mapping[str, Any]) -> None:
    """Refuse models and data that are meant to be on this machine and are not there.

    Raises:
        OptionError: with all of them.
    """
    named = [(_PATH, str(settings.get(_PATH) or ""))]
    for key, probabilities in _LISTS_OF_PATHS.items():
        paths, chances = _listed(settings.get(key)), _listed(settings.get(probabilities))
        if len(paths) == len(chances):
            # PaddleFormers does not look at data that is never drawn.
            paths = [path for path, chance in zip(paths, chances, strict=True) if not _is_nothing(chance)]
        named.extend((key, path.partition("#")[0]) for path in paths)
    missing = [f"{key}: {path}" for key, path in named if _is_local(path) and not Path(at_home(path)).exists()]
    if missing:
        raise OptionError(
            "The configuration names what does not exist.",
            where=str(Path.cwd()),
            evidence=missing,
            next_step="Relative paths begin in the directory you start from, named above. What lies in demo_out is "
            "made by make demo.",
        )


def _listed(value: Any) -> list[str]:
    """The entries of a list as PaddleFormers reads it: without any space, and without those that are empty."""
    return [entry for entry in str("" if value is None else value).replace(" ", "").split(",") if entry]


def _is_nothing(chance: str) -> bool:
    try:
        return float(chance) <= 0
    except ValueError:
        return False


def _is_local(path: str) -> bool:
    """Whether this can only be a path; ``owner/name`` may be on a hub."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def refuse_layout(settings: Mapping[str, Any], ranks: int) -> None:
    """Refuse parallel degrees that a number of ranks cannot have.

    Raises:
        OptionError: their product does not divide it.
    """
    used = {key: settings[key] for key in _DEGREES if isinstance(settings.get(key), int) and settings[key] > 1}
    if not settings.get("sharding"):
        used.pop("sharding_parallel_size", None)
    product = 1
    for degree in used.values():
        product *= degree
    if ranks % product:
        raise OptionError(
            f"{ranks} {'rank' if ranks == 1 else 'ranks'} cannot be divided into groups of {product}.",
            where="--nproc",
            evidence=[f"{key}: {degree}" for key, degree in used.items()],
            next_step=f"Start {product} ranks or a multiple with --nproc, or lower a degree.",
        )


def refuse_resume(settings: Mapping[str, Any]) -> None:
    """Refuse to resume from what is no flex checkpoint, or lacks what the ranks would miss at the first look.

    Raises:
        NotACheckpoint: a directory was named that is none.
        Corrupt: a file of it is missing or of another size, which is looked at unless ``flex_verify`` is off.
    """
    named = settings.get("resume_from_checkpoint")
    if not (settings.get("flex_checkpoint") and isinstance(named, str) and named):
        return
    found = place(at_home(named))
    if not isinstance(found, Path):
        refuse_no_checkpoint(found)
        return
    refuse_no_checkpoint(found)
    # What is not on this machine's disk may be on another's.
    alone = os.environ.get("NNODES", "1") == "1"
    if alone and settings.get("flex_verify", "size") not in ("off", False):
        verify_files(found, read_manifest(found), "size")
