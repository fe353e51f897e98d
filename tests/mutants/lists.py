"""All mutants, package by package."""

from __future__ import annotations

from tests.mutants import execute, formats, layout, plan, storage, trainer

MUTANTS = (
    *storage.MUTANTS,
    *execute.MUTANTS,
    *plan.MUTANTS,
    *formats.MUTANTS,
    *layout.MUTANTS,
    *trainer.MUTANTS,
)
