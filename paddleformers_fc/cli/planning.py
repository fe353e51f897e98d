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
    settings = read_settings(file)
    found = settings.get("aoa_config", settings)
    if not isinstance(found, dict) or "aoa_statements" not in found:
        raise OptionError(
            "The file contains no aoa_config.",
            where=str(file),
            next_step="Write the statements as a list under the key aoa_statements; see docs/aoa.md.",
        )
    return found


def write_page(file: Path, found: PlanFlows, ranks_per_node: int) -> None:
    """Write a plan as one self-contained page, which needs no network.

    Args:
        file: the page; replaced if it is one already.
        found: the plan.
        ranks_per_node: how ranks are grouped.
    Raises:
        OptionError: the file exists and is not such a page, or its directory does not exist.
        StorageError: writing has failed.
    """
    template = Path(__file__).with_name("plan_report.html").read_text(encoding="utf-8")
    _check_is_plan(file, template.partition("</title>")[0].encode())
    document = {**msgspec.to_builtins(found), "ranks_per_node": ranks_per_node}
    # Tensor names are untrusted: they must not close the script element.
    text = json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")
    page = template.replace("@DATA@", text, 1).encode("utf-8", "backslashreplace")
    replace_file(file, page)


def _check_is_plan(file: Path, page_begin: bytes) -> None:
    """Check that a file may be replaced: it does not exist, or is the page of a plan."""
    if not is_directory(file.parent):
        raise OptionError(
            f"Directory {file.parent} does not exist.",
            where=f"--html {file}",
            next_step="Create it, or name another file.",
        )
    if exists(file) and _begin_of(file, len(page_begin)) != page_begin:
        raise OptionError(
            f"{file} exists and is not the page of a plan.",
            where=f"--html {file}",
            next_step="Name a file that does not exist.",
        )


def _begin_of(file: Path, count: int) -> bytes:
    with open_local(file) as opened:
        return bytes(read_range(opened, 0, min(count, opened.size)))


def show(found: GridPlan, console: output.Console) -> None:
    """Print the plan."""
    console.print(f"{found.path} -> {found.to}", style="bold")
    facts = {
        "ranks": f"{found.world_size:,}, {found.dtype}",
        "held": f"{size_text(found.bytes)} by all ranks together",
        "read": f"{size_text(found.read)}, {found.amplification:.0%} of the bytes held",
        "boxes": f"{found.items:,}, each a part of a stored tensor that one rank reads",
        "peak": f"{size_text(found.peak)} on the rank that needs most: its tensors, and scratch memory to read them",
    }
    if found.samples is not None:
        facts["samples per step"] = _samples_text(found.samples, found.to)
    console.print(output.facts_table(facts.items()))
    console.print()
    table = output.table_of("ranks", ("held", "read", "boxes", "peak"))
    rows = _alike(found.ranks)
    for numbers, rank in rows[:_SHOWN]:
        table.add_row(numbers, size_text(rank.bytes), size_text(rank.read), f"{rank.items:,}", size_text(rank.peak))
    console.print(table)
    if len(rows) > _SHOWN:
        console.print(f"and {count_text(len(rows) - _SHOWN, 'row')} more; --json has all ranks")
    casts = [f"{cast.name}: {cast.stored} to {cast.wanted}" for cast in found.cast]
    for heading, lines in (("not loaded", found.fresh), ("dropped", found.dropped), ("cast", casts)):
        if lines:
            output.print_styled(console, (f"{heading}  ", "dim"), count_text(len(lines), "tensor"))
        for line in fold(lines):
            console.print(f"  {line}", soft_wrap=True)


def _samples_text(found: StepSamples, to: str) -> str:
    if found.planned == found.saved:
        return f"{found.saved:,}, as saved"
    text = f"{found.saved:,} saved, {found.planned:,} with {to}"
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
