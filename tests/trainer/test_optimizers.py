"""The Trainer with each optimizer of docs/optimizers.md: resumed under the same layout and under others.

The table of the page is made of what these tests measure. ``make optimizers`` writes it.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle.optimizer import lr

import paddleformers_fc
from paddleformers_fc.errors import FlexError, OptionError
from paddleformers_fc.layout.roles import OPTIMIZERS, StateShape, split_state_name
from paddleformers_fc.trainer import optimizers
from tests.harness import tiny
from tests.harness.on_ranks import on_ranks, run_on_ranks
from tests.harness.tiny import SD2V1, SD2V2, SINGLE, TP2, MatrixLayout
from tests.trainer.jobs import callback, flex_trainer, logged
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"
WRITE = "FLEX_WRITE_OPTIMIZERS"
HEADER = "| optimizer | states | resumed under the same layout | and under other layouts |\n|---|---|---|---|\n"
LAYOUTS = {"sharding 2": SD2V1, "sharding 2 with `split_param`": SD2V2, "tensor parallel 2": TP2}
WHOLE = {"max_steps": 4, "save_steps": 2}


@dataclass(frozen=True)
class Choice:
    """One way to choose an optimizer.

    Args:
        optimizer: its name in the table.
        made: the expression that makes it, with ``model`` and ``lr``; empty if ``arguments`` choose it.
        declared: the line that declares it; empty if the package does.
        arguments: of the Trainer.
        half: whether the model is bfloat16, with master weights.
    """

    optimizer: str
    made: str = ""
    declared: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    half: bool = False


_REGISTER = "paddleformers_fc.register_optimizer(paddle.optimizer"
_MADE = "parameters=model.parameters(), learning_rate=lr, grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0)"
LAMB = f'{_REGISTER}.Lamb, like_parameter=["moment1", "moment2"], numbers=["beta1_pow_acc", "beta2_pow_acc"])'

CHOICES = {
    "adamw": Choice("AdamW", arguments={"optim": "adamw"}),
    "amsgrad": Choice("AdamW, amsgrad", f"paddle.optimizer.AdamW({_MADE}, amsgrad=True)"),
    "amsgrad-half": Choice(
        "AdamW, amsgrad, bf16 O2", f"paddle.optimizer.AdamW({_MADE}, amsgrad=True, multi_precision=True)", half=True
    ),
    "low": Choice("AdamW, 16-bit moments", f"paddle.optimizer.AdamW({_MADE}, use_lowprecision_moment=True)", half=True),
    "custom": Choice("AdamWCustom", arguments={"optim": "adamw_custom"}),
    "custom-low": Choice(
        "AdamWCustom, 16-bit moments, bf16 O2",
        arguments={"optim": "adamw_custom", "use_lowprecision_moment": True},
        half=True,
    ),
    "mini": Choice("AdamWMini", arguments={"optim": "adamw_mini"}),
    "mini-script": Choice("AdamWMini of a script", f"AdamWMini({_MADE})"),
    "sgd": Choice("SGD", f"paddle.optimizer.SGD({_MADE})", f"{_REGISTER}.SGD)"),
    "momentum": Choice(
        "Momentum", f"paddle.optimizer.Momentum({_MADE})", f'{_REGISTER}.Momentum, like_parameter=["velocity"])'
    ),
    "lamb": Choice("Lamb", f"paddle.optimizer.Lamb({_MADE})", LAMB),
}


SOME = ["custom-low", "mini", "lamb"]
"""Between them: 16-bit moments, a number per shard, a registered optimizer."""
OTHERS = ["adamw", "amsgrad", "amsgrad-half", "low", "custom", "sgd", "momentum"]
SCRIPT_ONLY = "mini-script"
"""PaddleFormers refuses ``optim: adamw_mini`` with tensor parallelism; a script can train it."""


def trainer_of(key: str, layout: MatrixLayout, output_dir: Path, **arguments: Any) -> Any:
    """A Trainer with the optimizer of a choice."""
    from paddleformers.utils.optimizer import AdamWMini

    from paddleformers_fc import FlexTrainer

    choice = CHOICES[key]
    names = {"paddle": paddle, "paddleformers_fc": paddleformers_fc, "AdamWMini": AdamWMini}
    if choice.declared:
        exec(choice.declared, names)

    class Trainer(FlexTrainer):
        def create_optimizer(self, lr_scheduler: Any = None) -> Any:
            if not choice.made:
                return super().create_optimizer(lr_scheduler)
            self.optimizer = eval(choice.made, {**names, "model": self.model, "lr": self.lr_scheduler})
            return self.optimizer

    half = replace(layout, bf16=choice.half)
    return flex_trainer(half, output_dir, {**choice.arguments, **arguments}, cls=Trainer)


def digests(checkpoint: Path) -> list[object]:
    return list(canonical_digests(checkpoint))


def train_twice(keys: list[str], layout: MatrixLayout, output_dir: Path) -> dict[str, bool]:
    """Train four steps with each optimizer, and the last two again; whether their losses are equal."""
    equal = {}
    for key in keys:
        losses = []
        for name, resume in (("whole", None), ("again", str(output_dir / key / "whole/checkpoint-2"))):
            trainer = trainer_of(key, layout, output_dir / key / name, **WHOLE)
            trainer.train(resume_from_checkpoint=resume)
            losses.append(trainer.losses)
        equal[key] = losses[0][2:] == losses[1]
    return equal


def train_and_resume(ranks: ForkServer, keys: list[str], layout: MatrixLayout, output_dir: Path) -> dict[str, bool]:
    """Whether losses and the last checkpoint of a resumed run are those of the uninterrupted one, bit for bit."""
    found = run_on_ranks(ranks, layout.nproc, train_twice, keys=keys, layout=layout, output_dir=output_dir)[0]
    for key in keys:
        last = [digests(output_dir / key / run / "checkpoint-4") for run in ("whole", "again")]
        found[key] &= last[0] == last[1]
        (output_dir / key / "checkpoint-2").symlink_to(output_dir / key / "whole" / "checkpoint-2")
    return dict(found)


def save_loaded(keys: list[str], layout: MatrixLayout, source: Path, target: Path) -> dict[str, str]:
    """Load the checkpoint of each optimizer and save it under a layout; the errors of those that are refused."""
    refused = {}
    for key in keys:
        trainer = trainer_of(key, layout, target / key, max_steps=2)
        try:
            trainer.train(resume_from_checkpoint=str(source / key / "checkpoint-2"))
            trainer._save_checkpoint(trainer.model)
        except FlexError as error:
            refused[key] = error.render()
    return refused


def save_again(ranks: ForkServer, keys: list[str], layout: MatrixLayout, source: Path, target: Path) -> dict[str, str]:
    """What became of each checkpoint under a layout: an error, or empty if its digests are equal."""
    given = {"keys": keys, "layout": layout, "source": source, "target": target}
    found = dict.fromkeys(keys, "") | run_on_ranks(ranks, layout.nproc, save_loaded, **given)[0]
    for key in keys:
        one, other = (place / key / "checkpoint-2" for place in (source, target))
        found[key] = found[key] or ("" if digests(one) == digests(other) else "other digests")
    return found


def test_one_number_per_shard_is_exact_only_if_tensors_are_cut_alike(ranks: ForkServer, tmp_path: Path) -> None:
    assert train_and_resume(ranks, [SCRIPT_ONLY], TP2, tmp_path / "cut") == {SCRIPT_ONLY: True}
    checkpoint = paddleformers_fc.open(tmp_path / "cut" / SCRIPT_ONLY / "checkpoint-2")
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors() if "moment2" in tensor.name}
    assert shapes["model.layers.0.mlp.down_proj.weight.moment2_of_shard_0"] == (2, 1)
    assert shapes["model.norm.weight.moment2_of_shard_0"] == (1,)
    whole = save_again(ranks, [SCRIPT_ONLY], SINGLE, tmp_path / "cut", tmp_path / "whole")[SCRIPT_ONLY]
    assert "moment2_of_shard_0: stored [2, 1], expected [1, 1]" in whole
    assert "exact only if tensors are sharded in the same way" in whole


def chosen(
    layout: MatrixLayout, output_dir: Path, kind: Any, arguments: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """A Trainer with an optimizer of a class."""
    from paddleformers_fc import FlexTrainer

    class Trainer(FlexTrainer):
        def create_optimizer(self, lr_scheduler: Any = None) -> Any:
            self.optimizer = kind(parameters=self.model.parameters(), learning_rate=0.01, **options)

    return flex_trainer(layout, output_dir, {"max_steps": 2, "save_steps": 2, **(arguments or {})}, cls=Trainer)


@on_ranks(layout=SINGLE)
def test_an_undeclared_optimizer_is_refused_with_what_to_declare_if_its_states_are_saved(
    tmp_path: Path,
) -> None:
    class Own(paddle.optimizer.AdamW):
        """A subclass with one state more."""

        def _add_moments_pows(self, p: Any) -> None:
            super()._add_moments_pows(p)
            self._add_accumulator("third", p)

    def train(kind: Any) -> None:
        trainer = chosen(SINGLE, tmp_path, kind)
        trainer.add_callback(callback(on_step_begin=lambda *_, **__: pytest.fail("a step has begun")))
        trainer.train()

    def give_to_a_trainer(kind: Any) -> None:
        from paddleformers_fc import FlexTrainer, FlexTrainingArguments

        args = tiny.training_arguments(SINGLE, str(tmp_path), cls=FlexTrainingArguments, flex_checkpoint=True)
        model = tiny.build("llama", SINGLE, args)
        optimizer = kind(parameters=model.parameters(), learning_rate=0.01)
        tiny.trainer(model, args, cls=FlexTrainer, optimizers=(optimizer, None))

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
    chosen(SINGLE, tmp_path, optimizers.SGD, {"ignore_save_lr_and_optim": True}).train()
    assert {one.role for one in canonical_digests(tmp_path / "checkpoint-2")} == {"model_state"}


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


@pytest.mark.parametrize("layout", [SD2V2, SINGLE], ids=lambda layout: layout.name)
@on_ranks()
def test_a_state_without_the_declared_shape_is_refused(layout: MatrixLayout, tmp_path: Path) -> None:
    for kind, declared, options, text in (
        (paddle.optimizer.Adagrad, {"numbers": ["moment"]}, {}, "declared shape: moment"),
        (
            paddle.optimizer.ASGD,
            {"like_parameter": ["d", "y"], "numbers": ["m"]},
            {"batch_num": 1},
            "declared shape: y",
        ),
    ):
        paddleformers_fc.register_optimizer(kind, **declared)
        with pytest.raises(FlexError, match=text):
            chosen(layout, tmp_path / kind.__name__, kind, **options).train()


@on_ranks(layout=SD2V2)
def test_a_range_without_padding_is_the_tensor_of_the_optimizer(tmp_path: Path) -> None:
    """An offload moves this tensor in place; a slice of it would keep the old memory, and show old values."""
    trainer = trainer_of("adamw", SD2V2, tmp_path, max_steps=1)
    trainer.train()
    weights = trainer.model.sharded_state_dict()
    names = {weight.local_tensor.name: name for name, weight in weights.items()}
    states = optimizers.sharded_states(trainer.optimizer, weights)
    found = 0
    for state, static, tensor in optimizers.tensors(trainer.optimizer):
        shard = states.get(names[static] + state.suffix)
        if shard is not None and shard.is_flattened:
            size = shard.flattened_range.stop - shard.flattened_range.start
            assert (shard.local_tensor is tensor) == (tensor.shape[0] == size)
            found += shard.local_tensor is tensor
    assert found > 0


@on_ranks(layout=SINGLE)
def test_another_optimizer_is_reported_if_its_states_have_the_same_names(tmp_path: Path) -> None:
    for key in ("adamw", "sgd"):
        trainer_of(key, SINGLE, tmp_path / key, max_steps=2, save_steps=2).train()

    def resume(saved: str, key: str, **arguments: Any) -> str:
        trainer = trainer_of(key, SINGLE, tmp_path / "out", max_steps=3, **arguments)
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


SCHEDULERS: dict[str, tuple[Callable[[], Any], list[float]]] = {
    "StepDecay": (lambda: lr.StepDecay(0.01, step_size=1, gamma=0.5), [0.01, 0.005, 0.0025, 0.00125, 0.000625]),
    # Paddle's state of it lacks the position in the cycle. It is saved in the second cycle, and ends in the third.
    "CosineAnnealingWarmRestarts": (
        lambda: lr.CosineAnnealingWarmRestarts(0.01, 1, 2),
        [0.01, 0.01, 0.005, 0.01, 0.005 + 0.005 * math.cos(math.pi / 4)],
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@on_ranks(layout=SINGLE)
def test_a_learning_rate_scheduler_of_the_optimizer_alone_is_resumed(kind: str, tmp_path: Path) -> None:
    make, expected = SCHEDULERS[kind]

    def train(name: str, resume: str | None = None) -> list[float]:
        trainer, scheduler = flex_trainer(SINGLE, tmp_path / name, {**WHOLE, "max_steps": 5}), make()
        trainer.optimizer = paddle.optimizer.AdamW(parameters=trainer.model.parameters(), learning_rate=scheduler)
        rates: list[float] = []

        def halve(*_: Any, **__: Any) -> None:
            rates.append(trainer.optimizer.get_lr())
            scheduler.step()

        trainer.add_callback(callback(on_step_end=halve))
        trainer.train(resume_from_checkpoint=resume)
        return rates

    rates = train("whole")
    # The scheduler is saved at the end of a step, after the callback.
    assert train("again", str(tmp_path / "whole/checkpoint-2")) == rates[2:]
    assert rates == pytest.approx(expected)
    assert digests(tmp_path / "again/checkpoint-4") == digests(tmp_path / "whole/checkpoint-4")


# ---- The table of the page.


def states_of(checkpoint: Path) -> str:
    """The states that a checkpoint contains, as text."""
    kinds: dict[str, dict[tuple[str, StateShape], None]] = {}
    for tensor in paddleformers_fc.open(checkpoint).tensors():
        if tensor.role != "model_state":
            state = split_state_name(tensor.role, tensor.name, tensor.shape)
            kinds.setdefault(state.suffix, {})[tensor.dtype, state.shape] = None
    alike: dict[str, list[str]] = {}
    for suffix, found in sorted(kinds.items()):
        shape = "" if {shape for _, shape in found} == {StateShape.PARAMETER} else f", {next(iter(found))[1].value}"
        alike.setdefault(" and ".join(dtype for dtype, _ in found) + shape, []).append(f"`{suffix}`")
    return "; ".join(f"{', '.join(suffixes)} {kind}" for kind, suffixes in alike.items())


def result(error: str) -> str:
    if "stored [" in error:
        return "refused, because tensors are cut in another way"
    return "refused, because parameters are divided into ranges" if "split_param: true with" in error else error


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[str, str]]:
    """The rows of the table by optimizer; all of them replace those of the page at the end."""
    found: dict[str, str] = {}
    yield found
    if os.environ.get(WRITE) and found.keys() == CHOICES.keys() - {SCRIPT_ONLY}:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(HEADER)
        table = HEADER + "".join(found[key] for key in CHOICES if key in found)
        after = rest[rest.index("\n\n") + 1 :]
        PAGE.write_text(before + table + after, encoding="utf-8")


@pytest.mark.parametrize("keys", [SOME, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_a_run_resumes_exactly_and_under_other_layouts_as_the_table_states(
    ranks: ForkServer, tmp_path: Path, rows: dict[str, str], keys: list[str]
) -> None:
    page, saved = PAGE.read_text(encoding="utf-8"), tmp_path / "single"
    exact = train_and_resume(ranks, keys, SINGLE, saved)
    under: dict[str, dict[str, str]] = {}
    for name, layout in LAYOUTS.items():
        script = {"mini": SCRIPT_ONLY} if layout is TP2 else {}
        tried = [script.get(key, key) for key in keys]
        if SCRIPT_ONLY in tried:
            (saved / SCRIPT_ONLY).symlink_to(saved / "mini")
        found = save_again(ranks, tried, layout, saved, tmp_path / layout.name)
        under[name] = {key: found[script.get(key, key)] for key in keys}
    for key in keys:
        outcomes: dict[str, list[str]] = {}
        for name, errors in under.items():
            outcomes.setdefault(result(errors[key]) or "equal digests", []).append(name)
        named = {", ".join(names) if len(outcomes) > 1 else "all": outcome for outcome, names in outcomes.items()}
        text = "; ".join(f"{names}: {outcome}" for names, outcome in named.items())
        states = states_of(saved / key / "checkpoint-2") or "none"
        resumed = "bitwise" if exact[key] else "DIFFERS"
        rows[key] = f"| {CHOICES[key].optimizer} | {states} | {resumed} | {text} |\n"
        assert rows[key] in page or os.environ.get(WRITE)


def test_the_page_declares_optimizers_as_they_are_tested() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for choice in CHOICES.values():
        assert "".join(choice.declared.split()) in "".join(page.split())
        assert f"| {choice.optimizer} |" in page or choice.optimizer == CHOICES[SCRIPT_ONLY].optimizer
