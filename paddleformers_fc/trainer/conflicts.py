"""Options of PaddleFormers that contradict ``flex_checkpoint: true``, or have no effect under it.

Its options for other ways to save or resume would have no effect. So each of them is a row of a table here, and one
error lists every conflict with both keys. :mod:`.options` selects the tables. This module does not import Paddle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paddleformers_fc.errors import OptionError
from paddleformers_fc.layout.roles import OPTIMIZERS


def spelled(value: Any) -> str:
    """Return a value in YAML's spelling."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def check_conflicts(options: Any, table: Iterable[Conflict]) -> None:
    """Check that no options contradict ``flex_checkpoint: true``.

    Args:
        options: as for :func:`.options.check_options`.
        table: the conflicts.

    Raises:
        OptionError: with every conflict.
    """
    conflicts = [conflict.line(options) for conflict in table if conflict.holds(options)]
    if conflicts:
        raise contradiction(conflicts)


def contradiction(conflicts: Sequence[str], next_step: str = "Remove one of the two keys.") -> OptionError:
    """Return the error about options that contradict ``flex_checkpoint: true``."""
    return OptionError(
        "flex_checkpoint: true contradicts another option.",
        where="training arguments",
        evidence=conflicts,
        next_step=next_step,
    )


@dataclass(frozen=True)
class Conflict:
    """An option of PaddleFormers that conflicts with ``flex_checkpoint: true``.

    One of the last four arguments selects the conflicting values; without them, every true value conflicts.

    Args:
        key: its name.
        because: the reason, as the end of a sentence that begins with both keys.
        values: conflicting values.
        unless: the only values that do not conflict.
        words: values whose text contains one of these conflict.
        above: larger numbers conflict.
    """

    key: str
    because: str
    values: tuple[Any, ...] = ()
    unless: tuple[Any, ...] = ()
    words: tuple[str, ...] = ()
    above: float | None = None

    def holds(self, options: Any) -> bool:
        """Return whether the option has a conflicting value; False if the argument class does not have the option."""
        if not hasattr(options, self.key):
            return False
        found = getattr(options, self.key)
        value, text = getattr(found, "value", found), str(found).lower()
        if self.values or self.unless:
            return value in self.values if self.values else value not in self.unless
        if self.words:
            return any(word in text for word in self.words)
        if self.above is None:
            return bool(value)
        try:
            return float(value) > self.above
        except (TypeError, ValueError):
            return False  # PaddleFormers rejects it.

    def line(self, options: Any) -> str:
        """Return one line with both keys and the reason."""
        return f"flex_checkpoint: true and {self.key}: {spelled(getattr(options, self.key))}: {self.because}"


_OTHER_FORMAT = "the second selects another checkpoint format"
_NOT_YET = "not supported yet"
_SAVES_ITSELF = "both would save the same state, each in its own way"

DEVELOPMENT = (
    Conflict("sharding", f"fully sharded parameters are {_NOT_YET}; stage3 shards them too", words=("fsdp",)),
    Conflict("flex_ckpt_load_num_workers", "flex_threads threads of every process read a checkpoint", above=1),
    Conflict(
        "sharding_machine_balanced_2d_partition",
        f"parameters of Muon that are divided over machines in two dimensions are {_NOT_YET}",
    ),
    Conflict(
        "use_reshard_bucketed_broadcast",
        "a checkpoint is resharded while it is read, without broadcasts",
    ),
)
"""Unsupported keys of PaddleFormers' development branch."""

STAGE_CONFLICTS = (
    Conflict(
        "stage",
        "that stage has its own loading and saving; use stage: PT with a model of PaddleFormers",
        values=("ernie_pretrain",),
    ),
)
"""Stages of PaddleFormers' command line that parse their arguments a second time, into a class without our options."""

REFERENCE_UPDATES = Conflict(
    "ref_model_update_steps", "the reference model is the base, and its updates are not saved", above=0
)

CONFLICTS = (
    *DEVELOPMENT,
    REFERENCE_UPDATES,
    Conflict("zcc_ema_loss_threshold", "updates of the moving average are not skipped by the loss", unless=(None,)),
    Conflict("save_checkpoint_format", _OTHER_FORMAT, unless=("flex_checkpoint",)),
    Conflict("load_checkpoint_format", _OTHER_FORMAT, unless=("flex_checkpoint",)),
    Conflict("unified_checkpoint", _OTHER_FORMAT),
    Conflict("save_sharded_model", _OTHER_FORMAT),
    Conflict("load_sharded_model", _OTHER_FORMAT),
    Conflict("ckpt_quant_stage", "checkpoints are stored exactly, never quantized", unless=("O0",)),
    Conflict("enable_zero_cost_checkpoint", _SAVES_ITSELF),
    Conflict("flash_device_save_steps", f"{_SAVES_ITSELF}; flex_local_dir saves in the memory of nodes"),
    Conflict("use_async_save", f"{_SAVES_ITSELF}; use flex_async_save"),
    Conflict("auto_parallel_resume_form_hybrid_parallel", "a run resumes from a checkpoint of any layout without it"),
    Conflict(
        "load_from_hf",
        "a checkpoint to resume is not a HuggingFace directory; to start from open weights, set model_name_or_path",
    ),
    Conflict(
        "sep_parallel_size",
        "segment parallelism is not supported: no model of PaddleFormers 1.2.0 attends from one segment to another",
        above=1,
    ),
    Conflict(
        "context_parallel_size",
        "context parallelism is not supported: PaddleFormers 1.2.0 does not train it with Paddle 3.3.1",
        above=1,
    ),
    Conflict(
        "sharding",
        "PaddleFormers 1.2.0 warns that it does not support offload; to offload the optimizer, set"
        " tensorwise_offload_optimizer",
        words=("offload",),
    ),
    *(Conflict("optim", one.unavailable, values=(one.option,)) for one in OPTIMIZERS if one.unavailable),
    Conflict("optim", "checkpoints have no states of it", unless=tuple(one.option for one in OPTIMIZERS)),
    Conflict("replicate_saved_into_local", "use flex_local_dir for checkpoints on the disks of single nodes"),
    Conflict("pdc_download_ckpt", f"fetching a checkpoint before resuming is {_NOT_YET}"),
)
"""Options that conflict with ``flex_checkpoint: true``."""

NLP_CONFLICTS = (
    Conflict("sep_parallel_degree", f"segment parallelism is {_NOT_YET}", above=1),
    Conflict("context_parallel_degree", f"context parallelism is {_NOT_YET}", above=1),
    Conflict("expert_parallel_degree", f"experts of PaddleNLP are {_NOT_YET}", above=1),
    Conflict("use_expert_parallel", f"experts of PaddleNLP are {_NOT_YET}"),
    Conflict("sharding", f"stages 2 and 3 of PaddleNLP are {_NOT_YET}", words=("stage2", "stage3")),
    Conflict(
        "sharding_parallel_config", f"fused optimizer states are {_NOT_YET}", words=("enable_fuse_optimizer_states",)
    ),
    Conflict("pipeline_parallel_config", f"the DualPipeV schedule is {_NOT_YET}", words=("use_dualpipev",)),
    Conflict("offload_optim", f"offloaded optimizer states are {_NOT_YET}"),
    Conflict("force_reshard_pp", _OTHER_FORMAT),
    Conflict("to_static", f"static graphs are {_NOT_YET}"),
    Conflict("enable_auto_parallel", f"PaddleNLP's semi-automatic mode is {_NOT_YET}"),
)
"""Conflicting options of PaddleNLP, in addition to :data:`CONFLICTS`."""

_IN_SEMI_AUTO = f"with enable_auto_parallel: true it is {_NOT_YET}"

SEMI_AUTO_CONFLICTS = (
    Conflict(
        "tensor_model_parallel_size",
        "with enable_auto_parallel: true Paddle 3.3.1 divides fused parameters by data parallelism alone",
        above=1,
    ),
    Conflict("sharding", "with enable_auto_parallel: true fused parameters are sharded already", unless=("", [], None)),
    Conflict("bf16", _IN_SEMI_AUTO),
    Conflict("fp16", _IN_SEMI_AUTO),
    *(Conflict(key, _IN_SEMI_AUTO) for key in ("flex_async_save", "use_flex_async_save")),
    *(Conflict(key, _IN_SEMI_AUTO) for key in ("flex_ema_decay", "zcc_save_ema_coef", "flex_stream")),
)
"""Conflicting options in PaddleFormers' semi-automatic mode, in addition to :data:`CONFLICTS`."""

_OURS = "every process reads what it needs by itself"

WITHOUT_EFFECT = (
    Conflict("save_on_each_node", "the second has no effect, disks of single nodes are detected"),
    Conflict("flex_ckpt_comm_method", f"the second has no effect, {_OURS}", unless=(None,)),
    Conflict("load_via_cpu", f"the second has no effect, {_OURS}", unless=(True,)),
    Conflict("ordered_save_group_size", "the second has no effect, processes write different files"),
    *(
        Conflict(key, "the second has no effect, an export is always in HuggingFace format", unless=(True,))
        for key in ("save_to_hf", "save_safetensors")
    ),
    Conflict("optim_shard_num", "the second has no effect, flex_max_shard_size bounds files", unless=(1,)),
    Conflict("save_hf_memory_growth_threshold", "the second has no effect, exports stream", unless=(8,)),
    Conflict("online_merge_ema", "the second has no effect, an export reads the checkpoint", unless=(True,)),
)
"""Options without effect, which a run logs once."""
