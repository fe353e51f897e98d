"""Model families. Rules, their reverse and their AOA text are derived from one small declaration per family."""

from paddleformers_fc.families.bind import ModelTensor as ModelTensor, bind as bind
from paddleformers_fc.families.declarations import Family as Family
from paddleformers_fc.families.description import (
    ModelDescription as ModelDescription,
    described_by_file as described_by_file,
)
from paddleformers_fc.families.enumerate import DeclaredTensor as DeclaredTensor, enumerate_tensors as enumerate_tensors
from paddleformers_fc.families.registry import (
    OptionalNames as OptionalNames,
    family_for as family_for,
    is_known as is_known,
    own_families as own_families,
    prove_family as prove_family,
    register as register,
)
