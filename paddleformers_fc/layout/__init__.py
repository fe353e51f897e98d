"""Layouts: shards, flattened ranges, and their memory order. No framework is imported here."""

from paddleformers_fc.layout.roles import ROLES, StateName, split_state_name
from paddleformers_fc.layout.shards import Fragment, Shard

__all__ = ["ROLES", "Fragment", "Shard", "StateName", "split_state_name"]
