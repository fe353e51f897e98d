"""The lists of mutants do not rot: every one applies to the source of today, and names tests that exist."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from paddleformers_fc.errors import OptionError
from tests.harness.limits import ROOT
from tests.mutants.__main__ import Outcome, chosen, expected_seconds, report
from tests.mutants.lists import MUTANTS
from tests.mutants.mutant import Mutant

PACKAGES = {"distributed", "execute", "families", "formats", "layout", "plan", "storage", "trainer"}


def test_every_mutant_applies_and_is_python() -> None:
    sources: dict[Path, str] = {}
    for mutant in MUTANTS:
        path = mutant.path(ROOT)
        source = sources.setdefault(path, path.read_text(encoding="utf-8"))
        assert mutant.applied(source) != source, mutant


def test_every_mutant_names_tests_that_exist() -> None:
    texts: dict[str, str] = {}
    for mutant in MUTANTS:
        assert mutant.tests, mutant
        for test in mutant.tests:
            file, _, function = test.partition("::")
            text = texts.setdefault(file, (ROOT / file).read_text(encoding="utf-8"))
            assert not function or f"def {function.partition('[')[0]}(" in text, (mutant, test)


def test_there_are_enough_of_every_package_and_none_is_there_twice() -> None:
    assert len(MUTANTS) >= 100
    assert Counter(mutant.file.split("/")[0] for mutant in MUTANTS).keys() == PACKAGES
    assert max(Counter((one.file, one.text, one.instead) for one in MUTANTS).values()) == 1
    assert max(Counter(str(one) for one in MUTANTS).values()) == 1


@pytest.mark.parametrize(
    ("text", "instead", "message"), [("a", "b", "2 times"), ("c", "b", "0 times"), ("= a", "= (", "is no Python")]
)
def test_a_mutant_that_does_not_apply_once_or_is_no_python_is_refused(text: str, instead: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Mutant("storage/x.py", text, instead, (), "").applied("a = a\n")


def test_a_share_below_the_goal_and_a_survivor_without_an_argument_are_failures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    noticed, survived = Outcome("noticed", 1.0), Outcome("survived", 1.0)
    plain = [Mutant(f"plan/{number}.py", "", "", (), f"why {number}") for number in range(20)]
    argued = Mutant("plan/x.py", "", "", (), "why", equivalent="for this reason")
    everyone = dict.fromkeys(plain, noticed)
    assert report(plain, everyone, 95) == 0
    assert report([*plain, argued], {**everyone, argued: survived}, 95) == 0
    assert "for this reason" in capsys.readouterr().out
    assert report([*plain, argued], {**everyone, argued: survived}, 96) == 1
    assert report([*plain, argued], {**everyone, argued: noticed}, 95) == 1
    assert report(plain, {**everyone, plain[0]: survived}, 90) == 1
    assert report(plain, {**everyone, plain[0]: Outcome("broken", 1.0)}, 90) == 1
    assert report(plain, {**everyone, plain[0]: Outcome("stopped", 1.0)}, 100) == 0
    assert "19 of 20 mutants are noticed: 95.0 % (goal 90 %)" in capsys.readouterr().out


def test_mutants_are_chosen_by_a_text_and_their_tests_bound_their_time() -> None:
    assert {mutant.file.split("/")[0] for mutant in chosen("plan/")} == {"plan"}
    mutant = Mutant("plan/x.py", "", "", ("tests/a.py", "tests/b.py::test_one"), "")
    durations = {"tests/a.py::test_x[1]": 1.0, "tests/b.py::test_one[2]": 2.0, "tests/b.py::test_one_more": 4.0}
    assert expected_seconds(mutant, {**durations, "tests/aa.py::test_x": 8.0}) == 3.0
