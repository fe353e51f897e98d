"""Open weights into a live model, and out again: the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness import tiny
from tests.harness.on_ranks import run_on_ranks
from tests.harness.tiny import TP2
from tests.storage.serving import serving
from verification.forkserver import ForkServer


def weights_of(ranks: ForkServer, directory: Path, model_type: str, model: dict[str, Any]) -> Path:
    """The export of a tiny model with its initial weights."""
    run = {
        "layout": tiny.SINGLE.to_json(),
        "output_dir": str(directory / "run"),
        "model_type": model_type,
        "model": model,
    }
    ranks.run("tests.trainer.export_jobs:export_initial", 1, {**run, "target": str(directory / "weights")})
    return directory / "weights"


def fill_and_export(source: str, output_dir: Path, model: dict[str, Any]) -> None:
    import paddle

    from paddleformers_fc import load_open_weights
    from tests.trainer.export_jobs import export_weights

    args = tiny.training_arguments(TP2, str(output_dir / "run"))
    built = tiny.build("ernie4_5_moe", TP2, args, **model)
    with paddle.no_grad():
        for parameter in built.parameters():
            parameter.zero_()
    report = load_open_weights(built, source)
    assert (list(report.fresh), list(report.dropped)) == ([], [])
    export_weights(built, output_dir / "again")


def test_weights_behind_a_url_pass_through_a_model_unchanged_with_layers_that_predict_several_tokens(
    ranks: ForkServer, tmp_path: Path
) -> None:
    """From directories, by ``from_pretrained``: test_open_weights.py."""
    model = {"num_nextn_predict_layers": 1}
    source = weights_of(ranks, tmp_path, "ernie4_5_moe", model)
    with serving(tmp_path) as served:
        url = f"{served.url}/weights"
        run_on_ranks(ranks, 2, fill_and_export, source=url, output_dir=tmp_path, model=model)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
