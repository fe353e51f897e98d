"""Save, load and export between layouts, with every rank in one process; every equality is bitwise."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddleformers_fc.distributed.channel import ALONE
from paddleformers_fc.errors import Corrupt, FormatError, MappingError, MismatchError, StorageError
from paddleformers_fc.execute import export, export_files
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.live_export import save_weights
from paddleformers_fc.execute.load import load_checkpoint
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.save import JobRecord, _write_tensors, config_bytes, save_checkpoint
from paddleformers_fc.execute.save_plan import PlannedFile, PlannedWrite
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.storage.paths import LOCK_NAME
from paddleformers_fc.storage.safetensors import layout_file
from tests.execute.simulated import (
    CONFIG,
    HIDDEN,
    MODEL,
    Arrays,
    Roles,
    canonical,
    job,
    live,
    load,
    same_values,
    save,
    succeed,
)
from verification.digests import canonical_digests

ARRAYS = canonical()
# Tensor-parallel degree and sharding degree of the optimizer; ranks are their product.
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)]
PAIRS = [
    ((1, 1), (2, 1)),
    ((2, 1), (1, 2)),
    ((1, 2), (2, 2)),
    ((2, 2), (1, 3)),
    ((1, 3), (1, 1)),
    ((2, 2), (2, 2)),
    ((1, 3), (2, 1)),
]


@pytest.mark.parametrize(("stored", "wanted"), PAIRS)
def test_a_resume_restores_every_bit_under_any_layout(
    tmp_path: Path, stored: tuple[int, int], wanted: tuple[int, int]
) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, *stored)
    load(tmp_path / "checkpoint-3", ARRAYS, *wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_export_of_every_layout_is_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: tuple[int, int]
) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, *layout)
    with monkeypatch.context() as patched:
        # In more and smaller pieces.
        patched.setattr(export_files, "_CACHE_BYTES", 512)
        report = export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "export")
    (name,) = report.files
    loaded = load_file(tmp_path / "export" / name)
    assert loaded.keys() == ARRAYS.keys()
    assert all(np.array_equal(loaded[key], ARRAYS[key]) for key in ARRAYS)
    save(tmp_path / "checkpoint-4", ARRAYS, 1, 1)
    again = export_checkpoint(tmp_path / "checkpoint-4", tmp_path / "again")
    assert report.digests() == again.digests()
    assert json.loads((tmp_path / "export/config.json").read_text()) == CONFIG


def test_an_export_is_the_same_file_whichever_rank_held_which_part(tmp_path: Path) -> None:
    def work(channel: Any) -> None:
        files = {"config.json": config_bytes(CONFIG)} if channel.rank == 0 else {}
        held = live(ARRAYS, 2, 1 - channel.rank)
        save_checkpoint(tmp_path / "checkpoint-3", held, MODEL, files, JobRecord(3, 24, {"tensor": 2}), channel)

    succeed(2, work)
    export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "export")
    loaded = load_file(tmp_path / "export/model.safetensors")
    assert all(np.array_equal(loaded[key], ARRAYS[key]) for key in ARRAYS)


def test_an_export_in_several_files_has_an_index_that_is_right(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, 2, 1)
    report = export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "hf", 4000)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in ARRAYS.values())
    for name, file in index["weight_map"].items():
        assert np.array_equal(load_file(tmp_path / "hf" / file)[name], ARRAYS[name])
    assert len(report.files) == len(set(index["weight_map"].values())) > 3


def test_an_export_takes_along_what_describes_the_model_and_nothing_of_the_trainer(tmp_path: Path) -> None:
    files = {
        "config.json": config_bytes(CONFIG),
        "templates/chat.jinja": b"hello",
        "trainer/state.json": b"{}",
    }
    source = tmp_path / "checkpoint-3"
    succeed(1, lambda channel: save_checkpoint(source, live(ARRAYS, 1, 0), MODEL, files, JobRecord(3, 24, {}), channel))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("kept")
    for target in ("fresh", "run"):
        export_checkpoint(source, tmp_path / target)
        found = {str(path.relative_to(tmp_path / target)) for path in (tmp_path / target).rglob("*") if path.is_file()}
        exported = {"config.json", "flex_checksums.json", "model.safetensors", "templates/chat.jinja"}
        assert found - {"notes.txt"} == exported
    assert (tmp_path / "run/notes.txt").read_text() == "kept"


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_an_export_that_fails_in_the_midst_leaves_nothing_and_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(export_files, "_CACHE_BYTES", 512)
    save(tmp_path / "checkpoint-3", ARRAYS, 1, 1)
    threads = set(threading.enumerate())
    original, calls = getattr(os, call), []

    def refuse(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 7:
            raise OSError(errno.EIO, "refused")
        return original(*args)

    write = export.write_files
    # The checkpoint is open and its headers are read when the first file is written.
    monkeypatch.setattr(export, "write_files", lambda *given: (monkeypatch.setattr(os, call, refuse), write(*given))[1])
    with pytest.raises(StorageError, match=r"errno 5 \(EIO\)"):
        export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "hf", 4000)
    monkeypatch.setattr(os, call, original)
    assert len(calls) > 6
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    assert set(threading.enumerate()) <= threads


BESIDE_A_CHECKPOINT = ["checkpoint-3", "config.json", "flex_checksums.json", "model.safetensors"]


def export_live(target: Path, tp: int) -> None:
    """Export a live model of some ranks."""

    def work(channel: Any) -> None:
        files = {"config.json": config_bytes(CONFIG)} if channel.rank == 0 else {}
        save_weights(live(ARRAYS, tp, channel.rank)["model_state"], MODEL, files, target, 10**9, channel)

    succeed(tp, work)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_live_model_is_exported_into_the_output_directory_where_that_is_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    output = tmp_path / "output"
    save(output / "checkpoint-3", ARRAYS, 1, 1)
    rename = os.rename

    def refuse(source: Any, new: Any) -> None:
        if output in Path(new).parents and output not in Path(source).parents:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, new)

    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(os.path, "ismount", lambda path: os.fspath(path) == str(output))

    for _ in range(2):
        export_live(output, tp)
    loaded = load_file(output / "model.safetensors")
    assert all(np.array_equal(loaded[key], ARRAYS[key]) for key in ARRAYS)
    assert sorted(path.name for path in output.iterdir()) == BESIDE_A_CHECKPOINT
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


@pytest.mark.parametrize("tp", [1, 2])
def test_an_export_that_is_there_does_not_fail_by_what_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    save(tmp_path / "hf" / "checkpoint-3", ARRAYS, 1, 1)  # It is written into, for it holds a directory.
    unlink = os.unlink

    def refuse(path: Any) -> None:
        if ".removed-" in Path(path).parent.name and Path(path).name == LOCK_NAME:
            raise OSError(errno.EBUSY, "Device or resource busy")
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        export_live(tmp_path / "hf", tp)
    assert any(".removed-" in path.name for path in (tmp_path / "hf").iterdir())
    export_live(tmp_path / "hf", tp)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == BESIDE_A_CHECKPOINT


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_kept_beside_a_checkpoint_may_have_a_name_that_is_no_text(tmp_path: Path, tp: int) -> None:
    output = tmp_path / os.fsdecode(b"out\xff")
    try:
        (output / "checkpoint-3").mkdir(parents=True)
    except OSError:
        pytest.skip("names are text on this file system")
    (output / "checkpoint-3" / "notes").write_text("theirs")

    def work(channel: Any) -> tuple[Path, ...]:
        files = {"config.json": config_bytes(CONFIG)} if channel.rank == 0 else {}
        record = JobRecord(3, 24, {"tensor": tp})
        held = live(ARRAYS, tp, channel.rank)
        return save_checkpoint(output / "checkpoint-3", held, MODEL, files, record, channel).set_aside

    (kept,) = next(iter({tuple(found) for found in succeed(tp, work)}))
    assert [path.name for path in kept.iterdir()] == ["notes"]
    load(output / "checkpoint-3", ARRAYS, tp)


def test_digests_are_those_of_the_canonical_tensors(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, 2, 2)
    found = {(digest.role, digest.name): digest.md5 for digest in canonical_digests(tmp_path / "checkpoint-3")}
    for name, array in ARRAYS.items():
        assert found["model_state", name] == hashlib.md5(array.tobytes()).hexdigest()
        moment = np.ascontiguousarray(array.T * 10).T
        assert found["optimizer_state", f"{name}.moment1_0"] == hashlib.md5(moment.tobytes()).hexdigest()


@pytest.mark.parametrize("verify", ["off", "size", "full"])
@pytest.mark.parametrize("what", ["", "model_state/rank-00000.safetensors"], ids=["checkpoint", "file"])
def test_what_is_replaced_between_check_and_read_is_refused(tmp_path: Path, verify: str, what: str) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, 1, 1)
    save(tmp_path / "checkpoint-4", canonical(seed=1), 1, 1)

    def work(channel: Any) -> None:
        checkpoint = open_on_all_ranks(tmp_path / "checkpoint-3", channel, verify)
        if verify == "off" and what:
            checkpoint.catalog.identities[tmp_path / "checkpoint-3" / what]  # Its header is compared.
        (tmp_path / "checkpoint-3" / what).rename(tmp_path / "away")
        (tmp_path / "checkpoint-4" / what).rename(tmp_path / "checkpoint-3" / what)
        load_checkpoint(checkpoint, live(ARRAYS, 1, 0, empty=True), MODEL, channel)

    (error,) = job(1, work)
    assert isinstance(error, Corrupt)
    assert f"{what or 'flex_checkpoint.json'} was replaced or changed after it was checked" in str(error)


def test_a_model_of_another_family_is_reported_before_its_consequences(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, 1, 1)

    def work(channel: Any) -> None:
        wanted = live({"model.embed_tokens.weight": ARRAYS["model.embed_tokens.weight"]}, 1, channel.rank, empty=True)
        config = ModelDescription({**CONFIG, "model_type": "qwen2"}, is_fleet=False)
        load_checkpoint(open_on_all_ranks(tmp_path / "checkpoint-3", channel), wanted, config, channel)

    (error,) = job(1, work)
    assert isinstance(error, MismatchError)
    assert error.evidence[0] == "the checkpoint is of family ernie4_5, the model is qwen2"
    assert len(error.evidence) > 1


def test_a_model_of_other_heads_is_refused_though_every_tensor_has_its_shape(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, 1, 1)
    heads, groups, head = (CONFIG[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    other = {"num_attention_heads": heads // 2, "num_key_value_heads": groups // 2, "head_dim": 2 * head}

    def work(channel: Any) -> None:
        wanted = live(ARRAYS, 1, channel.rank, empty=True)
        load_checkpoint(
            open_on_all_ranks(tmp_path / "checkpoint-3", channel),
            wanted,
            ModelDescription({**CONFIG, **other}),
            channel,
        )

    (error,) = job(1, work)
    assert isinstance(error, MismatchError)
    assert f"num_attention_heads: stored {heads}, expected {heads // 2}" in str(error)
    assert f"num_key_value_heads: stored {groups}, expected {groups // 2}" in str(error)


@pytest.mark.parametrize(
    ("layers", "lines"),
    [
        (3, ["UNEXPECTED", "model.layers.2.self_attn.qkv_proj.weight"]),
        (1, ["MISSING", "model.layers.1.mlp.up_gate_proj.weight (itself, beta1_pow_acc_0"]),
    ],
)
def test_names_missing_on_either_side_are_reported_on_every_rank_before_a_weight_changes(
    tmp_path: Path, layers: int, lines: list[str]
) -> None:
    save(tmp_path / "checkpoint-3", canonical(layers=layers), 1)

    def work(channel: Any) -> None:
        roles = live(ARRAYS, 2, channel.rank, empty=True)
        with pytest.raises(MismatchError) as refused:
            load_checkpoint(open_on_all_ranks(tmp_path / "checkpoint-3", channel), roles, MODEL, channel)
        assert same_values(roles, live(ARRAYS, 2, channel.rank, empty=True))
        raise refused.value

    first, second = job(2, work)
    assert isinstance(first, MismatchError), first
    assert str(first) == str(second)
    assert all(line in str(first) for line in lines)


FUSED_NAMES = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.qkv_proj",
    "self_attn.o_proj",
    "mlp.up_gate_proj",
    "mlp.down_proj",
)


def load_with(directory: Path, statements: list[str], arrays: Arrays, tp: int) -> list[Roles]:
    """What every rank holds after a load into zeros with statements of a user's."""

    def work(channel: Any) -> Roles:
        roles = live(arrays, tp, channel.rank, empty=True)
        stated = {"aoa_statements": statements}
        load_checkpoint(open_on_all_ranks(directory, channel), roles, MODEL, channel, aoa_config=stated)
        return roles

    return succeed(tp, work)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_users_statements_drop_a_layer_and_the_rest_is_derived(tmp_path: Path, tp: int) -> None:
    three = canonical(layers=3)
    save(tmp_path / "checkpoint-3", three, 2, 1)
    statements = [f"model.layers.2.{name}.weight -> _" for name in FUSED_NAMES]
    two = {name: array for name, array in three.items() if "layers.2." not in name}
    for rank, got in enumerate(load_with(tmp_path / "checkpoint-3", statements, two, tp)):
        assert same_values(live(two, tp, rank), got)


@pytest.mark.parametrize(("stored", "tp"), [(1, 1), (1, 2), (2, 1)])
def test_a_users_statements_move_a_layer_with_its_moments_and_leave_a_new_one_fresh(
    tmp_path: Path, stored: int, tp: int
) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, stored, 1)
    statements = []
    for name in FUSED_NAMES:
        statements.append(f"model.layers.1.{name}.weight -> model.layers.2.{name}.weight")
        statements.append(f"_ -> model.layers.1.{name}.weight")
    three = {name.replace("layers.1.", "layers.2."): array for name, array in ARRAYS.items()}
    zeros = {name: np.zeros_like(array) for name, array in ARRAYS.items() if "layers.1." in name}
    for rank, got in enumerate(load_with(tmp_path / "checkpoint-3", statements, {**three, **zeros}, tp)):
        expected = live({**three, **zeros}, tp, rank)
        powers = {name for name in expected["optimizer_state"] if "layers.1." in name and "pow_acc" in name}
        for role, names in expected.items():
            for name, weight in names.items():
                if name not in powers:
                    assert np.array_equal(weight.local_tensor.numpy(), got[role][name].local_tensor.numpy()), name


GATE_AND_UP = "model.layers.1.mlp.up_gate_proj.weight"


@pytest.mark.parametrize(("stored", "tp"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_statements_that_cut_a_fused_tensor_beside_its_parts_leave_every_part_whole(
    tmp_path: Path, stored: int, tp: int
) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, stored, 1)
    statements = [f"{GATE_AND_UP} -> first, second, axis=0", f"second, first -> {GATE_AND_UP}, axis=0"]
    turned = {
        name: np.roll(array, HIDDEN // 2, axis=1)
        if name.startswith("model.layers.1.mlp") and "down" not in name
        else array
        for name, array in ARRAYS.items()
    }
    for rank, got in enumerate(load_with(tmp_path / "checkpoint-3", statements, ARRAYS, tp)):
        assert same_values(live(turned, tp, rank), got)


@pytest.mark.parametrize("joined", ["axis=1", "fused_ffn"])
@pytest.mark.parametrize(("stored", "tp"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_statements_that_cut_a_fused_tensor_across_its_ranks_are_refused_or_move_whole_parts(
    tmp_path: Path, stored: int, tp: int, joined: str
) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, stored, 1)
    statements = [f"{GATE_AND_UP} -> one, other, {joined}", f"other, one -> {GATE_AND_UP}, {joined}"]
    gate, up = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
    if joined == "fused_ffn" or stored == tp == 1:
        swapped = {**ARRAYS, gate: ARRAYS[up], up: ARRAYS[gate]}
        for rank, got in enumerate(load_with(tmp_path / "checkpoint-3", statements, ARRAYS, tp)):
            assert same_values(live(swapped, tp, rank), got)
        return
    with pytest.raises(MappingError, match="cut or join fused tensors across the groups") as refusal:
        load_with(tmp_path / "checkpoint-3", statements, ARRAYS, tp)
    assert refusal.value.evidence[0].startswith(f"{GATE_AND_UP}: ")
    assert " 2" in refusal.value.evidence[0]


def test_a_rank_that_cannot_describe_itself_stops_every_rank_and_leaves_nothing(tmp_path: Path) -> None:
    def work(channel: Any) -> None:
        roles = live(ARRAYS, 2, channel.rank)
        if channel.rank == 1:
            roles["model_state"]["model.norm.weight"].local_shape = (99,)
        save_checkpoint(tmp_path / "checkpoint-3", roles, MODEL, {}, JobRecord(3, 24, {}), channel)

    first, second = job(2, work)
    assert isinstance(first, MismatchError)
    assert str(first) == str(second)
    assert "rank 1" in str(first)
    assert not list(tmp_path.iterdir())


def test_the_states_of_a_tied_parameter_are_saved_under_its_owner(tmp_path: Path) -> None:
    """Of two names of one memory the optimizer names the states after the one that sorts first."""
    owner, alias = "model.embed_tokens.weight", "lm_head.weight"
    held = live(ARRAYS, 1, 0)
    held["model_state"][alias] = held["model_state"][owner]
    states = held["optimizer_state"]
    held["optimizer_state"] = {name: state for name, state in states.items() if not name.startswith(owner)}
    tied = ModelDescription({**CONFIG, "tie_word_embeddings": True})
    files = {"config.json": config_bytes(tied.config)}
    save_checkpoint(tmp_path / "checkpoint-3", held, tied, files, JobRecord(3, 24, {}), ALONE)
    stored = open_on_all_ranks(tmp_path / "checkpoint-3", ALONE).catalog.roles
    assert owner in stored["model_state"]
    assert f"{owner}.moment1_0" in stored["optimizer_state"]
    assert not [name for names in stored.values() for name in names if name.startswith(alias)]


def test_a_tensor_whose_size_changes_after_the_plan_is_not_saved(tmp_path: Path) -> None:
    layout = layout_file(tmp_path / "x", [("a", "F32", (4,)), ("b", "F32", (4,))], {})
    planned = PlannedFile("x", "model_state", layout, (PlannedWrite("a", 0, 4), PlannedWrite("b", 0, 4)))
    arrays = {"a": np.zeros(3, np.float32), "b": np.zeros(5, np.float32)}
    tensors = {name: lambda start, stop, array=array: iter([array]) for name, array in arrays.items()}
    with pytest.raises(FormatError, match=r"'a' was given 12 bytes, not 16"):
        _write_tensors(tmp_path, planned, tensors)
