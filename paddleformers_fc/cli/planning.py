"""``plan``: print the forecast of a load, or write it as a page for a browser."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from paddleformers_fc import output
from paddleformers_fc.cli.settings import read_settings
from paddleformers_fc.errors import OptionError
from paddleformers_fc.layout.batch_sizes import StepSamples
from paddleformers_fc.plan.forecast import GridPlan, PlanFlows, RankForecast
from paddleformers_fc.storage.files import exists, is_directory, open_local, read_range, replace_file
from paddleformers_fc.text import count_text, fold, size_text

_SHOWN = 24


def read_aoa_config(file: Path) -> Mapping[str, object]:
    """Return the ``aoa_config`` of a training configuration, or of a file that contains only statements.

    Raises:
        OptionError: the file contains no statements.
    """
    if not found.keep:
        return f"{text}; no setting keeps {found.saved:,}"
    settings = ", ".join(f"{key}: {value}" for key, value in found.keep.items())
    return f"{text}; to keep {found.saved:,}, set {settings}"


def _alike(ranks: Iterable[RankForecast]) -> list[tuple[str, RankForecast]]:
    """Merge consecutive ranks with the same numbers into one row."""
    rows: list[tuple[int, RankForecast]] = []
    for rank in ranks:
        first, last = rows[-1] if rows else (rank.rank, None)
        if last is not None and (last.bytes, last.read, last.items) == (rank.bytes, rank.read, rank.items):
            rows[-1] = (first, rank)
        else:
            rows.append((rank.rank, rank))
    return [(str(first) if first == last.rank else f"{first}-{last.rank}", last) for first, last in rows]
