"""Libraries in C and C++, compiled once per content of their sources, compiler and options."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path


class CannotCompile(Exception):
    """Why this machine compiles nothing."""


def shared_library(name: str, compiler: str, sources: Sequence[Path], options: Sequence[str]) -> Path:
    """Return a library, alone in its directory, which is compiled where it is not there yet.

    Args:
        name: of the library.
        compiler: of the sources.
        sources: the source files and their headers.
        options: behind the sources; libraries among them are linked.
    Raises:
        CannotCompile: there is no compiler.
    """
    program = shutil.which(compiler)
    if program is None:
        raise CannotCompile(f"{compiler} is not installed")
    version = subprocess.run([program, "--version"], check=True, capture_output=True).stdout
    parts = [version, *map(str.encode, options), *(source.read_bytes() for source in sources)]
    home = Path(os.environ.get("XDG_CACHE_HOME") or tempfile.gettempdir())
    cache = home / f"paddleformers_fc-libraries-{os.getuid()}"
    library = cache / hashlib.sha256(b"\0".join(parts)).hexdigest()[:16] / f"{name}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as unfinished:  # Several processes may run tests.
            built = Path(unfinished) / library.name
            compiled = [str(source) for source in sources if source.suffix != ".h"]
            subprocess.run([program, "-shared", "-fPIC", *compiled, "-o", str(built), *options], check=True)
            built.replace(library)
    return library
