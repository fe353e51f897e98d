"""How what is stored leads to what is wanted: one :class:`Source` per job, all through the canonical space.

================================  ==========================================================================
job                               mapping
================================  ==========================================================================
resume under any layout           reverse(stored model -> canonical), then canonical -> live model
resume with a user's statements   the statements for the tensors they name, the above for all others, and for the order
                                  inside fused tensors
start from open weights           canonical -> live model, with casts to the model's dtype declared
export, digest, diff              reverse(stored model -> canonical)
================================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Mapping as MappingABC
from dataclasses import dataclass, replace

from paddleformers_fc.catalog.flex import FlexCheckpoint
from paddleformers_fc.catalog.stored import Catalog
from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import ModelTensor, OptionalNames, bind, family_for, is_known
from paddleformers_fc.layout.roles import MODEL_STATE, split_state_name
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping import Made, Mapping, Rule, RuleSet, prove
from paddleformers_fc.mapping.agreement import refuse_disagreement
from paddleformers_fc.mapping.aoa import AoaTensor, parse_config, uncut
from paddleformers_fc.mapping.boxes import whole
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.mapping.stencils import identity
from paddleformers_fc.plan.build import Source
from paddleformers_fc.plan.report import Report


def resume_source(checkpoint: FlexCheckpoint, live: RuleSet) -> tuple[Source, Report]:
    """From a flex checkpoint to a live model, whatever the two layouts are.

    Args:
        checkpoint: what is stored.
        live: the rules of the live model, or of one rank's part of it.
    Returns:
        the source, and a report of canonical tensors, and of those without a canonical form, whose shape differs
        between the two.
    Raises:
        MappingError: where either side's rules cannot be proved.
    """
    stored, wanted = stored_mapping(checkpoint), live.mapping()
    prove(wanted, "The model's mapping")
    composed = _with_own_tensors(stored.reversed().then(wanted), checkpoint.rules, live)
    source = Source(checkpoint.catalog, composed, _aliases(checkpoint.rules), _aliases(live))
    return source, _shape_report(stored, wanted, _own_names(checkpoint.rules, live))


def _own_names(stored: RuleSet, live: RuleSet) -> list[str]:
    """The tensors that have no canonical form on either side."""
    kept = frozenset(stored.fresh)
    return [name for name in live.fresh if name in kept]


def _with_own_tensors(composed: Mapping, stored: RuleSet, live: RuleSet) -> Mapping:
    """Also the tensors that have no canonical form on either side: a resume takes them over as they are."""
    own = {
        name: Made(identity(live.targets[name].shape), (name,))
        for name in _own_names(stored, live)
        if stored.targets[name].shape == live.targets[name].shape
    }
    return replace(composed, made={**composed.made, **own}, fresh=composed.fresh - own.keys())


def stated_source(
    checkpoint: FlexCheckpoint,
    config: MappingABC[str, object],
    aoa_config: MappingABC[str, object],
    model: MappingABC[str, AoaTensor],
) -> tuple[Source, Report]:
    """From a flex checkpoint to a live model, with statements that a user wrote for some of the tensors.

    What the statements do not name is taken from the derived mapping and not from equal names, because a fused tensor
    under another tensor-parallel degree has the same name and shape and another layout, and because another class of
    the same family, or other empty layers, give the same tensor another name. For the same reason a fused tensor
    that a statement takes over, as of a layer that moves, is dealt anew for the live model's degree, and a statement
    that cuts one where its parts do not meet is refused.

    Args:
        checkpoint: what is stored.
        config: the live model's configuration.
        aoa_config: statements from stored names to the model's.
        model: every tensor of the live model, on all ranks: statements speak of all of it, and so does their proof.
    Raises:
        MappingError: where the statements cannot be read, or what they and the derived mapping say cannot be proved.
    """
    live = _bound(config, model)
    derived, report = resume_source(checkpoint, live)
    rules = checkpoint.rules
    held = {
        name: AoaTensor(spec.shape, spec.dtype, rules.cuts.get(name, (1,) * len(spec.shape)))
        for name, spec in rules.targets.items()
        if name not in derived.stored_aliases
    }
    stated = _parsed(aoa_config, held, model, live, derived.wanted_aliases)
    left_to_names = {name: made for name, made in derived.mapping.made.items() if _is_left(stated, name, made)}
    said = {name: made for name, made in stated.made.items() if name not in left_to_names}
    if said:
        plainly = _parsed(aoa_config, _uncut(held), _uncut(model), live, derived.wanted_aliases)
        before, after = _dealing(rules, _alone(checkpoint)), _dealing(live, _bound(config, _uncut(model)))
        said = _dealt_anew(said, before.reversed().then(plainly).then(after), plainly, (rules, live))
    merged = replace(stated, made={**said, **left_to_names})
    prove(merged, "The mapping of aoa_config")
    _refuse_mixed_parts(replace(merged, made=said), rules, live)
    canonical = live.mapping().made
    read = {source for name in left_to_names if name in canonical for source in canonical[name].names}
    kept = Report()
    for line in report.lines["shape"]:
        if line.partition(":")[0] in read:
            kept.add("shape", line)
    return Source(checkpoint.catalog, merged, derived.stored_aliases, derived.wanted_aliases), kept


def _bound(config: MappingABC[str, object], model: MappingABC[str, AoaTensor]) -> RuleSet:
    """The rules of a model on all ranks."""
    tensors = (ModelTensor(name, one.shape, one.dtype, one.cuts) for name, one in model.items())
    return bind(family_for(config), config, tensors)


def _alone(checkpoint: FlexCheckpoint) -> RuleSet:
    """The rules that a checkpoint's model has on one rank; its own where its family is not known here."""
    rules = checkpoint.rules
    if not is_known(checkpoint.config):
        return rules
    return _bound(checkpoint.config, {name: uncut(spec.shape, spec.dtype) for name, spec in rules.targets.items()})


def _uncut(tensors: MappingABC[str, AoaTensor]) -> dict[str, AoaTensor]:
    """The same tensors on one rank."""
    return {name: uncut(one.shape, one.dtype) for name, one in tensors.items()}


def _parsed(
    aoa_config: MappingABC[str, object],
    held: MappingABC[str, AoaTensor],
    model: MappingABC[str, AoaTensor],
    live: RuleSet,
    aliases: Collection[str],
) -> Mapping:
    if not aoa_config.get("aoa_config_reverse"):
        return parse_config(aoa_config, held, model, live.ties)
    # The model is on the left, where an alias would be a tensor that nothing reads.
    return parse_config(aoa_config, held, {name: one for name, one in model.items() if name not in aliases})


def _is_left(stated: Mapping, name: str, derived: Made) -> bool:
    """Whether no statement says anything of a target, nor of what it is derived from."""
    if name in stated.made or name in stated.fresh:
        return _is_implicit(stated, name)
    return stated.dropped.isdisjoint(derived.names)


def _is_implicit(mapping: Mapping, name: str) -> bool:
    """Whether a target is its namesake as it is, which is what the language does with names that nothing says."""
    made, spec = mapping.made.get(name), mapping.targets.get(name)
    return (
        made is not None
        and spec is not None
        and made.names == (name,)
        and made.stencil.links == identity(spec.shape).links
    )


@dataclass(frozen=True)
class _Dealt:
    """How the parts of a fused tensor lie in it.

    Args:
        parts: length of every part, in elements.
        axis: the axis along which they lie.
        blocks: the rounds in which they are dealt.
    """

    parts: tuple[int, ...]
    axis: int
    blocks: int


def _dealing(rules: RuleSet, alone: RuleSet) -> Mapping:
    """What every tensor of a model is made of: the tensor of its name, as it would lie on one rank."""
    made = alone.mapping().reversed().then(rules.mapping()).made
    whole_ones = {name: Made(identity(spec.shape), (name,)) for name, spec in rules.targets.items() if name not in made}
    return Mapping(rules.targets, rules.targets, {**whole_ones, **made})


def _dealt_anew(
    said: MappingABC[str, Made], meant: Mapping, plainly: Mapping, sides: tuple[RuleSet, RuleSet]
) -> dict[str, Made]:
    """What statements say, under the layouts in which the tensors of both models lie.

    Read as they stand, statements are about tensors as they lie on all ranks, where the parts of a fused one are dealt
    in rounds. Most mean the same as they do of tensors that lie as on one rank. Where they do not, those that take over
    all parts of a fused tensor mean the parts; others mix them up, on some ranks and not on others.

    Args:
        said: what the statements say, read as they stand.
        meant: what they say of tensors that lie as on one rank, from the stored layout to the live one.
        plainly: the same without the layouts.
        sides: the rules of the stored and of the live model.
    Raises:
        MappingError: a statement cuts a fused tensor, or joins one, across the rounds in which its parts are dealt.
    """
    before, after = map(_fused, sides)
    back = Mapping(plainly.sources, plainly.targets, dict(said)).reversed()
    found, faults = dict(said), []
    for name, made in back.then(replace(meant, made={name: meant.made[name] for name in said})).made.items():
        if _is_itself(made, name):
            continue
        found[name] = meant.made[name]
        if not _takes_all_parts(plainly, name, before, after):
            rounds = max((before[one].blocks for one in plainly.made[name].names if one in before), default=1)
            own = after[name].blocks if name in after else 1
            faults.append(
                f"{name}: its parts lie in {own} rounds, those of what it is made of in {rounds}"
                if own > 1
                else f"{name}: is made of a tensor whose parts lie in {rounds} rounds"
            )
    if faults:
        raise MappingError(
            "Statements of aoa_config cut or join fused tensors across the ranks that share their parts.",
            where="aoa_config",
            evidence=fold(faults),
            next_step="Nothing was read or written. Split and join gate and up with fused_ffn, and queries, keys and "
            "values with the attribute by which the model fuses them: these follow the rounds. See docs/aoa.md.",
        )
    return found


def _refuse_mixed_parts(said: Mapping, stored: RuleSet, live: RuleSet) -> None:
    """Refuse statements by which a layer would hold some of another one that it is fused with, as by other heads.

    Raises:
        MappingError: with the layers, and what they would be made of.
    """
    together = {
        frozenset(map(_layer_of, rule.sources))
        for rules in (stored, live)
        for rule in rules.rules
        if len(rule.sources) > 1
    }
    across = stored.mapping().then(said).then(live.mapping().reversed())
    faults = []
    for name, made in across.made.items():
        layers = frozenset(map(_layer_of, made.names))
        if any(len(layers & fused) > 1 for fused in together):
            faults.append(f"{name}: would hold parts of {', '.join(sorted(layers))}")
    if faults:
        raise MappingError(
            "Statements of aoa_config mix the parts of fused tensors.",
            where="aoa_config",
            evidence=fold(faults),
            next_step="Nothing was read or written. Compare the attribute with how the model fuses these layers; "
            "num_key_value_groups is the number of kv heads.",
        )


def _layer_of(name: str) -> str:
    """What a tensor is in its layer, such as ``q_proj.weight``."""
    return ".".join(name.split(".")[-2:])


def _is_itself(made: Made, name: str) -> bool:
    """Whether every number of a tensor is the number at its place in the tensor of that name."""
    return made.names == (name,) and all(
        link.source_box == link.target_box and link.axes == tuple(range(len(link.axes))) for link in made.stencil.links
    )


def _takes_all_parts(
    plainly: Mapping, name: str, before: MappingABC[str, _Dealt], after: MappingABC[str, _Dealt]
) -> bool:
    """Whether a fused tensor is made of tensors with the same parts, none of which is cut along them."""
    made, now, target = plainly.made[name], after.get(name), plainly.targets[name].shape
    for link in made.stencil.links:
        source = made.names[link.source]
        then = before.get(source)
        if now is None or then is None or now.parts != then.parts or link.axes[now.axis] != then.axis:
            return False
        length = plainly.sources[source].shape[then.axis]
        if (link.source_box.lo[then.axis], link.source_box.hi[then.axis]) != (0, length):
            return False
        if (link.target_box.lo[now.axis], link.target_box.hi[now.axis]) != (0, target[now.axis]):
            return False
    return True


def _fused(rules: RuleSet) -> dict[str, _Dealt]:
    """The fused tensors of a model. The layers that are stacked in one tensor are fused alike."""
    return {
        rule.targets[0]: _Dealt(rule.parts, rule.axis, rule.target_blocks)
        for rule in rules.rules
        if len(rule.targets) == 1 and len(rule.parts) > 1
    }


def stored_mapping(checkpoint: FlexCheckpoint) -> Mapping:
    """The checkpoint's own mapping, proved, and held against what its family declares for the same tensors.

    The proof alone would let pass a mapping that takes a query for a key of the same shape; the declaration does not. A
    checkpoint of a model whose family is not known here stands on its own rules.

    Raises:
        MappingError: the rules cannot be proved, or are not those that the family declares.
    """
    rules = checkpoint.rules
    mapping = rules.mapping()
    prove(mapping, "The checkpoint's mapping")
    if is_known(checkpoint.config):
        uncut = {name: (1,) * len(spec.shape) for name, spec in rules.targets.items()}
        tensors = [
            ModelTensor(name, spec.shape, spec.dtype, rules.cuts.get(name, uncut[name]))
            for name, spec in rules.targets.items()
        ]
        declared = bind(family_for(checkpoint.config), checkpoint.config, tensors)
        if declared.rules != rules.rules:
            refuse_disagreement(
                mapping,
                declared.mapping(),
                f"The mapping of {checkpoint.catalog.root}",
                "Read the checkpoint with the version that wrote it, named in its manifest, and export it from there.",
            )
    return mapping


def huggingface_source(
    catalog: Catalog,
    live: RuleSet,
    optional: OptionalNames | None = None,
    aliases: MappingABC[str, str] | None = None,
) -> tuple[Source, Report]:
    """From a directory of open weights to a live model.

    Args:
        catalog: what is stored, in canonical names.
        live: the rules of the live model, or of one rank's part of it.
        optional: canonical names that a file may lack; where it has nothing of a group of them, the group's targets
            keep their initial values.
        aliases: the owner of every canonical name that is another one's alias; by default named as the model's.
    Raises:
        MappingError: where the model's rules cannot be proved.
    """
    dtypes = {name: tensor.dtype for name, tensor in catalog.roles.get(MODEL_STATE, {}).items()}
    present = live.casting(dtypes)
    rules = present.rules if optional is None else _without_absent(present.rules, dtypes, optional)
    kept = {name for rule in rules for name in rule.targets}
    fresh = tuple(name for rule in present.rules for name in rule.targets if name not in kept)
    bound = RuleSet(present.targets, rules, present.ties, present.fresh + fresh)
    wanted = bound.mapping(dtypes)
    prove(wanted, "The model's mapping")
    report = Report()
    for name, tensor in catalog.roles.get(MODEL_STATE, {}).items():
        spec = wanted.sources.get(name)
        if spec is not None and spec.shape != tensor.shape:
            report.add("shape", f"{name}: stored {list(tensor.shape)}, wanted {list(spec.shape)}")
    return Source(catalog, wanted, _aliases(live) if aliases is None else aliases, _aliases(live)), report


def _without_absent(rules: tuple[Rule, ...], stored: Collection[str], optional: OptionalNames) -> tuple[Rule, ...]:
    """The rules that read something of what is stored, or something that is not optional."""
    held = {optional.group(name) for name in stored} | {None}
    return tuple(rule for rule in rules if any(optional.group(name) in held for name in rule.sources))


def canonical_source(checkpoint: FlexCheckpoint) -> Source:
    """From a flex checkpoint to the canonical space.

    Raises:
        MappingError: where the checkpoint's rules cannot be proved.
    """
    stored = stored_mapping(checkpoint)
    return Source(checkpoint.catalog, stored.reversed(), _aliases(checkpoint.rules))


def canonical_layout(source: Source) -> dict[str, dict[str, Shard]]:
    """Every canonical tensor that the stored tensors make, whole: role -> name -> shard.

    Optimizer states appear under their canonical parameter's name with their suffix.
    """
    wanted: dict[str, dict[str, Shard]] = {}
    owners = source.stored_aliases
    for role, tensors in source.catalog.roles.items():
        for tensor in tensors.values():
            state = split_state_name(role, tensor.name)
            parameter = owners.get(state.parameter, state.parameter)
            made = source.mapping.read.get(parameter)
            for target in () if made is None else made.names:
                name = target + state.suffix
                shape = tensor.shape if state.scalar else source.mapping.targets[target].shape
                wanted.setdefault(role, {})[name] = Shard(name, tensor.dtype, shape, whole(shape))
    return wanted


def _aliases(rules: RuleSet) -> dict[str, str]:
    return {tie.alias: tie.owner for tie in rules.ties}


def _shape_report(stored: Mapping, wanted: Mapping, own: Collection[str]) -> Report:
    report = Report()
    canonical = [(name, stored.sources[name], spec) for name, spec in wanted.sources.items() if name in stored.sources]
    for name, held, spec in [*canonical, *((name, stored.targets[name], wanted.targets[name]) for name in own)]:
        if held.shape != spec.shape:
            report.add("shape", f"{name}: stored {list(held.shape)}, wanted {list(spec.shape)}")
    return report
