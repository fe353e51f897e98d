"""What is resumed where checkpoints are damaged or altered, where runs branch, and where ranks differ or are killed."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

import paddleformers_fc
from paddleformers_fc.distributed.communicator import EXIT_CODE
from paddleformers_fc.errors import CheckpointError, Corrupt, MismatchError, PeerError
from paddleformers_fc.storage.commit import staging_directory
from paddleformers_fc.storage.manifest import MANIFEST_NAME, Manifest, manifest_seal, read_manifest
from tests.cli.support import alter, flip, seal
from tests.harness.clocks import keep_time
from tests.harness.on_ranks import job_on_ranks, on_ranks, run_on_ranks
from tests.harness.patching import precede
from tests.harness.sealing import reseal
from tests.harness.tiny import DP2, SINGLE, TP2PP2
from tests.trainer import jobs
from tests.trainer.jobs import callback, flex_trainer, logged, refused, trained, weights_of
from tests.trainer.test_trainer import SIX_STEPS, settings
from verification.forkserver import ForkServer, JobResult

WEIGHTS = "model_state/rank-00000.safetensors"
STATES = "optimizer_state/rank-00001.safetensors"


def train(ranks: ForkServer, output_dir: Path, resume: Path | bool | None = None, **arguments: Any) -> JobResult:
    given = settings(DP2, output_dir, resume, **{"max_steps": 3, "save_steps": 1, **arguments})
    return job_on_ranks(ranks.attempt, 2, jobs.run, **given)


@pytest.fixture(scope="module")
def saved(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of two ranks."""
    output_dir = tmp_path_factory.mktemp("saved")
    assert train(ranks, output_dir).ok
    return output_dir


@pytest.fixture
def third(saved: Path) -> Path:
    """The newest of these checkpoints, which a test only reads."""
    return saved / "checkpoint-3"


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """The output directory of a test, with these checkpoints."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def refusals(ranks: ForkServer, output_dir: Path, model: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """What becomes of an automatic resume on both ranks."""
    given = {"layout": DP2, "output_dir": output_dir, "model": model, "arguments": {"max_steps": 3, **arguments}}
    return run_on_ranks(ranks, 2, refused, resume=True, **given)


def damage(checkpoint: Path, *names: str) -> None:
    """Change the last byte of tensors whose checksums are those of small blocks, so that no block holds a header."""
    reseal(checkpoint, 1000)
    for name in names:
        flip(checkpoint / name, -1)


DAMAGES: dict[str, tuple[str, dict[str, int]]] = {
    "a header": ("size", {WEIGHTS: 9}),
    "the state of the Trainer": ("size", {"trainer/state.json": 20}),
    "a weight and an optimizer state": ("full", {WEIGHTS: -1, STATES: -1}),
}
"""The level of verification, and the byte that changes in each file."""


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_newest_checkpoint_is_skipped_and_refused_if_named(ranks: ForkServer, run: Path, what: str) -> None:
    level, changed = DAMAGES[what]
    for name, at in changed.items():
        flip(run / "checkpoint-3" / name, at)
    given: dict[str, Any] = {"flex_verify": level, "save_steps": 100}
    named = train(ranks, run, run / "checkpoint-3", **given)
    assert not named.ok
    text = named.logs[0].read_text()
    assert [name for name in changed if name not in text] == []
    resumed = train(ranks, run, True, **given)
    assert resumed.ok, resumed.logs[0].read_text()
    assert [len(value["losses"]) for value in resumed.values] == [1, 1]
    lines = "".join(log.read_text() for log in resumed.logs)  # The second rank of the node does not repeat it.
    (line,) = [line for line in lines.splitlines() if "checkpoint-3" in line and "WARNING" in line]
    assert [name for name in changed if name not in line] == []


def test_damage_that_is_found_in_a_load_leads_to_the_one_before(
    ranks: ForkServer, saved: Path, run: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(saved / "checkpoint-2", whole / "checkpoint-2")
    damage(run / "checkpoint-3", WEIGHTS, STATES)
    resumed, expected = train(ranks, run, True), train(ranks, whole, True)
    assert resumed.ok, resumed.logs[0].read_text()
    assert resumed.values == expected.values
    assert [len(value["losses"]) for value in resumed.values] == [1, 1]
    (line,) = [line for line in resumed.logs[0].read_text().splitlines() if "fails verification" in line]
    assert [name for name in (WEIGHTS, STATES) if name not in line] == []
    for name in (WEIGHTS, "optimizer_state/rank-00000.safetensors"):
        one, other = (directory / "checkpoint-3" / name for directory in (run, whole))
        assert one.read_bytes() == other.read_bytes()


def test_a_checkpoint_that_lacks_tensors_of_a_damaged_one_is_refused(
    ranks: ForkServer, saved: Path, tmp_path: Path
) -> None:
    assert train(ranks, tmp_path, max_steps=2, save_steps=2, ignore_save_lr_and_optim=True).ok
    shutil.copytree(saved / "checkpoint-3", tmp_path / "checkpoint-3")
    damage(tmp_path / "checkpoint-3", WEIGHTS)
    for found in refusals(ranks, tmp_path):
        assert found["error"] is not None
        assert "checkpoint-2" in found["text"]


@on_ranks(1)
def test_a_script_that_loads_a_damaged_checkpoint_gets_no_older_one(run: Path) -> None:
    damage(run / "checkpoint-3", WEIGHTS)
    trainer = flex_trainer(SINGLE, run, {"max_steps": 3})
    trainer.create_optimizer_and_scheduler(3)
    with pytest.raises(Corrupt):
        trainer._load_flex_checkpoint(str(run / "checkpoint-3"))


@on_ranks(1)
def test_an_undefined_model_is_neither_trained_nor_saved(saved: Path, run: Path) -> None:
    damage(run / "checkpoint-2", WEIGHTS)
    trainer = flex_trainer(SINGLE, run / "out", {"max_steps": 3, "save_steps": 100})
    with pytest.raises(Corrupt, match="tensors that were being filled are undefined"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    for use in (
        trainer.train,
        lambda: paddleformers_fc.save(run / "out/saved", trainer.model),
        lambda: trainer._save_checkpoint(trainer.model),
    ):
        with pytest.raises(MismatchError) as caught:
            use()
        assert caught.value.what == "The model's tensors are undefined: a load began to fill them and failed."
    assert trainer.losses == []
    trainer.train(resume_from_checkpoint=str(saved / "checkpoint-2"))
    assert len(trainer.losses) == 1


def test_a_checkpoint_that_does_not_fit_the_model_is_not_skipped(ranks: ForkServer, run: Path) -> None:
    for found in refusals(ranks, run, {"intermediate_size": 96}):
        assert (found["error"], found["changed"]) == ("MismatchError", False)
        assert "or name another checkpoint. It is the newest checkpoint in output_dir: to start a new" in found["text"]


def test_a_branch_is_reported_at_once_and_at_the_next_automatic_resume(ranks: ForkServer, run: Path) -> None:
    first = read_manifest(run / "checkpoint-3").saved_by
    assert read_manifest(run / "checkpoint-1").saved_by == first
    branched = train(ranks, run, run / "checkpoint-1", max_steps=2, save_total_limit=1)
    record = read_manifest(run / "checkpoint-2").saved_by
    assert [(one.run, one.step) for one in record.branches] == [(first.id, 1)]
    again = train(ranks, run, True, max_steps=4)
    for log, branch in ((branched.logs[0], f"run {record.id} "), (again.logs[0], f"checkpoint-2 of run {record.id}")):
        assert branch in log.read_text()
        assert f"checkpoint-3 of run {first.id}" in log.read_text()
    assert [len(value["losses"]) for value in again.values] == [1, 1]
    assert read_manifest(run / "checkpoint-4").saved_by == first
    # The checkpoints of the branch stay, and so does the newest one of the other run.
    assert sorted(path.name for path in run.glob("checkpoint-*")) == [f"checkpoint-{step}" for step in (2, 3, 4)]


def test_stale_directories_that_the_next_save_does_not_delete_are_logged(ranks: ForkServer, run: Path) -> None:
    dead = run / ".checkpoint-9.unfinished-0123456789ab"
    dead.mkdir()
    with staging_directory(run / "checkpoint-8") as running:
        (running.path / "weights").write_bytes(bytes(3000))
        result = train(ranks, run, True, max_steps=4, save_steps=100)
        assert result.ok
        assert running.path.is_dir()
    text = result.logs[0].read_text()
    assert f"{running.path}, 3 kB: A running save uses it." in text
    assert f"paddleformers-fc clean {run}" in text
    assert dead.name not in text


@on_ranks(layout=DP2)
def test_a_resume_reads_metadata_once_and_makes_four_exchanges(tmp_path: Path) -> None:
    from paddleformers_fc.distributed.communicator import Communicator

    doing: list[str] = []
    loaded: list[list[str]] = []
    precede(Communicator, "gather", lambda self, what, *_, **__: doing.append(what))
    noting = callback(on_checkpoint_loaded=lambda *_: loaded.append([*doing]))

    def exchanges(name: str, resume: str | bool, **arguments: Any) -> list[str]:
        """What the ranks exchange from the beginning of the training to the end of the load."""
        given = {"max_steps": 4, "save_steps": 100, **arguments}
        trainer = flex_trainer(DP2, tmp_path / name, given, callbacks=[noting])
        doing.clear()
        trainer.train(resume_from_checkpoint=resume)
        return loaded.pop()

    def expected(found: str) -> list[str]:
        return ["checking the training", found, "opening checkpoint-3", "planning", "reading checkpoint-3"]

    three = {"max_steps": 3, "save_steps": 3}
    trained(DP2, tmp_path / "plain", three)
    assert exchanges("plain", True) == expected("looking for checkpoints")
    script = trained(DP2, tmp_path / "script", {"max_steps": 1})
    doing.clear()
    paddleformers_fc.load(tmp_path / "plain/checkpoint-3", script.model)
    assert doing == ["beginning a load", "opening checkpoint-3", "planning", "reading checkpoint-3"]
    new = exchanges("plain", str(tmp_path / "plain/checkpoint-3"), ignore_load_lr_and_optim=True)
    assert new == expected("reading the metadata of checkpoint-3")
    tier = {"flex_local_dir": str(tmp_path / "local"), "flex_local_steps": 1}
    forgotten = f"has a local tier, {tmp_path / 'local'}, and flex_local_dir is not set"
    with logged() as lines:
        trained(DP2, tmp_path / "run", {**three, **tier, "save_steps": 2})
        assert exchanges("run", True, **tier) == expected("looking for checkpoints")
    assert not any(forgotten in line for line in lines)
    with logged() as lines:
        without = trained(DP2, tmp_path / "run", {"max_steps": 4}, resume=True)
    assert any(forgotten in line for line in lines) or without.args.process_index > 0


# ---- Altered metadata files: refused at every verification level, on every rank.

DOCUMENTS = [
    "config.json",
    "mapping.json",
    "trainer/data.json",
    "trainer/rng-00000.json",
    "trainer/rng-00001.json",
    "trainer/scheduler.json",
    "trainer/state.json",
]


def edited(checkpoint: Path, name: str, **values: Any) -> Path:
    """Change keys of a document and recompute all checksums, including the manifest's."""
    path = checkpoint / name
    document = json.loads(path.read_bytes()) | values
    if name == MANIFEST_NAME:
        del document["seal"]
        document["seal"] = manifest_seal(msgspec.convert(document, Manifest))
    path.write_text(json.dumps(document) + "\n")
    if name != MANIFEST_NAME:
        seal(checkpoint)
    return checkpoint


CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("trainer/state.json", {"global_step": 5}, "trainer/state.json has step 5, flex_checkpoint.json has 3"),
    ("trainer/state.json", {"consumed_samples": 40}, "trainer/state.json has samples 40, flex_checkpoint.json has 24"),
    ("trainer/data.json", {"position": {"epoch": 0, "samples": 24, "consumed": 40}}, "trainer/data.json has samples"),
    ("trainer/rng-00001.json", {"world_size": 4}, "trainer/rng-00001.json has number of ranks 4"),
    (MANIFEST_NAME, {"step": 5}, "trainer/state.json has step 3, flex_checkpoint.json has 5"),
    (MANIFEST_NAME, {"consumed_samples": 40}, "trainer/state.json has samples 24, flex_checkpoint.json has 40"),
    (MANIFEST_NAME, {"world_size": 1}, "trainer/rng-00001.json belongs to rank 1, but world_size is 1"),
    (MANIFEST_NAME, {"world_size": 3}, "random generators of 2 ranks are listed, but world_size is 3"),
    (MANIFEST_NAME, {"family": "qwen2"}, "mapping.json has family 'llama', flex_checkpoint.json has 'qwen2'"),
]


@pytest.mark.parametrize(("name", "values", "evidence"), CONTRADICTIONS)
def test_files_that_contradict_each_other_fail_verification_and_a_conversion(
    third: Path, tmp_path: Path, name: str, values: dict[str, Any], evidence: str
) -> None:
    broken = edited(Path(shutil.copytree(third, tmp_path / "checkpoint-3")), name, **values)
    opened = paddleformers_fc.open
    for work in (lambda: opened(broken).verify(), lambda: opened(broken).convert(tmp_path / "converted")):
        with pytest.raises(CheckpointError) as raised:
            work()
        assert any(line.startswith(evidence) for line in raised.value.evidence), raised.value.render()
        assert raised.value.next_step
    assert not (tmp_path / "converted").exists()


def refuse(cases: list[list[str]], output_dir: Path) -> None:
    for checkpoint, level, error, *evidence in cases:
        arguments = {**SIX_STEPS, "flex_verify": level}
        found = refused(checkpoint, layout=DP2, output_dir=output_dir, arguments=arguments)
        assert (found["error"], found["changed"]) == (error, False)
        assert [text for text in evidence if text not in found["text"]] == []


def test_altered_documents_are_refused_on_every_rank_at_every_level(
    ranks: ForkServer, third: Path, tmp_path: Path
) -> None:
    numbers = itertools.count()

    def copy() -> Path:
        return Path(shutil.copytree(third, tmp_path / str(next(numbers)) / "checkpoint-3"))

    cases, all_altered = [], copy()
    for name in DOCUMENTS:
        alter(all_altered / name)
        one_altered = copy()
        alter(one_altered / name)
        cases.append([str(one_altered), "off", "Corrupt", f"{name} does not match its checksum"])
    cases.append([str(all_altered), "size", "Corrupt", *DOCUMENTS])
    for name, values, error, evidence in (
        ("trainer/state.json", {"global_step": 5}, "Corrupt", "has step 5"),
        ("trainer/rng-00001.json", {"world_size": 4}, "Corrupt", "has number of ranks 4"),
        ("trainer/scheduler.json", {"last_epoch": "3"}, "FormatError", "last_epoch: str in place of int"),
    ):
        cases.append([str(edited(copy(), name, **values)), "off", error, name, evidence])
    run_on_ranks(ranks, 2, refuse, cases=cases, output_dir=tmp_path / "out")


# ---- Real ranks that are not alike, or of which one is killed: all others raise one report and end.

FOUR = TP2PP2


def die(moment: str, victim: int, output_dir: Path, resume: str, **given: Any) -> None:
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

    keep_time(output_dir)
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
        (output_dir / f"ended-{rank}.json").write_text(json.dumps(ended))
        raise


def killed(ranks: ForkServer, output_dir: Path, moment: str, victim: int, resume: Path) -> JobResult:
    """A job one of whose ranks has killed itself; nothing of it hangs, and no rank ends as if all were well."""
    output_dir.mkdir()
    given = settings(FOUR, output_dir, resume, max_steps=6, save_steps=2)
    result = job_on_ranks(ranks.attempt, FOUR.nproc, die, moment=moment, victim=victim, **given)
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
    patient_ranks: ForkServer, third: Path, tmp_path: Path, victim: int
) -> None:
    out = tmp_path / "out"
    killed(patient_ranks, out, "reading", victim, third)
    ended = endings(out)
    assert len(ended) == FOUR.nproc - 1
    assert len({one["text"] for one in ended}) == 1
    assert {one["error"] for one in ended} == {"PeerError"}
    assert f"rank {victim}" in ended[0]["text"]
    assert victim == 0 or f"rank {victim} did not arrive" in ended[0]["text"]
    assert {one["step"] for one in ended} == {0}
    # The others had read their part: these half-loaded weights must not be trained.
    assert all(one["half"] for one in ended)


def test_a_rank_killed_in_the_exchange_itself_is_named(patient_ranks: ForkServer, third: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = killed(patient_ranks, out, "exchanging", 2, third)
    raised = {one["text"] for one in endings(out)}
    assert len(raised) <= 1
    for rank in (0, 1, 3):
        assert result.returncodes[rank] in (1, EXIT_CODE)
        assert "rank 2 did not arrive" in result.logs[rank].read_text()


STATEMENTS = {"aoa_config": {"aoa_statements": ["model.norm.weight -> model.norm.weight"]}}
DIFFERING: dict[bool, tuple[dict[str, Any], list[str]]] = {
    False: (
        {"save_steps": 2, "flex_verify": "size", "learning_rate": 0.5},
        ["save_steps: 1 on rank 0; 2 on rank 1", "flex_verify: ", "learning_rate: "],
    ),
    True: (STATEMENTS, ["aoa_config.aoa_statements: "]),
}
"""Options of one rank at the start of a run, or when it loads a checkpoint, and lines of the error."""


@pytest.mark.parametrize("late", [pytest.param(late, marks=pytest.mark.chosen) for late in DIFFERING])
@on_ranks(2)
def test_a_rank_that_differs_is_named_on_every_rank_before_a_weight_changes_and_the_first_step(
    third: Path, tmp_path: Path, late: bool
) -> None:
    """In its options, its software and its model."""
    from paddleformers_fc.distributed import consistency

    options, texts = DIFFERING[late]
    is_odd = os.environ["PADDLE_TRAINER_ID"] == "1"
    early = options if is_odd and not late else {}
    trainer = flex_trainer(DP2, tmp_path, {"max_steps": 3 if late else 1, "save_steps": 1, **early})

    def change(*_: Any, **__: Any) -> None:
        vars(trainer.args).update(options)
        trainer.model.config.rms_norm_eps = 0.125
        consistency.__version__ = "9.9.9"  # This process ends with the job.

    if is_odd and late:
        precede(trainer, "_load_flex_checkpoint", change)
    elif is_odd:
        change()
    held = weights_of(trainer.model)
    with pytest.raises(PeerError) as caught:
        trainer.train(resume_from_checkpoint=str(third) if late else None)
    assert trainer.state.global_step == 0
    assert weights_of(trainer.model) == held
    lines = caught.value.render().splitlines()
    for text in (*texts, "config.rms_norm_eps: ", "versions.paddleformers_fc: "):
        (line,) = [line for line in lines if text in line]
        assert "on rank 1" in line
