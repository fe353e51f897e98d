"""Write tests/formats/quantized.npz: small quantized tensors, and the weights that Transformers makes of them.

Run in an environment of its own, for PaddleFormers and PyTorch disturb each other:

    python -m venv /tmp/hf && /tmp/hf/bin/pip install torch==2.13.0 transformers==5.16.1
    /tmp/hf/bin/python tools/quantized_fixtures.py tests/formats/quantized.npz

Every case has the bytes of numbers and scales as files contain them, and the bits of the weight in float32 and
bfloat16. The numbers are all but NaN, the scales all of those that leave most products finite and not zero.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FP8_BLOCKS = (4, 5)
"""Rows and columns of blocks."""


def numbers_of_fp8(random: np.random.Generator) -> Any:
    """Return numbers of float8_e4m3fn, none of them NaN."""
    signs = random.integers(0, 2, (64, 40), np.uint8) << 7
    return random.integers(0, 0x7F, (64, 40), np.uint8) | signs


def powers(random: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Return powers of two of 8 bits, the least and the greatest among them."""
    found = random.integers(100, 150, shape, np.uint8)
    found.flat[:4] = 0, 1, 253, 254
    return found


def bits(weight: torch.Tensor) -> Any:
    """Return the bits of a weight."""
    weight = weight.contiguous()
    return weight.view(torch.int32 if weight.dtype == torch.float32 else torch.int16).numpy()


def main(file: Path) -> None:
    """Write the cases."""
    random = np.random.default_rng(11)
    fp8 = numbers_of_fp8(random)
    pairs = random.permutation(np.tile(np.arange(256, dtype=np.uint8), 2)).reshape(8, 64)
    groups = random.permutation(np.tile(np.arange(256, dtype=np.uint8), 3)).reshape(2, 8, 3, 16)
    cases = {
        "fp8": (fp8, random.random(FP8_BLOCKS, np.float32)),
        "fp8_powers": (fp8, powers(random, FP8_BLOCKS)),
        "fp4": (pairs, powers(random, (8, 4))),
        "mxfp4": (groups, powers(random, (2, 8, 3))),
    }
    stored = {"fp8": torch.float8_e4m3fn, "fp8_powers": torch.float8_e4m3fn, "fp4": torch.int8, "mxfp4": torch.uint8}
    found: dict[str, Any] = {}
    dequantize = Fp8Dequantize(None)
    for name, (numbers, scales) in cases.items():
        first, second = torch.from_numpy(numbers).view(stored[name]), torch.from_numpy(scales)
        if name in ("fp8_powers", "fp4"):
            second = second.view(torch.float8_e8m0fnu)
        found |= {f"{name}/numbers": numbers, f"{name}/scales": scales}
        for kind, dtype in KINDS.items():
            if name == "mxfp4":
                weight = convert_moe_packed_tensors(first, second, dtype=dtype)
            else:
                weight = dequantize._dequantize_one(first, second, output_dtype=dtype)
            found[f"{name}/{kind}"] = bits(weight)
    np.savez_compressed(file, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
