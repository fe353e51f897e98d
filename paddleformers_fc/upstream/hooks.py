"""The tables of upstream hooks: what this package replaces or reads in Paddle and in the library with the Trainer.

The rows are in ``hooks.txt``, by table, as templates for the libraries. PaddleFleet's Trainer is PaddleFormers' after a
move. No public index has it, so its rows were compared with its public source (docs/compatibility.md), and a run on it
needs ``flex_unknown_versions: warn``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
        trainer: the tables of the Trainer and its models, in addition to the common one.
        cpu_runtime: the table of the CPU runtime, in addition to Paddle's.
    """

    name: str
    version: str
    keys: tuple[str, ...]
    trainer: tuple[str, ...]
    cpu_runtime: str


_KEY, _NEW_KEY = "save_to_hf", "save_safetensors"
LIBRARIES = {
    PADDLEFORMERS: Library(
        "PaddleFormers", "1.2.0", (_KEY, _NEW_KEY), ("formers", "alternating"), "cpu_runtime_formers"
    ),
    PADDLEFLEET: Library("PaddleFleet", "", (_NEW_KEY,), ("formers", "switching"), "cpu_runtime_formers"),
    PADDLENLP: Library("PaddleNLP", "3.0.0b4", (), ("nlp",), "cpu_runtime_nlp"),
}
"""The libraries by package. The first installed one is used."""


_SECTIONS = re.split(r"^\[(\w+)\]\n", Path(__file__).with_name("hooks.txt").read_text("utf-8"), flags=re.MULTILINE)
_TABLES = dict(zip(_SECTIONS[1::2], _SECTIONS[2::2], strict=True))


def _hooks(library: str, *tables: str) -> Iterator[Hook]:
    """Yield the hooks of some tables for one library."""
    keys, above = LIBRARIES[library].keys, ""
    values = {"library": library, "key": "|".join(keys), "own_key": "|".join(f"_{key}" for key in keys)}
    filled = "".join(_TABLES[one] for one in tables).format(**values)
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


TRAINERS = {name: tuple(_hooks(name, "trainer", *one.trainer)) for name, one in LIBRARIES.items()}
"""The hooks of a Trainer with ``flex_checkpoint: true``, by library."""

LOOP = tuple(hook for hook in TRAINERS[PADDLEFORMERS] if hook.package == "paddle")
"""The hooks of ``save`` and ``load`` without a Trainer."""

_MODEL_PACKAGES = ("generation", "peft", "quantization", "transformers", "utils")
MODELS = {
    name: tuple(hook for hook in hooks if hook.place.startswith(tuple(f"{name}.{one}." for one in _MODEL_PACKAGES)))
    for name, hooks in TRAINERS.items()
}
"""The additional hooks of a library's models."""

COMMAND_LINES = {name: tuple(_hooks(name, "command_line")) for name in (PADDLEFORMERS, PADDLEFLEET)}
"""The additional hooks of a library's command line."""

CPU_RUNTIMES = {name: tuple(_hooks(name, "cpu_runtime", one.cpu_runtime)) for name, one in LIBRARIES.items()}
"""The hooks of the CPU runtime's patches to Paddle and the library; unused on an accelerator."""
