"""``inspect``: the facts of a directory as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddleformers_fc.cli.cleaning import show_leftovers
from paddleformers_fc.cli.listing import show_tensors
from paddleformers_fc.execute.inspect import OUTPUT_DIRECTORY, Inspection
from paddleformers_fc.execute.output_directory import OutputFacts
from paddleformers_fc.formats import FORMATS
from paddleformers_fc.formats.inspection import RoleFacts
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.text import count_text, size_text

if TYPE_CHECKING:
    from rich.console import Console

_MOST_DIFFERENCES = 20
"""Maximum number of lines about replicas that differ, as text."""


def show(found: Inspection, console: Console, files: str = "on disk") -> None:
    """Print the facts; ``files`` labels the number of files and their bytes."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(found.path, "bold"))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    for label, value in _headline(found, files):
        facts.add_row(f"  {label}", value)
    console.print(facts)
    console.print()
    if found.roles:
        console.print(_role_table(found.roles))
    if found.output is not None:
        _show_output(found.output, console)
    if found.tensors is not None:
        console.print()
        show_tensors(found.tensors, console)


def _show_output(found: OutputFacts, console: Console) -> None:
    """Print a line per checkpoint, then a line per leftover."""
    for one in found.checkpoints:
        run = f", run {one.run}" if one.run else ""
        console.print(f"  {one.name}{run}{f': {one.fault}' if one.fault else ''}")
    if found.leftovers:
        console.print("  leftovers (paddleformers-fc clean removes those that you confirm):")
        show_leftovers(found.leftovers, console)


def _headline(found: Inspection, files: str) -> list[tuple[str, str]]:
    if found.kind == OUTPUT_DIRECTORY:
        return [("kind", "output directory")]
    lines = [("kind", next(one.title for one in FORMATS if one.name == found.kind))]
    if found.job is not None:
        job = found.job
        lines.append(("step", f"{job.step:,}, after {count_text(job.consumed_samples, 'sample')}"))
        lines.append(("saved by", f"{job.written_by}, {count_text(job.world_size, 'rank')}{_degrees(job.parallel)}"))
        if job.time:
            lines.append(("saved", f"{job.time} on {job.host}"))
        lines.append(("family", job.family))
        if job.run:
            lines.append(
                ("run", job.run + "".join(f", from step {one.step} of {one.run}" for one in job.branches[-1:]))
            )
        if job.differing_replicas:
            head = "ranks held different numbers of the same part of a tensor; one version of each is stored:"
            lines.append(("replicas", _differences_text(head, job.differing_replicas)))
        if job.diverged_ties:
            head = "copies of tied tensors differ; an automatic resume skips this checkpoint:"
            lines.append(("tied tensors", _differences_text(head, job.diverged_ties)))
    if found.model:
        lines.append(("model", _model_text(found.model)))
    if MODEL_STATE in found.roles:
        lines.append(("parameters", f"{found.roles[MODEL_STATE].elements:,}"))
    lines.append((files, f"{count_text(found.files, 'file')}, {size_text(found.bytes)}"))
    return lines


def _differences_text(head: str, differences: list[str]) -> str:
    shown = differences[:_MOST_DIFFERENCES]
    left = len(differences) - len(shown)
    return "\n".join([head, *shown, *([f"and {left:,} more, all with --json"] if left else [])])


def _degrees(parallel: dict[str, int]) -> str:
    used = [f"{axis} {degree}" for axis, degree in parallel.items() if degree > 1]
    return f" ({', '.join(used)})" if used else ""


def _model_text(model: dict[str, Any]) -> str:
    numbers = [
        f"{key.removeprefix('num_').replace('_', ' ')} {value}"
        for key, value in model.items()
        if isinstance(value, int) and not isinstance(value, bool)
    ]
    if model.get("tie_word_embeddings"):
        numbers.append("tied embeddings")
    names = [str(model.get("model_type", "")), *map(str, model.get("architectures") or ())]
    return ", ".join([*filter(None, names), *numbers])


def _role_table(roles: dict[str, RoleFacts]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=True)
    table.add_column("role", style="cyan")
    for heading in ("tensors", "elements", "bytes"):
        table.add_column(heading, justify="right")
    table.add_column("dtypes")
    table.add_column("files", justify="right")
    for role, facts in roles.items():
        dtypes = ", ".join(
            dtype if len(facts.dtypes) == 1 else f"{dtype} ({count})" for dtype, count in sorted(facts.dtypes.items())
        )
        table.add_row(
            role, f"{facts.tensors:,}", f"{facts.elements:,}", size_text(facts.bytes), dtypes, f"{facts.files:,}"
        )
    return table
