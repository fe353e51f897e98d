"""What ranks do in the tests of PaddleFormers' workflows: its command line, watched from outside."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def train(config: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Run a YAML as each worker of ``paddleformers-cli train`` does.

    Args:
        config: the file.
        overrides: ``key=value``, as on the command line.

    Returns:
        ``losses`` by step, and ``samples``: per step the digests of the sequences that this rank trained.
    """
    import sys

    from paddleformers.cli import launcher
    from paddleformers.cli.train.dpo import workflow as dpo
    from paddleformers.cli.train.sft import workflow as sft
    from paddleformers.trainer import TrainerCallback, trainer as of_trainer

    known: dict[bytes, list[str]] = {}
    losses: dict[int, float] = {}
    samples: dict[int, list[str]] = {}

    class Watch(TrainerCallback):
        def on_load_data_end(self, args: Any, state: Any, control: Any, inputs: Any = None, **_: Any) -> None:
            if state.global_step < state.max_steps:
                rows = [hashlib.md5(repr(row).encode()).hexdigest()[:8] for row in inputs["input_ids"].tolist()]
                samples.setdefault(state.global_step + 1, []).extend(known.get(_key(inputs), rows))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                losses[state.global_step] = float(logs["loss"])

    sft.collate_fn = _remembering(sft.collate_fn, known)
    dpo.dpo_collate_fn = _remembering(dpo.dpo_collate_fn, known)
    of_trainer.DEFAULT_CALLBACKS.append(Watch)
    sys.argv = ["launcher.py", "train", config, *overrides]
    launcher.launch()
    return {"losses": list(losses.items()), "samples": list(samples.items())}


def _remembering(collate: Callable[..., Mapping[str, Any]], known: dict[bytes, list[str]]) -> Callable[..., Any]:
    """A collator that notes which sequences a batch is made of, by the tokens of the batch."""

    def remembering(batch: Any, *args: Any, **kwargs: Any) -> Any:
        digests = [hashlib.md5(repr(one.token_ids).encode()).hexdigest()[:8] for row in batch for one in row]
        made = collate(batch, *args, **kwargs)
        known[_key(made)] = digests
        return made

    return remembering


def _key(batch: Mapping[str, Any]) -> bytes:
    import numpy as np

    tokens = batch["input_ids"]
    return np.asarray(tokens.numpy() if hasattr(tokens, "numpy") else tokens, "int64").tobytes()


def write_indexed(prefix: str, model: str, corpus: str) -> None:
    """Write a corpus of JSON lines as the indexed files that ``dataset_type: pretrain`` reads."""
    import json
    from pathlib import Path

    import numpy as np
    from paddleformers.data.indexed_dataset import MMapIndexedDatasetBuilder
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", np.int32)
    for line in Path(corpus).read_text().splitlines():
        builder.add_item(tokenizer.encode(json.loads(line)["text"][0]).ids)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
