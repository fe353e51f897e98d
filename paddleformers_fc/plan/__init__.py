"""Catalog x Mapping x Layout -> read items, and the report that a person reads. No framework is imported here."""

from paddleformers_fc.plan.build import Source, plan_reads
from paddleformers_fc.plan.items import EqualCheck, LoadPlan, ReadItem, StoredPart
from paddleformers_fc.plan.report import Report
from paddleformers_fc.plan.sources import canonical_layout, canonical_source, huggingface_source, resume_source
from paddleformers_fc.plan.statements import stated_source

__all__ = [
    "EqualCheck",
    "LoadPlan",
    "ReadItem",
    "Report",
    "Source",
    "StoredPart",
    "canonical_layout",
    "canonical_source",
    "huggingface_source",
    "plan_reads",
    "resume_source",
    "stated_source",
]
