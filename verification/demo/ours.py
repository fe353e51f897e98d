"""``custom_register_path`` of the demo's own runs: the file that a user names, and a witness.

A training continues as soon as it has resumed, and its weights are no longer those that were saved. The witness
therefore writes, before the first step, a checkpoint of the resumed run's state: model, master weights and moments in
its own layout. If loading is exact, this checkpoint has the same tensors as the one it was loaded from, bit for bit.
"""

from pathlib import Path
from typing import Any

from paddleformers.trainer import TrainerCallback
from paddleformers.trainer.trainer import DEFAULT_CALLBACKS
from paddleformers.transformers.model_utils import unwrap_model

from paddleformers_fc.distributed.channel import job_channel
from paddleformers_fc.execute.save import JobRecord, save_checkpoint
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.documents import config_text
from paddleformers_fc.trainer.live_roles import LiveModel
from paddleformers_fc.trainer.register import register
from verification.demo.jobs import AS_LOADED


class SaveWhatWasLoaded(TrainerCallback):
    """Writes what a resumed run holds before its first step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Called on every rank, after the checkpoint was loaded."""
        if args.resume_from_checkpoint is None:
            return
        model = unwrap_model(objects["model"])
        channel = job_channel()
        files = {"config.json": config_text(model).encode()} if channel.rank == 0 else {}
        save_checkpoint(
            Path(args.output_dir) / AS_LOADED,
            LiveModel(model, objects["optimizer"]).roles(),
            describe_model(model),
            files,
            JobRecord(state.global_step, state.consumed_samples, {}),
            channel,
        )


register()
DEFAULT_CALLBACKS.append(SaveWhatWasLoaded)
