"""Streams of live weights: the bytes of an export under every layout, errors of one rank, and exchanges."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.numpy import load_file

import paddleformers_fc
from paddleformers_fc.errors import FlexError, OptionError
from paddleformers_fc.storage.safetensors import read_header
from tests.harness.limits import LIMIT
from tests.harness.on_ranks import on_ranks
from tests.harness.tiny import EP2, PP2, SD2S3, SD2V1, SINGLE, TP2, TP2PP2, MatrixLayout
from tests.trainer.jobs import flex_trainer
from tests.trainer.stream_jobs import RECEIVED, digests_of
from tests.trainer.test_pretrained import weights_of
from verification.forkserver import ForkServer

JOBS = "tests.trainer.stream_jobs"
RECIPE = Path(__file__).resolve().parents[2] / "recipes/stream_weights.py"
ENGINE = os.environ.get("ENGINE_PYTHON", "")
"""An interpreter with PyTorch and Transformers, which cannot be in the environment of PaddleFormers."""
ERNIE = {"model_type": "ernie4_5_moe"}
TIED = {"model": {"tie_word_embeddings": True}}
SAVED = {"arguments": {"save_steps": 2}}
PUSHED = f"{JOBS}.Pushed"


def exported(directory: Path) -> dict[str, str]:
    """The digests of the tensors of an export, in the order of its files."""
    found: dict[str, str] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors = load_file(path)
        entries = read_header(path).tensors
        for name in sorted(entries, key=lambda one: entries[one].begin):
            found[name] = hashlib.md5(tensors[name].tobytes()).hexdigest()
    return found


def job(layout: MatrixLayout, place: Path, **settings: Any) -> dict[str, Any]:
    arguments = {"max_steps": 2, **settings.pop("arguments", {})}
    return {"layout": layout.to_json(), "output_dir": str(place), "arguments": arguments, **settings}


def export_of(checkpoint: Path, target: Path, **options: Any) -> dict[str, str]:
    """The digests of the tensors of a checkpoint's export."""
    paddleformers_fc.open(checkpoint).export(target, **options)
    return exported(target)


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        pytest.param(TP2, {}, marks=pytest.mark.chosen),
        pytest.param(SD2S3, {"united": True}, marks=pytest.mark.chosen),
        *((SINGLE, {}), (PP2, TIED), (TP2PP2, {}), (SD2V1, {}), (SD2S3, {}), (EP2, ERNIE), (TP2PP2, {"united": True})),
    ],
    ids=lambda value: value.name if isinstance(value, MatrixLayout) else "",
)
def test_a_stream_and_an_export_of_a_live_model_have_the_bytes_of_an_export_of_its_checkpoint(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, settings: dict[str, Any]
) -> None:
    streams = {"all": {}, "small": {"max_bytes": 1 << 14}, "first": {"to": "first"}, "last": {"to": [layout.nproc - 1]}}
    given = job(layout, tmp_path, streams=streams, **SAVED, **settings)
    results = ranks.run(f"{JOBS}:after_training", layout.nproc, given).values
    expected = export_of(tmp_path / "checkpoint-2", tmp_path / "command", max_shard_bytes=60_000)
    files = {path.name for path in (tmp_path / "command").glob("*model*")}
    assert len(files) > 3
    for name in files:
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "command" / name).read_bytes()
    for rank, result in enumerate(results):
        got = result["streams"]
        assert got["all"] == got["small"] == expected
        assert got["first"] == (expected if rank == 0 else {})
        assert got["last"] == (expected if rank == layout.nproc - 1 else {})
    assert list(results[0]["streams"]["all"]) == list(expected)


def test_adapters_are_streamed_alone_or_merged_into_their_base(ranks: ForkServer, tmp_path: Path) -> None:
    base = weights_of(ranks, tmp_path / "base", "llama", {})
    streams = {"alone": {"adapters": True}, "merged": {}, "first": {"to": "first", "max_bytes": 4096}}
    saving = {"arguments": {"save_steps": 2}, "base": str(base)}
    given = job(TP2, tmp_path / "run", streams=streams, adapted=True, **saving)
    first, second = (one["streams"] for one in ranks.run(f"{JOBS}:after_training", 2, given).values)
    alone = export_of(tmp_path / "run/checkpoint-2", tmp_path / "alone")
    assert first["alone"] == second["alone"] == exported(tmp_path / "run/hf") == alone
    merged = export_of(tmp_path / "run/checkpoint-2", tmp_path / "merged", base=base)
    assert first["merged"] == second["merged"] == first["first"] == merged != exported(base)
    assert second["first"] == {}


def losses(trainer: Any) -> list[float]:
    trainer.train()
    found: list[float] = trainer.losses
    return found


@on_ranks(layout=TP2)
def test_a_stream_between_steps_changes_no_loss_keeps_its_plan_and_holds_few_tensors(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    from paddleformers.trainer import TrainerCallback

    from paddleformers_fc.distributed.communicator import Communicator
    from paddleformers_fc.execute import stream

    streams: list[dict[str, str]] = []
    exchanges: list[list[str]] = []
    doing: list[str] = []
    gather = Communicator.gather

    def noting(self: Any, what: str, *args: Any, **kwargs: Any) -> Any:
        doing.append(what)
        return gather(self, what, *args, **kwargs)

    class StreamEveryStep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            doing.clear()
            streams.append(digests_of(paddleformers_fc.stream(trainer.model)))
            exchanges.append(list(doing))

    plain = losses(flex_trainer(**job(layout, tmp_path / "plain")))
    Communicator.gather = noting  # type: ignore[method-assign]
    trainer = flex_trainer(**job(layout, tmp_path / "streamed"), callbacks=[StreamEveryStep()])
    assert losses(trainer) == plain
    one, two = streams
    assert one.keys() == two.keys()
    assert one != two
    # Of the second stream no exchange plans; every word is followed by the weights of a batch.
    first, second = exchanges
    assert set(second) == {"beginning a stream", "streaming weights"}
    assert {"describing shards", "planning a stream"} <= set(first)
    # Half of the bound, or the largest tensor; the caller has the last one of the batch before.
    bound, empty = 1 << 18, stream.empty_tensor
    made: list[tuple[Any, int]] = []
    most = 0

    def counting(shard: Any) -> Any:
        nonlocal most
        tensor = empty(shard)
        made.append((weakref.ref(tensor), 4 * math.prod(shard.global_shape)))
        most = max(most, sum(size for reference, size in made if reference() is not None))
        return tensor

    stream.empty_tensor = counting
    for _ in paddleformers_fc.stream(trainer.model, max_bytes=bound):
        pass
    sizes = [size for _, size in made]
    assert sum(sizes) > 2 * bound
    assert most <= max(bound // 2, max(sizes)) + max(sizes)


@on_ranks(layout=TP2)
def test_an_error_on_one_rank_ends_the_stream_on_all(layout: MatrixLayout, tmp_path: Path) -> None:
    import paddle

    from paddleformers_fc.execute.stream import LiveReader

    model = flex_trainer(**job(layout, tmp_path)).model
    is_last = paddle.distributed.get_rank() == 1

    def stream(**given: Any) -> Any:
        return paddleformers_fc.stream(model, max_bytes=4096, **given)

    for given, text in (
        ({"device": "gpu" if is_last else "host"}, "OptionError: Invalid argument: device='gpu'"),
        ({"to": "first" if is_last else "all"}, "MismatchError: The ranks ask for different streams."),
        ({"names": ["model.norm.weigth"]}, "OptionError: The model has no such tensor"),
        ({"to": [9]}, "OptionError: The job has no rank 9."),
        ({"adapters": True}, "OptionError: The model has no adapters."),
    ):
        with pytest.raises(FlexError) as caught:
            digests_of(stream(**given))
        assert f"{type(caught.value).__name__}: {caught.value.what}".startswith(text)
    read, calls = LiveReader._read, []

    def failing(self: Any, pieces: Any) -> Any:
        calls.append(1)
        if is_last and len(calls) > 2:
            raise MemoryError("no memory for pieces")
        return read(self, pieces)

    with mock.patch.object(LiveReader, "_read", failing), pytest.raises(FlexError, match="no memory for pieces"):
        digests_of(stream())
    for wanted, given in ((3, {}), (1, {"names": ["model.norm.weight"]})):
        tensors = iter(stream(**given))
        if is_last:
            assert len([*itertools.islice(tensors, wanted)]) == wanted
            tensors.close()
            continue
        with pytest.raises(FlexError, match="Rank 1 has ended the stream before its end"):
            digests_of(tensors)
    assert "model.norm.weight" in digests_of(stream())


@pytest.mark.parametrize("layout", [TP2, SD2S3], ids=lambda layout: layout.name)
@on_ranks(2)
def test_weights_are_passed_to_a_function_every_some_steps(layout: MatrixLayout, tmp_path: Path) -> None:
    arguments = {"max_steps": 4, "save_steps": 2}
    plain = losses(flex_trainer(**job(layout, tmp_path / "plain", arguments=arguments)))
    pushing = {**arguments, "flex_stream": {"steps": 2, "to": PUSHED}}
    trainer = flex_trainer(**job(layout, tmp_path / "pushed", arguments=pushing))
    assert losses(trainer) == plain
    assert [step for step, _ in RECEIVED] == ([2, 4] if trainer.args.process_index == 0 else [])
    for step, got in RECEIVED:
        assert got == export_of(tmp_path / f"pushed/checkpoint-{step}", tmp_path / f"hf-{step}")


@on_ranks(layout=TP2)
def test_a_function_may_end_the_stream_early_and_its_errors_end_the_step_on_all_ranks(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    def training(name: str) -> Any:
        push = {"flex_stream": {"steps": 1, "to": f"{JOBS}.{name}"}}
        return flex_trainer(**job(layout, tmp_path / name, arguments=push))

    for when in ("before", "within", "after"):
        with pytest.raises(FlexError, match=f"the engine is gone {when}"):
            training(f"fail_{when}").train()
    for name, why in (("absent", "has no attribute 'absent'"), ("RECEIVED", "it is a list")):
        with pytest.raises(OptionError, match=f"flex_stream cannot pass weights to {JOBS}.{name}.") as refused:
            training(name).train()
        assert why in refused.value.render()
    assert len(losses(training("take_one"))) == 2


@pytest.mark.skipif(not ENGINE, reason="needs torch 2.13.0 and transformers 5.3.0 of the interpreter ENGINE_PYTHON")
def test_another_process_computes_the_same_logits(tmp_path: Path) -> None:
    command = [sys.executable, str(RECIPE), "--output", str(tmp_path), "--python", ENGINE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    apart = re.findall(r"^step (\d): logits differ by at most (\S+) of the largest$", done.stdout, re.MULTILINE)
    assert [step for step, _ in apart] == ["1", "2", "3"]
    assert all(float(number) < 2e-6 for _, number in apart)
