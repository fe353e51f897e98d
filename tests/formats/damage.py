"""What changes a copy of a checkpoint, and the assertion that it is then refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.errors import FlexError

Damage = Callable[[Path], object]


def assert_refused(work: Callable[[], object], kind: type[FlexError], message: str, *evidence: str) -> None:
    """Assert that a call raises an error with advice, and with each of these texts in a line of its evidence."""
    with pytest.raises(kind, match=message) as caught:
        work()
    for text in evidence:
        assert any(text in line for line in caught.value.evidence), caught.value.evidence
    assert caught.value.next_step


def copied(source: Path, target: Path) -> Path:
    """A copy whose files are links to the same bytes, to be changed by name alone."""
    target.mkdir()
    for path in source.iterdir():
        os.link(path, target / path.name)
    return target


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a directory."""
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def edit_json(path: Path, **changes: Any) -> None:
    """Change fields of a file of a copy, which may be a link to the file of the original."""
    content = json.loads(path.read_text()) | changes
    path.unlink()
    path.write_text(json.dumps(content))


def without(name: str) -> Damage:
    """Remove a file."""
    return lambda directory: (directory / name).unlink()


def with_file(name: str) -> Damage:
    """Add an empty file."""
    return lambda directory: (directory / name).touch()


def with_json(name: str, **changes: Any) -> Damage:
    """Change fields of a file."""
    return lambda directory: edit_json(directory / name, **changes)


def renamed(name: str, new: str) -> Damage:
    """Rename a file."""
    return lambda directory: (directory / name).rename(directory / new)


def replaced(name: str, old: bytes, new: bytes) -> Damage:
    """Change bytes of a file, at one place."""

    def work(directory: Path) -> None:
        data = (directory / name).read_bytes()
        assert data.count(old) == 1
        (directory / name).unlink()
        (directory / name).write_bytes(data.replace(old, new))

    return work


def linked_outside(name: str) -> Damage:
    """Move a file out of the checkpoint, and leave a link to it."""

    def work(directory: Path) -> None:
        outside = directory.with_name(f"outside of {directory.name}")
        (directory / name).rename(outside)
        (directory / name).symlink_to(outside)

    return work
