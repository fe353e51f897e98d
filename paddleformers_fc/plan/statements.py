"""Resume with a user's statements (``aoa_config``), which map the tensors that they name; the rest is derived.

A fused tensor has the same name and shape under every tensor-parallel degree, but the order of its parts differs.
Statements are therefore evaluated twice: on the stored tensors, and on tensors as one rank would hold them. If both
results agree, they are used. If not, a statement that uses all parts of a fused tensor interleaves them again, and any
other statement is rejected. So is a statement by which a layer would contain parts of another layer that it is fused
with. The merged mapping is proved like every other mapping.

Time: two evaluations, and compositions of templates, once per plan. Memory: the mappings of both models.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from msgspec import structs

from paddleformers_fc.aoa import AoaTensor, Program, evaluate, read_config, uncut
from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import ModelDescription, ModelTensor, is_known
from paddleformers_fc.families.stated import bind_model
from paddleformers_fc.formats.checkpoint import OpenedCheckpoint
from paddleformers_fc.mapping import Rule, RuleSet, TensorMapping, TensorSources, prove
from paddleformers_fc.mapping.templates import identity
from paddleformers_fc.plan.build import CAST, ReadSource
from paddleformers_fc.plan.report import Report
from paddleformers_fc.plan.sources import resume_source
from paddleformers_fc.text import fold

_DTYPES = frozenset({"dtype", "src_dtype", "dst_dtype"})
"""Statement attributes that cast."""
_CORRECT = (
    "Correct the statements: `a -> _` drops a stored tensor, `_ -> b` keeps the initial values of a target. No tensor "
    "was read or written."
)


def statements_source(
    checkpoint: OpenedCheckpoint,
    model: ModelDescription,
    aoa_config: Mapping[str, object],
    tensors: Mapping[str, AoaTensor],
    may_cast: bool = False,
) -> tuple[ReadSource, Report]:
    """Return the source from a flex checkpoint to a live model, with a user's statements.

    Tensors that no statement names use the derived mapping. Equal names do not suffice: the layout of a fused tensor
    depends on the degree, and a different class or different empty layers rename tensors.

    Args:
        checkpoint: the stored checkpoint.
        model: the description of the live model.
        aoa_config: statements from stored names to names of the model.
        tensors: all tensors of the live model on all ranks; the proof covers all of them.
        may_cast: whether the precision may differ. If so, statements without casts apply to tensors of any precision,
            and the plan casts.
    Returns:
        the source, and a report of tensors that no statement names and whose shapes differ.
    Raises:
        MappingError: a statement is invalid, or the merged mapping cannot be proved.
    """
    live = _model_rules(model, tensors)
    derived, report = resume_source(checkpoint, live)
    rules = checkpoint.rules
    stored = {
        name: AoaTensor(spec.shape, spec.dtype, rules.cuts.get(name, (1,) * len(spec.shape)))
        for name, spec in rules.targets.items()
        if name not in derived.stored_aliases
    }
    program = read_config(aoa_config)
    if may_cast and not any(_DTYPES & statement.attributes.keys() for statement in program.statements):
        stored, tensors = _in_one_precision(stored), _in_one_precision(tensors)
    evaluated = _evaluate(program, stored, tensors, live, derived.target_aliases)
    unmentioned = {name: made for name, made in derived.mapping.made.items() if _is_unmentioned(evaluated, name, made)}
    explicit = {name: made for name, made in evaluated.made.items() if name not in unmentioned}
    # With user-mapped rules the order of the parts is unknown, and must come from the statements themselves.
    if explicit and model.rules is None:
        whole = _all_uncut(tensors)
        on_one_rank = _evaluate(program, _all_uncut(stored), whole, live, derived.target_aliases)
        before = _interleavings(rules, _on_one_rank(checkpoint))
        after = _interleavings(live, _model_rules(model, whole))
        explicit = _reinterleave(explicit, before.reversed().then(on_one_rank).then(after), on_one_rank, (rules, live))
    merged = structs.replace(evaluated, made={**explicit, **unmentioned})
    prove(merged, "The mapping of aoa_config", _CORRECT)
    _check_parts_of_one_layer(structs.replace(merged, made=explicit), rules, live)
    canonical = live.mapping().made
    read = {source for name in unmentioned if name in canonical for source in canonical[name].names}
    kept = Report({(kind, line) for kind, line in report.lines if line.partition(":")[0] in read})
    return structs.replace(derived, mapping=merged), kept


def _model_rules(model: ModelDescription, tensors: Mapping[str, AoaTensor]) -> RuleSet:
    """Return the rules of a model on all ranks."""
    model_tensors = (ModelTensor(name, one.shape, one.dtype, one.cuts) for name, one in tensors.items())
    return bind_model(model, list(model_tensors))


def _on_one_rank(checkpoint: OpenedCheckpoint) -> RuleSet:
    """Return the rules of a checkpoint's model on one rank; the stored rules if its family is unknown."""
    rules, model = checkpoint.rules, checkpoint.known
    if not is_known(model.config):
        return rules
    return _model_rules(model, {name: uncut(spec.shape, spec.dtype) for name, spec in rules.targets.items()})


def _in_one_precision(tensors: Mapping[str, AoaTensor]) -> dict[str, AoaTensor]:
    """Return the same tensors, with one dtype in place of all dtypes between which a plan casts."""
    one = min(CAST)
    return {name: replace(tensor, dtype=one) if tensor.dtype in CAST else tensor for name, tensor in tensors.items()}


def _all_uncut(tensors: Mapping[str, AoaTensor]) -> dict[str, AoaTensor]:
    """Return the same tensors on one rank."""
    return {name: uncut(one.shape, one.dtype) for name, one in tensors.items()}


def _evaluate(
    program: Program,
    stored: Mapping[str, AoaTensor],
    model: Mapping[str, AoaTensor],
    live: RuleSet,
    aliases: Collection[str],
) -> TensorMapping:
    if not program.reverse:
        return evaluate(program, stored, model, live.ties)
    # The model is on the left, where an alias would be a source that nothing reads.
    return evaluate(program, stored, {name: one for name, one in model.items() if name not in aliases})


def _is_unmentioned(evaluated: TensorMapping, name: str, derived: TensorSources) -> bool:
    """Return whether no statement names a target or the sources that it is derived from."""
    made = evaluated.made.get(name)
    if made is None:
        return name not in evaluated.fresh and evaluated.dropped.isdisjoint(derived.names)
    # The language maps names without statements to the same names, unchanged.
    return made.names == (name,) and made.template.links == identity(evaluated.targets[name].shape).links


def _interleavings(rules: RuleSet, alone: RuleSet) -> TensorMapping:
    """Map every tensor of a model on one rank to the tensor of its name on all ranks."""
    made = alone.mapping().reversed().then(rules.mapping()).made
    identities = {
        name: TensorSources(identity(spec.shape), (name,)) for name, spec in rules.targets.items() if name not in made
    }
    return TensorMapping(rules.targets, rules.targets, {**identities, **made})


def _reinterleave(
    explicit: Mapping[str, TensorSources],
    intended: TensorMapping,
    on_one_rank: TensorMapping,
    sides: tuple[RuleSet, RuleSet],
) -> dict[str, TensorSources]:
    """Return the sources of statements under the layouts of both models.

    Args:
        explicit: the statements evaluated on the tensors as stored.
        intended: ``on_one_rank``, composed with the stored and the live layout.
        on_one_rank: the statements evaluated on tensors of one rank.
        sides: the rules of the stored and of the live model.
    Raises:
        MappingError: a statement cuts or joins a fused tensor across groups of its interleaved parts.
    """
    before, after = map(_fused, sides)
    back = TensorMapping(on_one_rank.sources, on_one_rank.targets, dict(explicit)).reversed()
    found, faults = dict(explicit), []
    for name, made in back.then(
        structs.replace(intended, made={name: intended.made[name] for name in explicit})
    ).made.items():
        if _is_unchanged(made, name):
            continue
        found[name] = intended.made[name]
        if not _takes_all_parts(on_one_rank, name, before, after):
            sources = [before[source].target_blocks for source in on_one_rank.made[name].names if source in before]
            own = after[name].target_blocks if name in after else 1
            faults.append(f"{name}: parts in {own} groups, its sources in {max(sources, default=1)}")
    if faults:
        raise MappingError(
            "Statements of aoa_config cut or join fused tensors across the groups of their parts.",
            where="aoa_config",
            evidence=fold(faults),
            next_step="Nothing was read or written. Split and join gate and up with fused_ffn, and queries, keys and "
            "values with the attribute by which the model fuses them. See docs/aoa.md.",
        )
    return found


def _check_parts_of_one_layer(explicit: TensorMapping, stored: RuleSet, live: RuleSet) -> None:
    """Check that no layer would contain parts of another layer that it is fused with.

    Raises:
        MappingError: with the layers and their sources.
    """
    fused_layers = {
        frozenset(map(_layer_of, rule.sources))
        for rules in (stored, live)
        for rule in rules.rules
        if len(rule.sources) > 1
    }
    across = stored.mapping().then(explicit).then(live.mapping().reversed())
    faults = []
    for name, made in across.made.items():
        layers = frozenset(map(_layer_of, made.names))
        if any(len(layers & fused) > 1 for fused in fused_layers):
            faults.append(f"{name}: would contain parts of {', '.join(sorted(layers))}")
    if faults:
        raise MappingError(
            "Statements of aoa_config mix the parts of fused tensors.",
            where="aoa_config",
            evidence=fold(faults),
            next_step="Nothing was read or written. Compare the attribute with how the model fuses these layers; "
            "num_key_value_groups is the number of kv heads.",
        )


def _layer_of(name: str) -> str:
    """Return the name of a tensor in its layer, such as ``q_proj.weight``."""
    return ".".join(name.split(".")[-2:])


def _is_unchanged(made: TensorSources, name: str) -> bool:
    return made.names == (name,) and made.template.keeps_positions


def _takes_all_parts(
    on_one_rank: TensorMapping, name: str, before: Mapping[str, Rule], after: Mapping[str, Rule]
) -> bool:
    """Return whether all sources of a fused tensor have its parts, and none is sliced along their axis."""
    made, now, target = on_one_rank.made[name], after.get(name), on_one_rank.targets[name].shape
    for link in made.template.links:
        source = made.names[link.source]
        then = before.get(source)
        if now is None or then is None or now.lengths != then.lengths or link.axes[now.axis] != then.axis:
            return False
        length = on_one_rank.sources[source].shape[then.axis]
        if (link.source_box.lo[then.axis], link.source_box.hi[then.axis]) != (0, length):
            return False
        if (link.target_box.lo[now.axis], link.target_box.hi[now.axis]) != (0, target[now.axis]):
            return False
    return True


def _fused(rules: RuleSet) -> dict[str, Rule]:
    """Return the rules of the fused tensors of a model, which include layers that are stacked in one tensor."""
    return {rule.targets[0]: rule for rule in rules.rules if len(rule.targets) == 1 and len(rule.lengths) > 1}
