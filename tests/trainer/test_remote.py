"""A run that resumes from a URL, and a model that starts from one: the same as from a directory."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from paddleformers_fc.errors import OptionError
from paddleformers_fc.storage.paths import parse_path
from paddleformers_fc.trainer import documents, save
from paddleformers_fc.trainer.options import FlexFields, check_options
from paddleformers_fc.trainer.session import SESSION
from tests.harness.tiny import SD2V2, TP2
from tests.storage.serving import serving
from tests.trainer.test_pretrained import start, weights_of
from tests.trainer.test_trainer import JOBS, SIX_STEPS, Saved, settings, train_six
from verification.forkserver import ForkServer


@pytest.fixture(scope="module")
def saved(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Six steps under tensor parallelism, saved at 3 and 6."""
    return train_six(ranks, tmp_path_factory.mktemp("tp2"), TP2)


@pytest.mark.parametrize("read", ["each", "once"])
def test_a_run_resumed_from_a_url_continues_as_if_uninterrupted(
    ranks: ForkServer, saved: Saved, tmp_path: Path, read: str
) -> None:
    with serving(saved.output_dir) as served:
        given = settings(SD2V2, tmp_path, flex_read=read, **SIX_STEPS)
        result = ranks.run(f"{JOBS}:run", 2, {**given, "resume": f"{served.url}/checkpoint-3"})
        assert served.ranges
    assert result.values[0]["losses"] == pytest.approx(saved.losses[3:], abs=1e-6)


def test_a_model_starts_from_open_weights_behind_a_url(ranks: ForkServer, tmp_path: Path) -> None:
    source = weights_of(ranks, tmp_path, "llama", {})
    with serving(tmp_path) as served:
        url = f"{served.url}/weights"
        report = start(ranks, tmp_path, TP2, url, model_type="llama", model={})  # type: ignore[arg-type]
    assert report == {"fresh": [], "dropped": []}
    assert (tmp_path / "again-tp2/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize("url", ["s3://bucket/out", "memory://out", "https://ann:secret@host/out"])
def test_an_output_directory_that_is_a_url_is_refused_before_training(url: str) -> None:
    options = FlexFields()
    options.output_dir = url  # type: ignore[attr-defined]
    check_options(options)
    options.flex_checkpoint = True
    with pytest.raises(OptionError, match="A checkpoint cannot be written to") as caught:
        check_options(options)
    assert str(parse_path(url)) in caught.value.what
    assert "secret" not in caught.value.render()
    assert "upload its files" in caught.value.next_step


def test_a_password_is_not_written_into_a_checkpoint() -> None:
    class Arguments:
        def to_dict(self) -> dict[str, str]:
            return {"resume_from_checkpoint": "sftp://ann:secret@host/run/checkpoint-3", "output_dir": "out"}

    written = documents.capture_arguments(Arguments())()
    assert b"secret" not in written
    assert json.loads(written)["resume_from_checkpoint"] == "sftp://***@host/run/checkpoint-3"


def test_a_model_is_not_exported_to_a_url() -> None:
    args = SimpleNamespace(flex_checkpoint=True, flex_max_shard_size="5GB", output_dir="out")
    trainer = SimpleNamespace(args=args, **{SESSION: "not read"})
    with pytest.raises(OptionError, match="An export cannot be written to s3://bucket/model"):
        save.save_pretrained(trainer, pytest.fail, "s3://bucket/model")
    with pytest.raises(OptionError, match="An export cannot be written to memory://model"):
        save.save_model(trainer, pytest.fail, "memory://model")
