"""``explain``, ``aoa`` and ``families``: print the boxes and rules of a tensor, statements, or declared families."""

from __future__ import annotations

import sys

import msgspec

from paddleformers_fc import output
from paddleformers_fc.families.registry import family_classes, own_families
from paddleformers_fc.formats.aoa_statements import StatementList, sizes_text
from paddleformers_fc.mapping import Rule
from paddleformers_fc.mapping.boxes import whole
from paddleformers_fc.plan.explain import CANONICAL, BoxSource, ExplainedTensor, Explanation


def show(found: Explanation, console: output.Console) -> None:
    """Print every tensor with this name, its boxes and its rules."""
    console.print(f"{found.name} in {found.path}", style="bold")
    for tensor in found.tensors:
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        output.print_styled(console, (f"{tensor.role}, {tensor.side}  ", "bold cyan"), f"{tensor.dtype} {shape}")
        verb = "is read from" if tensor.side == CANONICAL else "is read by"
        console.print(f"  {verb}")
        for box in tensor.boxes:
            console.print(f"    {_box_text(box, tensor)}", soft_wrap=True)
        for rule in tensor.rules:
            console.print(f"  rule  {_rule_text(rule)}", soft_wrap=True)
        if tensor.tied:
            console.print(f"  tied with {', '.join(tensor.tied)}: copies must be equal", soft_wrap=True)


def _box_text(box: BoxSource, tensor: ExplainedTensor) -> str:
    """Return both sides of a box, the tensor's own side first, and the location of its bytes."""
    stored, canonical = f"{box.stored} {box.stored_box}", f"{box.canonical} {box.canonical_box}"
    own, other = (
        (f"{box.canonical_box} (canonical)", f"{stored} (stored)")
        if tensor.side == CANONICAL
        else (f"{box.stored_box} (stored)", f"{canonical} (canonical)")
    )
    transposed = "" if list(box.axes) == sorted(box.axes) else f", axes {list(box.axes)}"
    shard = "" if box.shard == whole(tensor.shape) else f", in the shard {box.shard}"
    return f"{own} = {other}{transposed}  ({box.file} at byte {box.begin:,}{shard})"


def _rule_text(rule: Rule) -> str:
    """Return a rule as text: its tensors, its parts, and how each side interleaves them."""
    count = sum(len(part) if isinstance(part, tuple) else 1 for part in rule.parts)
    facts = [f"parts {list(rule.parts)} along axis {rule.axis}"] if count > 1 else []
    if list(rule.axes) != sorted(rule.axes):
        facts.append(f"axes {list(rule.axes)}")
    for side, blocks in (("canonical", rule.source_blocks), ("stored", rule.target_blocks)):
        facts += [f"{side} side interleaved in {blocks} groups"] if blocks > 1 else []
    facts += [f"cast to {rule.cast}"] if rule.cast else []
    facts += [str(rule.slab)] if rule.slab is not None else []
    sides = f"{', '.join(rule.sources)} (canonical) = {', '.join(rule.targets)} (stored)"
    return sides + (f": {'; '.join(facts)}" if facts else "")


class FamilyFacts(msgspec.Struct, frozen=True):
    """A model family.

    Attributes:
        family: the ``model_type``.
        classes: libraries that have its model classes.
    """

    family: str
    classes: list[str]


class FamilyTable(msgspec.Struct, frozen=True):
    """The families of this package.

    Attributes:
        families: the families, sorted by name.
    """

    families: list[FamilyFacts]


def family_table() -> FamilyTable:
    """Return every declared family."""
    return FamilyTable([FamilyFacts(one.name, family_classes(one)) for one in own_families()])


def show_families(found: FamilyTable, console: output.Console) -> None:
    """Print a row per family."""
    from rich import box
    from rich.table import Table

    table = Table("family", "classes", box=box.SIMPLE_HEAD, pad_edge=False)
    for one in found.families:
        table.add_row(one.family, ", ".join(one.classes))
    console.print(table)


def show_statements(found: StatementList, console: output.Console) -> None:
    """Print the statements, one per line."""
    if found.toy_sizes is not None:
        sys.stderr.write(f"Statements for a toy model: {sizes_text(found.toy_sizes)}\n")
    for statement in found.aoa_statements:
        console.print(statement, soft_wrap=True)
