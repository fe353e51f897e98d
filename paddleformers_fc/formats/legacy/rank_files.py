"""Names and contents of the files that ranks of a hybrid-parallel run write with ``paddle.save``.

A file is named after its rank: ``model_state.tp01_pp00.pdparams``, ``optimizer.tp01_pp00_shard01.pdopt``; axes with one
rank are omitted. Weight files of expert-parallel ranks have the axis ``moe_sharding``, or ``shard`` if
``model_meta.json`` describes the ranks. All files of a kind have the same axes, with one file per combination of ranks.
The pickles are read as data (:mod:`paddleformers_fc.storage.pickles`), and only the position of each array is kept.

Within a sharding group, a state is either complete in one rank's file (stage 1 version 1, and stage 2), or its elements
are divided into ranges in the files of several ranks, with padding at the end (stage 1 version 2, and stage 3).
:func:`arrange` handles both.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paddleformers_fc.errors import Corrupt, FormatError, StorageError
from paddleformers_fc.formats import stock_checkpoint as stock
from paddleformers_fc.formats.catalog import damaged, malformed
from paddleformers_fc.formats.huggingface import OF_PADDLE, model_orientation
from paddleformers_fc.formats.stock_run import SCHEDULER, SIGNAL, epoch_of
from paddleformers_fc.mapping.boxes import Shape
from paddleformers_fc.storage.dtypes import dtype_size
from paddleformers_fc.storage.files import list_directory
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.pickles import read_pickle
from paddleformers_fc.storage.safetensors import read_header
from paddleformers_fc.text import count_text

MODEL, OPTIMIZER, EMA = "model", "optimizer", "ema"
"""The kinds of files."""

AXES = ("tp", "pp", "shard")
EXPERTS = "moe_sharding"
"""The axis of expert-parallel ranks in the names of weight files."""
_KINDS = {
    ("model_state", "pdparams"): MODEL,
    ("model", "safetensors"): MODEL,
    ("optimizer", "pdopt"): OPTIMIZER,
    ("ema", "pdopt"): EMA,
}
_PART = r"[a-z]+(?:_[a-z]+)*[0-9]{1,6}"
_NAME = re.compile(rf"([a-z_]+)(?:\.({_PART}(?:_{_PART})*))?\.(pdparams|pdopt|safetensors)")
_RANK = re.compile(r"([a-z]+(?:_[a-z]+)*)([0-9]{1,6})(?:_|\Z)")
_SCHEDULER, _MASTER = "LR_Scheduler", "master_weights"
_MOST_RANKS = 1 << 17
"""Maximum number of files of a kind, because names can contain any number of ranks."""
_MAX_PADDING_BYTES = 4096
"""Maximum padding of a rank's part of a flattened state. Devices align to 256 bytes or more."""

Place = tuple[int, int, int]
"""Tensor-parallel rank, pipeline stage, and rank in the sharding group (for weight files, the expert-parallel rank).

Expert-parallel rank ``e`` has tensor-parallel rank ``e % tp``, and position ``e // tp`` among successive ranks of the
sharding group.
"""


@dataclass(frozen=True)
class RankFiles:
    """The files of a checkpoint by kind and rank.

    Args:
        files: kind -> rank -> name.
        tp: number of tensor-parallel ranks.
        pp: number of pipeline stages.
        ep: number of expert-parallel ranks in the names of weight files; 1 if there is no such axis.
        sharding: number of ranks in the sharding group; the smallest possible number if there are only weight files.
        described: the parameters of each rank in ``model_meta.json``; empty if the file does not exist.
    """

    files: Mapping[str, Mapping[Place, str]]
    tp: int
    pp: int
    ep: int = 1
    sharding: int = 1
    described: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of all files."""
        return sorted(name for found in self.files.values() for name in found.values())

    def of(self, kind: str, tp: int, pp: int) -> list[str]:
        """Return the files of a kind for a tensor-parallel rank and stage, in the order of the sharding group."""
        return [name for place, name in sorted(self.files.get(kind, {}).items()) if place[:2] == (tp, pp)]


@dataclass(frozen=True)
class RankContent:
    """The content of one file.

    Args:
        arrays: arrays by name, in the order of the file.
        master: arrays of master weights by name.
        names: variable names by structured name, as far as the file contains them.
        epoch: the scheduler's number of steps; None if the file does not contain it.
    """

    arrays: Mapping[str, stock.FileArray]
    master: Mapping[str, stock.FileArray] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    epoch: int | None = None

    def renamed(self, name_of: Callable[[str], str]) -> RankContent:
        """Rename the tensors of a weight file."""
        arrays = {name_of(name): one for name, one in self.arrays.items()}
        return replace(self, arrays=arrays, names={name_of(name): one for name, one in self.names.items()})


def is_rank_file(name: str, *kinds: str) -> bool:
    """Return whether a file name is the name of a rank file of one of these kinds."""
    found = _parsed(name)
    return found is not None and found[0] in kinds


def find_rank_files(directory: Path) -> RankFiles:
    """Find the files of a checkpoint, and check that they are complete.

    Raises:
        Corrupt: files of some ranks are missing.
        FormatError: files are from two formats or grids, an expert-parallel layout is not supported, or links lead out
            of the directory.
    """
    names = sorted(path.name for path in list_directory(directory))
    found: dict[str, dict[Place, str]] = {}
    forms: dict[str, dict[tuple[str, ...], str]] = {}
    twice: list[list[str]] = []
    for name, (kind, ranks) in ((name, parsed) for name in names if (parsed := _parsed(name)) is not None):
        known = (*AXES, EXPERTS) if name.endswith(".pdparams") else AXES
        if unknown := [axis for axis in ranks if axis not in known]:
            raise unsupported_experts(directory, f"{name}: axis {unknown[0]}")
        forms.setdefault(kind, {}).setdefault((*ranks, Path(name).suffix), name)
        place = ranks.get("tp", 0), ranks.get("pp", 0), ranks.get("shard", ranks.get(EXPERTS, 0))
        if (first := found.setdefault(kind, {}).setdefault(place, name)) != name:
            twice.append([first, name])
    stock.check_no_links(directory, (directory / name for kind in found.values() for name in kind.values()))
    check_one_checkpoint(directory, [list(one.values()) for one in forms.values() if len(one) > 1] + twice)
    axes = {kind: next(iter(one))[:-1] for kind, one in forms.items()}
    degrees = {kind: _degrees(axes[kind], places) for kind, places in found.items()}
    tp, pp = (max(one[axis] for one in degrees.values()) for axis in range(2))
    ep = degrees[MODEL][2] if EXPERTS in axes.get(MODEL, ()) else 1
    missing = [] if MODEL in found else ["no weight file"]
    missing += _missing(found, degrees, tp, pp, axes)
    world = sum(SIGNAL.fullmatch(name) is not None for name in names)
    sharding = max([-(-ep // tp), *(one[2] for kind, one in degrees.items() if ep == 1 or kind != MODEL)])
    ranks_of_grid = tp * pp * sharding
    if not missing and world and world % ranks_of_grid:
        missing = [f"{world} files saved_signal_* of ranks; the other files are of {ranks_of_grid} ranks"]
    if missing:
        raise damaged(directory, f"Files of some ranks are missing from {directory}.", missing)
    # The number of ranks shows that expert-parallel ranks have no further axis, such as sep.
    if ep > 1 and not (divides_experts(tp, sharding, ep) and ranks_of_grid == world):
        why = f"tp={tp} pp={pp} sharding={sharding} ep={ep}, and {count_text(world, 'file')} saved_signal_* of ranks"
        raise unsupported_experts(directory, why)
    return RankFiles(found, tp, pp, ep, sharding)


def divides_experts(tp: int, sharding: int, ep: int) -> bool:
    """Return whether the ranks of a stage can be divided into groups of ``ep`` expert-parallel ranks."""
    return ep % tp == 0 and sharding % (ep // tp) == 0


def unsupported_experts(directory: AnyPath, why: str) -> FormatError:
    """Return the error for expert-parallel files that do not show which rank has which states."""
    what = f"{directory} was saved by expert-parallel ranks in a layout that is not supported in this format."
    supported = "supported: experts with their numbers in the model, on ranks of tensor parallelism and sharding only"
    next_step = "Load it with the software that saved it, and save a flex checkpoint."
    return malformed(directory, what, [why, supported], next_step)


def check_one_checkpoint(directory: AnyPath, mixed: Sequence[Sequence[str]]) -> None:
    """Check that all files belong to one checkpoint.

    Args:
        directory: the directory.
        mixed: groups of names that cannot be in the same checkpoint.
    Raises:
        FormatError: there is such a group.
    """
    if mixed:
        next_step = "Move the files of one of them into another directory."
        raise malformed(directory, f"{directory} contains files of two checkpoints.", map(", ".join, mixed), next_step)


def _parsed(name: str) -> tuple[str, dict[str, int]] | None:
    """Return the kind of a file and its ranks by axis; None for any other file."""
    found = _NAME.fullmatch(name)
    kind = None if found is None else _KINDS.get((found[1], found[3]))
    if found is None or kind is None:
        return None
    return kind, {axis: int(rank) for axis, rank in _RANK.findall(found[2] or "")}


def _degrees(axes: tuple[str, ...], places: Iterable[Place]) -> Place:
    """Return the number of ranks on every axis. An axis in the names has at least two ranks."""
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
) -> Iterator[str]:
    for kind, places in found.items():
        if degrees[kind][:2] != (tp, pp):
            yield f"{kind}: files of tp={degrees[kind][0]} pp={degrees[kind][1]}, and others of tp={tp} pp={pp}"
            continue
        if math.prod(degrees[kind]) > _MOST_RANKS:
            yield f"{kind}: {count_text(len(places), 'file')}, but the names are of {math.prod(degrees[kind])} ranks"
            continue
        for place in itertools.product(*map(range, degrees[kind])):
            is_expected = EXPERTS not in axes[kind] or place[2] % tp == place[0]
            if is_expected is not (place in places):
                ranks = {**dict(zip(AXES, place, strict=True)), EXPERTS: place[2]}
                named = "_".join(f"{axis}{ranks[axis]:02d}" for axis in axes[kind])
                yield f"{kind}: {named}" if is_expected else f"{kind}: {named} is unexpected: no rank has these experts"


def read_rank_file(directory: Path, name: str) -> RankContent:
    """Return the content of a file, without the values of its arrays.

    Raises:
        FormatError: the file is not a pickle of arrays.
    """
    path = directory / name
    if path.suffix == ".safetensors":
        header = read_header(path)
        if header.metadata.get("format") in OF_PADDLE:
            raise model_orientation(directory, [name])
        return RankContent(stock.arrays_of(name, header))
    arrays, (names, scheduler, master) = stock.read_arrays(path, stock.PARAMETER_NAMES, _SCHEDULER, _MASTER)
    known = {key: value for key, value in names.items() if isinstance(key, str) and isinstance(value, str)}
    return RankContent(arrays, stock.named_arrays(path, master), known, epoch_of(scheduler))


def scheduler_epoch(directory: Path) -> int | None:
    """Return the number of steps in the scheduler's file; None if the file is missing or unreadable."""
    try:
        return epoch_of(read_pickle(directory / SCHEDULER))
    except (Corrupt, FormatError, StorageError):
        return None


Placed = list[tuple[stock.FileArray, tuple[int, int] | None]]
"""Pieces with the range of elements that each contains; None for the complete tensor."""


def arrange(shape: Shape, pieces: Sequence[stock.FileArray]) -> Placed | str:
    """Arrange the pieces of a tensor.

    Args:
        shape: shape of the tensor.
        pieces: one or more pieces, in the order of the sharding group.
    Returns:
        the pieces that contain elements of the tensor, or as text why they do not form it.
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
