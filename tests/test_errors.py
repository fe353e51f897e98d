"""An error is of bounded length, whatever it quotes, and wherever it goes."""

from __future__ import annotations

import ast
import json
import struct
from collections import Counter
from pathlib import Path

import msgspec
import pytest

import paddleformers_fc
from paddleformers_fc.distributed.channel import run_on_all
from paddleformers_fc.errors import BY_NAME, LONGEST_LINE, MOST_EVIDENCE, Corrupt, FlexError, FormatError, from_wire
from paddleformers_fc.plan.report import Report
from paddleformers_fc.storage.safetensors import read_header
from tests.execute.simulated import job

LONG = 50_000_000


def longest(error: FlexError) -> int:
    """The length of the longest text that an error carries."""
    return max(map(len, (error.what, error.where, error.next_step, *error.evidence)))


def test_a_tensor_with_a_name_of_50_mb_is_refused_on_every_rank_in_an_error_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "long.safetensors"
    header = json.dumps({"x" * LONG: {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    for error in job(2, lambda channel: run_on_all(channel, "reading", lambda: read_header(path))):
        assert isinstance(error, (FormatError, Corrupt))
        assert 0 < longest(error) <= LONGEST_LINE
        assert max(len(error.to_wire()), len(str(error))) < 3 * LONGEST_LINE


def test_errors_of_other_ranks_are_bounded_too() -> None:
    wire = {"error": "Corrupt", "what": "w" * LONG, "where": "w" * LONG, "evidence": ["e" * LONG], "next_step": ""}
    assert longest(from_wire(json.dumps(wire))) <= LONGEST_LINE
    report = Report()
    report.add("unexpected", "x" * LONG)
    assert len(msgspec.msgpack.encode(report)) < 2 * LONGEST_LINE


def test_evidence_is_bounded_in_total_and_counts_omitted_lines() -> None:
    lines = [f"{number:06d} {'x' * 93}" for number in range(50_000)]
    error = FormatError("Many.", evidence=lines)
    assert sum(map(len, error.evidence)) <= MOST_EVIDENCE
    assert error.evidence[:-1] == tuple(lines[: len(error.evidence) - 1])
    assert error.evidence[-1] == f"... and {len(lines) - len(error.evidence) + 1} lines more"
    assert from_wire(error.to_wire()).evidence == error.evidence


@pytest.mark.parametrize("length", [LONGEST_LINE - 1, LONGEST_LINE, LONGEST_LINE + 1, 3 * LONGEST_LINE])
def test_a_long_line_keeps_both_ends_and_is_not_cut_again_when_sent(length: int) -> None:
    text = "begin" + "." * (length - 8) + "end"
    error = FlexError(text, evidence=[text])
    assert (error.what == text) == (length <= LONGEST_LINE)
    assert error.what.startswith("begin.")
    assert error.what.endswith(".end")
    sent = from_wire(error.to_wire())
    assert (sent.what, sent.evidence) == (error.what, error.evidence)


def test_an_error_in_one_line_of_a_log_is_one_line_without_control_characters() -> None:
    error = FormatError("A name.", evidence=["'\x1b[2Jcleared'\nWARNING forged", "x" * LONG])
    line = error.in_one_line()
    assert line.isprintable()
    assert len(line) < 2 * LONGEST_LINE


def test_an_error_in_one_line_has_the_last_part_of_its_place_and_the_evidence_behind_a_colon() -> None:
    error = FormatError("/run/checkpoint-6 is damaged: 1 fault found.", where="/run/checkpoint-6", evidence=["a", "b"])
    assert error.in_one_line() == "checkpoint-6 is damaged: 1 fault found: a; b"
    inside = "/run/checkpoint-6/flex_checkpoint.json"
    assert FormatError(f"{inside} is short.", where=inside).in_one_line() == "flex_checkpoint.json is short."
    for where in ("", "/", "training arguments", "/run/check"):
        assert FormatError("/run/checkpoint-6 is short.", where=where).in_one_line() == "/run/checkpoint-6 is short."


RAISED = frozenset(BY_NAME)
INTERNAL = {
    "execute/save.py": 1,
    "execute/save_plan.py": 1,
    "formats/index.py": 1,
    "storage/files.py": 6,
    "storage/manifest.py": 2,
    "storage/paths.py": 1,
    "storage/pickles.py": 1,
    "storage/safetensors.py": 1,
}
"""Errors without a next step, by module: faults of this package, which no argument, option or file causes."""


def test_every_error_that_a_user_can_cause_has_a_next_step() -> None:
    package = Path(paddleformers_fc.__file__).parent
    found: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RAISED:
                found[path.relative_to(package).as_posix()] += all(one.arg != "next_step" for one in node.keywords)
    assert {module: count for module, count in found.items() if count} == INTERNAL
