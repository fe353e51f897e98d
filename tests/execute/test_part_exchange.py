"""Parts of tensors between threads: what ranks want arrives bit for bit, in rounds, whatever ranks hold it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.execute import exchange
from paddleformers_fc.execute.exchange import LocalPart, gather_parts
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import whole
from paddleformers_fc.plan.transfer_plan import schedule_rounds
from tests.execute.simulated import job, succeed

SHAPES = {"a": (7, 5), "b": (40,), "c": (3, 2, 4), "empty": (6,)}
VALUES = {
    name: np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32).ravel()
    for name, shape in SHAPES.items()
}


def part(name: str, low: int, high: int) -> Shard:
    return Shard(name, "float32", SHAPES[name], whole(SHAPES[name]), (low, high))


def cuts(name: str, ranks: int) -> list[tuple[int, int]]:
    """Ranges of a tensor, one for each rank; only the first rank has elements of ``empty``."""
    size = VALUES[name].size
    if name == "empty":
        return [(0, size), *[(size, size)] * (ranks - 1)]
    ends = [size * rank // ranks for rank in range(ranks + 1)]
    return list(zip(ends[:-1], ends[1:], strict=True))


@pytest.mark.parametrize("limit", [8, 50, 1 << 20])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_what_it_wants_of_parts_that_are_cut_otherwise(
    ranks: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "schedule_rounds", lambda moves, rank: schedule_rounds(moves, rank, limit))

    def work(channel: Any) -> None:
        held = {}
        for name, values in VALUES.items():
            low, high = cuts(name, ranks)[channel.rank]
            held[name] = LocalPart(part(name, low, high), values[low:high])
        # The first rank wants all of "a", the others the end of it.
        begin = 3 * channel.rank
        wanted = {name: part(name, min(begin, values.size), values.size) for name, values in VALUES.items()}
        wanted |= {"empty": part("empty", *cuts("empty", ranks)[channel.rank])}
        found = {name: values.copy() for name, values in gather_parts(held, wanted, channel)}
        assert found.keys() == wanted.keys()
        for name, shard in wanted.items():
            low, high = shard.flat or (0, 0)
            assert found[name].tobytes() == VALUES[name][low:high].tobytes(), name

    succeed(ranks, work)


def test_names_that_no_rank_holds_are_left_out_and_holes_are_refused_on_every_rank() -> None:
    def work(channel: Any) -> list[str]:
        held = {"a": LocalPart(part("a", 0, 30), VALUES["a"][:30])} if channel.rank else {}
        wanted = {"a": part("a", 0, 30), "b": part("b", 0, 40)}
        return [name for name, _ in gather_parts(held, wanted, channel)]

    assert succeed(2, work) == [["a"], ["a"]]

    def beyond(channel: Any) -> list[str]:
        held = {"a": LocalPart(part("a", 0, 30), VALUES["a"][:30])} if channel.rank else {}
        return [name for name, _ in gather_parts(held, {"a": part("a", 0, 35)}, channel)]

    one, other = job(2, beyond)
    assert isinstance(one, MismatchError)
    assert str(one) == str(other)
    assert "a: 0:35" in one.evidence[0]
