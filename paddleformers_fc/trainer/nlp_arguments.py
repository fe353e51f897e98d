"""PaddleNLP's ``TrainingArguments`` with the options of this package, and with PaddleFormers' names of arguments."""

from __future__ import annotations

from dataclasses import dataclass

from paddleformers_fc.trainer.conflicts import NLP_CONFLICTS, check_conflicts
from paddleformers_fc.trainer.entry import ActiveFields
from paddleformers_fc.trainer.library import TrainingArguments


class FormersNames:
    """PaddleFormers' arguments that PaddleNLP lacks or has under other names, for the code that reads both."""

    tensor_parallel_degree: int
    pipeline_parallel_degree: int
    sharding_parallel_degree: int
    save_rng_states = True
    save_tokenizer = True
    aoa_config = None
    tensorwise_offload_optimizer = False
    expert_model_parallel_size = sep_parallel_size = context_parallel_size = 1

    @property
    def tensor_model_parallel_size(self) -> int:
        """Degree of tensor parallelism."""
        return self.tensor_parallel_degree

    @property
    def pipeline_model_parallel_size(self) -> int:
        """Degree of pipeline parallelism."""
        return self.pipeline_parallel_degree

    @property
    def sharding_parallel_size(self) -> int:
        """Degree of sharding."""
        return self.sharding_parallel_degree


@dataclass
class FlexTrainingArguments(FormersNames, ActiveFields, TrainingArguments):
    """``TrainingArguments`` with the options of :class:`~paddleformers_fc.trainer.options.FlexFields`.

    Raises:
        OptionError: an option is out of range, or conflicts with ``flex_checkpoint: true``.
        EnvironmentMismatch: ``flex_checkpoint`` is true, and Paddle or PaddleNLP differs from the tested versions.
    """

    def __post_init__(self) -> None:
        if self.flex_checkpoint:
            check_conflicts(self, NLP_CONFLICTS)
        super().__post_init__()
