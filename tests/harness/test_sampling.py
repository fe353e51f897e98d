"""The sample of ``make test``: which cases it holds."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

CASES = """
import pytest

@pytest.fixture
def ranks():
    return None

@pytest.mark.slow
def test_slow(): ...

@pytest.mark.parametrize("case", range(4))
def test_in_one_process(case): ...

@pytest.mark.parametrize("case", range(7))
def test_with_ranks(ranks, case): ...

@pytest.mark.parametrize("case", [0, 1])
def test_with_two_cases(ranks, case): ...

@pytest.mark.sampled
@pytest.mark.parametrize("case", [pytest.param(0, marks=pytest.mark.slow), 1, 2, 3, 4])
def test_with_a_slow_case(case): ...

@pytest.mark.parametrize("case", [0, *(pytest.param(case, marks=pytest.mark.chosen) for case in (1, 3)), 2])
def test_with_chosen_cases(ranks, case): ...
"""

IN_ONE_PROCESS = [f"test_in_one_process[{case}]" for case in range(4)]


def collected(pytester: pytest.Pytester, *options: str) -> list[str]:
    """The names of the tests that pytest selects."""
    pytester.makepyfile(CASES)
    result = pytester.runpytest_inprocess("--collect-only", "-q", "-p", "tests.harness.sampling", *options)
    return [line.partition("::")[2] for line in result.outlines if "::" in line]


def test_a_sample_has_a_fifth_of_the_cases_with_ranks_and_no_slow_test(pytester: pytest.Pytester) -> None:
    with_ranks = [f"test_with_ranks[{case}]" for case in (0, 6)]
    others = ["test_with_two_cases[0]", "test_with_a_slow_case[1]"]
    others += ["test_with_chosen_cases[1]", "test_with_chosen_cases[3]"]
    assert collected(pytester, "--sample") == [*IN_ONE_PROCESS, *with_ranks, *others]


def test_without_the_option_every_case_is_selected(pytester: pytest.Pytester) -> None:
    assert len(collected(pytester)) == 1 + 4 + 7 + 2 + 5 + 4
