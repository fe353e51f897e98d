"""All mutants, package by package."""

from __future__ import annotations

from tests.mutants import catalog, execute, layout, plan, storage, trainer

MUTANTS = (
    *storage.MUTANTS,
    *execute.MUTANTS,
    *plan.MUTANTS,
    *catalog.MUTANTS,
    *layout.MUTANTS,
    *trainer.MUTANTS,
)
