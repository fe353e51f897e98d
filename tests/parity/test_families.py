"""The table of families: the fixtures that exist, and ``docs/families.md``."""

from __future__ import annotations

import os
from pathlib import Path

from paddleformers_fc.families import own_families
from tests.parity.evidence import EXCEPT, HEADINGS, ONE_RANK, REFUSED_APART, row
from tests.parity.test_parity import FIRST

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
HEAD = """# Families

`make families` writes this page from what the tests compare.

* **mapping**: every declaration is proved. *trained*: real ranks resume every layout under every other one, see
  [Llama](results/llama2.md), [ERNIE 4.5 MoE](results/ernie4_5_moe.md), [Qwen 3](results/qwen3.md),
  [Qwen3-MoE](results/qwen3_moe.md) and [Qwen 2.5 VL](results/qwen2_5_vl.md). *simulated*:
  [simulated ranks](results/simulated.md) do the same for all families.
* **equal logits**: number of tiny Transformers checkpoints, with images for vision-language models, whose logits under
  these tensor-parallel degrees agree within 2e-6 and whose exports are byte-equal. PaddleFleet is on no
  public index, so its own classes have none.
* **layouts**: pairs of a saving and a resuming layout with equal tensors.

"""


def page() -> str:
    """The whole page."""
    rows = [HEADINGS, tuple("---" for _ in HEADINGS), *map(row, own_families())]
    return HEAD + "".join(f"| {' | '.join(one)} |\n" for one in rows)


def test_the_page_is_that_of_the_table() -> None:
    if os.environ.get("FLEX_WRITE_FAMILIES"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "run make families"


def test_the_table_names_the_families_of_which_something_is_not_compared() -> None:
    assert {name for name in FIRST if name in REFUSED_APART} == ONE_RANK.keys()
    assert {name.split("-")[0] for name in REFUSED_APART} == ONE_RANK.keys() | EXCEPT.keys()
