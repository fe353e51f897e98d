"""Plans: catalog x mapping x layout -> read items, and a report of mismatches. Imports no framework."""
