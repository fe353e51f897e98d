"""Calling the roll: before ranks do anything together, they make sure that they mean the same.

A rank with another version of the software, another configuration, another option or another checkpoint under the same
name would not fail. It would plan other reads, or take part in another number of exchanges, and the job would hang or
train on a mixture. So the first exchange of every save and load carries a digest of whatever must be equal, beside what
the ranks have to say there, and it counts before that. Only where digests differ are the facts themselves exchanged,
and every rank raises the same table of what differs.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import msgspec
import xxhash

from paddleformers_fc import __version__
from paddleformers_fc.distributed.channel import Channel, all_gather_checked
from paddleformers_fc.distributed.rank_format import escape_text, group_by_value
from paddleformers_fc.errors import PeerError
from paddleformers_fc.families.description import IS_FLEET, ModelDescription

NOT_SET = "not set"
_LONGEST = 200
# Where the ranks of a pipeline hold different layers, this is the element type of a rank's first parameter.
_OF_ONE_RANK = frozenset({"dtype", "torch_dtype"})
_PLACE_OF_A_RANK = "parallel_rank"


@dataclass(frozen=True)
class ConsistencyCheck:
    """A roll, for :func:`~paddleformers_fc.distributed.channel.all_gather_checked`.

    Args:
        doing: what the ranks are about to do together.
        facts: what must be equal, by subject; anything that JSON can tell.
    """

    doing: str
    facts: Mapping[str, object]

    @cached_property
    def digest(self) -> bytes:
        """Of all facts."""
        return xxhash.xxh3_128_digest(msgspec.json.encode(self._as_json, order="sorted"))

    def differences(self, channel: Channel) -> PeerError:
        """The same on every rank: each subject that differs, its values, and the ranks that have them."""
        mine = msgspec.json.encode(self._as_json)
        payloads = all_gather_checked(channel, f"comparing what differs before {self.doing}", lambda: mine)
        everyone = [msgspec.json.decode(payload, type=dict[str, str]) for payload in payloads]
        return PeerError(
            f"The ranks are not of one mind about {self.doing}. Nothing was changed.",
            where=f"a job of {channel.world_size} ranks",
            evidence=list(_differences(everyone)),
            next_step="Start every rank with the same software, configuration and options, and show it the same files.",
        )

    @cached_property
    def _as_json(self) -> dict[str, str]:
        told = (leaf for subject, value in self.facts.items() for leaf in _flat(value, subject))
        return {escape_text(path): escape_text(text) for path, text in told}


def software_versions() -> dict[str, str]:
    """The versions that decide what a checkpoint means, of what this process has imported."""
    found = {"paddleformers_fc": __version__}
    paddle = sys.modules.get("paddle")
    if paddle is not None:
        found["paddle"] = str(paddle.__version__)
    if "paddleformers" in sys.modules:
        found["paddleformers"] = _installed("paddleformers")
    return found


@lru_cache
def _installed(name: str) -> str:
    """A distribution's version, which its metadata says: a file that is parsed once."""
    return importlib.metadata.version(name)


def comparable_config(model: ModelDescription) -> dict[str, object]:
    """A model's class and configuration without what ranks of one model may differ in."""
    config = {
        key: value
        for key, value in model.config.items()
        if key not in _OF_ONE_RANK and not key.endswith(_PLACE_OF_A_RANK)
    }
    return {**config, IS_FLEET: model.is_fleet}


def _flat(value: object, subject: str) -> Iterator[tuple[str, str]]:
    """Every leaf of nested mappings under its path, as text."""
    if isinstance(value, Mapping) and value:
        for key in value:
            yield from _flat(value[key], f"{subject}.{key}")
    else:
        yield subject, value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _differences(everyone: list[dict[str, str]]) -> Iterator[str]:
    for subject in sorted({subject for told in everyone for subject in told}):
        values = [told.get(subject, NOT_SET) for told in everyone]
        if len(set(values)) > 1:
            yield f"{subject}: {group_by_value([_shortened(value) for value in values])}"


def _shortened(value: str) -> str:
    """A long value by its end as well, and by a digest, so that two that begin alike are told apart."""
    if len(value) <= _LONGEST:
        return value
    return (
        f"{value[: _LONGEST // 2]}... ({len(value)} characters, xxh3_128 {xxhash.xxh3_128_hexdigest(value.encode())})"
    )
