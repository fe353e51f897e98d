"""``inspect``, ``list`` and ``clean``: print a checkpoint and its tensors, or an output directory and its leftovers.

Tensors with the same shards whose names differ only in indices share an entry, such as ``layers.{0...31}``, and an
entry shows at most four shards. JSON output lists all tensors and shards.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any

from paddleformers_fc import output
from paddleformers_fc.execute import output_directory
from paddleformers_fc.formats.inspection import RoleFacts, ShardFacts, TensorFacts
from paddleformers_fc.formats.registry import FORMATS
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.mapping.boxes import shifted
from paddleformers_fc.text import count_text, fold, size_text
from paddleformers_fc.trainer.resume import degrees_text


def show_cleaned(found: output_directory.Cleaned, console: output.Console) -> None:
    """Print a line per directory, and the total."""
    console.print(found.path, style="bold")
    for one in found.left:
        console.print(_leftover_line(one), soft_wrap=True)
    for one in found.removed:
        console.print(f"  removed{_leftover_line(one)}", soft_wrap=True)
    size = size_text(sum(one.bytes for one in found.removed))
    summary = f": {count_text(len(found.removed), 'leftover')}, {size}; {len(found.left)} left"
    output.print_styled(console, ("removed", "bold green"), summary)


def _leftover_line(one: output_directory.LeftoverFacts) -> str:
    """Return the line of a leftover: its name, its size and the reason why it is there."""
    return f"  {one.name}  {size_text(one.bytes)}: {one.why}"


def _show_leftovers(found: output_directory.OutputFacts, console: output.Console) -> None:
    """Print what ``clean`` would remove, and what it keeps."""
    command = f"paddleformers-fc clean {shlex.quote(found.path)}"
    removable = [one for one in found.leftovers if one.removable]
    if removable:
        console.print(f"  {command} removes these, after a confirmation for each:", soft_wrap=True)
    for one in removable:
        console.print(_leftover_line(one), soft_wrap=True)
    if len(removable) < len(found.leftovers):
        console.print("  it keeps these:" if removable else f"  {command} keeps these:", soft_wrap=True)
    for one in found.leftovers:
        if not one.removable:
            console.print(_leftover_line(one), soft_wrap=True)


def show_listed(found: output_directory.ListedFacts, console: output.Console) -> None:
    """Print an output directory and the local tier of its run on this machine."""
    show_output(found, console)
    if found.local is not None:
        console.print("\nlocal tier on this machine:")
        show_output(found.local, console)


def show_output(found: output_directory.OutputFacts, console: output.Console) -> None:
    """Print a row per checkpoint, the faults of incomplete ones, and the leftovers."""
    from rich.text import Text

    console.print(found.path, style="bold")
    headings = ("step", "ranks", "layout", "size", "saved (UTC)", "complete")
    table = output.table_of("checkpoint", headings, left=("layout", "saved (UTC)", "complete"))
    for one in found.checkpoints:
        state = Text("FAILED", "bold red") if one.fault else Text("OK", "green")
        step, ranks = "" if one.step is None else f"{one.step:,}", str(one.world_size or "")
        when = one.time.replace("T", " ").removesuffix("Z")
        layout = degrees_text(one.parallel) if one.world_size else ""
        table.add_row(one.name, step, ranks, layout, size_text(one.bytes), when, state)
    if found.checkpoints:
        console.print(table)
    for one in found.checkpoints:
        if one.fault:
            console.print(f"  {one.name}: {one.fault}", soft_wrap=True)
    _show_leftovers(found, console)
    complete = sum(not one.fault for one in found.checkpoints)
    console.print(
        f"{count_text(len(found.checkpoints), 'checkpoint')}, {complete} complete, "
        f"{size_text(sum(one.bytes for one in found.checkpoints))}; {count_text(len(found.leftovers), 'leftover')}"
    )
    below = [] if found.checkpoints else output_directory.directories_below(Path(found.path))
    if below:
        console.print("Subdirectories with checkpoints; list one of them:")
        for name in fold(below):
            console.print(f"  {name}", soft_wrap=True)


_SHOWN_SHARDS = 4
_SHOWN_FILES = 3


def show_tensors(tensors: Iterable[TensorFacts], console: output.Console) -> None:
    """Print tensors by role, and below each tensor a line per shard with its box and files."""
    for role, rows in groupby(_rows(tensors), key=itemgetter(0)):
        console.print(role, style="bold cyan")
        for _, name, alike in rows:
            first = alike[0]
            shape = " x ".join(map(str, first.shape)) or "scalar"
            form = f"{first.dtype} {shape}, {size_text(first.bytes)}"
            output.print_styled(console, f"  {name}  ", (form, "green"))
            for line in _shard_lines(alike):
                console.print(f"      {line}", style="dim")


def _rows(tensors: Iterable[TensorFacts]) -> Iterator[tuple[str, str, list[TensorFacts]]]:
    """Yield role, folded name and tensors of every row; the tensors of a row have the same shards."""
    groups: dict[tuple[object, ...], list[TensorFacts]] = {}
    for tensor in tensors:
        boxes = tuple((piece.offset, piece.shape, piece.flat) for piece in tensor.pieces)
        groups.setdefault((tensor.role, tensor.dtype, tensor.shape, boxes, _template(tensor.name)), []).append(tensor)
    for alike in groups.values():
        names = fold((tensor.name for tensor in alike), limit=len(alike))
        if len(names) == 1:
            yield alike[0].role, names[0], alike
        else:
            yield from ((tensor.role, tensor.name, [tensor]) for tensor in alike)


def _template(name: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def _shard_lines(alike: list[TensorFacts]) -> Iterator[str]:
    first = alike[0]
    for index, piece in enumerate(first.pieces[:_SHOWN_SHARDS]):
        files = sorted({PurePosixPath(tensor.pieces[index].file).stem for tensor in alike})
        names = " or ".join(files) if len(files) <= _SHOWN_FILES else f"{len(files)} files"
        yield f"{_box_text(piece, first.shape)}  {names}"
    if len(first.pieces) > _SHOWN_SHARDS:
        yield f"and {len(first.pieces) - _SHOWN_SHARDS} more"


def _box_text(piece: ShardFacts, shape: tuple[int, ...]) -> str:
    box = "" if piece.shape == shape else str(shifted(piece.shape, piece.offset))
    if piece.flat is None:
        return box or "whole"
    return f"{box} elements {piece.flat[0]}:{piece.flat[1]}".lstrip()


_MOST_DIFFERENCES = 20
"""Maximum number of printed lines about replicas that differ."""


def show(found: output_directory.Inspection, console: output.Console, files: str = "on disk") -> None:
    """Print the facts; ``files`` labels the number of files and their bytes."""
    console.print(found.path, style="bold")
    console.print(output.facts_table(_headline(found, files)))
    console.print()
    if found.roles:
        console.print(_role_table(found.roles))
    if found.output is not None:
        _show_output(found.output, console)
    if found.tensors is not None:
        console.print()
        show_tensors(found.tensors, console)


def _show_output(found: output_directory.OutputFacts, console: output.Console) -> None:
    """Print a line per checkpoint, then a line per leftover."""
    for one in found.checkpoints:
        run = f", run {one.run}" if one.run else ""
        console.print(f"  {one.name}{run}{f': {one.fault}' if one.fault else ''}")
    _show_leftovers(found, console)


def _headline(found: output_directory.Inspection, files: str) -> list[tuple[str, str]]:
    if found.kind == output_directory.OUTPUT_DIRECTORY:
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
            head = "ranks had different values of the same part of a tensor; one version of each is stored:"
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


def _role_table(roles: dict[str, RoleFacts]) -> output.Table:
    table = output.table_of("role", ("tensors", "elements", "bytes", "dtypes", "files"), left=("dtypes",))
    for role, facts in roles.items():
        dtypes = ", ".join(
            dtype if len(facts.dtypes) == 1 else f"{dtype} ({count})" for dtype, count in sorted(facts.dtypes.items())
        )
        table.add_row(
            role, f"{facts.tensors:,}", f"{facts.elements:,}", size_text(facts.bytes), dtypes, f"{facts.files:,}"
        )
    return table
