"""``python -m tests.trainer.peft_logits BASE ADAPTER MERGED FILE``: logits by Transformers and PEFT, without Paddle."""

from __future__ import annotations

import sys

import numpy as np


def main(base: str, adapter: str, merged: str, file: str) -> None:
    """Write the logits of a base, of the base with adapters, and of a merged model."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(1, 17)[None]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        found = {"base": model(tokens).logits.numpy().copy()}
        found["adapter"] = PeftModel.from_pretrained(model, adapter).eval()(tokens).logits.numpy()
        whole = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
        found["merged"] = whole(tokens).logits.numpy()
    np.savez(file, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
