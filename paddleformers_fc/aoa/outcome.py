"""From what the statements leave behind to a mapping, and what no statement may leave behind.

The boxes of every right tensor are collected; what does not fit its shape or dtype, what is assigned and wanted
nowhere, and what is read twice is noted with the statement that did it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping as MappingABC
from dataclasses import dataclass
from math import prod

from paddleformers_fc.aoa.evaluate import EvaluationResult
from paddleformers_fc.aoa.expand import Step
from paddleformers_fc.aoa.faults import Fault, Faults
from paddleformers_fc.aoa.names import NameIndex
from paddleformers_fc.aoa.tensors import AoaTensor
from paddleformers_fc.aoa.values import Value, value_of
from paddleformers_fc.mapping.correspondences import Correspondence, Mapping, TensorSpec, coalesced

Tensors = MappingABC[str, AoaTensor]


@dataclass(frozen=True)
class _Output:
    """A right tensor, what fills it, and the step that says so; None where equal names do."""

    name: str
    value: Value
    step: Step | None


def mapping_of(
    outcome: EvaluationResult, left: Tensors, right: Tensors | None, aliases: MappingABC[str, str], faults: Faults
) -> Mapping:
    """Return the mapping of an outcome.

    Args:
        outcome: of all statements.
        left: the tensors on the left side.
        right: the tensors on the right side, or None where they are what the outcome holds.
        aliases: tied right names and their owners.
        faults: where to note what does not fit.
    """
    outputs = list(_derived(outcome, left) if right is None else _wanted(outcome, left, right))
    if right is not None:
        _refuse_unwanted(outcome, right, faults)
        _refuse_unfit(outputs, left, right, faults)
    _refuse_nothing(outcome, left, right, faults)
    kept = _without_aliases(outputs, aliases, faults)
    items = {output.name: _named(output, left) for output in kept}
    _refuse_reread(kept, left, faults)
    targets = (
        {output.name: _spec(output, left) for output in kept}
        if right is None
        else {name: tensor.spec for name, tensor in right.items() if name not in aliases}
    )
    return Mapping.of(
        sources={name: tensor.spec for name, tensor in left.items()},
        targets=targets,
        correspondences=tuple(item for found in items.values() for item in found),
        fresh=frozenset(name for name in outcome.fresh if name in targets),
        dropped=frozenset(name for name in outcome.dropped if name in left),
    )


def _wanted(outcome: EvaluationResult, left: Tensors, right: Tensors) -> Iterator[_Output]:
    """Right tensors by assignment, and by equal names."""
    for name in right:
        if name in outcome.values:
            value = outcome.values[name]
            if value is not None:
                yield _Output(name, value, outcome.assigned[name])
        elif name in left and name not in outcome.fresh and name not in outcome.dropped:
            yield _Output(name, value_of(name, left[name].shape), None)


def _derived(outcome: EvaluationResult, left: Tensors) -> Iterator[_Output]:
    """Report left tensors and assigned names that no statement reads, if the right side is unknown."""
    for name, tensor in left.items():
        if name not in outcome.readers and name not in outcome.dropped and name not in outcome.unread:
            yield _Output(name, value_of(name, tensor.shape), None)
    for name in outcome.assigned:
        value = outcome.values[name]
        if name in outcome.unread and value is not None:
            yield _Output(name, value, outcome.assigned[name])


def _named(output: _Output, left: Tensors) -> list[Correspondence]:
    """Return the boxes of an output, under its name; a cast to the dtype that is there already is none."""
    items = [
        Correspondence(
            piece.source,
            piece.source_box,
            output.name,
            piece.target_box,
            piece.axes,
            None if piece.cast is None or piece.cast == left[piece.source].dtype else piece.cast,
        )
        for piece in output.value.pieces
    ]
    return coalesced(items) if len(items) > 1 else items


def _dtypes(value: Value, left: Tensors) -> set[str]:
    return {piece.cast or left[piece.source].dtype for piece in value.pieces}


def _spec(output: _Output, left: Tensors) -> TensorSpec:
    return TensorSpec(output.value.shape, min(_dtypes(output.value, left), default="float32"))


def _refuse_unwanted(outcome: EvaluationResult, right: Tensors, faults: Faults) -> None:
    index: NameIndex | None = None
    for name in sorted(outcome.unread - right.keys()):
        if outcome.values[name] is None:
            continue
        index = index or NameIndex(right)
        step = outcome.assigned[name]
        near = index.nearest(name)
        fault = Fault(
            f"`{name}` is no tensor of the right side, and no later statement reads it.",
            near or "`a -> _` for a tensor that is not wanted",
        )
        faults.add(step.statement.line, fault, step.statement.right[0].span)


def _refuse_unfit(outputs: list[_Output], left: Tensors, right: Tensors, faults: Faults) -> None:
    """Shapes and dtypes that are not the right tensor's; equal names that do not fit have no statement to show."""
    for output in outputs:
        wanted = right[output.name]
        dtypes = sorted(_dtypes(output.value, left) - {wanted.dtype})
        if output.value.shape != wanted.shape:
            cause = f"`{output.name}` would have shape {list(output.value.shape)}, it has {list(wanted.shape)}."
            accepted = ""
        elif dtypes:
            cause = f"`{output.name}` is {wanted.dtype}, what fills it is {dtypes[0]}."
            accepted = f"a statement with src_dtype='{dtypes[0]}', dst_dtype='{wanted.dtype}'"
        else:
            continue
        if output.step is None:
            faults.add_plain(f"equal names: {cause}" + (f" Accepted: {accepted}" if accepted else ""))
        else:
            faults.add(output.step.statement.line, Fault(cause, accepted), output.step.statement.arrow)


def _refuse_nothing(outcome: EvaluationResult, left: Tensors, right: Tensors | None, faults: Faults) -> None:
    """``_`` that contradicts another statement, or speaks of nothing."""
    for name, step in outcome.dropped.items():
        line, span = step.statement.line, step.statement.arrow
        if name not in left:
            faults.add(line, Fault(f"`{name}` is no tensor of the left side."), span)
        for reader in outcome.readers.get(name, [])[:1]:
            faults.add(line, Fault(f"`{name}` is removed here and read by {reader.statement.line.title}."), span)
    for name, step in outcome.fresh.items():
        line, span = step.statement.line, step.statement.arrow
        if right is None or name not in right:
            faults.add(line, Fault(f"`{name}` is no tensor of the right side."), span)
        if name in outcome.values:
            other = outcome.assigned[name].statement.line.title
            faults.add(line, Fault(f"`{name}` keeps its initial values here and is assigned by {other}."), span)


def _without_aliases(outputs: list[_Output], aliases: MappingABC[str, str], faults: Faults) -> list[_Output]:
    """Return the outputs but for tied names, each of which must be what its owner is."""
    by_name = {output.name: output for output in outputs}
    for alias, owner in aliases.items():
        if alias not in by_name or by_name[alias].step is None or owner not in by_name:
            continue
        output = by_name[alias]
        if output.step is not None and output.value != by_name[owner].value:
            fault = Fault(f"`{alias}` is tied to `{owner}`, and is made of something else here.", "the same on both")
            faults.add(output.step.statement.line, fault, output.step.statement.arrow)
    return [output for output in outputs if output.name not in aliases]


def _refuse_reread(outputs: list[_Output], left: Tensors, faults: Faults) -> None:
    """Left tensors of which more is read than there is: one source that feeds two targets."""
    volumes: dict[str, int] = {}
    readers: dict[str, list[_Output]] = {}
    for output in outputs:
        for piece in output.value.pieces:
            volumes[piece.source] = volumes.get(piece.source, 0) + piece.source_box.volume
            known = readers.setdefault(piece.source, [])
            if not known or known[-1] is not output:
                known.append(output)
    for name, volume in volumes.items():
        if volume <= prod(left[name].shape):
            continue
        by = [
            f"`{output.name}` ({'equal names' if output.step is None else output.step.statement.line.title})"
            for output in readers[name][:4]
        ]
        cause = f"`{name}` is read more than once: it becomes {', '.join(by)}."
        accepted = "one target per source; for tied weights the owner alone, and `_ -> alias`"
        step = next((output.step for output in reversed(readers[name]) if output.step is not None), None)
        if step is None:
            faults.add_plain(cause)
        else:
            faults.add(step.statement.line, Fault(cause, accepted), step.statement.arrow)
