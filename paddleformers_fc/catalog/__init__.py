"""What is stored, whatever the format: tensors as boxes in byte ranges of files. No framework is imported here."""

from paddleformers_fc.catalog.flex import FlexCheckpoint, open_flex
from paddleformers_fc.catalog.huggingface import open_huggingface
from paddleformers_fc.catalog.stored import Catalog, StoredFragment, StoredTensor

__all__ = ["Catalog", "FlexCheckpoint", "StoredFragment", "StoredTensor", "open_flex", "open_huggingface"]
