"""``mapping.json``: the rules of a model and the description that they were derived from."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from paddleformers_fc.errors import FormatError
from paddleformers_fc.families.adapters import Adapters
from paddleformers_fc.families.description import ModelDescription
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.mapping.rules import decode_rules, encode_rules
from paddleformers_fc.storage.json_io import ignored_extensions
from paddleformers_fc.storage.manifest import RESTORE


class _Document(msgspec.Struct, frozen=True):
    """The parts of ``mapping.json``."""

    model: msgspec.Raw
    rules: msgspec.Raw


class _Model(msgspec.Struct, frozen=True, omit_defaults=True):
    """A description as it is stored. Rules are in the document themselves."""

    config: dict[str, Any]
    is_fleet: bool | None
    adapters: Adapters | None = None
    partial: bool = False


_documents = msgspec.json.Decoder(_Document)
_models = msgspec.json.Decoder(_Model)
_RULE_FIELDS = tuple(field.name for field in dataclasses.fields(RuleSet))


def encode_mapping(model: ModelDescription, rules: RuleSet) -> bytes:
    """Return the bytes of ``mapping.json``."""
    stored = msgspec.json.encode(_Model(dict(model.config), model.is_fleet, model.adapters, model.partial))
    document = _Document(msgspec.Raw(stored), msgspec.Raw(encode_rules(rules)))
    return msgspec.json.format(msgspec.json.encode(document), indent=1)


def decode_mapping(data: bytes, where: str) -> tuple[ModelDescription, RuleSet]:
    """Return the description and the rules of a ``mapping.json``.

    Args:
        data: the bytes of the file.
        where: its path, for the error.
    Raises:
        FormatError: the document does not follow its format.
    """
    try:
        document = _documents.decode(data)
        model = _models.decode(document.model)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            "Invalid mapping of the checkpoint.", where=where, evidence=[str(error)], next_step=RESTORE
        ) from error
    rules = decode_rules(bytes(document.rules), where)
    ignored_extensions(data, _Document.__struct_fields__, where)
    ignored_extensions(document.model, _Model.__struct_fields__, where)
    ignored_extensions(document.rules, _RULE_FIELDS, where)
    return ModelDescription(model.config, model.is_fleet, adapters=model.adapters, partial=model.partial), rules
