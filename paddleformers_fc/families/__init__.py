"""Model families: one small declaration each, from which rules, their reverse and their AOA text are derived."""

from paddleformers_fc.families.bind import ModelTensor, bind
from paddleformers_fc.families.declarations import Family, TiedName
from paddleformers_fc.families.description import ModelDescription, described_by_file
from paddleformers_fc.families.enumerate import DeclaredTensor, enumerate_tensors
from paddleformers_fc.families.registry import (
    OptionalNames,
    family_for,
    is_known,
    own_families,
    prove_family,
    register,
)

__all__ = [
    "DeclaredTensor",
    "Family",
    "ModelDescription",
    "ModelTensor",
    "OptionalNames",
    "TiedName",
    "bind",
    "described_by_file",
    "enumerate_tensors",
    "family_for",
    "is_known",
    "own_families",
    "prove_family",
    "register",
]
