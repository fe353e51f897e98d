"""The Trainer with each optimizer of docs/optimizers.md: resumed under the same layout and under others.

The table of the page is made of what these tests measure. ``make optimizers`` writes it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import paddle
import pytest

import paddleformers_fc
from paddleformers_fc.errors import FlexError, OptionError
from paddleformers_fc.layout.roles import OPTIMIZERS, StateShape, split_state_name
from tests.harness import tiny
from tests.harness.on_ranks import on_ranks, run_on_ranks
from tests.harness.tiny import SD2V1, SD2V2, SINGLE, TP2, MatrixLayout
from tests.trainer.jobs import flex_trainer, logged
from tests.trainer.optimizer_jobs import CHOICES, WHOLE, trainer_of
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
    assert "moment2_of_shard_0: stored [2, 1], expected [1, 1]" in whole
    assert "exact only if tensors are sharded in the same way" in whole


class Chosen:
    """Makes Trainers with an optimizer of a class."""

    def __init__(self, kind: Any, **options: Any) -> None:
        self.kind, self.options = kind, options

    def __call__(self, layout: MatrixLayout, output_dir: Path) -> Any:
        from paddleformers_fc import FlexTrainer

        chosen = self

        class Trainer(FlexTrainer):
            def create_optimizer(self, lr_scheduler: Any = None) -> Any:
                self.optimizer = chosen.of(self.model)

        return flex_trainer(layout.to_json(), str(output_dir), {"max_steps": 2, "save_steps": 2}, cls=Trainer)

    def of(self, model: Any) -> Any:
        """The optimizer of a model."""
        return self.kind(parameters=model.parameters(), learning_rate=0.01, **self.options)


@on_ranks(layout=SINGLE)
def test_an_undeclared_optimizer_is_refused_with_what_to_declare(layout: MatrixLayout, tmp_path: Path) -> None:
    from paddleformers.trainer import TrainerCallback

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    class Fail(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            raise AssertionError("a step has begun")

    class Own(paddle.optimizer.AdamW):
        """A subclass with one state more."""

        def _add_moments_pows(self, p: Any) -> None:
            super()._add_moments_pows(p)
            self._add_accumulator("third", p)

    def train(kind: Any) -> None:
        trainer = Chosen(kind)(layout, tmp_path)
        trainer.add_callback(Fail())
        trainer.train()

    def give_to_a_trainer(kind: Any) -> None:
        args = tiny.training_arguments(layout, str(tmp_path), cls=FlexTrainingArguments, flex_checkpoint=True)
        model = tiny.build("llama", layout, args)
        tiny.trainer(model, args, cls=FlexTrainer, optimizers=(Chosen(kind).of(model), None))

    optimizers = paddle.optimizer
    for use, kind, states in (
        (train, Own, ""),
        (train, optimizers.NAdam, NADAM),
        (give_to_a_trainer, optimizers.Adam, ""),
    ):
        with pytest.raises(OptionError) as refused:
            use(kind)
        text = refused.value.render()
        assert f"does not support the optimizer {kind.__name__}, which is not declared" in text
        assert states in text
        assert f"register_optimizer({kind.__name__}, like_parameter=[...], numbers=[...])" in text
    give_to_a_trainer(optimizers.AdamW)


NADAM = "beta2_pow, moment1, moment2, momentum_decay_pow, mu_product"
"""The accumulators of an optimizer."""


def test_a_declaration_is_validated() -> None:
    with pytest.raises(OptionError) as refused:
        paddleformers_fc.register_optimizer(
            paddle.optimizer.NAdam, ["moment1", "beta1_pow_acc", "a b", "w"], ["moment1"]
        )
    assert list(refused.value.evidence) == [
        "a b: invalid name of an accumulator",
        "moment1: declared twice",
        "w: reserved for master weights",
        "beta1_pow_acc: declared 'as the parameter', but this package uses 'one number'",
        "moment1: declared 'one number', but this package uses 'as the parameter'",
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


def train_misdeclared(layout: MatrixLayout, output_dir: Path) -> None:
    declared: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
        "Adagrad": ({"numbers": ["moment"]}, {}, "declared shape: moment"),
        "ASGD": ({"like_parameter": ["d", "y"], "numbers": ["m"]}, {"batch_num": 1}, "declared shape: y"),
    }
    for kind, (given, options, text) in declared.items():
        chosen = getattr(paddle.optimizer, kind)
        paddleformers_fc.register_optimizer(chosen, **given)
        trainer = Chosen(chosen, **options)(layout, output_dir / kind)
        with pytest.raises(FlexError) as refused:
            trainer.train()
        assert text in refused.value.render()


@pytest.mark.parametrize("layout", [SD2V2, SINGLE], ids=lambda layout: layout.name)
def test_a_state_without_the_declared_shape_is_refused_by_name(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    run_on_ranks(ranks, layout.nproc, train_misdeclared, layout=layout, output_dir=tmp_path)


@on_ranks(layout=SINGLE)
def test_another_optimizer_is_reported_where_its_states_have_the_same_names_and_else_refused(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    for key in ("adamw", "sgd"):
        trainer_of(key, layout.to_json(), str(tmp_path / key), max_steps=2, save_steps=2).train()

    def resume(saved: str, key: str, **arguments: Any) -> str:
        trainer = trainer_of(key, layout.to_json(), str(tmp_path / "out"), max_steps=3, **arguments)
        with logged() as lines:
            trainer.train(resume_from_checkpoint=str(tmp_path / saved / "checkpoint-2"))
        return " ".join("\n".join(lines).split())

    assert resume("adamw", "lamb").count("optimizer paddle.optimizer.adamw.AdamW paddle.optimizer.lamb.Lamb") == 1
    log = resume("sgd", "adamw")
    assert "paddle.optimizer.sgd.SGD" in log
    assert "no optimizer states in" in log
    with pytest.raises(FlexError) as refused:
        resume("adamw", "momentum")
    text = refused.value.render()
    assert "Resume with the optimizer and the trained parameters of the run that saved it." in text
    assert "ignore_load_lr_and_optim: true" in text
    resume("adamw", "momentum", ignore_load_lr_and_optim=True, flex_ema_decay=0.9)
    assert "paddle.optimizer.adamw.AdamW" not in resume("adamw", "adamw")
    with pytest.raises(OptionError, match="flex_ema_decay does not support the optimizer SGD"):
        resume("sgd", "sgd", flex_ema_decay=0.9)


@on_ranks(layout=SINGLE)
def test_a_learning_rate_scheduler_of_the_optimizer_alone_is_resumed(layout: MatrixLayout, tmp_path: Path) -> None:
    from paddleformers.trainer import TrainerCallback

    def train(name: str, resume: str | None = None) -> list[float]:
        trainer = flex_trainer(layout.to_json(), str(tmp_path / name), WHOLE)
        scheduler = paddle.optimizer.lr.StepDecay(learning_rate=0.01, step_size=1, gamma=0.5)
        trainer.optimizer = paddle.optimizer.AdamW(parameters=trainer.model.parameters(), learning_rate=scheduler)
        rates: list[float] = []

        class Halve(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                rates.append(trainer.optimizer.get_lr())
                scheduler.step()

        trainer.add_callback(Halve())
        trainer.train(resume_from_checkpoint=resume)
        return rates

    rates = train("whole")
    # The scheduler is saved at the end of a step, after the callback.
    assert train("again", str(tmp_path / "whole/checkpoint-2")) == rates[2:]
    assert rates == [0.01, 0.005, 0.0025, 0.00125]
    assert digests(tmp_path / "again/checkpoint-4") == digests(tmp_path / "whole/checkpoint-4")


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
