"""The upstream hooks: what this package replaces or reads in Paddle and in the library with the Trainer.

The tables are data: ``hooks.txt``, which describes its own format. They are templates for several libraries.
PaddleFleet's Trainer is PaddleFormers' after a move. No public index has it, so its rows were compared with its public
source (docs/compatibility.md), and a run on it needs ``flex_unknown_versions: warn``.

Time: 1 ms to read the tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PADDLEFORMERS, PADDLEFLEET, PADDLENLP = "paddleformers", "paddlefleet", "paddlenlp"


class Hook(NamedTuple):
    """One upstream object that this package depends on.

    Args:
        place: module and object, such as ``paddleformers.trainer.trainer:Trainer.train``, or a module alone.
        signature: its parameters without annotations; empty if they are not compared.
        names: for a class or a module, the attributes and fields that it must have; for a function, the names and texts
            that its code must use.
    """

    place: str
    signature: str
    names: tuple[str, ...]

    @property
    def package(self) -> str:
        """The package of the place."""
        return self.place.partition(":")[0].partition(".")[0]


class Library(NamedTuple):
    """A library with a Trainer.

    Args:
        name: its name in messages.
        version: the tested version; empty if there is none.
        keys: the names of the key for weights in Hugging Face format, over all versions.
        trainer: the tables of its Trainer and its models.
        cpu_runtime: the tables of the CPU runtime for it.
    """

    name: str
    version: str
    keys: tuple[str, ...]
    trainer: tuple[str, ...]
    cpu_runtime: tuple[str, ...]


_KEY, _NEW_KEY = "save_to_hf", "save_safetensors"
_COMMON, _FORMERS = ("trainer", "callbacks"), ("cpu_runtime", "cpu_runtime_formers")
LIBRARIES = {
    PADDLEFORMERS: Library("PaddleFormers", "1.2.0", (_KEY, _NEW_KEY), (*_COMMON, "formers", "alternating"), _FORMERS),
    PADDLEFLEET: Library("PaddleFleet", "", (_NEW_KEY,), (*_COMMON, "formers", "switching"), _FORMERS),
    PADDLENLP: Library("PaddleNLP", "3.0.0b4", (), (*_COMMON, "nlp"), ("cpu_runtime", "cpu_runtime_nlp")),
}
"""The libraries by package. The first installed one is used."""


def _read_tables() -> dict[str, str]:
    """Return the tables of ``hooks.txt`` by name."""
    _, *parts = re.split(r"^\[(\w+)\]$", Path(__file__).with_name("hooks.txt").read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


_TABLES = _read_tables()


def _hooks(tables: Sequence[str], library: str) -> Iterator[Hook]:
    """Yield the hooks of some tables for one library."""
    keys = LIBRARIES[library].keys
    above = ""
    filled = "".join(_TABLES[name] for name in tables).format(
        library=library, key="|".join(keys), own_key="|".join(f"_{key}" for key in keys)
    )
    for line in filled.replace("\n        ", " ").splitlines():
        row = line.strip()
        if not row or row.startswith("#"):
            continue
        if row.endswith((":", ".")):
            above = row
            continue
        described, _, names = row.partition(": ")
        place, parenthesis, parameters = described.partition("(")
        yield Hook((above if line[0] == " " else "") + place, parenthesis + parameters, tuple(names.split()))


TRAINERS = {name: tuple(_hooks(one.trainer, name)) for name, one in LIBRARIES.items()}
"""The hooks of a Trainer with ``flex_checkpoint: true``, by library."""

LOOP = tuple(hook for hook in TRAINERS[PADDLEFORMERS] if hook.package == "paddle")
"""The hooks of ``save`` and ``load`` without a Trainer."""

_MODEL_PACKAGES = ("generation", "peft", "quantization", "transformers", "utils")
MODELS = {
    name: tuple(hook for hook in hooks if hook.place.startswith(tuple(f"{name}.{one}." for one in _MODEL_PACKAGES)))
    for name, hooks in TRAINERS.items()
}
"""The additional hooks of a library's models."""

COMMAND_LINES = {name: tuple(_hooks(["command_line"], name)) for name in (PADDLEFORMERS, PADDLEFLEET)}
"""The additional hooks of a library's command line."""

CPU_RUNTIMES = {name: tuple(_hooks(one.cpu_runtime, name)) for name, one in LIBRARIES.items()}
"""The hooks of the CPU runtime's patches to Paddle and the library; unused on an accelerator."""
