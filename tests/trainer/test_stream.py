"""Streams of live weights: the bytes of an export under every layout, errors of one rank, and exchanges."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import paddleformers_fc
from paddleformers_fc.storage.safetensors import read_header
from tests.harness.limits import LIMIT
from tests.harness.tiny import EP2, PP2, SD2S3, SD2V1, SINGLE, TP2, TP2PP2, MatrixLayout
from tests.trainer.test_pretrained import weights_of
from verification.forkserver import ForkServer

JOBS = "tests.trainer.stream_jobs"
RECIPE = Path(__file__).resolve().parents[2] / "recipes/stream_weights.py"
ENGINE = os.environ.get("ENGINE_PYTHON", "")
"""An interpreter with PyTorch and Transformers, which cannot be in the environment of PaddleFormers."""
ERNIE = {"model_type": "ernie4_5_moe"}
TIED = {"model": {"tie_word_embeddings": True}}
SAVED = {"arguments": {"save_steps": 2}}
PUSHED = f"{JOBS}.Pushed"


def exported(directory: Path) -> dict[str, str]:
    """The digests of the tensors of an export, in the order of its files."""
    found: dict[str, str] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors = load_file(path)
        entries = read_header(path).tensors
        for name in sorted(entries, key=lambda one: entries[one].begin):
            found[name] = hashlib.md5(tensors[name].tobytes()).hexdigest()
    return found


def job(layout: MatrixLayout, place: Path, **settings: Any) -> dict[str, Any]:
    arguments = {"max_steps": 2, **settings.pop("arguments", {})}
    return {"layout": layout.to_json(), "output_dir": str(place), "arguments": arguments, **settings}


def export_of(checkpoint: Path, target: Path, **options: Any) -> dict[str, str]:
    """The digests of the tensors of a checkpoint's export."""
    paddleformers_fc.open(checkpoint).export(target, **options)
    return exported(target)


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        *((SINGLE, {}), (TP2, {}), (PP2, TIED), (TP2PP2, {}), (SD2V1, {}), (SD2S3, {}), (EP2, ERNIE)),
        *((layout, {"united": True}) for layout in (TP2, SD2S3, TP2PP2)),
    ],
    ids=lambda value: value.name if isinstance(value, MatrixLayout) else "",
)
def test_a_stream_and_an_export_of_a_live_model_have_the_bytes_of_an_export_of_its_checkpoint(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, settings: dict[str, Any]
) -> None:
    streams = {"all": {}, "small": {"max_bytes": 1 << 14}, "first": {"to": "first"}, "last": {"to": [layout.nproc - 1]}}
    given = job(layout, tmp_path, streams=streams, **SAVED, **settings)
    results = ranks.run(f"{JOBS}:after_training", layout.nproc, given).values
    expected = export_of(tmp_path / "checkpoint-2", tmp_path / "command", max_shard_bytes=60_000)
    files = {path.name for path in (tmp_path / "command").glob("*model*")}
    assert len(files) > 3
    for name in files:
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "command" / name).read_bytes()
    for rank, result in enumerate(results):
        got = result["streams"]
        assert got["all"] == got["small"] == expected
        assert got["first"] == (expected if rank == 0 else {})
        assert got["last"] == (expected if rank == layout.nproc - 1 else {})
    assert list(results[0]["streams"]["all"]) == list(expected)


def test_adapters_are_streamed_alone_or_merged_into_their_base(ranks: ForkServer, tmp_path: Path) -> None:
    base = weights_of(ranks, tmp_path / "base", "llama", {})
    streams = {"alone": {"adapters": True}, "merged": {}, "first": {"to": "first", "max_bytes": 4096}}
    saving = {"arguments": {"save_steps": 2}, "base": str(base)}
    given = job(TP2, tmp_path / "run", streams=streams, adapted=True, **saving)
    first, second = (one["streams"] for one in ranks.run(f"{JOBS}:after_training", 2, given).values)
    alone = export_of(tmp_path / "run/checkpoint-2", tmp_path / "alone")
    assert first["alone"] == second["alone"] == exported(tmp_path / "run/hf") == alone
    merged = export_of(tmp_path / "run/checkpoint-2", tmp_path / "merged", base=base)
    assert first["merged"] == second["merged"] == first["first"] == merged != exported(base)
    assert second["first"] == {}


def test_a_stream_between_steps_changes_no_loss_and_keeps_its_plan(ranks: ForkServer, tmp_path: Path) -> None:
    streamed = ranks.run(f"{JOBS}:between_steps", 2, job(TP2, tmp_path / "streamed")).values
    plain = ranks.run("tests.trainer.jobs:run", 2, job(TP2, tmp_path / "plain")).values
    assert [one["losses"] for one in streamed] == [one["losses"] for one in plain]
    one, two = streamed[0]["streams"]
    assert one.keys() == two.keys()
    assert one != two
    # Of the second stream no exchange plans; every word is followed by the weights of a batch.
    first, second = streamed[0]["exchanges"]
    assert set(second) == {"beginning a stream", "streaming weights"}
    assert {"describing shards", "planning a stream"} <= set(first)


def test_an_error_on_one_rank_ends_the_stream_on_all(ranks: ForkServer, tmp_path: Path) -> None:
    first, last = ranks.run(f"{JOBS}:broken", 2, job(TP2, tmp_path)).values
    for case in ("arguments", "requests", "names", "ranks", "adapters", "reading"):
        assert first[case] == last[case]
    assert first["arguments"].startswith("OptionError: Invalid argument: device='gpu'")
    assert first["requests"] == "MismatchError: The ranks ask for different streams."
    assert first["names"].startswith("OptionError: The model has no such tensor")
    assert first["ranks"] == "OptionError: The job has no rank 9."
    assert first["adapters"] == "OptionError: The model has no adapters."
    assert "no memory for pieces" in first["reading"]
    assert first["early"] == "PeerError: Rank 1 has ended the stream before its end."
    assert last["early"] == "none, 3 tensors"
    assert first["last"] == "PeerError: Rank 1 has ended the stream before its end."
    assert last["last"] == "none, 1 tensors"
    assert first["whole"] == last["whole"] != "none, 0 tensors"


@pytest.mark.parametrize("layout", [TP2, SD2S3], ids=lambda layout: layout.name)
def test_weights_are_passed_to_a_function_every_some_steps(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    arguments = {"max_steps": 4, "save_steps": 2}
    given = job(layout, tmp_path / "pushed", arguments={**arguments, "flex_stream": {"steps": 2, "to": PUSHED}})
    first, second = ranks.run(f"{JOBS}:pushing", 2, given).values
    plain = ranks.run("tests.trainer.jobs:run", 2, job(layout, tmp_path / "plain", arguments=arguments)).values
    assert [first["losses"], second["losses"]] == [one["losses"] for one in plain]
    assert second["pushed"] == []
    assert [step for step, _ in first["pushed"]] == [2, 4]
    for step, got in first["pushed"]:
        assert got == export_of(tmp_path / f"pushed/checkpoint-{step}", tmp_path / f"hf-{step}")


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_an_error_of_the_function_ends_the_step_on_all_ranks(ranks: ForkServer, tmp_path: Path, when: str) -> None:
    push = {"flex_stream": {"steps": 1, "to": f"{JOBS}.fail_{when}"}}
    first, second = ranks.run(f"{JOBS}:pushing", 2, job(TP2, tmp_path, arguments=push)).values
    assert first["error"] == second["error"]
    assert f"the engine is gone {when}" in first["error"]


def test_a_function_need_not_read_the_stream_to_its_end(ranks: ForkServer, tmp_path: Path) -> None:
    push = {"flex_stream": {"steps": 1, "to": f"{JOBS}.take_one"}}
    first, second = ranks.run(f"{JOBS}:pushing", 2, job(TP2, tmp_path, arguments=push)).values
    assert len(first["losses"]) == len(second["losses"]) == 2


def test_a_function_that_cannot_be_called_is_refused_on_all_ranks(ranks: ForkServer, tmp_path: Path) -> None:
    for to, why in ((f"{JOBS}.absent", "has no attribute 'absent'"), (f"{JOBS}.RECEIVED", "it is a list")):
        given = job(TP2, tmp_path, arguments={"flex_stream": {"steps": 1, "to": to}})
        first, second = ranks.run(f"{JOBS}:pushing", 2, given).values
        assert first["error"] == second["error"]
        assert f"OptionError: flex_stream cannot pass weights to {to}." in first["error"]
        assert why in first["error"]


@pytest.mark.skipif(not ENGINE, reason="needs torch 2.13.0 and transformers 5.3.0 of the interpreter ENGINE_PYTHON")
def test_another_process_computes_the_same_logits(tmp_path: Path) -> None:
    command = [sys.executable, str(RECIPE), "--output", str(tmp_path), "--python", ENGINE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    apart = re.findall(r"^step (\d): logits differ by at most (\S+) of the largest$", done.stdout, re.MULTILINE)
    assert [step for step, _ in apart] == ["1", "2", "3"]
    assert all(float(number) < 2e-6 for _, number in apart)


def test_a_stream_holds_few_of_its_tensors_at_a_time(ranks: ForkServer, tmp_path: Path) -> None:
    bound = 1 << 18
    for found in ranks.run(f"{JOBS}:most_bytes", 2, {**job(TP2, tmp_path), "max_bytes": bound}).values:
        assert found["total"] > 2 * bound
        # Half of the bound, or the largest tensor; the caller has the last one of the batch before.
        assert found["most"] <= max(bound // 2, found["largest"]) + found["largest"]
