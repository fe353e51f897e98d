"""What describes a model is lost between its open weights and an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.corruption.guarantees import Observed, fault
from tests.families.test_exported_configs import READERS, SOURCES, exported
from tests.families.test_transformers import CASES
from tests.harness.tiny import SINGLE
from tests.trainer.test_exported_documents import GENERATION, exports, live, source_of
from tools.config_readers import changes, read
from verification.forkserver import ForkServer


def described(directory: Path) -> tuple[Any, bytes | None]:
    """``use_cache`` and the generation settings of an export."""
    use_cache = json.loads((directory / "config.json").read_text())["use_cache"]
    generation = directory / "generation_config.json"
    return use_cache, generation.read_bytes() if generation.exists() else None


@pytest.mark.slow
@fault("G80", "open weights with `use_cache: true` and a `generation_config.json` are trained and exported")
def test_g80_an_export_keeps_what_describes_its_source(ranks: ForkServer, tmp_path: Path) -> Observed:
    source, config = source_of(ranks, tmp_path, "llama")
    stock = tmp_path / "stock"
    result = ranks.run("tests.corruption.jobs:export_by_stock", 1, {"source": str(source), "target": str(stock)})
    assert result.ok, result.logs[0].read_text()
    assert described(stock) == (False, None)
    for path in exports(ranks, tmp_path, SINGLE, model_type="llama", model=live(config), source=source).values():
        assert described(path) == (True, GENERATION)
    return Observed(
        "`use_cache: false`, and no `generation_config.json`",
        "both as in the source: in the export of a live model, of a checkpoint and of a resumed run",
    )


@fault("G81", "a gpt_oss of 4 experts is exported")
def test_g81_transformers_builds_an_exported_gpt_oss(ranks: ForkServer) -> Observed:
    source = CASES["gpt_oss"]["config"]
    (stock,) = ranks.run("tests.corruption.jobs:config_by_stock", 1, {"source": source}).values
    assert read(stock)["num_local_experts"] == 128
    (ours,) = exported(ranks, {"gpt_oss": source}, kept=False).values()
    found, wanted = read(ours), read(source)
    keys = ("num_local_experts", "rope_parameters")
    assert {key: found[key] for key in keys} == {key: wanted[key] for key in keys}
    return Observed(
        "Transformers builds 128 experts from its `config.json`, and another rotary embedding",
        "Transformers builds 4 experts and the rotary embedding of the model",
    )


@fault("G114", "weights of Qwen 3 VL that Transformers 5.3 saved are exported")
def test_g114_transformers_reads_the_positions_of_an_exported_vision_language_model(ranks: ForkServer) -> Observed:
    name, keys = "qwen3_vl, saved by 5.3.0", ("rope_theta", "mrope_section")
    (stock,) = ranks.run("tests.corruption.jobs:config_by_stock", 1, {"source": SOURCES[name]}).values
    (ours,) = exported(ranks, {name: SOURCES[name]}, kept=True).values()
    found = [read(one)["text_config"]["rope_parameters"] for one in (SOURCES[name], stock, ours)]
    wanted, lost, kept = ({key: one.get(key) for key in keys} for one in found)
    assert kept == wanted == {"rope_theta": 5000000, "mrope_section": [2, 1, 1]}
    assert changes(SOURCES[name], ours) == READERS[name]["changes"]
    # Transformers 4 reads it as the published weights.
    assert not any(key in path for path in READERS[name]["published"] for key in keys if "parameters" not in path)
    read_so = f"`rope_theta: {kept['rope_theta']}` and `mrope_section: {kept['mrope_section']}`"
    return Observed(
        f"Transformers reads `rope_theta: {lost['rope_theta']:.0f}` and no `mrope_section`",
        f"Transformers 4.57 and 5.3 read {read_so}",
    )
