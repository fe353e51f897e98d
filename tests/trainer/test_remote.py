"""A run that resumes from a URL as from a directory, and what is not written to one. A model: test_pretrained.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from paddleformers_fc.errors import OptionError
from paddleformers_fc.trainer import documents, save
from paddleformers_fc.trainer.options import FlexFields, check_options
from paddleformers_fc.trainer.session import SESSION
from tests.harness.tiny import SD2V2, TP2
from tests.storage.serving import serving
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


def test_neither_checkpoints_nor_exports_are_written_to_a_url() -> None:
    options = FlexFields()
    options.output_dir = "https://ann:secret@host/out"  # type: ignore[attr-defined]
    check_options(options)
    options.flex_checkpoint = True
    trainer = SimpleNamespace(args=options, **{SESSION: "not read"})
    writes: dict[str, Callable[[], object]] = {
        "A checkpoint cannot be written to https://***@host/out": lambda: check_options(options),
        "An export cannot be written to memory://hf": lambda: save.save_model(trainer, pytest.fail, "memory://hf"),
        "An export cannot be written to s3://a/hf": lambda: save.save_pretrained(trainer, pytest.fail, "s3://a/hf"),
    }
    for what, write in writes.items():
        with pytest.raises(OptionError) as caught:
            write()
        assert what in caught.value.what
        assert "secret" not in caught.value.render()
        assert "upload its files" in caught.value.next_step


def test_a_password_is_not_written_into_a_checkpoint() -> None:
    arguments = {"resume_from_checkpoint": "sftp://ann:secret@host/run/checkpoint-3", "output_dir": "out"}
    written = documents.capture_arguments(SimpleNamespace(to_dict=lambda: arguments))()
    assert b"secret" not in written
    assert json.loads(written)["resume_from_checkpoint"] == "sftp://***@host/run/checkpoint-3"
