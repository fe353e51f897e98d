"""Layouts: shards, flattened ranges, and their memory order. No framework is imported here."""
