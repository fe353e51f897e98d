"""Jobs for ranks: a Paddle and a PaddleFormers in which one hook after the other has another name."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from enum import EnumMeta
from types import CodeType, FunctionType
from typing import Any

from paddleformers_fc import upstream
from paddleformers_fc.errors import FlexError
from paddleformers_fc.upstream.hooks import COMMAND_LINES, CPU_RUNTIMES, PADDLEFORMERS, TRAINERS, Hook
from tests.harness import tiny

TABLES = {
    "TRAINER": TRAINERS[PADDLEFORMERS],
    "COMMAND_LINE": COMMAND_LINES[PADDLEFORMERS],
    "CPU_RUNTIME": CPU_RUNTIMES[PADDLEFORMERS],
}


def _owner(module: str, path: str) -> tuple[Any, str]:
    """The class or module that holds the object of a hook itself, and its name there."""
    *above, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for one in above:
        owner = getattr(owner, one)
    if isinstance(owner, type):
        owner = next(one for one in owner.__mro__ if name in vars(one))
    return owner, name


@contextlib.contextmanager
def without(owner: Any, name: str) -> Iterator[None]:
    """A block in which ``owner`` has this attribute under another name."""
    original = vars(owner)[name]
    # An enumeration has its members twice, and lets them be deleted and set only so.
    kind: Any = type if isinstance(owner, EnumMeta) else type(owner)
    member = owner._member_map_.pop(name) if isinstance(owner, EnumMeta) else None
    kind.__delattr__(owner, name)
    kind.__setattr__(owner, f"{name}_renamed", original)
    try:
        yield
    finally:
        kind.__delattr__(owner, f"{name}_renamed")
        kind.__setattr__(owner, name, original)
        if member is not None:
            owner._member_map_[name] = member


@contextlib.contextmanager
def _with_another_signature(owner: Any, name: str) -> Iterator[None]:
    original = vars(owner)[name]

    def other(self: Any, *, renamed: int = 0) -> None:
        raise AssertionError("nothing calls it")

    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def _with_another_name_in(function: FunctionType, name: str) -> Iterator[None]:
    """A block in which the code of a function, and of those within it, has another name in the place of one."""
    original = function.__code__
    function.__code__ = _renamed(original, name)
    try:
        yield
    finally:
        function.__code__ = original


def _renamed(code: CodeType, name: str) -> CodeType:
    def other(one: Any) -> Any:
        if isinstance(one, CodeType):
            return _renamed(one, name)
        return f"{name}_renamed" if one == name else one

    return code.replace(co_names=tuple(map(other, code.co_names)), co_consts=tuple(map(other, code.co_consts)))


@contextlib.contextmanager
def _without_member(owner: Any, name: str) -> Iterator[None]:
    """A block in which a class lacks an attribute, wherever it inherits it from, and the field of that name."""
    holders = [one for one in getattr(owner, "__mro__", [owner]) if one is not object and name in vars(one)]
    fields = getattr(owner, "__dataclass_fields__", {})
    field = fields.pop(name, None)
    try:
        with contextlib.ExitStack() as stack:
            for holder in holders:
                stack.enter_context(without(holder, name))
            yield
    finally:
        if field is not None:
            fields[name] = field


Change = tuple[str, Callable[[], contextlib.AbstractContextManager[None]]]
"""What must be reported, and what makes the change."""


def _changes(hook: Hook) -> Iterator[Change]:
    module, _, path = hook.place.partition(":")
    found: Any = importlib.import_module(module)
    if path:
        owner, name = _owner(module, path)
        found = getattr(owner, name)
        # Where a class inherits another one of that name, the error says how that differs.
        if hook.place != "paddle:Tensor":  # Paddle cannot be asked anything without it.
            yield f"{hook.place} ", lambda: without(owner, name)
        if hook.signature:
            yield f"{hook.place} has the parameters (self, *, renamed=0)", lambda: _with_another_signature(owner, name)
    function = upstream._function(found)
    for names in hook.names:
        # Of alternatives, the installed version has one.
        (one,) = (each for each in names.split("|") if _is_there(found, function, each))
        if function is None:
            yield f"{hook.place} has no {names}", lambda one=one: _without_member(found, one)  # type: ignore[misc]
        else:
            yield f"{hook.place} does not use {names}", lambda one=one: _with_another_name_in(function, one)  # type: ignore[misc]


def _is_there(found: Any, function: FunctionType | None, name: str) -> bool:
    return upstream._has(found, name) if function is None else upstream.uses(function, name)


def _caught(work: Callable[[], Any]) -> str:
    try:
        work()
    except FlexError as error:
        return str(error)
    return ""


EACH = 25
"""One change in so many is also made before every way in; each of these checks the whole table."""


def unnoticed() -> dict[str, dict[str, Any]]:
    """Change one hook after the other; by table the changes that are not reported, and how many were made.

    The row of a hook reports each of its changes. A sample of them, the first and the last included, is reported by the
    whole table and by every way in.
    """
    return {table: _unnoticed(table) for table in TABLES}


def _unnoticed(table: str) -> dict[str, Any]:
    ways: dict[str, Callable[[], Any]] = {"check": lambda: upstream.require(TABLES[table])}
    if table == "TRAINER":
        ways |= {"install": _install, "mixin": _subclass, "facade": _import_from_facade}
    if table != "CPU_RUNTIME":
        ways["register"] = _register
    changes = [(hook, *one) for hook in TABLES[table] for one in _changes(hook)]
    missed = []
    for number, (hook, expected, change) in enumerate(changes):
        whole = number % EACH == 0 or number == len(changes) - 1
        asked = {"row": lambda hook=hook: upstream.require([hook]), **(ways if whole else {})}
        with change():
            texts = {way: _caught(work) for way, work in asked.items()}
        missed += [f"{way}: {expected}" for way, text in texts.items() if expected not in text]
    found = {"left": upstream.differences(TABLES[table]), "replaced": _replaced()}
    return {"made": len(changes), "missed": missed, **found}


def _install() -> None:
    from paddleformers_fc.trainer.entry import install

    install()


def _subclass() -> None:
    from paddleformers.trainer import Trainer

    from paddleformers_fc.trainer.entry import FlexTrainerMixin

    type("Mine", (FlexTrainerMixin, Trainer), {})


def _import_from_facade() -> Any:
    import paddleformers_fc

    return paddleformers_fc.FlexTrainer


def _register() -> None:
    from paddleformers_fc.trainer.register import register

    register()


def _replaced() -> list[str]:
    from paddleformers_fc.trainer import entry

    return sorted(name for _, name in entry._originals)


# ---- Trainers that go around the replaced methods.


def goes_around(
    layout: Mapping[str, Any], output_dir: str, method: str, way: str, resume: str | None = None
) -> dict[str, Any]:
    """Train with a Trainer class that overrides one method and calls PaddleFormers' own in place of ``super()``.

    Where a checkpoint is to be resumed it does nothing instead, because PaddleFormers' own method cannot read it.

    Args:
        way: ``subclass`` of ``FlexTrainer``, or of the stock Trainer, ``installed``.
    """
    from paddleformers.trainer import Trainer

    native = getattr(Trainer, method)  # Before an import of FlexTrainer replaces it.
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments
    from tests.trainer.jobs import flex_trainer

    base = FlexTrainer if way == "subclass" else Trainer

    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if resume else native(self, *args, **kwargs)

    mine = type("Mine", (base,), {method: own})
    arguments = {"max_steps": 4, "save_steps": 2}
    trainer = flex_trainer(layout, output_dir, arguments, cls=mine)
    assert isinstance(trainer.args, FlexTrainingArguments)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except FlexError as error:
        return {"error": type(error).__name__, "text": str(error), "step": trainer.state.global_step}
    return {"error": None, "step": trainer.state.global_step}


def train_with_a_renamed_method(layout: Mapping[str, Any], output_dir: str, name: str) -> dict[str, Any]:
    """Train with the stock Trainer class and our arguments where a method has another name; the error."""
    from paddleformers.trainer import Trainer

    from paddleformers_fc import FlexTrainingArguments

    with without(Trainer, name):
        try:
            args = tiny.training_arguments(
                layout, output_dir, cls=FlexTrainingArguments, flex_checkpoint=True, max_steps=2, save_steps=1
            )
            tiny.trainer(tiny.build("llama", layout, args), args).train()
        except FlexError as error:
            return {"error": type(error).__name__, "evidence": list(error.evidence)}
    return {"error": None, "evidence": []}


def command_line_with_a_renamed_method(yaml: str, name: str) -> None:
    """Train as a worker of the stock command line where a method of the Trainer has another name."""
    from paddleformers.trainer import Trainer

    from tests.trainer.entry_jobs import run_command_line

    with without(Trainer, name):
        run_command_line(yaml)
