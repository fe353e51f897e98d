"""The public Python API: its surface, what importing it costs, and a checkpoint through every method."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import paddleformers_fc
from paddleformers_fc.errors import Corrupt, FlexError, NotACheckpoint, OptionError
from tests.cli.support import save
from tests.execute.simulated import canonical

SURFACE = """\
Checkpoint
Checkpoint.convert(self, directory: 'Location', *, format: 'str' = 'flex', \
config: 'Location | None' = None, max_shard_bytes: 'int' = 5000000000, verify: 'str' = 'full', \
replace: 'bool' = False, tied: 'str' = 'refuse') -> 'ExportReport'
Checkpoint.diff(self, other: 'Checkpoint', role: 'str | None' = None) -> 'Difference'
Checkpoint.explain(self, name: 'str') -> 'Explanation'
Checkpoint.export(self, directory: 'Location', *, max_shard_bytes: 'int' = 5000000000, \
verify: 'str' = 'full', replace: 'bool' = False, tied: 'str' = 'refuse', \
format: 'str' = '', base: 'Location | None' = None, accept_base: 'bool' = False, \
role: 'str' = 'model_state', dtype: 'str' = '') -> 'ExportReport'
Checkpoint.metadata
Checkpoint.plan(self, layout: 'str', dtype: 'str | None' = None, \
aoa_config: 'Mapping[str, object] | None' = None) -> 'GridPlan'
Checkpoint.plan_flows(self, layout: 'str', dtype: 'str | None' = None, \
aoa_config: 'Mapping[str, object] | None' = None) -> 'PlanFlows'
Checkpoint.read(self, name: 'str', box: 'Sequence[slice] | None' = None, role: 'str | None' = None) \
-> 'np.ndarray[Any, Any]'
Checkpoint.tensors(self) -> 'list[TensorInfo]'
Checkpoint.verify(self, level: 'str' = 'full') -> 'Verification'
FlexCheckpointCallback
FlexTrainer
FlexTrainerMixin
FlexTrainingArguments
averaged_weights(trainer: 'Any') -> 'Iterator[None]'
install() -> 'None'
load(directory: 'str | PathLike[str] | RemotePath | Mapping[str, Any]', model: 'Any', optimizer: 'Any' = None, *, \
verify: 'str' = 'full', threads: 'int' = 4, family: 'str | Family | None' = None, config: 'Config | None' = None, \
mapping: 'RuleSet | None' = None, aoa_config: 'Mapping[str, object] | None' = None, \
allow_casts: 'bool' = False) -> 'LoadReport'
load_open_weights(model: 'Any', directory: 'str | PathLike[str] | RemotePath', threads: 'int' = 4, \
verify: 'str' = 'full') -> 'LoadReport'
open(path_or_url: 'Location', verify: 'str' = 'size', roles: 'Collection[str] | None' = None, *, \
config: 'Location | None' = None) -> 'Checkpoint'
register_optimizer(optimizer: 'type', like_parameter: 'Iterable[str]' = (), numbers: 'Iterable[str]' = ()) -> 'None'
save(directory: 'str | PathLike[str] | Mapping[str, Any]', model: 'Any', optimizer: 'Any' = None, *, step: 'int' = 0, \
consumed_samples: 'int' = 0, parallel: 'Mapping[str, int] | None' = None, family: 'str | Family | None' = None, \
config: 'Config | None' = None, mapping: 'RuleSet | None' = None) -> 'SaveReport'
save_ema(trainer: 'Any', directory: 'str', max_shard_size: 'str | int | None' = None) -> 'None'
"""


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
    assert surface() == SURFACE.splitlines()


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


def test_importing_the_package_imports_neither_numpy_nor_paddle_and_opening_imports_no_paddle(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", canonical())
    code = (
        "import sys, paddleformers_fc\n"
        "assert not {'numpy', 'paddle', 'msgspec'} & sys.modules.keys()\n"
        "paddleformers_fc.open(sys.argv[1]).tensors()\n"
        "assert not {'paddle', 'paddleformers', 'torch', 'rich', 'typer'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "checkpoint-3")], check=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights saved by one rank, and by four (tensor parallel 2, optimizer sharded over 2)."""
    root = tmp_path_factory.mktemp("saved")
    save(root / "one", canonical())
    save(root / "four", canonical(), tp=2, sharded=2)
    return root


def test_the_example_of_the_readme_runs(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved / "four", tmp_path / "out/checkpoint-3")
    checkpoint = paddleformers_fc.open("out/checkpoint-3")  # or "s3://bucket/run/checkpoint-3"
    assert checkpoint.metadata.job is not None
    assert checkpoint.metadata.job.step == 3
    first = checkpoint.tensors()[0]
    rows = checkpoint.read(first.name, (slice(0, 2), *(slice(None) for _ in first.shape[1:])))
    assert rows.shape == (2, *first.shape[1:])
    assert checkpoint.verify(level="full").passed
    assert checkpoint.export("hf").tensors == len(canonical())
    assert checkpoint.diff(paddleformers_fc.open("hf")).equal
    assert paddleformers_fc.open("hf").metadata.format == "huggingface"


def test_tensors_are_read_bitwise_under_every_layout_and_format(saved: Path, tmp_path: Path) -> None:
    paddleformers_fc.open(saved / "four").export(tmp_path / "hf")
    for directory in (saved / "one", saved / "four", tmp_path / "hf"):
        checkpoint = paddleformers_fc.open(directory)
        listed = {one.name: one for one in checkpoint.tensors() if one.role == "model_state"}
        assert listed.keys() == canonical().keys()
        for name, values in canonical().items():
            assert (listed[name].shape, listed[name].dtype) == (values.shape, str(values.dtype))
            assert checkpoint.read(name).tobytes() == values.tobytes()


def test_a_box_is_the_same_numbers_as_the_slice_of_the_whole_tensor(saved: Path) -> None:
    checkpoint = paddleformers_fc.open(saved / "four")
    for one in checkpoint.tensors():
        box = tuple(slice(length // 3, max(length - 1, length // 3)) for length in one.shape)
        whole = checkpoint.read(one.name, role=one.role)
        np.testing.assert_array_equal(checkpoint.read(one.name, box, one.role), whole[box])
    with pytest.raises(OptionError, match="slices"):
        checkpoint.read("model.norm.weight", (slice(0, 1), slice(0, 1)))
    with pytest.raises(OptionError, match="Unknown tensor 'nothing'"):
        checkpoint.read("nothing")


def test_an_index_in_a_box_is_refused_with_the_slice_to_give(saved: Path) -> None:
    with pytest.raises(OptionError, match=r"contains 0, which is not a slice") as raised:
        paddleformers_fc.open(saved / "four").read("model.norm.weight", (0,))  # type: ignore[arg-type]
    assert "slice(0, 1)" in raised.value.next_step


@pytest.mark.parametrize("roles", [["weights"], ["optimizer_state"], "model_state"])
def test_roles_that_cannot_be_opened_are_refused_and_not_called_damage(saved: Path, roles: list[str] | str) -> None:
    with pytest.raises(OptionError, match="Invalid roles to open") as refused:
        paddleformers_fc.open(saved / "four", roles=roles)
    assert "model_state, master_weight" in refused.value.render()
    assert {one.role for one in paddleformers_fc.open(saved / "four", roles=["model_state"]).tensors()} == {
        "model_state"
    }


def test_a_path_that_does_not_exist_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match="missing does not exist"):
        paddleformers_fc.open(tmp_path / "missing")


def test_an_export_onto_a_model_names_the_argument_that_replaces_it(saved: Path, tmp_path: Path) -> None:
    checkpoint = paddleformers_fc.open(saved / "four")
    checkpoint.export(tmp_path / "exported")
    with pytest.raises(OptionError) as raised:
        checkpoint.export(tmp_path / "exported")
    assert "replace=True" in raised.value.next_step


def test_a_plan_of_too_many_ranks_is_refused_at_once(saved: Path) -> None:
    with pytest.raises(OptionError, match="has 100000000 ranks"):
        paddleformers_fc.open(saved / "four").plan("dp=100000000")


def test_a_damaged_checkpoint_is_refused_with_its_fault(saved: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(saved / "one", tmp_path / "checkpoint-3"))
    path = next((damaged / "model_state").iterdir())
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(Corrupt, match=r"damaged|checksum"):
        paddleformers_fc.open(damaged).verify()
    with pytest.raises(Corrupt):
        paddleformers_fc.open(damaged).export(tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    with pytest.raises(NotACheckpoint):
        paddleformers_fc.open(tmp_path)


def test_a_layout_that_the_model_cannot_have_is_refused(saved: Path) -> None:
    with pytest.raises(FlexError):
        paddleformers_fc.open(saved / "one").plan("tp=3")
