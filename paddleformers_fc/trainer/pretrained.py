"""Starting from open weights: a directory of safetensors files straight into a live model, under any layout.

PaddleFormers' ``from_pretrained`` builds a model and fills it. Where the model exists already, as under a pipeline, or
where the weights must be proved to be all there before any of them changes, :func:`load_open_weights` fills it through
the family's mapping: every rank reads the ranges that its own shards are made of. Floating dtypes are cast to the
model's.
"""

from __future__ import annotations

from os import PathLike
from typing import Any

from paddleformers.utils.log import logger

from paddleformers_fc.execute.channel import together
from paddleformers_fc.execute.crew import ReadOptions
from paddleformers_fc.execute.load import LoadReport, load_weights
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.storage.places import RemotePath, place
from paddleformers_fc.trainer import documents, inherited, state
from paddleformers_fc.trainer.watch import patient_channel


def load_open_weights(
    model: Any, directory: str | PathLike[str] | RemotePath, threads: int = 4, verify: str = "full"
) -> LoadReport:
    """Fill a model with the weights of a Hugging Face directory. Every rank must call.

    What the family declares optional may be absent from the files and then keeps its initial values, or be there and
    not wanted; either is logged once.

    Args:
        model: the model as it was built, before or after its parallel wrapper.
        directory: safetensors files in canonical names, with their index: a path, or a URL such as ``s3://bucket/model``.
        threads: how many tensors are filled at a time.
        verify: what is compared with the ``flex_checksums.json`` of an export: ``full`` all that this rank reads,
            ``size`` sizes and small files; without that file nothing is.

    Raises:
        FlexError: the same on every rank, before any weight has changed, where files are missing or damaged, or names,
            shapes or dtypes do not fit.
    """
    channel = patient_channel()
    roles = state.model_roles(model)
    config = documents.model_config(model)
    source = place(directory)
    described = together(channel, "reading what describes the model", lambda: inherited.read_documents(source))
    report = load_weights(source, roles, config, channel, ReadOptions(threads=threads), verify)
    inherited.take_over(model, *described)
    if channel.rank == 0:
        for name in fold(report.fresh):
            logger.warning(f"{name} is not in {source} and keeps its initial values.")
        for name in fold(report.dropped):
            logger.warning(f"{name} is in {source} and the model has no place for it.")
    return report
