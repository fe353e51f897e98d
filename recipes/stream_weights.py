"""Push the weights of a model that is trained into another process after every step, as for reinforcement learning.

The other process has the same model in Transformers, on PyTorch, and gets the tensors through shared memory. After each
step both compute the logits of one sentence, which are equal up to rounding. An inference engine has an environment of
its own, and so has the other process here, because PaddleFormers' dependencies keep Transformers from using PyTorch::

    python -m venv engine && engine/bin/pip install torch==2.13.0 transformers==5.3.0
    python recipes/stream_weights.py --python engine/bin/python
    PADDLE_DISTRI_BACKEND=gloo python -m paddle.distributed.launch --nproc_per_node 2 recipes/stream_weights.py \\
        --python engine/bin/python

Under any layout rank 0 gets whole tensors in the names of Transformers, and the other ranks send their parts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

import numpy as np

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
LENGTH, SAMPLES_PER_STEP = 16, 8
MEMORY = "/dev/shm"
SENTENCE = [[(7 * place) % 127 + 1 for place in range(LENGTH)]]


class Engine:
    """The other process, as rank 0 sees it."""

    def __init__(self, python):
        descriptor, self.path = tempfile.mkstemp(dir=MEMORY)
        os.close(descriptor)
        self.memory = np.memmap(self.path, np.uint8, "w+", shape=1 << 20)
        command = [python, __file__, "--engine", self.path]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def push(self, name, tensor):
        array = tensor.numpy()
        np.ndarray(array.shape, array.dtype, self.memory)[...] = array
        self.ask({"name": name, "shape": array.shape, "dtype": str(array.dtype)})

    def logits(self, tokens):
        return np.array(self.ask({"tokens": tokens}), np.float32)

    def ask(self, request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        os.unlink(self.path)


def serve(path):
    """Answer requests: copy a tensor out of the shared memory into the model, or compute logits."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    memory = np.memmap(path, np.uint8, "r+")  # Torch wants memory that may be written.
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for line in sys.stdin:
            request = json.loads(line)
            answer = None
            if "name" in request:
                array = np.ndarray(request["shape"], request["dtype"], memory)
                parameters[request["name"]].copy_(torch.from_numpy(array))
            else:
                answer = model(torch.tensor(request["tokens"])).logits.tolist()
            print(json.dumps(answer), flush=True)


def train(output, steps, python):
    from paddleformers_fc import cpu_runtime

    cpu_runtime.activate()  # Without an accelerator: first, before the arguments are made. With one it does nothing.

    import paddle
    from paddleformers.trainer import TrainerCallback
    from paddleformers.transformers import LlamaConfig, LlamaForCausalLM

    import paddleformers_fc

    class Counting:
        def __len__(self):
            return 64

        def __getitem__(self, index):
            tokens = (index + np.arange(LENGTH + 1)) % (CONFIG["vocab_size"] - 1) + 1
            return {"input_ids": tokens[:-1], "labels": tokens[1:]}

    class PushWeights(TrainerCallback):
        """Streams after every step. Every rank must iterate; only the first gets tensors."""

        def on_step_end(self, args, state, control, model=None, **kwargs):
            for name, tensor in paddleformers_fc.stream(model, to="first"):
                engine.push(name, tensor)
            with paddle.no_grad():
                live = model(input_ids=paddle.to_tensor(SENTENCE))
            if engine is not None:
                live = (live[0] if isinstance(live, tuple) else live).numpy()
                apart = np.abs(live - engine.logits(SENTENCE)).max() / np.abs(live).max()
                print(f"step {state.global_step}: logits differ by at most {apart:.1e} of the largest", flush=True)

    ranks = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    arguments = paddleformers_fc.FlexTrainingArguments(
        output_dir=output,
        flex_checkpoint=True,
        max_steps=steps,
        logging_steps=1,
        per_device_train_batch_size=SAMPLES_PER_STEP // ranks,
        learning_rate=0.001,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        # Float32 on a CPU. On GPUs: bf16=True, fp16_opt_level="O2", amp_master_grad=True and no device; compare less
        # strictly, and push the numbers of bfloat16 as uint16.
        device="cpu",
        amp_master_grad=False,
    )
    config = LlamaConfig(**CONFIG, fuse_rms_norm=False)
    config._attn_implementation = "sdpa"
    paddle.seed(arguments.seed)
    engine = Engine(python) if arguments.process_index == 0 else None
    trainer = paddleformers_fc.FlexTrainer(
        model=LlamaForCausalLM.from_config(config, dtype="float32"),
        args=arguments,
        train_dataset=Counting(),
        data_collator=lambda samples: {
            key: paddle.to_tensor(np.stack([sample[key] for sample in samples])) for key in samples[0]
        },
        callbacks=[PushWeights()],
    )
    try:
        trainer.train()
    finally:
        if engine is not None:
            engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="out/stream")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--python", default=sys.executable, help="The interpreter of the other process.")
    parser.add_argument("--engine", help="The file of the shared memory, in the other process.")
    options = parser.parse_args()
    serve(options.engine) if options.engine else train(options.output, options.steps, options.python)
