"""A file server whose metadata is slow or stale: a library for LD_PRELOAD, see ``metadata.c``."""
