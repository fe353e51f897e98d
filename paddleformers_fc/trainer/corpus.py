"""The identity of the samples of PaddleFormers' indexed corpora (``dataset_type: pretrain``).

Such a dataset distributes a corpus to as many samples as the whole run takes: by seed, sequence length and the number
of passes over the corpus that these samples need. Another ``max_steps`` or global batch may need another number of
passes, and then all samples are others. A checkpoint contains a digest of samples at equal distances: the documents
and offsets at which they begin and end. A resumed run compares it.

Time: 256 look-ups in memory-mapped files.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

_LOOKED_AT = 256


def digest(dataset: Any, count: int) -> str:
    """Return the digest of the first samples of a dataset; empty for a dataset without such an index.

    Args:
        dataset: PaddleFormers' ``GPTDataset``, or its ``BlendableDataset`` of several.
        count: number of samples.
    """
    if not _is_indexed(dataset) or not 0 < count <= len(dataset):
        return ""
    chosen = np.unique(np.linspace(0, count - 1, _LOOKED_AT).astype(np.int64))
    places = [_place(dataset, int(index)) for index in chosen]
    return xxhash.xxh3_128_hexdigest(repr((count, places)).encode())


def _is_indexed(dataset: Any) -> bool:
    if hasattr(dataset, "dataset_index"):
        return all(_is_indexed(one) for one in dataset.datasets)
    return hasattr(dataset, "shuffle_idx")


def _place(dataset: Any, index: int) -> tuple[int, ...]:
    """Return where a sample is: the number of its dataset, its first and last document, and the offsets in them."""
    if hasattr(dataset, "dataset_index"):
        number = int(dataset.dataset_index[index])
        return (number, *_place(dataset.datasets[number], int(dataset.dataset_sample_index[index])))
    row = int(dataset.shuffle_idx[index])
    (first, begin), (last, end) = dataset.sample_idx[row], dataset.sample_idx[row + 1]
    return int(dataset.doc_idx[first]), int(begin), int(dataset.doc_idx[last]), int(end)
