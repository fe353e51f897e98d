"""Catalog x Mapping x Layout -> read items, and a report of mismatches. No framework is imported here."""
