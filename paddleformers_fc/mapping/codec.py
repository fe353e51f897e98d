"""Rules as JSON, for ``mapping.json`` in a checkpoint: self-describing, strict when read back, never a pickle."""

from __future__ import annotations

import msgspec

from paddleformers_fc.errors import FormatError
from paddleformers_fc.mapping.rules import RuleSet


def encode_rules(rules: RuleSet) -> bytes:
    """The rules as UTF-8 JSON."""
    return msgspec.json.format(msgspec.json.encode(rules), indent=1)


def decode_rules(data: bytes, where: str) -> RuleSet:
    """The rules that :func:`encode_rules` wrote.

    Args:
        data: UTF-8 JSON.
        where: the file it came from, for the error.
    Raises:
        FormatError: where the JSON is malformed or not a set of rules.
    """
    try:
        return msgspec.json.decode(data, type=RuleSet)
    except msgspec.MsgspecError as error:
        raise FormatError(
            "The mapping of this checkpoint cannot be read.",
            where=where,
            evidence=[str(error)],
            next_step="The file is damaged or written by another version; restore it from a copy.",
        ) from error
