"""Chromium without a window, for pages on disk: what it shows after a script, and what a script measures in a frame."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.limits import LIMIT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, as in Debian's package chromium")

_MEASURE = Path(__file__).with_name("measure.js")


def shown(
    page: Path, directory: Path, *options: str, script: str = "", query: str = "", width: int = 1240, height: int = 1200
) -> str:
    """Return a page as Chromium shows it, after a script that acts for a person.

    Args:
        page: the file; the copy with the script is next to it, where its links lead to the same files.
        directory: gets the profile of the browser.
        options: of Chromium; without any it prints the page.
        script: JavaScript at the end of the page.
        query: of the address, with its question mark.
        width: of the window, in pixels, at least 500.
        height: of the window, in pixels.
    """
    acting = page.with_name(f"acting-{page.name}")
    acting.write_text(page.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>"))
    try:
        return _chromium(
            directory, f"--window-size={width},{height}", *(options or ("--dump-dom",)), acting.as_uri() + query
        )
    finally:
        acting.unlink()


def measured(root: Path, pages: Iterable[str], directory: Path, width: int, script: str) -> dict[str, Any]:
    """Return what a script returns for each page in a frame of this width, which may be less than a window's.

    Args:
        root: the directory of the pages.
        pages: their paths in it.
        directory: gets the profile of the browser.
        width: of the frame, in pixels.
        script: the body of a function of ``document`` and ``window``.
    """
    frames = root / "measured.html"
    program = _MEASURE.read_text().replace("PAGES", json.dumps(sorted(pages))).replace("WIDTH", str(width))
    frames.write_text(f'<pre id="found"></pre><script>{program.replace("SCRIPT", script)}</script>')
    try:
        options = ("--allow-file-access-from-files", "--virtual-time-budget=600000", "--dump-dom")
        text = _chromium(directory, f"--window-size={width + 100},1000", *options, frames.as_uri())
    finally:
        frames.unlink()
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', text, re.DOTALL)
    values = json.loads(html.unescape(found))
    assert isinstance(values, dict)
    return values


def _chromium(directory: Path, *options: str) -> str:
    command = [
        str(CHROMIUM),
        *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"),
        *(f"--user-data-dir={directory / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND", *options),
    ]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=LIMIT, check=True
    ).stdout
