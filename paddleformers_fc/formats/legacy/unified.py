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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from paddleformers_fc.errors import Corrupt, FormatError, MappingError
from paddleformers_fc.families import enumerate_tensors, family_for, is_known
from paddleformers_fc.families.names import Names, family_sizes
from paddleformers_fc.formats import stock_checkpoint as stock
from paddleformers_fc.formats.checkpoint import CONFIG_NAME, Config, Format, OpenedCheckpoint, StoredShard
from paddleformers_fc.formats.huggingface import indexed_files, read_files
from paddleformers_fc.formats.legacy.rank_files import (
    EMA,
    MODEL,
    OPTIMIZER,
    RankContent,
    arrange,
    check_one_checkpoint,
    is_rank_file,
)
from paddleformers_fc.formats.legacy.rank_shards import Assembly, StageFiles
from paddleformers_fc.formats.paddle_distcp import PADDLE_DISTCP
from paddleformers_fc.formats.stock_run import COPY_AGAIN_STEP, removes_masters
from paddleformers_fc.layout.roles import MASTER, MASTER_WEIGHT, MODEL_STATE, OPTIMIZER_STATE
from paddleformers_fc.mapping import Shape
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors
from paddleformers_fc.storage.files import is_directory, list_directory, open_local, read_range
from paddleformers_fc.storage.paths import AnyPath, require_local
from paddleformers_fc.storage.safetensors import Header
from paddleformers_fc.text import count_text, fold

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
_COMPARED = 64
"""The number of rows that are compared."""

Arrays = dict[str, list[stock.FileArray]]
"""The arrays of a name, in the order of their files."""


@dataclass(frozen=True)
class _Content:
    """The arrays of all files of one kind, and the files of open weights' orientation."""

    arrays: Arrays = field(default_factory=dict)
    turned: frozenset[str] = frozenset()


def _assembled(
    directory: Path, config: Mapping[str, Any], weights: _Content, states: _Content, masters: _Content
) -> Assembly:
    """Return the tensors as those of one rank, whose variables have the names of parameters."""
    assembly = Assembly(directory, config, 1, has_states=False)
    experts = _experts(directory, config)
    own, named, exact = (_renumbered(one.arrays, experts, assembly.faults) for one in (weights, states, masters))
    _check_no_masters_as_weights(directory, config, own, exact)
    # Parameters of float32 are copied into the files of master weights, and have none.
    exact = {name: one for name, one in exact.items() if name not in own or own[name][0].dtype != MASTER.dtype}
    turned = _Orientation(directory, config, weights.turned, own, named, exact).of_weights()
    shapes: dict[str, tuple[Shape, str]] = {}
    canonical: dict[str, list[tuple[bool, StoredShard]]] = {}
    for name, (array, *copies) in own.items():
        if any((one.shape, one.dtype) != (array.shape, array.dtype) for one in copies):
            assembly.faults.append(f"{name}: {array.file} and {copies[0].file} contain different parts of it")
        shapes[name] = array.shape[::-1] if turned[name] else array.shape, array.dtype
        canonical[name] = [(turned[name], array.shard(name, shapes[name][0]))]
    variables = {name: name for name in own}
    contents = [
        RankContent(
            {"_".join(name.rsplit("/", 1)): one[at] for name, one in named.items() if at < len(one)},
            {name: one[at] for name, one in exact.items() if at < len(one)},
        )
        for at in range(max(map(len, (*named.values(), *exact.values())), default=0))
    ]
    assembly.add(StageFiles(0, 0, {MODEL: [], OPTIMIZER: contents, EMA: []}, variables, shapes, canonical=canonical))
    if not masters.arrays and removes_masters(directory):
        for name in own.keys() & {name.rpartition("/")[0] for name in named}:
            array, (shape, dtype) = own[name][0], shapes[name]
            if dtype in _HALF:
                shard = array.shard(name + MASTER.suffix, shape, dtype=MASTER.dtype)
                assembly.keep((MASTER_WEIGHT, dtype, turned[name]), shard)
    return assembly


def _check_only_ours(directory: Path, names: Sequence[str]) -> None:
    """Refuse files of other checkpoints, and those of which nothing describes the parts."""
    mixed = [[name, "safetensors files of states"] for name in names if is_rank_file(name, OPTIMIZER, EMA)]
    if PADDLE_DISTCP.recognises(directory):
        mixed.append([MODEL_STATE, "safetensors files of states"])
    check_one_checkpoint(directory, mixed)
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
    check_one_checkpoint(directory, [[*others[:8], *list(files)[:1]]] if others else [])
    return dict(sorted(files.items()))


def _index_name(kind: str) -> str:
    return f"{kind}.safetensors.index.json"


def _content(headers: Mapping[str, Header]) -> _Content:
    """Return the arrays of the files of one kind."""
    arrays: Arrays = {}
    for name, header in headers.items():
        for tensor, array in stock.arrays_of(name, header).items():
            arrays.setdefault(tensor, []).append(array)
    turned = (name for name, header in headers.items() if header.metadata.get("format") == _OF_TORCH)
    return _Content(arrays, frozenset(turned))


def _check_no_masters_as_weights(directory: Path, config: Mapping[str, Any], weights: Arrays, masters: Arrays) -> None:
    """Refuse files of weights with the master weights of a model of 16 bits in them."""
    stated = config.get("dtype") or config.get("torch_dtype")
    if stated in _HALF and {own[0].dtype for own in weights.values()} == {MASTER.dtype} and not masters:
        raise FormatError(
            f"The files of weights in {directory} contain master weights.",
            where=str(directory),
            evidence=[f"all are {MASTER.dtype}, {CONFIG_NAME} has {stated}, and there are no master weights"],
            next_step="Resume it with PaddleFormers, and save it without skip_save_model_weight.",
        )


@dataclass(frozen=True)
class _Orientation:
    """Proves which weights the files contain transposed.

    Args:
        directory: the checkpoint.
        config: its configuration; empty if there is none.
        files: the files of open weights' orientation.
        weights: all weights.
        states: the states of optimizers.
        masters: the master weights by the name of their parameter.
    """

    directory: Path
    config: Mapping[str, Any]
    files: frozenset[str]
    weights: Arrays
    states: Arrays
    masters: Arrays

    def of_weights(self) -> dict[str, bool]:
        """Return for every weight whether its file contains it transposed.

        Raises:
            FormatError: nothing shows the orientation of some weights.
        """
        decided = self._turned()
        unproved = [f"{name}: {why}" for name, why in decided.items() if isinstance(why, str)]
        if unproved:
            raise FormatError(
                f"The orientation of {count_text(len(unproved), 'weight')} in {self.directory} cannot be proved.",
                where=str(self.directory),
                evidence=fold(unproved),
                next_step="Resume the checkpoint with PaddleFormers, and save it with save_to_hf: false."
                if self.config
                else stock.NAME_CONFIG,
            )
        return {name: one for name, one in decided.items() if isinstance(one, bool)}

    def _turned(self) -> dict[str, bool | str]:
        """Return for every weight whether its file contains it transposed, or as text why that cannot be proved.

        The writer decides by the last part of the name, so layers that are not square decide for those that are.
        """
        known: dict[str, set[Shape]] = {}
        for name, own in (*self.states.items(), *((f"{name}/", own) for name, own in self.masters.items())):
            known.setdefault(name.rpartition("/")[0], set()).update(one.shape for one in own)
        found: dict[str, bool | str] = {}
        votes: dict[str, set[bool | str]] = {}
        for name, (array, *_) in self.weights.items():
            shape = array.shape
            if len(shape) != 2 or array.file not in self.files or not name.endswith(_OF_LAYER):
                found[name] = False
            elif shape != shape[::-1]:
                found[name] = self._is_turned(name, shape, known.get(name, ()))
                votes.setdefault(_leaf(name), set()).add(found[name])
        for name in self.weights.keys() - found.keys():
            leaf = _leaf(name)
            seen = votes.get(leaf) or votes.get(_PARTNERS.get(leaf, ""), set())
            sibling = f"{name.removesuffix(leaf + _OF_LAYER)}{_SIBLINGS.get(leaf, leaf)}{_OF_LAYER}"
            if not seen and leaf in _LINEAR and sibling in self.weights:
                found[name] = True
            elif len(seen) == 1:
                found[name] = next(iter(seen))
            else:
                found[name] = self._is_square_turned(name)
        return found

    def _is_square_turned(self, name: str) -> bool | str:
        """Return whether a square weight is transposed, from the numbers of its master weight or its embedding."""
        if _leaf(name) == _NEVER_TRANSPOSED:
            return False
        master = self.masters.get(name, [])
        tied = [own for other, own in self.weights.items() if _leaf(other) == _NEVER_TRANSPOSED]
        if not master and _leaf(name) == _HEAD and self.config.get(_TIED) is True and len(tied) == 1:
            master = tied[0][:1]
        shown = _is_transposed(self.directory, self.weights[name][0], master) if master else None
        return "nothing shows the orientation of the square" if shown is None else shown

    def _is_turned(self, name: str, shape: Shape, known: Collection[Shape]) -> bool | str:
        """Return whether a weight that is not square is transposed, from its states or else its family.

        States in ranges of elements do not show it. The family's tensors are limited to the classes of the names; if
        the configuration is not sufficient, every declaration counts.
        """
        both = shape, shape[::-1]
        names = self._names
        declared = [one for one in both if names is not None and not isinstance(names.whole(name, one, 1), str)]
        for proved in (known, self._enumerated.get(name, ()), declared):
            fits = [one in proved for one in both]
            if fits[0] != fits[1]:
                return fits[1]
        return "neither its states nor its family show its orientation"

    @cached_property
    def _enumerated(self) -> dict[str, set[Shape]]:
        """The shapes of every tensor in the classes of PaddleFormers that have most of the stored names.

        Names with the scope of PaddleNLP's classes are theirs.
        """
        found: dict[str, set[Shape]] = {}
        if not is_known(self.config):
            return found
        stored = self.weights.keys()
        family, model = family_for(self.config), stock.model_description(self.directory, self.config, stored)
        classes: list[dict[str, Shape]] = []
        for is_fleet in (False, True):
            with contextlib.suppress(MappingError):  # The configuration lacks a size: every declaration remains.
                declared = enumerate_tensors(family, structs.replace(model, is_fleet=is_fleet))
                classes.append({one.name: one.shape for one in declared})
        unknown = [len(stored - one.keys()) for one in classes]
        for one in itertools.compress(classes, (count == min(unknown) for count in unknown)):
            for name, shape in one.items():
                found.setdefault(name, set()).add(shape)
        return found

    @cached_property
    def _names(self) -> Names | None:
        """The names that the family declares; None if it is unknown."""
        if not is_known(self.config):
            return None
        model = stock.model_description(self.directory, self.config)
        return Names(family_for(model.config), model)


def _renumbered(arrays: Arrays, total: int, faults: list[str]) -> Arrays:
    """Return arrays with the experts' numbers in the model, where ranks count theirs from 0.

    Args:
        arrays: of the files of one kind.
        total: the number of experts in a layer; 0 if the configuration does not give it.
        faults: gets a line for every array of experts of which ranks are missing.
    """
    local = {name: found for name in arrays if (found := _EXPERT.fullmatch(name))}
    count = max((int(found[2]) for found in local.values()), default=0) + 1
    if count == total or all(len(arrays[name]) == 1 for name in local):
        return arrays
    renumbered = {name: own for name, own in arrays.items() if name not in local}
    for name, found in local.items():
        if not total or len(arrays[name]) * count != total:
            faults.append(
                f"{name}: in {count_text(len(arrays[name]), 'file')} with {count_text(count, 'expert')} each, and the "
                f"configuration has {total or 'no number of experts'}"
            )
        for rank, array in enumerate(arrays[name]):
            renumbered[f"{found[1]}{rank * count + int(found[2])}{found[3]}"] = [array]
    return renumbered


def _experts(directory: Path, config: Mapping[str, Any]) -> int:
    """Return the number of experts in a layer; 0 if the configuration does not give it."""
    if not is_known(config):
        return 0
    sizes = family_sizes(family_for(config), stock.model_description(directory, config))
    return sizes.length("experts") if sizes.defines("experts") else 0


def _is_transposed(directory: Path, weight: stock.FileArray, known: Sequence[stock.FileArray]) -> bool | None:
    """Return whether a file contains a square weight transposed; None if that is not shown.

    The first rows of a tensor with the same numbers are compared with the first rows and columns of the weight.

    Args:
        directory: of the files.
        weight: the weight.
        known: its master weight, which is cast to its dtype, or the other name of a tied one: in the orientation of the
            model, whole or in ranges of elements.
    """
    length, dtype = weight.shape[0], to_numpy(to_safetensors(weight.dtype))
    count = min(length, _COMPARED)
    placed = arrange(weight.shape, known)
    if isinstance(placed, str):
        return None
    parts = [
        _elements(directory, piece, 0, min(last, count * length) - first)
        for piece, (first, last) in ((piece, flat or (0, length * length)) for piece, flat in placed)
        if first < count * length
    ]
    rows = np.concatenate(parts).astype(dtype).reshape(count, length)
    straight = _elements(directory, weight, 0, count * length).reshape(count, length)
    turned = np.stack([_elements(directory, weight, row * length, count) for row in range(length)], axis=1)
    fits = [rows.tobytes() == one.tobytes() for one in (straight, turned)]
    return fits[1] if fits[0] != fits[1] else None


def _elements(directory: Path, array: stock.FileArray, begin: int, count: int) -> np.ndarray[Any, Any]:
    dtype = to_numpy(to_safetensors(array.dtype))
    with open_local(directory / array.file) as file:
        return np.frombuffer(read_range(file, array.begin + begin * dtype.itemsize, count * dtype.itemsize), dtype)


def _leaf(name: str) -> str:
    """Return the name of a layer without the number that it may end with."""
    return _NUMBERED.sub("", name.removesuffix(_OF_LAYER)).rpartition(".")[2]


def _is_unified(directory: AnyPath) -> bool:
    """Return whether there are safetensors files of optimizer states or master weights, or an index of them."""
    if not isinstance(directory, Path) or not is_directory(directory):
        return False
    return any(_is_of_states(path.name) for path in list_directory(directory))


def _is_of_states(name: str) -> bool:
    found = _FILE.fullmatch(name.removesuffix(".index.json"))
    return bool(_UNMERGED.fullmatch(name)) or (found is not None and found[1] != _WEIGHTS)


def _open(format: Format, directory: AnyPath, verify: str, config: Config) -> OpenedCheckpoint:
    """Open a checkpoint; the configuration shows orientations and numbers of experts.

    Raises:
        Corrupt: files or tensors that an index lists are missing, files are of different steps, or tensors are not
            stored whole; all of them.
        FormatError: files of two checkpoints, of ``ignore_merge_optimizer`` or of quantised states.
        MappingError: the family of the model does not declare a tensor.
    """
    directory = require_local(directory, "A unified checkpoint")
    names = sorted(path.name for path in list_directory(directory))
    _check_only_ours(directory, names)
    stated = stock.read_stock_config(directory, config)
    stock.check_no_links(directory, (directory / name for name in map(_index_name, _KINDS) if name in names))
    listed = {kind: _files(directory, kind, names) for kind in _KINDS}
    stock.check_no_links(directory, (directory / name for files in listed.values() for name in files))
    read = [read_files(directory / _index_name(kind), files, None, "off", ()) for kind, files in listed.items()]
    identities = {path: one for own in read for path, one in own.identities.items()}
    made = _assembled(directory, stated[0], *(_content(one.headers) for one in read))
    return stock.open_stock(format, directory, made.shards, identities, made.faults, stated, made.cuts)


UNIFIED = Format(
    name="unified",
    title="unified checkpoint of PaddleFormers",
    predicate="was written by PaddleFormers as a unified checkpoint",
    advice="Name it in resume_from_checkpoint; or make a flex checkpoint of it with paddleformers-fc convert.",
    checks=("tensors", "model", "equal values"),
    recognises=_is_unified,
    opener=_open,
    verifier=stock.verify_stock,
    describe=stock.describe_stock,
    roles=(MODEL_STATE, MASTER_WEIGHT, OPTIMIZER_STATE),
)
"""Safetensors files of weights and of states, as PaddleFormers' ``unified_checkpoint`` writes them."""
