"""Trainings on the device: saved, resumed under another layout and exported, with the numbers of a CPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.execute.export import export_checkpoint
from tests.device.running import FAKE, Ranks, device
from tests.harness.tiny import DP2, PP2, SD2V1, SINGLE, TP2, MatrixLayout
from verification.digests import canonical_digests

_REPORTED = re.compile(r"(Saved|Resumed) step \d+ ")


@dataclass(frozen=True)
class Case:
    """A training under one layout that is resumed under another one."""

    saved: MatrixLayout
    resumed: MatrixLayout
    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    bf16: bool = False

    def __str__(self) -> str:
        beside = "-async" * ("flex_async_save" in self.arguments)
        return f"{self.saved.name}-{self.resumed.name}{'-bf16' * self.bf16}{beside}"


# The fake accelerator cannot train with split_param or under stages 2 and 3: the fallback of an operator in place gives
# its output memory of its own, so that a parameter leaves its fused buffer. Data parallel ranks in bfloat16 do not run
# either: they keep gradients where through_host.Reducer does not find them.
CASES = [
    Case(DP2, TP2, {"flex_read": "once", "flex_verify": "full"}),
    Case(SINGLE, SINGLE, bf16=True),
    Case(TP2, SD2V1, {"flex_verify": "full"}, bf16=True),
    Case(PP2, SINGLE, model={"tie_word_embeddings": True}),
    Case(SD2V1, PP2, {"flex_read": "once"}),
    Case(SINGLE, TP2, {"flex_async_save": True}),
    Case(TP2, SINGLE, {"flex_async_save": True}, bf16=True),
]


# In make test: snapshots, master weights and another degree. Every way of reading is in test_memory.py.
@pytest.mark.parametrize(
    "case", [*(pytest.param(one, marks=pytest.mark.slow) for one in CASES[:-1]), CASES[-1]], ids=str
)
def test_a_training_resumes_under_another_layout(device_ranks: Ranks, tmp_path: Path, case: Case) -> None:
    def train(layout: MatrixLayout, name: str, on: str, resume: Path | None = None) -> tuple[Any, Path]:
        job = {
            "layout": replace(layout, bf16=case.bf16).to_json(),
            "output_dir": str(tmp_path / name),
            "on": on,
            "model": dict(case.model),
            "arguments": dict(case.arguments),
            "resume": None if resume is None else str(resume),
        }
        result = device_ranks.run("tests.device.training_jobs:train", layout.nproc, job)
        lines = [line for line in result.logs[0].read_text(errors="replace").splitlines() if _REPORTED.search(line)]
        assert len(lines) == (2 if resume is None else 3)
        assert all(("device copies: " in line) == (on != "cpu") for line in lines), lines
        return result.values, tmp_path / name

    saved, run = train(case.saved, "saved", device())
    resumed, rerun = train(case.resumed, "resumed", device(), run / "checkpoint-3")
    as_saved = list(canonical_digests(run / "checkpoint-3"))
    assert list(canonical_digests(rerun / "checkpoint-3")) == as_saved, "what was loaded is what was saved"
    assert {one.role for one in as_saved} == {"model_state", "optimizer_state"} | (
        {"master_weight"} if case.bf16 else set()
    )
    exports = [export_checkpoint(one / "checkpoint-3", tmp_path / f"hf-{one.name}").digests() for one in (run, rerun)]
    assert exports[0] == exports[1]
    assert all(any(name != "Place(cpu)" for name in rank["devices"]) for rank in [*saved, *resumed])
    if case.arguments.get("flex_async_save"):
        assert all(rank["page-locked"] == ["before training"] for rank in [*saved, *resumed])
    if device() != FAKE:
        return  # Other kernels round differently.
    if case.arguments.get("flex_async_save"):
        ended = [one for rank in (*saved, *resumed) for one in rank["step ends"]]
        assert ended
        assert set(map(tuple, ended)) == {(0, 0)}, "a step end at which ranks agree does not wait for the device"
    on_cpu, plain = train(case.saved, "saved-cpu", "cpu")
    resumed_on_cpu, replain = train(case.resumed, "resumed-cpu", "cpu", plain / "checkpoint-3")
    assert [rank["losses"] for rank in saved] == [rank["losses"] for rank in on_cpu]
    assert [rank["losses"] for rank in resumed] == [rank["losses"] for rank in resumed_on_cpu]
    for ours, theirs in ((run, plain), (rerun, replain)):
        assert list(canonical_digests(ours / "checkpoint-6")) == list(canonical_digests(theirs / "checkpoint-6"))


@pytest.mark.sampled
@pytest.mark.skipif(device() != FAKE, reason="a real accelerator counts no bytes")
@pytest.mark.parametrize(
    ("layout", "once"),
    [
        (replace(SINGLE, bf16=True), False),
        (DP2, True),
        (TP2, False),
    ],
    ids=lambda value: value.name if isinstance(value, MatrixLayout) else f"once={value}",
)
def test_a_save_and_a_load_copy_what_they_must_and_no_more(
    device_ranks: Ranks, tmp_path: Path, layout: MatrixLayout, once: bool
) -> None:
    job = {"layout": layout.to_json(), "model": {}, "output_dir": str(tmp_path), "once": once}
    for rank in device_ranks.run("tests.device.training_jobs:count", layout.nproc, job).values:
        assert rank["saved"] == rank["late in the save"] == rank["share"] + rank["hashed"]
        assert rank["in flight"] == 2, "a tensor of one piece is copied while the one before it is written"
        assert rank["uploaded by the save"] == 0
        assert rank["loaded"] == rank["late"] == rank["wanted"], "all of it on a side stream"
        assert rank["downloaded by the load"] == 0


@pytest.mark.sampled
@pytest.mark.skipif(device() != FAKE, reason="a real accelerator counts no bytes")
@pytest.mark.parametrize("bf16", [True, False], ids=["bfloat16", "float32"])
def test_offloaded_states_are_saved_from_the_host_and_loaded_to_the_host(
    device_ranks: Ranks, tmp_path: Path, bf16: bool
) -> None:
    def train(name: str, on: str, resume: Path | None = None) -> dict[str, Any]:
        job = {"output_dir": str(tmp_path / name), "on": on, "bf16": bf16, "resume": resume and str(resume)}
        (found,) = device_ranks.run("tests.device.training_jobs:train_offloaded", 1, job).values
        return dict(found)

    saved = train("saved", FAKE)
    resumed = train("resumed", FAKE, tmp_path / "saved" / "checkpoint-3")
    assert resumed["losses"] == saved["losses"][3:]
    last = [list(canonical_digests(tmp_path / name / "checkpoint-6")) for name in ("saved", "resumed")]
    assert last[0] == last[1]
    on_cpu = train("cpu", "cpu")
    assert on_cpu["losses"] == saved["losses"]
    states = {"optimizer_state", "master_weight"} if bf16 else {"optimizer_state"}
    for places in (saved["kept"], resumed["loaded"], resumed["kept"]):
        assert {role for role, found in places.items() if found == ["Place(cpu)"]} == states
    # The weights are the only tensors on the device, so they alone are copied.
    assert resumed["load"] == [resumed["weights"], 0]
    assert resumed["save"] == saved["save"] == [0, saved["weights"]]
