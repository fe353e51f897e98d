"""Compare two checkpoints tensor by tensor, across parallel layouts and formats.

The canonical tensors of both sides (:func:`.digest.read_in_pieces`) are compared piece by piece; a tensor that differs
is read again for its md5, so memory does not depend on the size of tensors. Roles that one format cannot contain are
not read. If both sides store equal boxes under equal rules, the stored bytes are compared first, in file order and
without a plan, and then only canonical tensors that contain differing bytes.

The deviation of two tensors is their largest absolute difference, their largest difference in ULP (representable
numbers between two numbers, plus one) and the first differing index. NaN counts only as differing bits.

A :class:`Tolerance` is applied to the elements whose bits differ, chunk by chunk, so it needs no memory per tensor.
"""

from __future__ import annotations

import math
import time
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
from msgspec import structs

from paddleformers_fc.errors import OptionError
from paddleformers_fc.execute.digest import PIECE_BYTES, digest_tensors, read_in_pieces, require_plan
from paddleformers_fc.execute.reading import Key, batches
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.formats.catalog import Catalog, FileOffset, StoredTensor
from paddleformers_fc.layout.roles import ROLES
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.plan.build import ReadSource
from paddleformers_fc.plan.items import LoadPlan
from paddleformers_fc.plan.sources import canonical_layout, canonical_names, canonical_source, check_all_canonical
from paddleformers_fc.storage.dtypes import ScaledFile, dtype_size
from paddleformers_fc.storage.executor import ReadPool, run_workers
from paddleformers_fc.storage.operations import Operation
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.progress import advance, expect
from paddleformers_fc.text import natural, suggestion

COMPARE_BYTES = 2 << 20
"""Bytes of a piece on each side, small enough to be in the processor's cache when they are compared."""
_THREADS = 4

_CHUNK = 1 << 18
"""Elements that are compared at a time, so that temporary arrays stay in the processor's cache."""

_Array = np.ndarray[Any, Any]
_Flags = np.ndarray[Any, np.dtype[np.bool_]]


_ROUNDING = 1e-9
"""More than the relative error of a bound in float64. Closer integers are compared in exact arithmetic."""
_MOST_DISTANCE = (1 << 64) - 1


class Tolerance(msgspec.Struct, frozen=True):
    """How far elements may be apart: ``abs(a - b) <= atol + rtol * abs(b)``.

    Args:
        atol: absolute tolerance, finite and at least 0.
        rtol: relative tolerance, finite and at least 0. If both are 0, tensors are compared bitwise.
    """

    atol: float = 0.0
    rtol: float = 0.0

    @property
    def is_bitwise(self) -> bool:
        """Whether only equal bits are equal."""
        return not (self.atol or self.rtol)

    def accepts(self, a: _Array, b: _Array) -> _Flags:
        """Return for each element whether it is within the tolerance.

        Floating-point numbers are compared in float64, integers exactly. NaN is within the tolerance of NaN only, and
        an infinity of itself only.

        Args:
            a: a flat array.
            b: the same elements of the other side, of the same dtype.
        """
        if not is_float(a.dtype):
            return self._accepts_integers(a, b)
        with np.errstate(invalid="ignore", over="ignore"):
            a, b = a.astype(np.float64), b.astype(np.float64)
            near = np.abs(a - b) <= self.atol + self.rtol * np.abs(b)
        found: _Flags = (near & np.isfinite(a) & np.isfinite(b)) | (a == b) | (np.isnan(a) & np.isnan(b))
        return found

    def _accepts_integers(self, a: _Array, b: _Array) -> _Flags:
        distance, b = _integer_distance(a, b), _widened(b)
        size = np.abs(b).view(np.uint64)  # Exact modulo 2**64.
        with np.errstate(over="ignore"):
            bound = self.atol + self.rtol * size.astype(np.float64)
            gap = distance.astype(np.float64) - bound
            unsure = np.abs(gap) <= _ROUNDING * bound
        found: _Flags = gap <= 0
        if not unsure.any():
            return found
        atol, rtol = Fraction(self.atol), Fraction(self.rtol)
        sizes = np.unique(size[unsure])
        bounds = [min(math.floor(atol + rtol * int(one)), _MOST_DISTANCE) for one in sizes]
        found[unsure] = distance[unsure] <= np.array(bounds, np.uint64)[np.searchsorted(sizes, size[unsure])]
        return found


def _widened(integers: _Array) -> _Array:
    return integers.astype(np.uint64 if integers.dtype == np.uint64 else np.int64)


def _integer_distance(a: _Array, b: _Array) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return the absolute differences of integers, which are exact modulo 2**64."""
    a, b = _widened(a), _widened(b)
    distance: np.ndarray[Any, np.dtype[np.uint64]] = np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)
    return distance


BITWISE = Tolerance()


class Deviation(msgspec.Struct, frozen=True):
    """The figures of one tensor.

    Attributes:
        elements: number of elements that differ: their bits, or by more than the tolerance if there is one.
        absolute: their largest absolute difference; None if it is not finite.
        ulp: their largest difference in ULP; None for dtypes that are not floating point.
        first: index of the first element that differs.
    """

    elements: int
    absolute: float | None
    ulp: int | None
    first: tuple[int, ...]


class DeviationSum:
    """Accumulates the deviation of a tensor from its pieces in order.

    Args:
        shape: shape of the tensor.
        tolerance: the elements that are within it do not differ.

    Attributes:
        elements: number of elements that differ so far.
        is_bitwise_equal: whether all bits are equal so far.
    """

    def __init__(self, shape: tuple[int, ...], tolerance: Tolerance = BITWISE) -> None:
        self.shape = shape
        self.tolerance = tolerance
        self.is_bitwise_equal = True
        self.elements = self._seen = self._ulp = 0
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
        begins = () if _is_equal(one, other) else range(0, one.size, _CHUNK)
        for begin in begins:
            left, right = one[begin : begin + _CHUNK], other[begin : begin + _CHUNK]
            different = np.flatnonzero(_bits(left) != _bits(right))
            self.is_bitwise_equal &= not different.size
            if not self.tolerance.is_bitwise:
                different = different[~self.tolerance.accepts(left[different], right[different])]
            if not different.size:
                continue
            if self._first is None:
                self._first = self._seen + begin + int(different[0])
            self.elements += different.size
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
        if left.dtype.kind in "iu":
            self._absolute = max(self._absolute, float(_integer_distance(left, right).max(initial=0)))
            return
        distance = np.abs(left.astype(np.float64) - right.astype(np.float64))
        # Only bits that differ come here, so infinities have opposite signs and their difference is not NaN.
        self._absolute = max(self._absolute, float(distance.max(initial=0.0)))

    def result(self) -> Deviation:
        """Return the figures of the added pieces."""
        absolute = self._absolute if math.isfinite(self._absolute) else None
        first = np.unravel_index(self._first or 0, self.shape) if self.shape else ()
        ulp = self._ulp if self._is_float else None
        return Deviation(self.elements, absolute, ulp, tuple(int(index) for index in first))


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is floating point, including the dtypes of ``ml_dtypes``."""
    return dtype.kind == "f" or (dtype.type.__module__ == ml_dtypes.__name__ and "float" in dtype.name)


def _bits(values: _Array) -> _Array:
    return values.view(f"u{values.itemsize}") if values.itemsize in (1, 2, 4, 8) else values


def _ordered(values: _Array) -> _Array:
    """Map floating-point numbers to integers in the same order, such that adjacent numbers differ by one."""
    sign = 1 << (8 * values.itemsize - 1)
    bits = _bits(values).astype(np.uint64)
    if values.dtype == ml_dtypes.float8_e8m0fnu:  # Without a sign.
        return bits
    most = np.uint64((sign << 1) - 1)
    return np.where(bits >= sign, most - bits, bits + np.uint64(sign))


class Side(msgspec.Struct, frozen=True):
    """One of the two directories.

    Attributes:
        path: the directory, as the user named it.
        kind: its format.
        model_type: the ``model_type`` of its ``config.json``; empty if there is none.
    """

    path: str
    kind: str
    model_type: str


class Form(msgspec.Struct, frozen=True):
    """A tensor on one side: dtype, global shape, and md5 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    md5: str


class Different(msgspec.Struct, frozen=True):
    """A tensor that both sides contain and that differs.

    Attributes:
        name: canonical name.
        a: its form on one side.
        b: its form on the other side.
        deviation: how much the numbers differ; None if shapes or dtypes differ.
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
        equal: number of tensors that are bitwise equal.
        within_tolerance: number of tensors that are equal within the tolerance, and not bitwise.
        different: tensors that both sides contain and that differ.
        only_in_a: names.
        only_in_b: names.
    """

    equal: int
    within_tolerance: int
    different: list[Different]
    only_in_a: list[str]
    only_in_b: list[str]

    @property
    def same(self) -> bool:
        """Whether both sides are equal."""
        return not (self.different or self.only_in_a or self.only_in_b)


class Difference(msgspec.Struct, frozen=True):
    """The differences between two checkpoints.

    Attributes:
        equal: whether everything that was compared is equal, or equal within the tolerance.
        a: the first directory.
        b: the second directory.
        roles: the result by compared role.
        not_compared: roles that one side contains and the other cannot contain.
        atol: the absolute tolerance.
        rtol: the relative tolerance; if both are 0, tensors were compared bitwise.
        seconds: duration of the comparison.
    """

    equal: bool
    a: Side
    b: Side
    roles: dict[str, RoleDifference]
    not_compared: list[str]
    atol: float
    rtol: float
    seconds: float


def compare_checkpoints(
    a: OpenedCheckpoint, b: OpenedCheckpoint, role: str | None = None, tolerance: Tolerance = BITWISE
) -> Difference:
    """Compare two checkpoints.

    Args:
        a: an opened checkpoint of any format.
        b: the other checkpoint.
        role: the only role to compare; None for all roles that both formats can contain.
        tolerance: how far elements of equal tensors may be apart.
    Raises:
        OptionError: the role is unknown, is in neither side, or cannot be in one of the formats.
        FlexError: a mapping cannot be proved, or a file cannot be read.
    """
    started = time.monotonic()
    both = (a, b)
    roles = _compared_roles(both, role)
    first = _prepared(a, roles)
    alike = _has_equal_storage(a, b)
    # Equal rules are proved once.
    second = (
        _Prepared(structs.replace(first.source, catalog=b.catalog), first.tensors) if alike else _prepared(b, roles)
    )
    present = [name for name in roles if any(key[0] == name for key in (*first.tensors, *second.tensors))]
    if not present:
        raise OptionError(
            f"Neither side holds a tensor of {role}.",
            where=f"{a.catalog.root} and {b.catalog.root}",
            next_step="Leave out --role (role=); inspect shows which roles a checkpoint has.",
        )
    differences = _differences(first, second, alike, tolerance)
    found = {name: _role_difference(name, first, second, differences) for name in present}
    stored = [] if role is not None else [name for name in ROLES if any(name in side.catalog.roles for side in both)]
    left_out = [name for name in stored if name not in roles]
    equal = all(one.same for one in found.values())
    seconds = round(time.monotonic() - started, 3)
    return Difference(equal, _side(a), _side(b), found, left_out, tolerance.atol, tolerance.rtol, seconds)


class _Prepared(msgspec.Struct, frozen=True):
    """One side, with its proved mapping.

    Args:
        source: the source from the checkpoint to the canonical space.
        tensors: its canonical tensors, by role and name.
    """

    source: ReadSource
    tensors: Mapping[Key, Shard]

    def plan(self, keys: Iterable[Key]) -> LoadPlan:
        """Return the reads of some canonical tensors; see :func:`require_plan`."""
        return require_plan(self.source, _layout(self, keys))


def _prepared(checkpoint: OpenedCheckpoint, roles: Sequence[str]) -> _Prepared:
    source = canonical_source(checkpoint)
    layout = canonical_layout(source)
    check_all_canonical(checkpoint, layout)
    tensors = {(role, name): shard for role in roles for name, shard in layout.get(role, {}).items()}
    return _Prepared(source, tensors)


def _has_equal_storage(a: OpenedCheckpoint, b: OpenedCheckpoint) -> bool:
    """Return whether both store equal boxes of the same tensors under the same rules, so that one plan fits both."""
    if any(isinstance(one, ScaledFile) for side in (a, b) for one in side.catalog.identities.values()):
        return False  # Products of numbers and scales have no stored bytes.
    if a.format is not b.format or a.config != b.config or a.catalog.roles.keys() != b.catalog.roles.keys():
        return False
    if not a.format.canonical and (a.known, a.preferred, a.rules) != (b.known, b.preferred, b.rules):
        return False
    return all(_has_equal_forms(tensors, b.catalog.roles[role]) for role, tensors in a.catalog.roles.items())


def _has_equal_forms(one: Mapping[str, StoredTensor], other: Mapping[str, StoredTensor]) -> bool:
    if one.keys() != other.keys():
        return False
    pairs = {(tensor.form, other[name].form) for name, tensor in one.items()}
    return all(form.content == theirs.content for form, theirs in pairs)


class _Differences(msgspec.Struct, frozen=True):
    """The tensors of both sides that are not bitwise equal.

    Args:
        different: the forms of both sides, and their deviation.
        within: the tensors that are equal within the tolerance.
    """

    different: Mapping[Key, tuple[Form, Form, Deviation | None]]
    within: Collection[Key]


def _differences(first: _Prepared, second: _Prepared, alike: bool, tolerance: Tolerance) -> _Differences:
    """Return the tensors that differ between both sides, with their digests and deviations.

    Args:
        first: one side.
        second: the other side.
        alike: whether a plan of one side fits the other.
        tolerance: how far elements of equal tensors may be apart.
    """
    common = [key for key in first.tensors if key in second.tensors]
    same = {key for key in common if first.tensors[key] == second.tensors[key]}
    comparable = [key for key in common if key in same and first.tensors[key].size]
    left = first.plan(first.tensors)
    if alike and not left.checks:
        differing = differing_stored(first.source.catalog, second.source.catalog, left.touched)
        suspects = {(role, one) for role, name in differing for one in canonical_names(first.source, role, name)}
        comparable = [key for key in comparable if key in suspects]
        right = second.plan(comparable)
    else:
        right = second.plan(second.tensors)
    deviations = _deviations(first, left, second, right, comparable, tolerance)
    within = {key for key, one in deviations.items() if not one.elements}
    keys = [key for key in common if key not in same or (key in deviations and key not in within)]
    ours, theirs = (_forms(side, keys) for side in (first, second))
    return _Differences({key: (ours[key], theirs[key], deviations.get(key)) for key in keys}, within)


def _deviations(
    first: _Prepared,
    left: LoadPlan,
    second: _Prepared,
    right: LoadPlan,
    keys: Sequence[Key],
    tolerance: Tolerance,
) -> dict[Key, Deviation]:
    """Return the deviations of the tensors of equal shape and dtype whose bytes differ."""
    sides = [
        read_in_pieces(side.source, _layout(side, keys), PIECE_BYTES, plan)
        for side, plan in ((first, left), (second, right))
    ]
    found: dict[Key, Deviation] = {}
    deviation: DeviationSum | None = None
    for (piece, one), (_, other) in zip(*sides, strict=True):
        deviation = deviation or DeviationSum(piece.tensor.global_shape, tolerance)
        deviation.add(one, other)
        if piece.is_last:
            if not deviation.is_bitwise_equal:
                found[piece.role, piece.tensor.name] = deviation.result()
            deviation = None
    return found


class _RangePair(NamedTuple):
    """A range of bytes on both sides, ordered by the left side's files.

    Args:
        left: the left file, and the offset in it.
        right: the right file, and the offset in it.
        size: length in bytes.
        number: number of its tensor.
    """

    left: FileOffset
    right: FileOffset
    size: int
    number: int


def differing_stored(left: Catalog, right: Catalog, names: Mapping[str, Collection[str]]) -> set[Key]:
    """Return the stored tensors whose bytes differ, by role and name; adjacent ranges are read together.

    Args:
        left: the stored tensors of one checkpoint.
        right: the stored tensors of the other checkpoint, cut into the same boxes.
        names: the tensors to compare, by role.
    Raises:
        Corrupt, StorageError: a file cannot be read.
    """
    keys = [(role, name) for role, found in names.items() for name in found]
    ranges: list[_RangePair] = []
    for number, (role, name) in enumerate(keys):
        tensor, other = left.roles[role][name], right.roles[role][name]
        width = dtype_size(tensor.form.held_dtype)
        for box, begin, start in zip(tensor.form.boxes, tensor.offsets, other.offsets, strict=True):
            if box.volume:
                ranges.append(_RangePair(begin, start, box.volume * width, number))
    expect(2 * sum(one.size for one in ranges))
    both: list[Any] = [left.identities, right.identities]
    differing: set[int] = set()
    with ReadPool(identities=ChainMap(*both)) as pool, ThreadPoolExecutor(_THREADS, "flex-diff") as threads:
        work = partial(_compare_batches, pool, (left.root, right.root), differing)
        parts = chain.from_iterable(map(_cut, sorted(ranges)))
        run_workers(threads, _THREADS, batches(parts, attrgetter("size"), COMPARE_BYTES), work)
    return {keys[number] for number in differing}


def _compare_batches(
    pool: ReadPool,
    roots: tuple[AnyPath, AnyPath],
    differing: set[int],
    take: Callable[[], list[_RangePair] | None],
) -> int:
    """Compare batches on one thread until there are none left, and return the bytes read.

    Args:
        pool: reads the files.
        roots: the directories of both sides.
        differing: receives the numbers of the tensors that differ.
        take: returns the next batch, or None.
    """
    memory, count = np.empty((2, COMPARE_BYTES), np.uint8), 0
    while (batch := take()) is not None:
        ends = list(accumulate((one.size for one in batch), initial=0))
        reads = _reads(roots[0], (one.left for one in batch), ends, memory[0])
        count += pool.run([*reads, *_reads(roots[1], (one.right for one in batch), ends, memory[1])])
        if not _is_equal(*memory[:, : ends[-1]]):
            parts = zip(batch, ends, ends[1:], strict=False)
            differing.update(one.number for one, low, high in parts if not _is_equal(*memory[:, low:high]))
        advance(2 * ends[-1])
    return count


def _cut(pair: _RangePair) -> Iterator[_RangePair]:
    """Yield a range in pieces of at most :data:`COMPARE_BYTES`."""
    (file, begin), (other, start) = pair.left, pair.right
    for low in range(0, pair.size, COMPARE_BYTES):
        size = min(COMPARE_BYTES, pair.size - low)
        yield _RangePair((file, begin + low), (other, start + low), size, pair.number)


def _reads(root: AnyPath, places: Iterable[FileOffset], ends: Sequence[int], memory: _Array) -> Iterator[Operation]:
    """Yield the reads of ranges into successive memory, in file order."""
    address: int = memory.__array_interface__["data"][0]
    for (file, begin), low, high in sorted(zip(places, ends, ends[1:], strict=False)):
        yield Operation(root / file, begin, high - low, address + low, memory)


def _is_equal(one: _Array, other: _Array) -> bool:
    """Return whether two flat arrays have equal bytes, comparing words for speed."""
    one, other = one.view(np.uint8), other.view(np.uint8)
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


def _compared_roles(sides: Sequence[OpenedCheckpoint], role: str | None) -> tuple[str, ...]:
    if role is not None and role not in ROLES:
        raise OptionError(
            f"Unknown role {role!r}.",
            where="--role",
            evidence=[f"roles: {', '.join(ROLES)}", *suggestion(role, ROLES)],
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


def _role_difference(role: str, first: _Prepared, second: _Prepared, found: _Differences) -> RoleDifference:
    mine, theirs = ({name for one, name in side.tensors if one == role} for side in (first, second))
    names = sorted((name for one, name in found.different if one == role), key=natural)
    different = [Different(name, *found.different[role, name]) for name in names]
    within = sum(one == role for one, _ in found.within)
    only_in_a, only_in_b = sorted(mine - theirs, key=natural), sorted(theirs - mine, key=natural)
    equal = len(mine) - len(different) - within - len(only_in_a)
    return RoleDifference(equal, within, different, only_in_a, only_in_b)
