"""States that are one number per shard: where a resume cannot restore them.

Such a number belongs to the elements of one box. It is exact only if the same elements are one box again: the parameter
has the same shape and cuts, and every element the same position. Plans compare the cuts, because the numbers form a
tensor with one element per box. This module compares the positions, which other cuts, fused layers or statements
change. Digests and exports of single tensors need no comparison: there the number of a fused tensor is that of its
parts.
"""

from __future__ import annotations

from collections.abc import Iterator

from paddleformers_fc.layout.roles import OPTIMIZER_STATE, StateShape, split_state_name
from paddleformers_fc.plan.build import ReadSource


def regrouped(source: ReadSource) -> Iterator[str]:
    """Yield a line for every stored number of a shard whose parameter has its elements at other positions.

    Args:
        source: stored tensors and their mapping to the live model.
    """
    found: dict[str, str] = {}
    for name, tensor in source.catalog.roles.get(OPTIMIZER_STATE, {}).items():
        state = split_state_name(OPTIMIZER_STATE, name, tensor.shape)
        if state.shape is StateShape.SHARD_NUMBER:
            found[source.stored_aliases.get(state.parameter, state.parameter)] = state.suffix
    for parameter, made in source.mapping.made.items() if found else ():
        suffix = next((found[name] for name in made.names if name in found), None)
        # Of several sources at least one has its elements at other positions.
        if suffix is not None and not made.template.keeps_positions:
            yield (
                f"{parameter}{suffix}: one number of each shard of {', '.join(made.names)}, whose elements are at "
                "other positions in this model"
            )
