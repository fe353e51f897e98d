"""Check that all ranks agree on the facts that an operation depends on, before it changes anything.

A rank with a different software version, configuration, option or checkpoint would not fail by itself: it would plan
different reads or take part in a different number of exchanges, and the job would hang or train on a mixture. The
first exchange of every save and load therefore carries a digest of these facts, and a mismatch takes precedence over
other errors. If the digests differ, ranks exchange the facts, and all raise the same table of differences.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property

import msgspec
import xxhash

from paddleformers_fc import __version__
from paddleformers_fc.distributed.channel import Channel, all_gather_checked, escape_text, group_by_value
from paddleformers_fc.errors import PeerError
from paddleformers_fc.families.description import IS_FLEET, ModelDescription

NOT_SET = "not set"
_LONGEST = 200
# The dtype of a rank's first parameter, which may differ between pipeline stages.
_PER_RANK_KEYS = frozenset({"dtype", "torch_dtype"})
_RANK_KEY_SUFFIX = "parallel_rank"


class ConsistencyCheck(msgspec.Struct, frozen=True, dict=True):
    """Facts that must be equal on all ranks of an operation.

    Args:
        doing: description of the operation.
        facts: JSON-encodable values by subject.
    """

    doing: str
    facts: Mapping[str, object]

    @cached_property
    def digest(self) -> bytes:
        """Digest of all facts."""
        return xxhash.xxh3_128_digest(msgspec.json.encode(self._as_json, order="sorted"))

    def mismatch_error(self, channel: Channel) -> PeerError:
        """Return the same error on every rank: the subjects that differ, with the ranks of each value."""
        everyone = all_gather_checked(
            channel, f"comparing what differs before {self.doing}", lambda: self._as_json, dict[str, str]
        )
        return PeerError(
            f"Ranks disagree about {self.doing}. Nothing was changed.",
            where=f"a job of {channel.world_size} ranks",
            evidence=list(_differences(everyone)),
            next_step="Start every rank with the same software, configuration and options, on the same files.",
        )

    @cached_property
    def _as_json(self) -> dict[str, str]:
        leaves = (leaf for subject, value in self.facts.items() for leaf in _flat(value, subject))
        return {escape_text(path): escape_text(text) for path, text in leaves}


def software_versions() -> dict[str, str]:
    """Return the versions of imported packages that a checkpoint depends on."""
    found = {"paddleformers_fc": __version__}
    if "paddle" in sys.modules:
        from paddleformers_fc.upstream import LIBRARY  # Imported late, because it searches the installed libraries.

        imported = [name for name in ("paddle", LIBRARY) if name in sys.modules]
        found |= {name: str(sys.modules[name].__version__) for name in imported}
    return found


def comparable_config(model: ModelDescription) -> dict[str, object]:
    """Return a model's configuration without the keys that may differ between its ranks."""
    config = {
        key: value
        for key, value in model.config.items()
        if key not in _PER_RANK_KEYS and not key.endswith(_RANK_KEY_SUFFIX)
    }
    rules = {} if model.rules is None else {"mapping": model.rules.digest}
    adapters = {} if model.adapters is None else {"lora": model.adapters.settings}
    placed = {"semi-automatic parallelism": True} if model.is_global else {}
    return {**config, IS_FLEET: model.is_fleet, **rules, **adapters, **placed}


def _flat(value: object, subject: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of every leaf of nested mappings."""
    if isinstance(value, Mapping) and value:
        for key in value:
            yield from _flat(value[key], f"{subject}.{key}")
    else:
        yield subject, value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _differences(everyone: list[dict[str, str]]) -> Iterator[str]:
    for subject in sorted({subject for facts in everyone for subject in facts}):
        values = [facts.get(subject, NOT_SET) for facts in everyone]
        if len(set(values)) > 1:
            yield f"{subject}: {group_by_value([_shortened(value) for value in values])}"


def _shortened(value: str) -> str:
    """Abbreviate a long value to its beginning, length and digest."""
    if len(value) <= _LONGEST:
        return value
    return (
        f"{value[: _LONGEST // 2]}... ({len(value)} characters, xxh3_128 {xxhash.xxh3_128_hexdigest(value.encode())})"
    )
