"""Mappings between two sets of named tensors: geometry, reverse, composition and proof.

A mapping consists of names, shapes, dtypes and boxes. This package reads no files and imports no framework.
"""

from paddleformers_fc.mapping.boxes import Box as Box, Shape as Shape
from paddleformers_fc.mapping.correspondences import (
    Correspondence as Correspondence,
    TensorMapping as TensorMapping,
    TensorSources as TensorSources,
    TensorSpec as TensorSpec,
)
from paddleformers_fc.mapping.prove import prove as prove
from paddleformers_fc.mapping.rules import Rule as Rule, RuleSet as RuleSet, Tie as Tie
