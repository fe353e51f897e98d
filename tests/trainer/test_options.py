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
from paddleformers_fc.trainer.options import (
    CONFLICTS,
    REMOVED,
    WITHOUT_EFFECT,
    FlexFields,
    check_options,
    parse_size,
    shard_bytes,
    without_effect,
)

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
    "unified_checkpoint": True,
    "save_sharded_model": True,
    "load_sharded_model": True,
    "ckpt_quant_stage": "O1",
    "sep_parallel_size": 2,
    "context_parallel_size": "2",
    "enable_zero_cost_checkpoint": True,
    "flash_device_save_steps": 10,
    "use_async_save": True,
    "auto_parallel_resume_form_hybrid_parallel": True,
    "load_from_hf": True,
    "sharding": "stage3 offload",
    "optim": "muon",
    "replicate_saved_into_local": True,
    "pdc_download_ckpt": True,
}
"""For every option that is refused, a value that is."""

HARMLESS: dict[str, Any] = {
    "save_checkpoint_format": "flex_checkpoint",
    "load_checkpoint_format": "flex_checkpoint",
    "ckpt_quant_stage": "O0",
    "zcc_save_ema_coef": 0.99,
    "zcc_ema_interval": 5,
    "sharded_model_from_ema": True,
    "aoa_config": {"aoa_statements": ["a -> b"]},
    "sharding": "stage1",
    "optim": "adamw",
    "flash_device_save_steps": 0,
    "ref_model_update_steps": -1,
    "zcc_ema_loss_threshold": None,
    "flex_ckpt_load_num_workers": 1,
    "sharding_machine_balanced_2d_partition": False,
    "use_reshard_bucketed_broadcast": False,
}


def options(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(FlexFields()), **changed})


@pytest.mark.parametrize("one", dataclasses.fields(FlexFields), ids=lambda one: one.name)
def test_every_help_line_ends_with_the_default(one: dataclasses.Field[Any]) -> None:
    default = getattr(FlexFields(), one.name)
    spelled = str(default).lower() if isinstance(default, bool) else str(default or "none")
    assert one.metadata["help"].endswith(f" Default: {spelled}.")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"flex_local_dir": "/dev/shm/run"}, "flex_local_dir: /dev/shm/run needs flex_local_steps of at least 1"),
        ({"flex_local_steps": 5}, "flex_local_steps: 5 needs flex_local_dir"),
        ({"flex_local_dir": "run", "flex_local_steps": 5}, "flex_local_dir: run"),
        ({"flex_local_dir": "run/x/../local", "flex_local_steps": 5}, "output_dir: run"),
        ({"flex_local_dir": ".", "flex_local_steps": 5}, "flex_local_dir: ."),
        ({"flex_local_dir": "~", "flex_local_steps": 5}, "output_dir: run"),
    ],
    ids=["no steps", "no directory", "the same", "inside", "around", "around, at home"],
)
def test_a_local_tier_that_is_half_given_or_not_apart_is_refused(
    given: dict[str, Any], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(OptionError) as caught:
        check_options(options(flex_checkpoint=True, output_dir="run", **given))
    assert any(one.startswith(line) for one in caught.value.evidence)


def test_a_local_tier_is_beside_output_dir_and_no_url(tmp_path: Path) -> None:
    given = {"flex_checkpoint": True, "output_dir": str(tmp_path / "run"), "flex_local_steps": 5}
    check_options(options(**given, flex_local_dir=str(tmp_path / "run-local")))
    with pytest.raises(OptionError, match="A local checkpoint cannot be written to s3://bucket/run"):
        check_options(options(**given, flex_local_dir="s3://bucket/run"))


def test_the_defaults_are_in_range() -> None:
    check_options(options(flex_checkpoint=True))


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
ENDS_OF_RANGES: dict[str, list[Any]] = {
    "flex_verify": ["off", "full"],
    "flex_threads": [1, 256],
    "flex_keep_every": [0, 1000],
    "flex_read": ["once"],
    "flex_tied": ["last"],
    "flex_timeout": [1, 604800],
    "flex_max_shard_size": ["1MB", "4.5GiB"],
    "flex_unknown_versions": ["warn"],
    "flex_stream": [{}, {**PUSH, "steps": 1}],
    "flex_ema_decay": [0, 0.9999],
    "zcc_save_ema_coef": [0],
    "sep_parallel_size": [1],
    "context_parallel_size": [-1],
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_by_name(name: str) -> None:
    for value in OUT_OF_RANGE[name]:
        with pytest.raises(OptionError) as caught:
            check_options(options(**{name: value}))
        (line,) = caught.value.evidence
        assert line.startswith(f"{name}: {value!r}")


@pytest.mark.parametrize("name", ENDS_OF_RANGES)
def test_the_ends_of_the_ranges_are_accepted(name: str) -> None:
    for value in ENDS_OF_RANGES[name]:
        check_options(options(flex_checkpoint=True, **{name: value}))


def test_all_values_out_of_range_are_named_at_once() -> None:
    with pytest.raises(OptionError) as caught:
        check_options(options(flex_verify="x", flex_threads=0, flex_timeout=0, flex_max_shard_size=""))
    assert [line.partition(":")[0] for line in caught.value.evidence] == [
        "flex_verify",
        "flex_threads",
        "flex_timeout",
        "flex_max_shard_size",
    ]


def test_every_refused_option_is_tried_here() -> None:
    assert {conflict.key for conflict in CONFLICTS} == set(CONTRADICTIONS)


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_names_both_keys_and_is_none_without_flex_checkpoint(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_options(options(flex_checkpoint=True, **{name: CONTRADICTIONS[name]}))
    (line,) = caught.value.evidence
    assert line.startswith(f"flex_checkpoint: true and {name}: ")
    check_options(options(flex_checkpoint=False, **{name: CONTRADICTIONS[name]}))


def test_all_contradictions_are_named_at_once() -> None:
    with pytest.raises(OptionError) as caught:
        check_options(options(flex_checkpoint=True, **CONTRADICTIONS))
    assert len(caught.value.evidence) == len(CONTRADICTIONS)


def test_the_values_that_mean_the_same_are_accepted() -> None:
    check_options(options(flex_checkpoint=True, **HARMLESS))


@pytest.mark.parametrize("given", ["foo", {"statements": []}, {"aoa_statements": "a -> b"}])
def test_statements_that_are_none_are_refused_before_anything_starts(given: Any) -> None:
    with pytest.raises(MappingError, match="aoa_config"):
        check_options(options(flex_checkpoint=True, aoa_config=given))
    check_options(options(flex_checkpoint=False, aoa_config=given))


@pytest.mark.parametrize(("name", "value"), [("zcc_save_ema_coef", 1.0), ("zcc_ema_interval", 0)])
def test_a_key_of_paddleformers_is_held_to_the_range_of_the_same_key_here(name: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        check_options(options(flex_checkpoint=True, **{name: value}))
    (line,) = caught.value.evidence
    assert line.startswith(f"{name}: {value!r}")
    check_options(options(flex_checkpoint=False, **{name: value}))


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
    made = TheirFields(flex_checkpoint=True, **given)
    assert (made.flex_ema_decay, made.flex_ema_interval) == (decay, interval)
    assert (made.zcc_save_ema_coef, made.zcc_ema_interval) == (None, 1)
    assert dataclasses.asdict(TheirFields(**dataclasses.asdict(made))) == dataclasses.asdict(made)


def test_an_asynchronous_save_by_paddleformers_name_is_one_of_this_package_alone() -> None:
    made = FlexFields(flex_checkpoint=True, use_flex_async_save=True)
    assert (made.flex_async_save, made.use_flex_async_save) == (True, False)


def test_keys_of_paddleformers_stay_without_flex_checkpoint() -> None:
    assert TheirFields(zcc_save_ema_coef=0.99).zcc_save_ema_coef == 0.99
    assert FlexFields(use_flex_async_save=True).use_flex_async_save


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("flex_async_save", True),
        ("use_flex_async_save", True),
        ("flex_ema_decay", 0.9),
        ("zcc_save_ema_coef", 0.9),
        ("tensor_model_parallel_size", 2),
        ("bf16", True),
        ("sharding", "stage1"),
    ],
)
def test_what_the_semi_automatic_mode_does_not_support_is_refused_by_each_of_its_names(key: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        check_options(options(flex_checkpoint=True, enable_auto_parallel=True, **{key: value}))
    (line,) = caught.value.evidence
    assert line.startswith(f"flex_checkpoint: true and {key}: ")
    check_options(options(flex_checkpoint=True, **{key: value}))


def test_two_values_for_one_average_are_refused_with_both_keys() -> None:
    given = {"zcc_save_ema_coef": 0.9, "flex_ema_decay": 0.99, "zcc_ema_interval": 5, "flex_ema_interval": 3}
    with pytest.raises(OptionError) as caught:
        TheirFields(flex_checkpoint=True, **given)
    assert list(caught.value.evidence) == [
        "zcc_save_ema_coef: 0.9 and flex_ema_decay: 0.99",
        "zcc_ema_interval: 5 and flex_ema_interval: 3",
    ]


def test_an_option_without_effect_is_reported_and_not_refused() -> None:
    chosen = options(flex_checkpoint=True, flex_ckpt_comm_method="broadcast", load_via_cpu=True)
    check_options(chosen)
    (line,) = without_effect(chosen)
    assert "flex_checkpoint: true and flex_ckpt_comm_method: broadcast" in line


def test_an_option_is_refused_or_without_effect_but_not_both() -> None:
    assert not {one.key for one in CONFLICTS} & {one.key for one in WITHOUT_EFFECT}


def test_a_size_is_read_with_its_unit() -> None:
    sizes = {"12B": 12, "5GB": 5 * 10**9, "5gb": 5 * 10**9, " 1.5 MB ": 1_500_000, "4GiB": 4 << 30, "1TB": 10**12}
    assert {text: parse_size(text) for text in (*sizes, "2KiB")} == {**sizes, "2KiB": 2048}


def test_a_size_of_exported_files_is_a_text_or_a_number() -> None:
    sizes: dict[str | float, int] = {"5GB": 5 * 10**9, 5e9: 5 * 10**9, 1: 1, 10**20: 10**20}
    assert {size: shard_bytes(size) for size in sizes} == sizes
    invalid: list[Any] = [math.nan, math.inf, -1, 0, 0.5, True, "0GB", [5]]
    for size in invalid:
        with pytest.raises(OptionError, match=r"max_shard_size: .* is not a number of bytes of at least 1"):
            shard_bytes(size)
    with pytest.raises(OptionError, match="is not a size"):
        shard_bytes("9" * 400 + "GB")


def test_what_is_no_size_is_refused_and_a_number_with_a_remark() -> None:
    for text in ("", "5", "GB", "5 GBs", "five GB", "5,5GB"):
        with pytest.raises(OptionError, match="is not a size"):
            parse_size(text)
    for text in ("5", " 64 ", "1.5"):
        with pytest.raises(OptionError, match="is not a size: it has no unit"):
            parse_size(text)
        for value in (text, 64):
            with pytest.raises(OptionError, match=r"flex_max_shard_size: .* it has no unit"):
                check_options(options(flex_max_shard_size=value))


def test_the_fields_check_themselves_when_they_are_made() -> None:
    with pytest.raises(OptionError, match="Invalid value"):
        FlexFields(flex_threads=0)


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_a_removed_option_is_an_unknown_key_with_a_hint(name: str) -> None:
    with pytest.raises(OptionError, match="Unknown key") as caught:
        TheirFields(flex_checkpoint=True, **{name: 1})
    assert list(caught.value.evidence) == [f"{name}: removed: the value is constant now"]
    assert caught.value.next_step.startswith("Remove the key;")


@pytest.mark.parametrize("name", ["flex_verify", "flex_check_replicas"])
def test_off_without_quotes_is_what_yaml_makes_of_it(name: str) -> None:
    value = yaml.safe_load(f"{name}: off")[name]
    check_options(options(**{name: value}))
    assert getattr(FlexFields(**{name: value}), name) == "off"
