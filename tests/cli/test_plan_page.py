"""``plan --html`` writes one page that a browser shows without a network, for few ranks and for many."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import paddleformers_fc
from paddleformers_fc.cli import planning
from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.plan.simulate import declared_model
from paddleformers_fc.storage import files
from tests.cli.support import run
from tests.harness.browser import browser, measured, shown
from verification import simulate_ranks

WRITE = "FLEX_WRITE_PICTURES"
PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
MODEL = ModelDescription(
    {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "num_hidden_layers": 8,
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
)
SAVED, FEW, MANY = "tp=4,pp=2,sharding=2", "tp=2,pp=2,sharding=2", "tp=8,pp=4,sharding=8"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 16 ranks."""
    directory = tmp_path_factory.mktemp("page") / "out" / "checkpoint-500"
    model = declared_model(family_for(MODEL.config), MODEL, parse_grid(SAVED), "bfloat16")
    held = [simulate_ranks.filled(model.roles(rank), simulate_ranks.value_of) for rank in range(model.grid.world_size)]
    simulate_ranks.save(directory, held, model)
    return directory


@pytest.fixture(scope="module")
def pages(stored: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of few ranks and that of many."""
    directory = tmp_path_factory.mktemp("pages")
    named = stored.relative_to(stored.parents[1])  # The pictures show the path.
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(stored.parents[1])
        for grid in (FEW, MANY):
            assert run("plan", named, "--to", grid, "--html", directory / f"{grid}.html", "--json").code == 0
    return {grid: directory / f"{grid}.html" for grid in (FEW, MANY)}


def content(page: Path) -> dict[str, Any]:
    """The document in a page."""
    text = page.read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    found = json.loads(data)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("grid", [FEW, MANY])
def test_a_page_is_self_contained_and_has_the_reads_of_every_rank(pages: dict[str, Path], grid: str) -> None:
    found = content(pages[grid])
    assert found["writers"] == [f"rank {number}" for number in range(16)]
    ranks = found["plan"]["ranks"]
    assert [sum(reads.values()) for reads in found["reads"]] == [rank["read"] for rank in ranks]
    assert sum(one["bytes"] for one in found["parameters"]) == found["plan"]["read"]
    assert len(ranks) == found["plan"]["world_size"] == parse_grid(grid).world_size
    text = pages[grid].read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|<link|<img|src=|@import|fetch\(|XMLHttp", text)


def test_a_rank_reads_from_the_files_that_its_own_plan_names(stored: Path) -> None:
    """Counted again from the plan of one rank, as a load makes it."""
    from paddleformers_fc.formats.registry import open_checkpoint
    from paddleformers_fc.layout.roles import split_state_name
    from paddleformers_fc.plan.build import plan_reads
    from paddleformers_fc.plan.forecast import cost_of, plan_load

    flows = paddleformers_fc.open(stored).plan_flows(FEW)
    target = plan_load(open_checkpoint(stored), FEW)
    writers: dict[str, set[str]] = {}
    for rank in range(8):
        layout = target.model.roles(rank)
        dtypes = {(role, name): shard.dtype for role, shards in layout.items() for name, shard in shards.items()}
        counted: Counter[str] = Counter()
        for item in plan_reads(target.source, layout).items:
            number = int(Path(item.stored.file).stem.split("-")[1])
            counted[f"rank {number}"] += cost_of(item, dtypes[item.role, item.name])[0]
            parameter = split_state_name(item.role, item.name).parameter
            writers.setdefault(parameter, set()).add(f"rank {number}")
        assert {flows.writers[index]: count for index, count in flows.reads[rank].items()} == counted
    assert {one.name: one.writers for one in flows.parameters} == {name: len(ranks) for name, ranks in writers.items()}


def test_open_weights_are_read_from_their_files(stored: Path, tmp_path: Path) -> None:
    assert run("export", stored, tmp_path / "hf", "--max-shard-size", "4MB").code == 0
    files = {path.name for path in (tmp_path / "hf").glob("*.safetensors")}
    flows = paddleformers_fc.open(tmp_path / "hf").plan_flows("tp=2")
    assert set(flows.writers) == files
    assert all(one.states == [] for one in flows.parameters)


def test_a_name_cannot_end_the_element_that_contains_it(stored: Path, tmp_path: Path) -> None:
    import msgspec

    flows = paddleformers_fc.open(stored).plan_flows("dp=1")
    hostile = "</script><script>document.title='run'</script>"
    changed = msgspec.structs.replace(flows, plan=msgspec.structs.replace(flows.plan, path=hostile))
    planning.write_page(tmp_path / "page.html", changed, 8)
    assert content(tmp_path / "page.html")["plan"]["path"] == hostile
    assert hostile not in (tmp_path / "page.html").read_text()


def test_an_interrupted_page_leaves_the_older(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    page = tmp_path / "page.html"
    template = Path(planning.__file__).with_name("plan_report.html").read_text(encoding="utf-8")
    older = template.partition("</title>")[0] + "older"
    page.write_text(older)
    monkeypatch.setattr(files, "rename", interrupt)
    assert run("plan", stored, "--to", "tp=2", "--html", page).code == 130
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("page.html", older)]


def test_the_text_names_the_page(stored: Path, tmp_path: Path) -> None:
    outcome = run("plan", stored, "--to", "tp=2", "--html", tmp_path / "page.html")
    assert outcome.code == 0
    assert outcome.out.splitlines()[-1] == f"wrote {tmp_path / 'page.html'}"


@browser
def test_few_ranks_have_a_bar_and_a_row_of_the_matrix_each(pages: dict[str, Path], tmp_path: Path) -> None:
    page = shown(pages[FEW], tmp_path)
    assert 'data-ready="true"' in page
    assert re.findall(r"<span[^>]*>(rank \d+)</span>", page) == [f"rank {number}" for number in range(8)]
    assert re.findall(r"<th>(rank \d+)</th>", page) == [f"rank {number}" for number in range(8)]
    assert "node 0" not in page


@browser
def test_many_ranks_are_grouped_by_node_and_a_node_opens(pages: dict[str, Path], tmp_path: Path) -> None:
    page = shown(pages[MANY], tmp_path)
    assert len(re.findall(r'class="node"', page)) == 32
    assert len(re.findall(r"<th>node \d+</th>", page)) == 32
    assert not re.findall(r"<span[^>]*>rank \d+</span>", page)
    act = "document.querySelectorAll('button.node')[3].click(); const l = document.getElementById('level');"
    page = shown(pages[MANY], tmp_path, script=f"{act} l.value = '3'; l.onchange();")
    wanted = [f"rank {number}" for number in range(24, 32)]
    assert re.findall(r"<span[^>]*>(rank \d+)</span>", page) == wanted
    assert re.findall(r"<th>(rank \d+)</th>", page) == wanted


@browser
def test_tensors_are_found_by_words_of_their_names(pages: dict[str, Path], tmp_path: Path) -> None:
    act = "const s = document.getElementById('search'); s.value = 'layers.5 NORM'; s.oninput();"
    page = shown(pages[FEW], tmp_path, script=act)
    assert sorted(re.findall(r'<td class="name">([^<]*)</td>', page)) == [
        "model.layers.5.input_layernorm.weight",
        "model.layers.5.post_attention_layernorm.weight",
    ]


@browser
def test_the_page_does_not_scroll_sideways_on_a_telephone(pages: dict[str, Path], tmp_path: Path) -> None:
    names = [page.name for page in pages.values()]
    script = "return [window.innerWidth, document.documentElement.scrollWidth];"
    found = measured(pages[FEW].parent, names, tmp_path, 390, script)
    assert list(found.values()) == [[390, 390]] * 2


@browser
@pytest.mark.parametrize(("grid", "height"), [(FEW, 1130), (MANY, 1830)])
def test_the_page_fits_its_window(pages: dict[str, Path], tmp_path: Path, grid: str, height: int) -> None:
    """No part is cut off to the right; with ``FLEX_WRITE_PICTURES`` the pictures of the documentation are written."""
    wide = "document.body.dataset.wide = document.documentElement.scrollWidth > innerWidth;"
    assert 'data-wide="false"' in shown(pages[grid], tmp_path, script=wide)
    picture = tmp_path / "page.png"
    shown(pages[grid], tmp_path, f"--screenshot={picture}", height=height)
    assert picture.read_bytes().startswith(b"\x89PNG")
    if os.environ.get(WRITE):
        from PIL import Image

        PICTURES.mkdir(exist_ok=True)
        world = parse_grid(grid).world_size
        small = Image.open(picture).convert("RGB").resize((930, height * 3 // 4), Image.Resampling.LANCZOS)
        small.quantize(96).save(PICTURES / f"plan-{world}-ranks.png", optimize=True)
