"""Load, digest and export from a store: the same bits as from a directory, in few requests and few bytes too many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddleformers_fc.execute.exchange import ReadContext, read_redistributed
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.reading import ArraySlot, execute_reads
from paddleformers_fc.mapping.boxes import Box, whole
from paddleformers_fc.plan.block_owners import RecordedBlocks
from paddleformers_fc.plan.items import LoadPlan, ReadItem, StoredPart
from paddleformers_fc.plan.report import Report
from paddleformers_fc.storage.checksum import BlockHasher
from paddleformers_fc.storage.executor import ReadOptions
from paddleformers_fc.storage.identities import identities_of, same_bytes_key
from paddleformers_fc.storage.paths import parse_path
from tests.execute.simulated import ARRAYS, load, open_weights, save, succeed
from tests.storage.serving import Served, serving
from verification.digests import canonical_digests


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    save(tmp_path / "checkpoint-3", ARRAYS, 2, 2)
    with serving(tmp_path) as one:
        yield one


@pytest.mark.parametrize("way", ["each", "once"])
@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 3), (4, 1)])
def test_a_resume_from_a_store_restores_every_bit(served: Served, layout: tuple[int, int], way: str) -> None:
    load(parse_path(f"{served.url}/checkpoint-3"), *layout, options=ReadOptions(replicas=way))


def test_exports_digests_and_open_weights_of_a_store_are_those_of_the_directory(served: Served, tmp_path: Path) -> None:
    remote = parse_path(f"{served.url}/checkpoint-3")
    assert list(canonical_digests(remote)) == list(canonical_digests(tmp_path / "checkpoint-3"))
    report = export_checkpoint(remote, tmp_path / "a", 8000)
    assert report.digests() == export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "b", 8000).digests()
    load(parse_path(f"{served.url}/a"), 2, only="model_state", loader=open_weights())


@pytest.mark.parametrize("columns", [[(0, 100), (0, 100)], [(0, 50), (50, 100)]], ids=["replicas", "columns"])
def test_ranks_that_hash_every_second_block_request_every_byte_once(
    tmp_path: Path, columns: list[tuple[int, int]]
) -> None:
    numbers = np.arange(2_000 * 100, dtype=np.float32).reshape(2_000, 100)
    (tmp_path / "data").write_bytes(numbers.tobytes())
    hasher = BlockHasher(4_000)
    hasher.update(numbers.tobytes())
    recorded = RecordedBlocks({"data": hasher.file_checksum("data")})
    parts = [StoredPart("data", 0, numbers.shape, Box((0, low), (2_000, high)), "float32") for low, high in columns]
    with serving(tmp_path) as served:
        root = parse_path(served.url)
        identities = identities_of([root / "data"])
        everyone = [recorded.reads([part], same_bytes_key(identities)) for part in parts]
        storage = ReadContext(root, identities, recorded=recorded, block_reads=everyone)

        def work(channel: Any) -> tuple[int, bool]:
            part, (low, high) = parts[channel.rank], columns[channel.rank]
            shape, slot = part.part.shape, ArraySlot(np.zeros(part.part.volume, np.float32))
            item = ReadItem("r", "a", part, 0, shape, whole(shape), (0, 1))
            plan = LoadPlan((item,), (), {}, Report())
            done = read_redistributed(plan, storage, {("r", "a"): slot}, channel, ReadOptions(threads=1))
            return done.hashed, np.array_equal(slot.array, numbers[:, low:high].ravel())

        assert succeed(2, work) == [(numbers.nbytes // 2, True)] * 2
        assert served.bytes <= 2 * numbers.nbytes


def test_thousands_of_small_tensors_are_few_requests(tmp_path: Path) -> None:
    numbers = np.arange(3_000 * 100, dtype=np.float32).reshape(3_000, 100)
    (tmp_path / "data").write_bytes(numbers.tobytes())
    rows = {str(n): StoredPart("data", n * 400, (60,), whole((60,)), "float32") for n in range(3_000)}
    items = tuple(ReadItem("r", name, part, 0, (60,), whole((60,)), (0,)) for name, part in rows.items())
    slots = {("r", name): ArraySlot(np.zeros(60, np.float32)) for name in rows}
    with serving(tmp_path) as served:
        execute_reads(LoadPlan(items, (), {}, Report()), parse_path(served.url), slots)
        assert all(np.array_equal(slot.array, numbers[int(name), :60]) for (_, name), slot in slots.items())
        assert len(served.ranges) <= 2
        assert served.bytes <= numbers.nbytes
