"""Names of layouts, and layouts that a model cannot have."""

from __future__ import annotations

from typing import Any

import pytest

from paddleformers_fc.cli.matrix.layouts import Layout, impossible, layout_from, parse_layout
from paddleformers_fc.errors import OptionError

MODEL: dict[str, Any] = {
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "moe_num_experts": 6,
}


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


@pytest.mark.parametrize("name", ["", "xp2", "tp", "tp2+tp2", "sd2v3", "tp2 + pp2", "ep2", "tp2+", "vpp2"])
def test_what_is_no_name_is_refused_with_the_part_that_is_not_understood(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_layout(name)
    assert repr(name) in caught.value.render()


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("tp2+pp4vpp2", []),
        ("tp3", ["tp3: num_key_value_heads 2 cannot be divided by tp 3"]),
        (
            "tp4(ep4)",
            [
                "tp4(ep4): num_attention_heads 6 cannot be divided by tp 4",
                "tp4(ep4): num_key_value_heads 2 cannot be divided by tp 4",
                "tp4(ep4): moe_num_experts 6 cannot be divided by ep 4",
            ],
        ),
        ("pp4vpp3", ["pp4vpp3: 8 layers are fewer than 12 stages"]),
    ],
)
def test_a_layout_that_the_model_cannot_have_is_refused_with_the_numbers(name: str, faults: list[str]) -> None:
    assert impossible(parse_layout(name), MODEL) == faults
