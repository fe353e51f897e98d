"""Catalog x Mapping x Layout -> read items, and a report of mismatches. No framework is imported here."""

from paddleformers_fc.plan.build import ReadSource, plan_reads
from paddleformers_fc.plan.items import EqualCheck, LoadPlan, ReadItem, StoredPart
from paddleformers_fc.plan.report import Report
from paddleformers_fc.plan.sources import (
    canonical_layout,
    canonical_names,
    canonical_source,
    huggingface_source,
    resume_source,
)
from paddleformers_fc.plan.statements import statements_source

__all__ = [
    "EqualCheck",
    "LoadPlan",
    "ReadItem",
    "ReadSource",
    "Report",
    "StoredPart",
    "canonical_layout",
    "canonical_names",
    "canonical_source",
    "huggingface_source",
    "plan_reads",
    "resume_source",
    "statements_source",
]
