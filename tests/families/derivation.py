"""How far derivation gets without the families: what it arrives at by itself, with a hint, and with answers.

``python -m tests.families.derivation FILE`` writes ``docs/derivation.md``. The derivation sees the tensors of a
family's tiny model, what its canonical side holds, the configuration, and kinds of layers; never a rule. It takes a few
seconds.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paddleformers_fc.aoa import normal
from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import FAMILIES, Family, ModelDescription, ModelTensor, bind, enumerate_tensors
from paddleformers_fc.families.declarations import Geometry, Statement
from paddleformers_fc.families.description import IS_NLP
from paddleformers_fc.families.registry import tiny_models
from paddleformers_fc.mapping import RuleSet, TensorSpec
from paddleformers_fc.verification.derivation.derive import Derivation, derive_rules
from paddleformers_fc.verification.derivation.layer_kinds import LayeredTensor, LayerKind
from paddleformers_fc.verification.derivation.name_matching import layer_name, split
from tests.families import native

DEGREES = (1, 2, 4)
SAME, OTHER, OPEN = "same", "**other**", "open"

MOST_QUESTIONS = 12
"""Questions of a model to which answers are tried."""

# Keys of a configuration that PaddleFormers' statements read and the tiny one lacks.
ASKED = {"minimax_m2": {"v_head_dim": 8}, "qwen3_vl_moe": {"moe_expert_fusion": True}}

HEAD = """\
# Derivation

`derive` proposes a family for a model that no family declares, from the names, shapes and layers of both sides. The
evidence is in `verification/derivation/candidates.py`, `name_matching.py` and `options.py`. Open questions are listed
with their candidates as AOA lines; a line that is given back settles the question. The result is proved like the rules
of any family.

```bash
paddleformers-fc derive DIR                                    # open weights with their config.json
paddleformers-fc derive DIR --settle 'a.weight^T -> a.weight'  # answer a question
paddleformers-fc derive DIR --family my_family.py              # write a family, to be registered
```

Saves and loads never derive: a save has no files to compare with, and the meaning of a checkpoint must not depend on
evidence. An unknown model type is refused; `derive` writes the family that is then registered, as
[add-a-family.md](add-a-family.md) shows. The family is bound to the model again and compared before it is written.
`--fused gate_up_proj=fused_ffn` gives the geometry of a layer that is fused in files as well: one rank does not show
how tensor parallelism cuts it.

The class is that of `architectures` in `config.json`, for every task of PaddleFormers' Auto classes, also of
vision-language models. Its own AOA statements are a hint by default, `--no-native` ignores them. In the family of a
nested configuration numbers of heads are digits. A sequence of layers with several shapes, such as
`merger.mlp.0` and `merger.mlp.2`, is refused when a family is written: its statements are still derived and proved.

A proof shows that every element has a position, not that the position is correct. No proof checks these conventions.
Equal names are equal tensors. The weight of a linear layer is transposed, and that of a convolution is not. Parts are
in the order of their names: query, key, value, and gate, up. Gate and up are side by side on every rank.

## Measured

Derivation is compared with the written families. Every row is a family's tiny model under 1, 2 and 4 tensor-parallel
ranks (*fleet* and *formers* are the two classes of some families). *Same* means: every tensor has the same boxes of the
same sources, with the same ties and the same uninitialised tensors. *Open* counts the open questions.

- **alone**: from names, shapes, kinds of layers and the configuration.
- **native hint**: with the text of PaddleFormers' own `_gen_aoa_config`, which is parsed and proved, and used only
  where the evidence has several candidates or none.
- **answers**: with one answer to every question: the candidate of the family. An answer is one line if one AOA
  statement expresses it. No answers are tried to more than 12 questions: names of PaddleFleet's vision towers differ
  from those of their files, so that only the hint relates them.

Kinds of layers are those of the families' statements, except routers, which are not linear layers. For classes that
can be imported, a test compares them with those of the live model. The canonical side contains all tensors that the
family's rules read, also optional ones.

"""

LEGEND = """
`make derive-table` writes this page, and a test compares it.

## Open questions

"""


@dataclass(frozen=True, eq=False)
class Case:
    """One model of a family, made once: what is computed of it is kept.

    Args:
        family: the family.
        fleet: whether it is of PaddleFleet's class; None where there is one class.
        tp: the degree of tensor parallelism.
    """

    family: Family
    fleet: bool | None
    tp: int

    @property
    def name(self) -> str:
        return self.family.name + {None: "", True: " (fleet)", False: " (formers)"}[self.fleet]

    @property
    def config(self) -> dict[str, Any]:
        # PaddleFormers' own class has no empty layers before the first; its statements would count them all the same.
        without = {"num_empty_layers_add_in_head": 0} if self.fleet is False else {}
        return {**self.family.defaults, **self.family.tiny, **without}

    @property
    def model(self) -> ModelDescription:
        return ModelDescription(self.config, self.fleet)

    @functools.cached_property
    def rules(self) -> RuleSet:
        return bind(self.family, self.model, self.tensors())

    @functools.cached_property
    def canonical(self) -> dict[str, TensorSpec]:
        return dict(self.rules.mapping().sources)

    @property
    def hint(self) -> list[str]:
        fleet = self.family.name in ("kimi_k2", "minimax_m2") if self.fleet is None else self.fleet
        settings = {**self.config, **ASKED.get(self.family.name, {})}
        return native.statements(self.family.model_types[0], settings, inverse=False, fleet=fleet)

    def tensors(self) -> list[ModelTensor]:
        return [one.under(tp=self.tp) for one in enumerate_tensors(self.family, self.model)]

    @functools.cache  # noqa: B019 - the cases live as long as the process.
    def layered(self) -> list[LayeredTensor]:
        """The model's tensors with the kinds of their layers, by the statements that declare them."""
        statements = {
            one.name: statement
            for statement in self.family.statements
            for one in enumerate_tensors(replace(self.family, statements=(statement,)), self.model)
        }
        return [LayeredTensor(one, _kind(one, statements)) for one in self.tensors()]


def _kind(tensor: ModelTensor, statements: Mapping[str, Statement]) -> LayerKind:
    layer = tensor.name.removesuffix(".bias")
    weight = statements.get(layer + ".weight", statements[tensor.name])
    if "embed_tokens" in layer:
        return LayerKind.EMBEDDING
    if layer_name(layer) in ("gate", "router"):
        return LayerKind.OTHER
    if weight.geometry is not Geometry.SAME and weight.turned and weight.stack is None:
        return LayerKind.LINEAR
    if len(weight.shape) > 3 or "conv1d" in layer:
        return LayerKind.CONVOLUTION
    return LayerKind.NORM if len(tensor.shape) == 1 and "norm" in layer else LayerKind.OTHER


@functools.cache
def cases(tp: int) -> tuple[Case, ...]:
    return tuple(
        Case(family, model.is_fleet, tp)
        for family in FAMILIES
        for model in tiny_models(family)
        if IS_NLP not in model.config  # PaddleFormers states no mapping of PaddleNLP's classes to compare with.
    )


def verdict(case: Case, found: Derivation) -> str:
    """Whether a derivation equals the family, differs, or has questions."""
    if found.questions:
        return OPEN
    wanted = case.rules
    equal = normal(found.rules.mapping()) == normal(wanted.mapping()) and set(found.rules.ties) == set(wanted.ties)
    return SAME if equal and set(found.rules.fresh) == set(wanted.fresh) else OTHER


def derived(case: Case, hint: Sequence[str] = (), settled: Sequence[str] = ()) -> Derivation:
    return derive_rules(case.layered(), case.canonical, case.config, hint=hint, settled=settled)


def answers(case: Case, found: Derivation) -> list[tuple[str, ...]]:
    """To every question the first of its answers that makes of its tensors what the family does, if there is one."""
    given: list[tuple[str, ...]] = []
    for question in found.questions:
        for answer in question.answers:
            try:
                outcome = derived(case, settled=_lines([*given, answer]))
            except MappingError:
                continue
            if _is_right(case, outcome, question.names):
                given.append(answer)
                break
    return given


def _is_right(case: Case, found: Derivation, names: Sequence[str]) -> bool:
    wanted = {item for item in normal(case.rules.mapping()) if item.target in names}
    return bool(wanted) and {item for item in normal(found.rules.mapping()) if item.target in names} == wanted


def _lines(given: Sequence[tuple[str, ...]]) -> list[str]:
    return [line for answer in given for line in answer]


@dataclass(frozen=True)
class Measured:
    """The results of one model: alone, with the hint and with answers, and the questions and answers themselves."""

    case: Case
    alone: str
    hinted: str
    answered: str
    questions: tuple[str, ...]
    given: tuple[tuple[str, ...], ...]


@functools.cache
def measured(case: Case) -> Measured:
    alone = derived(case)
    hinted = derived(case, hint=case.hint)
    given = answers(case, alone) if len(alone.questions) <= MOST_QUESTIONS else []
    answered = verdict(case, derived(case, settled=_lines(given))) if given else verdict(case, alone)
    asked = tuple(f"`{layer_name(split(one.names[0])[0])}`: {one.why}" for one in alone.questions)
    return Measured(case, verdict(case, alone), verdict(case, hinted), answered, asked, tuple(given))


def page() -> str:
    """Return the whole page."""
    columns = [[measured(case) for case in cases(tp)] for tp in DEGREES]
    return "".join([HEAD, *_summary(columns), *_table(columns), LEGEND, *_asked(columns)])


def _summary(columns: Sequence[Sequence[Measured]]) -> Iterator[str]:
    yield f"| of {len(FAMILIES)} families, the same | TP 1 | TP 2 | TP 4 |\n|---|---|---|---|\n"
    for label, same in (
        ("alone", lambda one: one.alone == SAME),
        ("with at most one answer of one line", lambda one: one.answered == SAME and len(_lines(one.given)) <= 1),
        ("with answers", lambda one: one.answered == SAME),
        ("with the native hint", lambda one: one.hinted == SAME),
        ("something else", lambda one: OTHER not in (one.alone, one.hinted, one.answered)),
    ):
        counts = [len(FAMILIES) - len({one.case.family.name for one in column if not same(one)}) for column in columns]
        if label == "something else":
            counts = [len(FAMILIES) - count for count in counts]
        yield f"| {label} | {' | '.join(map(str, counts))} |\n"
    yield (
        "\nA family counts where both of its classes do. Under 4 ranks the tiny models have as many kv heads as\n"
        "ranks, and the two layouts of a fused query, key and value are one, without a question.\n\n"
    )


def _table(columns: Sequence[Sequence[Measured]]) -> Iterator[str]:
    degrees = [f"{label}, TP {tp}" for label in ("alone", "native hint", "answers") for tp in DEGREES]
    yield f"| model | {' | '.join(degrees)} |\n|---{'|---' * len(degrees)}|\n"
    for row in zip(*columns, strict=True):
        alone = [one.alone if one.alone != OPEN else f"open: {len(one.questions)}" for one in row]
        answered = [f"{one.answered}, {_count(one)}" if one.given else "-" for one in row]
        yield f"| {row[0].case.name} | {' | '.join([*alone, *(one.hinted for one in row), *answered])} |\n"


def _count(one: Measured) -> str:
    count = len(_lines(one.given))
    return "1 line" if count == 1 else f"{count} lines"


def _asked(columns: Sequence[Sequence[Measured]]) -> Iterator[str]:
    asked: dict[str, dict[str, set[int]]] = {}
    for tp, column in zip(DEGREES, columns, strict=True):
        for one in column:
            for question in one.questions:
                asked.setdefault(question, {}).setdefault(one.case.name, set()).add(tp)
    for question, models in asked.items():
        found = [f"{name} at TP {', '.join(map(str, sorted(degrees)))}" for name, degrees in models.items()]
        yield f"- {question}. {'; '.join(found)}.\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
