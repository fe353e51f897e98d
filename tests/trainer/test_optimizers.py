"""The Trainer with each optimizer of docs/optimizers.md: resumed under the same layout and under others.

The table of the page is made of what these tests measure. ``make optimizers`` writes it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from pathlib import Path

import paddle
import pytest

import paddleformers_fc
from paddleformers_fc.errors import OptionError
from paddleformers_fc.layout.roles import OPTIMIZERS, StateShape, split_state_name
from tests.harness.tiny import SD2V1, SD2V2, SINGLE, TP2, MatrixLayout
from tests.trainer.optimizer_jobs import CHOICES
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

JOBS = "tests.trainer.optimizer_jobs"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"
WRITE = "FLEX_WRITE_OPTIMIZERS"
HEADER = "| optimizer | states | resumed under the same layout | and under other layouts |\n|---|---|---|---|\n"
LAYOUTS = {"sharding 2": SD2V1, "sharding 2 with `split_param`": SD2V2, "tensor parallel 2": TP2}
SOME = ["amsgrad", "custom-low", "mini", "lamb"]
"""Between them: a state that others lack, 16-bit moments, a number per shard, a registered optimizer."""
SCRIPT_ONLY = "mini-script"
"""PaddleFormers refuses ``optim: adamw_mini`` with tensor parallelism; a script can train it."""


def digests(checkpoint: Path) -> list[object]:
    return list(canonical_digests(checkpoint))


def train_and_resume(ranks: ForkServer, keys: Sequence[str], layout: MatrixLayout, output_dir: Path) -> dict[str, bool]:
    """Whether losses and the last checkpoint of a resumed run are those of the uninterrupted one, bit for bit."""
    given = {"keys": list(keys), "layout": layout.to_json(), "output_dir": str(output_dir)}
    losses = ranks.run(f"{JOBS}:train_and_resume", layout.nproc, given).values[0]
    found = {}
    for key in keys:
        last = [digests(output_dir / key / run / "checkpoint-4") for run in ("whole", "again")]
        found[key] = losses[key]["whole"][2:] == losses[key]["again"] and last[0] == last[1]
        (output_dir / key / "checkpoint-2").symlink_to(output_dir / key / "whole" / "checkpoint-2")
    return found


def save_again(
    ranks: ForkServer, keys: Sequence[str], layout: MatrixLayout, source: Path, target: Path
) -> dict[str, str]:
    """What became of each checkpoint under a layout: an error, or empty if its digests are equal."""
    given = {"keys": list(keys), "layout": layout.to_json(), "source": str(source), "target": str(target)}
    refused = ranks.run(f"{JOBS}:save_again", layout.nproc, given).values[0]
    found = {}
    for key in keys:
        same = key not in refused and digests(source / key / "checkpoint-2") == digests(target / key / "checkpoint-2")
        found[key] = refused.get(key, "" if same else "other digests")
    return found


def test_a_run_resumes_exactly_and_under_ranges_with_the_states_that_its_optimizer_has(
    ranks: ForkServer, tmp_path: Path
) -> None:
    assert train_and_resume(ranks, SOME, SINGLE, tmp_path / "single") == dict.fromkeys(SOME, True)
    found = save_again(ranks, SOME, SD2V2, tmp_path / "single", tmp_path / "ranges")
    assert {key for key, error in found.items() if error} == {"mini"}
    assert "split_param: true with AdamWMini: its moment2 is one number per local tensor" in found["mini"]


def test_one_number_per_shard_is_exact_while_tensors_are_cut_alike_and_else_refused(
    ranks: ForkServer, tmp_path: Path
) -> None:
    assert train_and_resume(ranks, [SCRIPT_ONLY], TP2, tmp_path / "cut") == {SCRIPT_ONLY: True}
    checkpoint = paddleformers_fc.open(tmp_path / "cut" / SCRIPT_ONLY / "checkpoint-2")
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors() if "moment2" in tensor.name}
    assert shapes["model.layers.0.mlp.down_proj.weight.moment2_of_shard_0"] == (2, 1)
    assert shapes["model.norm.weight.moment2_of_shard_0"] == (1,)
    whole = save_again(ranks, [SCRIPT_ONLY], SINGLE, tmp_path / "cut", tmp_path / "whole")[SCRIPT_ONLY]
    assert "moment2_of_shard_0: stored [2, 1], wanted [1, 1]" in whole
    assert "exact only while tensors are cut in the same way" in whole


@pytest.mark.parametrize("kind", ["Own", "NAdam"])
def test_an_undeclared_optimizer_is_refused_with_what_to_declare(ranks: ForkServer, tmp_path: Path, kind: str) -> None:
    (text,) = ranks.run(f"{JOBS}:train_undeclared", 1, {"kind": kind, "output_dir": str(tmp_path)}).values
    assert f"does not support the optimizer {kind}, which is not declared" in text
    accumulators = "beta2_pow, moment1, moment2, momentum_decay_pow, mu_product"
    assert accumulators in text or kind == "Own"
    assert f"register_optimizer({kind}, like_parameter=[...], numbers=[...])" in text


def test_a_declaration_is_validated() -> None:
    with pytest.raises(OptionError) as refused:
        paddleformers_fc.register_optimizer(
            paddle.optimizer.NAdam, ["moment1", "beta1_pow_acc", "a b", "w"], ["moment1"]
        )
    assert list(refused.value.evidence) == [
        "a b: invalid name of an accumulator",
        "moment1: declared twice",
        "w: names master weights in this package",
        "beta1_pow_acc: declared 'as the parameter', and in this package 'one number'",
        "moment1: declared 'one number', and in this package 'as the parameter'",
    ]


def test_muon_is_refused_because_paddle_does_not_have_it() -> None:
    (muon,) = (one for one in OPTIMIZERS if one.unavailable)
    assert (muon.option, muon.unavailable) == ("muon", "Paddle 3.3.1 has no Muon")
    # When this fails: compare the declared states with the class, train it in this file, and remove `unavailable`.
    assert not hasattr(paddle.optimizer, "Muon")


def test_offloaded_parameters_and_adamw_mini_under_tensor_parallelism_are_refused_by_paddleformers() -> None:
    from paddleformers.trainer import TrainingArguments

    # When this fails: PaddleFormers trains them; support them, and correct docs/optimizers.md.
    source = inspect.getsource(TrainingArguments.__post_init__)
    assert source.count('warnings.warn("`offload` is not supported NOW!")') == 2
    assert "AdamW Mini currently doesn't support tensor parallelism." in source


def test_a_state_without_the_declared_shape_is_refused_by_name(ranks: ForkServer, tmp_path: Path) -> None:
    messages = {
        "Adagrad": "declared shape: moment",
        "Adam": "and in this package 'one number'",
        "ASGD": "declared shape: y",
    }
    for layout in (SINGLE, SD2V2):
        job = {"output_dir": str(tmp_path / layout.name), "layout": layout.to_json()}
        found = ranks.run(f"{JOBS}:train_misdeclared", layout.nproc, job).values[0]
        assert {kind: text in found[kind] for kind, text in messages.items()} == dict.fromkeys(messages, True), found


def test_another_optimizer_is_reported_where_its_states_have_the_same_names_and_else_refused(
    ranks: ForkServer, tmp_path: Path
) -> None:
    given = {"layout": SINGLE.to_json(), "keys": ["adamw", "sgd"], "output_dir": str(tmp_path)}
    ranks.run(f"{JOBS}:train_and_resume", 1, given)

    def resume(saved: str, key: str, **arguments: object) -> tuple[str, str]:
        directory = tmp_path / saved / "whole/checkpoint-2"
        job = {"key": key, "layout": SINGLE.to_json(), "output_dir": str(tmp_path / "out"), "resume": str(directory)}
        result = ranks.run(f"{JOBS}:resume_with", 1, {**job, **arguments})
        return result.values[0], result.logs[0].read_text()

    error, log = resume("adamw", "lamb")
    assert (
        error,
        " ".join(log.split()).count("optimizer paddle.optimizer.adamw.AdamW paddle.optimizer.lamb.Lamb"),
    ) == ("", 1)
    error, log = resume("sgd", "adamw")
    assert (error, "paddle.optimizer.sgd.SGD" in log, "without optimizer states in" in log) == ("", True, True)
    error, _ = resume("adamw", "momentum")
    assert "Resume with the optimizer and the trained parameters of the run that saved it." in error
    assert "ignore_load_lr_and_optim: true" in error
    assert resume("adamw", "momentum", ignore_load_lr_and_optim=True)[0] == ""
    _, log = resume("adamw", "adamw")
    assert "paddle.optimizer.adamw.AdamW" not in log


def test_a_learning_rate_scheduler_of_the_optimizer_alone_is_resumed(ranks: ForkServer, tmp_path: Path) -> None:
    whole = {"output_dir": str(tmp_path / "whole")}
    (rates,) = ranks.run(f"{JOBS}:train_with_own_scheduler", 1, whole).values
    # The scheduler is saved at the end of a step, after the callback.
    again = {"output_dir": str(tmp_path / "again"), "resume": str(tmp_path / "whole/checkpoint-2")}
    (resumed,) = ranks.run(f"{JOBS}:train_with_own_scheduler", 1, again).values
    assert rates == [0.01, 0.005, 0.0025, 0.00125]
    assert resumed == rates[2:]
    assert list(canonical_digests(tmp_path / "again/checkpoint-4")) == list(
        canonical_digests(tmp_path / "whole/checkpoint-4")
    )


def test_a_moving_average_is_refused_with_an_optimizer_without_states(ranks: ForkServer, tmp_path: Path) -> None:
    job = {"layout": SINGLE.to_json(), "output_dir": str(tmp_path), "resume": None, "flex_ema_decay": 0.9}
    found = {key: ranks.run(f"{JOBS}:resume_with", 1, {**job, "key": key}).values[0] for key in ("sgd", "momentum")}
    assert "flex_ema_decay does not support the optimizer SGD" in found["sgd"]
    assert found["momentum"] == ""


# ---- The table of the page.


def states_of(checkpoint: Path) -> str:
    """The states that a checkpoint contains, as text."""
    kinds: dict[str, dict[tuple[str, StateShape], None]] = {}
    for tensor in paddleformers_fc.open(checkpoint).tensors():
        if tensor.role != "model_state":
            state = split_state_name(tensor.role, tensor.name, tensor.shape)
            kinds.setdefault(state.suffix, {})[tensor.dtype, state.shape] = None
    return "; ".join(
        f"`{suffix}` {' and '.join(dtype for dtype, _ in found)}"
        + ("" if {shape for _, shape in found} == {StateShape.PARAMETER} else f", {next(iter(found))[1].value}")
        for suffix, found in sorted(kinds.items())
    )


def result(error: str) -> str:
    if "stored [" in error:
        return "refused, because tensors are cut in another way"
    return "refused, because parameters are divided into ranges" if "split_param: true with" in error else error


@pytest.mark.slow
def test_the_table_of_optimizers_is_what_is_measured(ranks: ForkServer, tmp_path: Path) -> None:
    keys = [key for key in CHOICES if key != SCRIPT_ONLY]
    exact = train_and_resume(ranks, keys, SINGLE, tmp_path / "single")
    under: dict[str, dict[str, str]] = {}
    for name, layout in LAYOUTS.items():
        tried = [*(key for key in keys if key != "mini" or layout is not TP2)]
        under[name] = save_again(ranks, tried, layout, tmp_path / "single", tmp_path / layout.name)
    if not (tmp_path / "single" / SCRIPT_ONLY).exists():
        (tmp_path / "single" / SCRIPT_ONLY).symlink_to(tmp_path / "single" / "mini")
    under["tensor parallel 2"]["mini"] = save_again(
        ranks, [SCRIPT_ONLY], TP2, tmp_path / "single", tmp_path / "script"
    )[SCRIPT_ONLY]
    rows = ""
    for key in keys:
        outcomes: dict[str, list[str]] = {}
        for name, found in under.items():
            outcomes.setdefault(result(found[key]) or "equal digests", []).append(name)
        text = "; ".join(f"{', '.join(names)}: {outcome}" for outcome, names in outcomes.items())
        states = states_of(tmp_path / "single" / key / "checkpoint-2")
        rows += (
            f"| {CHOICES[key].optimizer} | {states or 'none'} | {'bitwise' if exact[key] else 'DIFFERS'} | {text} |\n"
        )
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(HEADER)
    after = rest[rest.index("\n\n") :]
    measured = before + HEADER + rows.rstrip("\n") + after
    if os.environ.get(WRITE):
        PAGE.write_text(measured, encoding="utf-8")
    assert page == measured or os.environ.get(WRITE)


def test_the_page_declares_optimizers_as_they_are_tested() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for choice in CHOICES.values():
        assert "".join(choice.declared.split()) in "".join(page.split())
        assert f"| {choice.optimizer} |" in page or choice.optimizer == CHOICES[SCRIPT_ONLY].optimizer
