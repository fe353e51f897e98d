"""A training of your own with flex checkpoints: a tiny Llama that learns to count, on any number of ranks.

On one rank, on two, and on one rank resuming what two saved; without an accelerator::

    python recipes/script.py
    PADDLE_DISTRI_BACKEND=gloo python -m paddle.distributed.launch --nproc_per_node 2 recipes/script.py
    python recipes/script.py --steps 9 --resume out/script/checkpoint-6

Eight samples make a step under every number of ranks, so that a resumed run trains on like the one that was saved.
"""

import argparse
import os

from paddleformers_fc import cpu_runtime

cpu_runtime.activate()  # Without an accelerator: first, before the arguments are made. With one it does nothing.

import numpy as np  # noqa: E402
import paddle  # noqa: E402
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from paddleformers_fc import FlexTrainer, FlexTrainingArguments  # noqa: E402

VOCABULARY, LENGTH, SAMPLES_PER_STEP = 128, 16, 8


class Counting:
    """64 sequences that count up from different numbers."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = (index + np.arange(LENGTH + 1)) % (VOCABULARY - 1) + 1
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def collate(samples):
    return {key: paddle.to_tensor(np.stack([sample[key] for sample in samples])) for key in samples[0]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="out/script")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--resume", help="A checkpoint-N directory, or 'newest' for the newest finished one.")
    options = parser.parse_args()
    ranks = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    arguments = FlexTrainingArguments(
        output_dir=options.output,
        flex_checkpoint=True,
        max_steps=options.steps,
        save_steps=3,
        logging_steps=1,
        per_device_train_batch_size=SAMPLES_PER_STEP // ranks,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        # Float32 on a CPU. On GPUs: bf16=True, fp16_opt_level="O2", amp_master_grad=True and no device.
        device="cpu",
        amp_master_grad=False,
    )
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        fuse_rms_norm=False,  # A kernel for GPUs only, and the default.
    )
    config._attn_implementation = "sdpa"
    paddle.seed(arguments.seed)  # The Trainer seeds too, but the weights are drawn before it is made.
    model = LlamaForCausalLM.from_config(config, dtype="float32")
    trainer = FlexTrainer(model=model, args=arguments, train_dataset=Counting(), data_collator=collate)
    trainer.train(resume_from_checkpoint=True if options.resume == "newest" else options.resume)


if __name__ == "__main__":
    main()
