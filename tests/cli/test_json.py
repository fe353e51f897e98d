"""The documents of ``--json`` have exactly the documented keys and types."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import typer

from paddleformers_fc.cli.main import app
from paddleformers_fc.errors import FlexError
from tests.cli.support import run, save
from tests.execute.simulated import canonical
from tools.json_page import DOCUMENTS, FREE

ERROR = {"error", "what", "where", "evidence", "next_step"}


def test_every_command_has_a_documented_document() -> None:
    documented = {name.split()[0] for name in (*DOCUMENTS, *FREE)}
    assert documented == set(typer.main.get_group(app).commands)


COMMANDS = {
    "inspect": ["inspect", "{stored}", "--tensors"],
    "inspect output": ["inspect", "{out}"],
    "list": ["list", "{out}"],
    "explain": ["explain", "{stored}", "model.norm.weight"],
    "doctor": ["doctor", "{out}", "--no-hooks"],
    "verify": ["verify", "{stored}"],
    "diff": ["diff", "{stored}", "{other}"],
    "plan": ["plan", "{stored}", "--to", "tp=2,dp=2"],
    "export": ["export", "{stored}", "{target}"],
    "convert": ["convert", "{stored}", "{target}"],
    "clean": ["clean", "{out}"],
    "aoa": ["aoa", "llama", "--toy"],
    "families": ["families"],
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_document_has_the_documented_keys_and_types(case: str, stored: Path, tmp_path: Path) -> None:
    arrays = canonical()
    arrays["model.norm.weight"][0] += 1
    other = save(tmp_path / "other", arrays) if case == "diff" else stored
    shutil.rmtree(tmp_path / "hf", ignore_errors=True)
    places = {"stored": stored, "out": stored.parent, "other": other, "target": tmp_path / "hf"}
    outcome = run(*(part.format(**places) for part in COMMANDS[case]), "--json")
    assert outcome.code == (1 if case == "diff" else 0), outcome.out
    kind = DOCUMENTS[case.split()[0]]
    found = msgspec.json.decode(outcome.out, type=kind)
    # Nothing is lost or invented: no key is undocumented, and none is left out.
    assert msgspec.json.decode(msgspec.json.encode(found)) == outcome.document


def test_a_failed_verification_has_the_keys_of_an_error_beside_its_own(copy: Path) -> None:
    (copy / "config.json").unlink()
    document = run("verify", copy, "--json").document
    assert document.keys() == ERROR | set(DOCUMENTS["verify"].__struct_fields__)
    assert set(msgspec.json.decode(FlexError("It failed.").to_wire())) == ERROR
