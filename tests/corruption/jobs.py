"""Jobs for ranks: PaddleFormers' own Trainer and models, as they are, and what becomes of them."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness import tiny
from tests.harness.on_ranks import job_on_ranks
from verification.forkserver import ForkServer, JobResult

SIX = {"max_steps": 6, "save_steps": 3}
WORSE_AND_WORSE: dict[str, Any] = {
    "save_steps": 1,
    "evaluation_strategy": "steps",
    "eval_steps": 1,
    "do_eval": True,
    "learning_rate": 0.3,
    "load_best_model_at_end": True,
}
"""Arguments of a run whose model gets worse with every step, so that its first checkpoint stays the best."""


def started(
    ranks: ForkServer,
    layout: tiny.MatrixLayout,
    output_dir: Path,
    resume: Path | str | bool | None = None,
    arguments: Mapping[str, Any] = SIX,
    **given: Any,
) -> JobResult:
    """Let the ranks of a layout :func:`train`."""
    source = str(resume) if isinstance(resume, Path) else resume
    settings = {"layout": layout, "output_dir": output_dir, "resume": source, "arguments": arguments}
    return job_on_ranks(ranks.run, layout.nproc, train, **settings, **given)


def trained(*settings: Any, **given: Any) -> list[dict[str, Any]]:
    """As :func:`started`; what every rank returned."""
    return list(started(*settings, **given).values)


def first_line(found: Mapping[str, Any], *hidden: Path) -> str:
    """An error of stock in one line, without the directories of this run."""
    text = str(found["error"]).splitlines()[0]
    for path in hidden:
        text = text.replace(str(path), "...")
    return f"`{text}`"


def train(
    layout: tiny.MatrixLayout,
    output_dir: Path,
    arguments: Mapping[str, Any] | None = None,
    resume: str | bool | None = None,
    evaluate: bool = False,
    ours: bool = False,
    model: Mapping[str, Any] | None = None,
    model_type: str = "llama",
    frozen: Sequence[str] = (),
    directories: Sequence[str] = (),
    digests: bool = False,
) -> dict[str, Any]:
    """Train with the stock Trainer or with ours; its losses, last step and samples, or the error.

    Args:
        frozen: beginnings of the names of parameters that are not trained.
        directories: the working directory of each rank, by rank.
        digests: whether the weights are returned, or whether they have changed before an error.
    """
    from tests.trainer.jobs import flex_trainer, watch_samples, weights_of

    def held() -> dict[str, str]:
        return weights_of(trainer.model) if digests and trainer is not None else {}

    if directories:
        os.chdir(directories[int(os.environ["PADDLE_TRAINER_ID"])])
    trainer: Any = None
    before: dict[str, str] = {}
    trained: list[int] = []

    given: dict[str, Any] = {"callbacks": [watch_samples(trained)]}
    if evaluate:
        given["eval_dataset"] = tiny.Samples()
    try:
        if ours:
            trainer = flex_trainer(layout, output_dir, arguments, model_type, model, **given)
        else:
            args = tiny.training_arguments(layout, output_dir, **(arguments or {}))
            trainer = tiny.trainer(tiny.build(model_type, layout, args, **(model or {})), args, **given)
        shards = trainer.model.sharded_state_dict().items() if frozen else ()
        fixed = {one.local_tensor.name for name, one in shards if name.startswith(tuple(frozen))}
        for parameter in trainer.model.parameters() if frozen else ():
            parameter.stop_gradient = parameter.name in fixed
        before = held()
        trainer.train(resume_from_checkpoint=resume)
        found = {"losses": trainer.losses, "step": trainer.state.global_step, "samples": trained, "weights": held()}
        if evaluate:
            found |= {"best": trainer.state.best_metric, "at_end": trainer.evaluate()["eval_loss"]}
        return found
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", **({"changed": held() != before} if digests else {})}


def last_checkpoint(output_dir: str) -> str:
    """The directory that PaddleFormers would resume from."""
    from paddleformers.trainer.trainer_utils import get_last_checkpoint

    return Path(get_last_checkpoint(output_dir)).name


def pretrained(directories: list[str], model: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Load open weights with the stock ``from_pretrained``, one directory after the other.

    Args:
        directories: what to load.
        model: overrides of the model's configuration, other than what is stored.
    """
    from paddleformers.transformers import LlamaForCausalLM

    found: list[dict[str, Any]] = []
    for directory in directories:
        try:
            config = tiny.config("llama", **(model or {}))
            made = LlamaForCausalLM.from_pretrained(directory, config=config, dtype="float32", convert_from_hf=True)
        except Exception as error:
            found.append({"error": f"{type(error).__name__}: {error}"})
        else:
            found.append({name: float(one.astype("float64").sum()) for name, one in made.state_dict().items()})
    return found


def export(directory: Path, seeds: list[int], room: int | None = None) -> list[dict[str, Any]]:
    """Write models one after the other into a directory with the stock ``save_pretrained``; sums of their weights.

    Args:
        directory: where.
        seeds: one model each.
        room: the last one finds the disk full: no file may be longer than so many bytes.
    """
    import paddle
    from paddleformers.transformers import LlamaForCausalLM

    found: list[dict[str, Any]] = []
    for at, seed in enumerate(seeds):
        paddle.seed(seed)
        model = LlamaForCausalLM(tiny.config("llama"))
        full = room is not None and at == len(seeds) - 1
        try:
            with no_longer_than(room if full and room is not None else -1):
                model.save_pretrained(str(directory), max_shard_size="200KB")
        except Exception as error:
            found.append({"error": type(error).__name__})
        else:
            found.append({name: float(one.astype("float64").sum()) for name, one in model.state_dict().items()})
    return found


@contextlib.contextmanager
def no_longer_than(size: int) -> Iterator[None]:
    """No file of this process may grow beyond ``size`` bytes; -1 for no bound."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size if size >= 0 else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def export_by_stock(source: Path, target: Path) -> None:
    """Give open weights to a Trainer and export them, without this package."""
    from paddleformers.transformers import LlamaConfig, LlamaForCausalLM

    args = tiny.training_arguments(tiny.SINGLE, f"{target}-run")
    config = LlamaConfig.from_pretrained(str(source))
    config.fuse_rms_norm = False
    model = LlamaForCausalLM.from_pretrained(str(source), config=config, load_checkpoint_format="flex_checkpoint")
    tiny.trainer(model, args).model.save_pretrained(str(target))


def config_by_stock(source: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as PaddleFormers writes it."""
    from tests.families.jobs import config_class

    config = config_class(source["model_type"]).from_dict(dict(source))
    return dict(json.loads(config.to_json_string(saving_file=True)))


def train_as_a_worker(yaml: Path, records: Path) -> None:
    """What the command ``train`` runs in its only worker, with the record of an error that it reads."""
    from paddleformers_fc.trainer.rank_records import RECORDS
    from tests.trainer.test_entry_points import run_command_line

    os.environ[RECORDS] = str(records)
    try:
        run_command_line(yaml)
    except Exception:
        sys.excepthook(*sys.exc_info())  # An interpreter that exits on an error does the same.
        raise
