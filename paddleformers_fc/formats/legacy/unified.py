"""Unified checkpoints of PaddleFormers' Trainer: safetensors files of weights and of states.

=========================================  ================================================
``model-0000i-of-N.safetensors``           weights by the name of their parameter
``optimizer-0000i-of-N.safetensors``       states, such as ``lm_head.weight/moment1_0``
``master_weights-0000i-of-N.safetensors``  master weights by the name of their parameter
=========================================  ================================================

Each kind has an index, ``optimizer.safetensors.index.json``, or is one file without a number. Tensor-parallel parts are
merged. States and master weights have the orientation of the model. Weights of linear layers have that of open weights
in files whose metadata contain ``format: pt``. The shape of the states or the declaration of the family proves it. For
square weights other layers of the same name prove it, or ``qkv`` beside ``proj``, or the master weight, or the
embedding that a head is tied to. A state that several sharding ranks store in ranges of elements is joined in the order
of the files. Expert-parallel ranks may count their experts from 0: the same names are then in several files, and the
order of the files gives the offset.

Under ``remove_master_weight`` there are no master weights, and those of the weights are read from them with a cast.

There are no checksums, and files of weights record no step. The powers of Adam's betas show the steps of the files of
states.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from paddleformers_fc.errors import Corrupt, FormatError, MappingError
from paddleformers_fc.families import enumerate_tensors, family_for
from paddleformers_fc.families.description import IS_NLP
from paddleformers_fc.families.names import Names, family_sizes
from paddleformers_fc.families.registry import is_known
from paddleformers_fc.formats.catalog import Catalog, StoredTensor, gather_shards
from paddleformers_fc.formats.checkpoint import (
    CONFIG_NAME,
    CheckList,
    Format,
    OpenedCheckpoint,
    StoredModel,
    StoredShard,
)
from paddleformers_fc.formats.huggingface import HUGGINGFACE, indexed_files, refuse_unindexed
from paddleformers_fc.formats.legacy.rank_files import (
    EMA,
    OPTIMIZER,
    FileArray,
    arrange,
    arrays_of,
    is_rank_file,
    is_transposed,
    refuse_mixed,
)
from paddleformers_fc.formats.legacy.rank_shards import is_of_nlp, reinterpreted, stored_model
from paddleformers_fc.formats.paddle_distcp import PADDLE_DISTCP
from paddleformers_fc.formats.stock_checkpoint import (
    COPY_AGAIN_STEP,
    NAME_CONFIG,
    model_description,
    open_stock,
    read_stock_config,
    refuse_links,
    verify_stock,
)
from paddleformers_fc.formats.stock_run import removes_masters
from paddleformers_fc.layout.roles import (
    MASTER,
    MASTER_WEIGHT,
    MODEL_STATE,
    OPTIMIZER_STATE,
    StateShape,
    split_state_name,
)
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping import Shape
from paddleformers_fc.mapping.boxes import whole
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.storage.dtypes import dtype_size
from paddleformers_fc.storage.files import is_directory, list_directory
from paddleformers_fc.storage.identities import identities_of
from paddleformers_fc.storage.paths import AnyPath, require_local
from paddleformers_fc.storage.safetensors import Header, read_header
from paddleformers_fc.text import count_text

_WEIGHTS, _STATES, _MASTERS = "model", "optimizer", "master_weights"
_KINDS = (_WEIGHTS, _STATES, _MASTERS)
_FILE = re.compile(r"(model|optimizer|master_weights)(?:-[0-9]{5}-of-([0-9]{5}))?\.safetensors")
_UNMERGED = re.compile(r"(?:optimizer|master_weights)(?:\.[a-z0-9_]+\.safetensors|.*\.safetensors_shard_[0-9]{4})")
"""Files of ``ignore_merge_optimizer``: one per rank, with parts that nothing describes."""
_OF_TORCH = "pt"
"""The ``format`` of files whose linear weights have the orientation of open weights."""
_OF_LAYER = ".weight"
_LINEAR = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
"""Layers that PaddleFormers transposes in every family that has them, see ``transpose_weight_keys``."""
_NEVER_TRANSPOSED = "embed_tokens"
"""The layer that PaddleFormers transposes in no family."""
_HEAD, _TIED = "lm_head", "tie_word_embeddings"
_SIBLINGS = {"q_proj": "k_proj"}
"""A layer that is transposed only in families that have the other one beside it."""
_PARTNERS = {"proj": "qkv"}
"""A layer that is transposed if the other one is."""
_EXPERT = re.compile(r"(.*\.experts\.)([0-9]{1,6})(\..*)")
_NUMBERED = re.compile(r"[._]?[0-9]+\Z")
_HALF = ("bfloat16", "float16")
_FLOATS = ("float16", "float32", "float64")

Arrays = dict[str, list[FileArray]]
"""The arrays of a name, in the order of their files."""


@dataclass(frozen=True)
class _Content:
    """The arrays of all files of one kind, and the files of open weights' orientation."""

    arrays: Arrays = field(default_factory=dict)
    turned: frozenset[str] = frozenset()


def open_unified(directory: AnyPath, given: Mapping[str, Any]) -> OpenedCheckpoint:
    """Open a unified checkpoint.

    Args:
        directory: the directory.
        given: the model's configuration if the directory has none; empty for none.
    Raises:
        Corrupt: files or tensors that an index lists are missing, files are of different steps, or tensors are not
            stored whole; all of them.
        FormatError: files of two checkpoints, of ``ignore_merge_optimizer`` or of quantised states.
        MappingError: the family of the model does not declare a tensor.
    """
    directory = require_local(directory, "A unified checkpoint")
    names = sorted(path.name for path in list_directory(directory))
    _refuse_others(directory, names)
    config = read_stock_config(directory, given)
    refuse_links(directory, (directory / name for name in map(_index_name, _KINDS) if name in names))
    listed = {kind: _files(directory, kind, names) for kind in _KINDS}
    refuse_links(directory, (directory / name for files in listed.values() for name in files))
    # Before the headers: the bytes that are read later must be those of these files.
    identities = identities_of(directory / name for files in listed.values() for name in files)
    contents = {kind: _content(directory / _index_name(kind), files) for kind, files in listed.items()}
    assembly = _Assembly(directory, config.used, contents)
    catalog = Catalog(directory, assembly.roles(), identities)
    cuts = {name: (1,) * len(one.shape) for name, one in catalog.roles.get(MODEL_STATE, {}).items()}

    def describe(config: dict[str, Any]) -> StoredModel:
        return stored_model(catalog, config, cuts)

    return open_stock(UNIFIED, directory, catalog, assembly.faults, config, describe)


def _refuse_others(directory: Path, names: Sequence[str]) -> None:
    """Refuse files of other checkpoints, and those of which nothing describes the parts."""
    mixed = [[name, "safetensors files of states"] for name in names if is_rank_file(name, OPTIMIZER, EMA)]
    if PADDLE_DISTCP.recognises(directory):
        mixed.append([MODEL_STATE, "safetensors files of states"])
    refuse_mixed(directory, mixed)
    unmerged = [name for name in names if _UNMERGED.fullmatch(name)]
    if unmerged:
        raise FormatError(
            f"{directory} contains unmerged files of optimizer states.",
            where=str(directory),
            evidence=fold(unmerged),
            next_step="Resume it with PaddleFormers, and save it without ignore_merge_optimizer.",
        )


def _files(directory: Path, kind: str, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of a kind, and the tensors that the index lists in each.

    They include files of the same numbering that the index does not list: if expert-parallel ranks all count their
    experts from 0, it lists only one of them.
    """
    index, single = _index_name(kind), f"{kind}.safetensors"
    own = {name: found[2] for name in names if (found := _FILE.fullmatch(name)) and found[1] == kind}
    numbered = [name for name, total in own.items() if total]
    if index in names:
        files = indexed_files(directory / index, None)
        totals = {found[2] for name in files if (found := _FILE.fullmatch(name))}
        files |= {name: [] for name in numbered if own[name] in totals and name not in files}
    elif single in own:
        files = {single: []}
    elif numbered:
        raise Corrupt(
            f"{directory} has no {index}.", where=str(directory), evidence=numbered[:8], next_step=COPY_AGAIN_STEP
        )
    else:
        return {}
    others = [name for name in own if name not in files]
    refuse_mixed(directory, [[*others[:8], *list(files)[:1]]] if others else [])
    return dict(sorted(files.items()))


def _index_name(kind: str) -> str:
    return f"{kind}.safetensors.index.json"


def _content(index: Path, files: Mapping[str, Sequence[str]]) -> _Content:
    """Return the arrays of the files of one kind.

    Args:
        index: of the files, which need not exist.
        files: the tensors that it lists in each.
    Raises:
        Corrupt: a file lacks a tensor that the index lists in it.
    """
    headers: dict[str, Header] = {name: read_header(index.parent / name) for name in files}
    refuse_unindexed(index, files, headers)
    arrays: Arrays = {}
    for name, header in headers.items():
        for tensor, array in arrays_of(name, header).items():
            arrays.setdefault(tensor, []).append(array)
    turned = (name for name, header in headers.items() if header.metadata.get("format") == _OF_TORCH)
    return _Content(arrays, frozenset(turned))


@dataclass
class _Assembly:
    """Makes tensors of the arrays of all files.

    Args:
        directory: the checkpoint.
        config: its configuration; empty if there is none.
        contents: the contents of the files of each kind.
    Attributes:
        faults: why the files are not one whole checkpoint.
    """

    directory: Path
    config: Mapping[str, Any]
    contents: Mapping[str, _Content]
    faults: list[str] = field(default_factory=list)
    _shapes: dict[str, Shape] = field(default_factory=dict)

    def roles(self) -> dict[str, dict[str, StoredTensor]]:
        """Return the tensors by role."""
        arrays = {kind: self._renumbered(content.arrays) for kind, content in self.contents.items()}
        states = {
            OPTIMIZER_STATE: self._named(arrays[_STATES]),
            # Parameters of float32 are copied into the files of master weights, and have none.
            MASTER_WEIGHT: {
                name + MASTER.suffix: own
                for name, own in arrays[_MASTERS].items()
                if name not in arrays[_WEIGHTS] or arrays[_WEIGHTS][name][0].dtype != MASTER.dtype
            },
        }
        self._refuse_masters_as_weights(arrays)
        roles = self._weights(arrays[_WEIGHTS], states)
        if not arrays[_MASTERS] and removes_masters(self.directory):
            trained = {split_state_name(OPTIMIZER_STATE, name).parameter for name in states[OPTIMIZER_STATE]}
            roles |= _masters_of({name: one for name, one in roles.get(MODEL_STATE, {}).items() if name in trained})
        for role in (MASTER_WEIGHT, OPTIMIZER_STATE):
            self._add(roles, role, (one for name, own in states[role].items() for one in self._state(role, name, own)))
        if MODEL_STATE not in roles:
            self.faults.append(f"{MODEL_STATE}: no tensor is stored")
        return roles

    def _refuse_masters_as_weights(self, arrays: Mapping[str, Arrays]) -> None:
        """Refuse files of weights with the master weights of a model of 16 bits in them."""
        dtypes = {own[0].dtype for own in arrays[_WEIGHTS].values()}
        stated = self.config.get("dtype") or self.config.get("torch_dtype")
        if stated in _HALF and dtypes == {MASTER.dtype} and not arrays[_MASTERS]:
            raise FormatError(
                f"The files of weights in {self.directory} contain master weights.",
                where=str(self.directory),
                evidence=[f"all are {MASTER.dtype}, {CONFIG_NAME} has {stated}, and there are no master weights"],
                next_step="Resume it with PaddleFormers, and save it without skip_save_model_weight.",
            )

    def _named(self, arrays: Arrays) -> Arrays:
        """Return states under their full names."""
        self.faults += [f"{own[0].file}: {name} is not a state" for name, own in arrays.items() if "/" not in name]
        return {".".join(name.rsplit("/", 1)): own for name, own in arrays.items() if "/" in name}

    def _add(self, roles: dict[str, dict[str, StoredTensor]], role: str, shards: Iterator[StoredShard]) -> None:
        tensors, contradictions = gather_shards(shards)
        self.faults += contradictions
        if tensors:
            roles[role] = tensors

    def _weights(self, weights: Arrays, states: Mapping[str, Arrays]) -> dict[str, dict[str, StoredTensor]]:
        known: dict[str, set[Shape]] = {}
        for role, named in states.items():
            for name, own in named.items():
                known.setdefault(split_state_name(role, name).parameter, set()).update(one.shape for one in own)
        straight: list[StoredShard] = []
        turned: list[StoredShard] = []
        decided = self._turned(weights, known, states.get(MASTER_WEIGHT, {}))
        self._refuse_unproved(decided)
        for name, (array, *copies) in weights.items():
            if any((one.shape, one.dtype) != (array.shape, array.dtype) for one in copies):
                self.faults.append(f"{name}: {array.file} and {copies[0].file} contain different parts of it")
            is_turned = decided[name]
            shape = self._shapes[name] = array.shape[::-1] if is_turned else array.shape
            shard = Shard(name, array.dtype, shape, whole(shape)), array.file, array.begin, dtype_size(array.dtype)
            (turned if is_turned else straight).append(shard)
        roles: dict[str, dict[str, StoredTensor]] = {}
        self._add(roles, MODEL_STATE, iter(straight))
        reversed_ones, _ = gather_shards(turned)
        if reversed_ones:
            roles.setdefault(MODEL_STATE, {}).update(reinterpreted(reversed_ones, turned=True))
        return roles

    def _refuse_unproved(self, decided: Mapping[str, bool | str]) -> None:
        """Refuse weights of which nothing shows whether they are transposed."""
        unproved = [f"{name}: {why}" for name, why in decided.items() if isinstance(why, str)]
        if unproved:
            raise FormatError(
                f"The orientation of {count_text(len(unproved), 'weight')} in {self.directory} cannot be proved.",
                where=str(self.directory),
                evidence=fold(unproved),
                next_step="Resume the checkpoint with PaddleFormers, and save it with save_to_hf: false."
                if self.config
                else NAME_CONFIG,
            )

    def _turned(
        self, weights: Arrays, known: Mapping[str, Collection[Shape]], masters: Arrays
    ) -> dict[str, bool | str]:
        """Return for every weight whether its file contains it transposed, or as text why that cannot be proved.

        The writer decides by the last part of the name, so layers that are not square decide for those that are.

        Args:
            weights: all weights.
            known: shapes of the states by weight.
            masters: master weights by their full name.
        """
        found: dict[str, bool | str] = {}
        votes: dict[str, set[bool | str]] = {}
        for name, (array, *_) in weights.items():
            shape, back = array.shape, array.shape[::-1]
            if len(shape) != 2 or array.file not in self.contents[_WEIGHTS].turned or not name.endswith(_OF_LAYER):
                found[name] = False
            elif shape != back:
                found[name] = self._is_turned(name, shape, known.get(name, ()))
                votes.setdefault(_leaf(name), set()).add(found[name])
        for name in weights.keys() - found.keys():
            leaf = _leaf(name)
            seen = votes.get(leaf) or votes.get(_PARTNERS.get(leaf, ""), set())
            sibling = f"{name.removesuffix(leaf + _OF_LAYER)}{_SIBLINGS.get(leaf, leaf)}{_OF_LAYER}"
            if not seen and leaf in _LINEAR and sibling in weights:
                found[name] = True
            elif len(seen) == 1:
                found[name] = next(iter(seen))
            else:
                found[name] = self._is_square_turned(name, weights, masters.get(name + MASTER.suffix, ()))
        return found

    def _is_square_turned(self, name: str, weights: Arrays, master: Sequence[FileArray]) -> bool | str:
        """Return whether a square weight is transposed, from the numbers of its master weight or its embedding."""
        if _leaf(name) == _NEVER_TRANSPOSED:
            return False
        tied = [own for other, own in weights.items() if _leaf(other) == _NEVER_TRANSPOSED]
        if not master and _leaf(name) == _HEAD and self.config.get(_TIED) is True and len(tied) == 1:
            master = tied[0][:1]
        shown = is_transposed(self.directory, weights[name][0], master) if master else None
        return "nothing shows the orientation of the square" if shown is None else shown

    def _is_turned(self, name: str, shape: Shape, known: Collection[Shape]) -> bool | str:
        """Return whether a weight that is not square is transposed, from its states or else its family.

        States in ranges of elements do not show it. The family's tensors are limited to the classes of the names; if
        the configuration is not sufficient, every declaration counts.
        """
        both = shape, shape[::-1]
        for proved in (
            known,
            self._enumerated.get(name, ()),
            [one for one in both if self._is_declared(name, one)],
        ):
            fits = [one in proved for one in both]
            if fits[0] != fits[1]:
                return fits[1]
        return "neither its states nor its family show its orientation"

    def _is_declared(self, name: str, shape: Shape) -> bool:
        return self._declared is not None and not isinstance(self._declared.whole(name, shape, 1), str)

    @cached_property
    def _enumerated(self) -> dict[str, set[Shape]]:
        """The shapes of every tensor in the classes of PaddleFormers that have most of the stored names.

        Names with the scope of PaddleNLP's classes are theirs.
        """
        found: dict[str, set[Shape]] = {}
        if not is_known(self.config):
            return found
        stored = self.contents[_WEIGHTS].arrays.keys()
        family, model = family_for(self.config), model_description(self.directory, self.config)
        if is_of_nlp(family, stored):
            model = replace(model, config={**model.config, IS_NLP: True})
        classes: list[dict[str, Shape]] = []
        for is_fleet in (False, True):
            with contextlib.suppress(MappingError):  # The configuration lacks a size: every declaration remains.
                declared = enumerate_tensors(family, replace(model, is_fleet=is_fleet))
                classes.append({one.name: one.shape for one in declared})
        unknown = [len(stored - one.keys()) for one in classes]
        for one in itertools.compress(classes, (count == min(unknown) for count in unknown)):
            for name, shape in one.items():
                found.setdefault(name, set()).add(shape)
        return found

    @cached_property
    def _declared(self) -> Names | None:
        """The tensors that the family declares; None if it is unknown."""
        if not is_known(self.config):
            return None
        model = model_description(self.directory, self.config)
        return Names(family_for(model.config), model)

    def _state(self, role: str, name: str, arrays: Sequence[FileArray]) -> Iterator[StoredShard]:
        """Yield a state: whole in the first file, or as ranges of elements of which each file has one."""
        first = arrays[0]
        split = split_state_name(role, name, first.shape)
        shape = self._shapes.get(split.parameter)
        if shape is None:
            self.faults.append(f"{name}: {first.file} contains it, and its weight is not stored")
        elif not first.dtype.endswith(_FLOATS):
            self.faults.append(f"{name}: {first.dtype} in {first.file}: quantised states cannot be read")
        elif split.shape is StateShape.NUMBER:
            yield (
                Shard(name, first.dtype, first.shape, whole(first.shape)),
                first.file,
                first.begin,
                dtype_size(first.dtype),
            )
        else:
            placed = arrange(shape, arrays)
            self.faults += [f"{name}: {placed}"] if isinstance(placed, str) else []
            for piece, flat in placed if not isinstance(placed, str) else ():
                yield (
                    Shard(name, first.dtype, shape, whole(shape), flat),
                    piece.file,
                    piece.begin,
                    dtype_size(piece.dtype),
                )

    def _renumbered(self, arrays: Arrays) -> Arrays:
        """Return arrays with the experts' numbers in the model, where ranks count theirs from 0."""
        local = {name: found for name in arrays if (found := _EXPERT.fullmatch(name))}
        count = max((int(found[2]) for found in local.values()), default=0) + 1
        total = self._experts
        if count == total or all(len(arrays[name]) == 1 for name in local):
            return arrays
        renumbered = {name: own for name, own in arrays.items() if name not in local}
        for name, found in local.items():
            if not total or len(arrays[name]) * count != total:
                self.faults.append(
                    f"{name}: in {count_text(len(arrays[name]), 'file')} with {count_text(count, 'expert')} each, and "
                    f"the configuration has {total or 'no number of experts'}"
                )
            for rank, array in enumerate(arrays[name]):
                renumbered[f"{found[1]}{rank * count + int(found[2])}{found[3]}"] = [array]
        return renumbered

    @property
    def _experts(self) -> int:
        """The number of experts in a layer; 0 if the configuration does not give it."""
        if not is_known(self.config):
            return 0
        model = model_description(self.directory, self.config)
        sizes = family_sizes(family_for(model.config), model)
        return sizes.length("experts") if sizes.defines("experts") else 0


def _masters_of(weights: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Return the weights of 16 bits as their master weights, as PaddleFormers loads them."""
    forms = {one.form: replace(one.form, dtype=MASTER.dtype, file_dtype=one.dtype) for one in weights.values()}
    named = {name + MASTER.suffix: one for name, one in weights.items() if one.dtype in _HALF}
    found = {name: StoredTensor(name, forms[one.form], one.offsets) for name, one in named.items()}
    return {MASTER_WEIGHT: found} if found else {}


def _leaf(name: str) -> str:
    """Return the name of a layer without the number that it may end with."""
    return _NUMBERED.sub("", name.removesuffix(_OF_LAYER)).rpartition(".")[2]


class UnifiedFormat(Format):
    """Safetensors files of weights and of states, as PaddleFormers' ``unified_checkpoint`` writes them."""

    name = "unified"
    title = "unified checkpoint of PaddleFormers"
    predicate = "was written by PaddleFormers as a unified checkpoint"
    roles = (MODEL_STATE, MASTER_WEIGHT, OPTIMIZER_STATE)
    canonical = False
    loadable = True
    advice = "Name it in resume_from_checkpoint; or make a flex checkpoint of it with paddleformers-fc convert."
    checks = ("tensors", "model", "equal values")
    writer = None

    def recognises(self, directory: AnyPath) -> bool:
        """Return whether there are safetensors files of optimizer states or master weights, or an index of them."""
        if not isinstance(directory, Path) or not is_directory(directory):
            return False
        return any(_is_of_states(path.name) for path in list_directory(directory))

    def open(self, directory: AnyPath, verify: str) -> OpenedCheckpoint:
        """As :func:`open_unified`; there is nothing that a level could compare."""
        return open_unified(directory, {})

    def open_under(self, directory: AnyPath, verify: str, config: Mapping[str, Any]) -> OpenedCheckpoint:
        """As :meth:`open`; the configuration shows orientations and numbers of experts."""
        return open_unified(directory, config)

    def read_config(self, directory: AnyPath) -> dict[str, Any]:
        """Return ``config.json``."""
        return HUGGINGFACE.read_config(directory)

    def verify(self, directory: AnyPath, level: str, checks: CheckList) -> OpenedCheckpoint:
        """Check that every tensor is stored whole and once, and that none of the model is missing."""
        return verify_stock(checks, lambda: open_unified(directory, {}))


def _is_of_states(name: str) -> bool:
    found = _FILE.fullmatch(name.removesuffix(".index.json"))
    return bool(_UNMERGED.fullmatch(name)) or (found is not None and found[1] != _WEIGHTS)


UNIFIED = UnifiedFormat()
