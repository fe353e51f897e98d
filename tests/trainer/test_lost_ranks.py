"""Real ranks over gloo that are not alike, or of which one is killed: everybody else raises one report and ends."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.distributed.communicator import EXIT_CODE
from paddleformers_fc.errors import PeerError
from tests.harness.on_ranks import on_ranks
from tests.harness.patching import precede
from tests.harness.tiny import DP2, TP2PP2
from tests.trainer.jobs import flex_trainer, weights_of
from tests.trainer.lost_jobs import keep_time
from tests.trainer.test_trainer import settings, train_six
from verification.forkserver import ForkServer, JobResult

FOUR = TP2PP2


@pytest.fixture(scope="module")
def saved(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three steps, which is resumed here."""
    return train_six(ranks, tmp_path_factory.mktemp("dp2"), DP2).third


def die(moment: str, victim: int, output_dir: str, resume: str, **given: Any) -> None:
    """Resume as a job of which one rank kills itself; every other rank writes down how it ended.

    Args:
        moment: ``reading`` a checkpoint, or ``exchanging``: after all have come to an exchange.
        victim: the rank.
        output_dir: of the Trainer; gets ``ended-<rank>.json`` of every rank that raises.
        resume: a checkpoint.
        given: further arguments of a Trainer.
    """
    from paddleformers_fc.distributed.channel import PaddleChannel
    from paddleformers_fc.execute import exchange

    keep_time(Path(output_dir))
    trainer = flex_trainer(output_dir=output_dir, **given)
    rank, before = trainer.args.process_index, weights_of(trainer.model)
    if rank == victim:
        place = (exchange, "execute_reads") if moment == "reading" else (PaddleChannel, "gather")
        precede(*place, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    try:
        trainer.train(resume_from_checkpoint=resume)
    except BaseException as error:
        ended = {
            "error": type(error).__name__,
            "text": str(error),
            "step": trainer.state.global_step,
            "half": weights_of(trainer.model) != before,
        }
        Path(output_dir, f"ended-{rank}.json").write_text(json.dumps(ended))
        raise


def killed(ranks: ForkServer, output_dir: Path, moment: str, victim: int, resume: Path) -> JobResult:
    """A job one of whose ranks has killed itself; nothing of it hangs, and no rank ends as if all were well."""
    output_dir.mkdir()
    given = {"moment": moment, "victim": victim, **settings(FOUR, output_dir, resume, max_steps=6, save_steps=2)}
    result = ranks.attempt(f"{__name__}:die", FOUR.nproc, given)
    assert result.returncodes[victim] == -9
    assert 0 not in result.returncodes
    assert not list(output_dir.glob("*checkpoint*"))
    return result


def endings(output_dir: Path) -> list[dict[str, Any]]:
    """How the ranks that raised have ended."""
    return [json.loads(path.read_text()) for path in sorted(output_dir.glob("ended-*.json"))]


# The rank that serves the store, and another one.
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_while_it_reads_is_named_by_all_others_and_nothing_is_trained_or_saved(
    patient_ranks: ForkServer, saved: Path, tmp_path: Path, victim: int
) -> None:
    out = tmp_path / "out"
    killed(patient_ranks, out, "reading", victim, saved)
    ended = endings(out)
    assert len(ended) == FOUR.nproc - 1
    assert len({one["text"] for one in ended}) == 1
    assert {one["error"] for one in ended} == {"PeerError"}
    assert f"rank {victim}" in ended[0]["text"]
    assert victim == 0 or f"rank {victim} did not arrive" in ended[0]["text"]
    assert {one["step"] for one in ended} == {0}
    # The others had read their part: these half-loaded weights must not be trained.
    assert all(one["half"] for one in ended)


def test_a_rank_killed_in_the_exchange_itself_is_named(patient_ranks: ForkServer, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = killed(patient_ranks, out, "exchanging", 2, saved)
    raised = {one["text"] for one in endings(out)}
    assert len(raised) <= 1
    for rank in (0, 1, 3):
        assert result.returncodes[rank] in (1, EXIT_CODE)
        assert "rank 2 did not arrive" in result.logs[rank].read_text()


@pytest.mark.parametrize(
    ("options", "message", "late"),
    [
        pytest.param({}, "config.rms_norm_eps: ", True, marks=pytest.mark.chosen),
        pytest.param({"save_steps": 2}, "save_steps: 1 on rank 0; 2 on rank 1", False, marks=pytest.mark.chosen),
        (
            {"aoa_config": {"aoa_statements": ["model.norm.weight -> model.norm.weight"]}},
            "aoa_config.aoa_statements: ",
            True,
        ),
        ({}, "config.rms_norm_eps: ", False),
        ({}, "versions.paddleformers_fc: ", False),
        ({"flex_verify": "size"}, "flex_verify: ", False),
        ({"learning_rate": 0.5}, "learning_rate: ", False),
    ],
)
@on_ranks(2)
def test_a_rank_that_differs_is_named_on_every_rank_before_a_weight_changes_and_the_first_step(
    saved: Path, tmp_path: Path, options: dict[str, Any], message: str, late: bool
) -> None:
    """In its options, or else in its software or model, at the start or only when the checkpoint is loaded."""
    from paddleformers_fc.distributed import consistency

    is_odd = os.environ["PADDLE_TRAINER_ID"] == "1"
    early = options if is_odd and not late else {}
    trainer = flex_trainer(DP2, tmp_path, {"max_steps": 3 if late else 1, "save_steps": 1, **early})

    def change(*_: Any, **__: Any) -> None:
        vars(trainer.args).update(options)
        if message.startswith("versions"):
            consistency.__version__ = "9.9.9"  # This process ends with the job.
        elif not options:
            trainer.model.config.rms_norm_eps = 0.125

    if is_odd and late:
        precede(trainer, "_load_flex_checkpoint", change)
    elif is_odd:
        change()
    held = weights_of(trainer.model)
    with pytest.raises(PeerError) as caught:
        trainer.train(resume_from_checkpoint=str(saved) if late else None)
    assert trainer.state.global_step == 0
    assert weights_of(trainer.model) == held
    (line,) = [line for line in caught.value.render().splitlines() if message in line]
    assert "on rank 1" in line
