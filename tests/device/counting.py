"""The bytes that the fake accelerator has copied in this process."""

from __future__ import annotations

import ctypes
import os
from dataclasses import astuple, dataclass
from pathlib import Path

from tests.device.building import LIBRARY


@dataclass(frozen=True)
class CopiedBytes:
    """Bytes by way; ``late_...`` are those of them that were copied asynchronously."""

    to_device: int = 0
    to_host: int = 0
    inside: int = 0
    late_to_device: int = 0
    late_to_host: int = 0
    late_inside: int = 0

    def __add__(self, other: CopiedBytes) -> CopiedBytes:
        return CopiedBytes(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: CopiedBytes) -> CopiedBytes:
        return CopiedBytes(*(one - less for one, less in zip(astuple(self), astuple(other), strict=True)))


def copied() -> CopiedBytes:
    """Return what was copied so far; zeros where the fake accelerator is not loaded."""
    library = Path(os.environ.get("CUSTOM_DEVICE_ROOT", "")) / LIBRARY
    if not library.exists():  # Paddle itself sets the variable where it has no plug-in.
        return CopiedBytes()
    numbers = (ctypes.c_uint64 * 6)()
    ctypes.CDLL(str(library)).fake_device_counts(numbers)
    return CopiedBytes(*numbers)
