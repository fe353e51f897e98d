"""Tools that use the core and that the core does not import: matrices, demo, simulated ranks."""
