"""Model families: one small declaration each, from which rules, their reverse and their AOA text are derived."""

from paddleformers_fc.families.bind import ModelTensor, bind
from paddleformers_fc.families.registry import FAMILIES, family_for

__all__ = ["FAMILIES", "ModelTensor", "bind", "family_for"]
