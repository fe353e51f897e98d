"""Derivation of a mapping for a model that no family declares."""
