"""``families`` lists the declared families."""

from __future__ import annotations

from paddleformers_fc.families import own_families
from paddleformers_fc.families.registry import OWN
from tests.cli.support import run
from tests.parity.evidence import NOT_COMPARED


def test_every_family_is_listed_with_the_libraries_of_its_classes() -> None:
    lines = {line.split()[0]: line for line in run("families").out.splitlines() if line.strip()}
    assert [one.name for one in own_families()] == [*OWN]
    assert lines.keys() >= {one.name for one in own_families()}
    assert lines["qwen2"].split()[1:] == ["PaddleFleet,", "PaddleFormers,", "PaddleNLP"]
    assert lines["llama"].split()[1:] == ["PaddleFormers,", "PaddleNLP"]
    assert {name for name in lines if lines[name].split()[1:] == ["PaddleFleet"]} == NOT_COMPARED.keys()
