"""An optimizer is one row of a table: with it alone its states are planned, and its class and option pass.

The row is added to a copy of the package, in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import paddleformers_fc

PACKAGE = Path(paddleformers_fc.__file__).parent
ROW = """OPTIMIZERS = (
    OptimizerDescriptor(
        "Momentum",
        (StateDescriptor(OPTIMIZER_STATE, ".velocity_of_test_0", dtype="float32"), MASTER),
        option="momentum",
        flags=("use_nesterov",),
    ),
"""
JOB = """
import paddle
from paddleformers_fc.errors import OptionError
from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.layout.roles import OPTIMIZERS, split_state_name
from paddleformers_fc.plan import plan_reads, resume_source
from paddleformers_fc.plan.forecast import forecast
from paddleformers_fc.plan.simulate import declared_model
from paddleformers_fc.trainer.optimizers import refuse_unsupported
from paddleformers_fc.trainer.options import FlexFields, check_options
from tests.plan.stored import checkpoint_of

config = {**family_for({"model_type": "llama"}).tiny, "model_type": "llama"}
momentum, _ = OPTIMIZERS

def laid_out(grid):
    return declared_model(family_for(config), ModelDescription(config), parse_grid(grid), "bfloat16")

wanted = laid_out("tp=2,pp=2")
checkpoint = checkpoint_of(laid_out("sharding=2,split=true"), momentum)
source, report = resume_source(checkpoint, wanted.rules)
found = forecast(source, wanted, report)
for rank in found.ranks:
    roles = wanted.roles(rank.rank, momentum)
    plan = plan_reads(source, roles)
    assert plan.report.empty and rank.items == len(plan.items)
    states = [split_state_name("optimizer_state", name) for name in roles["optimizer_state"]]
    assert {(one.suffix, one.scalar) for one in states} == {(".velocity_of_test_0", False)}
    assert len(states) == len(roles["master_weight"]) == len(roles["model_state"])
assert not found.dropped and not found.fresh

FlexFields.optim = "momentum"
check_options(FlexFields(flex_checkpoint=True))
parameters = [paddle.create_parameter([2], "float32")]
refuse_unsupported(paddle.optimizer.Momentum(parameters=parameters))
nesterov = paddle.optimizer.Momentum(parameters=parameters, use_nesterov=True)
for other in (paddle.optimizer.SGD(parameters=parameters), nesterov):
    try:
        refuse_unsupported(other)
    except OptionError as error:
        print(error.what)
"""


def test_an_optimizer_is_one_row(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "paddleformers_fc", ignore=shutil.ignore_patterns("__pycache__"))
    table = tmp_path / "paddleformers_fc" / "layout" / "roles.py"
    table.write_text(table.read_text(encoding="utf-8").replace("OPTIMIZERS = (\n", ROW, 1), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", JOB]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    only = "only paddle.optimizer.Momentum without use_nesterov or paddle.optimizer.AdamW without amsgrad."
    assert done.stdout.splitlines() == [
        f"flex_checkpoint: true does not support the optimizer {kind}, {only}"
        for kind in ("SGD", "Momentum(use_nesterov=True)")
    ]
