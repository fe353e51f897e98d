"""Find the layout of the language that the runs of a component follow, and the attributes of its statement.

A layout per tensor-parallel shard is chosen only if the tensor has as many shards as groups. All others are written
with lengths, which are independent of the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from paddleformers_fc.aoa.runs import AxisComponent, Hints
from paddleformers_fc.mapping.boxes import Shape

FFN, QKV = "fused_ffn", "fused_qkv_old"
_MOST_HEADS = 4096


@dataclass(frozen=True, slots=True)
class FusedLayout:
    """The layout of a statement.

    Args:
        attributes: its attributes, without the first comma.
        sources: the left names, in order.
        targets: the right names, in order.
        by_shards: whether the number of groups is the number of shards.
    """

    attributes: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    by_shards: bool = False


def layout_of(row: AxisComponent, hints: Hints, taken: frozenset[str]) -> FusedLayout | None:
    """Return the layout of a row, or None if no single statement expresses it.

    Args:
        row: the runs.
        hints: shards and heads.
        taken: the names of all tensors, which intermediate names must not repeat.
    """
    sources, targets = tuple(row.sources), tuple(row.targets)
    by_shards = _per_rank(row, hints)
    if by_shards is not None:
        return FusedLayout(by_shards, sources, targets, by_shards=True)
    by_lengths = _plain(row) or _per_head(row, taken)
    return None if by_lengths is None else FusedLayout(by_lengths, sources, targets)


def _plain(row: AxisComponent) -> str | None:
    """Match whole tensors in order, or one tensor in equal lengths."""
    sources, targets = row.sources, row.targets
    if len(targets) == 1 and len(sources) > 1 and row.is_interleaving(tuple(sources.values()), 1, 1):
        return f"axis={row.axis}"
    equal = len(set(targets.values())) == 1
    if len(sources) == 1 and len(targets) > 1 and equal and row.is_interleaving(tuple(targets.values()), 1, 1):
        return f"axis={row.axis}"
    return None


def _per_rank(row: AxisComponent, hints: Hints) -> str | None:
    """Match gate and up, or query, key and value, in one group per shard."""
    sources, targets = list(row.sources), list(row.targets)
    if len(sources) > 1 and len(targets) > 1:
        return None
    read = written = 1
    if len(sources) == 1:
        read = _shards(hints.left.get(sources[0]), row.component.views[sources[0]].axes[row.axis])
    if len(targets) == 1:
        written = _shards(hints.right.get(targets[0]), row.axis)
    kinds = [hints.per_rank[side[0]] for side in (sources, targets) if len(side) == 1 and side[0] in hints.per_rank]
    if not read * written or (read == written == 1 and not kinds):
        return None
    lengths = _lengths(row)
    half = lengths if len(lengths) == 2 else (lengths[0] // 2,) * 2
    halves = (FFN in kinds or not kinds) and half[0] == half[1] and len(lengths) < 3
    if halves and row.is_interleaving(half, read, written):
        return _with_axis(FFN, row.axis)
    # Separate query, key and value are written per kv head, which is independent of the number of ranks.
    parts = _headed(lengths, hints.heads) if QKV in kinds or len(lengths) == 1 else ()
    if hints.heads is None or not parts:
        return None
    heads, groups = hints.heads
    shared = not any(count % rounds for count in (heads, groups) for rounds in (read, written))
    if not shared or not row.is_interleaving(parts, read, written):
        return None
    return _with_axis(f"{QKV}, num_heads={heads}, num_key_value_groups={groups}", row.axis)


def _per_head(row: AxisComponent, taken: frozenset[str]) -> str | None:
    """Match query, key and value in one group per kv head."""
    sources, targets = list(row.sources), list(row.targets)
    lengths = _lengths(row)
    if len(lengths) != 3 or min(len(sources), len(targets)) != 1:
        return None
    joining = len(targets) == 1
    # The number of groups is the number of runs of the first part.
    rounds = sum(run.source == sources[0] if joining else run.target == targets[0] for run in row.runs)
    query, key, value = lengths
    if not (row.is_interleaving(lengths, 1, rounds) if joining else row.is_interleaving(lengths, rounds, 1)):
        return None
    head = key // rounds
    if key == value and query % (head * rounds) == 0:
        heads = query // head
    elif joining:
        heads = rounds
    else:
        return None
    made_up = [f"{name}{i}" for name in (sources if joining else targets) for i in range(min(heads, _MOST_HEADS))]
    if heads > _MOST_HEADS or not taken.isdisjoint(made_up):
        return None
    return _with_axis(f"fused_qkv, num_heads={heads}, num_key_value_groups={rounds}", row.axis)


def _lengths(row: AxisComponent) -> Shape:
    """Return the lengths of the parts: of the side with several names, or of the single tensor."""
    sources, targets = row.sources, row.targets
    return tuple((sources if len(sources) > 1 else targets).values())


def _headed(lengths: Shape, heads: tuple[int, int] | None) -> Shape:
    """Return the lengths of query, key and value; empty if they do not follow from the heads."""
    if heads is None:
        return ()
    counts = (heads[0], heads[1], heads[1])
    if len(lengths) == 1 and lengths[0] % sum(counts) == 0:
        return tuple(lengths[0] // sum(counts) * count for count in counts)
    if len(lengths) == 3 and lengths[0] % counts[0] == 0:
        head = lengths[0] // counts[0]
        return lengths if lengths == tuple(head * count for count in counts) else ()
    return ()


def _shards(cuts: Shape | None, axis: int) -> int:
    """Return the number of shards along an axis; 0 if another axis is cut, which no statement expresses."""
    if cuts is None:
        return 1
    return 0 if prod(cuts) != cuts[axis] else cuts[axis]


def _with_axis(attributes: str, axis: int) -> str:
    """Return the attributes with the axis, unless it is the default 1."""
    return attributes if axis == 1 else f"{attributes}, axis={axis}"
