"""All errors that reach a user.

::

    FlexError
    ├── OptionError          a setting is out of range, or two settings contradict each other
    ├── CheckpointError      the content of a checkpoint directory is invalid
    │   ├── NotACheckpoint   no manifest: the directory is unfinished, foreign or empty
    │   ├── Corrupt          a file is missing, truncated, of another size or another checksum
    │   └── FormatError      bytes that do not follow the format they claim
    ├── MappingError         a mapping that cannot be proved
    ├── MismatchError        stored and target tensors differ: names, shapes, dtypes, coverage
    │   └── Diverged         copies of a tied tensor were saved with different values
    ├── StorageError         the operating system refused a read, write, sync or rename
    ├── PeerError            another rank failed, or the ranks disagree
    └── EnvironmentMismatch  a version, method or Trainer class of Paddle or PaddleFormers is not the expected one

Every error contains the problem, the place, the evidence and the next step. One error collects all problems of a
checkpoint, one line of evidence each. Errors travel between ranks as JSON (:meth:`FlexError.to_wire`), so all ranks
raise the same text. Names and values from disk can have any length and content. A line is therefore limited to
:data:`LONGEST_LINE` characters and the evidence to :data:`MOST_EVIDENCE`, and control characters are escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

LONGEST_LINE = 4_000
"""Maximum length of one line of an error, in characters; longer lines keep their beginning and end."""
MOST_EVIDENCE = 1_000_000
"""Maximum length of the evidence of an error, in characters: enough for ten thousand files, a line each."""

_GAP = " ... "
_ROOM_FOR_THE_REST = 40


class FlexError(Exception):
    """Base class of all errors.

    Args:
        what: the problem, in one sentence.
        where: the affected file, directory, rank, option or tensor.
        evidence: the facts, one per line; empty if ``what`` contains them.
        next_step: one imperative sentence.
    """

    def __init__(self, what: str, *, where: str = "", evidence: Sequence[str] = (), next_step: str = "") -> None:
        self.what = cut(what)
        self.where = cut(where)
        self.evidence = tuple(_bounded(evidence))
        self.next_step = cut(next_step)
        super().__init__(self.render())

    def __reduce__(self) -> tuple[object, ...]:
        return (from_wire, (self.to_wire(),))

    def render(self) -> str:
        """Return the complete message, on several lines."""
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        # An indented line belongs to the heading above it.
        lines.extend(f"    {line}" if line.startswith(" ") else f"  - {line}" for line in self.evidence)
        if self.next_step:
            lines.append(f"  next: {self.next_step}")
        return "\n".join(map(_shown, lines))

    def in_one_line(self) -> str:
        """Return the problem and the evidence as one log line.

        The preceding log line names the place, so only the last part of its path is repeated.
        """
        what, name = self.what, self.where.rpartition("/")[2]
        if name and what.startswith(f"{self.where} "):
            what = name + what[len(self.where) :]
        if self.evidence:
            what = f"{what.removesuffix('.')}: {'; '.join(self.evidence)}"
        return _shown(cut(what)).replace("\n", "\\n")

    def to_wire(self) -> str:
        """Return this error as one line of JSON, for another rank or for ``--json``."""
        return json.dumps(
            {
                "error": type(self).__name__,
                "what": self.what,
                "where": self.where,
                "evidence": list(self.evidence),
                "next_step": self.next_step,
            }
        )


def cut(line: str, longest: int = LONGEST_LINE) -> str:
    """Return a line of at most ``longest`` characters; a longer one keeps its beginning and end."""
    if len(line) <= longest:
        return line
    half = (longest - len(_GAP)) // 2
    return f"{line[:half]}{_GAP}{line[-half:]}"


def _bounded(lines: Iterable[str]) -> list[str]:
    """Limit the length of each line and of all lines together."""
    kept = [cut(line) for line in lines]
    if sum(map(len, kept)) <= MOST_EVIDENCE:
        return kept
    total = _ROOM_FOR_THE_REST
    for number, line in enumerate(kept):
        total += len(line)
        if total > MOST_EVIDENCE:
            return [*kept[:number], f"... and {len(kept) - number} lines more"]
    return kept


def _shown(line: str) -> str:
    """Escape a line for a terminal or a log; line breaks stay, because evidence may contain statements."""
    return line if line.isprintable() else "".join(map(_character, line))


def _character(one: str) -> str:
    return one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode("ascii")


class OptionError(FlexError):
    """A setting is out of range, or two settings contradict each other.

    Why: A typing error, a key of another version, or a combination that this package does not support.

    What to do: Correct the key or argument that the error names. No checkpoint was read or changed.
    """


class CheckpointError(FlexError):
    """The content of a checkpoint directory is invalid.

    Why: A subclass names the fault. This class itself is raised for several faults at once.

    What to do: Run ``paddleformers-fc verify DIR``, which lists every fault.
    """


class NotACheckpoint(CheckpointError):
    """The directory contains no finished flex checkpoint.

    Why: A save that was interrupted before its commit, a wrong path, or a checkpoint of another format.

    What to do: Run ``paddleformers-fc inspect`` on the output directory, which lists checkpoints and interrupted saves.
    Name one of the checkpoints.
    """


class Corrupt(CheckpointError):
    """A file of the checkpoint is missing, truncated, of another size or another checksum.

    Why: A copy or upload that ended early, a disk fault, or a file that another program changed.

    What to do: Run ``paddleformers-fc verify DIR``, restore the files that it lists, or resume from an older
    checkpoint.
    """


class FormatError(CheckpointError):
    """A file does not follow its format.

    Why: Another program, or a newer version of this package, wrote or changed the file.

    What to do: Restore the file, or install the version of this package that wrote it.
    """


class MappingError(FlexError):
    """A mapping that cannot be proved total, single-writer, in bounds and dtype-closed.

    Why: Statements or a family do not cover every element, cover an element twice, or are for other sizes.

    What to do: Correct the statements or the family; the error lists the tensors. No tensor was read or written.
    """


class MismatchError(FlexError):
    """The stored and the target tensors do not match: names, shapes, dtypes or coverage.

    Why: The model, configuration, precision or optimizer differs from the saved one.

    What to do: Compare the listed names and shapes with the configuration. ``aoa_config`` maps renamed tensors;
    ``flex_allow_config_changes`` and ``flex_allow_casts`` allow intended changes.
    """


class Diverged(MismatchError):
    """Copies of a tensor were saved with different values, and none is chosen.

    Why: On pipeline stages or tensor-parallel ranks, the copies of a parameter drifted apart in training.

    What to do: Choose a copy with ``flex_tied`` or ``--tied``, or use an older checkpoint.
    """


class StorageError(FlexError):
    """The operating system refused a read, a write, a sync or a rename.

    Why: A full disk, missing permissions, a limit on open files, or an unreachable store or network.

    What to do: Remove the cause that the evidence names, and run the operation again. An incomplete save leaves older
    checkpoints unchanged.
    """


class PeerError(FlexError):
    """Another rank failed, or the ranks run different operations.

    Why: A rank was killed, was not started, hangs, or runs with different options or versions.

    What to do: Read the log of the rank that the error names. The first error there is the cause.
    """


class EnvironmentMismatch(FlexError):
    """A version, method or Trainer class of Paddle or PaddleFormers differs from the expected one.

    Why: A package is missing, or its version is not tested with this package.

    What to do: Run the command in the error. ``flex_unknown_versions: warn`` tries other versions.
    """


BY_NAME = {
    kind.__name__: kind
    for kind in (
        FlexError,
        OptionError,
        CheckpointError,
        NotACheckpoint,
        Corrupt,
        FormatError,
        MappingError,
        MismatchError,
        Diverged,
        StorageError,
        PeerError,
        EnvironmentMismatch,
    )
}
"""Every error class by its name."""


def from_wire(text: str) -> FlexError:
    """Decode the text of :meth:`FlexError.to_wire`; return a :class:`PeerError` for any other text."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not _is_wire(fields):
        return PeerError(
            "Invalid error message from another rank.",
            evidence=[text[:LONGEST_LINE]],
            next_step="Run the same version of paddleformers_fc on every rank.",
        )
    kind = BY_NAME.get(fields["error"], FlexError)
    return kind(fields["what"], where=fields["where"], evidence=fields["evidence"], next_step=fields["next_step"])


def _is_wire(fields: Any) -> bool:
    return (
        isinstance(fields, dict)
        and all(isinstance(fields.get(key), str) for key in ("error", "what", "where", "next_step"))
        and isinstance(fields.get("evidence"), list)
        and all(isinstance(line, str) for line in fields["evidence"])
    )
