"""Whether the files of a checkpoint without checksums belong together, by a few of the numbers in them.

Names and shapes do not show a file of another run, or one under the name of another rank. Two facts about numbers do:

* a weight of 16 bits is its master weight, rounded;
* two ranks have different parts of a tensor, with different numbers.

A few tensors of every pair of files are compared, by a few numbers each. The comparison with master weights concerns
most of them: replicas that diverged in a run are no reason to refuse it. A copy is compared byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paddleformers_fc.formats.catalog import Catalog, StoredForm, StoredFragment
from paddleformers_fc.layout.roles import MASTER, MASTER_WEIGHT, MODEL_STATE
from paddleformers_fc.mapping.boxes import Shape
from paddleformers_fc.storage.dtypes import item_size, to_numpy, to_safetensors
from paddleformers_fc.storage.files import open_local, read_range
from paddleformers_fc.text import count_text

_TENSORS, _NUMBERS = 4, 8
"""How many tensors of a pair of files are compared, and how many numbers of each."""
_HALF = ("bfloat16", "float16")
_ROUNDING = 2.0**-7
"""Bound on the relative error of a number that is rounded to bfloat16, twice the largest one."""
_LEAST = 1e-6
"""Bound on the error of a number that is rounded to a subnormal float16."""
_BLOCK_BYTES = 1 << 20

_Numbers = np.ndarray[Any, np.dtype[np.float64]]


def foreign_files(directory: Path, catalog: Catalog) -> Iterator[str]:
    """Yield a line for every file that is of another save than a file beside it, or a copy of that file.

    Args:
        directory: of the files.
        catalog: their stored tensors.
    """
    yield from _unlike_masters(directory, catalog)
    yield from _copies(directory, catalog)


def _unlike_masters(directory: Path, catalog: Catalog) -> Iterator[str]:
    """Yield a line for every file of weights that are not the master weights in another file."""
    masters = catalog.roles.get(MASTER_WEIGHT, {})
    compared: dict[tuple[str, str], list[str]] = {}
    unlike: dict[tuple[str, str], list[str]] = {}
    for name, weight in catalog.roles.get(MODEL_STATE, {}).items():
        master = masters.get(name + MASTER.suffix)
        if master is None or weight.form.held_dtype not in _HALF or master.dtype != MASTER.dtype:
            continue
        if len(weight.shape) < 2 or weight.shape != master.shape:
            continue
        fragments = master.fragments
        for part in weight.fragments:
            for own in (fragments[index] for index in master.form.finder.near(part.box)):
                common, seen = part.box.intersect(own.box), compared.setdefault((part.file, own.file), [])
                if common is None or len(seen) == _TENSORS:
                    continue
                seen.append(name)
                points = [(*common.lo[:-1], at) for at in range(common.lo[-1], common.hi[-1])][:_NUMBERS]
                rounded = _numbers(directory, weight.form, part, points)
                if _differ(rounded, _numbers(directory, master.form, own, points)):
                    unlike.setdefault((part.file, own.file), []).append(name)
    for (file, other), names in unlike.items():
        count = len(compared[file, other])
        if 2 * len(names) > count:
            yield f"{file} is not of the save of {other}: {len(names)} of {count} weights are not their master weights"


def _differ(rounded: _Numbers, exact: _Numbers) -> bool:
    """Return whether most numbers are not others, rounded."""
    with np.errstate(invalid="ignore"):
        unlike = np.abs(rounded - exact) > _ROUNDING * np.abs(exact) + _LEAST
    return 2 * int((unlike & np.isfinite(rounded)).sum()) > len(exact)


def _numbers(directory: Path, form: StoredForm, part: StoredFragment, points: Sequence[Shape]) -> _Numbers:
    """Return single elements of a tensor, which a stored box of it contains, as float64."""
    dtype = to_numpy(to_safetensors(form.held_dtype))
    found = []
    with open_local(directory / part.file) as file:
        for point in points:
            shape, at = part.box.shape, tuple(one - low for one, low in zip(point, part.box.lo, strict=True))
            place = np.ravel_multi_index(at[::-1], shape[::-1]) if form.turned else np.ravel_multi_index(at, shape)
            found.append(read_range(file, part.begin + int(place) * dtype.itemsize, dtype.itemsize))
    return np.frombuffer(b"".join(found), dtype).astype(np.float64)


def _copies(directory: Path, catalog: Catalog) -> Iterator[str]:
    """Yield a line for every file whose parts of tensors are the numbers of other parts, in another file."""
    for files, tensors in _alike(catalog).items():
        first: dict[tuple[bytes, ...], int] = {}
        for at, file in enumerate(files):
            heads = tuple(_bytes(directory, parts[at], width, 0, _NUMBERS) for parts, width in tensors[:_TENSORS])
            other = first.setdefault(heads, at)
            if other == at or all(_is_constant(head, width) for head, (_, width) in zip(heads, tensors, strict=False)):
                continue
            if all(_is_equal(directory, parts[other], parts[at], width) for parts, width in tensors):
                count = count_text(len(tensors), "tensor")
                yield f"{file} contains the numbers of {files[other]}, in its parts of {count}"


_Alike = list[tuple[list[StoredFragment], int]]
"""Parts of one shape of a tensor, and bytes per element."""


def _alike(catalog: Catalog) -> dict[tuple[str, ...], _Alike]:
    """Return the tensors of which files have parts of one shape, by these files. The largest part of each counts."""
    found: dict[tuple[str, ...], _Alike] = {}
    for tensor in (one for tensors in catalog.roles.values() for one in tensors.values() if len(one.offsets) > 1):
        largest: dict[str, StoredFragment] = {}
        for part in tensor.fragments:
            if part.file not in largest or part.box.volume > largest[part.file].box.volume:
                largest[part.file] = part
        shapes: dict[Shape, list[StoredFragment]] = {}
        for file in sorted(largest):
            shapes.setdefault(largest[file].box.shape, []).append(largest[file])
        for parts in shapes.values():
            if len(parts) > 1:
                width = item_size(to_safetensors(tensor.form.held_dtype))
                found.setdefault(tuple(part.file for part in parts), []).append((parts, width))
    return found


def _is_constant(head: bytes, width: int) -> bool:
    return len({head[at : at + width] for at in range(0, len(head), width)}) < 2


def _is_equal(directory: Path, one: StoredFragment, other: StoredFragment, width: int) -> bool:
    block = _BLOCK_BYTES // width
    return all(
        _bytes(directory, one, width, at, block) == _bytes(directory, other, width, at, block)
        for at in range(0, one.box.volume, block)
    )


def _bytes(directory: Path, part: StoredFragment, width: int, at: int, count: int) -> bytes:
    """Return the bytes of up to ``count`` elements of a stored box."""
    with open_local(directory / part.file) as file:
        return read_range(file, part.begin + at * width, min(count, part.box.volume - at) * width)
