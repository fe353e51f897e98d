"""The public Python API: its surface, what importing it costs, and a checkpoint through every method."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddleformers_fc
from paddleformers_fc.errors import FlexError, NotACheckpoint, OptionError
from paddleformers_fc.formats.registry import FORMATS
from tests.cli.support import save
from tests.execute.simulated import CONFIG, canonical
from tests.harness.work import calls

SURFACE = Path(__file__).with_name("surface.txt")
"""A line for every public name."""


def surface() -> list[str]:
    """A line for every public name, with the signatures of functions and of the methods of ``Checkpoint``."""
    lines: list[str] = []
    for name in paddleformers_fc.__all__:
        found = getattr(paddleformers_fc, name)
        lines.append(name + (str(inspect.signature(found)) if inspect.isfunction(found) else ""))
    for name, member in vars(paddleformers_fc.Checkpoint).items():
        if not name.startswith("_"):
            lines.append(f"Checkpoint.{name}" + (str(inspect.signature(member)) if inspect.isfunction(member) else ""))
    return sorted(lines)


def test_the_surface_is_the_documented_one() -> None:
    assert surface() == SURFACE.read_text().splitlines()


def test_every_public_member_of_the_api_has_an_example() -> None:
    members = [one for name, one in vars(paddleformers_fc.Checkpoint).items() if not name.startswith("_")]
    for one in [
        paddleformers_fc.open,
        paddleformers_fc.save,
        paddleformers_fc.load,
        paddleformers_fc.Checkpoint,
        *members,
    ]:
        assert ">>> " in (one.__doc__ or ""), one


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights saved by one rank, and by four (tensor parallel 2, optimizer sharded over 2)."""
    root = tmp_path_factory.mktemp("saved")
    save(root / "one", canonical())
    save(root / "four", canonical(), tp=2, sharded=2)
    return root


def test_tensors_are_read_bitwise_under_every_layout_and_format(saved: Path, tmp_path: Path) -> None:
    paddleformers_fc.open(saved / "four").export(tmp_path / "hf")
    for directory in (saved / "one", saved / "four", tmp_path / "hf"):
        checkpoint = paddleformers_fc.open(directory)
        listed = {one.name: one for one in checkpoint.tensors() if one.role == "model_state"}
        assert listed.keys() == canonical().keys()
        for name, values in canonical().items():
            assert (listed[name].shape, listed[name].dtype) == (values.shape, str(values.dtype))
            assert checkpoint.read(name).tobytes() == values.tobytes()


def test_a_box_equals_the_slice_of_the_tensor(saved: Path) -> None:
    checkpoint = paddleformers_fc.open(saved / "four")
    for one in checkpoint.tensors():
        box = tuple(slice(length // 3, max(length - 1, length // 3)) for length in one.shape)
        whole = checkpoint.read(one.name, role=one.role)
        np.testing.assert_array_equal(checkpoint.read(one.name, box, one.role), whole[box])
    whole = checkpoint.read(EMBEDDING)
    for one in (slice(-3, None), slice(None, -2), slice(5, 10**9), slice(3, 1), slice(np.int64(1), 2, 1)):
        np.testing.assert_array_equal(checkpoint.read(EMBEDDING, (one, slice(None))), whole[one])
    with pytest.raises(OptionError, match="Unknown tensor 'nothing'"):
        checkpoint.read("nothing")
    with pytest.raises(OptionError, match=r"- did you mean model.norm.weight\?"):
        checkpoint.read("model.norm.weigth", role="model_state")
    with pytest.raises(OptionError, match=r"- did you mean model_state\?"):
        checkpoint.read("model.norm.weight", role="model_sate")
    with pytest.raises(OptionError, match="has 2 slices instead of 1"):
        checkpoint.read("model.norm.weight", (slice(0, 1), slice(0, 1)))


def test_a_later_read_does_the_same_work_for_any_number_of_tensors(tmp_path: Path) -> None:
    few, many = (
        save(tmp_path / str(layers), canonical(layers), config={**CONFIG, "num_hidden_layers": layers})
        for layers in (1, 12)
    )
    found = {}
    for directory in (few, many):
        checkpoint = paddleformers_fc.open(directory)
        checkpoint.read("model.norm.weight")
        found[len(checkpoint.tensors())] = calls(lambda one=checkpoint: one.read("model.norm.weight"))
    assert max(found) > 6 * min(found)
    assert len(set(found.values())) == 1


@pytest.mark.parametrize("roles", [["weights"], ["optimizer_state"], "model_state"])
def test_roles_that_cannot_be_opened_are_refused_and_not_called_damage(saved: Path, roles: list[str] | str) -> None:
    with pytest.raises(OptionError, match="Invalid roles to open") as refused:
        paddleformers_fc.open(saved / "four", roles=roles)
    assert "model_state, master_weight" in refused.value.render()
    assert {one.role for one in paddleformers_fc.open(saved / "four", roles=["model_state"]).tensors()} == {
        "model_state"
    }


EMBEDDING = "model.embed_tokens.weight"
INVALID: dict[str, Callable[[Any, Path], object]] = {
    "path_or_url=5": lambda _, there: paddleformers_fc.open(5),
    "path 'a\\x00b'": lambda _, __: paddleformers_fc.open("a\0b"),
    "path '\\udfff'": lambda _, __: paddleformers_fc.open("\udfff"),
    "path '/tmp/a\\x00b'": lambda _, __: paddleformers_fc.open("file:///tmp/a%00b"),
    "path 's3://a\\x00b'": lambda one, _: one.export("s3://a\0b"),
    "roles to open: []": lambda _, there: paddleformers_fc.open(there, roles=[]),
    "opened='path'": lambda _, __: paddleformers_fc.Checkpoint("path"),
    "config={'model_type': 'llama'}": lambda _, there: paddleformers_fc.open(there, config={"model_type": "llama"}),
    "level 'ful'": lambda _, there: paddleformers_fc.open(there, verify="ful"),
    "roles to open: [['model_state']]": lambda _, there: paddleformers_fc.open(there, roles=[["model_state"]]),
    "name=5": lambda one, _: one.read(5),
    "is 3, which is not a sequence": lambda one, _: one.read(EMBEDDING, 3),
    "is slice(0, 2, None), which is not a sequence": lambda one, _: one.read(EMBEDDING, slice(0, 2)),
    "slice(0, 4, 2), which has a step": lambda one, _: one.read(EMBEDDING, (slice(0, 4, 2), slice(None))),
    "slice(0, 2.0, None), whose bounds": lambda one, _: one.read(EMBEDDING, (slice(0, 2.0), slice(None))),
    "Ellipsis, which is not a slice": lambda one, _: one.read(EMBEDDING, (slice(0, 2), ...)),
    "role='weights'": lambda one, _: one.read(EMBEDDING, role="weights"),
    "level 5": lambda one, _: one.verify(5),
    "other='path'": lambda one, _: one.diff("path"),
    "role 'weights'": lambda one, _: one.diff(one, "weights"),
    "atol=-0.1": lambda one, _: one.diff(one, atol=-0.1),
    "rtol=True": lambda one, _: one.diff(one, rtol=True),
    "rtol=nan": lambda one, _: one.diff(one, rtol=float("nan")),
    "atol=1000000": lambda one, _: one.diff(one, atol=10**400),
    "layout=5": lambda one, _: one.plan(5),
    "Invalid grid 'tp2'": lambda one, _: one.plan("tp2"),
    "dtype 3": lambda one, _: one.plan("tp=2", 3),
    "aoa_config is not a mapping": lambda one, _: one.plan("tp=2", aoa_config=["a -> b"]),
    "layout=None": lambda one, _: one.plan_flows(None),
    "name=None": lambda one, _: one.explain(None),
    "directory=5": lambda one, _: one.export(5),
    "path 'b\\x00'": lambda one, _: one.export("b\0"),
    "path 'c\\x00'": lambda one, there: one.export(there, base="c\0"),
    "path 'd\\x00'": lambda one, _: one.convert("d\0"),
    "path 'e\\x00'": lambda one, there: one.convert(there, config="e\0"),
    "max_shard_bytes='5GB'": lambda one, there: one.export(there, max_shard_bytes="5GB"),
    "max_shard_bytes=0": lambda one, there: one.export(there, max_shard_bytes=0),
    "replace='no'": lambda one, there: one.export(there, replace="no"),
    "tied='middle'": lambda one, there: one.export(there, tied="middle"),
    "level 'quick'": lambda one, there: one.export(there, verify="quick"),
    "of an export: 'zip'": lambda one, there: one.export(there, format="zip"),
    "format=['peft']": lambda one, there: one.export(there, format=["peft"]),
    "base=5": lambda one, there: one.export(there, base=5),
    "accept_base=1": lambda one, there: one.export(there, accept_base=1),
    "role ['weights']": lambda one, there: one.export(there, role=["weights"]),
    "dtype 'int4'": lambda one, there: one.export(there, dtype="int4"),
    "dtype=['float32']": lambda one, there: one.export(there, dtype=["float32"]),
    "directory=None": lambda one, _: one.convert(None),
    "of a conversion: 'zip'": lambda one, there: one.convert(there, format="zip"),
    "format={}": lambda one, there: one.convert(there, format={}),
    "config={}": lambda one, there: one.convert(there, config={}),
    "replace=1": lambda one, there: one.convert(there, replace=1),
    "tied=None": lambda one, there: one.convert(there, tied=None),
    "level None": lambda one, there: one.convert(there, verify=None),
    "optimizer='Lion'": lambda _, there: paddleformers_fc.register_optimizer("Lion"),
    "like_parameter='beta'": lambda _, there: paddleformers_fc.register_optimizer(int, "beta"),
    "numbers=5": lambda _, there: paddleformers_fc.register_optimizer(int, numbers=5),
}


@pytest.mark.parametrize("named", INVALID)
def test_an_invalid_argument_is_an_error_with_its_name_and_a_next_step(saved: Path, tmp_path: Path, named: str) -> None:
    with pytest.raises(FlexError) as raised:
        INVALID[named](paddleformers_fc.open(saved / "four"), tmp_path / "target")
    assert named in raised.value.what
    assert raised.value.next_step
    assert not list(tmp_path.iterdir())


def test_a_directory_without_a_checkpoint_is_refused_with_every_known_format(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match="is not a checkpoint of a known format") as raised:
        paddleformers_fc.open(tmp_path)
    assert all(one.title in raised.value.evidence[-1] for one in FORMATS)
    with pytest.raises(NotACheckpoint, match="missing does not exist"):
        paddleformers_fc.open(tmp_path / "missing")
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(NotACheckpoint, match=r"- did you mean checkpoint-3\?"):
        paddleformers_fc.open(tmp_path / "checkpoint-33")


def test_an_export_onto_a_model_names_the_argument_that_replaces_it(saved: Path, tmp_path: Path) -> None:
    checkpoint = paddleformers_fc.open(saved / "four")
    checkpoint.export(tmp_path / "exported")
    with pytest.raises(OptionError) as raised:
        checkpoint.export(tmp_path / "exported")
    assert "replace=True" in raised.value.next_step


def test_an_export_or_a_conversion_onto_a_file_says_that_it_is_one(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("kept")
    checkpoint = paddleformers_fc.open(saved / "four")
    for write in (checkpoint.export, checkpoint.convert):
        with pytest.raises(OptionError, match="is a file"):
            write(tmp_path / "note")
    assert (tmp_path / "note").read_text() == "kept"


def test_a_checkpoint_describes_itself_in_a_line_and_in_a_table(tmp_path: Path) -> None:
    checkpoint = paddleformers_fc.open(save(tmp_path / "out/<b>", canonical()))
    facts = checkpoint.metadata
    assert repr(checkpoint).startswith(f"<Checkpoint {facts.path} format=flex_checkpoint step={facts.job.step}: ")
    assert "\n" not in repr(checkpoint)
    table = checkpoint._repr_html_()
    assert "<b>" not in table
    for role, one in facts.roles.items():
        assert f"<tr><td>{role}</td><td>{one.tensors:,}</td><td>{one.elements:,}</td>" in table


def test_the_package_lists_its_names() -> None:
    assert set(paddleformers_fc.__all__) <= set(dir(paddleformers_fc))


TYPES = {
    'open("x")': "paddleformers_fc.api.Checkpoint",
    "Checkpoint": "def (opened: paddleformers_fc.formats.checkpoint.OpenedCheckpoint)",
    "save": "def (directory: str | os.PathLike[str]",
    "load": "def (directory: str | os.PathLike[str]",
    "stream": "def (model: Any, *, names: typing.Sequence[str] | None",
    "FlexTrainingArguments": "def (*generated_args: Any, flex_checkpoint: bool",
}


@pytest.mark.slow
def test_a_type_checker_resolves_the_public_names(tmp_path: Path) -> None:
    code = "".join(f"reveal_type(paddleformers_fc.{expression})\n" for expression in TYPES)
    (tmp_path / "code.py").write_text(f"import paddleformers_fc\n{code}")
    (tmp_path / "mypy.ini").write_text("[mypy]\nfollow_imports = silent\nignore_missing_imports = true\n")
    given = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-incremental", "code.py"]
    paths = {**os.environ, "MYPYPATH": str(Path(paddleformers_fc.__file__).parents[1])}
    found = subprocess.run(given, cwd=tmp_path, env=paths, capture_output=True, text=True).stdout.splitlines()
    for expected, line in zip(TYPES.values(), found[:-1], strict=True):
        assert f'Revealed type is "{expected}' in line
