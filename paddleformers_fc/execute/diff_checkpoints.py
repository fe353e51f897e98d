"""Compare two checkpoints tensor by tensor, across parallel layouts and formats.

The canonical streams of both sides (:func:`.digest.read_in_pieces`) are compared piece by piece. A tensor that differs
is read again for its md5 and the figures of a deviation, in pieces too. Memory therefore does not depend on the size of
tensors. Tensors that only one side has, or with another shape or dtype, are not compared. Roles that one format cannot
contain are not compared: beside open weights, the optimizer states, most of a checkpoint's bytes, are not read.

If both sides store equal boxes under equal rules, they are proved once and their stored bytes are compared first, in
the order of files and without a plan. Only canonical tensors that read a differing one are compared then.

The deviation of two tensors of equal shape and dtype: largest absolute and ULP difference, first differing index.

Tensors are read in pieces, of both sides alike, and md5 and figures come from the same pass. ULP counts the
representable numbers between two numbers: 1 for neighbours, so that it does not depend on their size. NaN deviates in
bits alone: it has no distance.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np

from paddleformers_fc.errors import OptionError
from paddleformers_fc.execute.digest import PIECE_BYTES, digest_tensors, read_in_pieces, require_plan
from paddleformers_fc.execute.reading import Key
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.formats.catalog import Catalog, FileOffset, StoredForm, StoredTensor
from paddleformers_fc.layout.roles import ROLES
from paddleformers_fc.layout.shards import Shard, shard_bytes
from paddleformers_fc.plan import LoadPlan, ReadSource, canonical_layout, canonical_names, canonical_source
from paddleformers_fc.plan.build import Planner
from paddleformers_fc.storage.dtypes import ScaledFile, dtype_size, to_numpy, to_safetensors
from paddleformers_fc.storage.executor import ReadOptions, ReadPool, run_workers
from paddleformers_fc.storage.identities import Identities
from paddleformers_fc.storage.operations import Operation
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.progress import advance, expect
from paddleformers_fc.text import natural

COMPARE_BYTES = 2 << 20
"""Bytes of a piece on each side: few enough to be in the processor's cache when they are compared."""
_THREADS = 4

_CHUNK = 1 << 18
"""Elements that are compared at a time, so that temporary arrays stay in the processor's cache."""

_Array = np.ndarray[Any, Any]


class Deviation(msgspec.Struct, frozen=True):
    """The figures of one tensor.

    Attributes:
        elements: how many differ in their bits.
        absolute: the largest absolute difference; None where it is not finite.
        ulp: the most representable numbers between two elements, plus one; None for types that are not floating point.
        first: index of the first element that differs.
    """

    elements: int
    absolute: float | None
    ulp: int | None
    first: tuple[int, ...]


@dataclass
class DeviationSum:
    """Adds up the deviation of a tensor from its pieces in order.

    Args:
        shape: of the tensor.
    """

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        self._seen = self._elements = self._ulp = 0
        self._absolute = 0.0
        self._first: int | None = None
        self._is_float = False

    def add(self, one: _Array, other: _Array) -> None:
        """Add the next piece.

        Args:
            one: a flat array.
            other: the same elements of the other side, of the same dtype.
        """
        self._is_float = is_float(one.dtype)
        for begin, left, right in _chunks(one, other):
            different = np.flatnonzero(_bits(left) != _bits(right))
            if not different.size:
                continue
            if self._first is None:
                self._first = self._seen + begin + int(different[0])
            self._elements += different.size
            with np.errstate(invalid="ignore", over="ignore"):
                self._measure(left[different], right[different])
        self._seen += one.size

    def _measure(self, left: _Array, right: _Array) -> None:
        if self._is_float:
            numbers = ~(np.isnan(left.astype(np.float64)) | np.isnan(right.astype(np.float64)))
            if not numbers.all():
                self._absolute = math.inf
            left, right = left[numbers], right[numbers]
            a, b = _ordered(left), _ordered(right)
            self._ulp = max(self._ulp, int((np.maximum(a, b) - np.minimum(a, b)).max(initial=0)))
        distance = np.abs(left.astype(np.float64) - right.astype(np.float64))
        # Infinities of one sign are equal in bits, so that no difference here is inf - inf but of two signs.
        self._absolute = max(self._absolute, float(distance.max(initial=0.0)))

    def result(self) -> Deviation:
        """Return the figures of the added pieces."""
        absolute = self._absolute if math.isfinite(self._absolute) else None
        first = np.unravel_index(self._first or 0, self.shape) if self.shape else ()
        ulp = self._ulp if self._is_float else None
        return Deviation(self._elements, absolute, ulp, tuple(int(index) for index in first))


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether a type is floating point, those of ``ml_dtypes`` included."""
    return dtype.kind == "f" or (dtype.type.__module__ == ml_dtypes.__name__ and "float" in dtype.name)


def _chunks(one: _Array, other: _Array) -> Iterator[tuple[int, _Array, _Array]]:
    for begin in range(0, one.size, _CHUNK):
        yield begin, one[begin : begin + _CHUNK], other[begin : begin + _CHUNK]


def _bits(values: _Array) -> _Array:
    return values.view(f"u{values.itemsize}") if values.itemsize in (1, 2, 4, 8) else values


def _ordered(values: _Array) -> _Array:
    """Return numbers as whole numbers in the same order, one apart where no number is between them."""
    sign = 1 << (8 * values.itemsize - 1)
    bits = _bits(values).astype(np.uint64)
    most = np.uint64((sign << 1) - 1)
    return np.where(bits >= sign, most - bits, bits + np.uint64(sign))


class Side(msgspec.Struct, frozen=True):
    """One of the two directories.

    Attributes:
        path: as it was named.
        kind: its format.
        model_type: of its ``config.json``; empty where there is none, or it names none.
    """

    path: str
    kind: str
    model_type: str


class Form(msgspec.Struct, frozen=True):
    """A tensor on one side: element type, global shape, and md5 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    md5: str


class Different(msgspec.Struct, frozen=True):
    """A tensor that both sides hold and that is not the same.

    Attributes:
        name: canonical name.
        a: its form on one side.
        b: its form on the other.
        deviation: how far the numbers are apart; None where shapes or dtypes differ.
    """

    name: str
    a: Form
    b: Form
    deviation: Deviation | None = None

    @property
    def reason(self) -> str:
        """The difference in words."""
        if self.a.shape != self.b.shape:
            return f"shape {list(self.a.shape)} and {list(self.b.shape)}"
        if self.a.dtype != self.b.dtype:
            return f"dtype {self.a.dtype} and {self.b.dtype}"
        return "values"


class RoleDifference(msgspec.Struct, frozen=True):
    """The differences of one role.

    Attributes:
        equal: tensors that are the same, bit for bit.
        different: tensors that both sides hold and that are not.
        only_in_a: names.
        only_in_b: names.
    """

    equal: int
    different: list[Different]
    only_in_a: list[str]
    only_in_b: list[str]

    @property
    def same(self) -> bool:
        """Return whether both sides are equal."""
        return not (self.different or self.only_in_a or self.only_in_b)


class Difference(msgspec.Struct, frozen=True):
    """The differences between two checkpoints.

    Attributes:
        equal: whether everything that was compared is the same.
        a: the first directory.
        b: the second.
        roles: the result by compared role.
        not_compared: roles that one side holds and the other cannot.
        seconds: how long it took.
    """

    equal: bool
    a: Side
    b: Side
    roles: dict[str, RoleDifference]
    not_compared: list[str]
    seconds: float


def compare_checkpoints(a: OpenedCheckpoint, b: OpenedCheckpoint, role: str | None = None) -> Difference:
    """Compare two checkpoints.

    Args:
        a: an opened checkpoint of any format.
        b: the other.
        role: the only role to compare; None for all that both formats can contain.
    Raises:
        OptionError: the role is unknown, in neither side, or one that a format cannot contain.
        FlexError: a mapping cannot be proved, or a file cannot be read.
    """
    started = time.monotonic()
    both = (a, b)
    roles = _compared_roles(both, role)
    first = _prepared(a, roles)
    alike = _is_stored_alike(a, b)
    second = first.over(b.catalog) if alike else _prepared(b, roles)
    present = [name for name in roles if any(key[0] == name for key in (*first.tensors, *second.tensors))]
    if not present:
        raise OptionError(
            f"Neither side holds a tensor of {role}.",
            where=f"{a.catalog.root} and {b.catalog.root}",
            next_step="Leave out --role (role=); inspect shows which roles a checkpoint has.",
        )
    forms = _differences(first, second, alike)
    found = {name: _role_difference(name, first, second, forms) for name in present}
    left_out = [] if role is not None else [name for name in _stored_roles(both) if name not in roles]
    equal = all(one.same for one in found.values())
    return Difference(equal, _side(a), _side(b), found, left_out, round(time.monotonic() - started, 3))


@dataclass(frozen=True)
class _Prepared:
    """One side, proved.

    Args:
        source: from the checkpoint to the canonical space.
        tensors: its canonical tensors, by role and name.
    """

    source: ReadSource
    tensors: Mapping[Key, Shard]

    def over(self, catalog: Catalog) -> _Prepared:
        """Return the same side over a catalog of equal stored tensors."""
        return replace(self, source=replace(self.source, catalog=catalog))

    def plan(self, keys: Iterable[Key]) -> LoadPlan:
        """Return the reads of some canonical tensors; see :func:`require_plan`."""
        return require_plan(Planner(self.source), self.source, _layout(self, keys))


def _prepared(checkpoint: OpenedCheckpoint, roles: Sequence[str]) -> _Prepared:
    source = canonical_source(checkpoint)
    layout = canonical_layout(source)
    tensors = {(role, name): shard for role in roles for name, shard in layout.get(role, {}).items()}
    return _Prepared(source, tensors)


def _is_stored_alike(a: OpenedCheckpoint, b: OpenedCheckpoint) -> bool:
    """Return whether both store equal boxes of the same tensors under the same rules; then one plan fits both."""
    if any(isinstance(one, ScaledFile) for side in (a, b) for one in side.catalog.identities.values()):
        return False  # Their tensors are products, which have no bytes.
    if a.format is not b.format or a.config != b.config or a.catalog.roles.keys() != b.catalog.roles.keys():
        return False
    if not a.format.canonical and (a.known, a.preferred, a.rules) != (b.known, b.preferred, b.rules):
        return False
    return all(_has_equal_forms(tensors, b.catalog.roles[role]) for role, tensors in a.catalog.roles.items())


def _has_equal_forms(one: Mapping[str, StoredTensor], other: Mapping[str, StoredTensor]) -> bool:
    if one.keys() != other.keys():
        return False
    known: dict[StoredForm, StoredForm] = {}
    for name, tensor in one.items():
        form, theirs = tensor.form, other[name].form
        if known.get(form) is not theirs:
            if form.content != theirs.content:
                return False
            known[form] = theirs
    return True


_Found = Mapping[Key, tuple[Form, Form, Deviation | None]]
"""A difference: the forms of both sides, and their deviation."""


def _differences(first: _Prepared, second: _Prepared, alike: bool) -> _Found:
    """Return the tensors of both sides that are not the same, with their digests and figures.

    Args:
        first: one side.
        second: the other.
        alike: whether a plan of one fits the other.
    """
    common = [key for key in first.tensors if key in second.tensors]
    same = {key: first.tensors[key].dtype for key in common if first.tensors[key] == second.tensors[key]}
    wanted = [key for key in same if first.tensors[key].size]
    left = first.plan(first.tensors)
    if alike and not left.checks:
        suspects = _suspects(first, second, left)
        wanted = [key for key in wanted if key in suspects]
        right = second.plan(wanted)
    else:
        right = second.plan(second.tensors)
    unequal = _unequal(first, left, second, right, wanted)
    others = [key for key in common if key not in same]
    ours, theirs = (_forms(side, others) for side in (first, second))
    found: dict[Key, tuple[Form, Form, Deviation | None]] = {key: (ours[key], theirs[key], None) for key in others}
    found.update(_deviations(first, second, [key for key in same if key in unequal]))
    return found


def _deviations(
    first: _Prepared, second: _Prepared, keys: Sequence[Key]
) -> Iterator[tuple[Key, tuple[Form, Form, Deviation]]]:
    """Read tensors of equal shape and dtype on both sides at once, for digests and figures."""
    expect(2 * sum(shard_bytes(first.tensors[key]) for key in keys))
    sides = (read_in_pieces(side.source, _layout(side, keys)) for side in (first, second))
    hashers, done = (hashlib.md5(), hashlib.md5()), 0
    comparison: DeviationSum | None = None
    for (role, tensor, one), (_, _, other) in zip(*sides, strict=True):
        comparison = comparison or DeviationSum(tensor.global_shape)
        for hasher, data in zip(hashers, (one, other), strict=True):
            hasher.update(data.data)
        dtype = to_numpy(to_safetensors(tensor.dtype))
        comparison.add(one.view(dtype), other.view(dtype))
        done += one.nbytes
        advance(2 * one.nbytes)
        if done == shard_bytes(tensor):
            forms = [Form(tensor.dtype, tensor.global_shape, hasher.hexdigest()) for hasher in hashers]
            yield (role, tensor.name), (forms[0], forms[1], comparison.result())
            hashers, done, comparison = (hashlib.md5(), hashlib.md5()), 0, None


def _unequal(first: _Prepared, left: LoadPlan, second: _Prepared, right: LoadPlan, keys: Sequence[Key]) -> set[Key]:
    """Return the tensors of equal shape and dtype whose bytes differ, by the canonical streams of both sides."""
    expect(2 * sum(shard_bytes(first.tensors[key]) for key in keys))
    sides = [
        read_in_pieces(side.source, _layout(side, keys), PIECE_BYTES, plan)
        for side, plan in ((first, left), (second, right))
    ]
    found: set[Key] = set()
    for (role, tensor, one), (_, _, other) in zip(*sides, strict=True):
        if not _is_equal(one, other):
            found.add((role, tensor.name))
        advance(2 * one.nbytes)
    return found


def _suspects(first: _Prepared, second: _Prepared, plan: LoadPlan) -> set[Key]:
    """Return the canonical tensors that read a stored tensor whose bytes differ."""
    differing = differing_stored(first.source.catalog, second.source.catalog, plan.touched)
    return {(role, one) for role, name in differing for one in canonical_names(first.source, role, name)}


class _RangePair(NamedTuple):
    """A range of bytes of a file on either side; sorted by the left side's files.

    Args:
        left: the file on the left, and the offset in it.
        right: the same on the right.
        size: length in bytes.
        number: of its tensor.
    """

    left: FileOffset
    right: FileOffset
    size: int
    number: int


def differing_stored(left: Catalog, right: Catalog, names: Mapping[str, Collection[str]]) -> set[Key]:
    """Return the stored tensors whose bytes differ, by role and name; neighbours are read together.

    Args:
        left: the stored tensors of one checkpoint.
        right: the stored tensors of the other checkpoint, cut into the same boxes.
        names: the tensors to compare, by role.
    Raises:
        Corrupt, StorageError: a file cannot be read.
    """
    keys = [(role, name) for role, found in names.items() for name in found]
    sizes: dict[StoredForm, list[int]] = {}
    ranges: list[_RangePair] = []
    for number, (role, name) in enumerate(keys):
        tensor = left.roles[role][name]
        lengths = sizes.get(tensor.form)
        if lengths is None:
            width = dtype_size(tensor.form.held_dtype)
            lengths = sizes[tensor.form] = [box.volume * width for box in tensor.form.boxes]
        offsets = zip(tensor.offsets, right.roles[role][name].offsets, lengths, strict=True)
        ranges += [_RangePair(*one, number) for one in offsets if one[2]]
    ranges.sort()
    expect(2 * sum(one.size for one in ranges))
    both: list[Any] = [left.identities, right.identities]
    work = _StoredComparison((left.root, right.root), ChainMap(*both))
    with ThreadPoolExecutor(_THREADS, "flex-diff") as pool:
        run_workers(pool, _THREADS, _batches(ranges), work.compare)
    return {keys[number] for number in work.differing}


def _batches(ranges: Sequence[_RangePair]) -> Iterator[list[_RangePair]]:
    """Yield ranges that are compared at a time."""
    batch: list[_RangePair] = []
    size = 0
    for (file, begin), (other, start), length, number in ranges:
        for low in range(0, length, COMPARE_BYTES):
            part = min(COMPARE_BYTES, length - low)
            if size + part > COMPARE_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(_RangePair((file, begin + low), (other, start + low), part, number))
            size += part
    if batch:
        yield batch


class _StoredComparison:
    """What threads that compare stored ranges have in common.

    Args:
        roots: the directories of both sides.
        identities: of the files of both.

    Attributes:
        differing: the numbers of the tensors that were found to differ.
    """

    def __init__(self, roots: tuple[AnyPath, AnyPath], identities: Identities) -> None:
        self.differing: set[int] = set()
        self._roots, self._identities = roots, identities

    def compare(self, take: Callable[[], list[_RangePair] | None]) -> int:
        """Compare batches until there is none; the bytes that were read."""
        sides, count = np.empty((2, COMPARE_BYTES), np.uint8), 0
        with ReadPool(ReadOptions(threads=1), self._identities) as pool:
            while (batch := take()) is not None:
                size = sum(one.size for one in batch)
                left, right = (one.left for one in batch), (one.right for one in batch)
                for root, side, places in zip(self._roots, sides, (left, right), strict=True):
                    lengths = (one.size for one in batch)
                    count += pool.run(_joined_reads(root, zip(places, lengths, strict=True), side))
                if not _is_equal(sides[0, :size], sides[1, :size]):
                    self._find(batch, sides)
                advance(2 * size)
        return count

    def _find(self, batch: list[_RangePair], sides: _Array) -> None:
        begin = 0
        for one in batch:
            end = begin + one.size
            if not _is_equal(sides[0, begin:end], sides[1, begin:end]):
                self.differing.add(one.number)
            begin = end


def _joined_reads(root: AnyPath, places: Iterable[tuple[FileOffset, int]], memory: _Array) -> list[Operation]:
    """Return the reads of ranges into successive memory; those that are adjacent in the file are one."""
    address, paths = memory.__array_interface__["data"][0], dict[str, AnyPath]()
    joined: list[tuple[str, int, int, int]] = []
    for (file, begin), length in places:
        if joined and joined[-1][0] == file and joined[-1][1] + joined[-1][2] == begin:
            joined[-1] = (file, joined[-1][1], joined[-1][2] + length, joined[-1][3])
        else:
            joined.append((file, begin, length, address))
        address += length
    return [
        Operation(paths.setdefault(file, root / file), begin, length, place, memory)
        for file, begin, length, place in sorted(joined)
    ]


def _is_equal(one: _Array, other: _Array) -> bool:
    """Return whether two flat arrays of bytes are equal, compared as words."""
    words = one.size - one.size % 8
    if (one[:words].view(np.uint64) != other[:words].view(np.uint64)).any():
        return False
    return bytes(one[words:]) == bytes(other[words:])


def _layout(side: _Prepared, keys: Iterable[Key]) -> dict[str, dict[str, Shard]]:
    layout: dict[str, dict[str, Shard]] = {}
    for role, name in keys:
        layout.setdefault(role, {})[name] = side.tensors[role, name]
    return layout


def _forms(side: _Prepared, keys: Sequence[Key]) -> dict[Key, Form]:
    digests = digest_tensors(side.source, _layout(side, keys))
    return {(one.role, one.name): Form(one.dtype, one.shape, one.md5) for one in digests}


def _side(checkpoint: OpenedCheckpoint) -> Side:
    model_type = str(checkpoint.config.get("model_type") or "")
    return Side(str(checkpoint.catalog.root), checkpoint.format.name, model_type)


def _stored_roles(sides: Sequence[OpenedCheckpoint]) -> list[str]:
    return [role for role in ROLES if any(role in side.catalog.roles for side in sides)]


def _compared_roles(sides: Sequence[OpenedCheckpoint], role: str | None) -> tuple[str, ...]:
    if role is not None and role not in ROLES:
        raise OptionError(
            f"Unknown role {role!r}.",
            where="--role",
            evidence=[f"roles: {', '.join(ROLES)}"],
            next_step="Name one of these, or leave out --role (role=) to compare all.",
        )
    roles = [one for one in ROLES if role in (None, one)]
    for side in sides:
        if role not in (None, *side.format.roles):
            raise OptionError(
                f"{side.catalog.root} {side.format.predicate} and has no {role}.",
                where=str(side.catalog.root),
                next_step="Compare two flex checkpoints, or leave out --role (role=).",
            )
        roles = [one for one in roles if one in side.format.roles]
    return tuple(roles)


def _role_difference(role: str, first: _Prepared, second: _Prepared, forms: _Found) -> RoleDifference:
    mine, theirs = ({name for found, name in side.tensors if found == role} for side in (first, second))
    names = sorted((name for found, name in forms if found == role), key=natural)
    different = [Different(name, *forms[role, name]) for name in names]
    only_in_a, only_in_b = sorted(mine - theirs, key=natural), sorted(theirs - mine, key=natural)
    return RoleDifference(len(mine) - len(different) - len(only_in_a), different, only_in_a, only_in_b)
