"""Mutants of the package ``trainer``."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROTATION = ("tests/trainer/test_rotation.py",)
RESUME = ("tests/trainer/test_resume.py",)
POSITION = ("tests/trainer/test_position.py",)
CODECS = ("tests/trainer/test_codecs.py",)
STATES = ("tests/trainer/test_documents.py",)
OPTIONS = ("tests/trainer/test_options.py",)
WATCH = ("tests/distributed/test_communicator.py",)
TRAINER = "tests/trainer/test_trainer.py::"

MUTANTS = (
    Mutant(
        "trainer/loading.py",
        "        trainer.scaler.load_state_dict(progress.scaler)",
        "        pass",
        (f"{TRAINER}test_the_loss_scaler_of_a_run_goes_on_where_it_was",),
        "a float16 run resumes with the scale that it began with",
    ),
    Mutant(
        "trainer/documents.py",
        '            files[SCALER] = codecs.encode(trainer.scaler.state_dict(), "loss scaler")',
        "            pass",
        (f"{TRAINER}test_the_loss_scaler_of_a_run_goes_on_where_it_was",),
        "the loss scaler is not saved",
    ),
    Mutant(
        "trainer/loading.py",
        "    trainer.lr_scheduler.set_state_dict(progress.scheduler)",
        "    pass",
        (f"{TRAINER}test_the_state_of_a_resumed_run_is_that_of_the_uninterrupted_one",),
        "a resumed run has the learning rate of its beginning",
    ),
    Mutant(
        "trainer/loading.py",
        "    documents.refuse_unlike(progress.scheduler, trainer.lr_scheduler.state_dict(), directory / documents.SCHEDULER)",
        "    pass",
        ("tests/trainer/test_altered_documents.py::test_the_state_of_another_scheduler_is_refused_on_every_rank",),
        "a state of another scheduler is set",
    ),
    Mutant(
        "trainer/documents.py",
        "        if name not in saved or not _of_one_kind(saved[name], value)",
        "        if name in saved and not _of_one_kind(saved[name], value)",
        STATES,
        "a scheduler's state without its step is set",
    ),
    Mutant(
        "trainer/documents.py",
        "and not -1 <= saved[name] < _MOST_STEPS",
        "and not saved[name] < _MOST_STEPS",
        STATES,
        "a scheduler counts steps below -1",
    ),
    # ---- Rotation.
    Mutant(
        "trainer/rotation.py",
        "    return free[: max(0, len(checkpoints) - max(limit, len(kept)))]",
        "    return free[: max(0, len(checkpoints) - limit + 1)]",
        ROTATION,
        "one checkpoint too many is deleted",
    ),
    Mutant(
        "trainer/rotation.py",
        "    return [path for _, path in sorted((int(match[1]), path) for match, path in found if path.is_dir())]",
        "    return sorted(path for match, path in found if path.is_dir())",
        ROTATION,
        "checkpoint-10 is older than checkpoint-9",
    ),
    Mutant(
        "trainer/rotation.py",
        "    wanted = {path.resolve() for path in (newest, *needed) if path is not None}",
        "    wanted = {path.resolve() for path in needed if path is not None}",
        ROTATION,
        "the newest whole checkpoint is deleted",
    ),
    Mutant(
        "trainer/rotation.py",
        "    wanted = {path.resolve() for path in (newest, *needed) if path is not None}",
        "    wanted = {path.resolve() for path in (newest,) if path is not None}",
        ROTATION,
        "the best checkpoint is deleted",
    ),
    Mutant(
        "trainer/rotation.py",
        '    newest, damaged = resume.newest(output_dir, channel, "full" if level == "full" else "size", threads)',
        '    newest, damaged = resume.newest(output_dir, channel, "size", threads)',
        ROTATION,
        "a rotten newest checkpoint costs the last whole one under full verification",
    ),
    Mutant(
        "trainer/rotation.py",
        "    if newest is not None:\n        whole",
        "    if True:\n        whole",
        ROTATION
        + ("tests/trainer/test_disks.py::test_the_last_checkpoint_that_is_whole_over_all_disks_stays_on_each_of_them",),
        "checkpoints are deleted although none is whole",
    ),
    # ---- Which checkpoint is resumed.
    Mutant(
        "trainer/resume.py",
        "            check_complete(output_dir / name, channel, level, threads)",
        "            pass",
        RESUME,
        "an unfinished checkpoint is resumed",
    ),
    Mutant(
        "trainer/resume.py",
        "            passed_over.append((output_dir / name, error.in_one_line()))",
        "            pass",
        RESUME,
        "a checkpoint is passed over without a word",
    ),
    Mutant(
        "trainer/resume.py",
        "    if replaced:\n",
        "    if False:\n",
        RESUME,
        "a replacement that a crash interrupted is not finished",
    ),
    Mutant(
        "trainer/resume.py",
        "            if channel.rank in replaced:\n                recover(output_dir)",
        "            if channel.rank == 0:\n                recover(output_dir)",
        RESUME,
        "a replacement that a crash interrupted on another disk is not finished",
    ),
    Mutant(
        "trainer/resume.py",
        "    if held:\n        raise NotACheckpoint(",
        "    if False:\n        raise NotACheckpoint(",
        RESUME,
        "a run begins anew over checkpoints that could be mended",
    ),
    Mutant(
        "trainer/resume.py",
        "    if not any(seen):\n",
        "    if not seen[channel.rank]:\n",
        RESUME,
        "a rank that does not see a named checkpoint stops while the others go on",
    ),
    # ---- Where the data goes on.
    Mutant(
        "trainer/position.py",
        "        return self.micro_batch * self.ranks",
        "        return self.micro_batch",
        POSITION,
        "other data-parallel ranks' samples are repeated",
    ),
    Mutant(
        "trainer/position.py",
        "    if position.samples % pace.per_pass:",
        "    if False:",
        POSITION,
        "samples are repeated under a batch that does not divide what was trained",
    ),
    Mutant(
        "trainer/position.py",
        "    if passes is not None and done - position.waiting >= passes:",
        "    if passes is not None and done - position.waiting > passes:",
        POSITION,
        "an epoch that is over is resumed",
    ),
    Mutant(
        "trainer/position.py",
        "    return replace(position, samples=position.samples - waiting, consumed=position.consumed - waiting, waiting=0)",
        "    return replace(position, samples=position.samples, consumed=position.consumed, waiting=0)",
        POSITION,
        "batches that waited in a pipeline are lost under another layout",
    ),
    Mutant(
        "trainer/position.py",
        "    elif new.shuffled and old.seed != new.seed:",
        "    elif False:",
        POSITION,
        "a resumed run with another seed repeats samples",
    ),
    Mutant(
        "trainer/position.py",
        "    elif new.shuffled and old.length != new.length:",
        "    elif False:",
        POSITION,
        "a resumed run over a corpus that has grown repeats samples",
    ),
    Mutant(
        "trainer/position.py",
        "    return sys.maxsize if bounded_by_steps else max(epochs - start.position.epoch, 0)",
        "    return sys.maxsize if bounded_by_steps else epochs",
        POSITION,
        "a resumed run makes all its epochs again",
    ),
    Mutant(
        "trainer/batches.py",
        "            sampler.set_epoch(epoch, samples)",
        "            sampler.set_epoch(epoch, 0)",
        (
            "tests/corruption/test_trainer_faults.py::test_t7_no_sample_is_repeated_or_lost_under_another_data_parallel_degree",
        ),
        "a resumed run begins its epoch anew",
    ),
    Mutant(
        "trainer/batches.py",
        "                self._on_first_batch()\n",
        "                pass\n",
        (f"{TRAINER}test_random_generators_of_an_epochs_end_come_back_for_the_next_epoch",),
        "random generators are not restored",
    ),
    # ---- Documents.
    Mutant(
        "trainer/codecs.py",
        '    if value.keys() != {_ARRAY, "shape", "values"} or value[_ARRAY] not in _DTYPES:',
        '    if value.keys() != {_ARRAY, "shape", "values"}:',
        ("tests/trainer/test_codecs.py",),
        "a document makes an array of strings of a gigabyte",
    ),
    Mutant(
        "trainer/codecs.py",
        "    if type(value) is tuple:\n        return {_TUPLE:",
        "    if type(value) is tuple and value:\n        return {_TUPLE:",
        CODECS,
        "an empty tuple is refused",
    ),
    Mutant(
        "trainer/rng.py",
        "        if state.world_size != world_size:\n            return False",
        "        pass",
        (f"{TRAINER}test_random_generators_of_another_number_of_ranks_are_said_once",),
        "generators of another number of ranks are set",
    ),
    # ---- Saving.
    Mutant(
        "trainer/saving.py",
        "        needed = [path for path in (run.saved, None if best is None else Path(best)) if path is not None]",
        "        needed = [path for path in (run.saved,) if path is not None]",
        (f"{TRAINER}test_the_best_checkpoint_is_found_again_where_a_run_was_moved",),
        "the best checkpoint is rotated away",
    ),
    Mutant(
        "trainer/saving.py",
        "    better = np.greater if args.greater_is_better else np.less\n",
        "    better = np.greater\n",
        (f"{TRAINER}test_the_best_checkpoint_is_found_again_where_a_run_was_moved",),
        "the worst checkpoint is the best",
    ),
    Mutant(
        "trainer/state.py",
        "    if isinstance(optimizer, GroupShardedOptimizerStage2):\n        own = _own_parameters(optimizer, weights)",
        "    if False:\n        own = _own_parameters(optimizer, weights)",
        (f"{TRAINER}test_parameters_without_gradients_take_no_states_from_their_neighbours",),
        "in stage 2 a rank saves states that are another's",
    ),
    Mutant(
        "trainer/slices.py",
        "    end = min(size, begin + length)\n",
        "    end = begin + length\n",
        (f"{TRAINER}test_stage_three_is_saved_as_slices_and_goes_on_under_another_layout",),
        "the padding of the last slice of stage 3 is saved",
    ),
    Mutant(
        "trainer/best.py",
        "    chosen = seen[channel.rank] or max(seen)",
        "    chosen = seen[channel.rank]",
        ("tests/trainer/test_best.py",),
        "a rank that does not see the best checkpoint forgets it",
    ),
    # ---- Options and patience.
    Mutant(
        "distributed/communicator.py",
        "        os._exit(EXIT_CODE)",
        "        pass",
        WATCH,
        "a rank that is left alone in a collective waits for ever",
    ),
    Mutant(
        "trainer/job_state.py",
        "    return job_communicator(args.flex_timeout)",
        "    return job_communicator()",
        (f"{TRAINER}test_no_rank_waits_longer_than_it_was_told_to",),
        "flex_timeout has no effect",
    ),
)
