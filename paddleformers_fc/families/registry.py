"""The registry of families, from this package and from other distributions, and canonical names that files may lack.

:func:`register` proves a family first, in milliseconds: it binds the tensors of the tiny configuration under several
tensor-parallel degrees, and proves the mapping and its reverse. Families of this package are proved on first use. Other
distributions declare families in the entry point group ``paddleformers_fc.families``: the name is the ``model_type``,
the object a :class:`~paddleformers_fc.families.declarations.Family`, imported for a configuration with this type.

Models with and without prediction layers start from files with and without them. Optional names come in *groups*: all
names with one declared prefix and number, such as prediction layer 0, or, for layers of the model, the names of all
layers, such as the biases of all routers. A file that contains a group only in part is incomplete.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import iter_modules
from typing import Any

from paddleformers_fc.api_arguments import SHAPES, instance_of, require, require_or_none
from paddleformers_fc.errors import FlexError, MappingError, OptionError
from paddleformers_fc.families import models
from paddleformers_fc.families.bind import bind
from paddleformers_fc.families.declarations import FLEET, FORMERS, NUMBER, PLACEHOLDER, Family
from paddleformers_fc.families.description import IS_FLEET, IS_NLP, ModelDescription
from paddleformers_fc.families.enumerate import enumerate_tensors
from paddleformers_fc.families.names import family_keys, family_sizes, tied_sources
from paddleformers_fc.mapping.prove import invalid_mapping, prove
from paddleformers_fc.text import count_text, fold

Group = tuple[int, ...]

_HOLE = "{}"
_OF_THE_MODEL = "layer"
_TOKEN = re.compile(r"\{([^{}]*)\}")


class OptionalNames:
    """The canonical names that files of a model may lack; ``name in optional`` tests a name.

    Args:
        family: the model's family.
        model: the model; its configuration determines the number of the first prediction layer.
    """

    def __init__(self, family: Family, model: ModelDescription) -> None:
        numbers, sizes = family.numbered, family_sizes(family, model)
        self._beginnings: list[tuple[re.Pattern[str], tuple[int, ...]]] = []
        self._apart: list[tuple[bool, ...]] = []
        self._marks = {index: marks for index, text in enumerate(family.optional) if (marks := _marks(family, text))}
        for text in family.optional:
            placeholders = [token for token in _TOKEN.findall(text) if "," not in token]
            starts = tuple(sizes.length(numbers[name].start) for name in placeholders)
            self._beginnings.append((re.compile(_TOKEN.sub(_matcher, _escaped(text))), starts))
            self._apart.append(tuple(name != _OF_THE_MODEL for name in placeholders))

    def group(self, name: str) -> Group | None:
        """Return the group of a canonical name; None if the name is not optional."""
        for index, (pattern, starts) in enumerate(self._beginnings):
            found = pattern.match(name)
            if found is None:
                continue
            numbers = tuple(int(number) for number in found.groups())
            if all(number >= start for number, start in zip(numbers, starts, strict=True)):
                return (index, *itertools.compress(numbers, self._apart[index]))
        return None

    def missed(self, untouched: Sequence[str], stored: Iterable[str]) -> list[str]:
        """Return the stored tensors that a model does not read, but must not ignore.

        These are tensors that are not optional, optional tensors of a layer that is read in part (a bias that the model
        lacks, or scales of quantized values), and layers of the model itself (more than the configuration has).

        Args:
            untouched: the names that the model does not read.
            stored: all stored names.
        """
        left, names = set(untouched), list(stored)
        layers = {name.rpartition(".")[0] for name in names if name not in left}
        grouped = {name: group for name in names if (group := self.group(name)) is not None}
        marked = {one for name, one in grouped.items() if NUMBER.sub(_HOLE, name) in self._marks.get(one[0], ())}
        return [
            name
            for name in untouched
            if (group := self.group(name)) is None
            or name.rpartition(".")[0] in layers
            or (group[0] in self._marks and group not in marked)
        ]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.group(name) is not None


def _marks(family: Family, beginning: str) -> frozenset[str]:
    """Return the names, without numbers, that distinguish groups with this prefix from layers of the model.

    Empty if the prefix is sufficient.
    """
    matches = re.compile(_TOKEN.sub(_matcher, _escaped(beginning))).match
    own: set[str] = set()
    others: set[str] = set()
    for source in (source for statement in family.statements for source in statement.sources):
        if matches(PLACEHOLDER.sub("0", source)):
            (own if source.startswith(beginning) else others).add(PLACEHOLDER.sub(_HOLE, source))
    return frozenset(own - others) if others else frozenset()


def _escaped(text: str) -> str:
    return text.replace(".", r"\.")


def _matcher(token: re.Match[str]) -> str:
    inside = token.group(1)
    return f"(?:{inside.replace(',', '|')})" if "," in inside else r"([0-9]{1,18})"


GROUP = "paddleformers_fc.families"
NLP = "PaddleNLP"
DEGREES = (1, 2, 4)
"""The degrees of tensor parallelism under which a family is proved."""

OWN = tuple(module.name for module in iter_modules(models.__path__))
"""The model types of this package's families; the module of the same name declares each."""

_registered: dict[str, Family] = {}


def own_family(model_type: str) -> Family:
    """Return the family of a model type in :data:`OWN`, without proving it.

    Declarations are imported one by one: all of them would take longer than the other imports of a load.
    """
    family: Family = import_module(f"{models.__name__}.{model_type}").FAMILY
    return family


def own_families() -> tuple[Family, ...]:
    """Return all families of this package."""
    return tuple(map(own_family, OWN))


def family_for(config: Mapping[str, Any]) -> Family:
    """Return the family that declares this configuration's ``model_type``.

    Raises:
        MappingError: the key is missing, no family or several families declare it, or its family cannot be registered.
    """
    if config.get("model_type") is None:
        raise MappingError(
            "The configuration of the model has no model_type, so its family is unknown.",
            where="config.json",
            next_step="Add the model_type of the model to it.",
        )
    model_type = str(config["model_type"])
    if model_type not in _registered:
        declared = [entry for entry in _entries(tuple(sys.path)) if entry.name == model_type]
        origins = [_origin(entry) for entry in declared]
        if model_type in OWN:
            origins.insert(0, "this package")
        if not origins:
            raise _unknown(model_type)
        if len(origins) > 1:
            raise MappingError(
                f"Several distributions declare a family for model_type {model_type!r}.",
                where=f"entry point group {GROUP}",
                evidence=origins,
                next_step="Uninstall the other distributions; a model_type belongs to one family.",
            )
        if declared:
            _load(declared[0])
        else:
            register(own_family(model_type))
    return _registered[model_type]


@lru_cache(maxsize=1)
def _entries(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the families of other distributions, cached by import path, because this reads a file per distribution."""
    return tuple(entry_points(group=GROUP))


def is_known(config: Mapping[str, Any]) -> bool:
    """Return whether a family declares this configuration's ``model_type``, without loading or proving it."""
    model_type = str(config.get("model_type"))
    if model_type in _registered or model_type in OWN:
        return True
    return any(entry.name == model_type for entry in _entries(tuple(sys.path)))


def register(
    family: Family, config: Mapping[str, Any] | None = None, header: Mapping[str, Sequence[int]] | None = None
) -> None:
    """Prove a family on its tiny configuration, and register it in this process.

    Args:
        family: the family.
        config: the configuration of open weights, to also compare the declarations of PaddleFleet's and PaddleFormers'
            classes with them.
        header: the shapes of these open weights by name.
    Raises:
        MappingError: the proof fails, the open weights have different tensors, or another family declares the
            ``model_type``.
        OptionError: only one of configuration and header is given, or an argument is invalid.
    """
    if (config is None) != (header is None):
        raise OptionError(
            "Open weights are compared by their configuration and their header, and one of them is missing.",
            where="header" if header is None else "config",
            next_step="Pass both, or neither.",
        )
    require(instance_of(Family, "lang.family(...)"), family=family)
    require_or_none(instance_of(Mapping, "the configuration as a mapping"), config=config)
    require_or_none(SHAPES, header=header)
    if config is not None and config.get("model_type", family.name) != family.name:
        raise OptionError(
            f"The configuration is of model_type {config['model_type']!r}, and the family of {family.name!r}.",
            where="config",
            next_step="Pass the configuration of open weights of this family.",
        )
    known = own_family(family.name) if family.name in OWN else _registered.get(family.name, family)
    if known is not family:
        raise MappingError(
            f"Family {family.name} cannot be registered.",
            evidence=[f"{family.name}: another family is registered for this model_type"],
            next_step="Choose another model_type; it belongs to one family.",
        )
    prove_family(family)
    for model in [] if config is None else _models(family, config):
        require_header(family, model, header or {})
    _registered[family.name] = family


def require_header(family: Family, model: ModelDescription, header: Mapping[str, Sequence[int]]) -> None:
    """Check that a declaration has exactly the canonical tensors of open weights.

    Args:
        family: the family.
        model: the model of the open weights.
        header: the shapes of the open weights by name.
    Raises:
        MappingError: names or shapes differ; optional names and copies of tied tensors are not compared.
    """
    tensors = [tensor.under() for tensor in enumerate_tensors(family, model)]
    declared = {name: list(spec.shape) for name, spec in bind(family, model, tensors).mapping().sources.items()}
    optional, tied = OptionalNames(family, model), tied_sources(family, model)
    faults = [f"{name}: declared, not in the weights" for name in declared if name not in header]
    faults += [f"{name}: in the weights, not declared" for name in header if name not in declared and name not in tied]
    faults = [fault for fault in faults if fault.partition(":")[0] not in optional]
    faults += [
        f"{name}: declared with shape {shape}, {list(header[name])} in the weights"
        for name, shape in declared.items()
        if name in header and list(header[name]) != shape
    ]
    if faults:
        next_step = "Correct the declaration, or the configuration of the open weights."
        kind = "" if model.is_fleet is None else f" with the {(FLEET if model.is_fleet else FORMERS).value} class"
        what = f"Family {family.name}{kind} does not declare these open weights"
        raise invalid_mapping(what, faults, next_step)


def tiny_models(family: Family) -> list[ModelDescription]:
    """Describe the tiny model of a family in each of its classes: PaddleFleet, PaddleFormers, PaddleNLP."""
    models = _models(family, {"model_type": family.name, **family.defaults, **family.tiny})
    if IS_NLP in family_keys(family):
        models.append(ModelDescription({**models[-1].config, IS_NLP: True}, models[-1].is_fleet))
    return models


def _models(family: Family, config: Mapping[str, Any]) -> list[ModelDescription]:
    """Describe a model in every class of a family of PaddleFleet and PaddleFormers."""
    kinds = (True, False) if IS_FLEET in family_keys(family) else (None,)
    return [ModelDescription(dict(config), is_fleet) for is_fleet in kinds]


def family_classes(family: Family) -> list[str]:
    """Return the libraries of the model classes of a family, in the order of :func:`tiny_models`."""
    # In PaddleFleet's classes, the embedding is in a layer of this name.
    only = FLEET if any(".embedding.embed_tokens." in one.target for one in family.statements) else FORMERS
    kinds = {True: FLEET, False: FORMERS, None: only}
    return [NLP if IS_NLP in model.config else kinds[model.is_fleet].value for model in tiny_models(family)]


def prove_family(family: Family) -> int:
    """Prove the tiny models of a family under every degree of :data:`DEGREES`, forward and reversed.

    Returns:
        the total number of tensors of all classes.
    Raises:
        MappingError: with every fault of the first degree that has any.
    """
    return sum(_prove(family, model) for model in tiny_models(family))


def _prove(family: Family, model: ModelDescription) -> int:
    try:
        tensors = list(enumerate_tensors(family, model))
    except MappingError as error:
        if error.where != "config.json":
            raise
        raise MappingError(
            error.what,
            where=f"tiny configuration of family {family.name}",
            evidence=error.evidence,
            next_step="Add the key to tiny or defaults of the family, or correct its sizes.",
        ) from error
    if not tensors:
        raise MappingError(
            f"Family {family.name} declares no tensor under its tiny configuration.",
            next_step="Give the family a tiny configuration that meets its conditions.",
        )
    counts = Counter(tensor.name for tensor in tensors)
    twins = [f"{name}: {count} statements declare it" for name, count in counts.items() if count > 1]
    if twins:
        raise MappingError(
            f"Family {family.name} declares {count_text(len(twins), 'tensor')} twice under one configuration.",
            evidence=fold(twins),
            next_step="Give the statements conditions that exclude each other.",
        )
    for degree in DEGREES:
        under = [tensor.under(tp=degree) for tensor in tensors]
        mapping = bind(family, model, under).mapping()
        prove(mapping, f"The mapping of family {family.name} under {degree} tensor-parallel ranks")
        prove(mapping.reversed(), f"The reverse of family {family.name} under {degree} tensor-parallel ranks")
    return len(tensors)


def _load(entry: EntryPoint) -> None:
    """Import and register the family that another distribution declares."""
    try:
        family = entry.load()
        if not isinstance(family, Family):
            raise TypeError(f"{entry.value} is {type(family).__name__}, not a Family")
        if entry.name != family.name:
            raise ValueError(f"it declares model_type {family.name}")
        register(family)
    except FlexError as error:
        raise _not_loaded(entry, [error.what, *error.evidence]) from error
    except Exception as error:  # Another distribution's code may fail in any way.
        raise _not_loaded(entry, [f"{type(error).__name__}: {error}"]) from error


def _not_loaded(entry: EntryPoint, evidence: list[str]) -> MappingError:
    return MappingError(
        f"The family for model_type {entry.name!r} cannot be registered.",
        where=_origin(entry),
        evidence=evidence,
        next_step="Report this to the authors of that distribution, or uninstall it.",
    )


def _origin(entry: EntryPoint) -> str:
    name, version = (entry.dist.name, entry.dist.version) if entry.dist is not None else ("unknown", "?")
    return f"distribution {name} {version}, entry point {entry.name} = {entry.value}"


def _unknown(model_type: str) -> MappingError:
    known = {*OWN, *_registered, *(entry.name for entry in _entries(tuple(sys.path)))}
    return MappingError(
        f"No family declares model_type {model_type!r}.",
        where="config.json",
        evidence=[f"known model types: {', '.join(sorted(known))}"],
        next_step="Declare the family, as docs/add-a-family.md shows (commands find it by its entry point), or give "
        "its class _gen_aoa_config.",
    )
