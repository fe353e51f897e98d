"""Every error a user can meet, in one tree.

::

    FlexError
    ├── OptionError          a setting is out of range, or two settings contradict each other
    ├── CheckpointError      something is wrong with what is on disk
    │   ├── NotACheckpoint   no manifest: the directory is unfinished, foreign or empty
    │   ├── Corrupt          a file is missing, truncated, of another size or another checksum
    │   └── FormatError      bytes that do not follow the format they claim
    ├── MappingError         a mapping that cannot be proved
    ├── MismatchError        stored and wanted do not fit: names, shapes, dtypes, coverage
    ├── StorageError         the operating system refused a read, write, sync or rename
    ├── PeerError            another rank failed, or the ranks disagree
    └── EnvironmentMismatch  a version of Paddle or PaddleFormers that this package does not know

Every error says what went wrong, where, on which evidence, and what to do next. All problems of one
checkpoint are collected in one error: ``evidence`` is a list of lines, already folded for a reader.
Errors travel between ranks as plain JSON (:meth:`FlexError.to_wire`), so that every rank raises the same text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence


class FlexError(Exception):
    """The root of the tree.

    Args:
        what: one sentence that states the fault.
        where: the file, directory, rank, option or tensor it was found in.
        evidence: the facts, one per line; empty when ``what`` already holds them.
        next_step: one sentence that says what the reader can do.
    """

    def __init__(self, what: str, *, where: str = "", evidence: Sequence[str] = (), next_step: str = "") -> None:
        self.what = what
        self.where = where
        self.evidence = tuple(evidence)
        self.next_step = next_step
        super().__init__(self.render())

    def __reduce__(self) -> tuple[object, ...]:
        return (from_wire, (self.to_wire(),))

    def render(self) -> str:
        """The whole message as a person reads it, several lines of text."""
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        lines.extend(f"  - {line}" for line in self.evidence)
        if self.next_step:
            lines.append(f"  next: {self.next_step}")
        return "\n".join(lines)

    def to_wire(self) -> str:
        """This error as one line of JSON, for another rank or for ``--json``."""
        return json.dumps(
            {
                "error": type(self).__name__,
                "what": self.what,
                "where": self.where,
                "evidence": list(self.evidence),
                "next_step": self.next_step,
            }
        )


class OptionError(FlexError):
    """A setting is out of range, or two settings contradict each other."""


class CheckpointError(FlexError):
    """Something is wrong with what is on disk."""


class NotACheckpoint(CheckpointError):
    """The directory holds no finished flex checkpoint."""


class Corrupt(CheckpointError):
    """A file of the checkpoint is missing, truncated, of another size or another checksum."""


class FormatError(CheckpointError):
    """Bytes that do not follow the format they claim to be in."""


class MappingError(FlexError):
    """A mapping that cannot be proved total, single-writer, in bounds and dtype-closed."""


class MismatchError(FlexError):
    """What is stored and what is wanted do not fit: names, shapes, dtypes or coverage."""


class StorageError(FlexError):
    """The operating system refused a read, a write, a sync or a rename."""


class PeerError(FlexError):
    """Another rank failed, or the ranks do not agree on what they are doing."""


class EnvironmentMismatch(FlexError):
    """A version of Paddle or PaddleFormers that this package does not know."""


_BY_NAME = {
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
        StorageError,
        PeerError,
        EnvironmentMismatch,
    )
}


def from_wire(text: str) -> FlexError:
    """The error that :meth:`FlexError.to_wire` wrote."""
    fields = json.loads(text)
    kind = _BY_NAME.get(fields["error"], FlexError)
    return kind(fields["what"], where=fields["where"], evidence=fields["evidence"], next_step=fields["next_step"])
