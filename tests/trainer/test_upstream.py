"""Names of Paddle and PaddleFormers that are not there, or not as they were, are errors before anything is done."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from paddleformers_fc import nlp, upstream
from paddleformers_fc.errors import EnvironmentMismatch, FlexError, OptionError
from paddleformers_fc.trainer import library
from paddleformers_fc.trainer.conflicts import CONFLICTS, DEVELOPMENT, NLP_CONFLICTS, WITHOUT_EFFECT
from paddleformers_fc.trainer.options import FIELD_NAMES
from paddleformers_fc.upstream.hooks import (
    COMMAND_LINES,
    CPU_RUNTIMES,
    LIBRARIES,
    PADDLEFLEET,
    PADDLEFORMERS,
    TRAINERS,
    Hook,
)
from tests.harness import tiny
from tests.harness.on_ranks import on_ranks
from tests.harness.patching import without
from tests.harness.tiny import DP2, SINGLE, MatrixLayout
from tests.trainer.jobs import flex_trainer, logged, trained
from tests.trainer.test_entry_points import REPLACED, ROOT, methods
from tests.trainer.test_options import DEVELOPMENT_KEYS

PACKAGE = ROOT / "paddleformers_fc"
ALL = [hook for table in (TRAINERS, COMMAND_LINES, CPU_RUNTIMES) for hooks in table.values() for hook in hooks]


# ---- The table.


def changed(hook: Hook) -> Iterator[tuple[Hook, str]]:
    """The hook as it would be if upstream had another name or other parameters, and what is reported of the installed.

    A row that asks for what is not there finds the same difference as one for which something is gone.
    """
    place = f"{hook.place}{'_renamed' if ':' in hook.place else ':renamed'}"
    yield hook._replace(place=place), f"{place} is missing"
    if hook.signature:
        yield hook._replace(signature="(self, renamed)"), f"{hook.place} has the parameters {hook.signature}"
    for name in hook.names:
        other = "|".join(f"{one}_renamed" for one in name.split("|"))
        yield hook._replace(names=tuple(other if one == name else one for one in hook.names)), other


@on_ranks(1, server="bare_ranks")
def test_every_row_fits_the_installed_versions_and_reports_each_change() -> None:
    tables = [table[PADDLEFORMERS] for table in (TRAINERS, COMMAND_LINES, CPU_RUNTIMES)]
    assert [upstream.differences(table) for table in tables] == [[], [], []]
    for hook, line in (one for table in tables for row in table for one in changed(row)):
        assert any(line in found for found in upstream.differences([hook])), (hook, line)


@on_ranks(1, server="bare_ranks")
def test_every_way_in_lists_all_differences_and_versions_in_one_error_before_anything_is_replaced(
    tmp_path: Path,
) -> None:
    import paddle
    from paddleformers.cli.train.dpo import workflow
    from paddleformers.trainer import Trainer
    from paddleformers.trainer.trainer_callback import InterleaveGateUpCallback

    import paddleformers_fc
    from paddleformers_fc.trainer import entry, register

    def make_arguments() -> None:
        flags = {"flex_checkpoint": True, "flex_unknown_versions": "warn"}
        tiny.training_arguments(SINGLE, str(tmp_path), cls=entry.FlexTrainingArguments, **flags)

    places = {
        "Trainer._load_rng_state": Trainer,
        "InterleaveGateUpCallback.interleave_gate_up_proj": InterleaveGateUpCallback,
        "run_dpo": workflow,
    }
    ways: dict[Callable[[], object], int] = {
        entry.install: 2,
        make_arguments: 2,
        lambda: type("Mine", (entry.FlexTrainerMixin, Trainer), {}): 2,
        lambda: paddleformers_fc.FlexTrainer: 2,
        register.register: 3,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(paddle, "__version__", "3.3.2"))
        for place, owner in places.items():
            stack.enter_context(without(owner, place.rpartition(".")[2]))
        for enter, count in ways.items():
            with pytest.raises(EnvironmentMismatch) as caught:
                enter()
            version, *found = caught.value.evidence
            assert version == "paddle 3.3.2 is installed; the tested version is paddle 3.3.1"
            assert [line.rpartition(":")[2] for line in found] == [f"{place} is missing" for place in [*places][:count]]
            assert not entry._originals


@on_ranks(1)
def test_an_installation_that_breaks_off_puts_everything_back() -> None:
    from paddleformers_fc.trainer import entry

    rows = entry._replaced_in_parser

    def broken_off() -> Any:
        yield from rows()
        raise KeyError("broken off")

    before = methods()
    entry._replaced_in_parser = broken_off
    with pytest.raises(KeyError, match="broken off"):
        entry.install()
    assert methods() == before


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
    assert "LoRAModel" in library._HOME
    assert library._HOME.keys() <= known


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


def test_every_replaced_method_has_its_signature_in_the_table() -> None:
    signed = {".".join(hook.place.split(":")[1].split(".")[-2:]) for hook in TRAINERS[PADDLEFORMERS] if hook.signature}
    # Two replacements pass all arguments on.
    assert {*REPLACED} - signed == {"Trainer.__init__", "Trainer._maybe_log_save_evaluate"}


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


@on_ranks(layout=DP2)
def test_an_unknown_version_is_refused_before_a_process_group_exists_unless_it_is_allowed(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    import importlib.metadata

    import paddle
    import paddleformers

    from paddleformers_fc import FlexTrainingArguments

    true_version = importlib.metadata.version

    def of_module(module: Any, version: str) -> Any:
        return mock.patch.object(module, "__version__", version)

    def make(*patches: Any, **arguments: Any) -> list[str]:
        """Make arguments under other versions, of the modules or in the metadata of a distribution; what is logged."""
        with contextlib.ExitStack() as stack, logged() as lines:
            for patch in patches:
                stack.enter_context(patch)
            given = {"cls": FlexTrainingArguments, "flex_checkpoint": True, **arguments}
            tiny.training_arguments(layout, str(tmp_path), **given)
        return lines

    of_distribution = {"paddleformers": "1.2.1"}
    metadata = mock.patch.object(
        importlib.metadata, "version", lambda name: of_distribution.get(name) or true_version(name)
    )
    for name, version, patch in (
        ("paddle", "3.3.9", of_module(paddle, "3.3.9")),
        ("paddleformers", "3.3.9", of_module(paddleformers, "3.3.9")),
        ("paddleformers", "1.2.1", metadata),
    ):
        with pytest.raises(EnvironmentMismatch) as caught:
            make(patch)
        known = f"{name} {version} is installed; the tested version is {name} {upstream.VERSIONS[name]}"
        assert known in str(caught.value)
        assert "flex_unknown_versions: warn" in str(caught.value)
    for key, value in DEVELOPMENT_KEYS.items():
        with pytest.raises(OptionError, match=f"flex_checkpoint: true and {key}: "):
            make(use_flex_async_save=True, **{key: value})
    assert not paddle.distributed.is_initialized()
    unknown = of_module(paddle, "3.3.2"), of_module(paddleformers, "1.2.1")
    assert not any("is installed" in line for line in make(*unknown, flex_checkpoint=False))
    for version in ("3.3.1.post126", "3.3.1+cu126"):  # Builds of the tested version for a device.
        make(of_module(paddle, version))
    warned = any("paddle 3.3.2 is installed" in line for line in make(*unknown, flex_unknown_versions="warn"))
    assert warned or paddle.distributed.get_rank() > 0


# ---- Loops that go around.


def goes_around(
    layout: MatrixLayout, output_dir: Path, method: str, way: str, resume: str | None = None
) -> dict[str, Any]:
    """Train with a Trainer class that overrides one method and calls PaddleFormers' own in place of ``super()``.

    Where a checkpoint is to be resumed it does nothing instead, because PaddleFormers' own method cannot read it.

    Args:
        way: ``subclass`` of ``FlexTrainer``, or of the stock Trainer, ``installed``.
    """
    from paddleformers.trainer import Trainer

    native = getattr(Trainer, method)  # Before an import of FlexTrainer replaces it.
    from paddleformers_fc import FlexTrainer

    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if resume else native(self, *args, **kwargs)

    mine = type("Mine", (FlexTrainer if way == "subclass" else Trainer,), {method: own})
    trainer = flex_trainer(layout, output_dir, {"max_steps": 4, "save_steps": 2}, cls=mine)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except FlexError as error:
        return {"error": type(error).__name__, "text": str(error), "step": trainer.state.global_step}
    return {"error": None, "step": trainer.state.global_step}


# A save that bypasses this package: tests/corruption/test_several_ranks.py.
@pytest.mark.parametrize(
    ("method", "way", "is_resumed"),
    [
        ("train", "subclass", False),
        ("_inner_training_loop", "installed", False),
        ("_load_flex_checkpoint", "subclass", True),
    ],
)
@on_ranks(layout=SINGLE)
def test_a_loop_or_a_resume_that_bypasses_this_package_stops_before_a_step(
    layout: MatrixLayout, tmp_path: Path, method: str, way: str, is_resumed: bool
) -> None:
    if is_resumed:
        trained(layout, tmp_path, {"max_steps": 2, "save_steps": 2})
    found = goes_around(layout, tmp_path, method, way, str(tmp_path / "checkpoint-2") if is_resumed else None)
    assert (found["error"], found["step"]) == ("EnvironmentMismatch", 0)
    own = f"{goes_around.__module__}.Mine.{method}"
    assert f"{method} of paddleformers_fc did not run; the Trainer's own is {own}" in found["text"]


@on_ranks(layout=SINGLE)
def test_trainers_that_do_not_use_the_package_are_refused(layout: MatrixLayout, tmp_path: Path) -> None:
    from paddleformers.trainer import Trainer, TrainingArguments

    import paddleformers_fc
    from paddleformers_fc.trainer.entry import detach

    args = tiny.training_arguments(layout, str(tmp_path), cls=TrainingArguments)
    stock = tiny.trainer(tiny.build("llama", layout, args), args, cls=Trainer)
    stock.model.save_pretrained(str(tmp_path / "native"))
    for use in (
        lambda: paddleformers_fc.save_ema(stock, str(tmp_path / "averaged")),
        lambda: paddleformers_fc.averaged_weights(stock).__enter__(),
    ):
        with pytest.raises(FlexError, match=r"where: paddleformers\.trainer\.trainer\.Trainer") as caught:
            use()
        text = str(caught.value)
        assert text.startswith("This Trainer does not use paddleformers_fc: flex_checkpoint is not true."), text
        assert "paddleformers_fc.FlexTrainer" in text
    assert [one.name for one in tmp_path.iterdir() if one.is_dir()] == ["native"]
    args.flex_checkpoint = True  # Not an option of these arguments.
    model = tiny.build("llama", layout, args)
    with pytest.raises(FlexError, match="lack the other options of paddleformers_fc"):
        tiny.trainer(model, args, cls=paddleformers_fc.FlexTrainer)
    late = flex_trainer(layout, tmp_path, {"flex_checkpoint": False})
    late.args.flex_checkpoint = True
    with pytest.raises(FlexError, match="this Trainer was constructed without it"):
        late._save_checkpoint(late.model)
    assert not list(tmp_path.glob("checkpoint-*"))
    flags = {"cls": paddleformers_fc.FlexTrainingArguments, "flex_checkpoint": True}
    args = tiny.training_arguments(layout, str(tmp_path), **flags)
    detach()
    with pytest.raises(EnvironmentMismatch, match="this Trainer ignores it"):
        tiny.trainer(model, args, cls=Trainer, callbacks=[paddleformers_fc.FlexCheckpointCallback()])


# ---- Trainer classes.


@on_ranks(1)
def test_the_mixin_takes_trainers_of_paddleformers_and_nothing_else() -> None:
    from types import ModuleType

    from paddleformers.trainer import Trainer

    from paddleformers_fc import FlexTrainer, FlexTrainerMixin

    module = ModuleType("paddlenlp.trainer.trainer")
    sys.modules[module.__name__] = module
    paddlenlp = type("Trainer", (), {"__module__": module.__name__})
    none, of_paddlenlp = "Mine is not a Trainer of PaddleFormers", "For PaddleNLP's Trainer use paddleformers_fc.nlp"
    for bases, text in (
        ((FlexTrainerMixin,), none),
        ((FlexTrainerMixin, type("Empty", (), {})), none),
        ((FlexTrainerMixin, type("Trainer", (), {"train": lambda self: None})), none),
        ((FlexTrainerMixin, paddlenlp), of_paddlenlp),
        ((FlexTrainerMixin, type("Theirs", (paddlenlp,), {})), of_paddlenlp),
        ((Trainer, FlexTrainerMixin), "names FlexTrainerMixin after the Trainer of PaddleFormers"),
    ):
        with pytest.raises(FlexError, match=text):
            type("Mine", bases, {})
    for accepted in ((FlexTrainerMixin, Trainer), (FlexTrainerMixin, type("Theirs", (Trainer,), {})), (FlexTrainer,)):
        type("Mine", accepted, {})


def test_the_paddlenlp_entry_points_are_rejected_if_paddleformers_is_installed() -> None:
    for name in nlp.__all__:
        with pytest.raises(EnvironmentMismatch, match="for environments without PaddleFormers"):
            getattr(nlp, name)
