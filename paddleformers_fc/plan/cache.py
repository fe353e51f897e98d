"""Cache load plans for jobs that resume the same checkpoint under the same layout.

A plan depends only on its :class:`PlanKey`, which has digests of these: the stored tensors and their offsets, the
stored rules, both model descriptions and families, all wanted shards, the statements of a user, and the version of this
package. Identities of files are not part of a plan; readers compare them as without a cache.

Plans are cached in memory and optionally in a directory. A file contains its key and a checksum. A file that is
unreadable, or has another version, key or content, is ignored and overwritten. Files are msgpack and never pickles. A
forged plan can only read boxes of the checkpoint's files into the wanted shards, with as many elements as each has
(:func:`fits`). It can still choose wrong boxes, so the directory must be as trusted as the checkpoints.

Time: one pass over headers and shards in memory for the key; a few million strings and numbers per second for a plan.
Memory: bounded by a number of read items. Disk: one file per rank and layout, which a newer checkpoint replaces.
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
"""Version of the files; part of every key."""

MOST_ITEMS = 250_000
"""Default maximum of read items in memory: about 50 MB."""

_MAGIC = b"flex_plan\n"
_CHECKSUM_BYTES = 16
MAX_BYTES = 512 * 1024 * 1024
"""Maximum length of a file: a plan of ten million items."""

_UNREADABLE = (FlexError, LookupError, ValueError, TypeError, ArithmeticError, RecursionError)
_log = logging.getLogger(__name__)


class PlanKey(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything that a plan depends on; digests are blake2b, 32 hex digits.

    Attributes:
        format: version of the file.
        version: version of this package.
        manifest: path, size and checksums of every file.
        stored: dtype, shape, boxes and offsets of every tensor.
        rules: the rules of the stored model.
        models: both model descriptions, and the declarations of their families.
        wanted: role, name, dtype, global shape, box and range of every shard, in order.
        statements: ``aoa_config`` and the live tensors that it can name, and whether the precision may differ.
        tied: the copy of a tied tensor to read.
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
    """A plan without faults.

    Args:
        plan: its report is empty.
        unwanted: stored parameters that no rank needs to read.
    """

    plan: LoadPlan
    unwanted: frozenset[str]


def plan_key(
    checkpoint: OpenedCheckpoint,
    model: ModelDescription,
    wanted: Mapping[str, Mapping[str, Shard]],
    aoa_config: Mapping[str, object] | None = None,
    tensors: Mapping[str, AoaTensor] | None = None,
    may_cast: bool = False,
) -> PlanKey:
    """Return the key of one rank's plan.

    Args:
        checkpoint: the stored checkpoint.
        model: the description of the live model.
        wanted: role -> full name -> the shard to fill.
        aoa_config: statements from stored names to names of the model.
        tensors: all tensors of the live model on all ranks, if there are statements.
        may_cast: whether the precision may differ.
    """
    models = [checkpoint.known, model]
    statements = _json([aoa_config and dict(aoa_config), may_cast, *([True] if checkpoint.averaged else [])])
    families = [repr(family_for(one.config)) for one in models if is_known(one.config)]
    return PlanKey(
        format=FORMAT,
        version=__version__,
        manifest=_digest(msgspec.msgpack.encode(checkpoint.manifest if checkpoint.has_run else None)),
        stored=_digest(_catalog_bytes(checkpoint.catalog)),
        rules=checkpoint.rules.digest,
        models=_digest(
            _json([[[dict(one.config), one.is_fleet, one.adapters] for one in models], families, *_stated(model)])
        ),
        wanted=_digest(msgspec.msgpack.encode([(role, list(one), list(one.values())) for role, one in wanted.items()])),
        statements=_digest(statements + msgspec.msgpack.encode(tensors)),
        tied=checkpoint.tied,
    )


def _stated(model: ModelDescription) -> list[object]:
    stated: list[object] = [] if model.rules is None else [model.rules.digest]
    return [*stated, *([True] if model.is_global else [])]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _json(value: object) -> bytes:
    # Other values are encoded by repr, which may differ between runs: then the load is planned again.
    return json.dumps(value, sort_keys=True, default=repr).encode()


def _catalog_bytes(catalog: Catalog) -> bytes:
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
    return msgspec.msgpack.encode((roles, [form.content for form in forms]))


class PlanCache:
    """Plans by key, in memory and in a directory. Safe for threads.

    Args:
        directory: directory of the files; None for memory only. It is created with the first file.
        most_items: maximum of read items in memory.
    """

    def __init__(self, directory: Path | None = None, most_items: int = MOST_ITEMS) -> None:
        self._directory, self._most_items = directory, most_items
        self._plans: OrderedDict[PlanKey, CachedPlan] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: PlanKey, fitting: Callable[[CachedPlan], bool] = lambda found: True) -> CachedPlan | None:
        """Return the plan of a key; None if there is no valid one.

        Args:
            key: the key.
            fitting: validates a plan from the directory, see :func:`fits`. Plans in memory are valid.
        """
        with self._lock:
            if key in self._plans:
                self._plans.move_to_end(key)
                return self._plans[key]
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
        """Store a plan. A failed write is a warning and never an error."""
        self._hold(key, planned)
        if self._directory is None:
            return
        try:
            self._write(self._directory, key, planned)
        except FlexError as error:
            _log.warning("A load plan could not be written to %s: %s", self._directory, error.what)

    def _hold(self, key: PlanKey, planned: CachedPlan) -> None:
        with self._lock:
            self._plans[key] = planned
            self._plans.move_to_end(key)
            while sum(len(one.plan.items) for one in self._plans.values()) > self._most_items:
                self._plans.popitem(last=False)

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
    """Fields that many items share."""

    role: str
    dtype: str
    stored_shape: Shape
    stored_part: Box
    start: int
    shape: Shape
    part: Box
    axes: tuple[int, ...]


class _Document(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A file: items by columns. ``name``, ``file`` and ``form`` are indices into ``names``, ``files`` and ``forms``."""

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
    """Encode a plan as the bytes of a file."""
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
    """Decode a plan that :func:`encode_plan` encoded under this key.

    Raises:
        ValueError: another key, or invalid content.
    """
    start = len(_MAGIC) + _CHECKSUM_BYTES
    body = memoryview(data)[start:]
    if data[:start] != _MAGIC + xxhash.xxh3_128_digest(body):
        raise ValueError("invalid checksum")
    document = _documents.decode(body)
    if document.key != key:
        raise ValueError("another key")
    if min((*document.name, *document.file, *document.begin, *document.form), default=0) < 0:
        raise ValueError("negative index or offset")
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
    """Refuse boxes outside the stored box or the fragment, and pairs of different sizes."""
    used = [axis for axis in form.axes if axis != NEW_AXIS]
    if form.start < 0 or sorted(used) != sorted(set(used)) or len(form.axes) != len(form.shape):
        raise ValueError("invalid start or axes")
    if not _is_box(form.stored_shape, form.stored_part) or not _is_box(form.shape, form.part):
        raise ValueError("box outside its tensor")
    read, filled = form.stored_part.shape, form.part.shape
    shape = tuple(1 if axis == NEW_AXIS else read[axis] for axis in form.axes)
    if shape != filled or min(used, default=0) < 0 or form.part.volume != form.stored_part.volume:
        raise ValueError("boxes of different sizes")
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
    """Return whether a plan reads only these files and fills these shards completely or not at all.

    Args:
        planned: a plan from a directory.
        wanted: role -> full name -> the shard to fill.
        files: paths of the checkpoint's files.
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
