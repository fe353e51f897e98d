"""The options: defaults, ranges, and what is refused beside ``flex_checkpoint: true``. No Paddle is needed here."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from paddleformers_fc.errors import MappingError, OptionError
from paddleformers_fc.trainer.conflicts import CONFLICTS, WITHOUT_EFFECT
from paddleformers_fc.trainer.options import REMOVED, FlexFields, check_options, parse_size, shard_bytes, without_effect

PUSH = {"steps": 10, "to": "my_engine.push"}
OUT_OF_RANGE: dict[str, list[Any]] = {
    "flex_checkpoint": ["yes"],
    "flex_verify": ["everything", True, 0],
    "flex_check_replicas": [True],
    "flex_threads": [0, 257, True, 2.5],
    "flex_keep_every": [-1, True],
    "flex_local_steps": [-1],
    "flex_local_dir": ["", None],
    "flex_read": ["broadcast", 1],
    "flex_tied": ["middle", False],
    "flex_timeout": [0, "1h", 604801],
    "flex_max_shard_size": ["0GB", "999kB", "-5GB", "5 apples", 5],
    "flex_unknown_versions": ["off", True],
    "flex_ema_decay": [1.0, -0.1, "0.9", True],
    "flex_ema_interval": [0],
    "flex_ema_evaluate": ["yes"],
    "flex_stream": [
        *(None, "my_engine.push", {"steps": 10}, {**PUSH, "ranks": "all"}),
        *({**PUSH, "steps": 0}, {**PUSH, "steps": True}, {**PUSH, "to": "push"}, {**PUSH, "to": "my_engine:push"}),
    ],
    "flex_save_on_signal": ["SIGKILL", True, 15],
}
ALIASES_OUT_OF_RANGE: dict[str, Any] = {"zcc_save_ema_coef": 1.0, "zcc_ema_interval": 0}
DEVELOPMENT_KEYS: dict[str, Any] = {
    "sharding": "fsdp",
    "flex_ckpt_load_num_workers": 8,
    "sharding_machine_balanced_2d_partition": True,
    "use_reshard_bucketed_broadcast": True,
}
"""Keys and values of PaddleFormers' development branch that would pass by this package."""
CONTRADICTIONS: dict[str, Any] = {
    **DEVELOPMENT_KEYS,
    "ref_model_update_steps": 4,
    "zcc_ema_loss_threshold": 2.5,
    "save_checkpoint_format": "unified_checkpoint",
    "load_checkpoint_format": "sharding_io",
    "ckpt_quant_stage": "O1",
    "sep_parallel_size": 2,
    "context_parallel_size": "2",
    "flash_device_save_steps": 10,
    "sharding": "stage3 offload",
    "optim": "muon",
    **dict.fromkeys(("unified_checkpoint", "save_sharded_model", "load_sharded_model", "load_from_hf"), True),
    **dict.fromkeys(("enable_zero_cost_checkpoint", "use_async_save", "replicate_saved_into_local"), True),
    **dict.fromkeys(("auto_parallel_resume_form_hybrid_parallel", "pdc_download_ckpt"), True),
}
"""For every option that is refused, a value that is."""
SEMI_AUTOMATIC: dict[str, Any] = {
    "flex_async_save": True,
    "use_flex_async_save": True,
    "flex_ema_decay": 0.9,
    "zcc_save_ema_coef": 0.9,
    "tensor_model_parallel_size": 2,
    "bf16": True,
    "sharding": "stage1",
}
"""Values that are refused beside ``enable_auto_parallel: true`` alone."""
ACCEPTED: dict[str, list[Any]] = {
    "flex_verify": ["off", False, "full"],
    "flex_check_replicas": [False],  # YAML parses an unquoted off as false.
    "flex_threads": [1, 256],
    "flex_keep_every": [0, 1000],
    "flex_read": ["once"],
    "flex_tied": ["last"],
    "flex_timeout": [1, 604800],
    "flex_max_shard_size": ["1MB", "4.5GiB"],
    "flex_unknown_versions": ["warn"],
    "flex_stream": [{}, {**PUSH, "steps": 1}],
    "flex_ema_decay": [0, 0.9999],
    "zcc_save_ema_coef": [0, 0.99],
    "zcc_ema_interval": [5],
    "sep_parallel_size": [1],
    "context_parallel_size": [-1],
    "save_checkpoint_format": ["flex_checkpoint"],
    "load_checkpoint_format": ["flex_checkpoint"],
    "ckpt_quant_stage": ["O0"],
    "sharded_model_from_ema": [True],
    "aoa_config": [{"aoa_statements": ["a -> b"]}],
    "sharding": ["stage1"],
    "optim": ["adamw"],
    "flash_device_save_steps": [0],
    "ref_model_update_steps": [-1],
    "zcc_ema_loss_threshold": [None],
    "flex_ckpt_load_num_workers": [1],
    "sharding_machine_balanced_2d_partition": [False],
    "use_reshard_bucketed_broadcast": [False],
    # These have no effect and are accepted.
    "flex_ckpt_comm_method": ["broadcast"],
}


def options(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(FlexFields()), **changed})


def faults(**changed: Any) -> list[str]:
    """The evidence of the error about options; empty if they are accepted."""
    try:
        check_options(options(**changed))
    except OptionError as error:
        return list(error.evidence)
    return []


def test_every_help_line_ends_with_the_default() -> None:
    for one in dataclasses.fields(FlexFields):
        default = getattr(FlexFields(), one.name)
        spelled = str(default).lower() if isinstance(default, bool) else str(default or "none")
        assert one.metadata["help"].endswith(f" Default: {spelled}."), one.name


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_by_name(name: str) -> None:
    for value in OUT_OF_RANGE[name]:
        (line,) = faults(**{name: value})
        assert line.startswith(f"{name}: {value!r}")


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_value_at_the_end_of_its_range_or_without_another_meaning_is_accepted(name: str) -> None:
    for value in ACCEPTED[name]:
        assert faults(flex_checkpoint=True, **{name: value}) == []


def test_all_faults_are_named_at_once() -> None:
    lines = faults(**{name: values[0] for name, values in OUT_OF_RANGE.items()})
    assert {line.partition(":")[0] for line in lines} == set(OUT_OF_RANGE)
    assert len(faults(flex_checkpoint=True, **CONTRADICTIONS)) == len(CONTRADICTIONS)


@pytest.mark.parametrize(
    ("table", "begins", "beside"),
    [
        (ALIASES_OUT_OF_RANGE, "{}: {!r} is ", {}),
        (CONTRADICTIONS, "flex_checkpoint: true and {}: ", {}),
        (SEMI_AUTOMATIC, "flex_checkpoint: true and {}: ", {"enable_auto_parallel": True}),
    ],
    ids=["out of the range of the same key here", "contradictions", "the semi-automatic mode"],
)
def test_conflicting_keys_of_paddleformers_are_rejected_by_name_only_with_flex_checkpoint(
    table: dict[str, Any], begins: str, beside: dict[str, Any]
) -> None:
    for key, value in table.items():
        (line,) = faults(flex_checkpoint=True, **beside, **{key: value})
        assert line.startswith(begins.format(key, value))
        assert faults(flex_checkpoint=bool(beside), **{key: value}) == []


def test_an_option_that_is_refused_is_tried_here_and_is_none_without_effect() -> None:
    assert {one.key for one in CONFLICTS} == set(CONTRADICTIONS)
    assert not {one.key for one in CONFLICTS} & {one.key for one in WITHOUT_EFFECT}
    (line,) = without_effect(options(flex_checkpoint=True, flex_ckpt_comm_method="broadcast", load_via_cpu=True))
    assert "flex_checkpoint: true and flex_ckpt_comm_method: broadcast" in line


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"flex_local_dir": "/dev/shm/run"}, "flex_local_dir: /dev/shm/run needs flex_local_steps of at least 1"),
        ({"flex_local_steps": 5}, "flex_local_steps: 5 needs flex_local_dir"),
        ({"flex_local_dir": "run", "flex_local_steps": 5}, "flex_local_dir: run"),
        ({"flex_local_dir": "run/x/../local", "flex_local_steps": 5}, "output_dir: run"),
        ({"flex_local_dir": ".", "flex_local_steps": 5}, "flex_local_dir: ."),
        ({"flex_local_dir": "~", "flex_local_steps": 5}, "output_dir: run"),
        ({"flex_local_dir": "run-local", "flex_local_steps": 5}, ""),
    ],
    ids=["no steps", "no directory", "the same", "inside", "around", "around, at home", "beside"],
)
def test_a_local_tier_that_is_half_given_or_not_apart_is_refused(
    given: dict[str, Any], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = faults(flex_checkpoint=True, output_dir="run", **given)
    assert any(one.startswith(line) for one in found) if line else not found


def test_a_local_tier_is_no_url(tmp_path: Path) -> None:
    given = {"output_dir": str(tmp_path), "flex_local_steps": 5, "flex_local_dir": "s3://bucket/run"}
    with pytest.raises(OptionError, match="A local checkpoint cannot be written to s3://bucket/run"):
        check_options(options(flex_checkpoint=True, **given))


@pytest.mark.parametrize("given", ["foo", {"statements": []}, {"aoa_statements": "a -> b"}])
def test_statements_that_are_none_are_refused_before_anything_starts(given: Any) -> None:
    with pytest.raises(MappingError, match="aoa_config"):
        check_options(options(flex_checkpoint=True, aoa_config=given))
    assert faults(flex_checkpoint=False, aoa_config=given) == []


@dataclasses.dataclass
class TheirFields(FlexFields):
    """Arguments with PaddleFormers' keys of a moving average."""

    zcc_save_ema_coef: float | None = None
    zcc_ema_interval: int = 1


@pytest.mark.parametrize(
    ("given", "decay", "interval"),
    [
        ({"zcc_save_ema_coef": 0.99, "zcc_ema_interval": 5}, 0.99, 5),
        ({"flex_ema_decay": 0.99, "zcc_ema_interval": 5}, 0.99, 5),
        ({"flex_ema_decay": 0.99, "zcc_save_ema_coef": 0.99}, 0.99, 1),
        ({"zcc_save_ema_coef": 0}, 0.0, 1),
        ({"zcc_save_ema_coef": None, "flex_ema_decay": 0.5, "flex_ema_interval": 3}, 0.5, 3),
    ],
)
def test_keys_of_paddleformers_mean_the_same_and_leave_its_own_average_off(
    given: dict[str, Any], decay: float, interval: int
) -> None:
    made = TheirFields(flex_checkpoint=True, use_flex_async_save=True, **given)
    assert (made.flex_ema_decay, made.flex_ema_interval, made.flex_async_save) == (decay, interval, True)
    assert (made.zcc_save_ema_coef, made.zcc_ema_interval, made.use_flex_async_save) == (None, 1, False)
    assert dataclasses.asdict(TheirFields(**dataclasses.asdict(made))) == dataclasses.asdict(made)
    untouched = TheirFields(use_flex_async_save=True, **given)
    assert untouched.use_flex_async_save
    assert {key: getattr(untouched, key) for key in given} == given


def test_two_values_for_one_average_are_refused_with_both_keys() -> None:
    given = {"zcc_save_ema_coef": 0.9, "flex_ema_decay": 0.99, "zcc_ema_interval": 5, "flex_ema_interval": 3}
    with pytest.raises(OptionError) as caught:
        TheirFields(flex_checkpoint=True, **given)
    assert list(caught.value.evidence) == [
        "zcc_save_ema_coef: 0.9 and flex_ema_decay: 0.99",
        "zcc_ema_interval: 5 and flex_ema_interval: 3",
    ]


def test_a_size_is_a_number_with_a_unit_and_of_exported_files_also_a_number() -> None:
    sizes = {"12B": 12, "5GB": 5 * 10**9, "5gb": 5 * 10**9, " 1.5 MB ": 1_500_000, "4GiB": 4 << 30, "1TB": 10**12}
    assert {text: parse_size(text) for text in (*sizes, "2KiB")} == {**sizes, "2KiB": 2048}
    numbers: dict[str | float, int] = {"5GB": 5 * 10**9, 5e9: 5 * 10**9, 1: 1, 10**20: 10**20}
    assert {size: shard_bytes(size) for size in numbers} == numbers


def test_an_invalid_size_is_rejected_and_a_plain_number_gets_a_hint() -> None:
    for text in ("", "5", "GB", "5 GBs", "five GB", "5,5GB", "9" * 400 + "GB"):
        with pytest.raises(OptionError, match="is not a size"):
            shard_bytes(text)
    for value in ("5", " 64 ", "1.5", 64):
        assert "it has no unit" in faults(flex_max_shard_size=value)[0]
        with pytest.raises(OptionError, match="is not a size: it has no unit"):
            parse_size(str(value))
    invalid: list[Any] = [math.nan, math.inf, -1, 0, 0.5, True, "0GB", [5]]
    for size in invalid:
        with pytest.raises(OptionError, match=r"max_shard_size: .* is not a number of bytes of at least 1"):
            shard_bytes(size)


def test_the_fields_check_themselves_when_they_are_made_and_know_what_yaml_makes_of_off() -> None:
    with pytest.raises(OptionError, match="Invalid value"):
        FlexFields(flex_threads=0)
    made = FlexFields(**yaml.safe_load("{flex_verify: off, flex_check_replicas: off}"))
    assert (made.flex_verify, made.flex_check_replicas) == ("off", "off")


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_a_removed_option_is_an_unknown_key_with_a_hint(name: str) -> None:
    with pytest.raises(OptionError, match="Unknown key") as caught:
        TheirFields(flex_checkpoint=True, **{name: 1})
    assert list(caught.value.evidence) == [f"{name}: removed: the value is constant now"]
    assert caught.value.next_step.startswith("Remove the key;")
