"""A file server whose metadata is slow, stale or failing: a library for LD_PRELOAD, see ``metadata.c``."""
