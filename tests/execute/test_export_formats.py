"""Formats that are not of this package: an export writes the tensors, files and documents that their writer names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
from safetensors.numpy import load_file

from paddleformers_fc.errors import OptionError
from paddleformers_fc.execute.export import check_target, export_opened
from paddleformers_fc.families import family_for
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.formats.checkpoint import ExportWriter, OutputFile, tensor_header
from paddleformers_fc.formats.huggingface import HUGGINGFACE_WRITER
from paddleformers_fc.formats.registry import open_checkpoint
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.layout.shards import Shard, ShardsByRole
from paddleformers_fc.mapping.boxes import whole
from paddleformers_fc.plan.simulate import declared_model
from paddleformers_fc.storage.safetensors import FileLayout
from verification.simulate_ranks import QWEN3_MOE, filled, save, value_of


def roles_files(checkpoint: OpenedCheckpoint, layout: ShardsByRole, max_file_bytes: int) -> tuple[OutputFile, ...]:
    return tuple(
        OutputFile(f"{role}/0_0.safetensors", role, tuple(layout[role][name] for name in sorted(layout[role])))
        for role in sorted(layout)
    )


def roles_documents(checkpoint: OpenedCheckpoint, files: Sequence[OutputFile]) -> dict[str, bytes]:
    return {"roles.json": json.dumps({file.role: len(file.tensors) for file in files}).encode()}


WHOLE_STATE = ExportWriter(
    marks=("roles.json",),
    rules=lambda checkpoint: checkpoint.rules,
    files=roles_files,
    header=partial(tensor_header, {}),
    documents=roles_documents,
)
"""Every role in the names of the model that was saved, with a list of the tensors in each directory."""


def attention_file(checkpoint: OpenedCheckpoint, layout: ShardsByRole, max_file_bytes: int) -> tuple[OutputFile, ...]:
    weights = layout["model_state"]
    chosen = tuple(weights[name] for name in sorted(weights) if ".self_attn." in name)
    return (OutputFile("adapter_model.safetensors", "model_state", chosen),)


def renamed_header(path: Path, shards: Sequence[Shard]) -> FileLayout:
    return tensor_header({}, path, [msgspec.structs.replace(one, name=f"base_model.{one.name}") for one in shards])


ATTENTION_ONLY = msgspec.structs.replace(
    HUGGINGFACE_WRITER,
    marks=("adapter_model.safetensors",),
    files=attention_file,
    header=renamed_header,
    documents=lambda checkpoint, files: {"adapter_config.json": b"{}"},
)
"""A part of the canonical tensors in one file, under other names, as adapters are."""


def saved(directory: Path, layout: str) -> OpenedCheckpoint:
    model = declared_model(family_for(QWEN3_MOE.config), QWEN3_MOE, parse_grid(layout), "float32")
    save(directory, [filled(model.roles(rank), value_of) for rank in range(model.grid.world_size)], model)
    return open_checkpoint(directory)


@pytest.mark.parametrize("layout", ["tp=2,pp=2", "sharding=2,split=true"])
def test_a_format_of_all_roles_in_the_names_of_the_model_gets_every_saved_number(layout: str, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "c", layout)
    report = export_opened(checkpoint, tmp_path / "out", writer=WHOLE_STATE)
    stored = checkpoint.catalog.roles
    assert json.loads((tmp_path / "out/roles.json").read_text()) == {role: len(stored[role]) for role in stored}
    assert report.tensors == checkpoint.catalog.count
    for role, tensors in stored.items():
        found = load_file(tmp_path / "out" / role / "0_0.safetensors")
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            expected = value_of(role, Shard(name, tensor.dtype, tensor.shape, whole(tensor.shape)))
            assert found[name].tobytes() == expected.tobytes(), name


def test_a_format_of_some_tensors_under_other_names_gets_these_and_its_documents(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "c", "tp=2")
    export_opened(checkpoint, tmp_path / "hf")
    report = export_opened(checkpoint, tmp_path / "adapter", writer=ATTENTION_ONLY)
    weights = load_file(tmp_path / "hf/model.safetensors")
    found = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert found.keys() == {f"base_model.{name}" for name in weights if ".self_attn." in name}
    assert all(array.tobytes() == weights[name.removeprefix("base_model.")].tobytes() for name, array in found.items())
    assert report.tensors == len(found) < len(weights)
    assert (tmp_path / "adapter/adapter_config.json").read_bytes() == b"{}"
    with pytest.raises(OptionError, match="adapter_model"):
        check_target(tmp_path / "adapter", [], False, ATTENTION_ONLY)
