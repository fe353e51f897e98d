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
from tests.device.counting import copied, synchronisations
from tests.device.running import FAKE, Ranks, device
from tests.harness import tiny
from tests.harness.on_ranks import job_on_ranks
from tests.harness.tiny import PP2, SD2V1, SINGLE, TP2, MatrixLayout
from tests.trainer.jobs import flex_trainer
from verification.digests import canonical_digests

_REPORTED = re.compile(r"(Saved|Resumed) step \d+ ")
ASYNC, AVERAGE, OFFLOADED = ({"flex_async_save": True}, {"flex_ema_decay": 0.9}, {"tensorwise_offload_optimizer": True})


# ---- On the ranks.


def train(
    layout: MatrixLayout,
    output_dir: Path,
    on: str,
    model: Mapping[str, Any],
    arguments: Mapping[str, Any],
    resume: Path | None = None,
) -> dict[str, Any]:
    """Train with checkpoints at steps 3 and 6; a resumed training saves what it has loaded as its checkpoint-3.

    Args:
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
    from tests.trainer.test_ema import bits

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
    trainer.train(resume_from_checkpoint=resume and str(resume))
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
        job = {"output_dir": self.directory / name, "model": self.model, "arguments": self.arguments, "resume": resume}
        ranks = self.plain if on == "cpu" else self.ranks
        result = job_on_ranks(ranks.run, layout.nproc, train, layout=layout, on=on, **job)
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
# its output memory of its own, so that a parameter leaves its fused buffer.
CASES = [
    Case(SD2V1, TP2, {"flex_read": "once", "flex_verify": "full"}),
    Case(PP2, SINGLE, model={"tie_word_embeddings": True}),
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
    [(TP2, {}), (replace(SINGLE, bf16=True), OFFLOADED), (replace(SD2V1, bf16=True), ASYNC)],
    ids=["tp2", "offloaded", "sd2v1-async"],
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
