"""The bytes that the fake accelerator has copied in this process, and the waits for its events."""

from __future__ import annotations

import ctypes
import os
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

FAKE_LIBRARY = "libfake_device"


@dataclass(frozen=True)
class CopiedBytes:
    """Bytes by way; ``late_...`` are those of them that were copied asynchronously."""

    to_device: int = 0
    to_host: int = 0
    inside: int = 0
    late_to_device: int = 0
    late_to_host: int = 0
    late_inside: int = 0

    def __sub__(self, other: CopiedBytes) -> CopiedBytes:
        return CopiedBytes(*(one - less for one, less in zip(astuple(self), astuple(other), strict=True)))


def copied() -> CopiedBytes:
    """Return what was copied so far; zeros where the fake accelerator is not loaded."""
    library = _library()
    if library is None:
        return CopiedBytes()
    numbers = (ctypes.c_uint64 * 6)()
    library.fake_device_counts(numbers)
    return CopiedBytes(*numbers)


def event_waits() -> int:
    """Return how often this process has waited for an event in a call; 0 where the fake accelerator is not loaded."""
    library = _library()
    return 0 if library is None else int(library.fake_device_event_waits())


def synchronisations() -> int:
    """Return how often this process has waited for the device; 0 where the fake accelerator is not loaded."""
    library = _library()
    return 0 if library is None else int(library.fake_device_synchronisations())


def allocated_bytes() -> int:
    """Return the bytes of all blocks of the fake accelerator."""
    library = _library()
    library.fake_device_allocated.restype = ctypes.c_uint64
    return int(library.fake_device_allocated())


def limit_memory(size: int) -> None:
    """Let the fake accelerator allocate no block beyond as many bytes of all blocks."""
    _library().fake_device_limit(ctypes.c_uint64(size))


def break_device(broken: bool) -> None:
    """Let waits for events fail from now on, or no longer."""
    _library().fake_device_break(ctypes.c_bool(broken))


def _library() -> Any:
    path = Path(os.environ.get("CUSTOM_DEVICE_ROOT", "")) / f"{FAKE_LIBRARY}.so"
    # Paddle itself sets the variable where it has no plug-in.
    return ctypes.CDLL(str(path)) if path.exists() else None
