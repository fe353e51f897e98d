"""Faults of one load or save that reach the next: global state, leftovers in a directory, flags, rotten bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from paddleformers_fc.errors import Corrupt, FlexError
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME
from tests.corruption import ours, stock
from tests.corruption.guarantees import Observed, fault, refused
from tests.corruption.stock import outcomes, tensor, unset
from tests.corruption.test_types_and_shapes import NORM, VALUES, rounded
from tests.execute.simulated import live
from verification.forkserver import ForkServer


@fault("S11", "`FLAGS_use_stride_kernel=0`, and the load reshards")
def test_s11_a_load_does_not_depend_on_paddles_kernels(ranks: ForkServer, tmp_path: Path) -> Observed:
    steps = [
        stock.save(tmp_path / "stock", {"a": tensor(VALUES)}, unique_id=1),
        stock.flags(FLAGS_use_stride_kernel=0),
        stock.load(tmp_path / "stock", {"a": unset(4)}),
    ]
    assert outcomes(ranks, steps)[2]["a"]["values"] == [-1.0] * 4

    ours.save(tmp_path / "checkpoint-3", tp=2)
    job = "tests.corruption.ours:loads_without_strided_kernels"
    assert ranks.run(job, 1, {"directory": str(tmp_path / "checkpoint-3")}).values == (True,)
    return Observed("nothing is loaded; no error", "loads right under the same flag")


@fault("S12", "a second save into the same directory, with fewer ranks")
def test_s12_a_second_save_replaces_the_first_whole(ranks: ForkServer, tmp_path: Path) -> Observed:
    old, new = ({name: tensor([value, value]) for name in "ab"} for value in (1.0, 2.0))
    outcomes(ranks, [stock.save(tmp_path / "stock", old)], 2)
    steps = [stock.save(tmp_path / "stock", new), stock.load(tmp_path / "stock", {"a": unset(2), "b": unset(2)})]
    found = {name: one["values"][0] for name, one in outcomes(ranks, steps)[1].items()}
    assert sorted(found.values()) == [1.0, 2.0]

    ours.save(tmp_path / "checkpoint-3", sharded=2)
    ours.save(tmp_path / "checkpoint-3", ours.OTHER)
    assert ours.right(ours.load(tmp_path / "checkpoint-3", ours.empty(), "full"), live(ours.OTHER, 1, 0))
    files = [path.name for path in (tmp_path / "checkpoint-3").glob("*/*.safetensors")]
    assert files == ["rank-00000.safetensors"] * 2
    return Observed(
        "one of two tensors is the new one, the other the old one; no error",
        "loads right: the second checkpoint takes the place of the first in one step, and no file of it is left",
    )


@fault("S13", "a load fails, and the same process loads another directory")
def test_s13_a_failed_load_leaves_nothing_to_the_next(ranks: ForkServer, tmp_path: Path) -> Observed:
    values = [7.0, 8.0, 9.0, 10.0, 11.0, 12.0]
    steps = [
        stock.save(tmp_path / "one", {"a": tensor(VALUES)}, safetensors=True),
        stock.save(tmp_path / "other", {"a": tensor(values)}, safetensors=True),
        stock.load(tmp_path / "one", {"a": unset(4), "z": unset(4)}, safetensors=True),
        stock.load(tmp_path / "other", {"a": unset(6)}, safetensors=True),
    ]
    failed, found = outcomes(ranks, steps)[2:]
    assert failed == {"error": "KeyError: 'z'"}
    assert found["a"]["values"] == [*values[:4], -1.0, -1.0]

    ours.save(tmp_path / "checkpoint-3")
    ours.save(tmp_path / "checkpoint-4", ours.OTHER, tp=2)
    (tmp_path / "checkpoint-3/model_state/rank-00000.safetensors").unlink()
    target = ours.empty()
    error = ours.refusal(ours.load(tmp_path / "checkpoint-3", target))
    assert isinstance(error, Corrupt)
    assert ours.right(ours.load(tmp_path / "checkpoint-4", target), live(ours.OTHER, 1, 0))
    return Observed(
        "the second load goes by the first one's metadata: of 6 elements the last 2 keep their initial values; "
        "no error",
        "the first load is refused with nothing changed, the second loads right",
    )


@fault("S14", "the same directory is loaded twice in one process, and holds another checkpoint the second time")
def test_s14_a_directory_is_inspected_again_for_every_load(ranks: ForkServer, tmp_path: Path) -> Observed:
    one, other = [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]
    steps = [
        stock.save(tmp_path / "stock", {"a": tensor(one)}, unique_id=0),
        stock.save(tmp_path / "stock", {"a": tensor(other)}, unique_id=1),
        stock.load(tmp_path / "stock", {"a": unset(4)}, unique_id=0),
        stock.load(tmp_path / "stock", {"a": unset(4)}, unique_id=1),
    ]
    assert outcomes(ranks, steps)[3]["a"]["values"] == one

    target = ours.empty()
    for arrays in (ours.ARRAYS, ours.OTHER):
        ours.save(tmp_path / "checkpoint-3", arrays)
        assert ours.right(ours.load(tmp_path / "checkpoint-3", target), live(arrays, 1, 0))
    return Observed("asked for `unique_id` 1, it loads 0 again; no error", "loads right both times")


@fault("S15", "open weights are replaced by others of another dtype after they have been loaded once")
def test_s15_replaced_open_weights_are_read_as_what_they_are(ranks: ForkServer, tmp_path: Path) -> Observed:
    weights = tmp_path / "stock"
    weights.mkdir()
    steps = [stock.load(weights, {"a": unset(4)}, safetensors=True)]
    save_file({"a": np.array(VALUES, np.float32)}, weights / "model.safetensors")
    assert np.allclose(outcomes(ranks, steps)[0]["a"]["values"], VALUES)
    assert (weights / "flex-ckpt.auto_generated.metadata").exists()
    save_file({"a": np.array(VALUES, np.float16)}, weights / "model.safetensors")
    found = outcomes(ranks, steps)[0]["a"]["values"]
    assert not np.allclose(found, VALUES, atol=0.01)

    ours.save(tmp_path / "checkpoint-3")
    export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "hf")
    (tmp_path / "hf" / CHECKSUMS_NAME).unlink()  # As in open weights of another source.
    target = ours.empty()
    expected = {"model_state": live(ours.ARRAYS, 1, 0)["model_state"]}
    assert ours.right(ours.load_open_weights(tmp_path / "hf", target), expected)
    path = tmp_path / "hf/model.safetensors"
    halves = {name: array.astype(np.float16) for name, array in load_file(path).items()}
    save_file(halves, path)
    listed = sorted(one.name for one in path.parent.iterdir())
    rounded_off = {name: array.astype(np.float16).astype(np.float32) for name, array in ours.ARRAYS.items()}
    expected = {"model_state": live(rounded_off, 1, 0)["model_state"]}
    assert ours.right(ours.load_open_weights(tmp_path / "hf", target), expected)
    assert sorted(one.name for one in path.parent.iterdir()) == listed
    return Observed(
        f"float16 {rounded(VALUES)} is loaded into float32 as {rounded(found)}, by metadata that the first load has "
        "left in the directory; no error",
        "loads right both times: the file's own header counts, and nothing is written into the directory",
    )


@fault("S18", "one bit of a stored tensor has flipped")
def test_s18_a_flipped_bit_is_found_by_a_full_check(ranks: ForkServer, tmp_path: Path) -> Observed:
    found = []
    for suffix in ("distcp", "safetensors"):
        directory = tmp_path / suffix
        options = {"safetensors": suffix == "safetensors"}
        outcomes(ranks, [stock.save(directory, {"a": tensor(VALUES)}, **options)])
        (path,) = directory.glob(f"*.{suffix}")
        flip(path, path.read_bytes().index(np.float32(VALUES[0]).tobytes()) + 3, 0x40)
        found.append(outcomes(ranks, [stock.load(directory, {"a": unset(4)}, **options)])[0]["a"]["values"])
    assert found[0] == found[1]
    assert found[0][0] > 1e38

    ours.save(tmp_path / "checkpoint-3")
    path = tmp_path / "checkpoint-3/model_state/rank-00000.safetensors"
    flip(path, path.read_bytes().index(ours.ARRAYS[NORM].tobytes()), 0x01)
    error = ours.load(tmp_path / "checkpoint-3", ours.empty(), "full").error  # Found while tensors are filled.
    assert isinstance(error, FlexError)
    return Observed(
        f"{rounded(VALUES)} is loaded as {rounded(found[0])}, from either format; there is no checksum; no error",
        f"by default {refused(error, 'model_state/rank-00000.safetensors')}",
    )


def flip(path: Path, at: int, bits: int) -> None:
    """Flip bits of one byte of a file."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= bits
    path.write_bytes(raw)
