"""Mutants of the package ``plan``."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BUILD = ("tests/plan/test_build.py",)
ORACLE = ("tests/plan/test_oracle.py",)
BLOCKS = ("tests/plan/test_blocks.py",)
ROUTES = ("tests/plan/test_transfer_plan.py",)
CACHE = ("tests/plan/test_cache.py", "tests/execute/test_plan_cache.py")
FORECAST = (
    "tests/plan/test_forecast.py::test_a_forecast_counts_what_the_plan_of_every_rank_holds",
    "tests/plan/test_forecast.py::test_stored_tensors_that_nobody_wants_are_dropped_by_permission_alone",
    "tests/plan/test_forecast.py::test_casts_are_said",
    "tests/plan/test_forecast.py::test_the_cost_of_an_item_is_what_reading_it_costs",
    "tests/plan/test_forecast.py::test_what_does_not_fit_is_said_as_a_load_says_it",
)
SIMULATE = (
    "tests/plan/test_simulate.py::test_every_tensor_is_held_whole_and_once",
    "tests/plan/test_simulate.py::test_a_grid_that_the_model_cannot_have_is_refused_with_the_numbers",
    "tests/plan/test_simulate.py::test_a_layout_is_known_by_who_owns_which_box_and_not_by_its_name",
    "tests/plan/test_simulate.py::test_modules_are_built_in_the_order_of_the_classes",
)
EXPERTS = ("tests/plan/test_simulate.py::test_a_simulated_layout_is_the_live_one[ernie4_5_moe-ep2-model17]",)
STAGES = ("tests/plan/test_simulate.py::test_a_simulated_layout_is_the_live_one[llama-pp4vpp2-model31]",)
REHEARSE = ("tests/verification/test_simulate_ranks.py",)
STATEMENTS = ("tests/execute/test_statements.py",)
SAVE = ("tests/execute/test_save_and_load.py",)

MUTANTS = (
    # ---- What is read into which shard.
    Mutant(
        "plan/build.py",
        "        filled = pushed(link, common).relative_to(fragment.box.lo)",
        "        filled = pushed(link, common)",
        ORACLE,
        "a region is filled at its global coordinates instead of those of its fragment",
    ),
    Mutant(
        "plan/build.py",
        "        region = common.relative_to(box.lo)",
        "        region = common",
        ORACLE,
        "a region is read at its global coordinates instead of those of its stored box",
    ),
    Mutant(
        "plan/build.py",
        "        yield PatternPiece(link.source, index, box.shape, region, fragment.start, fragment.box.shape, filled, link.axes)",
        "        yield PatternPiece(link.source, 0, box.shape, region, fragment.start, fragment.box.shape, filled, link.axes)",
        ORACLE,
        "every region is read from the first stored box",
    ),
    Mutant(
        "plan/build.py",
        "        key = (stencil, shard.box, shard.flat, shard.dtype, shard.global_shape, role == MODEL_STATE, *forms)",
        "        key = (stencil, shard.box, shard.dtype, shard.global_shape, role == MODEL_STATE, *forms)",
        BUILD,
        "ranges of one box are filled alike",
    ),
    Mutant(
        "plan/build.py",
        "        key = (stencil, shard.box, shard.flat, shard.dtype, shard.global_shape, role == MODEL_STATE, *forms)",
        "        key = (stencil, shard.flat, shard.dtype, shard.global_shape, role == MODEL_STATE, *forms)",
        BUILD,
        "boxes of tensors that are alike are filled alike",
    ),
    Mutant(
        "plan/build.py",
        "role == MODEL_STATE, *forms)\n",
        "*forms)\n",
        BUILD + ORACLE,
        "a cast that a weight may take is taken by a state of the same form",
    ),
    Mutant(
        "plan/build.py",
        "            if self._covers(shard, pattern):",
        "            if self._covers(shard, pattern) or True:",
        BUILD,
        "of many tensors with the same hole only the first is reported",
    ),
    Mutant(
        "plan/build.py",
        "            for fault in cover_faults(whole(fragment.box.shape), written.get(fragment.start, [])):",
        "            for fault in cover_faults(whole(fragment.box.shape), written.get(fragment.start, [])[:1]) if False else ():",
        BUILD,
        "a shard with a hole is planned",
    ),
    Mutant(
        "plan/build.py",
        '                self.report.add("missing", f"{shard.name}: needs {full}")\n                continue',
        "                continue",
        BUILD,
        "a missing tensor is not reported, and its shard keeps its values",
    ),
    Mutant(
        "plan/build.py",
        '            if parameter not in self._source.mapping.fresh:\n                self.report.add("missing", shard.name)',
        "            pass",
        BUILD,
        "a tensor that nothing is mapped to keeps its values",
    ),
    Mutant(
        "plan/build.py",
        "            if shape == self._sources[name].shape or state.scalar:",
        "            if True:",
        BUILD,
        "a state of another shape than its parameter is read",
    ),
    Mutant(
        "plan/build.py",
        "            if tensors[link.source].dtype != shard.dtype and (role != MODEL_STATE or link.cast != shard.dtype)",
        "            if tensors[link.source].dtype != shard.dtype and link.cast != shard.dtype",
        BUILD,
        "a cast reaches a master weight",
    ),
    Mutant(
        "plan/build.py",
        "        for other in tensors[1:]:\n            self._must_equal(tensors[0], other)\n        return True",
        "        return True",
        ORACLE + BUILD,
        "numbers of several parameters that became one are not compared",
    ),
    Mutant(
        "plan/build.py",
        "            self._must_equal(found[0], other, tied=True)",
        "            pass",
        BUILD,
        "a stored alias is not compared with its owner",
    ),
    Mutant(
        "plan/build.py",
        "        for index, (left, right) in enumerate(_common(owner, whole(owner.shape), other)):",
        "        for index, (left, right) in list(enumerate(_common(owner, whole(owner.shape), other)))[:1]:",
        ("tests/plan/test_build.py", "tests/execute/test_disks.py", "tests/execute/test_ties.py"),
        "of tied tensors that are stored in several boxes only the first is compared",
    ),
    Mutant(
        "plan/build.py",
        "        if (owner.shape, owner.dtype) != (other.shape, other.dtype):",
        "        if owner.shape != other.shape:",
        BUILD,
        "tied tensors of different types are compared byte by byte",
    ),
    # ---- Which blocks hold what is read.
    Mutant(
        "plan/blocks.py",
        "            numbers.update(range(first // length, last // length + 1))",
        "            numbers.update(range(first // length, last // length))",
        BLOCKS,
        "the last block of every run is not compared",
    ),
    Mutant(
        "plan/blocks.py",
        "    for check in plan.checks:\n        yield check.left\n        yield check.right",
        "    for check in plan.checks:\n        yield check.left",
        BLOCKS,
        "one side of a comparison of tied tensors is read without its checksum",
    ),
    Mutant(
        "plan/blocks.py",
        "    begin = part.begin + sum(low * stride for low, stride in zip(part.part.lo, strides, strict=True))",
        "    begin = sum(low * stride for low, stride in zip(part.part.lo, strides, strict=True))",
        BLOCKS,
        "other blocks than those that are read are compared",
    ),
    Mutant(
        "plan/blocks.py",
        "        yield begin, begin + span - 1",
        "        yield begin, begin + span - width",
        BLOCKS,
        "the bytes of a run's last number but the first are not compared",
    ),
    # ---- The cache.
    Mutant(
        "plan/cache.py",
        "    if data[:start] != _MAGIC + xxhash.xxh3_128_digest(body):",
        "    if data[: len(_MAGIC)] != _MAGIC:",
        CACHE,
        "a plan file with a changed byte is carried out",
    ),
    Mutant(
        "plan/cache.py",
        "    if document.key != key:",
        "    if document.key.wanted != key.wanted:",
        CACHE,
        "the plan of another checkpoint is carried out",
    ),
    Mutant(
        "plan/cache.py",
        "        if not fitting(planned):",
        "        if False:",
        CACHE,
        "a plan file that does not fit is carried out",
    ),
    Mutant(
        "plan/cache.py",
        "    return all(wanted[role][name].size == count for (role, name), count in filled.items()) and all(",
        "    return all(wanted[role][name].size >= count for (role, name), count in filled.items()) and all(",
        CACHE,
        "a plan that leaves elements of a shard unread fits",
    ),
    Mutant(
        "plan/cache.py",
        "        stored=_digest(_spelled(checkpoint.catalog)),",
        '        stored="",',
        CACHE,
        "where tensors lie is not part of a plan's key",
    ),
    Mutant(
        "plan/cache.py",
        "        manifest=_digest(msgspec.msgpack.encode(checkpoint.manifest)),",
        '        manifest="",',
        CACHE,
        "another checkpoint of the same form has the same plan",
    ),
    # ---- Who reads what for whom.
    Mutant(
        "plan/transfer_plan.py",
        "    return [rank for rank in wanting if rank in seeing] or seeing",
        "    return [rank for rank in wanting if rank in seeing] or wanting",
        ROUTES,
        "a file is read by a rank that does not see it",
    ),
    Mutant(
        "plan/transfer_plan.py",
        "        return number if used == 0 or used + size <= self.limit else number + 1",
        "        return number",
        ROUTES,
        "a rank sends more in a round than it may",
    ),
    Mutant(
        "plan/transfer_plan.py",
        "            for other in others:\n                received.take(other, number, size)",
        "            for other in others[:1]:\n                received.take(other, number, size)",
        ROUTES,
        "a rank receives more in a round than it may",
    ),
    Mutant(
        "plan/transfer_plan.py",
        "            count = max(count, number + 1)\n            if takes_part:",
        "            if takes_part:\n                count = max(count, number + 1)",
        ROUTES,
        "ranks go through different numbers of rounds",
    ),
    Mutant(
        "plan/transfer_plan.py",
        "        load[owner] += size_of(part)\n",
        "",
        ROUTES,
        "the first rank reads everything for all",
    ),
    Mutant(
        "plan/transfer_plan.py",
        "        lo[axis], hi[axis] = low, min(low + rows, box.hi[axis])",
        "        lo[axis], hi[axis] = low, low + rows",
        ROUTES,
        "the last piece of a box is longer than the box",
    ),
    # ---- Sources.
    Mutant(
        "plan/sources.py",
        '    prove(mapping, "The checkpoint\'s mapping")\n',
        "",
        BUILD,
        "a checkpoint's mapping is not proved",
    ),
    Mutant(
        "plan/sources.py",
        "    if declared.rules != rules.rules:",
        "    if False:",
        (
            "tests/corruption/test_hostile_documents.py"
            "::test_rules_that_take_a_key_for_a_value_are_refused_though_they_can_be_proved",
        ),
        "a checkpoint's mapping that takes a query for a key is used",
    ),
    Mutant(
        "plan/sources.py",
        "        if held.shape != spec.shape:",
        "        if len(held.shape) != len(spec.shape):",
        (
            "tests/execute/test_save_and_load.py",
            "tests/corruption/test_types_and_shapes.py",
            "tests/plan/test_build.py",
        ),
        "a checkpoint of a model of other sizes is not reported by its canonical shapes",
    ),
    Mutant(
        "plan/sources.py",
        "        if spec is not None and spec.shape != tensor.shape:",
        "        if False:",
        BUILD,
        "open weights of another shape are not reported by their names",
    ),
    Mutant(
        "plan/sources.py",
        "        if stored.targets[name].shape == live.targets[name].shape\n",
        "        if True\n",
        BUILD,
        "a tensor without a canonical form is taken over in another shape",
    ),
    Mutant(
        "plan/statements.py",
        '    prove(merged, "The mapping of aoa_config")\n',
        "",
        STATEMENTS,
        "a user's statements are not proved",
    ),
    Mutant(
        "plan/statements.py",
        "    _refuse_mixed_parts(replace(merged, made=said), rules, live)\n",
        "",
        STATEMENTS + ("tests/corruption/test_mappings.py",),
        "a user's statement puts queries where keys belong",
    ),
    Mutant(
        "plan/report.py",
        "                merged.lines[kind] |= lines",
        "                merged.lines[kind] = lines",
        BUILD + SAVE,
        "of the reports of several ranks the last one is shown",
    ),
    # ---- Layouts of models that nobody has built.
    Mutant(
        "plan/simulate.py",
        "                length = tensor.shape[axis] // degree\n                lo[axis], hi[axis] = index * length, (index + 1) * length",
        "                length = tensor.shape[axis] // degree\n                lo[axis], hi[axis] = index * length, index * length + length - 1",
        SIMULATE,
        "the last row of every tensor-parallel shard is nobody's",
    ),
    Mutant(
        "plan/simulate.py",
        '        return tensor.numbers["expert"] // (self._experts // self.grid.ep) if "expert" in tensor.numbers else 0',
        '        return tensor.numbers["expert"] % self.grid.ep if "expert" in tensor.numbers else 0',
        EXPERTS,
        "experts are dealt one by one instead of in blocks",
    ),
    Mutant(
        "plan/simulate.py",
        "        return (bisect_right(self.bounds, item) - 1) % self.stages",
        "        return (bisect_right(self.bounds, item) - 1) // max(1, (len(self.bounds) - 1) // self.stages)",
        STAGES,
        "virtual stages are not interleaved",
    ),
    Mutant(
        "plan/simulate.py",
        "        elif not state.half_only or _width(parameter.dtype) == 2:",
        "        elif not state.half_only or _width(parameter.dtype) == 4:",
        SIMULATE + REHEARSE,
        "float32 weights have master weights, and bfloat16 ones have none",
    ),
    Mutant(
        "plan/forecast.py",
        "            max(self.staging, other.staging),",
        "            self.staging + other.staging,",
        FORECAST,
        "scratch memory is added up over all reads",
    ),
    Mutant(
        "plan/forecast.py",
        "            yield from (name for name in tensors if name not in touched)",
        "            yield from (name for name in tensors if False)",
        FORECAST,
        "what nobody would read is not said",
    ),
    Mutant(
        "plan/forecast.py",
        "        key = (place.pp, place.tp, place.ep, place.sharding if model.grid.stage == 3 else 0)",
        "        key = (place.pp, place.tp, place.ep, 0)",
        FORECAST,
        "slices of stage 3 are counted once for all ranks",
    ),
)
