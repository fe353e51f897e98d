"""Mappings between two spaces of named tensors, as geometry, with their reverse, composition and proof.

A mapping consists of names, shapes, dtypes and boxes. The package reads no file and imports no framework.
"""

from paddleformers_fc.mapping.boxes import Box, Shape
from paddleformers_fc.mapping.correspondences import Correspondence, TensorMapping, TensorSources, TensorSpec
from paddleformers_fc.mapping.prove import prove
from paddleformers_fc.mapping.rules import Rule, RuleSet, Tie

__all__ = [
    "Box",
    "Correspondence",
    "Rule",
    "RuleSet",
    "Shape",
    "TensorMapping",
    "TensorSources",
    "TensorSpec",
    "Tie",
    "prove",
]
