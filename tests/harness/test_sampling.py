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

@pytest.mark.sampled
@pytest.mark.parametrize("case", [pytest.param(0, marks=pytest.mark.slow), 1, 2, 3, 4])
def test_with_a_slow_case(case): ...

@pytest.mark.parametrize("case", [0, *(pytest.param(case, marks=pytest.mark.chosen) for case in (1, 3)), 2])
def test_with_chosen_cases(ranks, case): ...
"""


@pytest.mark.parametrize("is_sample", [True, False])
def test_a_sample_has_a_fifth_of_the_cases_with_ranks(pytester: pytest.Pytester, is_sample: bool) -> None:
    pytester.makepyfile(CASES)
    options = ["-p", "tests.harness.sampling", *(["--sample"] if is_sample else [])]
    result = pytester.runpytest_inprocess("--collect-only", "-q", *options)
    found = [line.partition("::")[2].removeprefix("test_") for line in result.outlines if "::" in line]
    in_one_process = [f"in_one_process[{case}]" for case in range(4)]
    with_ranks = ["with_ranks[0]", "with_ranks[6]", "with_a_slow_case[1]"]
    chosen = ["with_chosen_cases[1]", "with_chosen_cases[3]"]
    assert found == [*in_one_process, *with_ranks, *chosen] if is_sample else len(found) == 1 + 4 + 7 + 5 + 4
