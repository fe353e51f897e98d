"""The types of the commands' JSON documents; their docstrings generate a page of the site.

Keys are not renamed or removed within a major version. New keys may be added, so readers must ignore unknown keys.
"""

from __future__ import annotations

from typing import Any

from paddleformers_fc.cli.explaining import FamilyTable
from paddleformers_fc.cli.exporting import Converted, Exported
from paddleformers_fc.cli.training import Ended, TrainingJob
from paddleformers_fc.execute.diff_checkpoints import Difference
from paddleformers_fc.execute.output_directory import Cleaned, Inspection, ListedFacts
from paddleformers_fc.execute.verify import Verification
from paddleformers_fc.formats.aoa_statements import StatementList
from paddleformers_fc.plan.explain import Explanation
from paddleformers_fc.plan.forecast import GridPlan
from paddleformers_fc.trainer.diagnosis import Diagnosis

DOCUMENTS: dict[str, type[Any]] = {
    "inspect": Inspection,
    "list": ListedFacts,
    "explain": Explanation,
    "doctor": Diagnosis,
    "verify": Verification,
    "diff": Difference,
    "plan": GridPlan,
    "export": Exported,
    "convert": Converted,
    "clean": Cleaned,
    "aoa": StatementList,
    "families": FamilyTable,
    "train": Ended,
    "train --dry-run": TrainingJob,
}
"""The type of the document that a command prints if it succeeds; ``verify`` and ``train`` add the keys of an error."""

FREE = {"register-path": "`custom_register_path`, the path of the file."}
"""Commands whose documents have no type, with a description."""
