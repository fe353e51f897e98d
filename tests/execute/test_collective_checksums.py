"""Under ``flex_verify: full`` a load compares headers and documents first, and tensors while they are filled."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.errors import CheckpointError, Corrupt, FlexError, StorageError
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.load import LoadReport, load_checkpoint, prepare_weights
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.formats.flex import open_flex
from paddleformers_fc.storage.checksum import INDEX_NAME
from paddleformers_fc.storage.safetensors import read_header
from tests.corruption import ours
from tests.execute.simulated import MODEL, canonical, job, live, same_values, succeed
from tests.harness.sealing import reseal

ARRAYS = canonical()
BLOCK = 500
"""No divisor of a header's length."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of two ranks, its checksums recorded in many small blocks."""
    directory = tmp_path / "checkpoint-3"
    ours.save(directory, tp=2)
    reseal(directory, BLOCK)
    return directory


def load(directory: Path, ranks: int, *, weights_alone: bool = False) -> list[Any]:
    """How a fully verified load ended on every rank; what it was to fill is untouched unless the error denies it."""

    def work(channel: Any) -> LoadReport:
        roles = live(ARRAYS, ranks, channel.rank, empty=True)
        if weights_alone:
            del roles["optimizer_state"]
        before = live(ARRAYS, ranks, channel.rank, empty=True)
        try:
            return load_checkpoint(open_on_all_ranks(directory, channel, "full"), roles, MODEL, channel)
        except FlexError as error:
            if "are undefined" not in error.what and not same_values(roles, {role: before[role] for role in roles}):
                raise RuntimeError("refused, and tensors have changed") from error
            raise

    return job(ranks, work)


def the_one_report(outcomes: list[Any]) -> Corrupt:
    """The error that every rank raised alike."""
    assert isinstance(outcomes[0], Corrupt), outcomes[0]
    assert len({str(outcome) for outcome in outcomes}) == 1
    return outcomes[0]


def flip(path: Path, at: int) -> None:
    """Flip a bit of a file in its place; the time of its last change is another one then."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


def place_of(directory: Path, role: str, name: str) -> tuple[Path, int]:
    """The file that holds a tensor on rank 0's part, and the offset of its last byte."""
    path = directory / role / "rank-00000.safetensors"
    return path, read_header(path).tensors[name].end - 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_byte_that_is_read_is_refused_by_file_and_block_on_every_rank(checkpoint: Path, ranks: int) -> None:
    path, at = place_of(checkpoint, "model_state", "model.layers.1.mlp.down_proj.weight")
    flip(path, at)
    error = the_one_report(load(checkpoint, ranks))
    (line,) = error.evidence
    assert "model_state/rank-00000.safetensors does not match its checksum in 1 of" in line
    assert f"block {at // BLOCK} (from byte {at // BLOCK * BLOCK})" in line
    assert ("found by rank 0" in line) == (ranks > 1)


@pytest.mark.parametrize("name", ["mapping.json", "config.json", INDEX_NAME])
def test_a_byte_of_a_document_is_refused_on_every_rank(checkpoint: Path, name: str) -> None:
    flip(checkpoint / name, 10)
    assert f"{name} does not match its checksum" in str(the_one_report(load(checkpoint, 2)))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("at", [3, 9, 200, "its end"])
def test_a_byte_of_a_header_is_refused_before_any_tensor_changes(checkpoint: Path, ranks: int, at: int | str) -> None:
    path = checkpoint / "optimizer_state/rank-00001.safetensors"
    end = min(tensor.begin for tensor in read_header(path).tensors.values())
    flip(path, end - 1 if isinstance(at, str) else at)
    for outcome in load(checkpoint, ranks):
        assert isinstance(outcome, CheckpointError), outcome
        assert "optimizer_state/rank-00001.safetensors" in str(outcome)
        assert "are undefined" not in str(outcome)
    # No rank opens a file that it does not read.
    assert all(isinstance(outcome, LoadReport) for outcome in load(checkpoint, ranks, weights_alone=True))


def test_a_byte_that_no_rank_reads_does_not_matter_to_a_load_and_is_found_by_a_check_of_all(checkpoint: Path) -> None:
    path, at = place_of(checkpoint, "optimizer_state", "model.layers.1.mlp.down_proj.weight.moment1_0")
    flip(path, at)
    assert all(isinstance(outcome, LoadReport) for outcome in load(checkpoint, 2, weights_alone=True))
    with pytest.raises(Corrupt, match="optimizer_state/rank-00000"):
        open_flex(checkpoint, "full")


def test_an_export_under_full_finds_a_byte_that_no_header_and_no_document_holds(checkpoint: Path) -> None:
    target = checkpoint.parent / "exported"
    export_checkpoint(checkpoint, target, verify="full")
    before = (target / "model.safetensors").read_bytes()
    path, at = place_of(checkpoint, "model_state", "model.layers.1.mlp.down_proj.weight")
    flip(path, at)
    with pytest.raises(Corrupt) as raised:
        export_checkpoint(checkpoint, target, verify="full")
    assert f"block {at // BLOCK} (from byte {at // BLOCK * BLOCK})" in raised.value.evidence[0]
    assert (target / "model.safetensors").read_bytes() == before
    assert sorted(one.name for one in checkpoint.parent.iterdir()) == ["checkpoint-3", "exported"]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("unread", ["model_state/rank-00000.safetensors", "optimizer_state/rank-00001.safetensors"])
def test_a_load_under_full_whose_reads_the_system_refuses_is_refused_on_every_rank(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, unread: str, ranks: int
) -> None:
    original = os.preadv
    numbers = min(one.begin for one in read_header(checkpoint / unread).tensors.values())

    def refuse(descriptor: int, buffers: Any, offset: int) -> int:
        if offset > numbers and os.readlink(f"/proc/self/fd/{descriptor}").endswith(unread):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(descriptor, buffers, offset)

    def work(channel: Any) -> None:
        roles = live(ARRAYS, 1, channel.rank, empty=True)
        load_checkpoint(open_on_all_ranks(checkpoint, channel, "full"), roles, MODEL, channel)

    monkeypatch.setattr(os, "preadv", refuse)
    errors = job(ranks, work)
    assert all(isinstance(error, StorageError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert unread in str(errors[0])


def test_every_rank_hashes_its_share_and_no_block_is_hashed_twice(checkpoint: Path) -> None:
    (alone,), two = load(checkpoint, 1), load(checkpoint, 2)
    held = live(ARRAYS, 1, 0).values()
    wanted = sum(weight.local_tensor.numpy().nbytes for names in held for weight in names.values())
    assert 0.9 * wanted < alone.bytes_hashed < 1.1 * wanted
    assert sum(report.bytes_hashed for report in two) == alone.bytes_hashed
    for report in two:
        assert report.bytes_hashed < 0.65 * alone.bytes_hashed


def test_without_a_full_check_nothing_is_hashed(checkpoint: Path) -> None:
    def work(channel: Any) -> int:
        roles = live(ARRAYS, 2, channel.rank, empty=True)
        return load_checkpoint(open_on_all_ranks(checkpoint, channel, "size"), roles, MODEL, channel).bytes_hashed

    assert succeed(2, work) == [0, 0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_open_weights_that_are_replaced_after_they_were_opened_are_refused(checkpoint: Path, ranks: int) -> None:
    export_checkpoint(checkpoint, checkpoint.parent / "hf")
    weights = checkpoint.parent / "hf" / "model.safetensors"

    def work(channel: Any) -> None:
        exchange, seen = channel.gather, []

        def replaced(*given: Any) -> Any:
            everyone = exchange(*given)
            if not seen and channel.rank == 0:
                flip(weights, weights.stat().st_size - 1)
            seen.append(given)
            exchange("waiting", b"")  # All have seen what was there before.
            return everyone

        channel.gather = replaced
        roles = {"model_state": live(ARRAYS, 1, channel.rank, empty=True)["model_state"]}
        prepare_weights(checkpoint.parent / "hf", roles, MODEL, channel).fill()

    error = the_one_report(job(ranks, work))
    assert "was replaced or changed after it was checked" in str(error)
