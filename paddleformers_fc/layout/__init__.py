"""Layouts: shards, flattened ranges, and their memory order. Imports no framework."""
