"""Compile the fake accelerator, once per content of its sources, compiler and version of Paddle."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "plugin"
LIBRARY = "libfake_device.so"


class CannotBuild(Exception):
    """Why this machine has no fake accelerator."""


def build() -> Path:
    """Return the directory of the compiled plug-in, for ``CUSTOM_DEVICE_ROOT``; 20 s where it is not there yet.

    Raises:
        CannotBuild: no compiler, or no Paddle.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise CannotBuild("g++ is not installed")
    found = importlib.util.find_spec("paddle")
    if found is None or not found.submodule_search_locations:
        raise CannotBuild("paddle is not installed")
    paddle = Path(found.submodule_search_locations[0])
    directory = _cache() / _key(compiler)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:  # Several processes may run tests.
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = directory / "root" / LIBRARY
        if not library.exists():
            _compile(compiler, paddle, library)
    return library.parent


def _compile(compiler: str, paddle: Path, library: Path) -> None:
    library.parent.mkdir(exist_ok=True)
    unfinished = library.parent.parent / LIBRARY
    command = [compiler, "-O1", "-std=c++17", "-shared", "-fPIC", "-w"]
    command += [f"-I{paddle / 'include'}", f"-I{paddle / 'include' / 'third_party'}"]
    command += [*map(str, sorted(SOURCES.glob("*.cc"))), "-o", str(unfinished), str(paddle / "base" / "libpaddle.so")]
    subprocess.run(command, check=True)
    unfinished.rename(library)


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True).stdout
    parts = [version, importlib.metadata.version("paddlepaddle").encode()]
    parts += [source.read_bytes() for source in sorted(SOURCES.iterdir())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home or tempfile.gettempdir()) / f"paddleformers_fc-fake-device-{os.getuid()}"
