"""The table of families: the fixtures that exist, and ``docs/families.md``."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from paddleformers_fc.families import own_families
from tests.parity.evidence import EXCEPT, FIXTURES, HEADINGS, NOT_COMPARED, ONE_RANK, TRAINED, row
from tests.parity.test_parity import FIRST, NAMES, REFUSED, REFUSED_APART

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
HEAD = """# Families

`make families` writes this page from what the tests compare.

* **mapping**: every declaration is proved. *trained*: real ranks resume every layout under every other one, see
  [Llama](results/llama2.md), [ERNIE 4.5 MoE](results/ernie4_5_moe.md), [Qwen 3](results/qwen3.md),
  [Qwen3-MoE](results/qwen3_moe.md) and [Qwen 2.5 VL](results/qwen2_5_vl.md). *simulated*:
  [simulated ranks](results/simulated.md) do the same with the tensors of all families.
* **logits compared**: tiny checkpoints of Transformers, with images for vision-language models, are loaded under these
  tensor-parallel degrees. Logits agree within 2e-6, and exports are equal byte by byte.

"""


def page() -> str:
    """The whole page."""
    rows = [HEADINGS, tuple("---" for _ in HEADINGS), *map(row, own_families())]
    return HEAD + "".join(f"| {' | '.join(one)} |\n" for one in rows)


def test_the_page_is_that_of_the_table() -> None:
    if os.environ.get("FLEX_WRITE_FAMILIES"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "run make families"


def test_the_table_has_the_fixtures_that_are_compared() -> None:
    assert Counter(name.split("-")[0] for name in NAMES if name not in REFUSED) == FIXTURES
    assert FIXTURES.keys().isdisjoint(NOT_COMPARED)
    assert {name for name in FIRST if name in REFUSED_APART} == ONE_RANK.keys()
    assert {name.split("-")[0] for name in REFUSED_APART} == ONE_RANK.keys() | EXCEPT.keys()


def test_the_table_has_the_layouts_of_the_pages() -> None:
    pages = {
        "llama": "llama2",
        "ernie4_5_moe": "ernie4_5_moe",
        "qwen3": "qwen3",
        "qwen2_5_vl": "qwen2_5_vl",
        "qwen3_moe": "qwen3_moe",
    }
    for name, stem in pages.items():
        assert f"* {TRAINED[name]}: every tensor" in _verification(stem)
    assert TRAINED.keys() == pages.keys()


def _verification(stem: str) -> str:
    return (PAGE.parent / "results" / f"{stem}.md").read_text()
