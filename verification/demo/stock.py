"""``custom_register_path`` of the demo's stock runs: PaddleFormers' own checkpoints, on a machine without a GPU."""

from paddleformers_fc.cpu_runtime import activate

activate()
