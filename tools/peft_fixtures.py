"""Write tests/trainer/peft.npz: the logits that Hugging Face PEFT computes with exported adapters, without Paddle.

The exports are written in the environment of this repository, the logits in one with PyTorch:

    python -m tests.trainer.peft_files /tmp/peft
    python -m venv /tmp/hf && /tmp/hf/bin/pip install torch==2.13.0 peft==0.21.2 transformers
    /tmp/hf/bin/python tools/peft_fixtures.py /tmp/peft tests/trainer/peft.npz

Weights and adapters are functions of their names, so that every machine exports the same. The file also contains the
digests of the tensors that PEFT has read, and ``adapter_config.json``, which the test compares with its own export.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def digest(file: Path) -> str:
    """Return a digest of the tensors of a file."""
    found = hashlib.md5()
    for name, values in sorted(load_file(file).items()):
        found.update(f"{name} {values.dtype} {values.shape}".encode() + values.tobytes())
    return found.hexdigest()


def config(directory: Path) -> str:
    """Return ``adapter_config.json`` without the location of the base."""
    values = json.loads((directory / "adapter_config.json").read_text())
    return json.dumps({**values, "base_model_name_or_path": ""}, sort_keys=True)


def inputs(directory: Path) -> dict[str, str]:
    """Return what identifies the files that PEFT reads."""
    return {
        "base": digest(directory / "base/model.safetensors"),
        "adapter": digest(directory / "adapter/adapter_model.safetensors"),
        "config": config(directory / "adapter"),
    }


def main(directory: Path, file: Path) -> None:
    """Write the logits of a base, of the base with adapters, and of a merged model."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(1, 17)[None]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(directory / "base", dtype=torch.float32).eval()
        found = {"base": model(tokens).logits.numpy().copy()}
        found["adapter"] = PeftModel.from_pretrained(model, directory / "adapter").eval()(tokens).logits.numpy()
        whole = AutoModelForCausalLM.from_pretrained(directory / "merged", dtype=torch.float32).eval()
        found["merged"] = whole(tokens).logits.numpy()
    np.savez_compressed(file, **found, inputs=np.array(json.dumps(inputs(directory))))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
