"""``verify`` lists faults and the checks that it made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from paddleformers_fc.storage.export_checksums import encode_checksums, read_checksums
from paddleformers_fc.storage.manifest import read_manifest, write_manifest
from tests.cli.support import SIZES, alter, document_of, flip, open_weights, run, save, seal
from tests.execute.simulated import CONFIG, canonical
from tests.families.test_transformers import CASES

ALL_CHECKS = ["manifest", "files", "tensors", "run", "mapping", "equal values"]
DEPTHS = {
    "off": ["manifest", "tensors", "mapping"],
    "size": ["manifest", "files", "tensors", "run", "mapping"],
    "full": ALL_CHECKS,
}
WEIGHTS = "model_state/rank-00001.safetensors"


def failed_check(document: dict[str, Any]) -> str:
    """Return the one check that failed."""
    assert not document["passed"]
    (failed,) = [check["name"] for check in document["checks"] if not check["passed"]]
    return str(failed)


@pytest.mark.parametrize("level", DEPTHS)
def test_a_complete_checkpoint_passes_at_every_level(four: Path, level: str) -> None:
    outcome = run("verify", four, "--level", level, "--json")
    document = outcome.document
    assert (outcome.code, document["passed"], document["level"]) == (0, True, level)
    assert [check["name"] for check in document["checks"]] == DEPTHS[level]
    assert document["not_checked"] == [name for name in ALL_CHECKS if name not in DEPTHS[level]]
    assert "error" not in document
    files = [path for path in four.rglob("*") if path.is_file() and path.name != "flex_checkpoint.json"]
    inspected = run("inspect", four, "--json").document
    assert document["tensors"] == sum(role["tensors"] for role in inspected["roles"].values())
    if level == "full":
        assert document["files"] == len(files)
        assert document["bytes"] == sum(path.stat().st_size for path in files)


def test_a_flipped_bit_is_found_with_its_file_and_block(copy: Path) -> None:
    block = 2
    seal(copy, block_bytes=1024)
    flip(copy / WEIGHTS, block * 1024 + 500)
    outcome = run("verify", copy)
    assert outcome.code == 1
    assert f"{WEIGHTS} does not match its checksum" in outcome.err
    assert f"block {block} (from byte {block * 1024})" in outcome.err
    assert "FAILED  files" in outcome.out
    assert "is damaged" not in outcome.out
    assert outcome.err.count("is damaged") == 1
    assert not any("tensors" in line for line in outcome.out.splitlines() if "not checked" in line)


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def change_header(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:20] + b"^" + raw[21:])


@pytest.mark.parametrize("damage", [remove, truncate, change_header])
@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "mapping.json", "flex_index.safetensors"])
def test_a_damaged_file_is_one_fault_on_one_line(copy: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(copy / name)
    document = document_of("verify", copy, code=1)
    stated = [document["what"], *document["evidence"]]
    assert len([line for line in stated if not line.startswith(" ") and name in line]) == 1
    assert name in document["what"] or document["what"] == f"{copy} is damaged: 1 fault found."


def test_faults_of_several_checks_are_counted_together(copy: Path) -> None:
    flip(copy / WEIGHTS, (copy / WEIGHTS).stat().st_size - 1)
    for name in ("model_state/rank-00000.safetensors", "optimizer_state/rank-00001.safetensors"):
        (copy / name).unlink()
    document = document_of("verify", copy, code=1)
    faults = [line for line in document["evidence"] if not line.startswith(" ")]
    assert len(faults) == len(set(faults)) == 3
    assert document["what"] == f"{copy} is damaged: {len(faults)} faults found."
    listed = document_of("list", copy.parent, code=1)["checkpoints"][0]["fault"]
    assert listed.count(" is missing") == 2
    assert ": 2 faults found: " in listed  # Tensors are not read.


@pytest.mark.parametrize(
    ("is_missing", "is_extra", "step"),
    [
        (False, True, "Move these files away."),
        (True, True, "Move away the files that do not belong to it, and restore the others or use another checkpoint."),
        (True, False, "Restore these files or use another checkpoint."),
    ],
)
def test_the_next_step_fits_missing_and_extra_files(copy: Path, is_missing: bool, is_extra: bool, step: str) -> None:
    if is_extra:
        shutil.copy(copy / WEIGHTS, copy / "model_state/rank-00009.safetensors")
    if is_missing:
        (copy / "config.json").unlink()
    assert run("verify", copy, "--json").document["next_step"] == step


@pytest.mark.parametrize("name", ["config.json", "mapping.json"])
def test_every_command_refuses_an_altered_document(copy: Path, four: Path, tmp_path: Path, name: str) -> None:
    alter(copy / name)
    commands = ["inspect {copy}", "verify {copy} --level off", "diff {four} {copy}", "diff {copy} {four}"]
    commands += ["export {copy} {new} --verify off"]
    commands += ["aoa {copy}", "plan {copy} --to tp=2"] if name == "config.json" else []
    for command in commands:
        outcome = run(*command.format(copy=copy, four=four, new=tmp_path / "new").split(), "--json")
        assert (outcome.code, outcome.document["error"]) == (1, "Corrupt"), command
        lines = [outcome.document["what"], *outcome.document["evidence"]]
        assert any(f"{name} does not match its checksum" in line for line in lines)


def edit_rules(checkpoint: Path, change: Any) -> None:
    """Apply ``change`` to the document of mapping.json and seal the checkpoint again."""
    path = checkpoint / "mapping.json"
    document = json.loads(path.read_text())
    change(document["rules"])
    path.write_text(json.dumps(document))
    seal(checkpoint)


def turn_qkv(document: dict[str, Any]) -> None:
    """Make the rules of the fused attention wrong."""
    rule = next(rule for rule in document["rules"] if "qkv" in rule["targets"][0])
    rule["parts"] = rule["parts"][::-1]
    rule["target_blocks"] = 3


NORM = "model.norm.weight"


def forget_a_rule(document: dict[str, Any]) -> None:
    """Leave a stored tensor without a rule."""
    del document["targets"][NORM]
    document["rules"] = [rule for rule in document["rules"] if rule["targets"] != [NORM]]


def invent_a_rule(document: dict[str, Any]) -> None:
    """Give a tensor that is not stored a rule."""
    document["targets"]["model.extra.weight"] = document["targets"][NORM]
    rule = next(rule for rule in document["rules"] if rule["targets"] == [NORM])
    document["rules"].append({**rule, "sources": ["model.extra.weight"], "targets": ["model.extra.weight"]})


def rename_in_a_header(checkpoint: Path) -> None:
    """Give a tensor another name of the same length in the header of its file."""
    raw = (checkpoint / WEIGHTS).read_bytes()
    (checkpoint / WEIGHTS).write_bytes(raw.replace(b"embed_tokens.weight", b"embed_tokens.weighx", 1))
    seal(checkpoint)


def lose_a_file(checkpoint: Path) -> None:
    """Take a file away, and every record of it."""
    (checkpoint / WEIGHTS).unlink()
    seal(checkpoint)


@pytest.mark.parametrize(
    ("damage", "check", "line"),
    [
        (lose_a_file, "tensors", "is not stored"),
        (rename_in_a_header, "tensors", f"{WEIGHTS} differs from flex_index.safetensors"),
        (
            lambda copy: edit_rules(copy, forget_a_rule),
            "tensors",
            f"{NORM}: stored as model_state and not in the rules",
        ),
        (lambda copy: edit_rules(copy, turn_qkv), "mapping", "self_attn.qkv_proj.weight: parts [8, 8, 16] cannot be"),
        (lambda copy: edit_rules(copy, invent_a_rule), "tensors", "model.extra.weight: in the rules and not stored"),
        (lambda copy: alter(copy / "flex_checkpoint.json"), "manifest", "flex_checkpoint.json"),
    ],
    ids=["a lost file", "a header", "no rule", "a wrong rule", "a rule too many", "the manifest"],
)
def test_each_misfit_is_found_by_its_check(copy: Path, damage: Callable[[Path], None], check: str, line: str) -> None:
    damage(copy)
    outcome = run("verify", copy, "--json")
    assert (outcome.code, failed_check(outcome.document)) == (1, check)
    assert outcome.document["next_step"]
    assert line in "\n".join([outcome.document["what"], *outcome.document["evidence"]])
    assert check != "manifest" or len(outcome.document["checks"]) == 1
    assert check != "mapping" or outcome.document["error"] == "MappingError"


DESCRIBED = {**CONFIG, "bos_token_id": 1, "sliding_window": None}


@pytest.mark.parametrize(("key", "value"), [("bos_token_id", 3), ("sliding_window", 16)])
def test_a_configuration_that_is_not_that_of_the_mapping_is_found(tmp_path: Path, key: str, value: object) -> None:
    checkpoint = save(tmp_path / "checkpoint-3", canonical(), config=DESCRIBED)
    assert run("verify", checkpoint).code == 0
    (checkpoint / "config.json").write_text(json.dumps({**DESCRIBED, key: value}))
    seal(checkpoint)
    document = run("verify", checkpoint, "--json").document
    assert failed_check(document) == "mapping"
    assert any(line.startswith(key) and "in config.json" in line for line in document["evidence"])
    assert run("export", checkpoint, tmp_path / "hf").code == 1
    assert not (tmp_path / "hf").exists()


def test_tied_tensors_are_compared(tmp_path: Path) -> None:
    config = {**CONFIG, "tie_word_embeddings": True}
    equal, unequal = canonical(), canonical()
    equal["lm_head.weight"] = equal["model.embed_tokens.weight"].copy()
    right = run("verify", save(tmp_path / "equal", equal, tp=2, config=config), "--json").document
    # Two tensor-parallel pieces of the weight and of each of its two moments, and its two powers of beta.
    assert (right["passed"], right["checks"][-1]["detail"]) == (True, "8 pairs compared")
    # Checkpoints of earlier versions have no record; reading finds the difference.
    other = save(tmp_path / "unequal", unequal, tp=2, config=config)
    write_manifest(other, structs.replace(read_manifest(other), ties=[]))
    assert run("verify", other, "--level", "size").code == 0
    wrong = run("verify", other, "--json").document
    assert failed_check(wrong) == "equal values"
    assert any("lm_head.weight = model.embed_tokens.weight" in line for line in wrong["evidence"])


def test_open_weights_are_checked_as_far_as_they_can_be(weights: Path) -> None:
    document = run("verify", weights, "--json").document
    sizes = [path.stat().st_size for path in weights.glob("*.safetensors")]
    assert (document["passed"], document["kind"], document["tensors"]) == (True, "huggingface", len(canonical()))
    assert (document["files"], document["bytes"]) == (len(sizes), sum(sizes))
    assert document["not_checked"] == ["model"]  # The configuration has no sizes.
    assert "cannot be checked: names, shapes and sizes" in run("verify", weights).out


@pytest.mark.parametrize(
    ("case", "hint"),
    [
        ("qwen3_vl_moe", "experts are stored [expert, out, in], as Transformers 5 saves them"),
        ("qwen3_5_moe", "experts are stored one by one, as Transformers 5 saves them"),
        ("qwen3_vl, tied", ""),
    ],
)
def test_open_weights_of_transformers_5_are_read_or_recognised(tmp_path: Path, case: str, hint: str) -> None:
    tensors = {name: np.zeros(shape, np.float32) for name, shape in CASES[case]["tensors"].items()}
    open_weights(tmp_path, tensors, CASES[case]["config"])
    document = run("verify", tmp_path, "--json").document
    assert document["passed"] == (not hint)
    if hint:
        assert failed_check(document) == "model"
        assert document["evidence"][0].startswith(hint)
        assert "experts in the files" in document["next_step"]


def test_checksums_of_an_export_are_compared_and_missing_ones_are_reported(weights_copy: Path) -> None:
    flip(path := min(weights_copy.glob("*.safetensors")), path.stat().st_size - 1)
    wrong = run("verify", weights_copy, "--json")
    assert (wrong.code, failed_check(wrong.document)) == (1, "checksums")
    assert "flex_checksums.json" in wrong.document["next_step"]
    (weights_copy / "flex_checksums.json").unlink()
    stated = run("verify", weights_copy, "--json").document
    assert (stated["passed"], stated["not_checked"]) == (True, ["checksums", "model"])
    assert "changed bytes" in stated["cannot_be_checked"][0]
    lines = run("verify", weights_copy).out.splitlines()
    assert lines[-1].startswith("no fault found, but bytes could not be compared: level full")


def test_documents_without_checksums_are_listed_and_weights_without_them_rejected(weights_copy: Path) -> None:
    (weights_copy / "tokenizer.json").write_text("{}")
    found = document_of("verify", weights_copy)
    assert "tokenizer.json: not listed in flex_checksums.json" in found["cannot_be_checked"]
    listed = read_checksums(weights_copy) or {}
    gone = min(name for name in listed if name.endswith(".safetensors"))
    kept = encode_checksums(one for name, one in listed.items() if name != gone)
    (weights_copy / "flex_checksums.json").write_bytes(kept)
    refused = run("verify", weights_copy, "--json")
    assert refused.code == 1
    assert f"{gone} is needed, and flex_checksums.json does not list it" in refused.document["evidence"]


def test_a_single_file_next_to_an_index_is_reported(weights_copy: Path) -> None:
    shutil.copy(path := min(weights_copy.glob("*.safetensors")), weights_copy / "model.safetensors")
    (weights_copy / "flex_checksums.json").unlink()
    line = "model.safetensors: not in the index, and Transformers reads it instead of the index"
    assert line in document_of("verify", weights_copy)["cannot_be_checked"]
    path.unlink()
    assert "delete the index" in document_of("verify", weights_copy, code=1)["next_step"]


@pytest.mark.parametrize(
    "changed", [{}, {"intermediate_size": 32}, {"num_hidden_layers": 3}, {"num_hidden_layers": 1}], ids=str
)
def test_open_weights_have_the_names_and_shapes_of_their_model(tmp_path: Path, changed: dict[str, int]) -> None:
    weights = open_weights(tmp_path / "hf", canonical(), {**SIZES, "model_type": "llama", **changed})
    document = run("verify", weights, "--json").document
    assert document["passed"] == (not changed)
    if changed:
        assert failed_check(document) == "model"
        assert document["what"].startswith("The open weights and the model do not fit")
        assert document["next_step"].startswith("Name the directory of this model's weights")
        converted = run("convert", weights, tmp_path / "new")
        assert (converted.code, "Resume" in converted.err) == (1, False)
        assert not (tmp_path / "new").exists()


def test_copies_of_tied_tensors_of_open_weights_are_compared(tmp_path: Path) -> None:
    config = {**CONFIG, "tie_word_embeddings": True}
    embedding = canonical()["model.embed_tokens.weight"]

    def verified(head: Any, level: str = "full") -> dict[str, Any]:
        open_weights(tmp_path, {**canonical(), "lm_head.weight": head}, config)
        return run("verify", tmp_path, "--level", level, "--json").document

    equal = verified(embedding)
    assert (equal["passed"], equal["checks"][-1]["detail"]) == (True, "1 pair compared")
    assert verified(embedding + 1, "size")["not_checked"] == ["checksums", "model", "equal values"]
    for head in (embedding + 1, embedding.astype("float16")):
        wrong = verified(head)
        assert failed_check(wrong) == "equal values"
        assert any("lm_head.weight" in line for line in wrong["evidence"]), wrong
        assert "config.json" in wrong["next_step"], wrong


def test_the_checkpoints_below_an_output_directory_are_listed(kept: Path, copy: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    for step in (3, 12):
        shutil.copytree(copy, output / f"checkpoint-{step}")
    (output / "checkpoint-12/flex_checkpoint.json").unlink()
    outcome = run("verify", output)
    assert outcome.code == 2
    assert "checkpoint-3: step 3" in outcome.err
    assert "checkpoint-12: " in outcome.err
    assert "not a finished checkpoint" in outcome.err
    assert run("export", copy, output).code == 0
    both = run("verify", output, "--json")
    assert both.code == 0
    assert len(both.document["below"]) == 2


def test_an_unfinished_checkpoint_is_rejected_as_unfinished(copy: Path, tmp_path: Path) -> None:
    manifest = copy / "flex_checkpoint.json"
    manifest.write_text("{")
    assert "Restore it" in run("verify", copy, "--json").document["next_step"]
    manifest.unlink()
    outcome = run("verify", copy)
    assert (outcome.code, "is an unfinished checkpoint." in outcome.err) == (1, True)
    (tmp_path / "empty").mkdir()
    assert document_of("verify", tmp_path / "empty", code=1)["error"] == "NotACheckpoint"
