"""Formats of checkpoints: how each is recognised, opened, verified and written. No framework is imported here.

``registry`` lists the formats and opens checkpoints. ``checkpoint`` defines an opened checkpoint, a format and a
writer, and ``catalog`` where tensors are stored. The formats are ``flex``, ``huggingface``, ``adapters`` and
``paddle_distcp``, and older formats of PaddleFormers in ``legacy``.
"""

from paddleformers_fc.formats.catalog import Catalog as Catalog
from paddleformers_fc.formats.checkpoint import OpenedCheckpoint as OpenedCheckpoint
