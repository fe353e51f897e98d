"""The ways in: a script, the stock Trainer once installed, the stock command line; and that none changes the rest."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from paddleformers_fc.cpu_runtime.ranks import free_ports
from paddleformers_fc.storage.manifest import read_manifest
from paddleformers_fc.trainer.register import PATH
from tests.harness.limits import LIMIT
from tests.harness.on_ranks import on_ranks
from tests.harness.tiny import SINGLE, MatrixLayout
from tests.trainer.jobs import flex_trainer, outcome, train_and_resume
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

ENTRY = "tests.trainer.entry_jobs"
ROOT = Path(__file__).resolve().parents[2]
IMPORTS = re.compile(r"^from paddleformers_fc import (.+)$", re.MULTILINE)

REPLACED = [
    "LoRAModel.from_pretrained",
    "PdArgumentParser.__init__",
    "PdArgumentParser.parse_dict",
    "PretrainedModel.from_pretrained",
    "Trainer.__init__",
    "Trainer._inner_training_loop",
    "Trainer._load_flex_checkpoint",
    "Trainer._maybe_log_save_evaluate",
    "Trainer._rotate_checkpoints",
    "Trainer._save",
    "Trainer._save_checkpoint",
    "Trainer._sorted_checkpoints",
    "Trainer.evaluate",
    "Trainer.save_model",
    "Trainer.train",
]


def test_a_name_that_the_facade_does_not_have_is_an_attribute_error() -> None:
    import paddleformers_fc

    with pytest.raises(AttributeError, match="no attribute 'FlexTrainers'"):
        _ = paddleformers_fc.FlexTrainers


def test_every_name_in_the_readme_and_the_training_page_can_be_imported(bare_ranks: ForkServer) -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "docs/training.md").read_text()
    imported = [f"paddleformers_fc.{name}" for line in IMPORTS.findall(text) for name in line.split(", ")]
    names = sorted({*imported, *re.findall(r"paddleformers_fc(?:\.[A-Za-z_]+)+", text)})
    assert {"paddleformers_fc.FlexTrainerMixin", "paddleformers_fc.cpu_runtime"} <= set(names)
    (missing,) = bare_ranks.run(f"{ENTRY}:missing_names", 1, {"names": names}).values
    assert missing == {}


def test_the_script_of_the_recipes_trains_on_two_ranks_and_resumes_on_one(ranks: ForkServer, tmp_path: Path) -> None:
    def run(nproc: int, *options: str) -> str:
        job = {
            "script": str(ROOT / "recipes" / "script.py"),
            "arguments": ["--output", str(tmp_path / "out"), *options],
        }
        return ranks.run(f"{ENTRY}:run_script", nproc, job).logs[0].read_text()

    trained = run(2, "--steps", "3")
    resumed = run(1, "--steps", "4", "--resume", "newest")
    assert "Resumed step 3" in resumed
    assert losses(trained)[0] > losses(resumed)[0]


def test_importing_the_entry_changes_nothing_and_detaching_restores_all(bare_ranks: ForkServer) -> None:
    (found,) = bare_ranks.run(f"{ENTRY}:replaced_methods", 1).values
    assert found == {"imported": [], "installed": REPLACED, "detached": []}


def test_without_flex_checkpoint_every_way_in_is_paddleformers_own(ranks: ForkServer, tmp_path: Path) -> None:
    outcomes = [
        ranks.run(
            f"{ENTRY}:run_native",
            1,
            {"way": way, "output_dir": str(tmp_path / way), "layout": SINGLE.to_json()},
        ).values[0]
        for way in ("stock", "subclass", "installed")
    ]
    assert "checkpoint-4/model_state/0.metadata" in outcomes[0]["files"]
    assert outcomes[1:] == outcomes[:1] * 2


@on_ranks(layout=SINGLE)
def test_the_stock_trainer_saves_and_resumes_once_installed(layout: MatrixLayout, tmp_path: Path) -> None:
    from paddleformers.trainer import Trainer

    from paddleformers_fc import install

    install()
    given = {"layout": layout.to_json(), "arguments": {"max_steps": 4, "save_steps": 2}}
    whole, resumed = train_and_resume(str(tmp_path), [2], cls=Trainer, **given)
    assert read_manifest(tmp_path / "whole" / "checkpoint-2").step == 2
    assert resumed == {**whole, "losses": whole["losses"][2:]}
    subclass = flex_trainer(output_dir=str(tmp_path / "subclass"), **given)
    subclass.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert outcome(subclass) == resumed


def test_the_path_of_the_registration_file_is_printed() -> None:
    command = [sys.executable, "-m", "paddleformers_fc.trainer.register"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True).stdout
    assert printed == f"{PATH}\n"
    assert PATH.is_file()


@on_ranks(1)
def test_the_stock_parser_accepts_our_keys_once_the_file_has_run(tmp_path: Path) -> None:
    """The command line makes the parser, runs the registration file by its path, and parses the YAML."""
    from paddleformers.cli.hparams import FinetuningArguments
    from paddleformers.trainer import PdArgumentParser

    parser = PdArgumentParser([FinetuningArguments])
    runpy.run_path(str(PATH))
    values = {"output_dir": str(tmp_path), "device": "cpu", "compute_type": "float32", "amp_master_grad": False}
    given = {**values, "flex_checkpoint": True, "flex_threads": 2}
    parsed, unknown = parser.parse_dict(given, return_unknown_ars=True)
    assert isinstance(parsed, FinetuningArguments)
    assert not unknown
    assert (parsed.flex_checkpoint, parsed.flex_threads) == (True, 2)
    argv = [word for key, value in {**given, "flex_threads": 3}.items() for word in (f"--{key}", str(value).lower())]
    argv[1] = str(tmp_path)
    (from_argv, *_) = PdArgumentParser([FinetuningArguments]).parse_args_into_dataclasses(argv)
    assert (from_argv.flex_checkpoint, from_argv.flex_threads) == (True, 3)


# ---- The stock command line.

LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def corpus(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, its tokenizer and a real text."""
    directory = tmp_path_factory.mktemp("corpus")
    ranks.run(f"{ENTRY}:write_corpus", 1, {"directory": str(directory), "text": str(LICENSE)})
    return directory


def write_yaml(corpus: Path, output_dir: Path, **changed: Any) -> Path:
    """The YAML of a training on the corpus, with two additions: the registration file and ``flex_checkpoint``."""
    values = {
        "custom_register_path": str(PATH),
        "flex_checkpoint": True,
        "stage": "PT",
        "fine_tuning": "full",
        "model_name_or_path": str(corpus / "model"),
        "train_dataset_type": "erniekit",
        "train_dataset_path": str(corpus / "train.jsonl"),
        "train_dataset_prob": "1.0",
        "eval_dataset_type": "erniekit",
        "eval_dataset_path": str(corpus / "train.jsonl"),
        "eval_dataset_prob": "1.0",
        "max_seq_len": 64,
        "packing": False,
        "mix_strategy": "concat",
        "_attn_implementation": "sdpa",
        "output_dir": str(output_dir),
        "device": "cpu",
        "compute_type": "float32",
        "amp_master_grad": False,
        "do_train": True,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "sharding": "",
        "report_to": "none",
    }
    path = output_dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump({**values, **changed}))
    return path


def losses(log: str) -> list[float]:
    """The losses that a Trainer logged."""
    return [float(found) for found in re.findall(r"\bloss: ([0-9.]+), learning_rate", log)]


def train_by_workers(ranks: ForkServer, path: Path, nproc: int = 1) -> str:
    """Train as the command line's workers do; the log of the first."""
    return ranks.run(f"{ENTRY}:run_command_line", nproc, {"yaml": str(path)}).logs[0].read_text()


def train_by_command(path: Path, directory: Path) -> str:
    """Train on two ranks by PaddleFormers' command, in a working directory; the log of the first rank."""
    (port,) = free_ports(1)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(LICENSE.parent),
        "PADDLE_DISTRI_BACKEND": "gloo",
        # The command line sizes a job by this list, on a machine without an accelerator too.
        "CUDA_VISIBLE_DEVICES": "0,1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "paddleformers.cli.cli", "train", str(path)]
    trained = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert trained.returncode == 0, trained.stdout[-3000:] + trained.stderr[-3000:]
    return (directory / "paddleformers_dist_log" / "workerlog.0").read_text()


# A job of two nodes starts the stock command in make test: tests/nodes/test_two_nodes.py.
@pytest.mark.parametrize("started", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["workers", "command"])
def test_the_stock_command_line_trains_two_ranks_and_another_layout_resumes(
    ranks: ForkServer, corpus: Path, tmp_path: Path, started: bool
) -> None:
    path = write_yaml(corpus, tmp_path / "out", tensor_model_parallel_size=2)
    log = train_by_command(path, tmp_path) if started else train_by_workers(ranks, path, nproc=2)
    assert read_manifest(tmp_path / "out" / "checkpoint-2").parallel["tp"] == 2
    resume = str(tmp_path / "out" / "checkpoint-2")
    alone = train_by_workers(ranks, write_yaml(corpus, tmp_path / "alone", resume_from_checkpoint=resume))
    assert losses(alone) == pytest.approx(losses(log)[2:], abs=1e-6)
    last = canonical_digests(tmp_path / "out" / "checkpoint-4")
    assert list(canonical_digests(tmp_path / "out")) == [one for one in last if one.role == "model_state"]
    assert (tmp_path / "alone" / "tokenizer.json").exists()


def test_the_command_line_reports_another_corpus_and_tokenizer_at_a_resume_and_nothing_of_the_same_run(
    ranks: ForkServer, corpus: Path, tmp_path: Path
) -> None:
    differs = "This run differs from the one that saved step 2"
    train_by_workers(ranks, write_yaml(corpus, tmp_path / "out"))
    resume = {"resume_from_checkpoint": str(tmp_path / "out" / "checkpoint-2")}
    moved = shutil.copytree(corpus / "model", tmp_path / "model")
    same = train_by_workers(ranks, write_yaml(corpus, tmp_path / "same", model_name_or_path=str(moved), **resume))
    assert differs not in same
    settings = json.loads((moved / "tokenizer_config.json").read_text())
    (moved / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 77}))
    text = (corpus / "train.jsonl").read_text()
    (tmp_path / "other.jsonl").write_text(text + text.splitlines()[0] + "\n")
    data = {"train_dataset_path": str(tmp_path / "other.jsonl"), "model_name_or_path": str(moved)}
    log = train_by_workers(ranks, write_yaml(corpus, tmp_path / "other", **data, **resume))
    table = log.partition(differs)[2]
    for key in ("train_dataset_path ", "train_dataset_sizes ", "tokenizer_config.json "):
        assert f"\n  {key}" in table


def test_the_command_line_resumes_preference_training_from_the_checkpoint_that_is_named(
    ranks: ForkServer, corpus: Path, tmp_path: Path
) -> None:
    pairs = [{"src": [f"What is {n}?"], "tgt": [], "response": [[f"It is {n}."], ["No."]]} for n in range(16)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({**one, "sort": [1, 0]}) + "\n" for one in pairs))
    keys = {
        "stage": "DPO",
        "train_dataset_path": str(tmp_path / "pairs.jsonl"),
        "eval_dataset_path": str(tmp_path / "pairs.jsonl"),
        "template_backend": "custom",
        "template": "default",
        "max_prompt_len": 32,
        "reference_free": True,
        "loss_type": "simpo",
    }
    whole = losses(train_by_workers(ranks, write_yaml(corpus, tmp_path / "out", **keys)))
    assert len(whole) == 4
    named = str(tmp_path / "out" / "checkpoint-2")
    # In the directory with a newer one, which PaddleFormers would take.
    again = write_yaml(corpus, tmp_path / "out", **keys, resume_from_checkpoint=named)
    assert losses(train_by_workers(ranks, again)) == whole[2:]


def test_the_command_line_is_not_misled_by_an_unfinished_directory(
    ranks: ForkServer, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "out" / "checkpoint-2").mkdir(parents=True)
    log = train_by_workers(ranks, write_yaml(corpus, tmp_path / "out"))
    assert len(losses(log)) == 4
    assert "checkpoint-2 cannot be resumed and is skipped" in log


@on_ranks(2)
def test_keys_that_cannot_be_meant_are_refused_before_a_process_group() -> None:
    from paddle.distributed import parallel
    from paddleformers.cli.hparams import parser
    from paddleformers.trainer import PdArgumentParser

    from paddleformers_fc.errors import OptionError
    from paddleformers_fc.trainer.entry import install

    install()
    for text, refused in (
        ("flex_verfy: 1", "flex_verfy: is flex_verify meant?"),
        ("save_stps: 1", "save_stps: is save_steps meant?"),
        ("learning_rate: 5e-3", "learning_rate: '5e-3' is not a number"),
        (
            "save_checkpoint_format: unified_checkpoint",
            "flex_checkpoint: true and save_checkpoint_format: unified_checkpoint",
        ),
    ):
        keys = {"flex_checkpoint": True, "output_dir": "out", **yaml.safe_load(text)}
        with pytest.raises(OptionError) as caught:
            PdArgumentParser(parser._TRAIN_ARGS).parse_dict(keys, return_unknown_ars=True)
        assert refused in caught.value.render()
    assert not parallel.parallel_helper._is_parallel_ctx_initialized()


def test_a_worker_stops_on_a_renamed_method_and_trains_without_flex_checkpoint(
    ranks: ForkServer, corpus: Path, tmp_path: Path
) -> None:
    def train(path: Path) -> tuple[bool, str]:
        given = {"yaml": str(path), "name": "_save_checkpoint"}
        result = ranks.attempt("tests.trainer.upstream_jobs:command_line_with_a_renamed_method", 1, given)
        return result.ok, result.logs[0].read_text()

    ok, log = train(write_yaml(corpus, tmp_path / "out"))
    assert not ok
    assert "paddleformers.trainer.trainer:Trainer._save_checkpoint is missing" in log
    assert not losses(log)
    ok, log = train(write_yaml(corpus, tmp_path / "stock", flex_checkpoint=False, max_steps=2, save_steps=9))
    assert ok, log[-3000:]
    assert "This environment does not support flex_checkpoint: true" in log
    assert len(losses(log)) == 2
