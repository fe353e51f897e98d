"""Compose mappings from stored to target tensors: one function per task, all through the canonical space.

================================  ==========================================================================
task                              mapping
================================  ==========================================================================
resume under any layout           reverse(stored model -> canonical), then canonical -> live model
resume with a user's statements   the statements for the tensors that they name; the mapping above for all others, and
                                  for the order inside fused tensors (:mod:`.statements`)
start from open weights           canonical -> live model, with declared casts to the model's dtype
export, digest, diff              reverse(stored model -> canonical)
================================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec import structs

from paddleformers_fc.errors import Corrupt, OptionError
from paddleformers_fc.families import ModelDescription, ModelTensor, OptionalNames, bind, family_for, is_known
from paddleformers_fc.families.changes import contradictions
from paddleformers_fc.formats.catalog import Catalog
from paddleformers_fc.formats.checkpoint import CONFIG_NAME, MAPPING_NAME, OpenedCheckpoint
from paddleformers_fc.layout.roles import MODEL_STATE, OPTIMIZER_STATE, StateShape, split_state_name
from paddleformers_fc.layout.shards import Shard, ShardsByRole
from paddleformers_fc.mapping import Rule, RuleSet, TensorMapping, TensorSources, TensorSpec, prove
from paddleformers_fc.mapping.boxes import Box, Shape, whole
from paddleformers_fc.mapping.prove import require_agreement
from paddleformers_fc.mapping.templates import identity
from paddleformers_fc.plan.build import ReadSource
from paddleformers_fc.plan.report import Report
from paddleformers_fc.text import count_text


def resume_source(
    checkpoint: OpenedCheckpoint, live: RuleSet, model: ModelDescription | None = None
) -> tuple[ReadSource, Report]:
    """Return the source from a flex checkpoint to a live model under any layout.

    Args:
        checkpoint: the stored checkpoint.
        live: the rules of the live model, or of one rank's part of it.
        model: the description that ``live`` was bound with. If the stored model has the same description and the same
            tensors, its tensors are not bound again.
    Returns:
        the source, and a report of tensors whose shapes differ.
    Raises:
        MappingError: the rules of either side cannot be proved.
    """
    stored = target = stored_mapping(checkpoint, live if model == checkpoint.known else None)
    if live != checkpoint.rules:
        target = live.mapping()
        prove(target, "The model's mapping")
    # Tensors without a canonical form on both sides are copied by name.
    kept = frozenset(checkpoint.rules.fresh)
    own = [
        (name, checkpoint.rules.targets[name].shape, live.targets[name].shape) for name in live.fresh if name in kept
    ]
    copied = {name: TensorSources(identity(shape), (name,)) for name, before, shape in own if before == shape}
    composed = stored.reversed().then(target)
    source = ReadSource(
        checkpoint.catalog,
        structs.replace(composed, made={**composed.made, **copied}, fresh=composed.fresh - copied.keys()),
        checkpoint.rules.aliases,
        live.aliases,
        checkpoint.preferred,
        averaged=checkpoint.averaged,
    )
    before, after = stored.sources, target.sources
    return source, _shape_report(
        [*own, *((name, before[name].shape, after[name].shape) for name in after if name in before)]
    )


def _shape_report(shapes: Iterable[tuple[str, Shape, Shape]]) -> Report:
    """Return a report of the tensors whose stored and target shapes differ."""
    report = Report()
    for name, stored, target in shapes:
        if stored != target:
            report.add("shape", f"{name}: stored {list(stored)}, expected {list(target)}")
    return report


def stored_mapping(checkpoint: OpenedCheckpoint, bound: RuleSet | None = None) -> TensorMapping:
    """Return the mapping of a checkpoint, proved and compared with the declaration of its family.

    The proof alone would accept a query that is read as a key of the same shape. The rules of an unknown family can
    only be proved.

    Args:
        checkpoint: the stored checkpoint.
        bound: as for :func:`declared_mapping`.
    Raises:
        MappingError: the rules cannot be proved, or differ from the declaration.
    """
    root = str(checkpoint.catalog.root)
    faults = contradictions(checkpoint.config, checkpoint.known)
    if faults:
        raise Corrupt(
            f"{CONFIG_NAME} and {MAPPING_NAME} of {root} describe different models.",
            where=root,
            evidence=faults,
            next_step="Use another checkpoint; one of these files was changed after it was written.",
        )
    return declared_mapping(checkpoint.known, checkpoint.rules, root, bound)


def declared_mapping(
    model: ModelDescription, rules: RuleSet, where: str, bound: RuleSet | None = None
) -> TensorMapping:
    """Return the mapping of stored rules, proved and compared with the declaration of their family.

    Args:
        model: the stored description.
        rules: the stored rules.
        where: the checkpoint.
        bound: rules that the family declares for this description and some tensors. If these are the stored tensors,
            they are not bound again.
    Raises:
        MappingError: the rules cannot be proved, or differ from the declaration.
    """
    mapping = rules.mapping()
    prove(mapping, "The checkpoint's mapping")
    if is_known(model.config):
        if bound is not None and (bound.targets, bound.cuts) == (rules.targets, rules.cuts):
            declared = bound
        else:
            declared = bind(family_for(model.config), model, stored_tensors(rules))
        if declared.rules != rules.rules:
            require_agreement(
                mapping,
                declared.mapping(),
                f"The mapping of {where}",
                "Read the checkpoint with the version that wrote it, named in its manifest, and export it from there.",
            )
    return mapping


def stored_tensors(rules: RuleSet) -> list[ModelTensor]:
    """Return the tensors of a stored model, with the tensor-parallel cuts of the run that saved them."""
    return [
        ModelTensor(name, spec.shape, spec.dtype, rules.cuts.get(name, (1,) * len(spec.shape)))
        for name, spec in rules.targets.items()
    ]


def huggingface_source(
    catalog: Catalog,
    live: RuleSet,
    optional: OptionalNames | None = None,
    aliases: Mapping[str, str] | None = None,
) -> tuple[ReadSource, Report]:
    """Return the source from a directory of open weights to a live model.

    Args:
        catalog: the stored tensors in canonical names.
        live: the rules of the live model, or of one rank's part of it.
        optional: canonical names that may be missing; targets of a missing group keep their initial values.
        aliases: canonical alias -> canonical owner; the model's aliases by default.
    Returns:
        the source, and a report of tensors whose shapes differ.
    Raises:
        MappingError: the rules of the model cannot be proved.
    """
    weights = catalog.roles.get(MODEL_STATE, {})
    dtypes = {name: tensor.dtype for name, tensor in weights.items()}
    for alias, owner in (aliases or {}).items():
        if alias in dtypes:
            dtypes.setdefault(owner, dtypes[alias])
    present = live.casting(dtypes)
    rules = present.rules if optional is None else _without_absent(present.rules, dtypes, optional)
    kept = {name for rule in rules for name in rule.targets}
    fresh = tuple(name for rule in present.rules for name in rule.targets if name not in kept)
    bound = RuleSet(present.targets, rules, present.ties, present.fresh + fresh)
    mapping = bound.mapping(dtypes)
    prove(mapping, "The model's mapping")
    specs = mapping.sources
    report = _shape_report((name, one.shape, specs[name].shape) for name, one in weights.items() if name in specs)
    return ReadSource(catalog, mapping, live.aliases if aliases is None else aliases, live.aliases), report


def _without_absent(rules: tuple[Rule, ...], stored: Collection[str], optional: OptionalNames) -> tuple[Rule, ...]:
    """Drop the rules whose sources are all optional and missing."""
    present = {optional.group(name) for name in stored} | {None}
    return tuple(rule for rule in rules if any(optional.group(name) in present for name in rule.sources))


def canonical_source(checkpoint: OpenedCheckpoint) -> ReadSource:
    """Return the source from a checkpoint of any format to the canonical space.

    Raises:
        FlexError: the rules of the checkpoint cannot be derived or proved.
    """
    if checkpoint.format.canonical:
        stored_weights = checkpoint.catalog.roles[MODEL_STATE]
        specs = {name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in stored_weights.items()}
        same = {name: TensorSources(identity(spec.shape), (name,)) for name, spec in specs.items()}
        return ReadSource(checkpoint.catalog, TensorMapping(specs, specs, same))
    stored = stored_mapping(checkpoint)
    aliases = checkpoint.rules.aliases
    return ReadSource(
        checkpoint.catalog, stored.reversed(), aliases, preferred=checkpoint.preferred, averaged=checkpoint.averaged
    )


def canonical_layout(source: ReadSource) -> dict[str, dict[str, Shard]]:
    """Return every canonical tensor of a checkpoint as one shard: role -> name -> shard.

    The name of an optimizer state is the name of its canonical parameter with its suffix.
    """
    layout: dict[str, dict[str, Shard]] = {}
    owners, readers, targets = source.stored_aliases, source.mapping.readers, source.mapping.targets
    boxes: dict[Shape, Box] = {}
    for role, tensors in source.catalog.roles.items():
        for tensor in tensors.values():
            state = split_state_name(role, tensor.name, tensor.shape)
            parameter = owners.get(state.parameter, state.parameter)
            for target in readers.get(parameter, ()):
                name = target + state.suffix
                shape = targets[target].shape if state.shape is StateShape.PARAMETER else tensor.shape
                box = boxes.get(shape)
                if box is None:
                    box = boxes[shape] = whole(shape)
                layout.setdefault(role, {})[name] = Shard(name, tensor.dtype, shape, box)
    return layout


def check_all_canonical(checkpoint: OpenedCheckpoint, layout: ShardsByRole) -> None:
    """Check that no stored weight is missing from the canonical layout because it has no axes or no elements.

    Rules need elements along an axis, so these tensors are only saved and loaded, by name.

    Raises:
        OptionError: there are such tensors.
    """
    if checkpoint.format.canonical:
        return
    stored, known = checkpoint.catalog.roles.get(MODEL_STATE, {}), layout.get(MODEL_STATE, {})
    left = [name for name, one in stored.items() if (not one.shape or 0 in one.shape) and name not in known]
    if left:
        raise OptionError(
            f"{count_text(len(left), 'tensor')} without axes or elements can only be loaded.",
            where=str(checkpoint.catalog.root),
            evidence=left,
            next_step="Load the checkpoint and compare or export these tensors in a script.",
        )


def canonical_names(source: ReadSource, role: str, name: str) -> list[str]:
    """Return the names of the canonical tensors that are read from a stored tensor."""
    state = split_state_name(role, name)
    parameter = source.stored_aliases.get(state.parameter, state.parameter)
    return [target + state.suffix for target in source.mapping.readers.get(parameter, ())]


def regrouped(source: ReadSource) -> Iterator[str]:
    """Yield a line for every state with one number per shard whose parameter has moved its elements.

    Such a number belongs to the elements of one box, and is exact only if the same elements form a box again. Plans
    compare the cuts, because the numbers form a tensor with one element per box; this function compares the positions,
    which fused layers or statements change. Digests and exports of single tensors do not need it.

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
        # With several sources, the elements of at least one are at other positions.
        if suffix is not None and not made.template.keeps_positions:
            yield (
                f"{parameter}{suffix}: one number of each shard of {', '.join(made.names)}, whose elements are at "
                "other positions in this model"
            )
