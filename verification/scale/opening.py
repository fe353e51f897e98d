"""Measure what a rank decodes when a job opens a checkpoint of many ranks.

``python -m verification.scale.opening [MODEL] [RANKS]`` saves a checkpoint of sparse files, and prints the sizes of its
manifest and index, the processor seconds of each step, and the memory of what is decoded.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import TypeVar

from paddleformers_fc.formats.flex import DOCUMENTS, build_checkpoint, read_document_bytes
from paddleformers_fc.formats.index import decode_index
from paddleformers_fc.storage.checksum import INDEX_NAME
from paddleformers_fc.storage.manifest import MANIFEST_NAME, Surroundings, read_manifest
from verification import temporary_directory
from verification.scale.operations import saved_checkpoint

_T = TypeVar("_T")
_REPEATS = 3


def _timed(what: str, work: Callable[[], _T]) -> _T:
    """Do work several times, print the fewest processor seconds, and return its result."""
    seconds, result = [], None
    for _ in range(_REPEATS):
        started = time.thread_time()
        result = work()
        seconds.append(time.thread_time() - started)
    print(f"{what}: {min(seconds):.3f} s")
    assert result is not None
    return result


def main(name: str = "70B dense", world: str = "4096") -> None:
    """Save the checkpoint of a job, and measure its opening."""
    with temporary_directory() as place:
        directory = saved_checkpoint(name, int(world), place)
        for document in (MANIFEST_NAME, *DOCUMENTS):
            print(f"{document}: {(directory / document).stat().st_size / 1e6:.1f} MB")
        manifest = _timed("read the manifest", lambda: read_manifest(directory))
        print(f"files: {len(manifest.files):,}")
        documents = {one: read_document_bytes(directory, manifest, one) for one in DOCUMENTS}
        _timed("decode the index", lambda: decode_index(documents[INDEX_NAME], manifest.files, directory / INDEX_NAME))
        _timed(
            "decode all, and gather the tensors",
            lambda: build_checkpoint(directory, manifest, documents, {}, Surroundings(directory)),
        )
        tracemalloc.start()
        kept = read_manifest(directory), decode_index(documents[INDEX_NAME], manifest.files, directory / INDEX_NAME)
        print(f"memory of {len(kept)} decoded documents: at most {tracemalloc.get_traced_memory()[1] / 1e6:.0f} MB")


if __name__ == "__main__":
    main(*sys.argv[1:])
