"""One turn of a contender in one rank: a first call of a fresh process, and a later one.

A rank is forked from a server that has imported Paddle or PyTorch, and nothing that a contender needs beside it. What
is timed begins when all ranks have built their tensors: the import of the contender, and its call.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.performance.held import Held
from benchmarks.performance.measuring import with_peak
from benchmarks.performance.pieces import Values, from_canonical, part_of, read_pieces, zeros
from benchmarks.performance.slow_storage import Storage, limited

FILLING = ("load", "start")
"""Verbs that fill tensors, which are zero before."""
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "raw": ("raw", {}),
    "safetensors": ("with_safetensors", {}),
    "stock": ("stock", {}),
    "stock safetensors": ("stock_safetensors", {}),
    "ours": ("ours", {}),
    "ours size": ("ours", {"verify": "size"}),
    "ours off": ("ours", {"verify": "off"}),
    "ours exported": ("ours", {"exported": True}),
    "dcp": ("dcp", {}),
}
"""Module and options by the names of the cases."""


def turn(
    contender: str,
    verb: str,
    held: str,
    places: list[list[str]],
    storage: dict[str, Any] | None = None,
    check: str = "",
) -> dict[str, Any]:
    """Call a contender once for each of ``places``.

    Args:
        contender: a name of :data:`CONTENDERS`.
        verb: ``save``, ``load``, ``start``, ``export``, ``stream``, ``verify`` or ``diff``.
        held: the directory with the configuration of the model and the pieces of every rank.
        places: the directories of every call.
        storage: the fields of a :class:`.Storage`; None for files in memory.
        check: what each tensor must contain after a call: ``values``, ``canonical`` values, or unchecked if empty;
            ``streamed`` for another call that checks the tensors of a stream.
    Returns:
        ``calls``, with begin and end on the machine's clock, seconds by phase, bytes read and rise of memory of each.
    """
    rank, ranks = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
    framework = importlib.import_module(f"benchmarks.performance.{'torch' if contender == 'dcp' else 'paddle'}_tensors")
    framework.begin(rank, ranks)
    config = json.loads((Path(held) / "config.json").read_text(encoding="utf-8"))
    pieces = read_pieces(Path(held) / f"{rank}.json")
    tensors, memory = framework.hold(pieces, zeros if verb in FILLING else part_of, ranks)
    own = Held(config, rank, ranks, pieces, tensors, memory)
    gc.collect()
    expected = {"values": part_of, "canonical": from_canonical}.get(check)
    calls = []
    for number, directories in enumerate(places):
        if number and verb in FILLING:
            for array in memory:
                array.fill(0)
        framework.wait_for_all(ranks)
        with limited(None if storage is None else Storage(**storage), number):
            calls.append(_call(contender, verb, own, [Path(one) for one in directories]))
        if expected is not None:
            _check(own, expected)
    if check == "streamed":
        _call(contender, verb, own, [Path(one) for one in places[-1]], is_checked=True)
    return {"calls": calls}


def _call(contender: str, verb: str, own: Held, directories: list[Path], **more: Any) -> dict[str, Any]:
    """Import a contender and call its function of a verb."""
    name, options = CONTENDERS[contender]
    begun = time.monotonic()
    module = importlib.import_module(f"benchmarks.performance.{name}")
    if name == "ours":
        module.prepare(verb)
    imported = time.monotonic()
    work = getattr(module, verb)
    done, peak = with_peak(lambda: work(*directories, own, **options, **more))
    phases = {"import": imported - begun, **done.phases}
    return {"begun": begun, "ended": time.monotonic(), "phases": phases, "read": done.read, "peak": peak}


def _check(own: Held, expected: Values) -> None:
    wrong = [
        piece.name
        for piece, array in zip(own.pieces, own.memory, strict=True)
        if array.tobytes() != expected(piece).tobytes()
    ]
    if wrong:
        raise RuntimeError(f"{len(wrong)} tensors are not filled with the right bits, {wrong[0]} first")
