"""Rules as JSON, for ``mapping.json`` in a checkpoint: self-describing and strict when decoded.

The text may be damaged or hostile. Every number and name of the rules is checked here; whether the rules fit their
tensors is checked where they are applied. Time and memory are linear in the text.

The last rules are kept, about twice their text: every load of a job reads the same text, and rules are immutable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec

from paddleformers_fc.errors import FormatError
from paddleformers_fc.mapping.boxes import MAX_AXES, MAX_LENGTH, Shape
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.mapping.rules import RuleSet

_last: dict[bytes, RuleSet] = {}
"""The rules that were read last, by a cryptographic digest of their text."""

_rules = msgspec.json.Decoder(RuleSet)
_RESTORE = "Restore the file from a copy; it is damaged, or another version wrote it."


def encode_rules(rules: RuleSet) -> bytes:
    """Return the rules as UTF-8 JSON."""
    return msgspec.json.format(msgspec.json.encode(rules), indent=1)


def decode_rules(data: bytes, where: str) -> RuleSet:
    """Return the rules that :func:`encode_rules` wrote.

    Args:
        data: UTF-8 JSON.
        where: the path of the file, for the error.
    Raises:
        FormatError: the JSON is malformed or not a set of rules.
    """
    digest = hashlib.sha256(data).digest()
    rules = _last.get(digest)
    if rules is None:
        rules = _decoded(data, where)
        _last.clear()
        _last[digest] = rules
    return rules


def _decoded(data: bytes, where: str) -> RuleSet:
    try:
        rules = _rules.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            "Invalid mapping of the checkpoint.", where=where, evidence=[str(error)], next_step=_RESTORE
        ) from error
    faults = list(_faults(rules))
    if faults:
        raise FormatError(
            "The mapping of the checkpoint contains invalid tensors.",
            where=where,
            evidence=fold(faults),
            next_step=_RESTORE,
        )
    return rules


def _faults(rules: RuleSet) -> Iterator[str]:
    possible: set[Shape] = set()
    for name, spec in rules.targets.items():
        if spec.shape in possible:
            continue
        if len(spec.shape) > MAX_AXES or not all(0 <= length <= MAX_LENGTH for length in spec.shape):
            yield f"{name}: invalid shape"
        else:
            possible.add(spec.shape)
    for name, cuts in rules.cuts.items():
        known = rules.targets.get(name)
        if known is None or len(cuts) != len(known.shape) or not all(1 <= count <= MAX_LENGTH for count in cuts):
            yield f"{name}: invalid cuts {list(cuts)[:8]}"
    for tie in rules.ties:
        if tie.alias == tie.owner or rules.targets.get(tie.alias) != rules.targets.get(tie.owner):
            yield f"{tie.alias}: is tied to {tie.owner}, which differs in shape or dtype, or is the same name"
        elif tie.owner not in rules.targets:
            yield f"{tie.owner}: is tied and not a tensor of the model"
    for name in rules.fresh:
        if name not in rules.targets:
            yield f"{name}: is declared uninitialised and not a tensor of the model"
