"""Names of Paddle and PaddleFormers that are not there, or not as they were, are errors before anything is done."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from paddleformers_fc import nlp, upstream
from paddleformers_fc.errors import EnvironmentMismatch
from paddleformers_fc.trainer.options import CONFLICTS, DEVELOPMENT, FIELD_NAMES, NLP_CONFLICTS, WITHOUT_EFFECT
from paddleformers_fc.upstream.hooks import (
    COMMAND_LINES,
    CPU_RUNTIMES,
    LIBRARIES,
    PADDLEFLEET,
    PADDLEFORMERS,
    TRAINERS,
    Hook,
)
from tests.harness.tiny import DP2, SINGLE
from tests.trainer.test_entry_points import ROOT, losses, write_yaml
from tests.trainer.test_options import DEVELOPMENT_KEYS
from tests.trainer.test_trainer import JOBS as TRAINER_JOBS, settings
from verification.forkserver import ForkServer

JOBS = "tests.trainer.upstream_jobs"
PACKAGE = ROOT / "paddleformers_fc"
ALL = [hook for table in (TRAINERS, COMMAND_LINES, CPU_RUNTIMES) for hooks in table.values() for hook in hooks]


# ---- The table.


def test_every_hook_that_is_renamed_or_changed_is_reported(bare_ranks: ForkServer) -> None:
    (tables,) = bare_ranks.run(f"{JOBS}:unnoticed", 1).values
    rows = {"TRAINER": TRAINERS[PADDLEFORMERS], "COMMAND_LINE": COMMAND_LINES[PADDLEFORMERS]}
    rows |= {"CPU_RUNTIME": CPU_RUNTIMES[PADDLEFORMERS]}
    assert tables.keys() == rows.keys()
    for table, found in tables.items():
        assert found["missed"] == []
        assert found["made"] >= len(rows[table])
        assert (found["left"], found["replaced"]) == ([], [])


def test_one_error_lists_every_difference_and_every_unknown_version(ranks: ForkServer, tmp_path: Path) -> None:
    (evidence,) = ranks.run(f"{JOBS}:two_differences", 1, {"output_dir": str(tmp_path)}).values
    trainer = "paddleformers.trainer.trainer:Trainer"
    assert evidence == [
        "paddle 3.3.2 is installed; the known version is paddle 3.3.1",
        f"{trainer}._load_rng_state is missing",
        f"{trainer}._save_checkpoint is missing",
    ]


def test_an_installation_that_breaks_off_puts_everything_back(ranks: ForkServer) -> None:
    (found,) = ranks.run(f"{JOBS}:install_breaks_off", 1).values
    assert found == {"error": "'broken off'", "changed": []}


def _sources(*packages: str) -> Iterator[tuple[Path, ast.Module]]:
    for package in packages:
        assert (PACKAGE / package / "__init__.py").exists(), package
        for path in sorted((PACKAGE / package).glob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def _words(hook: Hook) -> set[str]:
    return {*re.split("[:.]", hook.place), *_names(hook)}


def _names(hook: Hook) -> set[str]:
    return {one for names in hook.names for one in names.split("|")}


def test_every_name_that_is_imported_from_upstream_is_in_the_table() -> None:
    known = set().union(*map(_words, ALL))
    unknown = {
        f"{path.relative_to(PACKAGE)}: {node.module}.{one.name}"
        for path, tree in _sources("trainer", "execute", "distributed", "layout", "cpu_runtime")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("paddle", *LIBRARIES)
        for one in node.names
        if one.name not in known
    }
    assert {one.rpartition(".")[2] for one in unknown} == {"LRScheduler", "LambdaDecay", "PyLayer"}  # Documented.
    assert "LoRAModel" in _names_of_the_library()
    assert _names_of_the_library() <= known


def _names_of_the_library() -> set[str]:
    """The names that the package imports from the library whose Trainer it finds."""
    tree = ast.parse((PACKAGE / "trainer" / "library.py").read_text(encoding="utf-8"))
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)]
    return {name for table in tables for names in ast.literal_eval(table).values() for name in names}


def test_every_private_name_that_is_read_from_upstream_is_in_the_table() -> None:
    known = set().union(*map(_words, ALL))
    unknown = {
        name: f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path, tree in _sources("trainer", "execute", "distributed", "layout", "cpu_runtime")
        for node, name in _private_names(tree)
        if name not in known and not name.startswith("_flex")
    }
    assert unknown.keys() == OURS | PARTS


OURS = {"_shield", "_exit", "_receive", "_token", "_api_key", "_viewed", "_seconds", "_actions"}
"""Private names that are none of upstream's: of this package and of Python; beside those that begin with _flex."""

PARTS = {"_on_calc_stream", "_acc_str", "_pow_acc_0"}
"""Parts of names that the table has whole, or as upstream begins them."""


def _private_names(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """Private attributes of other objects than ``self``, also those that are named by a text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            name = node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
        else:
            continue
        if re.fullmatch(r"_[a-z][a-z_0-9]*", name):
            yield node, name


def test_every_training_argument_that_is_read_is_in_the_table() -> None:
    known = set().union(*(_names(hook) for hook in ALL if "TrainingArguments" in hook.place or "hparams" in hook.place))
    read = {
        node.attr
        for _, tree in _sources("trainer")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) in ("args", "trainer.args", "session.args", "arguments")
    }
    compared = {one.key for one in (*CONFLICTS, *NLP_CONFLICTS, *WITHOUT_EFFECT) if one not in DEVELOPMENT}
    assert (read | compared) - set(FIELD_NAMES) - known == set()


def test_every_replaced_method_has_its_signature_in_the_table(bare_ranks: ForkServer) -> None:
    (replaced,) = bare_ranks.run("tests.trainer.entry_jobs:replaced_methods", 1).values
    signed = {".".join(hook.place.split(":")[1].split(".")[-2:]) for hook in TRAINERS[PADDLEFORMERS] if hook.signature}
    # Two replacements pass all arguments on.
    assert set(replaced["installed"]) - signed == {"Trainer.__init__", "Trainer._maybe_log_save_evaluate"}


def test_every_row_of_paddlefleet_was_compared_with_its_public_source() -> None:
    # Each place with its parameters and the names in it, as the file of that commit has them; or the file that uses it.
    source = json.loads((Path(__file__).parent / "paddlefleet.json").read_text(encoding="utf-8"))
    rows = {row for table in (TRAINERS, COMMAND_LINES, CPU_RUNTIMES) for row in table[PADDLEFLEET]}
    compared = set()
    for row in (one for one in rows if one.package == PADDLEFLEET):
        place = row.place.removeprefix(f"{PADDLEFLEET}.")
        compared.add(place)
        if place in source["used_in"]:
            assert source["used_in"][place] in source["commits"]
            continue
        assert place.partition(":")[0].replace(".", "/") + ".py" in source["commits"], place
        parameters, *names = source["defined"][place]
        assert row.signature in ("", parameters), place
        assert all(set(one.split("|")) & set(names) for one in row.names), place
    assert compared == source["defined"].keys() | source["used_in"].keys()


# ---- Versions.


@pytest.mark.parametrize("name", ["paddle", "paddleformers"])
def test_an_unknown_version_is_refused_before_a_process_group_exists(
    ranks: ForkServer, tmp_path: Path, name: str
) -> None:
    given = {"versions": {name: "3.3.9"}, "output_dir": str(tmp_path)}
    for found in ranks.run(f"{JOBS}:made_under", 2, {**given, "arguments": {"flex_checkpoint": True}}).values:
        assert (found["error"], found["initialized"]) == ("EnvironmentMismatch", False)
        assert f"{name} 3.3.9 is installed; the known version is {name} {upstream.VERSIONS[name]}" in found["text"]
        assert "flex_unknown_versions: warn" in found["text"]


def test_a_version_is_also_that_of_the_metadata(ranks: ForkServer, tmp_path: Path) -> None:
    given = {"versions": {"paddleformers": "1.2.1"}, "output_dir": str(tmp_path), "metadata": True}
    (found, _) = ranks.run(f"{JOBS}:made_under", 2, {**given, "arguments": {"flex_checkpoint": True}}).values
    assert "paddleformers 1.2.1 is installed" in found["text"]


@pytest.mark.parametrize(
    "arguments", [{"flex_checkpoint": False}, {"flex_checkpoint": True, "flex_unknown_versions": "warn"}]
)
def test_an_unknown_version_is_tried_where_that_is_requested_or_has_no_effect(
    ranks: ForkServer, tmp_path: Path, arguments: dict[str, object]
) -> None:
    given = {"versions": {"paddle": "3.3.2", "paddleformers": "1.2.1"}, "output_dir": str(tmp_path)}
    result = ranks.run(f"{JOBS}:made_under", 2, {**given, "arguments": arguments})
    assert [found["error"] for found in result.values] == [None, None]
    warned = "paddle 3.3.2 is installed" in result.logs[0].read_text()
    assert warned == bool(arguments["flex_checkpoint"])


@pytest.mark.parametrize("version", ["3.3.1.post126", "3.3.1+cu126"])
def test_a_build_of_the_known_version_for_a_device_is_the_known_version(
    ranks: ForkServer, tmp_path: Path, version: str
) -> None:
    given = {"versions": {"paddle": version}, "output_dir": str(tmp_path), "arguments": {"flex_checkpoint": True}}
    assert [found["error"] for found in ranks.run(f"{JOBS}:made_under", 2, given).values] == [None, None]


@pytest.mark.parametrize(("key", "value"), DEVELOPMENT_KEYS.items())
def test_a_key_of_the_development_branch_is_refused_in_python_before_it_is_known(
    ranks: ForkServer, tmp_path: Path, key: str, value: object
) -> None:
    arguments = {"flex_checkpoint": True, "use_flex_async_save": True, key: value}
    given = {"versions": {}, "output_dir": str(tmp_path), "arguments": arguments}
    for found in ranks.run(f"{JOBS}:made_under", 2, given).values:
        assert (found["error"], found["initialized"]) == ("OptionError", False)
        assert f"flex_checkpoint: true and {key}: " in found["text"]


# ---- Loops that go around.

STOPS_AT = {"train": 0, "_inner_training_loop": 0, "_save_checkpoint": 2}
"""After which step a run must stop whose Trainer class calls PaddleFormers' own method in the place of ours."""


@pytest.mark.parametrize(
    ("method", "way"),
    [("train", "subclass"), ("_inner_training_loop", "installed"), ("_save_checkpoint", "subclass")],
)
def test_a_loop_that_goes_around_this_package_stops(ranks: ForkServer, tmp_path: Path, method: str, way: str) -> None:
    given = {"layout": SINGLE.to_json(), "output_dir": str(tmp_path), "method": method, "way": way}
    (found,) = ranks.run(f"{JOBS}:goes_around", 1, given).values
    assert (found["error"], found["step"]) == ("EnvironmentMismatch", STOPS_AT[method])
    line = f"{method} of paddleformers_fc did not run; the Trainer's own is {JOBS}.Mine.{method}"
    assert line in found["text"]


def test_a_resume_that_goes_around_this_package_stops_every_rank_before_a_step(
    ranks: ForkServer, tmp_path: Path
) -> None:
    ranks.run(f"{TRAINER_JOBS}:run", 2, settings(DP2, tmp_path, max_steps=2, save_steps=2))
    given = {"layout": DP2.to_json(), "output_dir": str(tmp_path), "resume": str(tmp_path / "checkpoint-2")}
    given |= {"method": "_load_flex_checkpoint", "way": "subclass"}
    for found in ranks.run(f"{JOBS}:goes_around", 2, given).values:
        assert (found["error"], found["step"]) == ("EnvironmentMismatch", 0)
        assert "_load_flex_checkpoint of paddleformers_fc did not run" in found["text"]


def test_a_trainer_that_was_made_without_the_option_does_not_save(ranks: ForkServer, tmp_path: Path) -> None:
    (error,) = ranks.run(f"{JOBS}:made_without_the_option", 1, {"output_dir": str(tmp_path)}).values
    assert "this Trainer was constructed without it" in error
    assert not list(tmp_path.glob("checkpoint-*"))


def test_functions_of_a_trainer_refuse_the_stock_one_and_its_own_methods_stay(
    ranks: ForkServer, tmp_path: Path
) -> None:
    (errors,) = ranks.run(f"{JOBS}:functions_of_a_stock_trainer", 1, {"output_dir": str(tmp_path)}).values
    for error in errors.values():
        assert error.startswith("This Trainer does not use paddleformers_fc: flex_checkpoint is not true."), errors
        assert "where: paddleformers.trainer.trainer.Trainer" in error
        assert "paddleformers_fc.FlexTrainer" in error
    assert [one.name for one in tmp_path.iterdir() if one.is_dir()] == ["native"]


def test_arguments_with_an_option_of_that_name_alone_are_refused(ranks: ForkServer, tmp_path: Path) -> None:
    (error,) = ranks.run(f"{JOBS}:arguments_of_another_class", 1, {"output_dir": str(tmp_path)}).values
    assert "lack the other options of paddleformers_fc" in error


def test_arguments_that_ask_for_flex_checkpoints_are_enough_for_the_stock_trainer(
    ranks: ForkServer, tmp_path: Path
) -> None:
    (names,) = ranks.run(f"{JOBS}:stock_trainer_with_flex_arguments", 1, {"output_dir": str(tmp_path)}).values
    assert "flex_checkpoint.json" in names


# ---- Trainer classes.


def test_the_mixin_takes_trainers_of_paddleformers_and_nothing_else(ranks: ForkServer) -> None:
    (errors,) = ranks.run(f"{JOBS}:refused_bases", 1).values
    accepted = {name for name, error in errors.items() if not error}
    assert accepted == {"a Trainer", "a subclass", "FlexTrainer"}
    for name in ("PaddleNLP", "a subclass of PaddleNLP's"):
        assert "that of PaddleNLP has paddleformers_fc.nlp" in errors[name]
    for name in ("nothing", "an empty class", "a class of that name"):
        assert "Mine is not a Trainer of PaddleFormers" in errors[name]
    assert "names FlexTrainerMixin after the Trainer of PaddleFormers" in errors["behind"]


def test_the_names_for_paddlenlp_are_refused_beside_paddleformers() -> None:
    for name in nlp.__all__:
        with pytest.raises(EnvironmentMismatch, match="for environments without PaddleFormers"):
            getattr(nlp, name)


# ---- A PaddleFormers that differs, below the command line.


@pytest.fixture(scope="module")
def corpus(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, its tokenizer and a real text."""
    directory = tmp_path_factory.mktemp("corpus")
    ranks.run("tests.trainer.entry_jobs:write_corpus", 1, {"directory": str(directory), "text": str(ROOT / "LICENSE")})
    return directory


def test_a_worker_stops_on_a_renamed_method_and_trains_without_flex_checkpoint(
    ranks: ForkServer, corpus: Path, tmp_path: Path
) -> None:
    def train(path: Path) -> tuple[bool, str]:
        given = {"yaml": str(path), "name": "_save_checkpoint"}
        result = ranks.attempt(f"{JOBS}:command_line_with_a_renamed_method", 1, given)
        return result.ok, result.logs[0].read_text()

    ok, log = train(write_yaml(corpus, tmp_path / "out"))
    assert not ok
    assert "paddleformers.trainer.trainer:Trainer._save_checkpoint is missing" in log
    assert not losses(log)
    ok, log = train(write_yaml(corpus, tmp_path / "stock", flex_checkpoint=False, max_steps=2, save_steps=9))
    assert ok, log[-3000:]
    assert "flex_checkpoint: true is refused in this environment" in log
    assert len(losses(log)) == 2


@pytest.fixture(scope="module")
def another_formers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of PaddleFormers, to be named in PYTHONPATH."""
    directory = tmp_path_factory.mktemp("formers")
    spec = find_spec("paddleformers")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, directory / "paddleformers")
    return directory


@pytest.fixture
def renamed(another_formers: Path) -> Iterator[str]:
    """The directory of the copy, in whose Trainer a private name is another one."""
    path = another_formers / "paddleformers" / "trainer" / "trainer.py"
    original = path.read_text(encoding="utf-8")
    try:
        yield str(another_formers)
    finally:
        path.write_text(original, encoding="utf-8")


def rename(formers: str, name: str) -> None:
    path = Path(formers) / "paddleformers" / "trainer" / "trainer.py"
    text = path.read_text(encoding="utf-8")
    assert name in text
    path.write_text(re.sub(rf"\b{name}\b", f"{name}_renamed", text), encoding="utf-8")


def start(formers: str, arguments: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Run this Python on the copy of PaddleFormers."""
    environment = {**os.environ, "PYTHONPATH": f"{formers}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_stock_command_line_stops_on_a_renamed_method_and_trains_without_flex_checkpoint(
    renamed: str, corpus: Path, tmp_path: Path
) -> None:
    rename(renamed, "_save_checkpoint")
    command = ["-m", "paddleformers.cli.launcher", "train"]
    done = start(renamed, [*command, str(write_yaml(corpus, tmp_path / "out"))], tmp_path)
    assert done.returncode != 0
    assert "paddleformers.trainer.trainer:Trainer._save_checkpoint is missing" in done.stdout + done.stderr
    assert not list(tmp_path.glob("out/checkpoint-*"))
    stock = write_yaml(corpus, tmp_path / "stock", flex_checkpoint=False, max_steps=2)
    done = start(renamed, [*command, str(stock)], tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "flex_checkpoint: true is refused in this environment" in done.stdout + done.stderr
    assert list((tmp_path / "stock" / "checkpoint-2").glob("model_state/*.metadata"))


@pytest.mark.slow
def test_our_command_stops_on_a_renamed_attribute_of_the_pipeline(renamed: str, corpus: Path, tmp_path: Path) -> None:
    rename(renamed, "_pp_data_buffer")
    path = write_yaml(corpus, tmp_path / "out")
    command = [str(Path(sys.executable).with_name("paddleformers-fc")), "train", str(path), "--nproc", "2"]
    done = start(renamed, command, tmp_path)
    assert done.returncode != 0
    assert "Trainer.training_pipeline_step does not use _pp_data_buffer" in done.stdout + done.stderr
    assert not list(tmp_path.glob("out/checkpoint-*"))
