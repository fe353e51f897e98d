"""Select the tests of ``make test``: no slow ones, and a sample of the cases that start processes.

``make test-all`` runs every test. With ``--sample`` a test marked ``slow`` is left out, and of a parametrised test that
starts ranks, or is marked ``sampled``, a fifth of the cases runs: the first, the last and others at equal distances;
of five or fewer, the first. If cases of a test are marked ``chosen``, these are its sample. The choice depends on the
cases alone, so it is the same on every machine. Properties that are :func:`thorough` try a third of their examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings

OPTION = "--sample"
EACH = 5
"""Of so many cases one is run."""
_FIXTURES = frozenset({"ranks", "bare_ranks", "patient_ranks"})


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option to pytest's command line."""
    parser.addoption(OPTION, action="store_true", help="run a sample: no slow tests, a fifth of the cases with ranks")


_sampled = False
"""Whether this process runs a sample; set before it imports tests."""


def thorough(examples: int, **options: Any) -> settings:
    """Return Hypothesis' settings of a property: so many examples, a third of them in a sample."""
    return settings(max_examples=examples // 3 if _sampled else examples, **options)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers."""
    global _sampled
    _sampled = bool(config.getoption(OPTION))
    config.addinivalue_line("markers", "slow: left out of make test")
    config.addinivalue_line("markers", "chosen: the cases of a test that are in make test, in place of a fifth")
    config.addinivalue_line(
        "markers", "sampled: a fifth of the cases is in make test, as of all tests that start ranks"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is not in the sample."""
    if not config.getoption(OPTION):
        return
    chosen = {id(item) for item in sample(items)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = [item for item in items if id(item) in chosen]


def sample(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of the sample, in their order."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    found = {id(item) for group in cases.values() for item in _sample_of(group)}
    return [item for item in items if id(item) in found]


def _sample_of(group: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of one test that are in the sample."""
    chosen = [item for item in group if item.get_closest_marker("chosen") is not None]
    return chosen or [group[place] for place in _places(len(group), _starts_processes(group[0]))]


def _starts_processes(item: pytest.Item) -> bool:
    return item.get_closest_marker("sampled") is not None or not _FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


def _places(count: int, sampled: bool) -> Sequence[int]:
    """Return the positions of the cases to run, the first and the last among them."""
    wanted = -(-count // EACH)
    if not sampled or count <= wanted:
        return range(count)
    return [round(number * (count - 1) / max(1, wanted - 1)) for number in range(wanted)]
