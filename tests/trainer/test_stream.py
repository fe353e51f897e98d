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
from paddleformers_fc.errors import FlexError, MismatchError, OptionError
from paddleformers_fc.storage.safetensors import read_header
from tests.harness.limits import LIMIT
from tests.harness.on_ranks import on_ranks, run_on_ranks
from tests.harness.patching import precede
from tests.harness.tiny import EP2, PP2, SD2S3, SD2V1, SINGLE, TP2, TP2PP2, MatrixLayout
from tests.trainer.jobs import callback, flex_trainer, trained
from tests.trainer.test_lora import trainer_of
from tests.trainer.test_open_weights import weights_of
from verification.forkserver import ForkServer

RECIPE = Path(__file__).resolve().parents[2] / "recipes/stream_weights.py"
ENGINE = os.environ.get("ENGINE_PYTHON", "")
"""An interpreter with PyTorch and Transformers, which cannot be in the environment of PaddleFormers."""
ERNIE = {"model_type": "ernie4_5_moe"}
TIED = {"model": {"tie_word_embeddings": True}}
TWO = {"max_steps": 2, "save_steps": 2}


def digests_of(stream: Any) -> dict[str, str]:
    """The digests of the tensors of a stream by name, in the order in which they come."""
    from paddleformers_fc.execute.memory import host_view

    found: dict[str, str] = {}
    for name, tensor in stream:
        view = host_view(tensor)
        assert view is not None
        found[name] = hashlib.md5(view.tobytes()).hexdigest()
    return found


def exported(directory: Path) -> dict[str, str]:
    """The digests of the tensors of an export, in the order of its files."""
    found: dict[str, str] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors = load_file(path)
        entries = read_header(path).tensors
        for name in sorted(entries, key=lambda one: entries[one].begin):
            found[name] = hashlib.md5(tensors[name].tobytes()).hexdigest()
    return found


def export_of(checkpoint: Path, target: Path, **options: Any) -> dict[str, str]:
    """The digests of the tensors of a checkpoint's export."""
    paddleformers_fc.open(checkpoint).export(target, **options)
    return exported(target)


def after_training(
    layout: MatrixLayout,
    output_dir: Path,
    streams: dict[str, Any],
    base: Path | None = None,
    united: bool = False,
    **settings: Any,
) -> dict[str, dict[str, str]]:
    """Train, stream in several ways, and export; the digests of every stream by its name.

    Args:
        output_dir: of the training and of the export.
        streams: arguments of every stream by its name.
        base: the files of the base of adapters.
        united: whether pieces go by one array to all ranks, as to many receivers.
    """
    from paddleformers_fc.execute import stream

    trainer = (
        flex_trainer(layout, output_dir, TWO, **settings)
        if base is None
        else trainer_of(layout, output_dir, TWO, base=base)
    )
    trainer.train()
    if united:
        stream.MAX_DIRECT_RECEIVERS = stream.MAX_BROADCASTS = 0
    found = {way: digests_of(paddleformers_fc.stream(trainer.model, **given)) for way, given in streams.items()}
    trainer.model.save_pretrained(f"{output_dir}/hf", max_shard_size=60_000)
    return found


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
    last = layout.nproc - 1
    streams = {"all": {}, "small": {"max_bytes": 1 << 14}, "first": {"to": "first"}, "last": {"to": [last]}}
    given = {"layout": layout, "output_dir": tmp_path, "streams": streams, **settings}
    results = run_on_ranks(ranks, layout.nproc, after_training, **given)
    expected = export_of(tmp_path / "checkpoint-2", tmp_path / "command", max_shard_bytes=60_000)
    files = {path.name for path in (tmp_path / "command").glob("*model*")}
    assert len(files) > 3
    for name in files:
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "command" / name).read_bytes()
    for rank, got in enumerate(results):
        assert got["all"] == got["small"] == expected
        assert (got["first"], got["last"]) == tuple(expected if rank == one else {} for one in (0, last))
    assert list(results[0]["all"]) == list(expected)


@on_ranks(2)
def test_a_flattened_shard_that_ends_within_a_row_is_streamed(tmp_path: Path) -> None:
    import numpy as np
    import paddle
    from paddle.distributed import ShardedWeight

    from tests.harness.tiny import training_arguments

    training_arguments(SD2V1, str(tmp_path))
    rank, values = paddle.distributed.get_rank(), np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    own = slice(0, 27) if rank == 0 else slice(27, 60)

    class Sliced(paddle.nn.Layer):
        def sharded_state_dict(self, structured_name_prefix: str = "") -> dict[str, Any]:
            return {"weight": ShardedWeight("weight", part, values.shape, values.shape, (0, 0, 0), True, own)}

    part = paddle.to_tensor(values.reshape(-1)[own])
    for to in ("all", "first"):
        found = [tensor.numpy() for _, tensor in paddleformers_fc.stream(Sliced(), to=to)]
        np.testing.assert_array_equal(found, [values] if to == "all" or rank == 0 else [])


def test_adapters_are_streamed_alone_or_merged_into_their_base(ranks: ForkServer, tmp_path: Path) -> None:
    base = weights_of(ranks, tmp_path / "base", "llama", {})
    streams = {"alone": {"adapters": True}, "merged": {}, "first": {"to": "first", "max_bytes": 4096}}
    given = {"layout": TP2, "output_dir": tmp_path / "run", "streams": streams, "base": base}
    first, second = run_on_ranks(ranks, 2, after_training, **given)
    alone = export_of(tmp_path / "run/checkpoint-2", tmp_path / "alone")
    assert first["alone"] == second["alone"] == exported(tmp_path / "run/hf") == alone
    merged = export_of(tmp_path / "run/checkpoint-2", tmp_path / "merged", base=base)
    assert first["merged"] == second["merged"] == first["first"] == merged != exported(base)
    assert second["first"] == {}


@on_ranks(layout=TP2)
def test_a_stream_changes_no_loss_keeps_its_plan_and_holds_few_tensors(tmp_path: Path) -> None:
    from paddleformers_fc.distributed.communicator import Communicator
    from paddleformers_fc.execute import stream

    streams: list[dict[str, str]] = []
    exchanges: list[list[str]] = []
    doing: list[str] = []

    def stream_now(*_: Any, **__: Any) -> None:
        doing.clear()
        streams.append(digests_of(paddleformers_fc.stream(trainer.model)))
        exchanges.append(list(doing))

    precede(Communicator, "gather", lambda self, what, *_, **__: doing.append(what))
    plain = trained(TP2, tmp_path / "plain", TWO).losses
    trainer = flex_trainer(TP2, tmp_path / "streamed", TWO, callbacks=[callback(on_step_end=stream_now)])
    trainer.train()
    assert trainer.losses == plain
    one, two = streams
    assert one.keys() == two.keys()
    assert one != two
    # The second stream plans nothing; the weights of a batch follow every word.
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
def test_an_error_on_one_rank_ends_the_stream_on_all(tmp_path: Path) -> None:
    import paddle

    from paddleformers_fc.execute.stream import LiveReader

    model = flex_trainer(TP2, tmp_path).model
    is_last = paddle.distributed.get_rank() == 1

    def stream(**given: Any) -> Any:
        return paddleformers_fc.stream(model, max_bytes=4096, **given)

    for given, text in (
        ({"device": "gpu" if is_last else "host"}, "OptionError: Invalid argument: device='gpu'"),
        ({"to": "first" if is_last else "all"}, "MismatchError: The ranks ask for different streams."),
        ({"names": ["model.norm.weigth"]}, "OptionError: The model has no such tensor"),
        ({"to": [9]}, "OptionError: The job has no rank 9."),
        ({"adapters": True}, "OptionError: The model has no adapters."),
        ({"dtype": "bf61"}, "OptionError: Unknown dtype 'bf61'."),
        ({"dtype": []}, "OptionError: Invalid argument: dtype=[]."),
        ({"names": b""}, "OptionError: Invalid argument: names=b''."),
        ({"to": b"\0"}, "OptionError: Invalid argument: to=b'\\x00'."),
    ):
        with pytest.raises(FlexError) as caught:
            digests_of(stream(**given))
        assert f"{type(caught.value).__name__}: {caught.value.what}".startswith(text)
    with pytest.raises(MismatchError, match=r"exactly once: 2 faults\. No tensor was written or sent\."):
        digests_of(paddleformers_fc.stream(paddle.nn.Linear(4, 5 if is_last else 4)))
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


RECEIVED: list[tuple[int, dict[str, str]]] = []


class Pushed:
    """Keeps the digests of what it gets."""

    def __call__(self, step: int, tensors: Any) -> None:
        RECEIVED.append((step, digests_of(tensors)))


@pytest.mark.parametrize("layout", [TP2, SD2S3], ids=lambda layout: layout.name)
@on_ranks(2)
def test_weights_are_passed_to_a_function_every_some_steps(layout: MatrixLayout, tmp_path: Path) -> None:
    arguments = {"max_steps": 4, "save_steps": 2}
    plain = trained(layout, tmp_path / "plain", arguments).losses
    pushing = {**arguments, "flex_stream": {"steps": 2, "to": f"{__name__}.Pushed"}}
    trainer = trained(layout, tmp_path / "pushed", pushing)
    assert trainer.losses == plain
    assert [step for step, _ in RECEIVED] == ([2, 4] if trainer.args.process_index == 0 else [])
    for step, got in RECEIVED:
        assert got == export_of(tmp_path / f"pushed/checkpoint-{step}", tmp_path / f"hf-{step}")


def fail_within(step: int, tensors: Any) -> None:
    for _ in itertools.islice(tensors, 3):
        continue
    raise ConnectionError("the engine is gone within")


def fail_after(step: int, tensors: Any) -> None:
    digests_of(tensors)
    raise ConnectionError("the engine is gone after")


def take_one(step: int, tensors: Any) -> None:
    next(tensors)


@on_ranks(layout=TP2)
def test_a_function_may_end_a_stream_and_its_errors_end_the_step_on_all_ranks(tmp_path: Path) -> None:
    def train(name: str) -> Any:
        push = {"max_steps": 2, "flex_stream": {"steps": 1, "to": f"{__name__}.{name}"}}
        return trained(TP2, tmp_path / name, push)

    for when in ("within", "after"):
        with pytest.raises(FlexError, match=f"the engine is gone {when}"):
            train(f"fail_{when}")
    for name, why in (("absent", "has no attribute 'absent'"), ("RECEIVED", "it is a list")):
        with pytest.raises(OptionError, match=f"flex_stream cannot pass weights to {__name__}.{name}.") as refused:
            train(name)
        assert why in refused.value.render()
    assert len(train("take_one").losses) == 2


@pytest.mark.skipif(not ENGINE, reason="needs torch 2.13.0 and transformers 5.3.0 of the interpreter ENGINE_PYTHON")
def test_another_process_computes_the_same_logits(tmp_path: Path) -> None:
    command = [sys.executable, str(RECIPE), "--output", str(tmp_path), "--python", ENGINE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    apart = re.findall(r"^step (\d): logits differ by at most (\S+) of the largest$", done.stdout, re.MULTILINE)
    assert [step for step, _ in apart] == ["1", "2", "3"]
    assert all(float(number) < 2e-6 for _, number in apart)
