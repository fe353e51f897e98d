"""Paddle's AOA language: statements that relate the tensors of two sides.

:func:`read_config` parses the statements, :func:`evaluate` gives their mapping between real tensors, which is then
proved like any other. :func:`render` writes rules as text that Paddle's own engine evaluates alike. The language is
described in ``docs/aoa.md``.
"""

from paddleformers_fc.aoa.evaluate import assigned_names, evaluate, parse
from paddleformers_fc.aoa.rendering import Hints, render, with_ties
from paddleformers_fc.aoa.rules import AoaTensor, Tensors, uncut
from paddleformers_fc.aoa.syntax import Program, read_config

__all__ = [
    "AoaTensor",
    "Hints",
    "Program",
    "Tensors",
    "assigned_names",
    "evaluate",
    "parse",
    "read_config",
    "render",
    "uncut",
    "with_ties",
]
