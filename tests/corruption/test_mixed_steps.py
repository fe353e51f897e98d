"""A file of optimizer states that is of another step than the files beside it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from paddleformers_fc.errors import Corrupt
from paddleformers_fc.formats.registry import open_checkpoint
from tests.cli.support import run as command
from tests.corruption import test_ranks_apart as apart
from tests.corruption.guarantees import Observed, fault, refused
from tests.harness.tiny import TP2SD2V2
from verification.forkserver import ForkServer

LAYOUT = replace(TP2SD2V2, bf16=True)
STATES = "optimizer_state/0_0.distcp"


@pytest.mark.slow
@fault("G116", "one file of optimizer states in a checkpoint of Paddle's FlexCheckpoint is that of a later step")
def test_g116_a_file_of_states_of_another_step_is_refused(ranks: ForkServer, tmp_path: Path) -> Observed:
    apart.run(ranks, LAYOUT, tmp_path / "run", arguments={"max_steps": 6, "save_steps": 3})
    for name in ("right", "mixed"):
        shutil.copytree(tmp_path / "run/checkpoint-3", tmp_path / name / "checkpoint-3")
    mixed = tmp_path / "mixed/checkpoint-3"
    shutil.copy(tmp_path / "run/checkpoint-6" / STATES, mixed / STATES)
    numbers = open_checkpoint(tmp_path / "right/checkpoint-3").catalog.roles["optimizer_state"]
    assert not any(one.offsets[0][0] == STATES for name, one in numbers.items() if name.endswith("beta1_pow_acc_0"))

    def resume(name: str, ours: bool) -> list[dict[str, object]]:
        given = {"arguments": {"max_steps": 4}, "directories": [str(tmp_path / name)] * LAYOUT.nproc}
        return apart.run(ranks, LAYOUT, tmp_path / "out", **given, ours=ours)

    right, wrong = (resume(name, ours=False)[0]["weights"] for name in ("right", "mixed"))
    assert isinstance(right, dict)
    assert isinstance(wrong, dict)
    differing = sum(right[name] != wrong[name] for name in right)
    assert 0 < differing < len(right)

    with pytest.raises(Corrupt) as caught:
        open_checkpoint(mixed)
    line = refused(caught.value, f"{STATES}: beta2_pow_acc_0 is ")
    for outcome in resume("mixed", ours=True):
        assert str(outcome["error"]).startswith("Corrupt: ")
        assert not outcome["changed"]
        assert str(caught.value).splitlines()[2] in str(outcome["error"])
    for arguments in (("verify", mixed), ("convert", mixed, tmp_path / "flex/checkpoint-3")):
        outcome = command(*arguments)
        assert outcome.code == 1
        assert "contains files of different steps" in outcome.err
    return Observed(
        "trained on: some weights of the next step differ; no error", f"{line}; the same by `verify` and `convert`"
    )
