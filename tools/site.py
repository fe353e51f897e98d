"""A hook of MkDocs: pages from outside docs/, pages from the code, and links that are right in the repository.

A link in a page is one of the repository, so that it works where the files are read, as on GitHub. Here it becomes the
link to the page of the site with that file. Links to sources and recipes, which have no page, become text.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mkdocs.structure.files import File, Files, InclusionLevel  # noqa: E402

import paddleformers_fc  # noqa: E402
from tools import json_page, reference  # noqa: E402

DOCUMENTS = "docs/"
MOVED = {
    "README.md": "index.md",
    "README.zh-CN.md": "zh-CN.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Pages of the repository outside docs/, and where they are on the site."""
WRITTEN: dict[str, tuple[str, Callable[[], str]]] = {
    "reference/api.md": ("paddleformers_fc/api.py", reference.api),
    "reference/errors.md": ("paddleformers_fc/errors.py", reference.errors),
    "reference/json.md": ("tools/json_page.py", json_page.page),
}
"""Pages from the code: the source to which a link in the repository leads, and what writes the page."""
APPENDED = {"commands.md": reference.commands}
"""Pages of docs/ that end with a section from the code."""
SECTIONS = {"paddleformers_fc/cli/main.py": "commands.md#command-line"}
"""Sources to which a link in the repository leads, and the appended section on the site."""
PAGES = MOVED | SECTIONS | {source: page for page, (source, _) in WRITTEN.items()}
ORIGINS = {page: name for name, page in MOVED.items()}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LONG = re.compile(r"(?<=<code>)[^<]{50,}(?=</code></td>)")
_EXTERNAL = re.compile(r"[a-z]+:|#")


def on_config(config: Any) -> Any:
    """Show the version next to the name of the site, on every page."""
    config.site_name += f" {paddleformers_fc.__version__}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of docs/."""
    for name, page in MOVED.items():
        if (ROOT / name).is_file():
            files.append(_generated(config, page, (ROOT / name).read_text(encoding="utf-8")))
    for page, (_, write) in WRITTEN.items():
        files.append(_generated(config, page, write()))
    return files


def _generated(config: Any, page: str, text: str) -> File:
    return File.generated(config, page, content=text, inclusion=InclusionLevel.NOT_IN_NAV)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Add the section from the code to a page that has one, and rewrite links outside blocks of code."""
    uri = page.file.src_uri
    if uri in APPENDED:
        markdown = f"{markdown}\n{APPENDED[uri]()}"
    pieces = _FENCED.split(markdown)
    pieces[::2] = [_LINK.sub(lambda found: _link(uri, *found.groups()), piece) for piece in pieces[::2]]
    # A table or list directly below a comment is not seen as one.
    return re.sub(r"^(<!--.*-->)\n(?=\S)", r"\1\n\n", "".join(pieces), flags=re.MULTILINE)


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Let names in tables that are longer than any key, such as those of tests, break at their underscores."""
    return _LONG.sub(lambda found: re.sub(r"(::|_)", r"\1<wbr>", found[0]), content)


def _link(uri: str, picture: str, text: str, target: str) -> str:
    if _EXTERNAL.match(target):
        return f"{picture}[{text}]({target})"
    path, mark, anchor = target.partition("#")
    named = posixpath.normpath(posixpath.join(posixpath.dirname(origin(uri)), path))
    page = PAGES.get(named, named.removeprefix(DOCUMENTS) if named.startswith(DOCUMENTS) else "")
    if not page and (ROOT / named).exists():
        return text
    # A link to what does not exist stays as it is, so that the build fails.
    return (
        f"{picture}[{text}]({posixpath.relpath(page, posixpath.dirname(uri) or '.') if page else path}{mark}{anchor})"
    )


def origin(uri: str) -> str:
    """Return the path in the repository whose links a page of the site has."""
    return ORIGINS.get(uri, uri if uri in WRITTEN else DOCUMENTS + uri)
