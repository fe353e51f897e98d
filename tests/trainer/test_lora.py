"""Adapters: what a checkpoint contains of them, resumed under every layout, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import paddleformers_fc
from paddleformers_fc.errors import OptionError
from tests.harness import tiny
from tests.harness.on_ranks import on_ranks
from tests.harness.tiny import EP2, PP2, SD2S3, SD2V1, SD2V2, SINGLE, TP2, MatrixLayout
from tests.trainer.jobs import few_samples, weights_of as tensors_of
from tests.trainer.lora_jobs import trainer_of
from tests.trainer.test_pretrained import weights_of
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

JOBS = "tests.trainer.lora_jobs"
SIX_STEPS = {"max_steps": 6, "save_steps": 3}
ERNIE = {"model_type": "ernie4_5_moe", "model": {"moe_use_aux_free": True}}
ATTENTION = {"target_modules": [".*qkv_proj", ".*(q|k|v|o)_proj"]}
BIASES = {
    "model": {"attention_bias": True},
    "adapters": {**ATTENTION, "trainable_bias": "all", "trainable_modules": [".*embed_tokens.*", ".*norm.*"]},
}


class Trained:
    """An uninterrupted run of six steps that saved at 3 and 6."""

    def __init__(self, ranks: ForkServer, layout: MatrixLayout, output_dir: Path, **settings: Any) -> None:
        job = {"layout": layout.to_json(), "output_dir": str(output_dir), "arguments": SIX_STEPS, **settings}
        result = ranks.run(f"{JOBS}:run", layout.nproc, job)
        self.settings = settings
        self.losses = result.values[0]["losses"]
        self.third = output_dir / "checkpoint-3"

    def resumes(self, ranks: ForkServer, layout: MatrixLayout, output_dir: Path) -> None:
        """Assert that a run under a layout loads every bit and has the losses of this run."""
        job = {"layout": layout.to_json(), "output_dir": str(output_dir), "arguments": SIX_STEPS, **self.settings}
        result = ranks.run(f"{JOBS}:run_saving_what_was_loaded", layout.nproc, {**job, "resume": str(self.third)})
        assert list(canonical_digests(output_dir / "checkpoint-3")) == list(canonical_digests(self.third))
        assert result.values[0] == pytest.approx(self.losses[3:], abs=1e-6)


@pytest.fixture(scope="module")
def llama(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A Llama whose linear layers all have adapters, on one rank."""
    return Trained(ranks, SINGLE, tmp_path_factory.mktemp("lora"))


@pytest.mark.parametrize("layout", [TP2, SD2V1, SD2V2, SD2S3, PP2], ids=lambda layout: layout.name)
def test_adapters_resume_under_any_layout(
    ranks: ForkServer, llama: Trained, tmp_path: Path, layout: MatrixLayout
) -> None:
    llama.resumes(ranks, layout, tmp_path)


@pytest.mark.parametrize("layout", [SINGLE, PP2], ids=lambda layout: layout.name)
def test_adapters_of_fused_layers_and_experts_resume_under_another_layout(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    """Fused outputs lie in groups that depend on the degree of tensor parallelism."""
    Trained(ranks, TP2, tmp_path / "tp2", **ERNIE).resumes(ranks, layout, tmp_path / layout.name)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP2, PP2], ids=lambda layout: layout.name)
def test_trained_modules_and_biases_resume_beside_adapters(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    trained = Trained(ranks, SINGLE, tmp_path / "single", **BIASES)
    names = {one.name for one in canonical_digests(trained.third) if one.role == "model_state"}
    layers = {name.removeprefix("model.layers.0.") for name in names if name.startswith("model.layers.0.")}
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= names
    assert {"self_attn.q_proj.bias", "self_attn.q_proj.lora_A.weight", "input_layernorm.weight"} <= layers
    assert not {"self_attn.q_proj.weight", "mlp.up_proj.lora_A.weight"} & layers
    trained.resumes(ranks, layout, tmp_path / layout.name)


def test_a_checkpoint_contains_no_tensor_of_the_base_and_grows_with_the_rank(
    ranks: ForkServer, llama: Trained, tmp_path: Path
) -> None:
    twice = Trained(ranks, SINGLE, tmp_path, adapters={"r": 8})
    tensors = [list(canonical_digests(one.third)) for one in (llama, twice)]
    assert all(".lora_A." in one.name or ".lora_B." in one.name for one in tensors[0])
    sizes = [sum(path.stat().st_size for path in one.third.glob("*/*.safetensors")) for one in (llama, twice)]
    heads = [sum(_header_bytes(path) for path in one.third.glob("*/*.safetensors")) for one in (llama, twice)]
    powers = 8 * 2 * len([one for one in tensors[0] if one.role == "model_state"]) // 2
    assert sizes[1] - heads[1] - powers == 2 * (sizes[0] - heads[0] - powers)


def _header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_a_resume_of_adapters_is_planned_from_the_files_alone(llama: Trained) -> None:
    found = paddleformers_fc.open(llama.third).plan("tp=2,pp=2")
    assert found.world_size == 4
    # What tensor parallelism does not cut is held twice: one of the two sides of each adapter.
    stored = sum(path.stat().st_size for path in llama.third.glob("*/*.safetensors"))
    assert stored / 2 < found.bytes < 2 * stored
    assert (found.fresh, found.dropped) == ([], [])


def test_the_description_of_the_adapters_is_stored(llama: Trained) -> None:
    stored = json.loads((llama.third / "mapping.json").read_text())["model"]["adapters"]
    assert (stored["r"], stored["alpha"], stored["rslora"]) == (4, 8.0, False)
    assert len(stored["base"]["tensors"]) == 32


def test_other_adapters_and_other_bases_are_refused_with_the_difference(
    ranks: ForkServer, llama: Trained, tmp_path: Path
) -> None:
    made = {
        "rank": {"adapters": {"r": 8}},
        "scaling": {"adapters": {"lora_alpha": 16}},
        "targets": {"adapters": ATTENTION},
        "base": {"model": {"num_hidden_layers": 5}},
        "without adapters": {"adapted": False},
    }
    given = {way: {**one, "resume": str(llama.third)} for way, one in made.items()}
    given["adapters"] = {"resume": str(tmp_path / "whole/without/checkpoint-1"), "arguments": {"max_steps": 1}}
    whole = {"without": {"adapted": False, "arguments": {"max_steps": 1, "save_steps": 1}}}
    ranks.run(f"{JOBS}:attempts", 1, {"output_dir": str(tmp_path / "whole"), "made": whole})
    (found,) = ranks.run(f"{JOBS}:attempts", 1, {"output_dir": str(tmp_path), "made": given}).values
    rows = {
        "rank": "lora.r  4      8",
        "scaling": "lora.alpha  8.0    16.0",
        "targets": "lora.target_modules",
        "base": "lora.base.tensors",
    }
    without, adapters = found["without adapters"], found["adapters"]
    assert without.startswith(
        "MismatchError: The checkpoint contains adapters (LoRA), and this run trains a complete model."
    )
    assert f"paddleformers-fc export {llama.third} DIRECTORY --base " in without
    assert adapters.startswith(
        "MismatchError: The checkpoint contains a complete model, and this run trains adapters (LoRA)."
    )
    assert f"paddleformers-fc export {given['adapters']['resume']} DIRECTORY, set" in adapters
    for way, row in rows.items():
        assert found[way].startswith("MismatchError: The model's configuration gives the stored weights"), found[way]
        assert row in found[way]
        # Naming the keys helps only where the tensors fit.
        assert ("flex_allow_config_changes" in found[way]) == (way == "scaling")


@on_ranks(layout=SINGLE)
def test_adapters_are_evaluated_though_paddlefleet_is_not_installed(layout: MatrixLayout, tmp_path: Path) -> None:
    trainer = trainer_of(layout.to_json(), str(tmp_path))
    losses = [trainer.evaluate(few_samples())["eval_loss"]]
    trainer.train()
    losses.append(trainer.evaluate(few_samples())["eval_loss"])
    assert losses[0] > losses[1] > 0


def test_other_patterns_that_select_the_same_layers_are_no_other_adapters(
    ranks: ForkServer, llama: Trained, tmp_path: Path
) -> None:
    """Layers of pipelines have other names, so that patterns with whole names must differ."""
    job = {"output_dir": str(tmp_path), "resume": str(llama.third), "arguments": SIX_STEPS}
    given = {**job, "layout": SINGLE.to_json(), "adapters": {"target_modules": ".*_proj"}}
    result = ranks.run(f"{JOBS}:run", 1, given)
    assert result.values[0]["losses"] == llama.losses[3:]
    assert '  lora.target_modules  [".*qkv_proj", ".*(q|k|v' in result.logs[0].read_text()


def test_the_files_of_a_base_identify_it_wherever_they_are(ranks: ForkServer, tmp_path: Path) -> None:
    base = weights_of(ranks, tmp_path / "base", "llama", {})
    trained = Trained(ranks, TP2, tmp_path / "run", base=str(base))
    stored = json.loads((trained.third / "mapping.json").read_text())["model"]["adapters"]["base"]
    recorded = json.loads((base / "flex_checksums.json").read_text())["files"]
    assert stored["location"] == str(base)
    assert stored["files"] == {one["path"]: one["digest"] for one in recorded if one["path"].endswith(".safetensors")}
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(base, moved)
    shutil.copytree(base, other)
    (moved / "flex_checksums.json").unlink()  # The files are hashed.
    (other / "flex_checksums.json").unlink()
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\1\2\3\4")
    given = {"resume": str(trained.third), "arguments": {"max_steps": 3}}
    made = {"moved": {**given, "base": str(moved)}, "other": {**given, "base": str(other)}}
    (found,) = ranks.run(f"{JOBS}:attempts", 1, {"output_dir": str(tmp_path), "made": made}).values
    assert found["moved"] == ""
    assert "lora.base.model.safetensors" in found["other"]


def test_a_base_is_not_identified_by_files_that_do_not_contain_it(ranks: ForkServer, tmp_path: Path) -> None:
    base = weights_of(ranks, tmp_path / "base", "llama", {})
    (base / "flex_checksums.json").unlink()
    (found,) = ranks.run(f"{JOBS}:changed_bases", 1, {"output_dir": str(tmp_path), "base": str(base)}).values
    assert found["unchanged"] == {"files": ["model.safetensors"], "tensors": ""}
    assert found["element"]["files"] == found["replaced"]["files"] == []
    assert found["element"]["tensors"] != found["replaced"]["tensors"] != ""


@on_ranks(layout=SINGLE)
def test_adapters_that_upstream_cannot_describe_are_refused_by_name(layout: MatrixLayout, tmp_path: Path) -> None:
    from types import SimpleNamespace

    import paddle
    from paddleformers.nn.experts import MoeExperts, MoeExpertsBase
    from paddleformers.peft import LoRAModel
    from paddleformers.peft.lora.lora_layers import FleetLoRAMoeExperts, LoRAConv2D, LoRAMoeExperts

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True}
    args = tiny.training_arguments(layout, str(tmp_path), **settings)

    def refused(model: Any) -> str:
        with pytest.raises(OptionError) as caught:
            tiny.trainer(model, args, cls=FlexTrainer)
        return caught.value.render()

    def quantize(model: LoRAModel) -> None:
        model.quantized = True

    made: list[tuple[dict[str, Any], Any, str]] = [
        ({"loraga": True}, None, "loraga: PaddleFormers changes the base"),
        ({"do_qat": True}, None, "do_qat: the quantization scales"),
        ({}, LoRAModel.merge, "is merged into its base; call unmerge()"),
        ({}, quantize, "a quantized base"),
        ({"target_modules": None}, None, "no tensor of the model is trained"),
    ]
    for given, change, text in made:
        model = tiny.adapted(tiny.build("llama", layout, args), **given)
        if change is not None:
            change(model)
        assert text in refused(model)

    # PaddleFormers chooses the class of the adapters by this name.
    class GroupedMLPExpert(MoeExpertsBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight1, self.weight2 = self.create_parameter([2, 4, 16]), self.create_parameter([2, 8, 4])
            self.config = self.activation_func = self.ep_group = None
            self.expert_parallel = self.moe_deep_gemm = self.activation_recompute = False

    class UnknownAdapter(paddle.nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.lora_A = self.create_parameter([4, 2])

    sizes = SimpleNamespace(num_experts=2, intermediate_size=8, hidden_size=4, hidden_act="silu")
    layers = {
        LoRAConv2D: (lambda: paddle.nn.Conv2D(2, 2, 3), ""),
        LoRAMoeExperts: (lambda: MoeExperts(sizes), ""),
        FleetLoRAMoeExperts: (GroupedMLPExpert, "PaddleFleet is on no public index"),
        UnknownAdapter: (lambda: paddle.nn.Linear(4, 4), "unknown class of adapters"),
    }
    for kind, (layer, text) in layers.items():
        model = tiny.build("llama", layout, args)
        model.added = layer()
        adapted = tiny.adapted(model, target_modules=["added"])
        if kind is UnknownAdapter:
            adapted.model.added = UnknownAdapter()
        error = refused(adapted)
        assert f"{kind.__name__} (added): " in error
        assert text in error
        # If PaddleFormers describes others, declare them in a family and remove the refusal.
        described = kind.sharded_state_dict is not paddle.nn.Layer.sharded_state_dict
        assert described == (kind is FleetLoRAMoeExperts)


def test_adapters_of_experts_are_refused_where_upstream_would_average_those_of_different_experts(
    ranks: ForkServer, tmp_path: Path
) -> None:
    """Expert parallelism: PaddleFormers marks the weights of experts as those of a rank, and not their adapters."""
    job = {"layout": EP2.to_json(), "output_dir": str(tmp_path), "arguments": {"max_steps": 1}, **ERNIE}
    made = {"experts": {**job, "adapters": {}}, "attention": {**job, "adapters": ATTENTION}}
    results = ranks.run(f"{JOBS}:attempts", 2, {"output_dir": str(tmp_path), "made": made})
    for found in results.values:
        assert "expert parallelism: PaddleFormers does not mark adapters of experts" in found["experts"]
        assert found["attention"] == ""


def test_a_tied_tensor_is_trained_under_both_names_in_a_pipeline(ranks: ForkServer, tmp_path: Path) -> None:
    """The stages have copies of it, and one that is frozen would differ after a step."""
    tied = {"model": {"tie_word_embeddings": True}, "arguments": {"max_steps": 1, "save_steps": 1}}
    owner, alias = ".*embed_tokens.*", "lm_head.*"
    made = {
        name: {**tied, "layout": PP2.to_json(), "adapters": {**ATTENTION, "trainable_modules": patterns}}
        for name, patterns in {"owner": [owner], "alias": [alias], "both": [owner, alias]}.items()
    }
    results = ranks.run(f"{JOBS}:attempts", 2, {"output_dir": str(tmp_path), "made": made})
    for found in results.values:
        assert "trainable_modules: model.embed_tokens.weight is trained" in found["owner"]
        assert "trainable_modules: lm_head.weight is trained" in found["alias"]
        assert found["both"] == ""


def test_a_stage_without_trained_tensors_is_accepted_if_another_stage_has_some(
    ranks: ForkServer, tmp_path: Path
) -> None:
    job = {"layout": PP2.to_json(), "output_dir": str(tmp_path)}
    job["adapters"] = {"target_modules": None, "trainable_modules": [".*model.norm.*"]}
    assert len(ranks.run(f"{JOBS}:base_of", 2, job).values) == 2


@on_ranks(layout=SINGLE)
def test_a_script_saves_and_loads_adapters_that_are_not_merged(layout: MatrixLayout, tmp_path: Path) -> None:
    first, second = (trainer_of(layout.to_json(), str(tmp_path / name), {"max_steps": 1}) for name in ("a", "b"))
    first.train()
    checkpoint = tmp_path / "checkpoint-1"
    paddleformers_fc.save(checkpoint, first.model, first.optimizer, step=1)
    expected = tensors_of(first.model)
    assert tensors_of(second.model) != expected
    second.train()
    paddleformers_fc.load(checkpoint, second.model, second.optimizer)
    assert tensors_of(second.model) == expected
    paddleformers_fc.open(checkpoint).export(tmp_path / "files")
    second.model.merge()
    for use in (
        lambda: paddleformers_fc.save(tmp_path / "checkpoint-2", second.model),
        lambda: paddleformers_fc.load(checkpoint, second.model),
        lambda: paddleformers_fc.load_open_weights(second.model, tmp_path / "files"),
    ):
        with pytest.raises(OptionError) as refused:
            use()
        assert "is merged into its base; call unmerge()" in refused.value.render()


@pytest.mark.slow
def test_the_digest_of_a_base_does_not_depend_on_the_layout(ranks: ForkServer, tmp_path: Path) -> None:
    found = set()
    for layout in (SINGLE, TP2, PP2):
        job = {"layout": layout.to_json(), "output_dir": str(tmp_path), **ERNIE}
        found.update(ranks.run(f"{JOBS}:base_of", layout.nproc, job).values)
    assert len(found) == 1
