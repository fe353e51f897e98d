"""The tree of all errors that reach a user.

::

    FlexError
    ├── OptionError          a setting is out of range, or two settings contradict each other
    ├── CheckpointError      the content of a checkpoint directory is invalid
    │   ├── NotACheckpoint   no manifest: the directory is unfinished, foreign or empty
    │   ├── Corrupt          a file is missing, truncated, of another size or another checksum
    │   └── FormatError      bytes that do not follow the format they claim
    ├── MappingError         a mapping that cannot be proved
    ├── MismatchError        stored and wanted do not fit: names, shapes, dtypes, coverage
    │   └── Diverged         copies of a tied tensor were saved with different values
    ├── StorageError         the operating system refused a read, write, sync or rename
    ├── PeerError            another rank failed, or the ranks disagree
    └── EnvironmentMismatch  a version, method or Trainer class of Paddle or PaddleFormers is not the expected one

Every error contains the problem, the place, the evidence and the next step. All problems of one
checkpoint are collected in one error: ``evidence`` is a list of lines, already folded for a reader.
Errors travel between ranks as plain JSON (:meth:`FlexError.to_wire`), so that every rank raises the same text.

Errors quote names, values and lines from disks, of any length and content. Each line is therefore bounded by
:data:`LONGEST_LINE` characters and the evidence by :data:`MOST_EVIDENCE`, in messages and on the wire. Messages show
control characters as escapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

LONGEST_LINE = 4_000
"""Maximum length of one line of an error, in characters; of a longer one the beginning and the end are kept."""
MOST_EVIDENCE = 1_000_000
"""Maximum length of the evidence of an error, in characters: a line for each of ten thousand files."""

_GAP = " ... "
_ROOM_FOR_THE_REST = 40


class FlexError(Exception):
    """The root of the tree.

    Args:
        what: one sentence that states the fault.
        where: the file, directory, rank, option or tensor it was found in.
        evidence: the facts, one per line; empty when ``what`` already holds them.
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
        """Return the whole message in several lines."""
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        # An indented line belongs to the heading above it.
        lines.extend(f"    {line}" if line.startswith(" ") else f"  - {line}" for line in self.evidence)
        if self.next_step:
            lines.append(f"  next: {self.next_step}")
        return "\n".join(map(_shown, lines))

    def in_one_line(self) -> str:
        """Return the problem and the evidence in one line for a log.

        The line before it names the place already, so only the last part of its path is repeated.
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


def cut(line: str) -> str:
    """Return a line of bounded length: the beginning and the end of one that is too long."""
    if len(line) <= LONGEST_LINE:
        return line
    half = (LONGEST_LINE - len(_GAP)) // 2
    return f"{line[:half]}{_GAP}{line[-half:]}"


def _bounded(lines: Iterable[str]) -> list[str]:
    """Return lines of bounded length and bounded number; bounded input is unchanged."""
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

    Why: The classes below state the fault. This class is raised for several faults at once.

    What to do: Run ``paddleformers-fc verify DIR``, which lists every fault.
    """


class NotACheckpoint(CheckpointError):
    """The directory holds no finished flex checkpoint.

    Why: A save that was interrupted before its commit, a wrong path, or a checkpoint of another format.

    What to do: Run ``paddleformers-fc inspect`` with the output directory, which lists its checkpoints and leftovers.
    Name one of the checkpoints.
    """


class Corrupt(CheckpointError):
    """A file of the checkpoint is missing, truncated, of another size or another checksum.

    Why: A copy or upload that ended early, a fault of a disk, or a file that another program changed.

    What to do: Run ``paddleformers-fc verify DIR``, restore the files that it lists, or resume an older checkpoint.
    """


class FormatError(CheckpointError):
    """Bytes that do not follow the format they claim to be in.

    Why: Another program wrote or changed the file, or a newer version of this package did.

    What to do: Restore the file, or install the version of this package that wrote it.
    """


class MappingError(FlexError):
    """A mapping that cannot be proved total, single-writer, in bounds and dtype-closed.

    Why: Statements or a family do not cover every element, cover one twice, or fit other sizes.

    What to do: Correct the statements or the family; the error lists the tensors. No tensor was read or written.
    """


class MismatchError(FlexError):
    """The stored and the wanted tensors do not fit: names, shapes, dtypes or coverage.

    Why: Another model, configuration, precision or optimizer than the one that was saved.

    What to do: Compare the listed names and shapes with the configuration. ``aoa_config`` maps renamed tensors, and
    ``flex_allow_config_changes`` and ``flex_allow_casts`` allow changes that are meant.
    """


class Diverged(MismatchError):
    """Copies of a tensor were saved with different values, so that none of them is read unless it is chosen.

    Why: Pipeline stages or tensor-parallel ranks trained the copies of one parameter apart.

    What to do: Choose a copy with ``flex_tied`` or ``--tied``, or use an older checkpoint.
    """


class StorageError(FlexError):
    """The operating system refused a read, a write, a sync or a rename.

    Why: A full disk, missing rights, a limit of open files, or a store or network that does not answer.

    What to do: Remove the cause that the evidence states, and start the operation again. An incomplete save leaves
    older checkpoints unchanged.
    """


class PeerError(FlexError):
    """Another rank failed, or the ranks run different operations.

    Why: A rank was killed, was not started, hangs, or runs with other options or versions.

    What to do: Read the log of the rank that the error names. The first error there is the cause.
    """


class EnvironmentMismatch(FlexError):
    """A version, method or Trainer class of Paddle or PaddleFormers differs from the expected one.

    Why: A missing package, or a version that this one is not tested with.

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
"""Every class of errors by its name."""


def from_wire(text: str) -> FlexError:
    """Return the error that :meth:`FlexError.to_wire` wrote; a :class:`PeerError` for a text that it did not write."""
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
