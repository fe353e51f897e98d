"""Names of layouts, and the grids that they are."""

from __future__ import annotations

import pytest

from paddleformers_fc.cli.matrix.layouts import Layout, layout_from, parse_layout
from paddleformers_fc.errors import OptionError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dp4", Layout("dp4", nproc=4)),
        ("sd2v1", Layout("sd2v1", nproc=2, sharding=2)),
        ("sd4v2", Layout("sd4v2", nproc=4, sharding=4, split_param=True)),
        ("sd2s2+tp2", Layout("sd2s2+tp2", nproc=4, sharding=2, tp=2, stage=2)),
        ("sd2s3", Layout("sd2s3", nproc=2, sharding=2, stage=3)),
        ("pp4vpp2", Layout("pp4vpp2", nproc=4, pp=4, vpp=2)),
        ("sd2+tp2(ep2)", Layout("sd2+tp2(ep2)", nproc=4, tp=2, sharding=2, split_param=True, ep=2)),
        ("tp2(ep2)+pp2", Layout("tp2(ep2)+pp2", nproc=4, tp=2, pp=2, ep=2)),
        ("tp2+pp2+sd2", Layout("tp2+pp2+sd2", nproc=8, tp=2, pp=2, sharding=2, split_param=True)),
    ],
)
def test_a_name_says_how_ranks_are_used(name: str, expected: Layout) -> None:
    assert parse_layout(name) == expected
    assert layout_from(expected.to_json()) == expected
    assert expected.grid.world_size == expected.nproc


@pytest.mark.parametrize("name", ["", "xp2", "tp", "tp2+tp2", "sd2v3", "tp2 + pp2", "ep2", "tp2+", "vpp2"])
def test_what_is_no_name_is_refused_with_the_part_that_is_not_understood(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_layout(name)
    assert repr(name) in caught.value.render()
