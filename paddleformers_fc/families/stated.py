"""Rules of models without a family (user-mapped, or by equal names), and the format of ``mapping.json``.

A caller can map a model with a :class:`RuleSet` from canonical tensors to the model's tensors. Otherwise every tensor
is the canonical tensor of its own name. Names do not show whether a tensor is fused, that is, whether another
tensor-parallel degree would interleave its parts differently. Tensors with equal names therefore only match if they are
cut into the same number of shards on every axis.

``mapping.json`` contains the rules of a model and the description that they were derived from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import structs

from paddleformers_fc.errors import FormatError, MappingError, MismatchError
from paddleformers_fc.families.bind import ModelTensor, bind
from paddleformers_fc.families.description import Adapters, ModelDescription
from paddleformers_fc.families.names import tied_names, tied_sources
from paddleformers_fc.families.registry import family_for, is_known
from paddleformers_fc.mapping import RuleSet, Shape, TensorSpec, Tie
from paddleformers_fc.mapping.prove import invalid_mapping
from paddleformers_fc.mapping.rules import decode_rules, encode_rules, moving
from paddleformers_fc.storage.json_io import ignored_extensions
from paddleformers_fc.storage.manifest import RESTORE
from paddleformers_fc.text import fold


def bind_model(model: ModelDescription, tensors: Sequence[ModelTensor]) -> RuleSet:
    """Return the rules of a model, or of one rank's part of it: user-mapped, or from its family.

    Raises:
        MappingError: no family declares the model, or the rules do not match its tensors.
    """
    if model.rules is None:
        return bind(family_for(model.config), model, tensors)
    return _restricted(model.rules, tensors)


def model_ties(model: ModelDescription) -> dict[str, str]:
    """Return the owner of every alias; empty for a model without rules and without a known family."""
    if model.rules is not None:
        return model.rules.aliases
    return tied_names(family_for(model.config), model) if is_known(model.config) else {}


def canonical_ties(model: ModelDescription) -> dict[str, str]:
    """Return :func:`model_ties` with canonical names."""
    if model.rules is not None:
        sources = {rule.targets[0]: rule.sources[0] for rule in model.rules.rules}
        return {alias: sources.get(owner, owner) for alias, owner in model.rules.aliases.items()}
    return tied_sources(family_for(model.config), model) if is_known(model.config) else {}


def family_name(model: ModelDescription) -> str:
    """Return the name of a model's family; empty if the model is user-mapped."""
    return family_for(model.config).name if model.rules is None else ""


def rules_by_name(tensors: Iterable[ModelTensor], ties: Iterable[Tie] = ()) -> RuleSet:
    """Return rules under which every tensor is the canonical tensor of its own name.

    Args:
        tensors: every tensor of a model.
        ties: names of one tensor.
    """
    by_name = {one.name: one for one in tensors}
    known = tuple(tie for tie in ties if tie.alias in by_name)
    aliases = {tie.alias for tie in known}
    owners = [one for name, one in by_name.items() if name not in aliases]
    return RuleSet(
        targets={name: TensorSpec(one.shape, one.dtype) for name, one in by_name.items()},
        rules=tuple(moving(one.name, one.name, one.shape) for one in owners if one.shape),
        ties=known,
        # Rules need an axis, so tensors without one are loaded by name.
        fresh=tuple(one.name for one in owners if not one.shape),
        cuts={name: one.cuts for name, one in by_name.items() if any(cut > 1 for cut in one.cuts)},
    )


def check_cut_alike(stored: RuleSet, live: RuleSet, assigned: Collection[str], where: str) -> None:
    """Check that tensors with equal names are cut into the same shards, unless a statement assigns them.

    Args:
        stored: rules of the stored model.
        live: rules of the live model, by name.
        assigned: live tensors that the user's statements assign.
        where: the checkpoint.
    Raises:
        MismatchError: with every such tensor.
    """
    faults = [
        f"{name}: stored in {_text(before)} shards, the model has {_text(now)}"
        for name, spec in live.targets.items()
        if name in stored.targets and name not in assigned
        for before, now in [(_cuts(stored, name, spec.shape), _cuts(live, name, spec.shape))]
        if before != now
    ]
    if faults:
        raise MismatchError(
            "The tensor-parallel degree differs, and names do not show whether a tensor is fused. No weight was "
            "changed.",
            where=where,
            evidence=fold(faults),
            next_step="Give family= and config=, mapping= or aoa_config=; or load under the tensor-parallel degree of "
            "the checkpoint.",
        )


def _restricted(rules: RuleSet, tensors: Sequence[ModelTensor]) -> RuleSet:
    """Return the part of user-mapped rules that some tensors need."""
    owners = rules.aliases
    written = {name: rule for rule in rules.rules for name in rule.targets}
    faults = []
    targets: dict[str, TensorSpec] = {}
    for one in tensors:
        name, spec = owners.get(one.name, one.name), rules.targets.get(one.name)
        if spec is None or (name not in written and name not in rules.fresh):
            faults.append(f"{one.name}: no rule for this tensor")
        elif spec.shape != one.shape:
            faults.append(f"{one.name}: shape {list(one.shape)}, the rules have {list(spec.shape)}")
        # A rule may also write tensors of other ranks, and the owner of an alias may be on another pipeline stage.
        for other in written[name].targets if name in written else (name,):
            if other in rules.targets:
                targets[other] = TensorSpec(rules.targets[other].shape, one.dtype)
        targets[one.name] = TensorSpec(one.shape, one.dtype)
    if faults:
        next_step = "Give a rule for every tensor of the model, with its global shape."
        raise invalid_mapping("The model cannot be mapped", faults, next_step, "mapping")
    return structs.replace(
        rules,
        targets=targets,
        rules=tuple(rule for rule in rules.rules if not targets.keys().isdisjoint(rule.targets)),
        ties=tuple(tie for tie in rules.ties if tie.alias in targets),
        fresh=tuple(name for name in rules.fresh if name in targets),
    )


def _cuts(rules: RuleSet, name: str, shape: Shape) -> Shape:
    return rules.cuts.get(name, (1,) * len(shape))


def _text(cuts: Shape) -> str:
    return " x ".join(map(str, cuts)) or "1"


def without_family(config: Mapping[str, object]) -> dict[str, object]:
    """Return a configuration without the key that names a family."""
    return {key: value for key, value in config.items() if key != "model_type"}


def no_family(checkpoint: str) -> MappingError:
    """Return the error for a flex checkpoint without a family where one is required.

    Args:
        checkpoint: its path.
    """
    return MappingError(
        f"{checkpoint} was saved without a family.",
        where=checkpoint,
        evidence=["its configuration has no model_type: its tensors are mapped by name, or by rules of the caller"],
        next_step="Load it with paddleformers_fc.load and its arguments family and config, then save the model again. "
        "A model that no family declares cannot be planned.",
    )


class _Document(msgspec.Struct, frozen=True):
    """The parts of ``mapping.json``."""

    model: msgspec.Raw
    rules: msgspec.Raw


class _Model(msgspec.Struct, frozen=True, omit_defaults=True):
    """A description as it is stored, without rules."""

    config: dict[str, Any]
    is_fleet: bool | None
    adapters: Adapters | None = None
    partial: bool = False


_documents = msgspec.json.Decoder(_Document)
_models = msgspec.json.Decoder(_Model)
_RULE_FIELDS = RuleSet.__struct_fields__


def encode_mapping(model: ModelDescription, rules: RuleSet) -> bytes:
    """Return the bytes of ``mapping.json``."""
    stored = msgspec.json.encode(_Model(dict(model.config), model.is_fleet, model.adapters, model.partial))
    document = _Document(msgspec.Raw(stored), msgspec.Raw(encode_rules(rules)))
    return msgspec.json.format(msgspec.json.encode(document), indent=1)


def decode_mapping(data: bytes, where: str) -> tuple[ModelDescription, RuleSet]:
    """Return the description and the rules of a ``mapping.json``.

    Args:
        data: the bytes of the file.
        where: its path, for errors.
    Raises:
        FormatError: the document does not follow its format.
    """
    try:
        document = _documents.decode(data)
        model = _models.decode(document.model)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            "Invalid mapping of the checkpoint.", where=where, evidence=[str(error)], next_step=RESTORE
        ) from error
    rules = decode_rules(bytes(document.rules), where)
    ignored_extensions(data, _Document.__struct_fields__, where)
    ignored_extensions(document.model, _Model.__struct_fields__, where)
    ignored_extensions(document.rules, _RULE_FIELDS, where)
    return ModelDescription(model.config, model.is_fleet, adapters=model.adapters, partial=model.partial), rules
