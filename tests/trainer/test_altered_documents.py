"""A resume from a checkpoint with an altered small document: refused at every verification level, on every rank."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

import paddleformers_fc
from paddleformers_fc.errors import CheckpointError
from paddleformers_fc.storage.manifest import MANIFEST_NAME, Manifest, manifest_seal
from tests.cli.support import alter, seal
from tests.harness.tiny import DP2
from tests.trainer.test_disks import disks, run as run_on_disks
from tests.trainer.test_trainer import JOBS, SIX_STEPS, settings
from verification.forkserver import ForkServer

DOCUMENTS = [
    "config.json",
    "mapping.json",
    "trainer/data.json",
    "trainer/rng-00000.json",
    "trainer/rng-00001.json",
    "trainer/scheduler.json",
    "trainer/state.json",
]


@pytest.fixture(scope="module")
def third(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks at step 3."""
    output_dir = tmp_path_factory.mktemp("dp2")
    ranks.run(f"{JOBS}:run", 2, settings(DP2, output_dir, max_steps=3, save_steps=3))
    return output_dir / "checkpoint-3"


def the_one_refusal(values: Any) -> str:
    """The text of the error that every rank raised with its weights unchanged."""
    assert values[0] == values[1]
    assert values[0]["error"] == "Corrupt"
    assert not values[0]["changed"]
    return str(values[0]["text"])


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name != "trainer/state.json"])
def test_an_altered_document_is_refused_on_every_rank_without_verification(
    ranks: ForkServer, third: Path, tmp_path: Path, name: str
) -> None:
    broken = tmp_path / "checkpoint-3"
    shutil.copytree(third, broken)
    alter(broken / name)
    given = settings(DP2, tmp_path / "out", broken, **SIX_STEPS, flex_verify="off")
    text = the_one_refusal(ranks.run(f"{JOBS}:refused", 2, given).values)
    assert re.search(rf"{name} does not match its checksum", text)


def test_all_altered_documents_come_in_one_error_under_size(ranks: ForkServer, third: Path, tmp_path: Path) -> None:
    broken = tmp_path / "checkpoint-3"
    shutil.copytree(third, broken)
    for name in DOCUMENTS:
        alter(broken / name)
    given = settings(DP2, tmp_path / "out", broken, **SIX_STEPS)
    text = the_one_refusal(ranks.run(f"{JOBS}:refused", 2, given).values)
    assert [name for name in DOCUMENTS if name not in text] == []


def edited(checkpoint: Path, name: str, **values: Any) -> Path:
    """Change keys of a document and compute all checksums again, that of the manifest included."""
    path = checkpoint / name
    document = json.loads(path.read_bytes()) | values
    if name == MANIFEST_NAME:
        del document["seal"]
        document["seal"] = manifest_seal(msgspec.convert(document, Manifest))
    path.write_text(json.dumps(document) + "\n")
    if name != MANIFEST_NAME:
        seal(checkpoint)
    return checkpoint


CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("trainer/state.json", {"global_step": 5}, "trainer/state.json has step 5, flex_checkpoint.json has 3"),
    ("trainer/state.json", {"consumed_samples": 40}, "trainer/state.json has samples 40, flex_checkpoint.json has 24"),
    ("trainer/data.json", {"position": {"epoch": 0, "samples": 24, "consumed": 40}}, "trainer/data.json has samples"),
    ("trainer/rng-00001.json", {"world_size": 4}, "trainer/rng-00001.json has number of ranks 4"),
    (MANIFEST_NAME, {"step": 5}, "trainer/state.json has step 3, flex_checkpoint.json has 5"),
    (MANIFEST_NAME, {"consumed_samples": 40}, "trainer/state.json has samples 24, flex_checkpoint.json has 40"),
    (MANIFEST_NAME, {"world_size": 1}, "trainer/rng-00001.json belongs to rank 1, but world_size is 1"),
    (MANIFEST_NAME, {"world_size": 3}, "random generators of 2 ranks are listed, but world_size is 3"),
    (MANIFEST_NAME, {"family": "qwen2"}, "mapping.json has family 'llama', flex_checkpoint.json has 'qwen2'"),
]


@pytest.mark.parametrize(("name", "values", "evidence"), CONTRADICTIONS)
def test_files_that_contradict_each_other_fail_verification_and_a_conversion(
    third: Path, tmp_path: Path, name: str, values: dict[str, Any], evidence: str
) -> None:
    broken = edited(Path(shutil.copytree(third, tmp_path / "checkpoint-3")), name, **values)
    for work in (lambda: paddleformers_fc.open(broken).verify(), lambda: convert(broken, tmp_path / "converted")):
        with pytest.raises(CheckpointError) as raised:
            work()
        assert any(line.startswith(evidence) for line in raised.value.evidence), raised.value.render()
        assert raised.value.next_step
    assert not (tmp_path / "converted").exists()


def convert(source: Path, target: Path) -> None:
    paddleformers_fc.open(source).convert(target)


@pytest.mark.parametrize(
    ("name", "values", "error", "evidence"),
    [
        pytest.param("trainer/state.json", {"global_step": 5}, "Corrupt", "has step 5", marks=pytest.mark.chosen),
        ("trainer/rng-00001.json", {"world_size": 4}, "Corrupt", "has number of ranks 4"),
        pytest.param(
            *("trainer/scheduler.json", {"last_epoch": "3"}, "FormatError", "last_epoch: str in place of int"),
            marks=pytest.mark.chosen,
        ),
    ],
)
def test_a_document_that_contradicts_the_manifest_or_the_run_is_refused_on_every_rank(
    ranks: ForkServer, third: Path, tmp_path: Path, name: str, values: dict[str, Any], error: str, evidence: str
) -> None:
    broken = edited(Path(shutil.copytree(third, tmp_path / "checkpoint-3")), name, **values)
    given = settings(DP2, tmp_path / "out", broken, **SIX_STEPS, flex_verify="off")
    first, second = ranks.run(f"{JOBS}:refused", 2, given).values
    assert first == second
    assert (first["error"], first["changed"]) == (error, False)
    assert name in first["text"]
    assert evidence in first["text"]


@pytest.mark.parametrize(
    ("name", "disk", "places", "level"),
    [("trainer/rng-00001.json", 1, (1, 0), "off"), ("config.json", 1, (0, 1), "size")],
)
def test_an_altered_document_on_the_disk_of_another_host_is_refused(
    ranks: ForkServer, tmp_path: Path, name: str, disk: int, places: tuple[int, int], level: str
) -> None:
    run_on_disks(ranks, "run", DP2, disks(tmp_path, 0, 1), max_steps=3, save_steps=3)
    alter(tmp_path / f"disk-{disk}/out/checkpoint-3" / name)
    given = {**SIX_STEPS, "flex_verify": level}
    result = run_on_disks(ranks, "refused", DP2, disks(tmp_path, *places), "out/checkpoint-3", **given)
    assert re.search(rf"{name} does not match its checksum", the_one_refusal(result.values))
