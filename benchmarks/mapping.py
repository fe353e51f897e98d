"""How long it takes to bind, denote and prove the mapping of a large mixture of experts, beside stock AOAEngine.

Both get the same job in the same process on one thread: an ERNIE 4.5 MoE with about 100,000 canonical tensors, its
fused attention and feed-forward included. Stock gets the model's own statements as text; it resolves names and builds
its shard graph, and proves nothing. Ours enumerates the model's tensors, binds them to the family, denotes the rules as
box correspondences, and proves the mapping forward and reversed.

Run with ``make bench-mapping``. Stock needs Paddle and about half a minute.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from paddleformers_fc.families import ModelDescription, ModelTensor, bind, family_for
from paddleformers_fc.formats.aoa_statements import aoa_text
from paddleformers_fc.mapping import TensorMapping, prove

HEADS, GROUPS = 32, 8
MODEL = ModelDescription(
    {
        "model_type": "ernie4_5_moe",
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "tie_word_embeddings": False,
    }
)
HIDDEN, HEAD, EXPERT = 256, 32, 256
_T = TypeVar("_T")


def model_tensors(layers: int, experts: int) -> list[ModelTensor]:
    """The tensors of a model with one mixture per layer, small in bytes and large in number."""

    def tensor(name: str, *shape: int) -> ModelTensor:
        return ModelTensor(name, shape, "bfloat16", (1,) * len(shape))

    qkv = (HEADS + 2 * GROUPS) * HEAD
    made = [tensor("model.embed_tokens.weight", 512, HIDDEN), tensor("lm_head.weight", 512, HIDDEN)]
    made.append(tensor("model.norm.weight", HIDDEN))
    for layer in range(layers):
        block = f"model.layers.{layer}"
        made += [
            tensor(f"{block}.self_attn.qkv_proj.weight", HIDDEN, qkv),
            tensor(f"{block}.self_attn.o_proj.weight", HEADS * HEAD, HIDDEN),
            tensor(f"{block}.input_layernorm.weight", HIDDEN),
            tensor(f"{block}.post_attention_layernorm.weight", HIDDEN),
            tensor(f"{block}.mlp.gate.weight", HIDDEN, experts),
        ]
        for expert in range(experts):
            made.append(tensor(f"{block}.mlp.experts.{expert}.up_gate_proj.weight", HIDDEN, 2 * EXPERT))
            made.append(tensor(f"{block}.mlp.experts.{expert}.down_proj.weight", EXPERT, HIDDEN))
    return made


def timed(work: Callable[[], _T]) -> tuple[float, _T]:
    """Seconds of wall time, and what the work returned."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def stock_engine(statements: list[str], mapping: TensorMapping) -> Any:
    """Stock's engine for the same model, with the statements that a person would write."""
    from paddle.distributed.flex_checkpoint.aoa.aoa_engine import AOAEngine
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeightDesc

    def described(specs: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
        return {
            name: [ShardedWeightDesc(name, spec.shape, spec.shape, (0,) * len(spec.shape), spec.dtype)]
            for name, spec in specs
        }

    config = {"aoa_statements": statements, "enable_traceback": False}
    return AOAEngine(config, described(mapping.sources.items()), described(mapping.targets.items()))


def _prove_reversed(mapping: TensorMapping) -> None:
    prove(mapping.reversed())


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=130)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of ours; the median is shown")
    parser.add_argument("--write", type=Path, help="also write the table into this file")
    options = parser.parse_args()
    tensors = model_tensors(options.layers, options.experts)
    family = family_for(MODEL.config)
    seconds: dict[str, list[float]] = {"bind": [], "denote": [], "prove": [], "reverse and prove": []}
    for _ in range(options.rounds):
        took, rules = timed(lambda: bind(family, MODEL, tensors))
        seconds["bind"].append(took)
        took, mapping = timed(rules.mapping)
        seconds["denote"].append(took)
        took, _done = timed(partial(prove, mapping))
        seconds["prove"].append(took)
        took, _done = timed(partial(_prove_reversed, mapping))
        seconds["reverse and prove"].append(took)
    took, statements = timed(lambda: aoa_text(family, MODEL, tensors))
    seconds["write as AOA text"] = [took]
    stock, _engine = timed(lambda: stock_engine(statements, mapping))
    lines = [
        f"{len(mapping.sources):,} canonical tensors, {len(tensors):,} model tensors, "
        f"{len(mapping.correspondences):,} correspondences; one thread, median of {options.rounds} rounds.",
        "",
        "| step | seconds | stock AOAEngine takes |",
        "|---|---|---|",
    ]
    medians = {step: sorted(times)[len(times) // 2] for step, times in seconds.items()}
    for step, took in medians.items():
        lines.append(f"| {step} | {took:.2f} | {stock / took:.0f}x |")
    total = sum(took for step, took in medians.items() if step != "write as AOA text")
    lines.append(f"| **bind to prove, both directions** | {total:.2f} | {stock / total:.1f}x |")
    lines.append(f"| stock `AOAEngine`, build only | {stock:.2f} | |")
    text = "\n".join(lines)
    print(text)
    if options.write:
        title = "# The mapping of 100,000 tensors\n\nWritten by `make bench-mapping`.\n\n"
        options.write.write_text(title + text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
