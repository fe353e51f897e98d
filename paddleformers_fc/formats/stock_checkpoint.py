"""The shared parts of opening a checkpoint of a stock Trainer, for all its formats of tensor files.

All of its formats have a ``config.json`` or none, the Trainer's files (:mod:`.stock_run`), no checksums and no mapping.
The mapping follows from the family of the model, once it is needed.

Whether the files of a checkpoint without checksums belong together, by a few of the numbers in them.

Names and shapes do not show a file of another run, or one under the name of another rank. Two facts about numbers do:

* a weight of 16 bits is its master weight, rounded;
* two ranks have different parts of a tensor, with different numbers.

A few tensors of every pair of files are compared, by a few numbers each. The comparison with master weights concerns
most of them: replicas that diverged in a run are no reason to refuse it. A copy is compared byte by byte.

Arrays in files of Paddle: only the place of each is kept, and tensors are gathered from the places. The files are
safetensors, or pickles of ``paddle.save``, which are read as data (``storage.pickles``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from msgspec import structs

from paddleformers_fc.errors import Corrupt, Diverged, FormatError, MappingError, NotACheckpoint, OptionError
from paddleformers_fc.families import ModelTensor, OptionalNames, bind, enumerate_tensors, family_for, is_known
from paddleformers_fc.families.declarations import Stage
from paddleformers_fc.families.description import IS_NLP, STACK_OF_FFN, ModelDescription
from paddleformers_fc.families.exported import exported_keys
from paddleformers_fc.families.names import tied_names, tied_sources
from paddleformers_fc.families.undescribed import completed
from paddleformers_fc.formats import stock_run
from paddleformers_fc.formats.catalog import Catalog, StoredForm, StoredFragment, StoredTensor, gather_shards
from paddleformers_fc.formats.checkpoint import (
    CONFIG_NAME,
    REFUSE,
    CheckList,
    FileFacts,
    Format,
    OpenedCheckpoint,
    StoredModel,
    StoredShard,
    check_stored_once,
    parse_config,
)
from paddleformers_fc.formats.huggingface import read_description
from paddleformers_fc.formats.stock_run import COPY_AGAIN_STEP, malformed_file
from paddleformers_fc.layout.roles import MASTER, MASTER_WEIGHT, MODEL_STATE, ROLES
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping import RuleSet, prove
from paddleformers_fc.mapping.boxes import Box, Shape, whole
from paddleformers_fc.storage.checksum import FileChecksum, checksum_of
from paddleformers_fc.storage.dtypes import dtype_size, from_safetensors, item_size, to_numpy, to_safetensors
from paddleformers_fc.storage.files import open_local, read_range
from paddleformers_fc.storage.identities import Identities
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.pickles import PickledArray, quoted, read_pickle
from paddleformers_fc.storage.safetensors import Header
from paddleformers_fc.text import count_text, fold

_TENSORS, _NUMBERS = 4, 8
"""How many tensors of a pair of files are compared, and how many numbers of each."""
_HALF = ("bfloat16", "float16")
_ROUNDING = 2.0**-7
"""Bound on the relative error of a number that is rounded to bfloat16, twice the largest one."""
_LEAST = 1e-6
"""Bound on the error of a number that is rounded to a subnormal float16."""
_BLOCK_BYTES = 1 << 20

_Numbers = np.ndarray[Any, np.dtype[np.float64]]


def _unlike_masters(directory: Path, catalog: Catalog) -> Iterator[str]:
    """Yield a line for every file of weights that are not the master weights in another file."""
    masters = catalog.roles.get(MASTER_WEIGHT, {})
    compared: dict[tuple[str, str], list[str]] = {}
    unlike: dict[tuple[str, str], list[str]] = {}
    for name, weight in catalog.roles.get(MODEL_STATE, {}).items():
        master = masters.get(name + MASTER.suffix)
        if master is None or weight.form.held_dtype not in _HALF or master.dtype != MASTER.dtype:
            continue
        if len(weight.shape) < 2 or weight.shape != master.shape:
            continue
        fragments = master.fragments
        for part in weight.fragments:
            for own in (fragments[index] for index in master.form.finder.near(part.box)):
                common, seen = part.box.intersect(own.box), compared.setdefault((part.file, own.file), [])
                if common is None or len(seen) == _TENSORS:
                    continue
                seen.append(name)
                points = [(*common.lo[:-1], at) for at in range(common.lo[-1], common.hi[-1])][:_NUMBERS]
                rounded = _numbers(directory, weight.form, part, points)
                if _differ(rounded, _numbers(directory, master.form, own, points)):
                    unlike.setdefault((part.file, own.file), []).append(name)
    for (file, other), names in unlike.items():
        count = len(compared[file, other])
        if 2 * len(names) > count:
            yield f"{file} is not of the save of {other}: {len(names)} of {count} weights are not their master weights"


def _differ(rounded: _Numbers, exact: _Numbers) -> bool:
    """Return whether most numbers are not others, rounded."""
    with np.errstate(invalid="ignore"):
        unlike = np.abs(rounded - exact) > _ROUNDING * np.abs(exact) + _LEAST
    return 2 * int((unlike & np.isfinite(rounded)).sum()) > len(exact)


def _numbers(directory: Path, form: StoredForm, part: StoredFragment, points: Sequence[Shape]) -> _Numbers:
    """Return single elements of a tensor, which a stored box of it contains, as float64."""
    dtype = to_numpy(to_safetensors(form.held_dtype))
    found = []
    with open_local(directory / part.file) as file:
        for point in points:
            shape, at = part.box.shape, tuple(one - low for one, low in zip(point, part.box.lo, strict=True))
            place = np.ravel_multi_index(at[::-1], shape[::-1]) if form.turned else np.ravel_multi_index(at, shape)
            found.append(read_range(file, part.begin + int(place) * dtype.itemsize, dtype.itemsize))
    return np.frombuffer(b"".join(found), dtype).astype(np.float64)


def _copies(directory: Path, catalog: Catalog) -> Iterator[str]:
    """Yield a line for every file whose parts of tensors are the numbers of other parts, in another file."""
    for files, tensors in _alike(catalog).items():
        first: dict[tuple[bytes, ...], int] = {}
        for at, file in enumerate(files):
            heads = tuple(_bytes(directory, parts[at], width, 0, _NUMBERS) for parts, width in tensors[:_TENSORS])
            other = first.setdefault(heads, at)
            if other == at or all(_is_constant(head, width) for head, (_, width) in zip(heads, tensors, strict=False)):
                continue
            if all(_is_equal(directory, parts[other], parts[at], width) for parts, width in tensors):
                count = count_text(len(tensors), "tensor")
                yield f"{file} contains the numbers of {files[other]}, in its parts of {count}"


_Alike = list[tuple[list[StoredFragment], int]]
"""Parts of one shape of a tensor, and bytes per element."""


def _alike(catalog: Catalog) -> dict[tuple[str, ...], _Alike]:
    """Return the tensors of which files have parts of one shape, by these files. The largest part of each counts."""
    found: dict[tuple[str, ...], _Alike] = {}
    for tensor in (one for tensors in catalog.roles.values() for one in tensors.values() if len(one.offsets) > 1):
        largest: dict[str, StoredFragment] = {}
        for part in tensor.fragments:
            if part.file not in largest or part.box.volume > largest[part.file].box.volume:
                largest[part.file] = part
        shapes: dict[Shape, list[StoredFragment]] = {}
        for file in sorted(largest):
            shapes.setdefault(largest[file].box.shape, []).append(largest[file])
        for parts in shapes.values():
            if len(parts) > 1:
                width = item_size(to_safetensors(tensor.form.held_dtype))
                found.setdefault(tuple(part.file for part in parts), []).append((parts, width))
    return found


def _is_constant(head: bytes, width: int) -> bool:
    return len({head[at : at + width] for at in range(0, len(head), width)}) < 2


def _is_equal(directory: Path, one: StoredFragment, other: StoredFragment, width: int) -> bool:
    """Return whether two stored boxes of one shape, with elements of some bytes, have the same bytes."""
    block = _BLOCK_BYTES // width
    return all(
        _bytes(directory, one, width, at, block) == _bytes(directory, other, width, at, block)
        for at in range(0, one.box.volume, block)
    )


def _bytes(directory: Path, part: StoredFragment, width: int, at: int, count: int) -> bytes:
    """Return the bytes of up to ``count`` elements of a stored box."""
    with open_local(directory / part.file) as file:
        return read_range(file, part.begin + at * width, min(count, part.box.volume - at) * width)


NAME_CONFIG = (
    f"Name a directory with the model's {CONFIG_NAME}: convert --config DIR, or config= of open and load in Python."
)


StockConfig = tuple[dict[str, Any], Mapping[str, FileChecksum]]
"""The configuration of a model, and the checksum of its file."""


def read_stock_config(directory: Path, given: Mapping[str, Any] | None) -> StockConfig:
    """Return the configuration of the model in a directory, and the checksum of ``config.json`` if it is there.

    Args:
        directory: of a checkpoint.
        given: the configuration that serves if there is none.
    Raises:
        FormatError: it is not a JSON object.
    """
    raw = read_description(directory, CONFIG_NAME)
    if raw is None:
        return dict(given or {}), {}
    stored = parse_config(raw, directory / CONFIG_NAME)
    return stored or dict(given or {}), {CONFIG_NAME: checksum_of(CONFIG_NAME, raw)}


def verify_stock(format: Format, directory: AnyPath, level: str, checks: CheckList) -> OpenedCheckpoint:
    """Check that every tensor is stored whole and once, the numbers of states, and that none is missing.

    These formats have no checksums.
    """
    checks.not_compared("this format has no checksums")
    with checks.required("tensors"):
        opened = format.open(directory, level)
        opened.check_states()
    checks.passed("tensors", f"{count_text(opened.catalog.count, 'tensor')}, each stored whole and once")
    if "model" in format.checks and is_known(opened.config):
        with checks.optional("model"):
            prove(opened.rules.mapping(), "The checkpoint's mapping")
            checks.passed("model", "all tensors that the configuration describes")
    elif "model" in format.checks:
        checks.impossible.append(f"missing layers: no {CONFIG_NAME} of a known family")
    if level == "full" and "replicas" in format.checks:
        with checks.optional("replicas"):
            count = count_text(check_copies(opened), "array")
            checks.passed("replicas", f"{count} of other tensor-parallel ranks equal to those of tp00")
    return opened


def check_copies(checkpoint: OpenedCheckpoint) -> int:
    """Compare the tensors that several tensor-parallel ranks stored, unless one is chosen; return their number.

    One rank calls it before tensors are loaded or converted.

    Raises:
        Diverged: copies differ; the files are of different steps, or the ranks had diverged.
    """
    copies = checkpoint.facts.copies if checkpoint.tied == REFUSE else ()
    directory = cast(Path, checkpoint.catalog.root)
    differing = [
        f"{name}: {one.file} and {other.file} differ"
        for name, one, other, width in copies
        if not _is_equal(directory, one, other, width)
    ]
    if differing:
        raise Diverged(
            f"Ranks stored different numbers of the same tensor: {count_text(len(differing), 'array')}.",
            where=str(directory),
            evidence=fold(differing),
            next_step="The files are of different steps, or the ranks had diverged. Use another checkpoint, or "
            "choose the copies of the first or last tensor-parallel rank: convert or export with --tied "
            "first|last, or name this checkpoint in resume_from_checkpoint with flex_tied: first or last.",
        )
    return len(copies)


def describe_stock(checkpoint: OpenedCheckpoint) -> StoredModel:
    """Return the mapping that a save of this package would have stored, if it is supported.

    Raises:
        NotACheckpoint: there is no configuration to name the family.
        MappingError: the family is unknown, or does not declare what is stored.
        Corrupt: layers of the model are missing, in formats of whole models.
    """
    root, cuts, weights = checkpoint.catalog.root, checkpoint.facts.cuts, checkpoint.catalog.roles[MODEL_STATE]
    tensors = [ModelTensor(name, one.shape, one.dtype, cuts[name]) for name, one in weights.items()]
    model = model_description(root, checkpoint.config, weights)
    model, rules = completed(family_for(model.config), model, tensors)
    if "model" in checkpoint.format.checks:
        _check_all_layers(root, model, rules)
    found = StoredModel(rules, model)
    check_not_alternating(root, found)
    return found


def _check_all_layers(root: AnyPath, model: ModelDescription, rules: RuleSet) -> None:
    """Refuse a checkpoint without tensors that its configuration describes."""
    family = family_for(model.config)
    try:
        # PaddleFormers built the model: an absent key has the meaning that it has in its classes.
        built = structs.replace(model, config={**exported_keys(family, model), **model.config})
        declared = [one.under() for one in enumerate_tensors(family, built) if one.stage is not Stage.ABSENT]
        wanted = bind(family, model, declared).mapping().sources
        optional = OptionalNames(family, model)
    except MappingError:
        return  # A key that the enumeration needs is unknown: the proof of the mapping remains.
    known = {*rules.mapping().sources, *tied_sources(family, model), *tied_names(family, model)}
    missing = [name for name in wanted if name not in known and optional.group(name) is None]
    if missing:
        raise Corrupt(
            f"{root} lacks tensors of the model that {CONFIG_NAME} describes: {count_text(len(missing), 'tensor')}.",
            where=str(root),
            evidence=fold(missing),
            next_step=COPY_AGAIN_STEP,
        )


def open_stock(
    format: Format,
    directory: Path,
    shards: Mapping[StoredAs, Sequence[StoredShard]],
    identities: Identities,
    faults: Iterable[str],
    config: StockConfig,
    cuts: Mapping[str, Shape],
    copies: Sequence[tuple[str, StoredFragment, StoredFragment, int]] = (),
) -> OpenedCheckpoint:
    """Return the opened checkpoint of some shards.

    Args:
        format: the format that recognised it.
        directory: of the checkpoint.
        shards: the stored tensors.
        identities: of their files.
        faults: what is wrong with the files; faults of the shards are found here.
        config: the result of :func:`read_stock_config`.
        cuts: into how many shards the axes of every weight are cut.
        copies: the tensors that several ranks stored, as in :class:`FileFacts`.
    Raises:
        Corrupt: there are faults, or files of several saves or steps; all of them.
        FormatError: files of the Trainer are links to something outside of the directory.
    """
    check_no_links(directory, stock_run.run_files(directory))
    roles, contradictions = gather_roles(shards)
    catalog = Catalog(directory, roles, identities)
    check_stored_once(directory, [*faults, *contradictions, *catalog.faults()], COPY_AGAIN_STEP)
    if foreign := [*_unlike_masters(directory, catalog), *_copies(directory, catalog)]:
        raise Corrupt(
            f"{directory} contains files of several saves, or under the names of other ranks.",
            where=str(directory),
            evidence=fold(foreign),
            next_step=COPY_AGAIN_STEP,
        )
    powers = stock_run.read_powers(directory, catalog)
    stock_run.check_states_of_one_step(directory, powers)
    run = directory if stock_run.has_run(directory) else None
    facts = FileFacts(run=run, powers=powers, cuts=cuts, copies=copies)
    return OpenedCheckpoint(format, catalog, config[0], facts=facts, recorded=config[1])


def check_not_alternating(directory: AnyPath, model: StoredModel) -> None:
    """Refuse Paddle's own formats for a model whose rows of gate and up alternate: nothing in them shows the order.

    Raises:
        OptionError: the model has such experts.
    """
    is_stacked = any(name.endswith(STACK_OF_FFN) for name in model.rules.targets)
    if is_stacked and model.description.config.get("using_sonic_moe"):
        raise OptionError(
            "Experts of using_sonic_moe are supported in checkpoints of this package and in exports.",
            where=str(directory),
            evidence=["gate and up alternate row by row in training, which Paddle's formats do not record"],
            next_step="Resume with PaddleFormers and export the weights, or train without using_sonic_moe.",
        )


def check_no_links(directory: Path, entries: Iterable[Path]) -> None:
    """Refuse files and directories that are links to something outside of the checkpoint.

    Raises:
        FormatError: there are such links.
    """
    root = os.path.realpath(directory)
    outside = [str(one) for one in entries if os.path.commonpath((root, os.path.realpath(one))) != root]
    if outside:
        raise FormatError(
            f"{directory} is a checkpoint of which parts are links to somewhere else.",
            where=str(directory),
            evidence=outside,
            next_step="Copy what the links lead to into the directory.",
        )


def model_description(directory: AnyPath, config: Mapping[str, Any], names: Iterable[str] = ()) -> ModelDescription:
    """Return the model that a configuration describes.

    Args:
        directory: of the checkpoint, for errors.
        config: the configuration.
        names: of stored tensors: those of PaddleNLP's classes have the name of the family as their scope.
    Raises:
        NotACheckpoint: there is no configuration.
    """
    if not config:
        raise NotACheckpoint(
            f"{directory} does not describe the model that it is of.",
            where=str(directory),
            evidence=[f"{CONFIG_NAME} is not in it"],
            next_step=f"{NAME_CONFIG} Other commands need a copy of it in a copy of {directory.name}.",
        )
    if any(name.startswith(f"{family_for(config).name}.") for name in names):
        config = {**config, IS_NLP: True}
    return ModelDescription(config, partial=True)


PARAMETER_NAMES = "StructuredToParameterName@@"
"""The key of the names of parameters, which ``paddle.save`` adds to the tensors of a file."""
_DTYPES = {
    "f8": "float64",
    "f4": "float32",
    "f2": "float16",
    "i8": "int64",
    "i4": "int32",
    "i2": "int16",
    "i1": "int8",
    "u1": "uint8",
    "b1": "bool",
    # Paddle writes the bits of bfloat16, which numpy lacks, as unsigned integers.
    "u2": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class FileArray:
    """An array that is contiguous in a file.

    Args:
        file: the name of the file.
        begin: offset of its first byte.
        shape: its shape.
        dtype: element type by its numpy name.
    """

    file: str
    begin: int
    shape: Shape
    dtype: str

    @property
    def fragment(self) -> StoredFragment:
        """Its place, as that of a tensor of its shape."""
        return StoredFragment(self.file, self.begin, whole(self.shape))

    def shard(
        self, name: str, shape: Shape, box: Box | None = None, flat: tuple[int, int] | None = None, dtype: str = ""
    ) -> StoredShard:
        """Return it as a shard of a tensor.

        Args:
            name: of the tensor.
            shape: of the whole tensor.
            box: the part of the tensor; None for all of it.
            flat: the range of elements of the part that the array contains; None for all of them.
            dtype: element type of the tensor; empty if the array has the same.
        """
        part = Shard(name, dtype or self.dtype, shape, box or whole(shape), flat)
        return part, self.file, self.begin, dtype_size(self.dtype)


def arrays_of(name: str, header: Header) -> dict[str, FileArray]:
    """Return the arrays of a safetensors file."""
    return {
        key: FileArray(name, one.begin, one.shape, from_safetensors(one.dtype)) for key, one in header.tensors.items()
    }


def read_arrays(path: Path, *others: str) -> tuple[dict[str, FileArray], list[dict[Any, Any]]]:
    """Return the arrays of a pickle by name, and the content of some keys beside them: empty if they are not there.

    Raises:
        FormatError: it contains something else.
    """
    content = read_pickle(path)
    if not isinstance(content, dict):
        raise malformed_file(path, "it contains no tensors by name")
    found = [content.pop(key, {}) for key in others]
    if not all(isinstance(one, dict) for one in found):
        raise malformed_file(path, f"{' or '.join(others)} is not a dictionary")
    return named_arrays(path, content), found


def named_arrays(path: Path, content: Mapping[Any, Any]) -> dict[str, FileArray]:
    """Return the arrays of a dictionary in a pickle.

    Raises:
        FormatError: it contains something else.
    """
    return {key: _array(path, key, value) for key, value in content.items()}


def _array(path: Path, key: Any, value: Any) -> FileArray:
    # Tensors of a state are written as pairs of their name and their numbers.
    array = value[1] if isinstance(value, tuple) and len(value) == 2 else value
    if not isinstance(key, str) or not isinstance(array, PickledArray) or array.code not in _DTYPES:
        raise malformed_file(path, f"{quoted(key)} is not a tensor")
    return FileArray(path.name, array.begin, array.shape, _DTYPES[array.code])


StoredAs = tuple[str, str, bool]
"""Role, element type in the files if it is another one, and whether the files have the axes in reverse order."""


def gather_roles(
    shards: Mapping[StoredAs, Sequence[StoredShard]],
) -> tuple[dict[str, dict[str, StoredTensor]], list[str]]:
    """Return the tensors of a checkpoint by role, and as text why they are not those of one checkpoint."""
    roles: dict[str, dict[str, StoredTensor]] = {}
    faults: list[str] = []
    for (role, file_dtype, turned), own in shards.items():
        tensors, contradictions = gather_shards(own)
        known = roles.setdefault(role, {})
        twice = tensors.keys() & known.keys()
        faults += [*contradictions, *(f"{name}: ranks have stored it in different forms" for name in sorted(twice))]
        forms: dict[StoredForm, StoredForm] = {}
        for name, one in tensors.items():
            form = forms.setdefault(one.form, structs.replace(one.form, file_dtype=file_dtype, turned=turned))
            known[name] = StoredTensor(name, form, one.offsets)
    if not roles.get(MODEL_STATE):
        faults.append(f"{MODEL_STATE}: no tensor is stored")
    return {role: roles[role] for role in ROLES if roles.get(role)}, faults
