"""``train`` reads settings as PaddleFormers does, and refuses what every rank would refuse before a rank starts."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from paddleformers_fc.cli import main, start_checks, training
from paddleformers_fc.cli.settings import parse_overrides, read_settings, with_overrides
from paddleformers_fc.cli.training import prepare
from paddleformers_fc.errors import FlexError, OptionError, StorageError
from paddleformers_fc.families.declarations import Family
from paddleformers_fc.families.exported import exported_config
from paddleformers_fc.families.registry import own_families, tiny_models
from paddleformers_fc.trainer import stock_keys
from paddleformers_fc.trainer.options import FlexFields
from paddleformers_fc.trainer.stock_keys import StockTable, stock_table
from tests.cli.support import SIZES, claim_local_tier, config, document_of, open_weights, run, save, seal
from tests.execute.simulated import canonical
from tests.harness.on_ranks import run_on_ranks
from tests.harness.processes import python
from verification.forkserver import ForkServer


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        *(("a.yaml", "- 1", ""), ("a.yaml", "", ""), ("a.yaml", "\xff", ""), ("a.yaml", "[" * 600, "")),
        *(("a.json", "{", ""), ("a.json", "[]", ""), ("a.json", '{"a": 1, "a": 2}', ""), ("a.json", '{"a": \xff}', "")),
        *(("a.toml", "a = 1", ""), ("a.yaml", "a: 1\nb: [1\n", 'in "a.yaml", line 2')),
        ("a.yaml", "a: \0", 'in "a.yaml", position 3'),
    ],
)
def test_an_unreadable_file_is_rejected_with_path_and_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(OptionError) as caught:
        read_settings(path)
    assert caught.value.where == str(path)
    assert message in caught.value.render()
    assert "unicode string" not in caught.value.render()


def test_a_duplicate_key_of_a_yaml_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    for text in ("a: 1\nseed: 3\nb: 2\n'seed': 4\n", "a: 1\nb: {c: 1,\n  d: 2,\n\n  d: 3}\n"):
        path.write_text(text)
        with pytest.raises(OptionError) as caught:
            read_settings(path)
        message = caught.value.render()
        assert f"duplicate key {'seed' if 'seed' in text else 'd'}: first" in message
        lines = (2, 4) if "seed" in text else (3, 5)
        assert all(f'in "job.yaml", line {line}, column' in message for line in lines)


def test_a_key_that_replaces_a_merged_one_is_not_a_duplicate(tmp_path: Path) -> None:
    for name in ("a.yml", "a.json"):
        (tmp_path / name).write_text(json.dumps({"max_steps": 3}))
        assert read_settings(tmp_path / name) == {"max_steps": 3}
    path = tmp_path / "job.yaml"
    path.write_text("b: &b {x: 1, y: 1}\na: &a {<<: *b, x: 2}\nc: {<<: *a, y: 3}\nd: [*a, 1, '1']\ne: {1: 1, '1': 2}\n")
    assert read_settings(path) == yaml.safe_load(path.read_text())


def test_numbers_with_an_exponent_are_numbers_in_overrides_as_for_paddleformers() -> None:
    given = {"learning_rate": "1e-5", "weight_decay": "2E3", "min_lr": "1.0e1", "adam_epsilon": "-1e-8"}
    given |= {"run_name": "1e-5x", "max_grad_norm": "1.5", "num_train_epochs": "3", "b": "true", "c": "x=y", "d": ""}
    overrides = [f"{key}={value}" for key, value in given.items()]
    assert parse_overrides(overrides) == OmegaConf.to_container(OmegaConf.from_cli(overrides))
    assert parse_overrides(["a=1", "b=true", "c=x=y", "d="]) == {"a": 1, "b": True, "c": "x=y", "d": None}


def test_overrides_of_mappings_are_merged_as_for_paddleformers() -> None:
    settings = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    for texts in (["a.c.d=4"], ["a={b: 5}", "a.f=6"], ["a={}"], ["a=7"], ["e.g=8", "e.h=9"], ["i.j=10"], ["a.c=null"]):
        merged = with_overrides(settings, parse_overrides(texts))
        assert merged == OmegaConf.to_container(OmegaConf.merge(settings, OmegaConf.from_cli(texts))), texts


RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("gpu_*.yaml"))
DEGREES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "sharding_parallel_size": "sharding",
}


def test_there_are_recipes_for_gpus() -> None:
    assert [path.stem for path in RECIPES if "lora" not in path.stem] == ["gpu_dpo", "gpu_pt", "gpu_sft"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_for_gpus_fits(recipe: Path, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "local_device", lambda: "gpu:0")
    values: dict[str, Any] = yaml.safe_load(recipe.read_text())
    (tmp_path / "data.jsonl").touch()
    here = [f"{key}={tmp_path / 'data.jsonl'}" for key in ("train_dataset_path", "eval_dataset_path")]
    found = document_of("train", recipe, *here, f"output_dir={tmp_path / 'out'}", "--dry-run")
    assert found["ranks"] is None
    degrees = ",".join(f"{axis}={values[key]}" for key, axis in DEGREES.items())
    assert run("plan", stored, "--to", f"{degrees},split=true").code == 0


FULL = {"fine_tuning": "full", "stage": "PT", "device": "cpu", "continue_training": False}
READS = {**FULL, "continue_training": True}
TINY = {
    "model_type": "llama",
    "tie_word_embeddings": False,
    "fuse_rms_norm": False,
    "num_hidden_layers": 10,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE = {"model_type": "ernie4_5_moe", "moe_intermediate_size": 16, "moe_k": 1}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root of the repository, and a machine without an accelerator."""
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(training, "local_device", lambda: "cpu")


def fault(directory: Path, overrides: str = "", nproc: int | None = None, **keys: Any) -> str:
    """The error about these keys and overrides, which a semicolon separates; empty if they are accepted."""
    texts = [text.replace("HERE", str(directory)) for text in overrides.split(";") if text]
    try:
        prepare(config(directory, **keys), nproc, texts)
    except FlexError as error:
        return error.render()
    return ""


def model_of(directory: Path, **changes: Any) -> str:
    """A directory with the configuration of a tiny model, and an empty file of weights."""
    directory.mkdir(exist_ok=True)
    keys = {key: value for key, value in {**TINY, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(keys))
    (directory / "model.safetensors").touch()
    return str(directory)


def test_a_local_tier_of_another_run_is_refused(tmp_path: Path) -> None:
    local = tmp_path / "local"
    keys = {"flex_local_dir": str(local), "flex_local_steps": 5}
    assert "another run" not in fault(tmp_path, **keys)
    claim_local_tier(tmp_path / "other", local)
    found = fault(tmp_path, **keys)
    assert "flex_local_dir is the local tier of another run" in found
    assert f"output_dir: {tmp_path / 'other'}" in found


BEST = "load_best_model_at_end=true;evaluation_strategy=steps;eval_steps=2"
REFUSED = [
    ("flex_local_dir=/proc/run;flex_local_steps=5", "/proc"),
    ("flex_stream.steps=2", "flex_stream: {'steps': 2} is not a mapping such as"),
    ("flex_verify=twice", "flex_verify: 'twice'"),
    ("output_dir=", "output_dir is missing"),
    ("output_dir=no", "output_dir: false is not text; a name that YAML reads as something else needs quotes"),
    ("output_dir='';flex_checkpoint=false", "path of a directory is empty"),
    ("custom_register_path=nowhere.py", "custom_register_path: nowhere.py does not exist"),
    ("max_steps;=3;save_steps=1", "- 'max_steps'\n  - '=3'\n"),
    ("max_steps=[3", 'in "max_steps", line 1'),
    ("flex_verfy=full", "flex_verfy: did you mean flex_verify?"),
    ("FLEX_VERIFY=full", "FLEX_VERIFY: did you mean flex_verify?"),
    ("save_total_limt=2", "save_total_limt: did you mean save_total_limit?"),
    *(
        (f"{key}_parallel_degree=2", f"{key}_parallel_degree: did you mean {meant}_parallel_size?")
        for key, meant in (
            *((kind, f"{kind}_model") for kind in ("tensor", "pipeline", "expert")),
            *(("sharding", "sharding"), ("virtual_pipeline", "virtual_pipeline_model")),
        )
    ),
    ("stage=ernie_pretrain", "stage has its own loading and saving"),
    ("sharding=fsdp", "flex_checkpoint: true and sharding: fsdp: fully sharded parameters are not supported yet"),
    ("use_flex_async_save=true;flex_async_save=false", "use_flex_async_save: true and flex_async_save: false"),
    (f"model_name_or_path=/{'long' * 100}", "does not exist"),
    ("model_name_or_path=./nowhere", "model_name_or_path: ./nowhere does not exist"),
    ("model_name_or_path=recipe", "model_name_or_path: recipe does not exist in .; did you mean recipes?"),
    ("model_name_or_path=./recipe", "model_name_or_path: ./recipe does not exist in .; did you mean recipes?"),
    ("model_name_or_path=runs/nothing;output_dir=./runs/first", "- model_name_or_path: runs/nothing"),
    ("train_dataset_path=/dev/null,/nowhere/a.jsonl#7", "- train_dataset_path: /nowhere/a.jsonl does not exist"),
    ("train_dataset_path=/dev/null,/nowhere/a;train_dataset_prob=0", "/nowhere/a does not exist"),
    ("max_steps=abc;sharding_parallel_size=1.5", "- max_steps: 'abc' is not a whole number\n  - sharding_p"),
    ("max_steps=null;learning_rate='1e-5'", "- max_steps: null is not a whole number\n  - learning_rate: '1e-5' is"),
    ("save_steps='3';do_eval='no'", "- save_steps: '3' is not a whole number\n  - do_eval: 'no' is not true or false"),
    ("run_name=on", "- run_name: true is not text"),
    ("stage=pt;compute_type=fp32", "dsv3_pretrain, ernie_pretrain, auto-parallel; did you mean PT?\n  - compute_"),
    ("fine_tuning=fulll;flex_checkpoint=false", "- fine_tuning: 'fulll' is none of LoRA, full; did you mean full?"),
    ("save_strategy=no", "- save_strategy: false is none of no, steps, epoch"),
    ("sharding=[stage1]", "- sharding: ['stage1'] is none of stage1"),
    ("sharding=null", "- sharding: null is none of stage1, stage2, stage3, offload"),
    ("sharding=stage1 stage5", "- sharding: 'stage1 stage5' is none of"),
    ("sharding=stage1 stage2", "- sharding: stage1 stage2 names 2 stages instead of one"),
    ("save_steps=-1;save_strategy=steps", "save_steps: -1 with save_strategy: steps"),
    ("lora_rank=0;lora=true", "- lora_rank: 0 is less than 1"),
    ("gradient_accumulation_steps=0;per_device_train_batch_size=0", "- per_device_train_batch_size: 0 is less than 1"),
    ("logging_steps=0", "- logging_steps: 0 with logging_strategy: steps"),
    ("do_eval=true", "- do_eval: true with evaluation_strategy: no"),
    ("load_best_model_at_end=true", "- load_best_model_at_end: true with evaluation_strategy: no and save"),
    (f"{BEST};save_steps=3", "true with save_steps: 3, which is not a multiple of eval_steps: 2"),
    ("max_steps=-1;num_train_epochs=0", "- max_steps: -1 and num_train_epochs: 0"),
    ("sharding='';sharding_parallel_size=2", '- sharding_parallel_size: 2 with sharding: "": these ranks would'),
    ("resume_from_checkpoint=true", "out has no finished checkpoint to resume from."),
]

ACCEPTED = [
    *("save_strategy='no';save_steps=0", "save_steps=0;save_last_step=true", "save_steps=0;flex_checkpoint=false"),
    *("lora_rank=0;fine_tuning=full", "logging_steps=0;logging_strategy=epoch", "max_steps=0;num_train_epochs=1"),
    f"{BEST};save_steps=4",
    "load_best_model_at_end=true;evaluation_strategy=epoch;save_strategy=epoch;eval_steps=3",
    *("sharding=stage1", "sharding=true", "sharding=[]", "use_flex_async_save=true", "resume_from_checkpoint=false"),
    "use_flex_async_save=true;flex_async_save=true",
    *("model_name_or_path=owner/name;output_dir=HERE/runs", "fine_tuning=LORA", "bf16='True'", "fp8=false"),
    *("train_dataset_path=/dev/null, /no;train_dataset_prob=1.0, 0", "eval_dataset_path=/no;eval_dataset_prob=0"),
    *("train_dataset_path=/dev/null#100, /dev/null", "report_to=null", "max_estimate_samples=1.0e5"),
]


@pytest.mark.parametrize(("overrides", "text"), [*REFUSED, *((overrides, "") for overrides in ACCEPTED)])
def test_settings_that_cannot_work_are_refused_and_no_others(tmp_path: Path, overrides: str, text: str) -> None:
    found = fault(tmp_path, overrides)
    assert text in found if text else found == ""
    assert not (tmp_path / "out").exists() or not text


def test_all_faults_of_a_check_are_listed_with_one_advice(tmp_path: Path) -> None:
    outcome = run("train", config(tmp_path, train_dataset_path="./no", logging_steps=0, do_eval=True), "--dry-run")
    assert (outcome.code, outcome.err.count("\n  - "), outcome.err.count("next:")) == (2, 3, 1)


def test_an_unknown_key_is_named_with_its_file_and_line(tmp_path: Path) -> None:
    path, other = config(tmp_path, save_total_limt=2), tmp_path / "job.json"
    other.write_text(json.dumps({"output_dir": str(tmp_path), "flex_verfy": "full"}))
    for file, line in ((path, f"{path}, line 3: save_total_limt: did you"), (other, f"{other}: flex_verfy: did you")):
        with pytest.raises(OptionError, match=re.escape(line)):
            prepare(file, 1, [])


def test_keys_and_values_are_checked_before_paddle_is_imported(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from paddleformers_fc.cli.training import prepare
        try:
            prepare(Path(sys.argv[1]), 2, ["max_steps=a"])
        except Exception as error:
            print(type(error).__name__, "paddle" in sys.modules)
    """
    assert python("-c", code, config(tmp_path)).stdout == "OptionError False\n"


def keys_and_words(output_dir: Path) -> tuple[list[str], dict[str, list[str]]]:
    """Every key of PaddleFormers' command line, and the words of those that it converts to members of enumerations."""
    from paddleformers.cli.hparams import parser
    from paddleformers.trainer import TrainingArguments
    from paddleformers.trainer.trainer_utils import ShardingOption

    arguments = TrainingArguments(output_dir=str(output_dir), device="cpu", amp_master_grad=False)
    kinds = {key: type(value) for key, value in vars(arguments).items() if isinstance(value, Enum)}
    # One process has no sharding.
    words = {key: [one.value for one in kind] for key, kind in {**kinds, "sharding": ShardingOption}.items()}
    return [field.name for kind in parser._TRAIN_ARGS for field in dataclasses.fields(kind)], words


def test_the_table_has_every_key_of_paddleformers_with_its_words(ranks: ForkServer, tmp_path: Path) -> None:
    known = stock_table().keys
    ((names, found),) = run_on_ranks(ranks, 1, keys_and_words, output_dir=tmp_path)
    assert set(names) == set(known)
    assert {key: list(known[key].words) for key in found} == found


def test_a_table_is_made_once_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def make(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        made.append(command)
        return subprocess.CompletedProcess(command, 0, stdout=b'{"keys":{"a":{"kind":"int"}}}')

    monkeypatch.setattr(subprocess, "run", make)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    table = stock_table.__wrapped__
    assert list(table().keys) == list(table().keys) == ["a"]
    assert made == [[sys.executable, "-m", stock_keys.__name__]]
    (cached,) = (tmp_path / "cache/paddleformers_fc").iterdir()
    cached.write_bytes(b"{")
    assert (list(table().keys), len(made)) == (["a"], 2)
    monkeypatch.setattr(stock_keys, "_SOURCES", ("trainer/argparser.py",))
    assert (list(table().keys), len(made)) == (["a"], 3)


def test_without_a_table_only_keys_of_this_package_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "stock_table", StockTable)
    model = model_of(tmp_path / "model")
    assert fault(tmp_path, "another=1;max_steps=a;tensor_model_parallel_size=3", 2, model_name_or_path=model) == ""
    assert "flex_verfy" in fault(tmp_path, "flex_verfy=full")


def test_a_registration_of_the_user_may_add_keys_and_words_and_replace_the_model(tmp_path: Path) -> None:
    (tmp_path / "own.py").touch()
    own = {**FULL, "stage": "mine", "custom_register_path": str(tmp_path / "own.py")}
    model = model_of(tmp_path / "model", num_attention_heads=3)
    added = "new_key=1;another.one=2;tensor_model_parallel_size=2"
    assert fault(tmp_path, added, 2, model_name_or_path=model, **own) == ""
    for override in ("flex_verfy=full", "max_steps=a"):
        assert override.partition("=")[0] in fault(tmp_path, override, **own)


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A directory that this process may not look into, also where the tests run as root."""
    directory, user = tmp_path / "closed", os.geteuid()
    directory.mkdir(0)
    if user == 0:
        os.seteuid(65534)
    yield directory
    os.seteuid(user)
    directory.chmod(0o700)


def test_a_path_of_another_user_is_refused_with_the_next_step(closed: Path) -> None:
    path = str(closed / "file")
    for look in (main._named, lambda path: [*start_checks._missing_paths({"train_dataset_path": path})]):
        with pytest.raises(StorageError) as caught:
            look(path)
        assert caught.value.what == f"The operating system refused to access {path}: Permission denied."
        assert caught.value.next_step == "Give this user permission for this path, or choose another path."


def test_the_checkpoint_to_resume_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, other = Path(model_of(tmp_path / "weights")), tmp_path / "all/runs/one/checkpoint-3"
    assert "contains open weights" in fault(tmp_path, f"resume_from_checkpoint={weights}")
    assert f"{weights}x does not exist" in fault(tmp_path, f"resume_from_checkpoint={weights}x")
    named = f"resume_from_checkpoint={save(other, canonical())}"
    inside = f"  next: Name a checkpoint inside it, such as {other}."
    assert inside in fault(tmp_path, f"resume_from_checkpoint={tmp_path / 'all'}")
    assert fault(tmp_path, named) == ""
    for change in (lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink):
        change(other / "config.json")
        assert "config.json" in fault(tmp_path, named)
    assert fault(tmp_path, f"{named};flex_verify=off") == ""
    for name, value in (("NNODES", "2"), ("RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    assert fault(tmp_path, named) == ""  # Other nodes may see the files.
    assert fault(tmp_path, "resume_from_checkpoint=true") == ""


def test_no_new_run_is_suggested_next_to_damaged_checkpoints(tmp_path: Path) -> None:
    config_of_model = save(tmp_path / "out/checkpoint-3", canonical()) / "config.json"
    config_of_model.write_bytes(config_of_model.read_bytes()[:-1])
    found = fault(tmp_path, "resume_from_checkpoint=true")
    assert "- checkpoint-3: checkpoint-3 is damaged: 1 fault found: config.json is truncated" in found
    assert f"paddleformers-fc doctor {tmp_path / 'out'}, or" in found
    assert "set another output_dir" in found
    assert "from the beginning" not in found


def test_a_model_that_is_not_that_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    stored = {**TINY, **SIZES, "rope_theta": 10000.0, "sliding_window": None}
    checkpoint = save(tmp_path / "out/checkpoint-3", canonical(), config=stored)
    named = f"resume_from_checkpoint={checkpoint};output_dir={tmp_path / 'other'}"
    for changes, allowed, text in (
        ({}, "", ""),
        ({"rope_theta": None, "sliding_window": 8, "max_position_embeddings": 7}, "", ""),
        ({"vocab_size": 64}, "vocab_size", "vocab_size  32     64"),
        ({"num_hidden_layers": 4}, "", "its tensors do not fit this one."),
        ({"rope_theta": 5000.0}, "", "flex_allow_config_changes: [rope_theta]"),
        ({"rope_theta": 5000.0}, "rope_theta", ""),
        ({"model_type": "phi3"}, "", "model_type  ernie4_5  phi3"),
        ({"model_type": "phi3", "num_hidden_layers": 4}, "", "another model: ernie4_5, not phi3."),
    ):
        model = model_of(tmp_path / "model", **{**stored, **changes})
        may = f"flex_allow_config_changes=[{allowed}]"
        for overrides in (named, "do_train=true", "resume_from_checkpoint=true"):
            found = fault(tmp_path, f"{overrides};{may}", model_name_or_path=model, **FULL)
            assert text in found if text else found == "", (changes, overrides)
            assert ("to start a new run" in found) == bool(text and overrides != named)
        assert fault(tmp_path, f"{may};do_train=true;overwrite_output_dir=true", model_name_or_path=model, **FULL) == ""


def test_adapters_are_not_resumed_as_a_complete_model_nor_the_reverse(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "out/checkpoint-3", canonical())
    named = f"do_train=true;resume_from_checkpoint={checkpoint};output_dir=HERE/other"
    complete = "The checkpoint contains a complete model, and this run trains adapters (LoRA)."
    adapters = "The checkpoint contains adapters (LoRA), and this run trains a complete model."
    assert fault(tmp_path, named, **FULL) == ""
    assert complete in fault(tmp_path, f"{named};fine_tuning=LORA", **FULL)
    assert fault(tmp_path, f"{named};fine_tuning=LORA;do_train=false", **FULL) == ""
    assert fault(tmp_path, f"{named};fine_tuning=LORA;overwrite_output_dir=true", **FULL).startswith(complete)
    mapping = json.loads((checkpoint / "mapping.json").read_text())
    mapping["model"]["adapters"] = {"r": 4, "alpha": 8.0}
    (checkpoint / "mapping.json").write_text(json.dumps(mapping))
    seal(checkpoint)
    assert fault(tmp_path, f"{named};fine_tuning=LoRA", **FULL) == ""
    for overrides in (named, "do_train=true"):
        found = fault(tmp_path, overrides, **FULL)
        assert found.startswith(adapters)
        assert ("to start a new run" in found) == (overrides != named)


@pytest.mark.sampled
@pytest.mark.parametrize("family", own_families(), ids=lambda family: family.name)
def test_the_model_of_a_checkpoint_of_any_family_is_recognised(tmp_path: Path, family: Family) -> None:
    (model,) = tiny_models(family)[:1]
    (checkpoint := tmp_path / "checkpoint").mkdir()
    saved = exported_config(family, model.config, model, model.config)
    (checkpoint / "config.json").write_text(json.dumps(saved))
    values = {**vars(FlexFields()), "model_name_or_path": model_of(tmp_path / "model", **model.config)}
    start_checks._check_same_model({}, {**values, "resume_from_checkpoint": str(checkpoint)}, checkpoint)


STOCK = {"flex_checkpoint": False, "do_train": True, "stage": "PT", "device": "cpu"}


def test_a_flex_checkpoint_is_not_resumed_by_paddleformers_alone(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "out/checkpoint-10", canonical())
    (tmp_path / "out/checkpoint-9").mkdir()
    named = f"resume_from_checkpoint={checkpoint};output_dir=HERE/other"
    for overrides in ("", "resume_from_checkpoint=true", "stage=DPO", named):
        error = fault(tmp_path, overrides, **STOCK)
        assert error.startswith(f"{checkpoint} is a flex checkpoint, and without flex_checkpoint: true "), overrides
        assert "  next: Set flex_checkpoint: true." in error
    (tmp_path / "stock/checkpoint-11").mkdir(parents=True)
    (tmp_path / "stock/checkpoint-3").symlink_to(checkpoint)
    for overrides in (
        *("flex_checkpoint=true", "overwrite_output_dir=true", "resume_from_checkpoint=false", "do_train=false"),
        *("output_dir=HERE/other", "output_dir=HERE/stock", f"stage=DPO;{named}"),
    ):
        assert fault(tmp_path, overrides, **STOCK) == "", overrides


def test_a_configuration_is_needed_in_the_directory_of_a_model(tmp_path: Path) -> None:
    model = Path(model_of(tmp_path / "model"))
    (model / "config.json").unlink()
    for keys in (FULL, {**FULL, "continue_training": False, "flex_checkpoint": False}):
        assert f"{model} has no config.json." in fault(tmp_path, model_name_or_path=str(model), **keys)


def test_weights_are_needed_unless_the_run_starts_from_scratch(tmp_path: Path) -> None:
    model = Path(model_of(tmp_path / "model"))
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "pytorch_model.bin" in fault(tmp_path, model_name_or_path=str(model), **READS)
    (model / "pytorch_model.bin").unlink()
    for stage in ("stage=PT", "stage=VL-SFT"):
        assert str(model) in fault(tmp_path, stage, model_name_or_path=str(model), **READS)
        assert fault(tmp_path, stage, model_name_or_path=str(model), **FULL) == ""


def test_weights_that_do_not_fit_their_configuration_are_refused(tmp_path: Path) -> None:
    keys = {**SIZES, "fuse_rms_norm": False}
    model = open_weights(tmp_path / "model", canonical(), keys)
    named = {"model_name_or_path": str(model)}
    resumed = f"resume_from_checkpoint={save(tmp_path / 'other/checkpoint-3', canonical(), config=SIZES)}"
    assert fault(tmp_path, **named, **READS) == ""
    for changes, text in (
        ({"num_hidden_layers": 1}, "UNEXPECTED: stored, but read by no rank (9)"),
        ({"num_hidden_layers": 3}, "MISSING: in the model, but not stored (9)"),
        ({"intermediate_size": 48}, "model.layers.{0...1}.mlp.down_proj.weight: stored [16, 24], expected [16, 48]"),
    ):
        (model / "config.json").write_text(json.dumps({**keys, **changes}))
        assert text in fault(tmp_path, **named, **READS)
        assert fault(tmp_path, **named, **FULL) == ""
        assert fault(tmp_path, "flex_checkpoint=false", **named, **READS) == ""
    (model / "config.json").write_text(json.dumps(keys))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert f"{weights} is truncated." in fault(tmp_path, **named, **READS)
    assert fault(tmp_path, resumed, **named, **READS) == ""


def test_weights_that_fit_with_a_setting_and_large_models_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**SIZES, "fuse_rms_norm": False}
    model = open_weights(tmp_path / "model", canonical(), {**keys, "num_hidden_layers": 3})
    assert "MISSING" in fault(tmp_path, model_name_or_path=str(model), **READS)
    assert fault(tmp_path, "num_hidden_layers=2", model_name_or_path=str(model), **READS) == ""
    monkeypatch.setattr(start_checks, "_MOST_PLANNED", 20)
    assert fault(tmp_path, model_name_or_path=str(model), **READS) == ""


def test_a_class_that_needs_paddlefleet_is_refused_without_it(tmp_path: Path) -> None:
    assert "qwen3" in stock_table().without_fleet  # Its package is not installed here.
    error = fault(tmp_path, model_name_or_path=model_of(tmp_path / "model", model_type="qwen3"), **FULL)
    assert "PaddleFormers' class of qwen3 needs PaddleFleet" in error


def layout(stages: int, virtual: int = 1, passes: int = 1, **keys: Any) -> dict[str, Any]:
    degrees = {"pipeline_model_parallel_size": stages, "virtual_pipeline_model_parallel_size": virtual}
    return {**FULL, **degrees, "gradient_accumulation_steps": passes, **keys}


PASSES = "virtual_pipeline_model_parallel_size: 2 needs gradient_accumulation_steps: 4, or 8 or more, instead of "
EXPERTS = {**FULL, "expert_model_parallel_size": 2, "use_expert_parallel": True, "model_name_or_path": "owner/name"}
DPO = {"stage": "DPO", "sequence_parallel": True}
TP2 = {"tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("ranks", "keys", "changes", "text"),
    [
        (2, {**EXPERTS, "tensor_model_parallel_size": 4}, {}, "2 ranks cannot be divided into groups of 4"),
        (4, {"sharding_parallel_size": 3}, {}, "sharding_parallel_size: 3: 4 ranks cannot be divided into groups of 3"),
        (3, {"tensor_model_parallel_size": 3}, {}, "vocab_size=64 is not divisible by tp=3"),
        (4, layout(2, stage="VL-DPO"), {}, "clear_every_step_cache: not true, which stage: VL-DPO needs in a pip"),
        (4, layout(2, **DPO), {}, "- partial_send_recv: not false, which stage: DPO needs with sequence_parallel"),
        (4, layout(2, 2, 4), {}, "virtual_pipeline_model_parallel_size: 2 needs more than 2 pipeline stages"),
        (4, layout(4, 2, 3), {}, f"{PASSES}3"),
        (4, layout(4, 2, 2, best_unbalanced_scheduler=True), {}, f"{PASSES}2"),
        (4, layout(4, 2, 8, pp_seg_method="uniform"), {}, "needs pp_seg_method: layer:DecoderLayer|EmptyLayer instead"),
        (4, layout(4, 2, 8), {}, "10 layers, empty ones included, are not divisible by pp x vpp = 4 x 2 = 8"),
        (3, EXPERTS, {}, "expert_model_parallel_size: 2 on 3 ranks: 3 ranks in 1 pipeline stage are not a multiple"),
        (2, {**EXPERTS, "use_expert_parallel": False}, {}, "2 on 2 ranks: use_expert_parallel is not true"),
        (2, {**EXPERTS, "sharding": ""}, {}, "2 on 2 ranks: data parallel degree 2: experts need sharding instead"),
        (1, {}, {"fuse_rms_norm": True}, "fuse_rms_norm"),
        (1, {}, {"fuse_rms_norm": None}, "fuse_rms_norm"),
        (2, {}, MOE, "it is read from"),
        (2, TP2, {**MOE, "num_experts": 4, "moe_num_experts": 8}, "num_experts: 4"),
        (2, TP2, {"hidden_size": None}, "it is read from hidden_size"),
        (4, {**TP2, "pipeline_model_parallel_size": -1, "sharding_parallel_size": 2}, {}, ""),
        (6, {"pipeline_model_parallel_size": 6}, {}, ""),
        (6, {}, {"model_type": "unknown"}, ""),
        (6, {"flex_checkpoint": False}, {"model_type": "unknown"}, ""),
        (3, {"tensor_model_parallel_size": 3, "flex_checkpoint": False}, {}, ""),
        (3, {"tensor_model_parallel_size": 3, "stage": "dsv3_pretrain"}, {}, ""),
        (3, {"tensor_model_parallel_size": 3, "model_name_or_path": "owner/name"}, {}, ""),
        (3, {"tensor_model_parallel_size": 3, "num_attention_heads": 6}, {}, ""),
        (6, {**EXPERTS, "expert_model_parallel_size": 3}, {}, ""),
        (4, layout(2, **DPO, clear_every_step_cache=True, partial_send_recv=False), {}, ""),
        (4, layout(1, 2, **DPO), {}, ""),
        (4, layout(4, 2, 4), {"num_hidden_layers": 8}, ""),
        (4, layout(4, 2, 7, best_unbalanced_scheduler=True), {"num_hidden_layers": 8}, ""),
        (4, layout(4, 2, 8, pp_seg_method="layer:DecoderLayer"), {}, ""),
        (4, {"fine_tuning": "LoRA"}, {}, ""),
        (4, {"hidden_size": 32}, {"hidden_size": None}, ""),
        (4, {}, {**MOE, "moe_num_experts": 4}, ""),
    ],
)
def test_a_model_and_a_layout_are_refused_if_every_rank_would_refuse_them(
    tmp_path: Path, ranks: int, keys: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    model = {"model_name_or_path": model_of(tmp_path / "model", **changes)}
    found = fault(tmp_path, nproc=ranks, **{**FULL, **model, **keys})
    assert text in found if text else found == ""
