"""The peak of this process' memory during a piece of work, as the kernel counts it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")


def with_peak(work: Callable[[], _T]) -> tuple[_T, int]:
    """The work's result, and how many bytes the resident memory rose above where it stood before.

    Source: ``clear_refs`` in proc(5), where 5 resets the peak ``VmHWM``.
    """
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status("VmRSS")
    result = work()
    return result, max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status does not say {field}")
    return int(found[1]) * 1024
