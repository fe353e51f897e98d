"""Paddle's AOA language: statements that map the tensors of one side to the other.

:func:`read_config` parses statements, and :func:`evaluate` returns their mapping between real tensors, which is proved
like any other mapping. :func:`render` writes rules as statements with the same meaning in Paddle's own engine.
``docs/aoa.md`` describes the language.
"""

from paddleformers_fc.aoa.evaluate import assigned_names as assigned_names, evaluate as evaluate, parse as parse
from paddleformers_fc.aoa.rendering import Hints as Hints, render as render, with_ties as with_ties
from paddleformers_fc.aoa.rules import AoaTensor as AoaTensor, Tensors as Tensors, uncut as uncut
from paddleformers_fc.aoa.syntax import Program as Program, read_config as read_config
