"""``inspect`` shows the stored tensors and their files."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import msgspec
import numpy as np
import pytest

from paddleformers_fc import __version__
from paddleformers_fc.cli.inspection import show_tensors
from paddleformers_fc.formats.inspection import ShardFacts, TensorFacts
from paddleformers_fc.output import console
from paddleformers_fc.storage.manifest import read_manifest, write_manifest
from tests.cli.support import run, save
from tests.execute.simulated import canonical, model

ARRAYS = canonical()


def test_inspect_reports_the_job_that_saved(four: Path) -> None:
    found = run("inspect", four, "--json").document
    assert found["kind"] == "flex_checkpoint"
    assert found["job"] == {
        "step": 3,
        "consumed_samples": 24,
        "world_size": 4,
        "parallel": {"tp": 2, "pp": 1},
        "family": "ernie4_5",
        "written_by": f"paddleformers_fc {__version__}",
        "differing_replicas": [],
        "diverged_ties": [],
        "run": "",
        "branches": [],
        "time": found["job"]["time"],
        "host": socket.gethostname(),
    }
    assert found["model"]["num_key_value_heads"] == 2
    assert found["tensors"] is None
    text = run("inspect", four).out
    assert f"{found['job']['time']} on {found['job']['host']}" in text
    assert "qkv_proj" not in text  # Tensors are listed if that is requested.


def test_inspect_reports_the_size_of_every_role_and_of_the_files(four: Path) -> None:
    found = run("inspect", four, "--json").document
    tensors = len(model(ARRAYS, 2))
    elements = sum(array.size for array in ARRAYS.values())
    assert found["roles"]["model_state"] == {
        "tensors": tensors,
        "elements": elements,
        "bytes": 4 * elements,
        "dtypes": {"float32": tensors},
        "files": 4,
    }
    # Two moments of every weight and two powers of beta for every tensor.
    assert found["roles"]["optimizer_state"]["elements"] == 2 * elements + 2 * tensors
    files = [path for path in four.rglob("*") if path.is_file() and path.name != "flex_checkpoint.json"]
    assert (found["files"], found["bytes"]) == (len(files), sum(path.stat().st_size for path in files))


def test_replicas_that_differed_are_listed_and_verification_mentions_them(four: Path, tmp_path: Path) -> None:
    lines = [f"model_state w{number} [0:8]: version 1 on rank 0; version 2 on rank 1" for number in range(30)]
    copy = tmp_path / "checkpoint-3"
    shutil.copytree(four, copy)
    write_manifest(copy, msgspec.structs.replace(read_manifest(copy), differences=lines))
    assert run("inspect", copy, "--json").document["job"]["differing_replicas"] == lines
    text = run("inspect", copy).out
    assert "ranks had different values" in text
    assert text.count("version 2 on rank 1") == 20
    assert "and 10 more" in text
    verified = run("verify", copy)
    assert verified.code == 0
    assert "30 replicas differed when it was saved" in " ".join(verified.out.split())
    assert "differ" not in run("inspect", four).out
    assert "differ" not in run("verify", four).out


def test_every_listed_shard_is_at_its_offset(four: Path) -> None:
    stored = {name: array for name, (array, _) in model(ARRAYS, 2).items()}
    listed = run("inspect", four, "--tensors", "--json").document["tensors"]
    weights = {tensor["name"]: tensor for tensor in listed if tensor["role"] == "model_state"}
    assert weights.keys() == stored.keys()
    for name, tensor in weights.items():
        seen = np.zeros(tensor["shape"], np.float32)
        for piece in tensor["pieces"]:
            data = (four / piece["file"]).read_bytes()[piece["begin"] : piece["begin"] + piece["bytes"]]
            box = tuple(slice(a, a + n) for a, n in zip(piece["offset"], piece["shape"], strict=True))
            seen[box] = np.frombuffer(data, np.float32).reshape(piece["shape"])
        assert np.array_equal(seen, stored[name]), name


def test_a_pattern_lists_matching_tensors_only(four: Path) -> None:
    name = "model.norm.weight.moment1_0"
    (tensor,) = run("inspect", four, "--tensors", name, "--json").document["tensors"]
    assert [piece["flat"] for piece in tensor["pieces"]] == [[0, 8], [8, 16]]
    assert "elements 8:16" in run("inspect", four, name).out
    listed = run("inspect", four, "*.0.*qkv_proj.weight", "--json").document["tensors"]
    assert [(tensor["role"], tensor["name"]) for tensor in listed] == [
        ("model_state", "model.layers.0.self_attn.qkv_proj.weight")
    ]


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("*q_kv_proj*", ["model.layers.{0...1}.self_attn.qkv_proj.weight"]),
        ("model.norms.weight", ["model.norm.weight"]),
        ("qkv", ["model.layers.{0...1}.self_attn.qkv_proj.weight"]),
        ("zzz", []),
    ],
)
def test_a_pattern_without_matches_is_refused_with_similar_names(four: Path, pattern: str, near: list[str]) -> None:
    outcome = run("inspect", four, pattern, "--json")
    assert outcome.code == 2
    assert outcome.document["what"] == f"No stored tensor matches {pattern!r}."
    assert f"must match the complete name; write '*{pattern.strip('*')}*'" in outcome.document["next_step"]
    evidence = outcome.document["evidence"]
    assert bool(evidence) is bool(near)
    assert all(name in evidence[0] for name in near)


def test_tensors_stored_alike_are_one_entry(four: Path) -> None:
    lines = run("inspect", four, "*up_gate_proj.weight").out.splitlines()
    (row,) = [index for index, line in enumerate(lines) if "up_gate_proj" in line]
    assert "model.layers.{0...1}.mlp.up_gate_proj.weight" in lines[row]
    assert "16 x 48" in lines[row]
    assert [line.strip() for line in lines[row + 1 : row + 3]] == [
        "[0:16, 0:24]  rank-00000 or rank-00002",
        "[0:16, 24:48]  rank-00001 or rank-00003",
    ]


def test_an_entry_shows_four_pieces_and_counts_the_rest(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "checkpoint-3", ARRAYS, sharded=6)
    text = run("inspect", checkpoint, "model.norm.weight.moment1_0").out
    assert "elements 9:12" in text
    assert "elements 12:15" not in text
    assert "and 2 more" in text


def test_open_weights_are_recognised(weights: Path) -> None:
    found = run("inspect", weights, "--tensors", "--json").document
    assert (found["kind"], found["job"]) == ("huggingface", None)
    assert found["files"] == len(list(weights.glob("*.safetensors")))
    assert {tensor["name"]: tuple(tensor["shape"]) for tensor in found["tensors"]} == {
        name: array.shape for name, array in ARRAYS.items()
    }
    assert "open weights" in run("inspect", weights).out


def test_open_weights_need_no_configuration(weights_copy: Path) -> None:
    for name in ("config.json", "flex_checksums.json"):
        (weights_copy / name).unlink()
    outcome = run("inspect", weights_copy, "--json")
    assert (outcome.code, outcome.document["model"]) == (0, {})


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_configuration_beside_open_weights_is_named(weights_copy: Path, text: str) -> None:
    (weights_copy / "config.json").write_text(text)
    outcome = run("inspect", weights_copy)
    assert outcome.code == 1
    assert str(weights_copy) in outcome.err
    assert "  - config.json " in outcome.err


def test_checkpoints_of_an_output_directory_are_listed_in_order(four: Path, tmp_path: Path) -> None:
    for step in (12, 3):
        shutil.copytree(four, tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-20").mkdir()
    found = run("inspect", tmp_path, "--json").document
    assert found["kind"] == "output_directory"
    listed = [(one["name"], one["step"]) for one in found["output"]["checkpoints"]]
    assert listed == [("checkpoint-20", None), ("checkpoint-12", 3), ("checkpoint-3", 3)]
    assert ["contains step 3" in one["fault"] for one in found["output"]["checkpoints"]] == [False, True, False]
    text = run("inspect", tmp_path)
    assert text.code == 0
    assert "checkpoint-20: " in text.out
    # Its tensors are those of a checkpoint.
    outcome = run("inspect", tmp_path, "*")
    assert outcome.code == 1
    assert "Name a checkpoint inside it: checkpoint-3, checkpoint-12." in outcome.err


def test_a_truncated_file_is_named(copy: Path) -> None:
    path = copy / "model_state/rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    outcome = run("inspect", copy)
    assert outcome.code == 1
    assert "model_state/rank-00001.safetensors is truncated" in outcome.err
    assert "saved by" in outcome.out
    assert "  recorded" in outcome.out
    assert "on disk" not in outcome.out
    assert "truncated" in run("inspect", copy, "--json").document["what"]


def test_facts_of_the_manifest_are_shown_if_no_header_can_be_read(copy: Path) -> None:
    for path in copy.glob("*/*.safetensors"):
        path.write_bytes(b"")
    (copy / "config.json").unlink()
    outcome = run("inspect", copy)
    assert outcome.code == 1
    assert "saved by" in outcome.out
    assert "config.json" in outcome.err
    (copy / "flex_checkpoint.json").write_text("{")
    outcome = run("inspect", copy)
    assert (outcome.code, outcome.out) == (1, "")
    assert "flex_checkpoint.json" in outcome.err


def test_names_whose_indices_form_no_rectangle_are_entries_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["layers.0.experts.0.w", "layers.0.experts.1.w", "layers.1.experts.0.w"]
    whole = {"offset": (0,), "shape": (4,)}
    tensors = [
        TensorFacts(
            "model_state", name, "float32", (4,), 16, (ShardFacts(f"model_state/{n}.safetensors", 0, 16, **whole),)
        )
        for n, name in enumerate(names)
    ]
    show_tensors(tensors, console())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1::2]] == names
    assert [line.split() for line in lines[2::2]] == [["whole", str(n)] for n in range(3)]
