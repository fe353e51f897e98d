"""Running the examples of a document.

The Python blocks of a Markdown file are one program, in order. A text block that follows a Python block is what that
block prints.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_examples(path: Path) -> int:
    """Run every example of a document; the number of outputs that were compared.

    Args:
        path: a Markdown file.
    Raises:
        AssertionError: where a block prints something else than the document says.
    """
    text = path.read_text(encoding="utf-8")
    scope: dict[str, Any] = {"__name__": "__main__"}
    printed, compared = "", 0
    for found in _BLOCK.finditer(text):
        kind, body = found.groups()
        line = text.count("\n", 0, found.start()) + 1
        if kind == "text":
            assert printed == body, f"{path.name}:{line}: the example prints\n{printed}"
            compared += 1
            printed = ""
            continue
        assert printed == "", f"{path.name}:{line}: an example before this line prints what the document does not show"
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile("\n" * line + body, str(path), "exec"), scope)
        printed = output.getvalue()
    assert printed == "", f"{path.name}: the last example prints what the document does not show"
    return compared
