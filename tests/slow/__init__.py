"""A file server whose metadata is slow, stale or failing: a library for LD_PRELOAD, compiled once per content."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "metadata.c"


def library() -> Path | None:
    """Return the compiled library; None without a compiler."""
    compiler = shutil.which("gcc")
    if compiler is None:
        return None
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"paddleformers_fc-slow-metadata-{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as unfinished:
            built = Path(unfinished) / path.name
            subprocess.run([compiler, "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(built), "-ldl"], check=True)
            built.replace(path)
    return path
