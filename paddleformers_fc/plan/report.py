"""Report the mismatches between a checkpoint and a model.

A report is a set of lines, each with its kind. The reports of all ranks are merged by union, so that every rank raises
the same error. Indices are folded: ``layers.{0...31}``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from paddleformers_fc.errors import MismatchError, cut
from paddleformers_fc.layout.roles import MASTER, SHARD_NUMBER_SUFFIXES, STATE_SUFFIXES
from paddleformers_fc.text import count_text, fold, natural

HEADINGS = {
    "missing": "MISSING: in the model, but not stored",
    "unexpected": "UNEXPECTED: stored, but read by no rank",
    "shape": "SHAPE: stored and target shapes differ",
    "dtype": "DTYPE: stored and target dtypes differ, and no cast is declared",
    "coverage": "COVERAGE: not every element is written exactly once",
    "unequal": "UNEQUAL: values that must be equal are not",
}


CHECKPOINT, OPEN_WEIGHTS = "checkpoint", "open weights"
"""Names of the stored side in errors."""
_OPEN_WEIGHTS_STEP = "Name the directory of this model's weights, or correct the config.json next to them."
_EXPERTS_STEP = "Change the experts in the files as the first line says, or name a directory of published weights."
_TRANSPOSED = re.compile(r"experts\.\w+: stored \[(\d+), (\d+), (\d+)\], expected \[\1, \3, \2\]")
_SINGLE, _STACKED = re.compile(r"\.experts\.\d+\.\w+\.weight$"), re.compile(r"needs .*\.experts\.(gate_up|down)_proj$")
_MODEL_STEP = "Resume with the model this checkpoint was saved from, or name another checkpoint."
_STATES_STEP = (
    "Resume with the optimizer and the trained parameters of the run that saved it. To start a new run from its "
    "weights, set ignore_load_lr_and_optim: true; a script loads them without the optimizer."
)
_CUTS_STEP = (
    "Resume with the tensor parallel degree of the run that saved it: the optimizer keeps one number per local tensor, "
    "which is exact only if tensors are sharded in the same way."
)
_STATE = re.compile(r"\.[A-Za-z_]\w*_0$")
"""The suffix of a state, of any optimizer."""
_DTYPE_STEP = (
    "Resume in the precision of the run that saved it: the same compute_type (or bf16, fp16), fp16_opt_level and "
    "amp_master_grad. Or set flex_allow_casts: true (allow_casts=True of load, --dtype of plan) to change between "
    "float32 and bfloat16."
)


class Report(msgspec.Struct):
    """Lines with their kinds, keys of :data:`HEADINGS`; empty if the checkpoint matches the model."""

    lines: set[tuple[str, str]] = set()

    def add(self, kind: str, line: str) -> None:
        """Add one line."""
        self.lines.add((kind, cut(line)))

    def of(self, kind: str) -> set[str]:
        """Return the lines of one kind."""
        return {line for one, line in self.lines if one == kind}

    def merge(self, others: Iterable[Report]) -> Report:
        """Return the union of this report and others."""
        return Report(self.lines.union(*(report.lines for report in others)))

    def to_wire(self) -> list[tuple[str, str]]:
        """Return the lines sorted, because ranks send equal messages only once."""
        return sorted(self.lines)

    def evidence(self) -> list[str]:
        """Return the report as folded lines under headings."""
        text: list[str] = []
        for kind, heading in HEADINGS.items():
            if lines := self.of(kind):
                text.append(f"{heading} ({len(lines)})")
                text.extend(f"  {line}" for line in fold(states_joined(sorted(lines, key=natural))))
        return text

    def raise_error(self, where: str, why: Sequence[str] = (), stored: str = CHECKPOINT) -> None:
        """Raise the report as an error.

        Args:
            where: the checkpoint.
            why: explanations to print before the lines.
            stored: :data:`CHECKPOINT` or :data:`OPEN_WEIGHTS`.

        Raises:
            MismatchError: the report is not empty.
        """
        if not self.lines:
            return
        step = self._step()
        if stored == OPEN_WEIGHTS:
            experts = self._experts()
            why, step = (*why, *experts), _EXPERTS_STEP if experts else _OPEN_WEIGHTS_STEP
        count = count_text(len(self.lines), "difference")
        raise MismatchError(
            f"The {stored} and the model do not fit: {count}. No weight was changed.",
            where=where,
            evidence=[*why, *self.evidence()],
            next_step=step,
        )

    def _experts(self) -> list[str]:
        """Explain the mismatch if the experts of open weights are stored as Transformers 5 saves them."""
        if any(map(_TRANSPOSED.search, self.of("shape"))):
            return ["experts are stored [expert, out, in], as Transformers 5 saves them: exchange their last two axes"]
        if any(map(_SINGLE.search, self.of("unexpected"))) and any(map(_STACKED.search, self.of("missing"))):
            return ["experts are stored one by one, as Transformers 5 saves them: stack those of a layer"]
        return []

    def _step(self) -> str:
        """Return the next step. If the precision differs, master weights are missing or unexpected as well."""
        shapes = self.of("shape")
        if shapes and all(any(suffix in line for suffix in SHARD_NUMBER_SUFFIXES) for line in shapes):
            return _CUTS_STEP
        found = {kind for kind, _ in self.lines}
        names = self.of("missing") | self.of("unexpected")
        masters_only = all(MASTER.suffix in line for line in names)
        if "dtype" in found and found <= {"dtype", "missing", "unexpected"} and masters_only:
            return _DTYPE_STEP
        states_only = found <= {"missing", "unexpected"} and all(_STATE.search(line) for line in names)
        return _STATES_STEP if states_only else _MODEL_STEP


def states_joined(lines: Iterable[str]) -> list[str]:
    """Join the names of a parameter's states in one line: ``w (itself, w_0, moment1_0)``."""
    joined: dict[str, list[str]] = {}
    for line in lines:
        found = next((suffix for suffix in STATE_SUFFIXES if line.endswith(suffix)), "")
        joined.setdefault(line[: len(line) - len(found)], []).append(found.lstrip(".") or "itself")
    return [name if states == ["itself"] else f"{name} ({', '.join(states)})" for name, states in joined.items()]
