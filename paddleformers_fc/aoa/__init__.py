"""Paddle's AOA language: the text that says how one side's tensors become the other's.

:func:`parse` reads it against real tensors into a mapping, which is then proved like any other. :func:`render` writes
a mapping as text that Paddle's own engine reads the same way. The language is described in ``docs/aoa.md``.
"""

from paddleformers_fc.aoa.parsing import parse, parse_config, statements_of
from paddleformers_fc.aoa.rendering import normal, render
from paddleformers_fc.aoa.runs import Hints
from paddleformers_fc.aoa.tensors import AoaTensor, uncut

__all__ = ["AoaTensor", "Hints", "normal", "parse", "parse_config", "render", "statements_of", "uncut"]
