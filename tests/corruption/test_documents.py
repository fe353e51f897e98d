"""Small files of a checkpoint that were edited after the save."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.corruption.guarantees import Observed, fault
from tests.corruption.test_trainer_faults import SIX, trained
from tests.harness.tiny import DP2
from verification.forkserver import ForkServer

THREE, FIVE = b"global_step\x94K\x03", b"global_step\x94K\x05"
"""The step in the pickle of PaddleFormers."""


@pytest.mark.slow
@fault("G50", "the step in the Trainer's state is 5 in place of 3, in a file of the same length")
def test_g50_an_edited_state_of_the_trainer_is_refused(ranks: ForkServer, tmp_path: Path) -> Observed:
    trained(ranks, DP2, tmp_path / "stock", arguments={**SIX, "max_steps": 3})
    path = tmp_path / "stock/checkpoint-3/trainer_state.bin"
    assert THREE in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(THREE, FIVE))
    found = trained(ranks, DP2, tmp_path / "out", tmp_path / "stock/checkpoint-3")[0]
    assert (found["step"], len(found["losses"])) == (6, 1)
    trained(ranks, DP2, tmp_path / "ours", arguments={**SIX, "max_steps": 3}, ours=True)
    for level in ("off", "size", "full"):
        broken = tmp_path / level / "checkpoint-3"
        shutil.copytree(tmp_path / "ours/checkpoint-3", broken)
        text = (broken / "trainer/state.json").read_text()
        assert '"global_step": 3' in text
        (broken / "trainer/state.json").write_text(text.replace('"global_step": 3', '"global_step": 5'))
        kwargs = {"layout": DP2.to_json(), "output_dir": str(tmp_path / "again"), "resume": str(broken)}
        given = {**kwargs, "arguments": {"flex_verify": level}}
        refusals = ranks.run("tests.trainer.jobs:refused", 2, given).values
        assert refusals[0] == refusals[1]
        assert refusals[0]["error"] == "Corrupt"
        assert "trainer/state.json does not match its checksum" in refusals[0]["text"]
        assert not refusals[0]["changed"]
    return Observed(
        "2 of the 3 steps that are left are not trained; no error",
        "refused on every rank at every level: `Corrupt`, “trainer/state.json does not match its checksum”; "
        "nothing changed",
    )
