"""Names of layouts, and the grids that they are."""

from __future__ import annotations

import pytest

from paddleformers_fc.errors import OptionError
from verification.matrix.layouts import MatrixLayout, layout_from, parse_layout


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sd4v2", MatrixLayout("sd4v2", nproc=4, sharding=4, split_param=True)),
        ("sd2s2+tp2", MatrixLayout("sd2s2+tp2", nproc=4, sharding=2, tp=2, stage=2)),
        ("pp4vpp2", MatrixLayout("pp4vpp2", nproc=4, pp=4, vpp=2)),
        ("sd2+tp2(ep2)", MatrixLayout("sd2+tp2(ep2)", nproc=4, tp=2, sharding=2, split_param=True, ep=2)),
        ("tp2+pp2+sd2", MatrixLayout("tp2+pp2+sd2", nproc=8, tp=2, pp=2, sharding=2, split_param=True)),
    ],
)
def test_a_name_describes_the_layout_of_ranks(name: str, expected: MatrixLayout) -> None:
    assert parse_layout(name) == expected
    assert layout_from(expected.to_json()) == expected
    assert expected.grid.world_size == expected.nproc


@pytest.mark.parametrize("name", ["", "xp2", "tp2+tp2", "sd2v3", "ep2", "vpp2"])
def test_what_is_no_name_is_refused_with_the_part_that_is_not_understood(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_layout(name)
    assert repr(name) in caught.value.render()
