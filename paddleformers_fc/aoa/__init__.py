"""Paddle's AOA language: statements that relate the tensors of two sides.

:func:`read_config` parses the statements, :func:`evaluate` gives their mapping between real tensors, which is then
proved like any other. :func:`render` writes rules as text that Paddle's own engine evaluates alike. The language is
described in ``docs/aoa.md``.
"""

from paddleformers_fc.aoa.evaluate import assigned_names as assigned_names, evaluate as evaluate, parse as parse
from paddleformers_fc.aoa.rendering import Hints as Hints, render as render, with_ties as with_ties
from paddleformers_fc.aoa.rules import AoaTensor as AoaTensor, Tensors as Tensors, uncut as uncut
from paddleformers_fc.aoa.syntax import Program as Program, read_config as read_config
