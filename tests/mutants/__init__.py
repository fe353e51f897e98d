"""Mutants: small faults that are put into the package one at a time, to see that the tests notice them.

``make mutants`` applies each to a copy of this tree, runs the tests that should notice, and prints the share that do.
The lists beside this module hold them, one text per package. That every mutant still applies is tested with all else.
"""
