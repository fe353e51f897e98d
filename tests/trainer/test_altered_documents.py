"""A resume from a checkpoint with an altered small document: refused at every verification level, on every rank."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

import paddleformers_fc
from paddleformers_fc.errors import CheckpointError
from paddleformers_fc.storage.manifest import MANIFEST_NAME, Manifest, manifest_seal
from tests.cli.support import alter, seal
from tests.harness.on_ranks import run_on_ranks
from tests.harness.tiny import DP2
from tests.trainer.jobs import refused
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
    opened = paddleformers_fc.open
    for work in (lambda: opened(broken).verify(), lambda: opened(broken).convert(tmp_path / "converted")):
        with pytest.raises(CheckpointError) as raised:
            work()
        assert any(line.startswith(evidence) for line in raised.value.evidence), raised.value.render()
        assert raised.value.next_step
    assert not (tmp_path / "converted").exists()


def refuse(cases: list[list[str]], output_dir: Path) -> None:
    for checkpoint, level, error, *evidence in cases:
        arguments = {**SIX_STEPS, "flex_verify": level}
        found = refused(checkpoint, layout=DP2, output_dir=output_dir, arguments=arguments)
        assert (found["error"], found["changed"]) == (error, False)
        assert [text for text in evidence if text not in found["text"]] == []


def test_altered_documents_are_refused_on_every_rank_at_every_level(
    ranks: ForkServer, third: Path, tmp_path: Path
) -> None:
    numbers = itertools.count()

    def copy() -> Path:
        return Path(shutil.copytree(third, tmp_path / str(next(numbers)) / "checkpoint-3"))

    cases, all_altered = [], copy()
    for name in DOCUMENTS:
        alter(all_altered / name)
        one_altered = copy()
        alter(one_altered / name)
        cases.append([str(one_altered), "off", "Corrupt", f"{name} does not match its checksum"])
    cases.append([str(all_altered), "size", "Corrupt", *DOCUMENTS])
    for name, values, error, evidence in (
        ("trainer/state.json", {"global_step": 5}, "Corrupt", "has step 5"),
        ("trainer/rng-00001.json", {"world_size": 4}, "Corrupt", "has number of ranks 4"),
        ("trainer/scheduler.json", {"last_epoch": "3"}, "FormatError", "last_epoch: str in place of int"),
    ):
        cases.append([str(edited(copy(), name, **values)), "off", error, name, evidence])
    run_on_ranks(ranks, 2, refuse, cases=cases, output_dir=tmp_path / "out")
