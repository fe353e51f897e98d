"""What is stored, whatever the format: tensors as boxes in byte ranges of files. No framework is imported here."""

from paddleformers_fc.formats.catalog import Catalog, StoredFragment, StoredTensor
from paddleformers_fc.formats.flex import FlexCheckpoint, open_flex
from paddleformers_fc.formats.huggingface import open_huggingface

__all__ = ["Catalog", "FlexCheckpoint", "StoredFragment", "StoredTensor", "open_flex", "open_huggingface"]
