"""``inspect``: what a checkpoint contains, from its manifest and headers alone.

No tensor byte is read; the cost is one small read per file. The facts are one Struct, which ``--json`` prints and
:func:`show` formats as text.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paddleformers_fc.cli.cleaning import show_leftovers
from paddleformers_fc.cli.listing import show_tensors
from paddleformers_fc.errors import NotACheckpoint, OptionError
from paddleformers_fc.execute.output_directory import OutputFacts, output_facts
from paddleformers_fc.formats import FORMATS, open_checkpoint
from paddleformers_fc.formats.inspection import JobFacts, RoleFacts, TensorFacts, job_facts, list_tensors, role_facts
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import count_text, size_text

if TYPE_CHECKING:
    from rich.console import Console

_CONFIG_KEYS = (
    "model_type",
    "architectures",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "moe_num_experts",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "tie_word_embeddings",
)


_MOST_DIFFERENCES = 20
"""How many lines about replicas that differ are shown as text."""

_OUTPUT_DIRECTORY = "output_directory"


class Inspection(msgspec.Struct, frozen=True):
    """The facts that ``inspect`` reports.

    Attributes:
        kind: name of the format, or ``output_directory``.
        path: the directory as it was named.
        job: who saved it; None for open weights.
        model: the keys of ``config.json`` that determine a model's size.
        files: how many files count.
        bytes: their sizes together.
        roles: what is stored, by role.
        tensors: every stored tensor that was asked for; None when none was.
        output: the checkpoints and leftovers in it; None where there are none.
    """

    kind: str
    path: str
    job: JobFacts | None
    model: dict[str, Any]
    files: int
    bytes: int
    roles: dict[str, RoleFacts]
    tensors: list[TensorFacts] | None = None
    output: OutputFacts | None = None


def inspect(directory: AnyPath, pattern: str | None = None) -> Inspection:
    """Return the facts about a directory.

    Args:
        directory: a flex checkpoint, a directory of open weights, or an output directory.
        pattern: a shell pattern; the stored tensors whose names match are listed. None lists nothing.
    Raises:
        OptionError: no stored tensor matches.
        FlexError: the directory cannot be opened.
    """
    output = output_facts(directory) if isinstance(directory, Path) else None
    try:
        opened = open_checkpoint(directory)
    except NotACheckpoint:
        if output is None or pattern is not None:
            raise
        return Inspection(_OUTPUT_DIRECTORY, str(directory), None, {}, 0, 0, {}, output=output)
    sizes = opened.file_sizes
    tensors = None if pattern is None else list_tensors(opened, pattern)
    if tensors == []:
        raise OptionError(
            f"No stored tensor matches {pattern!r}.",
            where=str(directory),
            next_step="Quote the pattern, as in '*q_proj*'; optimizer states end in a suffix such as .moment1_0.",
        )
    return Inspection(
        kind=opened.format.name,
        path=str(directory),
        job=job_facts(opened),
        model={key: opened.config[key] for key in _CONFIG_KEYS if key in opened.config},
        files=len(sizes),
        bytes=sum(sizes.values()),
        roles=role_facts(opened),
        tensors=tensors,
        output=output,
    )


def show(found: Inspection, console: Console) -> None:
    """Print the facts."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(found.path, "bold"))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    for label, value in _headline(found):
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


def _headline(found: Inspection) -> list[tuple[str, str]]:
    if found.kind == _OUTPUT_DIRECTORY:
        return [("kind", "output directory")]
    lines = [("kind", next(one.title for one in FORMATS if one.name == found.kind))]
    if found.job is not None:
        job = found.job
        lines.append(("step", f"{job.step:,}, after {count_text(job.consumed_samples, 'sample')}"))
        lines.append(("saved by", f"{job.written_by}, {count_text(job.world_size, 'rank')}{_degrees(job.parallel)}"))
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
    lines.append(("on disk", f"{count_text(found.files, 'file')}, {size_text(found.bytes)}"))
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
