"""``doctor`` reports versions, the disk, and what a resume would do; it leaves no file."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from paddleformers_fc import upstream
from paddleformers_fc.storage.manifest import read_manifest, write_manifest
from paddleformers_fc.trainer import diagnosis
from paddleformers_fc.trainer.tiers import RECORD_NAME
from tests.cli.support import claim_local_tier, document_of, run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _probe_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "PROBE_BYTES", 8 << 20)


@pytest.fixture
def output_dir(one: Path, tmp_path: Path) -> Path:
    """A whole checkpoint, and a newer one that a resume skips."""
    shutil.copytree(one, tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-9").mkdir()
    return tmp_path


def test_the_checkpoint_of_a_resume_and_the_space_of_a_save_are_reported(output_dir: Path, one: Path) -> None:
    before = sorted(output_dir.rglob("*"))
    outcome = run("doctor", output_dir, "--no-hooks", "--json")
    found = outcome.document
    assert sorted(output_dir.rglob("*")) == before
    assert (outcome.code, found["passed"], found["resume"]) == (1, False, "checkpoint-3")
    assert [line.split(":")[0].split()[0] for line in found["skipped"]] == ["checkpoint-9"]
    assert found["disk"]["next_save"] == sum(path.stat().st_size for path in one.rglob("*") if path.is_file())
    assert min(found["disk"]["write"], found["disk"]["read"], found["disk"]["free"]) > 100_000
    assert [check["name"] for check in found["checks"]] == [*("versions", "disk", "space", "resume", "leftovers")]
    assert [check for check in found["checks"] if not check["passed"]] == [
        {
            "name": "resume",
            "passed": False,
            "detail": "the run resumes from checkpoint-3; 1 newer checkpoint skipped, see below",
        }
    ]


def test_a_local_tier_is_examined(output_dir: Path, one: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    local = tmp_path_factory.mktemp("local")
    (output_dir / "checkpoint-9").rename(output_dir / "checkpoint-2")
    newest = local / "checkpoint-8"
    claim_local_tier(output_dir, local)
    write_manifest(shutil.copytree(one, newest), replace(read_manifest(one), step=8))
    found = document_of("doctor", output_dir, "--no-hooks")
    assert (found["passed"], found["resume"], found["checks"][-1]["name"]) == (True, str(newest), "local tier")
    assert f"the run resumes from {newest}" in run("doctor", output_dir, "--no-hooks").out.replace("\n", "")
    listed = document_of("list", output_dir)
    assert [one["name"] for one in listed["checkpoints"]] == ["checkpoint-3", "checkpoint-2"]
    assert [one["name"] for one in listed["local"]["checkpoints"]] == ["checkpoint-8"]
    assert "local tier on this machine:" in run("list", output_dir).out
    assert document_of("list", local)["local"] is None
    (output_dir / "checkpoint-2").rename(output_dir / "checkpoint-5")
    hidden = document_of("doctor", output_dir, "--no-hooks", code=1)
    assert [check["detail"] for check in hidden["checks"] if not check["passed"]] == [
        f"the run resumes from {newest}; checkpoint-5 is damaged or incomplete"
    ]
    (output_dir / "checkpoint-5").rename(output_dir / "checkpoint-2")
    # The tier of another run, or of another machine.
    (local / RECORD_NAME).unlink()
    assert document_of("list", output_dir)["local"] is None
    assert document_of("doctor", output_dir, "--no-hooks")["resume"] == "checkpoint-3"


def test_checkpoints_that_cannot_be_resumed_are_a_fault(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-9").mkdir()
    outcome = run("doctor", tmp_path, "--no-hooks")
    assert outcome.code == 1
    assert "no checkpoint can be resumed" in outcome.out
    assert outcome.out.splitlines()[-1] == "FAILED"


def test_a_disk_without_space_for_the_next_save_is_a_fault(output_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))
    found = document_of("doctor", output_dir, "--no-hooks", code=1)
    assert {one["name"] for one in found["checks"] if not one["passed"]} == {"disk", "space", "resume"}


def test_the_hooks_of_the_installed_versions_are_compared() -> None:
    found = document_of("doctor")
    assert [(one["name"], one["passed"]) for one in found["checks"]] == [("versions", True), ("hooks", True)]
    assert found["disk"] is None
    versions = {one["name"]: one["version"] for one in found["packages"]}
    assert versions["paddle"] == upstream.VERSIONS["paddle"]


def test_an_unknown_version_is_a_fault_without_known_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(upstream.VERSIONS, "paddle", "9.9.9")
    found = document_of("doctor", "--no-hooks", code=1)
    assert "known is 9.9.9" in found["checks"][0]["detail"]
    assert {one["package"] for one in found["known_faults"]} == {"paddleformers"}


def test_known_faults_are_counted_and_listed_on_request() -> None:
    count = len(document_of("doctor", "--no-hooks")["known_faults"])
    short, full = run("doctor", "--no-hooks").out, run("doctor", "--no-hooks", "--all").out
    assert (
        f"  known faults of the installed versions, which paddleformers-fc avoids: {count}; --all lists them" in short
    )
    assert (count > 1, len(re.findall(r"^    [ST]\d+  ", full, re.MULTILINE))) == (True, count)
    assert "    S18  paddle: a flipped bit" in full
    assert "S18" not in short
    assert "--all" not in full


def test_every_known_fault_is_a_row_of_the_guarantees() -> None:
    page = (ROOT / "docs/results/guarantees.md").read_text()
    rows = set(re.findall(r"^\| ([ST]\d+) \|", page, re.MULTILINE))
    assert diagnosis.KNOWN_FAULTS.keys() == {"paddle", "paddleformers"}
    assert {id for faults in diagnosis.KNOWN_FAULTS.values() for id in faults} <= rows


def test_a_checkpoint_of_paddle_is_resumed_where_there_is_no_other(one: Path, tmp_path: Path) -> None:
    stock = tmp_path / "out" / "checkpoint-3"
    assert run("convert", one, stock, "--format", "distcp").code == 0
    (stock / "trainer_state.json").write_text('{"global_step": 3, "consumed_samples": 24}')
    found = run("doctor", stock.parent, "--no-hooks", "--json")
    assert (found.code, found.document["resume"], found.document["skipped"]) == (0, "checkpoint-3", [])
    (listed,) = run("list", stock.parent, "--json").document["checkpoints"]
    assert (listed["kind"], listed["step"], listed["fault"]) == ("paddle", 3, "")
