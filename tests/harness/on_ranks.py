"""Tests whose body runs on every rank: arguments, body and assertions in one function.

::

    @on_ranks(2)
    def test_the_bytes_of_a_rank_reach_the_other() -> None:
        channel = job_channel()
        assert channel.gather("a test", bytes([channel.rank])) == [b"\\0", b"\\1"]

    @on_ranks(layout=TP2)
    def test_a_run_saves_its_last_step(layout: MatrixLayout, tmp_path: Path) -> None:
        ...

Parameters and fixtures are passed to every rank as JSON; paths, layouts and functions of modules arrive as such. A
failing assertion on any rank fails the test and shows the end of each rank's log. A test of several jobs calls
:func:`run_on_ranks` for each.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness.tiny import SINGLE, MatrixLayout, layout_from
from verification.forkserver import ForkServer, JobResult

_JOB = f"{__name__}:call_body"
_PATH, _LAYOUT, _FUNCTION = "a path", "a layout", "a function"


def on_ranks(
    count: int | None = None, layout: MatrixLayout | None = None, server: str = "ranks"
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorate a test so that its body runs on ``count`` forked ranks, or on those of a layout.

    Args:
        count: number of ranks; by default that of the layout, also of a parameter or fixture named ``layout``.
        layout: passed to the body as ``layout`` if it has such a parameter.
        server: the fixture that starts the ranks: ``ranks``, ``patient_ranks`` or ``bare_ranks``.
    """
    given = {} if layout is None else {"layout": layout}

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        parameters = inspect.signature(body).parameters
        fixed = {name: value for name, value in given.items() if name in parameters}

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            number = count or (layout or arguments.get("layout") or SINGLE).nproc
            run_on_ranks(arguments.pop(server), number, body, **fixed, **arguments)

        own = [parameter for name, parameter in parameters.items() if name not in fixed]
        asked = inspect.Parameter(server, inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = inspect.Signature([*own, asked])  # type: ignore[attr-defined]
        return test

    return decorate


def run_on_ranks(server: ForkServer, count: int, body: Callable[..., Any], /, **arguments: Any) -> tuple[Any, ...]:
    """Run a function of a test module on forked ranks and return its results by rank.

    Raises:
        PeerError: the function raised on a rank.
    """
    return job_on_ranks(server.run, count, body, **arguments).values


def job_on_ranks(
    start: Callable[..., JobResult], count: int, body: Callable[..., Any], /, **arguments: Any
) -> JobResult:
    """Run a function as :func:`run_on_ranks` does, and return its results with exit codes and logs.

    Args:
        start: ``server.run``, or ``server.attempt`` if ranks may fail.
    """
    return start(_JOB, count, {"call": json.dumps([body, arguments], default=_to_json)})


def call_body(call: str) -> Any:
    """Call the body of a test on this rank; a job of the fork server."""
    body, arguments = json.loads(call, object_hook=_from_json)
    return body(**arguments)


def _to_json(value: Any) -> Any:
    if isinstance(value, MatrixLayout):
        return {_LAYOUT: value.to_json()}
    return {_PATH: str(value)} if isinstance(value, Path) else {_FUNCTION: [value.__module__, value.__qualname__]}


def _from_json(value: dict[str, Any]) -> Any:
    if value.keys() == {_FUNCTION}:
        module, name = value[_FUNCTION]
        return inspect.unwrap(getattr(importlib.import_module(module), name))
    if value.keys() == {_LAYOUT}:
        return layout_from(value[_LAYOUT])
    return Path(value[_PATH]) if value.keys() == {_PATH} else value
