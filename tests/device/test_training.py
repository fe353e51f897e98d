"""Trainings on the device: saved, resumed under another layout and exported, with the numbers of a CPU."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import paddle
import pytest

from paddleformers_fc.execute.export import export_checkpoint
from tests.device.counting import CopiedBytes, copied, synchronisations
from tests.device.running import FAKE, Ranks, device
from tests.harness import tiny
from tests.harness.on_ranks import run_on_ranks
from tests.harness.tiny import DP2, PP2, SD2V1, SINGLE, TP2, MatrixLayout
from tests.trainer.jobs import flex_trainer
from verification.digests import canonical_digests

_REPORTED = re.compile(r"(Saved|Resumed) step \d+ ")
ASYNC, AVERAGE, OFFLOADED = ({"flex_async_save": True}, {"flex_ema_decay": 0.9}, {"tensorwise_offload_optimizer": True})


# ---- On the ranks.


def train(
    layout: Mapping[str, Any],
    output_dir: str,
    on: str,
    model: Mapping[str, Any],
    arguments: Mapping[str, Any],
    resume: str | None = None,
) -> dict[str, Any]:
    """Train with checkpoints at steps 3 and 6; a resumed training saves what it has loaded as its checkpoint-3.

    Args:
        layout: a ``MatrixLayout`` as JSON.
        output_dir: the same on all ranks.
        on: name of the device that holds the model.
        model: overrides of the tiny model's configuration.
        arguments: overrides of the training arguments.
        resume: a checkpoint.
    Returns:
        ``losses``; ``loaded`` and ``kept``: the places of tensors by role, after the load and at the end; ``load`` and
        ``save``: bytes copied to the device and to the host by the load and by the last save; ``weights``: bytes of the
        weights; ``page-locked``: when such memory was allocated; ``step ends``: waits for the device and bytes copied
        to the host at each step end where ranks only agree; with an average also ``digests`` of the weights before, in
        and after its block.
    """
    from paddleformers.trainer import TrainerCallback

    from paddleformers_fc import averaged_weights
    from paddleformers_fc.execute import load
    from paddleformers_fc.trainer import live_roles, save
    from paddleformers_fc.trainer.session import session_of
    from tests.trainer.ema_jobs import bits

    paddle.set_device(on)
    found: dict[str, Any] = {"page-locked": note_page_locked(), "step ends": count_step_ends()}

    def places() -> dict[str, list[str]]:
        roles = live_roles.LiveModel(trainer.model, trainer.optimizer).roles()
        return {role: sorted({str(one.local_tensor.place) for one in names.values()}) for role, names in roles.items()}

    def counted(what: str, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            before = copied()
            result = function(*arguments, **named)
            found[what] = [(copied() - before).to_device, (copied() - before).to_host]
            return result

        return call

    class SaveAsLoaded(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if resume is not None:
                found["loaded"] = places()
                trainer._save_checkpoint(trainer.model)

    settings = {"max_steps": 6, "save_steps": 3, "device": on, **arguments}
    trainer = flex_trainer(layout, output_dir, settings, model=model, callbacks=[SaveAsLoaded()])
    load.read_redistributed = counted("load", load.read_redistributed)
    save.write_and_commit = counted("save", save.write_and_commit)
    trainer.train(resume_from_checkpoint=resume)
    weights = [one.local_tensor for one in trainer.model.sharded_state_dict().values()]
    found["weights"] = sum(math.prod(tensor.shape) * tensor.element_size() for tensor in weights)
    if "flex_ema_decay" in arguments:
        digests = [bits(trainer)]
        with averaged_weights(trainer):
            digests.append(bits(trainer))
            trainer.evaluate(tiny.Samples())
        average = session_of(trainer).average
        assert {str(one.local_tensor.place) for one in average.tensors.values()} == {"Place(cpu)"}
        found["digests"] = [*digests, bits(trainer)]
    return {**found, "losses": trainer.losses, "kept": places()}


def note_page_locked() -> list[str]:
    """Return a list that gets the phase of each page-locked allocation. The fake accelerator has ordinary memory."""
    from paddleformers_fc.execute import async_snapshot, staging_pool
    from paddleformers_fc.trainer.async_save import Saver

    allocate, save = staging_pool.new_buffer, Saver.save
    where, noted = ["before training"], []

    def allocate_and_note(size: int, pinned: bool) -> Any:
        if pinned:
            noted.append(where[0])
        return allocate(size, pinned and device() != FAKE)

    def save_and_note(self: Any, *args: Any) -> None:
        where[0] = "in a save"
        save(self, *args)

    if device() == FAKE:
        async_snapshot.has_pinned_memory = lambda place: not staging_pool.in_host_memory(place)
    staging_pool.new_buffer = async_snapshot.new_buffer = allocate_and_note
    Saver.save = save_and_note
    return noted


def count_step_ends() -> list[list[int]]:
    """Have ranks agree at every step end, and return a list of what that costs where they exchange nothing."""
    from paddleformers_fc.distributed import step_agreement
    from paddleformers_fc.trainer import session as sessions
    from paddleformers_fc.trainer.async_save import Saver

    step_agreement.PENDING_SECONDS = 1e-6
    end, advance = sessions.agree, Saver.advance
    ended: list[list[int]] = []
    exchanged: list[int] = []

    def advance_and_note(self: Any, session: Any) -> None:
        exchanged.append(session.trainer.state.global_step)
        advance(self, session)

    def end_and_count(session: Any, kind: str) -> None:
        waits, copies = synchronisations(), copied()
        end(session, kind)
        if session.trainer.state.global_step not in exchanged:
            ended.append([synchronisations() - waits, (copied() - copies).to_host])

    Saver.advance, sessions.agree = advance_and_note, end_and_count
    return ended


class CountedChannel:
    """A channel that counts what its messages copy, because they are tensors of the device.

    Args:
        inner: carries the messages.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.copied = CopiedBytes()

    def gather(self, *arguments: Any) -> Any:
        """As that of the inner channel."""
        return self._counted(self._inner.gather, *arguments)

    def all_to_all(self, *arguments: Any) -> Any:
        """As that of the inner channel."""
        return self._counted(self._inner.all_to_all, *arguments)

    def _counted(self, exchange: Any, *arguments: Any) -> Any:
        before = copied()
        found = exchange(*arguments)
        self.copied += copied() - before
        return found


def count(layout: MatrixLayout, output_dir: Path, once: bool) -> None:
    """Train a step, save and load, by the executors; compare the bytes that were copied with the plans.

    Args:
        layout: the layout.
        output_dir: the same on all ranks.
        once: whether what several ranks want is read by one of them.
    """
    from paddleformers_fc.distributed.channel import job_channel
    from paddleformers_fc.distributed.consistency import ConsistencyCheck
    from paddleformers_fc.execute.load import load_checkpoint
    from paddleformers_fc.execute.opening import open_on_all_ranks
    from paddleformers_fc.execute.replicas import hashed_range
    from paddleformers_fc.execute.save import JobRecord, begin_save, config_bytes, live_part, save_checkpoint
    from paddleformers_fc.execute.staging_pool import measured_transfers
    from paddleformers_fc.storage.executor import ReadOptions
    from paddleformers_fc.trainer.description import describe_model

    paddle.set_device(device())
    args = tiny.training_arguments(layout.to_json(), str(output_dir), max_steps=1, device=device())
    built = tiny.build("llama", layout.to_json(), args)
    trainer = tiny.trainer(built, args)
    trainer.train()
    weights = built.sharded_state_dict()
    roles = tiny.by_role(weights, trainer.optimizer.sharded_state_dict(weights))
    tensors = [state.local_tensor for states in roles.values() for state in states.values()]

    channel, described = CountedChannel(job_channel()), describe_model(built)
    files = {"config.json": config_bytes(described.config)} if channel.rank == 0 else {}
    job, target = JobRecord(3, 24, {}), output_dir / "counted" / "checkpoint-3"
    before = copied() - channel.copied
    with measured_transfers() as figures:
        save_checkpoint(target, roles, described, files, job, channel)
    saved = copied() - channel.copied - before
    part = live_part(roles, described, files, job, "warn")
    planned = begin_save(lambda: part, target, channel, ConsistencyCheck("planning again", {}))
    planned.removal.close()
    plan = planned.plan
    before = copied() - channel.copied
    options = ReadOptions(replicas="once" if once else "each")
    load_checkpoint(open_on_all_ranks(target, channel), roles, described, channel, options)
    loaded = copied() - channel.copied - before

    def width(role: str, name: str) -> int:
        return int(roles[role][name].local_tensor.element_size())

    pieces = [(file.role, piece) for file in plan.files for piece in file.pieces]
    share = sum((piece.stop - piece.start) * width(role, piece.name) for role, piece in pieces)
    ranges = [(one, hashed_range(one, job.step)) for one in plan.replicas]
    hashed = sum((stop - start) * width(one.role, one.shard.name) for one, (start, stop) in ranges)
    assert saved.to_host == saved.late_to_host == share + hashed
    assert figures.in_flight == 2, "a tensor of one piece is copied while the one before it is written"
    assert saved.to_device == 0
    wanted = sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors)
    assert loaded.to_device == loaded.late_to_device == wanted, "all of it on a side stream"
    assert loaded.to_host == 0


# ---- The tests.


@dataclass(frozen=True)
class Trainings:
    """Trainings of one model with the same arguments.

    Args:
        ranks: start those on the device.
        plain: start those on a CPU, in processes without an accelerator. Where there is one, Paddle has moved a
            training on the CPU there, about once in 40 runs on a busy machine.
        directory: has a directory for each.
        arguments: overrides of the training arguments.
        model: overrides of the tiny model's configuration.
    """

    ranks: Ranks
    plain: Ranks
    directory: Path
    arguments: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)

    def run(
        self, layout: MatrixLayout, name: str, on: str, resume: Path | None = None
    ) -> tuple[tuple[dict[str, Any], ...], Path]:
        """Train; what :func:`train` returns on every rank, and the directory."""
        job = {
            "layout": layout.to_json(),
            "output_dir": str(self.directory / name),
            "on": on,
            "model": dict(self.model),
            "arguments": dict(self.arguments),
            "resume": None if resume is None else str(resume),
        }
        ranks = self.plain if on == "cpu" else self.ranks
        result = ranks.run(f"{__name__}:train", layout.nproc, job)
        lines = [line for line in result.logs[0].read_text(errors="replace").splitlines() if _REPORTED.search(line)]
        assert len(lines) == (2 if resume is None else 3)
        if not {*OFFLOADED, *AVERAGE} & self.arguments.keys():
            assert all(("device copies: " in line) == (on != "cpu") for line in lines), lines
        return result.values, self.directory / name


def last(directory: Path) -> list[Any]:
    """The digests of the last checkpoint."""
    return list(canonical_digests(directory / "checkpoint-6"))


@dataclass(frozen=True)
class Case:
    """A training under one layout that is resumed under another one."""

    saved: MatrixLayout
    resumed: MatrixLayout
    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    bf16: bool = False

    def __str__(self) -> str:
        beside = "-async" * ("flex_async_save" in self.arguments)
        return f"{self.saved.name}-{self.resumed.name}{'-bf16' * self.bf16}{beside}"


# The fake accelerator cannot train with split_param or under stages 2 and 3: the fallback of an operator in place gives
# its output memory of its own, so that a parameter leaves its fused buffer. Data parallel ranks in bfloat16 do not run
# either: they keep gradients where through_host.Reducer does not find them.
CASES = [
    Case(DP2, TP2, {"flex_read": "once", "flex_verify": "full"}),
    Case(TP2, SD2V1, {"flex_verify": "full"}, bf16=True),
    Case(PP2, SINGLE, model={"tie_word_embeddings": True}),
    Case(SD2V1, PP2, {"flex_read": "once"}),
    Case(SINGLE, TP2, ASYNC),
    Case(TP2, SINGLE, ASYNC, bf16=True),
    Case(SINGLE, SINGLE, ASYNC, bf16=True),
]


# In make test: snapshots and master weights. Every way of reading is in test_memory.py.
@pytest.mark.parametrize(
    "case", [*(pytest.param(one, marks=pytest.mark.slow) for one in CASES[:-1]), CASES[-1]], ids=str
)
def test_a_training_resumes_under_another_layout(device_ranks: Ranks, ranks: Ranks, tmp_path: Path, case: Case) -> None:
    trainings = Trainings(device_ranks, ranks, tmp_path, case.arguments, case.model)
    layout, other = (replace(one, bf16=case.bf16) for one in (case.saved, case.resumed))
    saved, run = trainings.run(layout, "saved", device())
    resumed, rerun = trainings.run(other, "resumed", device(), run / "checkpoint-3")
    as_saved = list(canonical_digests(run / "checkpoint-3"))
    assert list(canonical_digests(rerun / "checkpoint-3")) == as_saved, "what was loaded is what was saved"
    masters = {"master_weight"} if case.bf16 else set()
    assert {one.role for one in as_saved} == {"model_state", "optimizer_state"} | masters
    exports = [export_checkpoint(one / "checkpoint-3", tmp_path / f"hf-{one.name}").digests() for one in (run, rerun)]
    assert exports[0] == exports[1]
    for rank in (*saved, *resumed):
        assert any(places != ["Place(cpu)"] for places in rank["kept"].values())
    if case.arguments.get("flex_async_save"):
        assert all(rank["page-locked"] == ["before training"] for rank in [*saved, *resumed])
    if device() != FAKE:
        return  # Other kernels round differently.
    if case.arguments.get("flex_async_save"):
        ended = [one for rank in (*saved, *resumed) for one in rank["step ends"]]
        assert ended
        assert set(map(tuple, ended)) == {(0, 0)}, "a step end at which ranks agree does not wait for the device"
    on_cpu, plain = trainings.run(layout, "saved-cpu", "cpu")
    assert [rank["losses"] for rank in saved] == [rank["losses"] for rank in on_cpu]
    assert last(run) == last(plain)
    if case.saved == case.resumed:
        assert last(rerun) == last(run)
        return
    resumed_on_cpu, replain = trainings.run(other, "resumed-cpu", "cpu", plain / "checkpoint-3")
    assert [rank["losses"] for rank in resumed] == [rank["losses"] for rank in resumed_on_cpu]
    assert last(rerun) == last(replain)


@pytest.mark.sampled
@pytest.mark.skipif(device() != FAKE, reason="a real accelerator counts no bytes")
@pytest.mark.parametrize(
    ("layout", "once"),
    [(replace(SINGLE, bf16=True), False), (DP2, True), (TP2, False)],
    ids=lambda value: value.name if isinstance(value, MatrixLayout) else f"once={value}",
)
def test_a_save_and_a_load_copy_no_more_than_they_must(
    device_ranks: Any, tmp_path: Path, layout: MatrixLayout, once: bool
) -> None:
    run_on_ranks(device_ranks, layout.nproc, count, layout=layout, output_dir=tmp_path, once=once)


@pytest.mark.sampled
@pytest.mark.skipif(device() != FAKE, reason="a real accelerator counts no bytes")
@pytest.mark.parametrize("bf16", [True, False], ids=["bfloat16", "float32"])
def test_offloaded_states_are_saved_from_and_loaded_to_the_host(
    device_ranks: Ranks, ranks: Ranks, tmp_path: Path, bf16: bool
) -> None:
    trainings, layout = Trainings(device_ranks, ranks, tmp_path, OFFLOADED), replace(SINGLE, bf16=bf16)
    (saved,), run = trainings.run(layout, "saved", FAKE)
    (resumed,), rerun = trainings.run(layout, "resumed", FAKE, run / "checkpoint-3")
    assert resumed["losses"] == saved["losses"][3:]
    assert last(rerun) == last(run)
    (on_cpu,), _ = trainings.run(layout, "cpu", "cpu")
    assert on_cpu["losses"] == saved["losses"]
    states = {"optimizer_state", "master_weight"} if bf16 else {"optimizer_state"}
    for places in (saved["kept"], resumed["loaded"], resumed["kept"]):
        assert {role for role, found in places.items() if found == ["Place(cpu)"]} == states
    # The weights are the only tensors on the device, so they alone are copied.
    assert resumed["load"] == [resumed["weights"], 0]
    assert resumed["save"] == saved["save"] == [0, saved["weights"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        (replace(SINGLE, bf16=True), {}),
        (TP2, {}),
        (replace(SINGLE, bf16=True), OFFLOADED),
        (replace(SD2V1, bf16=True), ASYNC),
    ],
    ids=["single-bf16", "tp2", "offloaded", "sd2v1-async"],
)
def test_an_average_on_a_device_is_that_on_a_cpu(
    device_ranks: Ranks, ranks: Ranks, tmp_path: Path, layout: MatrixLayout, arguments: dict[str, Any]
) -> None:
    trainings = Trainings(device_ranks, ranks, tmp_path, {**AVERAGE, **arguments})
    found, run = trainings.run(layout, "device", device())
    resumed, rerun = trainings.run(layout, "resumed", device(), run / "checkpoint-3")
    for rank in (*found, *resumed):
        before, inside, after = rank["digests"]
        assert before == after != inside
    assert [rank["digests"] for rank in resumed] == [rank["digests"] for rank in found]
    assert last(rerun) == last(run)
    assert "ema_state" in {one.role for one in last(run)}
    if device() == FAKE:  # Other kernels round differently.
        assert last(trainings.run(layout, "cpu", "cpu")[1]) == last(run)
