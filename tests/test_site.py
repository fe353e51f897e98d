"""The site is built without a warning, needs no network, and its reference has everything that the code has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.limits import LIMIT
from tools import reference

ROOT = Path(__file__).resolve().parents[1]
LOADED = re.compile(
    r"<(?:script|img|iframe)[^>]*\ssrc=\"?([^\s\">]+)|<link[^>]*rel=\"?(?:stylesheet|preload|icon)[^>]*>"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site; the build is strict, so that a link or an anchor that leads nowhere fails it."""
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(directory)]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert built.returncode == 0, built.stderr
    assert "Documentation built" in built.stderr  # Without these lines MkDocs counts no warnings either.
    return directory


@pytest.mark.slow
def test_every_page_of_the_repository_is_on_the_site(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    pages = {page.with_name("index.html") if page.stem == "README" else page for page in pages}
    pages |= {
        Path(name)
        for name in ("index.html", "zh-CN.html", "changelog.html", "contributing.html", "reference/errors.html")
    }
    assert pages <= {page.relative_to(site) for page in site.rglob("*.html")}


@pytest.mark.slow
def test_no_page_loads_anything_from_the_network(site: Path) -> None:
    texts = [page.read_text(encoding="utf-8") for page in site.rglob("*.html")]
    loaded = {found[0] for text in texts for found in LOADED.finditer(text)}
    assert any("search" in one or "bundle" in one for one in loaded)
    assert not [one for one in loaded if re.search(r"[\"=]?(https?:)?//", one)]


@pytest.mark.slow
def test_tables_and_lists_of_pages_are_tables_and_lists_on_the_site(site: Path) -> None:
    assert not [page for page in site.rglob("*.html") if re.search(r"<p>(\||\* )", page.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def catalogue() -> str:
    """The page of errors, for which the sources of all modules are read."""
    return reference.errors()


def test_the_reference_has_every_key_command_name_and_error_of_the_code(catalogue: str) -> None:
    import typer

    import paddleformers_fc
    from paddleformers_fc import errors
    from paddleformers_fc.cli.main import app
    from paddleformers_fc.trainer.options import FIELD_NAMES

    options, pages = reference.options(), reference.commands()
    assert not [key for key in FIELD_NAMES if f"| `{key}` |" not in options]
    commands = typer.main.get_group(app).commands
    assert re.findall(r"^## (.*)$", pages, re.MULTILINE) == sorted(commands)
    named = {text for command in commands.values() for one in command.params for text in one.opts}
    assert not [text for text in named if text.startswith("--") and f"`{text}`" not in pages]
    api = reference.api()
    assert not [name for name in paddleformers_fc.__all__ if f"### {name}\n" not in api]
    assert re.findall(r"^## (.*)$", catalogue, re.MULTILINE) == list(errors.BY_NAME)


def test_the_catalogue_of_errors_has_the_messages_of_the_code_with_reason_and_next_step(catalogue: str) -> None:
    sections = re.split(r"^## ", catalogue, flags=re.MULTILINE)[1:]
    assert not [
        section.split()[0]
        for section in sections
        if not section.startswith("FlexError") and not ("**Why:**" in section and "**What to do:**" in section)
    ]
    rows = re.findall(r"^\| (.*) \| (.*) \|$", catalogue, re.MULTILINE)
    assert ("*path* ends too early.", "The file was truncated. Restore it or use another checkpoint.") in rows


def test_messages_that_troubleshooting_quotes_are_those_of_the_code(catalogue: str) -> None:
    messages = re.sub(r"[*\\]", "", catalogue)
    quoted = re.findall(r"\"([^\"]+)\"", (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"))
    assert quoted
    assert not [part for text in quoted for part in text.split(" ... ") if part not in messages]
