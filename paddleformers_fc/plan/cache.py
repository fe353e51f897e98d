"""Plans that were made once: a job that resumes the same checkpoint under the same layout does not plan again.

A plan follows from its :class:`PlanKey` and from nothing else: digests of what is stored and where, of the stored
rules, of both models' descriptions and families, of every shard that is wanted, of a user's statements, and the version
of this package. What the key does not know cannot change a plan. Which files are read is not remembered: that they are
those which were checked is for the reader to see, as without a cache.

Plans are kept in this process, and in a directory where one is given. A file there holds its whole key and a checksum
of itself. One that cannot be read, or that is of another version, key or content than was written, is as good as none,
and is written anew. It is msgpack and never a pickle. A plan that somebody made up is held to reading boxes of the
checkpoint's own files into the wanted shards, as many elements as each has (:func:`fits`); which boxes, only planning
anew would know, so the directory should be as safe as the checkpoints are.

Time: the key is one pass over headers and shards that are in memory; a plan is read and written at a few million
strings and numbers a second. Memory: at most a number of read items that is given. Disk: one file per distinct layout
of a rank, because a newer checkpoint under that layout takes its place.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from paddleformers_fc import __version__
from paddleformers_fc.aoa import AoaTensor
from paddleformers_fc.errors import FlexError
from paddleformers_fc.families import ModelDescription, family_for, is_known
from paddleformers_fc.formats.catalog import Catalog, StoredForm
from paddleformers_fc.formats.checkpoint import OpenedCheckpoint
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import MAX_AXES, MAX_LENGTH, Box, Shape, whole
from paddleformers_fc.mapping.templates import NEW_AXIS
from paddleformers_fc.plan.items import EqualCheck, LoadPlan, ReadItem, StoredPart
from paddleformers_fc.plan.report import Report
from paddleformers_fc.storage.dtypes import to_safetensors
from paddleformers_fc.storage.files import make_directories, remove_file, rename, write_file
from paddleformers_fc.storage.json_io import read_document

FORMAT = 2
"""Of the files in the directory; it is part of every key."""

MOST_ITEMS = 250_000
"""How many read items a process keeps, unless it is told otherwise: about 50 MB."""

_MAGIC = b"flex_plan\n"
_CHECKSUM_BYTES = 16
MAX_BYTES = 512 * 1024 * 1024
"""The longest file that is read: a plan of some ten million items."""

_UNREADABLE = (FlexError, LookupError, ValueError, TypeError, ArithmeticError, RecursionError)
_log = logging.getLogger(__name__)


class PlanKey(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a plan depends on; digests are blake2b, 32 hex digits.

    Attributes:
        format: of the file.
        version: of this package, whose code derives mappings.
        manifest: every file's path, size and checksums.
        stored: every tensor's dtype and shape, and where its boxes lie.
        rules: the stored model's rules.
        models: both descriptions, and what their families declare.
        wanted: role, name, dtype, global shape, box and range of every shard, in order.
        statements: a user's ``aoa_config`` and the tensors that it speaks of.
        tied: which copy of a tied tensor is read.
    """

    format: int
    version: str
    manifest: str
    stored: str
    rules: str
    models: str
    wanted: str
    statements: str
    tied: str


@dataclass(frozen=True)
class CachedPlan:
    """A plan that can be carried out.

    Args:
        plan: with an empty report.
        unwanted: stored parameters that need not be read by anybody.
    """

    plan: LoadPlan
    unwanted: frozenset[str]


def plan_key(
    checkpoint: OpenedCheckpoint,
    model: ModelDescription,
    wanted: Mapping[str, Mapping[str, Shard]],
    aoa_config: Mapping[str, object] | None = None,
    tensors: Mapping[str, AoaTensor] | None = None,
) -> PlanKey:
    """The key of one rank's plan.

    Args:
        checkpoint: what is stored.
        model: the live model.
        wanted: role -> full name -> the shard to be filled.
        aoa_config: statements from stored names to the model's.
        tensors: every tensor of the live model, on all ranks, where there are statements.
    """
    models = [checkpoint.known, model]
    families = [repr(family_for(one.config)) for one in models if is_known(one.config)]
    return PlanKey(
        format=FORMAT,
        version=__version__,
        manifest=_digest(msgspec.msgpack.encode(checkpoint.manifest)),
        stored=_digest(_spelled(checkpoint.catalog)),
        rules=checkpoint.rules.digest,
        models=_digest(_json([[[dict(one.config), one.is_fleet] for one in models], families])),
        wanted=_digest(msgspec.msgpack.encode([(role, list(one), list(one.values())) for role, one in wanted.items()])),
        statements=_digest(_json(aoa_config and dict(aoa_config)) + msgspec.msgpack.encode(tensors)),
        tied=checkpoint.tied,
    )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _json(value: object) -> bytes:
    # What is no JSON is spelled as Python spells it: two runs may differ then, and the plan is made again.
    return json.dumps(value, sort_keys=True, default=repr).encode()


def _spelled(catalog: Catalog) -> bytes:
    forms: dict[StoredForm, int] = {}
    roles = [
        (
            role,
            [one.name for one in tensors.values()],
            [forms.setdefault(one.form, len(forms)) for one in tensors.values()],
            [one.offsets for one in tensors.values()],
        )
        for role, tensors in catalog.roles.items()
    ]
    return msgspec.msgpack.encode((roles, [(form.dtype, form.shape, form.boxes) for form in forms]))


class PlanCache:
    """Plans by key, in this process and in a directory. Threads may share one.

    Args:
        directory: where plans outlive the process; None for nowhere. It is made when the first plan is kept.
        most_items: how many read items are kept in the process.
    """

    def __init__(self, directory: Path | None = None, most_items: int = MOST_ITEMS) -> None:
        self._directory, self._most_items = directory, most_items
        self._held: OrderedDict[PlanKey, CachedPlan] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: PlanKey, fitting: Callable[[CachedPlan], bool] = lambda found: True) -> CachedPlan | None:
        """The plan of a key; None where it is not known, for whatever reason.

        Args:
            key: all that the plan depends on.
            fitting: whether a plan that comes from the directory can be one of this key, see :func:`fits`. What this
                process holds was made in it, or has passed.
        """
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        if self._directory is None:
            return None
        try:
            planned = decode_plan(read_document(self._path(self._directory, key), MAX_BYTES), key)
        except _UNREADABLE:
            return None
        if not fitting(planned):
            return None
        self._hold(key, planned)
        return planned

    def keep(self, key: PlanKey, planned: CachedPlan) -> None:
        """Remember a plan. That it cannot be written is worth a warning and never an error."""
        self._hold(key, planned)
        if self._directory is None:
            return
        try:
            self._write(self._directory, key, planned)
        except FlexError as error:
            _log.warning("A plan could not be kept in %s, and will be made again: %s", self._directory, error.what)

    def _hold(self, key: PlanKey, planned: CachedPlan) -> None:
        with self._lock:
            self._held[key] = planned
            self._held.move_to_end(key)
            while sum(len(one.plan.items) for one in self._held.values()) > self._most_items:
                self._held.popitem(last=False)

    def _write(self, directory: Path, key: PlanKey, planned: CachedPlan) -> None:
        make_directories(directory)
        path = self._path(directory, key)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
        try:
            write_file(partial, encode_plan(key, planned))
            rename(partial, path)
        finally:
            remove_file(partial)

    @staticmethod
    def _path(directory: Path, key: PlanKey) -> Path:
        return directory / f"{key.wanted}.plan"


class _Form(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """What many items have in common."""

    role: str
    dtype: str
    stored_shape: Shape
    stored_part: Box
    start: int
    shape: Shape
    part: Box
    axes: tuple[int, ...]


class _Document(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A file: items by columns. ``name`` and ``file`` count into ``names`` and ``files``, ``form`` into ``forms``."""

    key: PlanKey
    names: list[str]
    files: list[str]
    forms: list[_Form]
    name: list[int]
    file: list[int]
    begin: list[int]
    form: list[int]
    checks: list[EqualCheck]
    touched: dict[str, list[str]]
    unwanted: list[str]


_documents = msgspec.msgpack.Decoder(_Document)


def encode_plan(key: PlanKey, planned: CachedPlan) -> bytes:
    """A plan as the bytes of a file."""
    names: dict[str, int] = {}
    files: dict[str, int] = {}
    forms: dict[_Form, int] = {}
    document = _Document(key, [], [], [], [], [], [], [], list(planned.plan.checks), {}, sorted(planned.unwanted))
    for item in planned.plan.items:
        stored = item.stored
        form = _Form(
            *(item.role, stored.dtype, stored.shape, stored.part),
            *(item.start, item.shape, item.part, item.axes),
        )
        document.name.append(names.setdefault(item.name, len(names)))
        document.file.append(files.setdefault(stored.file, len(files)))
        document.begin.append(stored.begin)
        document.form.append(forms.setdefault(form, len(forms)))
    document.names, document.files, document.forms = list(names), list(files), list(forms)
    document.touched = {role: sorted(touched) for role, touched in planned.plan.touched.items()}
    body = msgspec.msgpack.encode(document)
    return _MAGIC + xxhash.xxh3_128_digest(body) + body


def decode_plan(data: bytes, key: PlanKey) -> CachedPlan:
    """The plan that :func:`encode_plan` wrote under this key.

    Raises:
        ValueError: it is of another key, or is not what was written.
    """
    start = len(_MAGIC) + _CHECKSUM_BYTES
    body = memoryview(data)[start:]
    if data[:start] != _MAGIC + xxhash.xxh3_128_digest(body):
        raise ValueError("The file is not what was written.")
    document = _documents.decode(body)
    if document.key != key:
        raise ValueError("The file is of another key.")
    if min((*document.name, *document.file, *document.begin, *document.form), default=0) < 0:
        raise ValueError("The file counts backwards.")
    for form in document.forms:
        _refuse_form(form)
    names, files, forms = document.names, document.files, document.forms
    items: list[ReadItem] = []
    for name, file, begin, number in zip(document.name, document.file, document.begin, document.form, strict=True):
        form = forms[number]
        stored = StoredPart(files[file], begin, form.stored_shape, form.stored_part, form.dtype)
        items.append(ReadItem(form.role, names[name], stored, form.start, form.shape, form.part, form.axes))
    touched = {role: frozenset(found) for role, found in document.touched.items()}
    plan = LoadPlan(tuple(items), tuple(document.checks), touched, Report())
    return CachedPlan(plan, frozenset(document.unwanted))


def _refuse_form(form: _Form) -> None:
    """A box that is read must lie in what is stored, a box that is filled in its fragment, and be of one size."""
    used = [axis for axis in form.axes if axis != NEW_AXIS]
    if form.start < 0 or sorted(used) != sorted(set(used)) or len(form.axes) != len(form.shape):
        raise ValueError("The file fills what cannot be filled.")
    if not _is_box(form.stored_shape, form.stored_part) or not _is_box(form.shape, form.part):
        raise ValueError("The file has a box outside its tensor.")
    read, filled = form.stored_part.shape, form.part.shape
    if tuple(1 if axis == NEW_AXIS else read[axis] for axis in form.axes) != filled or min(used, default=0) < 0:
        raise ValueError("The file fills a box with one of another size.")
    if form.part.volume != form.stored_part.volume:
        raise ValueError("The file fills a box with one of another size.")
    to_safetensors(form.dtype)


def _is_box(shape: Shape, part: Box) -> bool:
    lengths = (*shape, *part.lo, *part.hi)
    return (
        len(shape) <= MAX_AXES
        and len(shape) == len(part.lo) == len(part.hi)
        and all(0 <= length <= MAX_LENGTH for length in lengths)
        and min(part.shape, default=0) >= 0
        and whole(shape).contains(part)
    )


def fits(planned: CachedPlan, wanted: Mapping[str, Mapping[str, Shard]], files: Collection[str]) -> bool:
    """Whether a plan reads these files into these shards, and as many elements into each as it has, or none.

    Args:
        planned: as it was found.
        wanted: role -> full name -> the shard to be filled.
        files: of the checkpoint, by path.
    """
    filled: dict[tuple[str, str], int] = {}
    for item in planned.plan.items:
        shard = wanted.get(item.role, {}).get(item.name)
        if shard is None or item.stored.file not in files or item.start + math.prod(item.shape) > shard.size:
            return False
        key = (item.role, item.name)
        filled[key] = filled.get(key, 0) + item.part.volume
    parts = (part for check in planned.plan.checks for part in (check.left, check.right))
    return all(wanted[role][name].size == count for (role, name), count in filled.items()) and all(
        part.file in files and part.begin >= 0 and _is_box(part.shape, part.part) for part in parts
    )
