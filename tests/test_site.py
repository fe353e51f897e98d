"""The built site: its pages, navigation, search, colours and tables, as a browser shows them without a network."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

import paddleformers_fc
from tests.harness.browser import browser, measured, shown
from tests.harness.limits import ROOT
from tests.harness.processes import python

pytestmark = pytest.mark.slow
LOADED = re.compile(
    r"<(?:script|img|iframe)[^>]*\ssrc=\"?([^\s\">]+)|<link[^>]*rel=\"?(?:stylesheet|preload|icon)[^>]*>"
)
CONTENT = re.compile(r"<article.*?</article>", re.DOTALL)
NAVIGATION = re.compile(r'data-md-type="navigation".*?(?=data-md-type="toc"|<article)', re.DOTALL)
LINK = re.compile(r'<a[^>]*\shref="([^"#:]+)(?:#[^"]*)?"')
ENTRIES = 25
PICTURED = ("index", "options", "plan")
CHINESE = {
    "恢复": {"zh/resume-under-another-layout.html", "zh/concepts.html", "zh/troubleshooting.html"},
    "异步保存": {"zh/options.html", "zh/troubleshooting.html"},
    "张量并行": {"zh/resume-under-another-layout.html", "zh/quick-start.html", "zh-CN.html"},
}
"""Searches, and pages that each finds."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site. The build is strict, so that a link or an anchor that leads nowhere fails it."""
    directory = tmp_path_factory.mktemp("site")
    built = python("-m", "mkdocs", "build", "--site-dir", directory, NO_MKDOCS_2_WARNING="1")
    assert "Documentation built" in built.stderr  # Without these lines MkDocs counts no warnings either.
    return directory


@pytest.fixture(scope="module")
def texts(site: Path) -> dict[str, str]:
    """The pages by their paths, without that of a missing page."""
    pages = {page.relative_to(site).as_posix(): page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    del pages["404.html"]
    return pages


def test_the_site_has_every_page_with_its_tables_and_lists_and_loads_nothing_from_the_network(
    texts: dict[str, str],
) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    pages = {re.sub(r"(^|/)README\.html$", r"\1index.html", page) for page in pages}
    pages |= {"index.html", "zh-CN.html", "changelog.html", "contributing.html", "reference/errors.html"}
    assert pages <= texts.keys()
    assert not [page for page, text in texts.items() if re.search(r"<p>(\||\* )", text)]
    loaded = {found[0] for text in texts.values() for found in LOADED.finditer(text)}
    assert any("search" in one or "bundle" in one for one in loaded)
    assert not [one for one in loaded if re.search(r"[\"=]?(https?:)?//", one)]


def test_the_navigation_is_short_and_links_lead_from_the_front_page_to_every_page(texts: dict[str, str]) -> None:
    listed = set(_links("index.html", *NAVIGATION.findall(texts["index.html"])))
    assert 10 < len(listed) <= ENTRIES
    reached: set[str] = set()
    waiting = {"index.html"} | listed
    while waiting:
        page = waiting.pop()
        reached.add(page)
        waiting |= set(_links(page, *CONTENT.findall(texts[page]))) - reached
    assert texts.keys() - reached == set()


def _links(page: str, *pieces: str) -> Iterator[str]:
    """Yield the pages to which the pieces of a page link."""
    for piece in pieces:
        for link in LINK.findall(piece):
            if link.endswith(".html"):
                yield os.path.normpath(os.path.join(os.path.dirname(page), unquote(link)))


def test_every_page_shows_the_version_and_changes_between_light_and_dark(texts: dict[str, str]) -> None:
    for page, text in texts.items():
        assert f"paddleformers-fc {paddleformers_fc.__version__}" in re.sub(r"<title>.*?</title>", "", text), page
        assert re.findall(r'data-md-color-scheme="(\w+)"[^>]*type="radio"', text) == ["default", "slate"], page


@browser
@pytest.mark.parametrize("query", CHINESE)
def test_a_search_for_chinese_words_finds_the_chinese_pages(query: str, site: Path, tmp_path: Path) -> None:
    options = ("--virtual-time-budget=10000", "--dump-dom")
    page = shown(site / "index.html", tmp_path, *options, query=f"?q={quote(query)}")
    links = re.findall(r'<a href="([^"?]*)[^"]*" class="md-search-result__link"', page)
    found = {link.removeprefix(f"{site.as_uri()}/") for link in links}
    assert CHINESE[query] <= found
    assert not [one for one in found if not one.startswith("zh")]


@browser
def test_pictures_have_a_light_ground_in_dark_mode(site: Path, texts: dict[str, str], tmp_path: Path) -> None:
    pages = [page for page, text in texts.items() if "<img" in "".join(CONTENT.findall(text))]
    assert "concepts.html" in pages
    script = """
    document.querySelectorAll("[name=__palette]")[1].click();
    const pictures = [...document.querySelectorAll(".md-content img")];
    const grounds = new Set(pictures.map((one) => getComputedStyle(one).backgroundColor));
    return [document.body.dataset.mdColorScheme, ...grounds];
    """
    found = measured(site, pages, tmp_path, 1366, script)
    assert {page: seen for page, seen in found.items() if seen != ["slate", "rgb(255, 255, 255)"]} == {}


@browser
def test_pages_are_dark_in_dark_mode(site: Path, tmp_path: Path) -> None:
    """With ``FLEX_WRITE_PICTURES`` the picture of the evidence is written."""
    from PIL import Image, ImageStat

    shots = {(page, mode): tmp_path / f"{page}-{mode}.png" for page in PICTURED for mode in (0, 1)}
    for (page, mode), shot in shots.items():
        script = f"addEventListener('load', () => document.querySelectorAll('[name=__palette]')[{mode}].click());"
        options = ("--virtual-time-budget=10000", f"--screenshot={shot}")
        shown(site / f"{page}.html", tmp_path, *options, script=script, width=1366, height=900)
    pictures = {key: Image.open(shot).convert("RGB") for key, shot in shots.items()}
    brightness = {key: ImageStat.Stat(picture.convert("L")).mean[0] for key, picture in pictures.items()}
    assert all(brightness[page, 0] > 200 > 120 > brightness[page, 1] for page in PICTURED), brightness
    if os.environ.get("FLEX_WRITE_PICTURES"):
        sheet = Image.new("RGB", (2 * 683, len(PICTURED) * 450))
        for (page, mode), picture in pictures.items():
            place = (mode * 683, PICTURED.index(page) * 450)
            sheet.paste(picture.resize((683, 450), Image.Resampling.LANCZOS), place)
        sheet.quantize(64).save(ROOT / "docs/results/site.png", optimize=True)


@browser
def test_no_name_in_a_table_is_divided_between_lines(site: Path, texts: dict[str, str], tmp_path: Path) -> None:
    script = r"""
    const divided = [];
    for (const cell of document.querySelectorAll("article td, article th")) {
      const nodes = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
      for (let node; (node = nodes.nextNode());) {
        for (const found of node.data.matchAll(/\w+/g)) {
          const range = document.createRange();
          range.setStart(node, found.index);
          range.setEnd(node, found.index + found[0].length);
          if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) divided.push(found[0]);
        }
      }
    }
    return divided;
    """
    found = measured(site, texts, tmp_path, 1366, script)
    assert found.keys() == texts.keys()
    assert {page: names for page, names in found.items() if names} == {}


@browser
def test_no_page_scrolls_sideways_on_a_telephone(site: Path, texts: dict[str, str], tmp_path: Path) -> None:
    script = "return [window.innerWidth, document.documentElement.scrollWidth];"
    found = measured(site, texts, tmp_path, 390, script)
    assert {page: widths for page, widths in found.items() if widths != [390, 390]} == {}
