"""Functions of the package that do more than usual on a rank; what a rank changes ends with its job."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def precede(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Let a function of a module, or a method of a class, first call ``act`` with its arguments."""
    native = getattr(owner, name)

    def preceded(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return native(*args, **kwargs)

    setattr(owner, name, preceded)


@contextlib.contextmanager
def without(owner: Any, name: str) -> Iterator[None]:
    """Context manager in which a class or module has this attribute under another name."""
    original = vars(owner)[name]
    delattr(owner, name)
    setattr(owner, f"{name}_renamed", original)
    try:
        yield
    finally:
        delattr(owner, f"{name}_renamed")
        setattr(owner, name, original)
