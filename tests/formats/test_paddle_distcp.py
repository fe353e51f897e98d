"""Checkpoints that stock Paddle and the stock Trainer wrote: read by ranges, compared, exported, refused if damaged."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from paddleformers_fc.distributed.channel import LocalChannel
from paddleformers_fc.errors import Corrupt, FlexError, FormatError, NotACheckpoint
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.output_directory import inspect_directory
from paddleformers_fc.formats.catalog import Catalog
from paddleformers_fc.formats.paddle_distcp import PADDLE_DISTCP, _known
from paddleformers_fc.formats.registry import format_of, open_checkpoint
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors
from paddleformers_fc.storage.pickles import PickledObject, encode_array_dict, encode_pickle, read_pickle
from paddleformers_fc.trainer.resume import Choice, Search, newest_or_begin, open_named
from tests.formats.damage import Damage, assert_refused, edit_json, linked_outside, with_file, without
from tests.formats.jobs import arrays, save
from tests.formats.runs import Runs
from tests.harness.on_ranks import run_on_ranks
from tests.storage.support import RangeReader
from verification.forkserver import ForkServer


def put_together(catalog: Catalog, role: str, name: str) -> np.ndarray[Any, Any]:
    """A whole tensor, from its ranges in the catalog."""
    tensor = catalog.roles[role][name]
    whole = np.zeros(tensor.shape, to_numpy(to_safetensors(tensor.dtype)))
    with RangeReader(identities=catalog.identities) as reader:
        for part in tensor.fragments:
            held = np.empty(part.box.shape, whole.dtype)
            reader.read_into(catalog.root / part.file, part.begin, held.reshape(-1).view(np.uint8))
            whole[tuple(slice(low, high) for low, high in zip(part.box.lo, part.box.hi, strict=True))] = held
    return whole


# ---- Paddle's own.


@pytest.fixture(scope="module", params=[{}, {"safetensors": True}, {"save_replicas": True}], ids=str)
def stock(request: pytest.FixtureRequest, ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks."""
    directory = tmp_path_factory.mktemp("stock")
    run_on_ranks(ranks, 2, save, directory=directory, options=request.param)
    return directory


def test_every_tensor_of_paddles_own_checkpoint_is_read_by_ranges_bit_for_bit(stock: Path) -> None:
    assert format_of(stock) is PADDLE_DISTCP
    opened = PADDLE_DISTCP.open(stock)
    assert opened.catalog.roles.keys() == {MODEL_STATE}
    expected = arrays()
    expected["cut.bfloat16"] = expected["cut.bfloat16"].astype(ml_dtypes.bfloat16)
    assert opened.catalog.roles[MODEL_STATE].keys() == expected.keys()
    for name, values in expected.items():
        found = put_together(opened.catalog, MODEL_STATE, name)
        assert (found.dtype, found.shape, found.tobytes()) == (values.dtype, values.shape, values.tobytes()), name
    assert len(opened.files) == 2


def test_the_last_of_several_saves_into_one_directory_is_read(ranks: ForkServer, tmp_path: Path, stock: Path) -> None:
    """As Paddle does; an older save stays what it was, and a newer one that is not finished is refused."""
    twice = tmp_path / "twice"
    shutil.copytree(stock, twice)
    for id in (2, 10):
        run_on_ranks(ranks, 2, save, directory=twice, options={"unique_id": id}, added=id)
    opened = PADDLE_DISTCP.open(twice)
    assert opened.files == {"0_10.distcp", "1_10.distcp"}
    found = put_together(opened.catalog, MODEL_STATE, "cut.float32")
    assert np.array_equal(found, arrays()["cut.float32"] + 10)
    (twice / "1_10.distcp").unlink()
    with pytest.raises(Corrupt, match=r"1_10\.distcp"):
        PADDLE_DISTCP.open(twice)


CLASSES = "paddle.distributed.flex_checkpoint.dcp.metadata"


def test_metadata_of_shards_of_one_hash_is_refused(tmp_path: Path) -> None:
    flat = {"is_flattened": False, "flattened_range": None}
    places = [{"local_shape": (1,), "global_offset": ((2**61 - 1) * digit,), **flat} for digit in range(4)]
    tensor = {"dtype": "float32", "global_shape": (2**63 - 1,)}
    described = [PickledObject(CLASSES, "LocalTensorMetadata", {**place, **tensor}) for place in places]
    index = {"tensor_key": "a", "replica_id": None}
    stored = {
        PickledObject(CLASSES, "LocalTensorIndex", {**place, **index}): f"{rank}_0.distcp"
        for rank, place in enumerate(places)
    }
    state = {"state_dict_metadata": {"a": described}, "storage_metadata": stored, "flat_mapping": {"a": ("a",)}}
    (tmp_path / "0.metadata").write_bytes(encode_pickle(PickledObject(CLASSES, "Metadata", state)))
    before, after = encode_array_dict([("a", "f4", (1,), 4)])
    for file in stored.values():
        (tmp_path / file).write_bytes(before + bytes(4) + after)
    tensors = read_pickle(tmp_path / "0.metadata").fields["state_dict_metadata"]
    assert {type(key) for key in _known(tmp_path, tensors)} == {str}
    with pytest.raises(FormatError, match="colliding hash"):
        PADDLE_DISTCP.open(tmp_path)


# ---- The Trainer's.


@pytest.fixture
def pair(runs: Runs) -> tuple[Path, Path]:
    """The same run, saved by the stock Trainer (two tensor-parallel ranks) and by ours."""
    return runs("tp2", {}), runs("tp2", None)


@pytest.fixture
def copy(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the stock Trainer's."""
    return shutil.copytree(pair[0], tmp_path / "checkpoint-2")


def test_the_newest_complete_checkpoint_of_the_stock_trainer_is_resumed(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = (shutil.copytree(pair[0], tmp_path / f"out/checkpoint-{step}") for step in (2, 4))
    (new / "saved_signal_1").unlink()
    warnings: list[str] = []
    search = Search(tmp_path / "out", LocalChannel(), warnings.append)
    assert newest_or_begin(search) == Choice(old)
    assert any("checkpoint-4 cannot be resumed and is skipped" in line for line in warnings)
    assert open_named(old, "size", search).path == old
    (old / "model_state/1_0.distcp").unlink()
    with pytest.raises(NotACheckpoint, match="has checkpoints, and none can be resumed"):
        newest_or_begin(search)
    # A flex checkpoint takes precedence, whatever its step.
    shutil.rmtree(old)
    shutil.copytree(pair[1], old)
    found = newest_or_begin(search)
    assert found is not None
    assert found.opened is not None
    assert found.path == old


def _trainer_of_step_4(copy: Path) -> Path:
    (copy / "trainer_state.bin").unlink()
    (copy / "trainer_state.json").write_text(json.dumps({"global_step": 4, "consumed_samples": 32}))
    _scheduler_of_step(copy, 4)
    return copy.rename(copy.with_name("checkpoint-4"))


def _scheduler_of_step(copy: Path, step: int) -> None:
    (copy / "scheduler.pdparams").write_bytes(pickle.dumps({"last_epoch": step, "last_lr": 0.01}, 4))


@pytest.mark.parametrize(
    ("change", "evidence"),
    [
        (lambda copy: copy.rename(copy.with_name("checkpoint-4")), "name checkpoint-4: step 4"),
        (lambda copy: _scheduler_of_step(copy, 5), "scheduler.pdparams: step 5"),
        (_trainer_of_step_4, "optimizer states: step 2"),
    ],
    ids=["name", "scheduler", "trainer"],
)
def test_files_of_different_steps_are_refused(copy: Path, change: Callable[[Path], Path | None], evidence: str) -> None:
    assert open_checkpoint(copy).manifest.step == 2
    place = change(copy) or copy
    assert_refused(lambda: open_checkpoint(place).manifest, Corrupt, "contains files of different steps", evidence)


def test_the_stock_trainers_files_are_the_documents_of_a_flex_checkpoint(pair: tuple[Path, Path]) -> None:
    theirs, ours = (open_checkpoint(one) for one in pair)
    names = ["state", "scheduler", "rng-00000", "rng-00001"]
    assert {f"trainer/{name}.json" for name in names} < theirs.documents
    for name in ("trainer/scheduler.json", "trainer/rng-00000.json", "trainer/rng-00001.json"):
        assert theirs.document(name) == ours.document(name), name
    one, other = (json.loads(each.document("trainer/state.json")) for each in (theirs, ours))
    assert {**one, "log_history": []} == {**other, "log_history": []}
    record = theirs.manifest
    assert (record.step, record.consumed_samples, record.world_size) == (2, 16, 2)
    assert record.parallel == ours.manifest.parallel


def test_without_a_known_configuration_it_is_inspected_and_not_exported(copy: Path, tmp_path: Path) -> None:
    edit_json(copy / "config.json", model_type="unheard_of")
    with pytest.raises(FlexError, match="unheard_of"):
        export_checkpoint(copy, tmp_path / "out")
    (copy / "config.json").unlink()
    assert inspect_directory(copy).roles[MODEL_STATE].tensors
    with pytest.raises(NotACheckpoint, match="does not describe the model"):
        export_checkpoint(copy, tmp_path / "out")


# ---- Damage.

WEIGHTS = "model_state/1_0.distcp"
METADATA = "model_state/0.metadata"


def forged(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Metadata whose dicts were changed by somebody who can."""

    def work(copy: Path) -> None:
        metadata = pickle.loads((copy / METADATA).read_bytes())
        change(vars(metadata))
        (copy / METADATA).write_bytes(pickle.dumps(metadata, 4))

    return work


def _renamed(fields: dict[str, Any], name: str) -> None:
    fields["storage_metadata"] = dict.fromkeys(fields["storage_metadata"], name)


def _shared_lists(fields: dict[str, Any]) -> None:
    first = next(iter(fields["state_dict_metadata"].values()))
    fields["state_dict_metadata"] = dict.fromkeys(fields["state_dict_metadata"], first)


def _named_by_a_bomb(fields: dict[str, Any]) -> None:
    deep: Any = ""
    for _ in range(20):
        deep = [deep, deep]  # Its text has a million parts; that of twice the depth fits into no memory.
    fields["storage_metadata"] = dict.fromkeys(fields["storage_metadata"], deep)


def _swapped(copy: Path) -> None:
    one, other = copy / "model_state/0_0.distcp", copy / "optimizer_state/0_0.distcp"
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _twice(copy: Path) -> None:
    shutil.rmtree(copy / "optimizer_state")
    shutil.copytree(copy / "model_state", copy / "optimizer_state")


def _without_a_shard(fields: dict[str, Any]) -> None:
    files = fields["storage_metadata"]
    name = next(index.tensor_key for index in files if index.local_shape != ())
    offset = next(index.global_offset for index in files if index.tensor_key == name)
    for index in [one for one in files if (one.tensor_key, one.global_offset) == (name, offset)]:
        del files[index]


def _transposed(copy: Path) -> None:
    arrays = pickle.loads((copy / WEIGHTS).read_bytes())
    shapes = {name: array.shape for name, array in arrays.items() if isinstance(array, np.ndarray)}
    name = next(name for name, shape in shapes.items() if len(shape) == 2 and shape != shape[::-1])
    (copy / WEIGHTS).write_bytes(pickle.dumps({**arrays, name: np.ascontiguousarray(arrays[name].T)}, 4))


def _listed_twice(fields: dict[str, Any]) -> None:
    files = fields["storage_metadata"]
    seen: dict[tuple[str, tuple[int, ...]], str] = {}
    for index, file in files.items():
        files[index] = seen.setdefault((index.tensor_key, index.local_shape), file)


def _of_another_type(copy: Path) -> None:
    """Numbers of 16 bits of another type, which have the same width."""
    metadata = pickle.loads((copy / METADATA).read_bytes())
    for pieces in metadata.state_dict_metadata.values():
        for piece in pieces:
            vars(piece)["dtype"] = "bfloat16"
    (copy / METADATA).write_bytes(pickle.dumps(metadata, 4))
    for path in copy.glob("model_state/*.distcp"):
        arrays = pickle.loads(path.read_bytes())
        halves = {key: one.astype("float16") if isinstance(one, np.ndarray) else one for key, one in arrays.items()}
        path.write_bytes(pickle.dumps(halves, 4))


DAMAGES: dict[str, tuple[Damage, type[FlexError], str]] = {
    "no metadata": (without(METADATA), Corrupt, "not a finished checkpoint"),
    "empty metadata": (lambda copy: (copy / METADATA).write_bytes(b""), Corrupt, "0.metadata is empty"),
    "metadata twice": (
        lambda copy: shutil.copy(copy / METADATA, copy / "model_state/1.metadata"),
        FormatError,
        "a file of another save",
    ),
    "a lock": (with_file(f"{METADATA}.lock"), Corrupt, "a save was killed"),
    "a file cut off": (
        lambda copy: os.truncate(copy / WEIGHTS, (copy / WEIGHTS).stat().st_size - 40),
        FormatError,
        "truncated",
    ),
    "a file that is missing": (without(WEIGHTS), Corrupt, "1_0.distcp"),
    "files of two roles": (_swapped, Corrupt, "does not contain what the metadata lists"),
    "weights under the name of another role": (_twice, Corrupt, "belongs to no stored weight"),
    "an array with its axes exchanged": (_transposed, Corrupt, "does not contain what the metadata lists"),
    "two shards in one array": (forged(_listed_twice), Corrupt, "it is missing or listed twice"),
    "numbers of another type": (_of_another_type, Corrupt, "does not contain what the metadata lists"),
    "a shard that is missing": (forged(_without_a_shard), Corrupt, "is not stored"),
    "a link that leads out": (linked_outside(WEIGHTS), FormatError, "links that lead out of the checkpoint"),
    "a file outside": (forged(lambda fields: _renamed(fields, "../../0_0.distcp")), FormatError, r"\.\./\.\./0_0"),
    "a file of no kind": (forged(lambda fields: _renamed(fields, "0_0.distcp\n")), FormatError, "lists a tensor in"),
    "a file whose name is a memo bomb": (forged(_named_by_a_bomb), FormatError, "counting shared parts each time"),
    "one list for all": (forged(_shared_lists), FormatError, "its shape and dtype are missing"),
    "no tensors": (forged(lambda fields: fields["storage_metadata"].clear()), Corrupt, "no tensor is stored"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_stock_checkpoint_is_refused_and_the_fault_is_named(copy: Path, name: str) -> None:
    damage, kind, message = DAMAGES[name]
    PADDLE_DISTCP.open(copy)
    damage(copy)
    with pytest.raises(kind, match=message):
        PADDLE_DISTCP.open(copy)
