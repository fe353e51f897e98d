"""What compiled code would gain in the loops of the executor that take most processor time per byte.

**Rows**: a rank needs a quarter of every row of a matrix, and Python makes a list of addresses and one call for each
row; or it needs whole rows, which are copied from an image of the file into memory with gaps. **Transposes**: such an
image is copied to memory whose axes are exchanged; numpy copies stripes of it. All run in one thread, beside the same
work by some lines of C, which the script compiles; files are in memory, and both results are compared. It is a sketch:
the C code knows nothing of casts, scales, checksums or errors.

Run with ``python -m benchmarks.kernel``; it needs a C compiler, and takes half a minute.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from paddleformers_fc.storage.executor import ReadOptions, ReadPool
from paddleformers_fc.storage.operations import Operation, row_major, strided

SIZE, RUN = 128 << 20, 2048
_SIDE = 4096
_SOURCE = r"""
#include <stdint.h>
#include <unistd.h>
int rows(int file, char *to, int64_t count, int64_t begin, int64_t stride, int64_t step, int64_t length) {
    for (int64_t row = 0; row < count; row++)
        if (pread(file, to + row * step, length, begin + row * stride) != length) return 1;
    return 0;
}
#define TILE 16
int transpose(int file, TYPE *to, TYPE *image, int64_t high, int64_t wide, int64_t step) {
    for (int64_t first = 0; first < high; first += step) {
        int64_t size = step * wide * sizeof(TYPE);
        if (pread(file, image, size, first * wide * sizeof(TYPE)) != size) return 1;
        for (int64_t row = 0; row < step; row += TILE)
            for (int64_t column = 0; column < wide; column += TILE)
                for (int64_t x = column; x < column + TILE; x++)
                    for (int64_t y = row; y < row + TILE; y++)
                        to[x * high + first + y] = image[y * wide + x];
    }
    return 0;
}
"""
"""Two loops over system calls; a tile of a transpose stays in the innermost cache."""


def main() -> None:
    """Measure both loops and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"), help="a file system in memory")
    options = parser.parse_args()
    print("| loop, one thread | executor, GiB/s | C, GiB/s | C by executor |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        path = Path(scratch) / "numbers"
        path.write_bytes(np.random.default_rng(1).bytes(SIZE))
        loops = _compiled("uint16_t", scratch)
        print(_line("2 KiB of rows of 8 KiB", options.rounds, _rows(path, loops, 4 * RUN, RUN)))
        print(_line("rows of 2 KiB into memory with gaps", options.rounds, _rows(path, loops, RUN, 2 * RUN)))
        for dtype, kind in (("<u2", "uint16_t"), ("<u4", "uint32_t")):
            title = f"transpose of {_SIDE} by {_SIDE} numbers of {np.dtype(dtype).itemsize} bytes"
            print(_line(title, options.rounds, _transpose(path, np.dtype(dtype), _compiled(kind, scratch))))


def _compiled(kind: str, scratch: str) -> ctypes.CDLL:
    """Return the loops for one type of numbers."""
    source, library = Path(scratch) / f"{kind}.c", Path(scratch) / f"{kind}.so"
    source.write_text(_SOURCE, encoding="utf-8")
    subprocess.run(
        ["cc", "-O3", "-march=native", "-shared", "-fPIC", f"-DTYPE={kind}", source, "-o", library], check=True
    )
    return ctypes.CDLL(str(library))


Work = Callable[[], object]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Measured:
    """Two ways to read the same bytes, and the memory that each fills."""

    size: int
    executor: Work
    compiled: Work
    ours: Array
    theirs: Array


def _rows(path: Path, loops: ctypes.CDLL, stride: int, step: int) -> _Measured:
    """Return both ways to read rows of :data:`RUN` bytes, whose distance in the file and in memory is given."""
    count, dtype = SIZE // stride, np.dtype(np.uint8)
    ours, theirs = (_at_a_page(count * step) for _ in range(2))
    strides = (stride, 1), (step, 1)
    operation = strided(path, 0, (count, RUN), strides, (dtype, dtype), ours.ctypes.data, ours)
    file = os.open(path, os.O_RDONLY)

    def compiled() -> None:
        _check(loops.rows(file, _pointer(theirs), *map(ctypes.c_int64, (count, 0, stride, step, RUN))))

    return _Measured(count * RUN, _executor(operation), compiled, ours, theirs)


def _transpose(path: Path, dtype: np.dtype[Any], loops: ctypes.CDLL) -> _Measured:
    """Return both ways to read a matrix and exchange its axes."""
    size = _SIDE * _SIDE * dtype.itemsize
    ours, theirs = (_at_a_page(size) for _ in range(2))
    stored = row_major((_SIDE, _SIDE), dtype.itemsize)
    strides = stored, (stored[1], stored[0])
    operation = strided(path, 0, (_SIDE, _SIDE), strides, (dtype, dtype), ours.ctypes.data, ours)
    file, step = os.open(path, os.O_RDONLY), 64
    image = np.zeros((step, _SIDE), dtype)

    def compiled() -> None:
        _check(loops.transpose(file, _pointer(theirs), _pointer(image), *map(ctypes.c_int64, (_SIDE, _SIDE, step))))

    return _Measured(size, _executor(operation), compiled, ours, theirs)


def _at_a_page(size: int) -> Array:
    """Return memory that begins at a page, as tensors that are filled do."""
    memory = np.zeros(size + 4096, np.uint8)
    return memory[-memory.ctypes.data % 4096 :][:size]


def _check(failed: int) -> None:
    if failed:
        raise OSError("a read has failed")


def _pointer(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _executor(operation: Operation | None) -> Work:
    if operation is None:
        raise ValueError("nothing is read")
    pool = ReadPool(ReadOptions(threads=1))
    return lambda: pool.run([operation])


def _line(title: str, rounds: int, one: _Measured) -> str:
    """Measure two ways in turns, and return a line of the table."""
    seconds = [(_seconds(one.executor), _seconds(one.compiled)) for _ in range(rounds + 1)][1:]
    if not np.array_equal(one.ours, one.theirs):
        raise ValueError(f"{title}: both ways differ")
    rates = [one.size / 2**30 / median(found) for found in zip(*seconds, strict=True)]
    ratio = median(mine / other for mine, other in seconds)
    return f"| {title} | {rates[0]:.2f} | {rates[1]:.2f} | {ratio:.2f} |"


def _seconds(work: Work) -> float:
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


if __name__ == "__main__":
    main()
