"""Mutants of the package ``layout``."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SHARDS = ("tests/layout/test_shards.py",)
GRID = ("tests/layout/test_grid.py",)
PARTITION = ("tests/layout/test_partition.py",)

MUTANTS = (
    Mutant(
        "layout/shards.py",
        "not 0 <= self.flat[0] <= self.flat[1] <= self.box.volume:",
        "not 0 <= self.flat[0] <= self.flat[1] <= self.box.volume + 1:",
        SHARDS,
        "a range that is one longer than its box is taken",
    ),
    Mutant(
        "layout/shards.py",
        "not 0 <= self.flat[0] <= self.flat[1] <= self.box.volume:",
        "not self.flat[0] <= self.flat[1] <= self.box.volume:",
        SHARDS,
        "a range that begins before its box is taken",
    ),
    Mutant(
        "layout/shards.py",
        "    if end % row:\n        yield from _within(full_end",
        "    if end % row > 1:\n        yield from _within(full_end",
        SHARDS,
        "the last element of a range is missing where it is alone in its row",
    ),
    Mutant(
        "layout/shards.py",
        "        at = (first + 1) * row - begin\n",
        "        at = row\n",
        SHARDS,
        "the second box of a range is put behind the place where it belongs",
    ),
    Mutant(
        "layout/shards.py",
        "        at += (full_end - first) * row\n",
        "",
        SHARDS,
        "the last box of a range overwrites the one before",
    ),
    Mutant(
        "layout/shards.py",
        "            Fragment(_moved(box, self.box.lo), start) for box, start in",
        "            Fragment(box, start) for box, start in",
        SHARDS,
        "a range of a tensor-parallel shard is taken for one of the whole tensor",
    ),
    Mutant(
        "layout/codec.py",
        "        if entry.end - entry.begin != kind.size:",
        "        if entry.end - entry.begin > kind.size:",
        SHARDS,
        "a shard of which too few bytes are held is taken",
    ),
    Mutant(
        "layout/codec.py",
        "        claimed = (entry.dtype, record.global_shape, record.offset, record.shape, record.flat)",
        "        claimed = (entry.dtype, record.global_shape, record.shape, record.flat)",
        SHARDS,
        "every shard of one form is taken for the first",
    ),
    Mutant(
        "layout/codec.py",
        "        claimed = (entry.dtype, record.global_shape, record.offset, record.shape, record.flat)",
        "        claimed = (entry.dtype, record.global_shape, record.offset, record.shape)",
        SHARDS,
        "every range of one box is taken for the first",
    ),
    Mutant(
        "layout/codec.py",
        "    if records.keys() != tensors.keys():",
        "    if records.keys() - tensors.keys():",
        SHARDS
        + (
            "tests/corruption/test_hostile_documents.py::test_a_document_with_changed_nodes_is_refused_or_read_and_nothing_else[shard descriptions]",
            "tests/corruption/test_types_and_shapes.py",
        ),
        "tensors that the description of a file's shards leaves out are dropped",
    ),
    Mutant(
        "layout/codec.py",
        "[numbers.setdefault(place, len(numbers)) for place in where]",
        "[numbers.setdefault(place, max(len(numbers) - 1, 0)) for place in where]",
        ("tests/execute/test_replica_assignment.py",),
        "ranks tell each other wrong places of their shards",
    ),
    Mutant(
        "layout/live.py",
        "    if held != shard.size:",
        "    if held > shard.size:",
        SHARDS,
        "a tensor that is smaller than its shard is read beyond its end",
    ),
    Mutant(
        "layout/live.py",
        "            tuple(weight.global_offset),\n            tuple(weight.global_shape),",
        "            tuple(weight.global_shape),",
        SHARDS,
        "weights of one form are all taken to lie where the first does",
    ),
    Mutant(
        "layout/live.py",
        "                    (flat.start, flat.stop) if weight.is_flattened and flat is not None else None,\n",
        "",
        SHARDS,
        "a save uses the plan of shards with other ranges",
    ),
    Mutant(
        "layout/live.py",
        "            None if flat is None else (flat.start, flat.stop),\n",
        "",
        SHARDS,
        "weights of one box are all taken to be the same range of it",
    ),
    Mutant(
        "layout/live.py",
        "                    weight.global_offset,\n",
        "",
        SHARDS,
        "a save uses the plan of shards at other places",
    ),
    Mutant(
        "layout/live.py",
        "not state.scalar and parameter.global_shape != shard.global_shape:",
        "False:",
        SHARDS,
        "a state that has not its parameter's shape is saved",
    ),
    Mutant(
        "layout/partition.py",
        "        if counted and seen % share == 0 and len(bounds) < parts:",
        "        if seen % share == 0 and len(bounds) < parts:",
        PARTITION,
        "a stage ends behind the embedding",
    ),
    Mutant(
        "layout/partition.py",
        "(1 if part > parts - extra else 0)",
        "(1 if part >= parts - extra else 0)",
        PARTITION,
        "stages of unequal length begin one too early",
    ),
    Mutant(
        "layout/partition.py",
        "            begin, end = max(low - start, 0), min(high - start, self.sizes[place])",
        "            begin, end = max(low - start, 0), high - start",
        PARTITION,
        "a range reaches into the padding of its buffer",
    ),
    Mutant(
        "layout/partition.py",
        "            if held >= limit:",
        "            if held > limit:",
        PARTITION,
        "a buffer of exactly its limit takes one more parameter",
    ),
    Mutant(
        "layout/partition.py",
        "    begin, end = min(rank * length, size), min((rank + 1) * length, size)",
        "    begin, end = min(rank * length, size), (rank + 1) * length",
        PARTITION,
        "the last slice of stage 3 reaches into the padding",
    ),
    Mutant(
        "layout/partition.py",
        "        heapq.heapreplace(load, (held + sizes[index], rank))",
        "        heapq.heapreplace(load, (held + 1, rank))",
        PARTITION,
        "states are shared by their number and not by their size",
    ),
    Mutant(
        "layout/grid.py",
        "        sharding = moe * inner + dense",
        "        sharding = dense * outer + moe",
        GRID,
        "ranks of expert groups have other states than Paddle gives them",
    ),
    Mutant(
        "layout/grid.py",
        "        if self.pp_first:",
        "        if not self.pp_first:",
        GRID,
        "pipeline and sharding change places in the order of ranks",
    ),
    Mutant(
        "layout/grid.py",
        "    if grid.stage == 3 and grid.tp > 1:",
        "    if grid.stage == 3 and grid.tp > 2:",
        GRID,
        "a layout that Paddle does not train is planned",
    ),
    Mutant(
        "layout/roles.py",
        "        scalar = _SCALAR.get(dot + last)\n        if scalar is not None:",
        "        scalar = _SCALAR.get(dot + last)\n        if scalar:",
        SHARDS,
        "moments are taken for parameters",
    ),
    Mutant(
        "layout/fingerprint.py",
        "            (role, name, shard.dtype, record_of(shard))",
        "            (role, name, shard.dtype)",
        ("tests/plan/test_simulate.py::test_a_layout_is_known_by_who_owns_which_box_and_not_by_its_name",),
        "layouts that own other boxes have one fingerprint",
    ),
)
