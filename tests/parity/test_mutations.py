"""Wrong declarations: every one that changes a number is noticed, most by the proof, the others by numbers.

A mutant is first judged on the models of the fixtures: by the proof, by the headers of the files, and by logits. What
it leaves unchanged in all of them concerns other classes and configurations. There the judge is Paddle's own engine,
with the statements of PaddleFormers.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.families import own_families
from tests.families.spaces import BY_NAME, differing, model_of
from tests.families.test_native import AGREE, LOADED, Theirs, config_of
from tests.mapping.numbers import Arrays
from tests.parity.evidence import NOT_COMPARED
from tests.parity.judging import MISSED, NOTICED, NUMBERS, UNCHANGED, Space
from tests.parity.mutations import Mutant, mutants
from tests.parity.test_parity import NAMES, REFUSED, TOLERANCE
from verification.forkserver import ForkServer

STATEMENTS = "statements"

CONFIGS: dict[str, list[dict[str, Any]]] = {
    family.name: [changes for name, changes in (*AGREE, *LOADED) if name == family.name] for family in own_families()
}
# Tests of stock's statements name faults of their export; their load is right.
CONFIGS["kimi_k2"] += [{}, {"moe_expert_fusion": False}]
CONFIGS["deepseek_v3"] += [{}]
CONFIGS["ernie4_5_moe_vl"] += [{}]
JUDGED = [name for name in CONFIGS if CONFIGS[name] or any(one.split("-")[0] == name for one in NAMES)]

QUICK = "phi3"
"""The family that is judged in ``make test``, in a second."""

CORRECTED = {"model.layers.2.eh_proj.weight"}
"""Linear layers of DeepSeek V3 that stock's statements do not transpose."""


class StockSubject:
    """A model that PaddleFormers' statements fill."""

    def __init__(self, name: str, changes: dict[str, Any], tp: int) -> None:
        theirs = Theirs(name, changes, tp)
        self.space = Space(BY_NAME[name], model_of(config_of(name, changes)), tp, theirs.canonical)
        turned = {name: theirs.canonical[name].T for name in CORRECTED & theirs.canonical.keys()}
        self.loaded: Arrays = {**theirs.loaded, **turned}
        assert differing(self.space.right, self.loaded) == []

    def verdict(self, mutant: Mutant) -> str:
        found = self.space.refusal(mutant)
        if isinstance(found, str):
            return found
        return STATEMENTS if differing(found, self.loaded) else MISSED


def by_logits(ranks: ForkServer, name: str, directory: Path, tolerance: float = TOLERANCE) -> list[str]:
    """Who notices every mutant of a family on the models of its fixtures."""
    names = [one for one in NAMES if one.split("-")[0] == name and one not in REFUSED]
    kwargs = {"names": names, "output_dir": str(directory), "tolerance": tolerance}
    found: list[str] = ranks.run("tests.parity.judging:by_logits", 1, kwargs).values[0]
    return found


def by_statements(name: str, wrong: list[Mutant]) -> list[str]:
    """Who notices mutants of a family on models that stock's statements fill."""
    verdicts = [UNCHANGED] * len(wrong)
    for changes in CONFIGS[name]:
        for tp in (1, 2):
            subject = StockSubject(name, changes, tp)
            for index, mutant in enumerate(wrong):
                if verdicts[index] in (UNCHANGED, MISSED):
                    verdicts[index] = joined(verdicts[index], subject.verdict(mutant))
    return verdicts


def joined(before: str, now: str) -> str:
    """The verdict of two models: a change that one of them misses is not undone by one that has no change."""
    return before if now == UNCHANGED else now


@pytest.mark.parametrize(
    "name", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in JUDGED]
)
def test_every_wrong_declaration_that_changes_a_number_is_noticed(
    ranks: ForkServer, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = list(mutants(BY_NAME[name]))
    verdicts = [UNCHANGED] * len(wrong) if name in NOT_COMPARED else by_logits(ranks, name, tmp_path)
    left = [index for index, verdict in enumerate(verdicts) if verdict not in NOTICED]
    for index, verdict in zip(left, by_statements(name, [wrong[index] for index in left]), strict=True):
        verdicts[index] = verdict if verdict != UNCHANGED else verdicts[index]
    counts = Counter(verdicts)
    with capsys.disabled():
        print(f"\n  {name}: {', '.join(f'{verdict} {count}' for verdict, count in sorted(counts.items()))}")
    assert [mutant for mutant, verdict in zip(wrong, verdicts, strict=True) if verdict == MISSED] == []
    # The proof and the headers alone would miss these.
    assert counts[STATEMENTS if name in NOT_COMPARED else NUMBERS] > 20


def test_wrong_declarations_would_be_missed_without_the_logits(ranks: ForkServer, tmp_path: Path) -> None:
    counts = Counter(by_logits(ranks, "phi3", tmp_path, tolerance=1e9))
    assert NUMBERS not in counts
    assert counts[MISSED] > 10
