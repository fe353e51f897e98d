"""``inspect``: what a checkpoint holds, from its manifest and headers alone.

No tensor byte is read; the cost is one small read per file. The facts are one Struct, which ``--json`` prints as it is
and :func:`show` turns into text.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from paddleformers_fc.cli import outputs
from paddleformers_fc.cli.listing import TensorFacts, list_tensors, show_tensors
from paddleformers_fc.cli.opening import FLEX, HUGGINGFACE, PADDLE, CheckpointKind, Opened, open_directory
from paddleformers_fc.cli.outputs import OutputFacts, output_facts
from paddleformers_fc.errors import NotACheckpoint, OptionError
from paddleformers_fc.formats import StoredTensor
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.storage.dtypes import item_size, to_safetensors
from paddleformers_fc.storage.files import map_paths, size_of
from paddleformers_fc.storage.manifest import Branch
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

_KINDS = {
    FLEX: "flex checkpoint",
    HUGGINGFACE: "open weights (Hugging Face)",
    PADDLE: "checkpoint of Paddle's FlexCheckpoint",
}


class JobFacts(msgspec.Struct, frozen=True):
    """The job that saved a flex checkpoint.

    Attributes:
        step: optimizer steps done.
        consumed_samples: training samples seen.
        world_size: number of ranks.
        parallel: degree per parallel axis.
        family: the model family whose mapping was used.
        written_by: program and version.
        differing_replicas: where its ranks held different numbers of the same part of a tensor, one line each.
        diverged_ties: where copies of tied tensors differ, one line each; such a checkpoint is not whole.
        run: id of the run; empty in checkpoints of earlier versions.
        branches: the runs and steps that it goes back to, first to last.
    """

    step: int
    consumed_samples: int
    world_size: int
    parallel: dict[str, int]
    family: str
    written_by: str
    differing_replicas: list[str]
    diverged_ties: list[str]
    run: str
    branches: list[Branch]


class RoleFacts(msgspec.Struct, frozen=True):
    """What is stored in one role.

    Attributes:
        tensors: how many.
        elements: numbers in them; for ``model_state`` these are the parameters.
        bytes: of those numbers.
        dtypes: number of tensors by element type.
        files: how many files hold them.
    """

    tensors: int
    elements: int
    bytes: int
    dtypes: dict[str, int]
    files: int


class Inspection(msgspec.Struct, frozen=True):
    """Everything that ``inspect`` says.

    Attributes:
        kind: ``flex_checkpoint``, ``huggingface``, ``paddle`` or ``output_directory``.
        path: the directory as it was named.
        job: who saved it; None for open weights.
        model: the keys of ``config.json`` that tell a model's size.
        files: how many files count.
        bytes: their sizes together.
        roles: what is stored, by role.
        tensors: every stored tensor that was asked for; None when none was.
        output: the checkpoints and leftovers in it; None where there are none.
    """

    kind: CheckpointKind | Literal["output_directory"]
    path: str
    job: JobFacts | None
    model: dict[str, Any]
    files: int
    bytes: int
    roles: dict[str, RoleFacts]
    tensors: list[TensorFacts] | None = None
    output: OutputFacts | None = None


def inspect(directory: AnyPath, pattern: str | None = None) -> Inspection:
    """The facts about a directory.

    Args:
        directory: a flex checkpoint, a directory of open weights, or an output directory.
        pattern: a shell pattern; the stored tensors whose names match are listed. None lists nothing.
    Raises:
        OptionError: no stored tensor matches.
        FlexError: the directory cannot be opened.
    """
    output = output_facts(directory) if isinstance(directory, Path) else None
    try:
        opened = open_directory(directory, "size")
    except NotACheckpoint:
        if output is None or pattern is not None:
            raise
        return Inspection("output_directory", str(directory), None, {}, 0, 0, {}, output=output)
    sizes = _file_sizes(opened)
    tensors = None if pattern is None else list_tensors(opened, pattern)
    if tensors == []:
        raise OptionError(
            f"No stored tensor matches {pattern!r}.",
            where=str(directory),
            next_step="Quote the pattern, as in '*q_proj*'; optimizer states end in a suffix such as .moment1_0.",
        )
    return Inspection(
        kind=opened.kind,
        path=str(directory),
        job=_job(opened),
        model={key: opened.config[key] for key in _CONFIG_KEYS if key in opened.config},
        files=len(sizes),
        bytes=sum(sizes.values()),
        roles={role: _role_facts(list(stored.values())) for role, stored in opened.catalog.roles.items()},
        tensors=tensors,
        output=output,
    )


def _file_sizes(opened: Opened) -> dict[str, int]:
    """Size by name of every file that counts."""
    if opened.checkpoint is not None:
        return {receipt.path: receipt.size for receipt in opened.checkpoint.manifest.files}
    names = {
        fragment.file
        for stored in opened.catalog.roles.values()
        for tensor in stored.values()
        for fragment in tensor.fragments
    }
    ordered = sorted(names)
    return dict(
        zip(
            ordered,
            map_paths(size_of, (opened.catalog.root / name for name in ordered), opened.catalog.root),
            strict=True,
        )
    )


def _job(opened: Opened) -> JobFacts | None:
    if opened.checkpoint is None:
        return None
    manifest = opened.checkpoint.manifest
    return JobFacts(
        manifest.step,
        manifest.consumed_samples,
        manifest.world_size,
        manifest.parallel,
        manifest.family,
        manifest.written_by,
        manifest.differences,
        [line for tie in manifest.ties for line in tie.differences],
        manifest.saved_by.id,
        manifest.saved_by.branches,
    )


def _role_facts(tensors: list[StoredTensor]) -> RoleFacts:
    dtypes: dict[str, int] = {}
    elements = size = 0
    for tensor in tensors:
        count = math.prod(tensor.shape)
        elements += count
        size += count * item_size(to_safetensors(tensor.dtype))
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + 1
    files = {fragment.file for tensor in tensors for fragment in tensor.fragments}
    return RoleFacts(len(tensors), elements, size, dtypes, len(files))


def show(found: Inspection, console: Console) -> None:
    """The facts as text."""
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
        outputs.show(found.output, console)
    if found.tensors is not None:
        console.print()
        show_tensors(found.tensors, console)


def _headline(found: Inspection) -> list[tuple[str, str]]:
    if found.kind == "output_directory":
        return [("kind", "output directory")]
    lines = [("kind", _KINDS[found.kind])]
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
            head = "ranks held different numbers of the same part of a tensor; one version of each is here:"
            lines.append(("replicas", _differences_text(head, job.differing_replicas)))
        if job.diverged_ties:
            head = "copies of tied tensors differ; this checkpoint does not count as whole:"
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
