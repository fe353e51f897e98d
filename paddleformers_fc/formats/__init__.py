"""Formats of checkpoints: how each is recognised, opened, verified and written. No framework is imported here.

``registry`` has the tuple of formats and ``open_checkpoint``; ``checkpoint`` the opened checkpoint and the records of
a format and of its writer; ``catalog`` what is stored, tensors as boxes in byte ranges of files; ``flex``,
``huggingface`` and ``paddle_distcp`` are the formats, and ``legacy`` those that PaddleFormers wrote before them.
"""

from paddleformers_fc.formats.catalog import Catalog as Catalog
from paddleformers_fc.formats.checkpoint import OpenedCheckpoint as OpenedCheckpoint
