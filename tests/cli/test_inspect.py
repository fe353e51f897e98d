"""``inspect`` shows the stored tensors and their files, and ``explain`` where elements are and what reads them."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from paddleformers_fc import __version__
from paddleformers_fc.cli.explaining import show
from paddleformers_fc.cli.inspection import show_tensors
from paddleformers_fc.formats.inspection import ShardFacts, TensorFacts
from paddleformers_fc.mapping import Rule
from paddleformers_fc.output import console
from paddleformers_fc.plan.explain import ExplainedTensor, Explanation
from paddleformers_fc.storage.manifest import read_manifest, write_manifest
from tests.cli.support import document_of, run, save
from tests.execute.simulated import canonical, model

ARRAYS = canonical()


def test_inspect_reports_the_job_that_saved_and_the_size_of_roles_and_files(four: Path) -> None:
    found = run("inspect", four, "--json").document
    assert found["kind"] == "flex_checkpoint"
    time, host = found["job"].pop("time"), found["job"].pop("host")
    assert found["job"] == {
        "step": 3,
        "consumed_samples": 24,
        "world_size": 4,
        "parallel": {"tp": 2, "pp": 1},
        "family": "ernie4_5",
        "written_by": f"paddleformers_fc {__version__}",
        "run": "",
        "differing_replicas": [],
        "diverged_ties": [],
        "branches": [],
    }
    assert host == socket.gethostname()
    assert found["model"]["num_key_value_heads"] == 2
    assert found["tensors"] is None
    text = run("inspect", four).out
    assert f"{time} on {host}" in text
    assert "qkv_proj" not in text  # Tensors are listed if that is requested.
    tensors = len(model(ARRAYS, 2))
    elements = sum(array.size for array in ARRAYS.values())
    sizes = {"tensors": tensors, "elements": elements, "bytes": 4 * elements}
    assert found["roles"]["model_state"] == {**sizes, "dtypes": {"float32": tensors}, "files": 4}
    # Two moments of every weight and two powers of beta for every tensor.
    assert found["roles"]["optimizer_state"]["elements"] == 2 * elements + 2 * tensors
    files = [path for path in four.rglob("*") if path.is_file() and path.name != "flex_checkpoint.json"]
    assert (found["files"], found["bytes"]) == (len(files), sum(path.stat().st_size for path in files))


def test_replicas_that_differed_are_listed_and_verification_mentions_them(copy: Path) -> None:
    lines = [f"model_state w{number} [0:8]: version 1 on rank 0; version 2 on rank 1" for number in range(30)]
    assert "different values" not in run("inspect", copy).out
    assert "replicas differed when" not in " ".join(run("verify", copy).out.split())
    write_manifest(copy, msgspec.structs.replace(read_manifest(copy), differences=lines))
    assert run("inspect", copy, "--json").document["job"]["differing_replicas"] == lines
    text = run("inspect", copy).out
    assert "ranks had different values" in text
    assert text.count("version 2 on rank 1") == 20
    assert "and 10 more" in text
    verified = run("verify", copy)
    assert verified.code == 0
    assert "30 replicas differed when it was saved" in " ".join(verified.out.split())


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


def test_open_weights_need_no_configuration_and_a_damaged_one_is_named(weights_copy: Path) -> None:
    for text in ("{", "[]"):
        (weights_copy / "config.json").write_text(text)
        outcome = run("inspect", weights_copy)
        assert (outcome.code, "  - config.json " in outcome.err) == (1, True)
    for name in ("config.json", "flex_checksums.json"):
        (weights_copy / name).unlink()
    assert document_of("inspect", weights_copy)["model"] == {}


def test_open_weights_next_to_checkpoints_are_read_with_a_warning(stored: Path, tmp_path: Path) -> None:
    output_dir = tmp_path / "out"
    assert run("export", stored, output_dir).code == 0
    commands = [("inspect", output_dir), ("plan", output_dir, "--to", "tp=2"), ("diff", output_dir, output_dir)]
    assert [run(*command).err for command in commands] == [""] * 3
    shutil.copytree(stored, output_dir / "checkpoint-3")
    for command in commands:
        done = run(*command)
        assert done.code == 0
        assert f"{output_dir} contains checkpoints, but is read as open weights (Hugging Face). Name a" in done.err
    assert "checkpoints, but" not in run("inspect", output_dir / "checkpoint-3").err


def test_very_long_names_and_values_keep_their_beginning_and_end(weights_copy: Path) -> None:
    file, long = weights_copy / "model.safetensors", "a" * 100_000 + "z"
    for path in weights_copy.glob("*.safetensors*"):
        path.unlink()
    (weights_copy / "flex_checksums.json").unlink()
    save_file({f"{long}.weight": np.zeros(4, np.float32)}, file)
    (weights_copy / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": [long]}))
    for command in (("inspect", weights_copy), ("inspect", weights_copy, "*")):
        out = run(*command).out
        assert "aaa ... aaa" in out
        assert len(out) < 10_000
    assert "az.weight" in out
    assert document_of("inspect", weights_copy, "*")["tensors"][0]["name"] == f"{long}.weight"


def test_a_truncated_file_is_named(copy: Path) -> None:
    path = copy / "model_state/rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    outcome = run("inspect", copy)
    assert outcome.code == 1
    assert "model_state/rank-00001.safetensors is truncated" in outcome.err
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
    shards = [ShardFacts(f"model_state/{n}.safetensors", 0, 16, offset=(0,), shape=(4,)) for n in range(3)]
    tensors = [
        TensorFacts("model_state", name, "float32", (4,), 16, (shard,))
        for name, shard in zip(names, shards, strict=True)
    ]
    show_tensors(tensors, console())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1::2]] == names
    assert [line.split() for line in lines[2::2]] == [["whole", str(n)] for n in range(3)]


KEYS = "model.layers.1.self_attn.k_proj.weight"
FUSED = "model.layers.1.self_attn.qkv_proj.weight"


def explained(directory: Path, name: str) -> list[dict[str, Any]]:
    """The explained tensors of a name."""
    found = document_of("explain", directory, name)
    return list(found["tensors"])


def region(box: list[list[int]]) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(*box, strict=True))


def numbers(directory: Path, box: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The numbers of a box, read from the file and offset that the explanation names."""
    low, high = box["shard"]
    shape = [b - a for a, b in zip(low, high, strict=True)]
    data = (directory / box["file"]).read_bytes()[box["begin"] :]
    shard = np.frombuffer(data[: 4 * int(np.prod(shape))], np.float32).reshape(shape)
    inside = [[at - start for at, start in zip(side, low, strict=True)] for side in box["stored_box"]]
    return shard[region(inside)].transpose(box["axes"])


@pytest.mark.parametrize("name", [KEYS, "model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_the_boxes_of_a_canonical_tensor_contain_its_numbers(four: Path, name: str) -> None:
    tensor = next(one for one in explained(four, name) if one["side"] == "canonical")
    found = np.full(tensor["shape"], np.nan, np.float32)
    for box in tensor["boxes"]:
        found[region(box["canonical_box"])] = numbers(four, box)
    assert np.array_equal(found, canonical()[name])


def test_a_stored_tensor_is_explained_by_the_canonical_boxes_that_read_it(four: Path) -> None:
    (tensor,) = explained(four, FUSED)
    assert (tensor["side"], tensor["role"]) == ("stored", "model_state")
    assert {box["canonical"].split(".")[-2] for box in tensor["boxes"]} == {"q_proj", "k_proj", "v_proj"}
    for box in tensor["boxes"]:
        wanted = canonical()[box["canonical"]][region(box["canonical_box"])]
        assert np.array_equal(numbers(four, box), wanted)
    covered = sum(int(np.prod(np.subtract(*box["stored_box"][::-1]))) for box in tensor["boxes"])
    assert covered == np.prod(tensor["shape"])
    (rule,) = tensor["rules"]
    assert (rule["targets"], rule["axes"]) == ([FUSED], [1, 0])
    assert KEYS in rule["sources"]


def test_a_state_follows_its_parameter(four: Path) -> None:
    (tensor,) = explained(four, f"{KEYS}.moment1_0")
    assert tensor["role"] == "optimizer_state"
    assert {box["stored"] for box in tensor["boxes"]} == {f"{FUSED}.moment1_0"}
    assert tensor["rules"][0]["targets"] == [FUSED]


def test_the_text_names_files_offsets_and_the_rule(four: Path) -> None:
    text = run("explain", four, KEYS).out
    assert f"    [0:4, 0:16] (canonical) = {FUSED} [0:16, 8:12] (stored), axes [1, 0]  (model_state/rank-0000" in text
    assert ", in the shard [0:16, 0:16])" in text
    assert f"{KEYS}, " in text
    assert f" (canonical) = {FUSED} (stored): parts [16, 8, 8]" in text
    assert "parts [16, 8, 8] along axis 1; axes [1, 0]; stored side interleaved in 2 groups" in text


def test_several_parts_that_one_tensor_holds_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rule = Rule(("gates",), ("stored",), ((4, 2),), 0, (0, 1), target_blocks=2)
    tensor = ExplainedTensor("canonical", "model_state", "float32", (6, 8), [], [rule], [])
    show(Explanation("here", "flex_checkpoint", "gates", [tensor]), console())
    assert "parts [(4, 2)] along axis 0; stored side interleaved in 2 groups" in capsys.readouterr().out


def test_open_weights_have_no_rules(weights: Path) -> None:
    (tensor,) = explained(weights, KEYS)
    assert (tensor["rules"], len(tensor["boxes"])) == ([], 1)
