"""The mapping of a model as AOA text for Paddle's own FlexCheckpoint.

The text is derived from the rules of the real tensors. The family adds the layouts that the language interleaves by the
number of tensor-parallel ranks. Where a rank holds several parts in another way, as Qwen 3.5 does, text holds for the
degree of its tensors alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from paddleformers_fc.aoa import Hints, render
from paddleformers_fc.families.bind import ModelTensor, bind, family_sizes
from paddleformers_fc.families.declarations import Family, Geometry, TargetIndex
from paddleformers_fc.families.description import ModelDescription
from paddleformers_fc.mapping import RuleSet, TensorMapping

_PER_RANK = {Geometry.FUSED_FFN: "fused_ffn", Geometry.FUSED_QKV_PER_RANK: "fused_qkv_old"}


def aoa_text(
    family: Family, model: ModelDescription, tensors: Iterable[ModelTensor], *, reverse: bool = False
) -> list[str]:
    """Render the AOA statements from canonical tensors to those of a model.

    Args:
        family: the model's family.
        model: the description of the model.
        tensors: every tensor of the model.
        reverse: write the statements from the model's tensors to canonical ones instead.
    Raises:
        MappingError: for tensors that the family does not declare, and where the language cannot express their mapping.
    """
    known = list(tensors)
    rules = replace(bind(family, model, known), cuts={tensor.name: tensor.cuts for tensor in known})
    return render(with_ties(rules), _hints(family, model, rules), reverse=reverse)


def with_ties(rules: RuleSet) -> TensorMapping:
    """Return the mapping of a model, with tied aliases as unfilled targets: they share their owner's memory."""
    mapping = rules.mapping()
    aliases = {tie.alias for tie in rules.ties}
    specs = {name: rules.targets[name] for name in sorted(aliases)}
    return replace(mapping, targets={**mapping.targets, **specs}, fresh=mapping.fresh | aliases)


def _hints(family: Family, model: ModelDescription, rules: RuleSet) -> Hints:
    sizes = family_sizes(family, model)
    known = sizes.defines("heads") and sizes.defines("kv_heads")
    index = TargetIndex((one, _PER_RANK.get(one.geometry)) for one in family.statements if one.stack is None)
    per_rank = {name: kind for name in rules.targets for kind in index.find(name)[0] if kind is not None}
    return Hints(
        right=rules.cuts,
        per_rank=per_rank,
        heads=(sizes.length("heads"), sizes.length("kv_heads")) if known else None,
    )
