"""The files that the ranks of a hybrid-parallel run wrote with ``paddle.save``: their names and contents.

A file is named after its rank: ``model_state.tp01_pp00.pdparams``, ``optimizer.tp01_pp00_shard01.pdopt``. An axis of
one rank is omitted. Files of weights of expert-parallel ranks have their rank as ``moe_sharding01``, or as that of the
sharding group where ``model_meta.json`` describes the ranks. All files of a kind have the same axes, and one file
exists per combination of ranks. The files are pickles and are read as data (:mod:`paddleformers_fc.storage.pickles`):
of an array only its place in the file is kept.

A tensor of a sharding group from the pieces of its ranks: whole in one, or ranges that follow each other.

Version 1 of sharding stage 1 and stage 2 store a state whole, on one rank. Version 2 and stage 3 store a range of
elements on each of several; the last ones are padding.

Find the parameter of a variable such as ``linear_5.w_0`` without a table of names.

Paddle names a variable after the class of its layer and a number that counts the layers of that class in the order in
which they are built. The parameters of a stage, in the order in which their family builds them, therefore consist of
one sequence per class, and all layers of a kind (``q_proj`` of every decoder layer) are of one class. The variables are
assigned only if a single assignment fits the sizes of all states.

The orientation of a square weight, which its shape does not show: that of another tensor with the same numbers.

Such a tensor is the master weight, which is cast to the dtype of the weight, or the other name of a tied one. The first
rows of it are compared with the first rows and the first columns of the weight.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from paddleformers_fc.errors import Corrupt, FormatError, StorageError
from paddleformers_fc.families.declarations import NUMBER
from paddleformers_fc.formats.huggingface import OF_PADDLE, model_orientation
from paddleformers_fc.formats.stock_checkpoint import COPY_AGAIN_STEP, malformed_file, refuse_links
from paddleformers_fc.mapping.boxes import Shape
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.storage.dtypes import dtype_size, from_safetensors, to_numpy, to_safetensors
from paddleformers_fc.storage.files import list_directory, open_local, read_range
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.pickles import PickledArray, quoted, read_pickle
from paddleformers_fc.storage.safetensors import Header, read_header
from paddleformers_fc.text import count_text

MODEL, OPTIMIZER, EMA = "model", "optimizer", "ema"
"""The kinds of files."""

AXES = ("tp", "pp", "shard")
EXPERTS = "moe_sharding"
"""The axis of expert-parallel ranks in the names of files of weights."""
_KINDS = {
    ("model_state", "pdparams"): MODEL,
    ("model", "safetensors"): MODEL,
    ("optimizer", "pdopt"): OPTIMIZER,
    ("ema", "pdopt"): EMA,
}
_PART = r"[a-z]+(?:_[a-z]+)*[0-9]{1,6}"
_NAME = re.compile(rf"([a-z_]+)(?:\.({_PART}(?:_{_PART})*))?\.(pdparams|pdopt|safetensors)")
_RANK = re.compile(r"([a-z]+(?:_[a-z]+)*)([0-9]{1,6})(?:_|\Z)")
_SIGNAL = re.compile(r"saved_signal_[0-9]{1,9}")
_TABLE = "StructuredToParameterName@@"
_SCHEDULER, _MASTER = "LR_Scheduler", "master_weights"
_DTYPES = {
    "f8": "float64",
    "f4": "float32",
    "f2": "float16",
    "i8": "int64",
    "i4": "int32",
    "i2": "int16",
    "i1": "int8",
    "u1": "uint8",
    "b1": "bool",
    # Paddle writes the bits of bfloat16, which numpy lacks, as unsigned integers.
    "u2": "bfloat16",
}

_COMPARED_BYTES = 1 << 20

Place = tuple[int, int, int]
"""Tensor-parallel rank, pipeline stage, rank in the sharding group; of weights instead the expert-parallel rank.

Expert-parallel ranks are divided among the tensor-parallel ranks of a stage first. Rank ``e`` has tensor-parallel rank
``e % tp``, and position ``e // tp`` among successive ranks of the sharding group.
"""


@dataclass(frozen=True)
class RankFiles:
    """The files of a checkpoint by kind and rank.

    Args:
        files: kind -> rank -> name.
        tp: number of tensor-parallel ranks.
        pp: number of pipeline stages.
        ep: number of expert-parallel ranks, as names of files of weights have it; 1 if they do not.
        sharding: number of ranks of the sharding group; the smallest possible one if there are files of weights alone.
    """

    files: Mapping[str, Mapping[Place, str]]
    tp: int
    pp: int
    ep: int = 1
    sharding: int = 1

    @property
    def names(self) -> list[str]:
        """The names of all files."""
        return sorted(name for found in self.files.values() for name in found.values())

    def of(self, kind: str, tp: int, pp: int) -> list[str]:
        """Return the files of a kind of one tensor-parallel rank and stage, in the order of the sharding group."""
        return [name for place, name in sorted(self.files.get(kind, {}).items()) if place[:2] == (tp, pp)]


@dataclass(frozen=True, slots=True)
class FileArray:
    """An array that is contiguous in a file.

    Args:
        file: the name of the file.
        begin: offset of its first byte.
        shape: its shape.
        dtype: element type by its numpy name.
    """

    file: str
    begin: int
    shape: Shape
    dtype: str


@dataclass(frozen=True)
class RankContent:
    """The content of one file.

    Args:
        arrays: arrays by name, in the order of the file.
        master: arrays of master weights by name.
        names: the name of the parameter of every tensor by its structured name, as far as the file contains it.
        epoch: the scheduler's count of steps; None if the file has none.
    """

    arrays: Mapping[str, FileArray]
    master: Mapping[str, FileArray] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    epoch: int | None = None

    def renamed(self, name_of: Callable[[str], str]) -> RankContent:
        """Return the content of a file of weights under other names."""
        arrays = {name_of(name): one for name, one in self.arrays.items()}
        return replace(self, arrays=arrays, names={name_of(name): one for name, one in self.names.items()})


def is_rank_file(name: str, *kinds: str) -> bool:
    """Return whether a name is that of a file of one of some kinds."""
    found = _parsed(name)
    return found is not None and found[0] in kinds


def find_rank_files(directory: Path) -> RankFiles:
    """Find the files of a checkpoint and refuse an incomplete set.

    Raises:
        Corrupt: files of some ranks are missing.
        FormatError: files of two formats or grids, or of expert-parallel ranks with several ranks of one expert; links
            that leave the directory.
    """
    names = sorted(path.name for path in list_directory(directory))
    found: dict[str, dict[Place, str]] = {}
    axes: dict[str, dict[tuple[str, ...], str]] = {}
    endings: dict[str, str] = {}
    for name in names:
        parsed = _parsed(name)
        if parsed is None:
            continue
        kind, ranks = parsed
        strange = [axis for axis in ranks if axis not in (*AXES, *([EXPERTS] if name.endswith(".pdparams") else []))]
        if strange:
            raise unsupported_experts(directory, f"{name}: axis {strange[0]}")
        axes.setdefault(kind, {}).setdefault(tuple(ranks), name)
        endings.setdefault(Path(name).suffix if kind == MODEL else kind, name)
        found.setdefault(kind, {})[_place(ranks)] = name
    refuse_links(directory, (directory / name for kind in found.values() for name in kind.values()))
    mixed = [list(one.values()) for one in axes.values()]
    mixed.append([endings[one] for one in (".pdparams", ".safetensors") if one in endings])
    refuse_mixed(directory, [one for one in mixed if len(one) > 1])
    degrees = {kind: _degrees(next(iter(axes[kind])), places) for kind, places in found.items()}
    tp, pp = (max(one[axis] for one in degrees.values()) for axis in range(2))
    ep = degrees[MODEL][2] if any(EXPERTS in one for one in axes.get(MODEL, ())) else 1
    missing = [] if MODEL in found else ["no file of weights"]
    missing += list(_missing(found, degrees, tp, pp, {kind: next(iter(one)) for kind, one in axes.items()}))
    world = sum(_SIGNAL.fullmatch(name) is not None for name in names)
    sharding = max([-(-ep // tp), *(one[2] for kind, one in degrees.items() if ep == 1 or kind != MODEL)])
    ranks_of_grid = tp * pp * sharding
    if not missing and world and world % ranks_of_grid:
        missing = [f"{world} files saved_signal_* of ranks; the other files are of {ranks_of_grid} ranks"]
    if missing:
        raise Corrupt(
            f"Files of some ranks are missing from {directory}.",
            where=str(directory),
            evidence=fold(missing),
            next_step=COPY_AGAIN_STEP,
        )
    # The number of ranks shows that no other axis, such as sep, is inside of that of the experts.
    if ep > 1 and not (divides_experts(tp, sharding, ep) and ranks_of_grid == world):
        why = f"tp={tp} pp={pp} sharding={sharding} ep={ep}, and {count_text(world, 'file')} saved_signal_* of ranks"
        raise unsupported_experts(directory, why)
    return RankFiles(found, tp, pp, ep, sharding)


def divides_experts(tp: int, sharding: int, ep: int) -> bool:
    """Return whether the ranks of a stage can have experts on ``ep`` ranks of each of several groups."""
    return ep % tp == 0 and sharding % (ep // tp) == 0


def unsupported_experts(directory: AnyPath, why: str) -> FormatError:
    """Return the error for files of expert-parallel ranks that do not determine which rank has which states."""
    return FormatError(
        f"{directory} was saved by expert-parallel ranks in a layout that is not supported in this format.",
        where=str(directory),
        evidence=[
            why,
            "supported: experts with their numbers in the model, on ranks of tensor parallelism and sharding alone",
        ],
        next_step="Load it with the software that saved it, and save a flex checkpoint.",
    )


def _place(ranks: Mapping[str, int]) -> Place:
    return ranks.get("tp", 0), ranks.get("pp", 0), ranks.get("shard", ranks.get(EXPERTS, 0))


def refuse_mixed(directory: AnyPath, mixed: Sequence[Sequence[str]]) -> None:
    """Refuse files that belong to two checkpoints.

    Args:
        directory: the directory.
        mixed: groups of names that one checkpoint cannot have together.
    Raises:
        FormatError: there is a group.
    """
    if mixed:
        raise FormatError(
            f"{directory} contains files of two checkpoints.",
            where=str(directory),
            evidence=[", ".join(names) for names in mixed],
            next_step="Move the files of one of them into another directory.",
        )


def _parsed(name: str) -> tuple[str, dict[str, int]] | None:
    """Return the kind of a file and its ranks by axis; None for any other file."""
    found = _NAME.fullmatch(name)
    kind = None if found is None else _KINDS.get((found[1], found[3]))
    if found is None or kind is None:
        return None
    return kind, {axis: int(rank) for axis, rank in _RANK.findall(found[2] or "")}


def _degrees(axes: tuple[str, ...], places: Iterable[Place]) -> Place:
    """Return the number of ranks on every axis: an axis that names have is one of at least two ranks."""
    highest = [max(ranks) for ranks in zip(*places, strict=True)]
    named = {*axes, *(("shard",) if EXPERTS in axes else ())}
    tp, pp, shard = (max(high + 1, 2) if axis in named else 1 for axis, high in zip(AXES, highest, strict=True))
    return tp, pp, shard


def _missing(
    found: Mapping[str, Mapping[Place, str]],
    degrees: Mapping[str, Place],
    tp: int,
    pp: int,
    axes: Mapping[str, tuple[str, ...]],
) -> Iterable[str]:
    for kind, places in found.items():
        if degrees[kind][:2] != (tp, pp):
            yield f"{kind}: files of tp={degrees[kind][0]} pp={degrees[kind][1]}, and others of tp={tp} pp={pp}"
            continue
        for place in itertools.product(*map(range, degrees[kind])):
            is_due = EXPERTS not in axes[kind] or place[2] % tp == place[0]
            if is_due is not (place in places):
                ranks = {**dict(zip(AXES, place, strict=True)), EXPERTS: place[2]}
                named = "_".join(f"{axis}{ranks[axis]:02d}" for axis in axes[kind])
                yield f"{kind}: {named}" if is_due else f"{kind}: {named} is there, and is of no rank with experts"


def read_rank_file(directory: Path, name: str) -> RankContent:
    """Return the content of one file, without the numbers of its arrays.

    Raises:
        FormatError: the file is not a pickle of arrays.
    """
    path = directory / name
    if path.suffix == ".safetensors":
        header = read_header(path)
        if header.metadata.get("format") in OF_PADDLE:
            raise model_orientation(directory, [name])
        return RankContent(arrays_of(name, header))
    content = read_pickle(path)
    if not isinstance(content, dict):
        raise malformed_file(path, "it contains no tensors by name")
    names, scheduler, master = (content.pop(key, {}) for key in (_TABLE, _SCHEDULER, _MASTER))
    if not all(isinstance(one, dict) for one in (names, scheduler, master)):
        raise malformed_file(path, f"{_TABLE}, {_SCHEDULER} or {_MASTER} is not a dictionary")
    epoch = scheduler.get("last_epoch")
    return RankContent(
        {key: _array(path, key, value) for key, value in content.items()},
        {key: _array(path, key, value) for key, value in master.items()},
        {key: value for key, value in names.items() if isinstance(key, str) and isinstance(value, str)},
        epoch if type(epoch) is int else None,
    )


def arrays_of(name: str, header: Header) -> dict[str, FileArray]:
    """Return the arrays of a safetensors file."""
    return {
        key: FileArray(name, one.begin, one.shape, from_safetensors(one.dtype)) for key, one in header.tensors.items()
    }


def is_equal(directory: Path, one: FileArray, other: FileArray) -> bool:
    """Return whether two arrays of one shape and type have the same bytes."""
    length = math.prod(one.shape) * dtype_size(one.dtype)
    with open_local(directory / one.file) as left, open_local(directory / other.file) as right:
        return all(
            read_range(left, one.begin + at, size) == read_range(right, other.begin + at, size)
            for at in range(0, length, _COMPARED_BYTES)
            for size in (min(_COMPARED_BYTES, length - at),)
        )


def scheduler_epoch(directory: Path, name: str) -> int | None:
    """Return the count of steps in a scheduler's file; None if the file is missing or contains other data."""
    try:
        content = read_pickle(directory / name)
    except (Corrupt, FormatError, StorageError):
        return None
    epoch = content.get("last_epoch") if isinstance(content, dict) else None
    return epoch if type(epoch) is int else None


def _array(path: Path, key: Any, value: Any) -> FileArray:
    # Tensors of a state are written as pairs of their name and their numbers.
    array = value[1] if isinstance(value, tuple) and len(value) == 2 else value
    if not isinstance(key, str) or not isinstance(array, PickledArray) or array.code not in _DTYPES:
        raise malformed_file(path, f"{quoted(key)} is not a tensor")
    return FileArray(path.name, array.begin, array.shape, _DTYPES[array.code])


_MAX_PADDING_BYTES = 4096
"""Bound on the padding of a rank's part of a flattened state. Devices align to 256 bytes or more."""

Placed = list[tuple[FileArray, tuple[int, int] | None]]
"""Pieces with the range of elements that each contains; None for the whole tensor."""


def arrange(shape: Shape, pieces: Sequence[FileArray]) -> Placed | str:
    """Arrange the pieces of a tensor, in the order of the sharding group.

    Args:
        shape: of the tensor.
        pieces: one or more.
    Returns:
        the pieces that contain elements of it, or as text why they do not make up such a tensor.
    """
    first, volume, at = pieces[0], math.prod(shape), 0
    if first.shape == shape:
        return [(first, None)]
    if any(len(piece.shape) != 1 for piece in pieces):
        return f"{', '.join(f'{list(one.shape)} in {one.file}' for one in pieces)}, and its parameter is {list(shape)}"
    if first.shape[0] >= volume:
        pieces = pieces[:1]
    placed: Placed = []
    for piece in pieces:
        end = min(at + piece.shape[0], volume)
        if end > at:
            placed.append((piece, (at, end)))
        at += piece.shape[0]
    padding = len(pieces) * _MAX_PADDING_BYTES // dtype_size(first.dtype)
    if not volume <= at < volume + padding:
        return f"{at} elements are stored, and its parameter has {volume}"
    return placed


_VARIABLE = re.compile(r"(?:slice@)?(([^@]+)_([0-9]{1,9})\.([wb]_[0-9]+))(?:_([A-Za-z]\w*))?")
_NAMED = ("embed", "lm_head")
"""Words that the class of a layer and the name of its parameter both contain, or neither."""
_NUMBER_SHAPES = ((), (1,))


@dataclass(frozen=True)
class _Variable:
    """A variable, and the pieces of each of its states that has its shape."""

    name: str
    states: Sequence[Sequence[FileArray]]

    def fits(self, shape: Shape) -> bool:
        """Return whether all states can be those of a parameter of this shape."""
        return all(not isinstance(arrange(shape, pieces), str) for pieces in self.states)


def assign_variables(contents: Sequence[RankContent], parameters: Mapping[str, Shape]) -> dict[str, str] | str:
    """Return the name of the variable of every parameter.

    Args:
        contents: the optimizer's files of one stage and tensor-parallel rank.
        parameters: local shapes by structured name, in the order in which the model builds them.
    Returns:
        the names, or as text why they do not follow.
    """
    classes = _classes(contents)
    count = sum(map(len, classes.values()))
    if count != len(parameters):
        return f"the optimizer has states of {count} variables, and the model has {len(parameters)} parameters"
    found: list[dict[str, str]] = []
    for assigned in _assignments(classes, list(parameters.items())):
        found.append(assigned)
        if len(found) > 1:
            name = next(one for one in parameters if found[0][one] != found[1][one])
            return f"{name} can be {found[0][name]} or {found[1][name]}"
    if not found:
        return f"no order of the classes {', '.join(sorted({name for name, _ in classes}))} fits the parameters' shapes"
    return found[0]


def _classes(contents: Sequence[RankContent]) -> dict[tuple[str, str], list[_Variable]]:
    """Return the variables by the class of their layer and their role in it, in the order of their numbers."""
    pieces: dict[tuple[str, str, int, str], dict[str, list[FileArray]]] = {}
    for content in contents:
        for key, array in (*content.arrays.items(), *content.master.items()):
            match = _VARIABLE.fullmatch(key)
            if match is not None:
                states = pieces.setdefault((match[2], match[4], int(match[3]), match[1]), {})
                states.setdefault(match[5] or "", []).append(array)
    classes: dict[tuple[str, str], list[_Variable]] = {}
    for (kind, leaf, _, name), states in sorted(pieces.items()):
        shaped = [one for one in states.values() if one[0].shape not in _NUMBER_SHAPES]
        classes.setdefault((kind, leaf), []).append(_Variable(name, shaped))
    return classes


def _is_possible(variables: tuple[str, str], name: str) -> bool:
    """Return whether names allow variables of a class and a role to be those of a parameter."""
    kind, leaf = variables
    return all((word in kind) == (word in name) for word in _NAMED) and (leaf[0] == "w" or name.endswith("bias"))


def _assignments(
    classes: Mapping[tuple[str, str], Sequence[_Variable]], parameters: Sequence[tuple[str, Shape]]
) -> Iterator[dict[str, str]]:
    """Yield every assignment in which layers of a kind are of one class and each class is in order."""
    # The state of the search: parameters done, the class of every kind, the number of variables used per class.
    Kinds = dict[str, tuple[str, str]]
    pending: list[tuple[int, Kinds, dict[tuple[str, str], int], dict[str, str]]] = [(0, {}, {}, {})]
    while pending:
        done, kinds, used, assigned = pending.pop()
        while done < len(parameters):
            name, shape = parameters[done]
            kind = NUMBER.sub("#", name)
            if kind not in kinds:
                pending += [
                    (done, {**kinds, kind: one}, dict(used), dict(assigned))
                    for one in classes
                    if _is_possible(one, name)
                ]
                break
            at = used.get(kinds[kind], 0)
            variables = classes[kinds[kind]]
            if at == len(variables) or not variables[at].fits(shape):
                break
            used[kinds[kind]] = at + 1
            assigned[name] = variables[at].name
            done += 1
        else:
            yield assigned


_COMPARED = 64
"""The number of rows that are compared."""


def is_transposed(directory: Path, weight: FileArray, known: Sequence[FileArray]) -> bool | None:
    """Return whether a file contains a square weight transposed; None if that is not shown.

    Args:
        directory: of the files.
        weight: the weight.
        known: a tensor with the same numbers in the orientation of the model, whole or in ranges of elements.
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


def _elements(directory: Path, array: FileArray, begin: int, count: int) -> np.ndarray[Any, Any]:
    dtype = to_numpy(to_safetensors(array.dtype))
    with open_local(directory / array.file) as file:
        return np.frombuffer(read_range(file, array.begin + begin * dtype.itemsize, count * dtype.itemsize), dtype)
