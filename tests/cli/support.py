"""A command line in this process, and small checkpoints to point it at."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors
import yaml
from safetensors.numpy import save_file

from paddleformers_fc.cli.main import main
from paddleformers_fc.distributed.channel import ALONE
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.storage.files import files_within
from paddleformers_fc.trainer import tiers
from tests.execute.simulated import CONFIG, HIDDEN, INTERMEDIATE, VOCABULARY, Arrays, Roles, attempt_save, live
from tests.harness.sealing import reseal
from tests.storage.support import flip as flip

STEP = 3
SIZES = {
    **CONFIG,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class Outcome:
    """What a command line returned and printed."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Standard output as the one JSON document it must be."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document


def claim_local_tier(output_dir: Path, local: Path) -> None:
    """Make a directory the local tier of an output directory, as a training does."""
    args = SimpleNamespace(output_dir=str(output_dir), flex_local_dir=str(local), flex_checkpoint=True)
    tiers.claim(args, ALONE, [tiers.known_tier(args, 0)])


def md5_of(files: Iterable[bytes]) -> str:
    """The documented md5 of the names and bytes of all tensors in files, by the safetensors library."""
    tensors = {name: tensor["data"] for data in files for name, tensor in safetensors.deserialize(data)}
    lines = (f"{name} {hashlib.md5(tensors[name]).hexdigest()}\n" for name in sorted(tensors))
    return hashlib.md5("".join(lines).encode()).hexdigest()


def content(directory: Path) -> dict[str, bytes]:
    """Every file of a directory by its path in it."""
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files_within(directory)}


def run(*arguments: object) -> Outcome:
    """Run ``paddleformers-fc`` with these arguments."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


def document_of(*arguments: object, code: int = 0) -> dict[str, Any]:
    """The document of a command under ``--json``, which returns this code."""
    outcome = run(*arguments, "--json")
    assert outcome.code == code, outcome.out + outcome.err
    return outcome.document


def save(
    directory: Path,
    arrays: Arrays,
    tp: int = 1,
    sharded: int = 1,
    config: Mapping[str, Any] = CONFIG,
    roles: tuple[str, ...] = ("model_state", "optimizer_state"),
) -> Path:
    """Save a checkpoint as ``tp * sharded`` ranks; its directory."""

    def held(rank: int) -> Roles:
        return {role: names for role, names in live(arrays, tp, rank, sharded=sharded).items() if role in roles}

    described, parallel = ModelDescription(config), {"tp": tp, "pp": 1}
    attempt_save(directory, held, tp * sharded, described=described, step=STEP, parallel=parallel).results()
    return directory


def open_weights(directory: Path, arrays: Arrays, config: Mapping[str, Any] | None = None, form: str = "pt") -> Path:
    """Write open weights in one file, and a configuration if one is given; the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(arrays, directory / "model.safetensors", {"format": form})
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def seal(checkpoint: Path, block_bytes: int = 1 << 20) -> None:
    """Write the manifest again for the present files, with checksum blocks of this length."""
    reseal(checkpoint, block_bytes)


def alter(path: Path) -> None:
    """Replace the last digit of a document by another one: valid JSON of equal length."""
    raw = path.read_bytes()
    at = max(found.start() for found in re.finditer(rb"[0-9]", raw))
    path.write_bytes(raw[:at] + (b"1" if raw[at : at + 1] != b"1" else b"2") + raw[at + 1 :])


def config(directory: Path, **keys: Any) -> Path:
    """A YAML of a training with these keys and an output directory."""
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(directory / "out"), "flex_checkpoint": True, **keys}))
    return path
