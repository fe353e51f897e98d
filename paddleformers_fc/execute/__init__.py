"""Carrying plans out: load, save, export, digest. Export and digest need no framework."""
