"""Unified checkpoints of PaddleFormers' Trainer: safetensors files of weights and of states.

=========================================  ================================================
``model-0000i-of-N.safetensors``           weights by the name of their parameter
``optimizer-0000i-of-N.safetensors``       states, such as ``lm_head.weight/moment1_0``
``master_weights-0000i-of-N.safetensors``  master weights by the name of their parameter
=========================================  ================================================

Each kind has an index such as ``optimizer.safetensors.index.json``, or is one file without a number. Tensor-parallel
parts are merged, and states in ranges of elements are joined in the order of the files. If expert-parallel ranks number
their experts from 0, several files contain the same names, and the order of the files gives the offset.

States and master weights have the model's orientation. Linear weights have the orientation of open weights in files
with ``format: pt``, which shapes of states or the family prove. Square weights are decided by other layers with the
same name, by their master weight, or by the tied embedding. Under ``remove_master_weight``, master weights are read
from the weights, with a cast.
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

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import enumerate_tensors, family_for, is_known
from paddleformers_fc.families.names import Names, family_sizes
from paddleformers_fc.formats import stock_checkpoint as stock
from paddleformers_fc.formats.catalog import damaged, malformed
from paddleformers_fc.formats.checkpoint import (
    CONFIG_NAME,
    NAME_CONFIG,
    Config,
    Format,
    OpenedCheckpoint,
    StoredShard,
    local_files,
)
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
from paddleformers_fc.formats.stock_run import removes_masters
from paddleformers_fc.layout.roles import MASTER, MASTER_WEIGHT, MODEL_STATE, OPTIMIZER_STATE
from paddleformers_fc.mapping import Shape
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors
from paddleformers_fc.storage.files import list_directory, open_local, read_range
from paddleformers_fc.storage.paths import AnyPath, require_local
from paddleformers_fc.storage.safetensors import Header
from paddleformers_fc.text import count_text

_WEIGHTS, _STATES, _MASTERS = "model", "optimizer", "master_weights"
_KINDS = (_WEIGHTS, _STATES, _MASTERS)
_FILE = re.compile(r"(model|optimizer|master_weights)(?:-[0-9]{5}-of-([0-9]{5}))?\.safetensors")
_UNMERGED = re.compile(r"(?:optimizer|master_weights)(?:\.[a-z0-9_]+\.safetensors|.*\.safetensors_shard_[0-9]{4})")
"""Files of ``ignore_merge_optimizer``: one per rank, with parts that no file describes."""
_OF_TORCH = "pt"
"""The ``format`` of files whose linear weights may have the orientation of open weights."""
_OF_LAYER = ".weight"
_LINEAR = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
"""Layers that PaddleFormers transposes in every family, see ``transpose_weight_keys``."""
_NEVER_TRANSPOSED = "embed_tokens"
"""The layer that PaddleFormers transposes in no family."""
_HEAD, _TIED = "lm_head", "tie_word_embeddings"
_SIBLINGS = {"q_proj": "k_proj"}
"""A layer that is only transposed in families that also have the other layer."""
_PARTNERS = {"proj": "qkv"}
"""A layer that is transposed if the other one is."""
_EXPERT = re.compile(r"(.*\.experts\.)([0-9]{1,6})(\..*)")
_NUMBERED = re.compile(r"[._]?[0-9]+\Z")
_HALF = ("bfloat16", "float16")
_COMPARED = 64
"""The number of compared rows."""

Arrays = dict[str, list[stock.FileArray]]
"""The arrays of a name, in the order of their files."""


@dataclass(frozen=True)
class _Content:
    """The arrays of all files of one kind, and the files with ``format: pt``."""

    arrays: Arrays = field(default_factory=dict)
    torch_files: frozenset[str] = frozenset()


def _assembled(
    directory: Path, config: Mapping[str, Any], weights: _Content, states: _Content, masters: _Content
) -> Assembly:
    """Return the tensors as if a single rank had stored them, with parameter names as variable names."""
    assembly = Assembly(directory, config, 1, has_states=False)
    experts = _experts(directory, config)
    own, named, exact = (_renumbered(one.arrays, experts, assembly.faults) for one in (weights, states, masters))
    _check_no_masters_as_weights(directory, config, own, exact)
    # Float32 parameters have no master weights, but files of master weights contain copies of them.
    exact = {name: one for name, one in exact.items() if name not in own or own[name][0].dtype != MASTER.dtype}
    transposed = _Orientation(directory, config, weights.torch_files, own, named, exact).of_weights()
    shapes: dict[str, tuple[Shape, str]] = {}
    canonical: dict[str, list[tuple[bool, StoredShard]]] = {}
    for name, (array, *copies) in own.items():
        if any((one.shape, one.dtype) != (array.shape, array.dtype) for one in copies):
            assembly.faults.append(f"{name}: {array.file} and {copies[0].file} contain different parts of it")
        shapes[name] = array.shape[::-1] if transposed[name] else array.shape, array.dtype
        canonical[name] = [(transposed[name], array.shard(name, shapes[name][0]))]
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
                assembly.keep((MASTER_WEIGHT, dtype, transposed[name]), shard)
    return assembly


def _check_only_ours(directory: Path, names: Sequence[str]) -> None:
    """Check that the directory has no files of other checkpoints, and no unmerged files."""
    mixed = [[name, "safetensors files of states"] for name in names if is_rank_file(name, OPTIMIZER, EMA)]
    if PADDLE_DISTCP.recognises(directory):
        mixed.append([MODEL_STATE, "safetensors files of states"])
    check_one_checkpoint(directory, mixed)
    unmerged = [name for name in names if _UNMERGED.fullmatch(name)]
    if unmerged:
        next_step = "Resume it with PaddleFormers, and save it without ignore_merge_optimizer."
        raise malformed(directory, f"{directory} contains unmerged files of optimizer states.", unmerged, next_step)


def _files(directory: Path, kind: str, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of a kind, with the tensors that the index lists in each.

    Files with the same numbering that the index does not list are included: if expert-parallel ranks number their
    experts from 0, the index lists only one file for each name.
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
        raise damaged(directory, f"{directory} has no {index}.", numbered[:8])
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
    torch_files = (name for name, header in headers.items() if header.metadata.get("format") == _OF_TORCH)
    return _Content(arrays, frozenset(torch_files))


def _check_no_masters_as_weights(directory: Path, config: Mapping[str, Any], weights: Arrays, masters: Arrays) -> None:
    """Check that weight files do not contain the master weights of a 16-bit model."""
    declared = config.get("dtype") or config.get("torch_dtype")
    if declared in _HALF and {own[0].dtype for own in weights.values()} == {MASTER.dtype} and not masters:
        what = f"The weight files in {directory} contain master weights."
        dtypes = f"all are {MASTER.dtype}, {CONFIG_NAME} has {declared}, and there are no master weights"
        next_step = "Resume it with PaddleFormers, and save it without skip_save_model_weight."
        raise malformed(directory, what, [dtypes], next_step)


@dataclass(frozen=True)
class _Orientation:
    """Determines which weights are stored transposed.

    Args:
        directory: the checkpoint.
        config: its configuration; empty if there is none.
        files: the files that can contain transposed weights.
        weights: all weights.
        states: all optimizer states.
        masters: the master weights by name of their parameter.
    """

    directory: Path
    config: Mapping[str, Any]
    files: frozenset[str]
    weights: Arrays
    states: Arrays
    masters: Arrays

    def of_weights(self) -> dict[str, bool]:
        """Return for every weight whether it is stored transposed.

        Raises:
            FormatError: the orientation of some weights cannot be proved.
        """
        decided = self._decided()
        unproved = [f"{name}: {why}" for name, why in decided.items() if isinstance(why, str)]
        if unproved:
            what = f"The orientation of {count_text(len(unproved), 'weight')} in {self.directory} cannot be proved."
            save_again = "Resume the checkpoint with PaddleFormers, and save it with save_to_hf: false."
            raise malformed(self.directory, what, unproved, save_again if self.config else NAME_CONFIG)
        return {name: one for name, one in decided.items() if isinstance(one, bool)}

    def _decided(self) -> dict[str, bool | str]:
        """Return for every weight whether it is stored transposed, or as text why this cannot be proved.

        The writer decides by the last part of the name, so layers that are not square decide for square ones.
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
                found[name] = self._by_shape(name, shape, known.get(name, ()))
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
                found[name] = self._by_values(name)
        return found

    def _by_values(self, name: str) -> bool | str:
        """Return whether a square weight is transposed, by the values of its master weight or tied embedding."""
        if _leaf(name) == _NEVER_TRANSPOSED:
            return False
        master = self.masters.get(name, [])
        tied = [own for other, own in self.weights.items() if _leaf(other) == _NEVER_TRANSPOSED]
        if not master and _leaf(name) == _HEAD and self.config.get(_TIED) is True and len(tied) == 1:
            master = tied[0][:1]
        shown = _is_transposed(self.directory, self.weights[name][0], master) if master else None
        return "nothing shows the orientation of the square" if shown is None else shown

    def _by_shape(self, name: str, shape: Shape, known: Collection[Shape]) -> bool | str:
        """Return whether a weight that is not square is transposed, by the shapes of its states or its family.

        States in ranges of elements do not show it. The family's tensors are limited to the classes that have the
        stored names; if the configuration is not sufficient, all declarations are considered.
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
        """The shapes of every tensor, in the model classes that have most of the stored names."""
        found: dict[str, set[Shape]] = {}
        if not is_known(self.config):
            return found
        stored = self.weights.keys()
        family, model = family_for(self.config), stock.model_description(self.directory, self.config, stored)
        classes: list[dict[str, Shape]] = []
        for is_fleet in (False, True):
            with contextlib.suppress(MappingError):  # The configuration lacks a size.
                declared = enumerate_tensors(family, structs.replace(model, is_fleet=is_fleet))
                classes.append({one.name: one.shape for one in declared})
        unknown = [len(stored - one.keys()) for one in classes]
        for one in itertools.compress(classes, (count == min(unknown) for count in unknown)):
            for name, shape in one.items():
                found.setdefault(name, set()).add(shape)
        return found

    @cached_property
    def _names(self) -> Names | None:
        """The names that the family declares; None if the family is unknown."""
        if not is_known(self.config):
            return None
        model = stock.model_description(self.directory, self.config)
        return Names(family_for(model.config), model)


def _renumbered(arrays: Arrays, total: int, faults: list[str]) -> Arrays:
    """Renumber experts as in the model, if ranks number them from 0.

    Args:
        arrays: the arrays of the files of one kind.
        total: the number of experts in a layer; 0 if unknown.
        faults: receives a line for every expert array that is missing on some ranks.
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
    """Return the number of experts in a layer; 0 if the configuration does not determine it."""
    if not is_known(config):
        return 0
    sizes = family_sizes(family_for(config), stock.model_description(directory, config))
    return sizes.length("experts") if sizes.defines("experts") else 0


def _is_transposed(directory: Path, weight: stock.FileArray, known: Sequence[stock.FileArray]) -> bool | None:
    """Return whether a square weight is stored transposed; None if this cannot be decided.

    The first rows of a tensor with the same values are compared with the first rows and columns of the weight.

    Args:
        directory: the directory of the files.
        weight: the weight.
        known: its master weight, or the weight that it is tied to, in the model's orientation: complete or in ranges of
            elements.
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
    transposed = np.stack([_elements(directory, weight, row * length, count) for row in range(length)], axis=1)
    fits = [rows.tobytes() == one.tobytes() for one in (straight, transposed)]
    return fits[1] if fits[0] != fits[1] else None


def _elements(directory: Path, array: stock.FileArray, begin: int, count: int) -> np.ndarray[Any, Any]:
    dtype = to_numpy(to_safetensors(array.dtype))
    with open_local(directory / array.file) as file:
        return np.frombuffer(read_range(file, array.begin + begin * dtype.itemsize, count * dtype.itemsize), dtype)


def _leaf(name: str) -> str:
    """Return the name of a layer, without a number at its end."""
    return _NUMBERED.sub("", name.removesuffix(_OF_LAYER)).rpartition(".")[2]


def _is_unified(directory: AnyPath) -> bool:
    """Return whether there are safetensors files of optimizer states or master weights, or an index of them."""
    return any(map(_is_of_states, local_files(directory)))


def _is_of_states(name: str) -> bool:
    found = _FILE.fullmatch(name.removesuffix(".index.json"))
    return bool(_UNMERGED.fullmatch(name)) or (found is not None and found[1] != _WEIGHTS)


def _open(format: Format, directory: AnyPath, verify: str, config: Config) -> OpenedCheckpoint:
    """Open a checkpoint. The configuration helps to determine orientations and numbers of experts.

    Raises:
        Corrupt: files or tensors of an index are missing, files are from different steps, or tensors are incomplete;
            the error lists all of them.
        FormatError: files are from two checkpoints, unmerged, or contain quantized states.
        MappingError: the model's family does not declare a tensor.
    """
    directory = require_local(directory, "A unified checkpoint")
    names = sorted(path.name for path in list_directory(directory))
    _check_only_ours(directory, names)
    stored_config = stock.read_stock_config(directory, config)
    stock.check_no_links(directory, (directory / name for name in map(_index_name, _KINDS) if name in names))
    listed = {kind: _files(directory, kind, names) for kind in _KINDS}
    stock.check_no_links(directory, (directory / name for files in listed.values() for name in files))
    read = [read_files(directory / _index_name(kind), files, None, "off", ()) for kind, files in listed.items()]
    identities = {path: one for own in read for path, one in own.identities.items()}
    found = _assembled(directory, stored_config[0], *(_content(one.headers) for one in read))
    return stock.open_stock(format, directory, found.shards, identities, found.faults, stored_config, found.cuts)


UNIFIED = Format(
    name="unified",
    title="unified checkpoint of PaddleFormers",
    predicate="was written by PaddleFormers as a unified checkpoint",
    advice="Set resume_from_checkpoint to it, or convert it to a flex checkpoint with paddleformers-fc convert.",
    checks=("tensors", "model", "equal values"),
    recognises=_is_unified,
    opener=_open,
    verifier=stock.verify_stock,
    describe=stock.describe_stock,
    roles=(MODEL_STATE, MASTER_WEIGHT, OPTIMIZER_STATE),
)
"""Safetensors files of weights and of states, as PaddleFormers' ``unified_checkpoint`` writes them."""
