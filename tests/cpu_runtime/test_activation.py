"""When the CPU runtime becomes active, when it refuses, and what it does to the environment."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

import paddle
import pytest

from paddleformers_fc import cpu_runtime
from paddleformers_fc.errors import EnvironmentMismatch
from tests.harness import tiny
from tests.harness.on_ranks import on_ranks
from tests.harness.processes import python


class Lines(logging.Handler):
    """The lines that the package logs from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("paddleformers_fc").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_importing_the_runtime_imports_no_paddle() -> None:
    modules = ("", ".launch", ".ranks", ".rankmain")
    imports = "; ".join(f"import paddleformers_fc.cpu_runtime{module}" for module in modules)
    heavy = "[name for name in ('paddle', 'paddleformers', 'numpy') if name in sys.modules]"
    assert python("-c", f"{imports}; import sys; print({heavy})").stdout == "[]\n"


@on_ranks(1, server="bare_ranks")
def test_a_second_activation_changes_nothing_and_logs_nothing() -> None:
    log, before = Lines(), paddle.Tensor.cuda
    names = cpu_runtime.activate()
    between = paddle.Tensor.cuda
    assert len(set(names)) == len(names) > 10
    assert cpu_runtime.activate() == names
    assert before is not between is paddle.Tensor.cuda
    (line,) = log.lines
    assert "\n" not in line
    assert all(name in line for name in names)


@on_ranks(1, server="bare_ranks")
def test_a_renamed_hook_is_refused_before_anything_is_patched() -> None:
    from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import dygraph_sharding_optimizer

    del dygraph_sharding_optimizer.DygraphShardingOptimizerV2.clear_grad
    log, before = Lines(), paddle.Tensor.cuda
    with pytest.raises(EnvironmentMismatch, match=r"DygraphShardingOptimizerV2\.clear_grad is missing"):
        cpu_runtime.activate()
    assert paddle.Tensor.cuda is before
    assert log.lines == []


@on_ranks(1, server="bare_ranks")
def test_an_unknown_version_whose_hooks_are_the_known_ones_is_a_warning() -> None:
    paddle.__version__ = "3.9.0"
    log, before = Lines(), paddle.Tensor.cuda
    cpu_runtime.activate()
    assert paddle.Tensor.cuda is not before
    assert "paddle 3.9.0 is installed; the tested version is paddle 3.3.1" in log.lines[0]


@on_ranks(1, server="bare_ranks")
def test_on_an_accelerator_nothing_is_patched() -> None:
    paddle.device.get_device = lambda: "gpu:0"  # The process seems to compute on a GPU.
    log, before = Lines(), paddle.Tensor.cuda
    assert cpu_runtime.activate() == ()
    assert paddle.Tensor.cuda is before
    assert log.lines == []


def names() -> set[str]:
    """The names in the C library's table; ``os.environ`` does not have those that libraries add."""
    table = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found: set[str] = set()
    while (entry := table[len(found)]) is not None:
        found.add(entry.decode().partition("=")[0])
    return found


def added(args: Any, cls: type[Any]) -> list[str]:
    """The names that a Trainer adds after it has begun to make batches."""
    from paddleformers.trainer import TrainerCallback

    seen: set[str] = set()

    class AtEpoch(TrainerCallback):  # type: ignore[misc]  # PaddleFormers has no types.
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            seen.update(names())

    tiny.trainer(tiny.build("llama", tiny.SINGLE, args), args, cls=cls, callbacks=[AtEpoch()]).train()
    return sorted(names() - seen)


@on_ranks(1)
def test_no_name_is_added_to_the_environment_once_batches_are_made(tmp_path: Path) -> None:
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, "max_steps": 2}
    assert added(tiny.training_arguments(tiny.SINGLE, str(tmp_path), **settings), FlexTrainer) == []


@on_ranks(1, server="bare_ranks")
def test_paddle_and_paddleformers_still_add_names_once_batches_are_made(tmp_path: Path) -> None:
    from paddleformers.trainer import Trainer

    found = added(tiny.training_arguments(tiny.SINGLE, str(tmp_path), max_steps=2), Trainer)
    assert [name.rstrip("0123456789") for name in found] == ["TRAINER_GLOBAL_STEP", "__KMP_REGISTERED_LIB_"]
