"""Compare what the files of one checkpoint state about the run that saved it.

A checksum proves that a file is what was written, and not that it belongs to the others. The facts of the manifest are
therefore compared with the other files: steps, samples and the number of ranks with the documents of the Trainer, the
family with the mapping. Names of files and the number of ranks are compared when the manifest is read, config.json and
mapping.json when the mapping is used (``plan.sources``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paddleformers_fc.errors import Corrupt
from paddleformers_fc.families import is_known
from paddleformers_fc.families.stated import family_name
from paddleformers_fc.formats.checkpoint import MAPPING_NAME, OpenedCheckpoint
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.storage.manifest import MANIFEST_NAME, TRAINER_DIRECTORY, Manifest, generators_rank
from paddleformers_fc.storage.state_json import decode_object

STATE = f"{TRAINER_DIRECTORY}/state.json"
DATA = f"{TRAINER_DIRECTORY}/data.json"
AVERAGE = f"{TRAINER_DIRECTORY}/ema.json"


def compare_run(checkpoint: OpenedCheckpoint) -> int:
    """Read the documents of the Trainer that state facts of the run, compare them, and return their number.

    Raises:
        Corrupt: see :func:`refuse_contradictions`; or a document is damaged.
    """
    names = [one for one in checkpoint.documents if one in (STATE, DATA, AVERAGE) or generators_rank(one) is not None]
    root = checkpoint.catalog.root
    documents = {name: decode_object(checkpoint.document(name), str(root / name)) for name in sorted(names)}
    refuse_contradictions(checkpoint, documents)
    return len(names)


def refuse_contradictions(checkpoint: OpenedCheckpoint, documents: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse documents of the Trainer that contradict the manifest.

    Args:
        checkpoint: an opened checkpoint with the state of a run.
        documents: its decoded documents, by path; those without facts of the run are ignored.
    Raises:
        Corrupt: with every contradiction.
    """
    root, record = checkpoint.catalog.root, checkpoint.manifest
    stated = {MAPPING_NAME: _family(checkpoint)}
    stated |= {name: _facts(name, values, record) for name, values in documents.items()}
    faults = [
        f"{name} has {what} {found!r}, {MANIFEST_NAME} has {recorded!r}"
        for name, facts in stated.items()
        for what, found, recorded in facts
        if found != recorded
    ]
    if faults:
        raise Corrupt(
            f"Files of {root} contradict each other.",
            where=str(root),
            evidence=fold(faults),
            next_step="Use another checkpoint; one of these files was changed after it was written, or is of another.",
        )


def _family(checkpoint: OpenedCheckpoint) -> Iterator[tuple[str, Any, Any]]:
    """Yield the family by the description and by the manifest, if this process knows the family."""
    if checkpoint.commit_record is not None and is_known(checkpoint.known.config):
        yield "family", family_name(checkpoint.known), checkpoint.commit_record.family


def _facts(name: str, values: Mapping[str, Any], record: Manifest) -> Iterator[tuple[str, Any, Any]]:
    """Yield facts of a document: the subject, its value there, and its value in the manifest."""
    if name == STATE:
        yield "step", values.get("global_step"), record.step
        yield "samples", values.get("consumed_samples", record.consumed_samples), record.consumed_samples
    elif name == DATA:
        position = values.get("position", values)
        yield "step", values.get("steps", record.step), record.step
        yield "samples", position.get("consumed") if isinstance(position, dict) else None, record.consumed_samples
    elif name == AVERAGE:
        step = values.get("step")
        if type(step) is int and step > record.step:
            yield "step", step, record.step
    elif generators_rank(name) is not None:
        yield "number of ranks", values.get("world_size"), record.world_size
