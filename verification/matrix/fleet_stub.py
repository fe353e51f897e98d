"""Replace the import of ``paddlefleet``, which is on no public index, and of kernels in Triton.

PaddleFormers' model modules import it for their PaddleFleet classes. With this stand-in they can be imported, so that
their own classes (those that end in ``Deprecated``) and their configurations are the real ones. A PaddleFleet class
cannot be built.

Importing this module imports no Paddle.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAMES = ("paddlefleet", "paddlefleet_ops")
_KERNELS = "paddleformers.triton_kernels"
_BASES = ("TransformerConfig", "GPTConfig")  # PaddleFormers makes dataclasses of these.


class _Module(ModuleType):
    """A module that has every class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"transform_rules": {}, "encoder_or_decoder": None, "is_available": lambda *_: False})
        made = dataclasses.dataclass(made) if name in _BASES else made
        setattr(self, name, made)
        return made


class _Finder:
    """Finds every module of these packages."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the specification of a module of one of the packages."""
        known = name.partition(".")[0] in _NAMES or name == _KERNELS
        return ModuleSpec(name, self, is_package=True) if known else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module without content."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to execute."""


def install() -> None:
    """Let PaddleFormers import its PaddleFleet classes in this process, which must end with the job."""
    from paddleformers.utils import import_utils

    sys.meta_path.insert(0, _Finder())
    import_utils.is_paddlefleet_available = lambda: True


@contextmanager
def installed() -> Iterator[None]:
    """Let PaddleFormers import model modules while this holds; afterwards PaddleFleet is absent again."""
    from paddleformers.utils import import_utils

    is_available, finders = import_utils.is_paddlefleet_available, list(sys.meta_path)
    install()
    try:
        yield
    finally:
        import_utils.is_paddlefleet_available = is_available
        sys.meta_path[:] = finders
        for name in [name for name in sys.modules if name.partition(".")[0] in _NAMES]:
            del sys.modules[name]
