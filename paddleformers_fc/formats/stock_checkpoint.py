"""Open checkpoints of stock Trainers: what all their formats of tensor files share.

They have the Trainer's files (:mod:`.stock_run`), perhaps a ``config.json``, no checksums and no mapping; the mapping
is derived from the model's family when it is needed. Tensors are in safetensors files or in pickles of ``paddle.save``,
which are read as data (``storage.pickles``). Only the position of each array is kept.

Without checksums, names and shapes do not show that a file is from another run or has the name of another rank. Two
facts do: 16-bit weights are their rounded master weights, and ranks have different values for different parts of a
tensor. For every pair of files, a few values of a few tensors are compared with master weights, and most tensors must
match, because replicas may have diverged in training. Suspected copies are compared byte by byte.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from msgspec import structs

from paddleformers_fc.errors import Diverged, MappingError, NotACheckpoint, OptionError
from paddleformers_fc.families import ModelTensor, OptionalNames, bind, enumerate_tensors, family_for, is_known
from paddleformers_fc.families.declarations import Stage
from paddleformers_fc.families.description import IS_NLP, STACK_OF_FFN, ModelDescription
from paddleformers_fc.families.exported import exported_keys
from paddleformers_fc.families.names import tied_names, tied_sources
from paddleformers_fc.families.undescribed import completed
from paddleformers_fc.formats import stock_run
from paddleformers_fc.formats.catalog import (
    COPY_AGAIN_STEP,
    Catalog,
    StoredForm,
    StoredFragment,
    StoredTensor,
    damaged,
    gather_shards,
    malformed,
)
from paddleformers_fc.formats.checkpoint import (
    CONFIG_NAME,
    NAME_CONFIG,
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
from paddleformers_fc.formats.stock_run import malformed_file
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
"""How many tensors of a pair of files are compared, and how many values of each."""
_HALF = ("bfloat16", "float16")
_ROUNDING = 2.0**-7
"""Bound on the relative error of rounding to bfloat16: twice the largest error."""
_LEAST = 1e-6
"""Bound on the error of rounding to a subnormal float16."""
_BLOCK_BYTES = 1 << 20

_Numbers = np.ndarray[Any, np.dtype[np.float64]]


def _master_mismatches(directory: Path, catalog: Catalog) -> Iterator[str]:
    """Yield a line for every file whose weights are not the rounded master weights in another file."""
    masters = catalog.roles.get(MASTER_WEIGHT, {})
    compared: dict[tuple[str, str], list[str]] = {}
    differing: dict[tuple[str, str], list[str]] = {}
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
                    differing.setdefault((part.file, own.file), []).append(name)
    for (file, other), names in differing.items():
        count = len(compared[file, other])
        if 2 * len(names) > count:
            counts = f"{len(names)} of {count} weights"
            yield f"{file} and {other} are not from one save: {counts} are not their rounded master weights"


def _differ(rounded: _Numbers, exact: _Numbers) -> bool:
    """Return whether most values differ by more than rounding explains."""
    with np.errstate(invalid="ignore"):
        differing = np.abs(rounded - exact) > _ROUNDING * np.abs(exact) + _LEAST
    return 2 * int((differing & np.isfinite(rounded)).sum()) > len(exact)


def _numbers(directory: Path, form: StoredForm, part: StoredFragment, points: Sequence[Shape]) -> _Numbers:
    """Read single elements of a stored box, as float64."""
    dtype = to_numpy(to_safetensors(form.held_dtype))
    found = []
    with open_local(directory / part.file) as file:
        for point in points:
            shape, at = part.box.shape, tuple(one - low for one, low in zip(point, part.box.lo, strict=True))
            place = np.ravel_multi_index(at[::-1], shape[::-1]) if form.turned else np.ravel_multi_index(at, shape)
            found.append(read_range(file, part.begin + int(place) * dtype.itemsize, dtype.itemsize))
    return np.frombuffer(b"".join(found), dtype).astype(np.float64)


def _copied_files(directory: Path, catalog: Catalog) -> Iterator[str]:
    """Yield a line for every file that contains the values of another file's parts of the same tensors."""
    for files, tensors in _comparable_parts(catalog).items():
        first: dict[tuple[bytes, ...], int] = {}
        for at, file in enumerate(files):
            heads = tuple(_bytes(directory, parts[at], width, 0, _NUMBERS) for parts, width in tensors[:_TENSORS])
            other = first.setdefault(heads, at)
            if other == at or all(_is_constant(head, width) for head, (_, width) in zip(heads, tensors, strict=False)):
                continue
            if all(_is_equal(directory, parts[other], parts[at], width) for parts, width in tensors):
                count = count_text(len(tensors), "tensor")
                yield f"{file} contains the values of {files[other]}, in its parts of {count}"


_ComparableParts = list[tuple[list[StoredFragment], int]]
"""Parts of a tensor with equal shapes, and bytes per element."""


def _comparable_parts(catalog: Catalog) -> dict[tuple[str, ...], _ComparableParts]:
    """Return, by files, the tensors of which these files have parts with equal shapes: the largest part in each."""
    found: dict[tuple[str, ...], _ComparableParts] = {}
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
    """Return whether two stored boxes of one shape have the same bytes.

    Args:
        directory: the checkpoint.
        one: a box.
        other: the other box.
        width: bytes per element.
    """
    block = _BLOCK_BYTES // width
    return all(
        _bytes(directory, one, width, at, block) == _bytes(directory, other, width, at, block)
        for at in range(0, one.box.volume, block)
    )


def _bytes(directory: Path, part: StoredFragment, width: int, at: int, count: int) -> bytes:
    """Read up to ``count`` elements of a stored box, from element ``at`` on."""
    with open_local(directory / part.file) as file:
        return read_range(file, part.begin + at * width, min(count, part.box.volume - at) * width)


StockConfig = tuple[dict[str, Any], Mapping[str, FileChecksum]]
"""The configuration of a model, and the checksum of its file."""


def read_stock_config(directory: Path, given: Mapping[str, Any] | None) -> StockConfig:
    """Return the configuration of the model in a directory, and the checksum of ``config.json`` if it exists.

    Args:
        directory: the checkpoint.
        given: the configuration to use if the directory has none.
    Raises:
        FormatError: the file is not a JSON object.
    """
    raw = read_description(directory, CONFIG_NAME)
    if raw is None:
        return dict(given or {}), {}
    stored = parse_config(raw, directory / CONFIG_NAME)
    return stored or dict(given or {}), {CONFIG_NAME: checksum_of(CONFIG_NAME, raw)}


def verify_stock(format: Format, directory: AnyPath, level: str, checks: CheckList) -> OpenedCheckpoint:
    """Check that every tensor of the model is stored exactly once, and that optimizer states are plausible."""
    checks.not_compared("this format has no checksums")
    with checks.required("tensors"):
        opened = format.open(directory, level)
        opened.check_states()
    checks.passed("tensors", f"{count_text(opened.catalog.count, 'tensor')}, each stored exactly once")
    if "model" in format.checks and is_known(opened.config):
        with checks.optional("model"):
            prove(opened.rules.mapping(), "The checkpoint's mapping")
            checks.passed("model", "all tensors that the configuration describes")
    elif "model" in format.checks:
        checks.impossible.append(f"missing layers: there is no {CONFIG_NAME} of a known family")
    if level == "full" and "replicas" in format.checks:
        with checks.optional("replicas"):
            count = count_text(check_copies(opened), "array")
            checks.passed("replicas", f"{count} of other tensor-parallel ranks equal the arrays of tp00")
    return opened


def check_copies(checkpoint: OpenedCheckpoint) -> int:
    """Compare the tensors that several tensor-parallel ranks stored, and return their number.

    One rank calls this before tensors are loaded or converted. If the user chose a copy, nothing is compared.

    Raises:
        Diverged: copies differ; the files are from different steps, or the ranks had diverged.
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
            f"Ranks stored different values of the same tensor: {count_text(len(differing), 'array')}.",
            where=str(directory),
            evidence=fold(differing),
            next_step="The files are from different steps, or the ranks had diverged. Use another checkpoint, or "
            "choose the copies of the first or last tensor-parallel rank: convert or export with --tied "
            "first|last, or set resume_from_checkpoint to this checkpoint with flex_tied: first or last.",
        )
    return len(copies)


def describe_stock(checkpoint: OpenedCheckpoint) -> StoredModel:
    """Derive the mapping that a flex checkpoint of the same model would contain.

    Raises:
        NotACheckpoint: there is no configuration.
        MappingError: the family is unknown, or does not declare the stored tensors.
        Corrupt: layers of the model are missing, in formats that contain complete models.
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
    """Check that all tensors of the configuration's model are stored."""
    family = family_for(model.config)
    try:
        # PaddleFormers built the model, so its defaults replace missing keys.
        built = structs.replace(model, config={**exported_keys(family, model), **model.config})
        declared = [one.under() for one in enumerate_tensors(family, built) if one.stage is not Stage.ABSENT]
        expected = bind(family, model, declared).mapping().sources
        optional = OptionalNames(family, model)
    except MappingError:
        return  # The configuration is not sufficient to enumerate tensors. The mapping is still proved.
    known = {*rules.mapping().sources, *tied_sources(family, model), *tied_names(family, model)}
    missing = [name for name in expected if name not in known and optional.group(name) is None]
    if missing:
        count = count_text(len(missing), "tensor")
        raise damaged(root, f"{root} lacks tensors of the model that {CONFIG_NAME} describes: {count}.", missing)


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
    """Return the opened checkpoint with these shards.

    Args:
        format: the format of the checkpoint.
        directory: the checkpoint.
        shards: the stored tensors.
        identities: identities of their files.
        faults: faults of the files; this function adds faults of the shards.
        config: the result of :func:`read_stock_config`.
        cuts: number of shards per axis, by weight.
        copies: the tensors that several ranks stored, as in :class:`FileFacts`.
    Raises:
        Corrupt: there are faults, or files from several saves or steps; the error lists all of them.
        FormatError: files of the Trainer are links that lead out of the directory.
    """
    check_no_links(directory, stock_run.run_files(directory))
    roles, contradictions = gather_roles(shards)
    catalog = Catalog(directory, roles, identities)
    check_stored_once(directory, [*faults, *contradictions, *catalog.faults()], COPY_AGAIN_STEP)
    if foreign := [*_master_mismatches(directory, catalog), *_copied_files(directory, catalog)]:
        what = f"{directory} contains files of several saves, or under the names of other ranks."
        raise damaged(directory, what, foreign)
    powers = stock_run.read_powers(directory, catalog)
    stock_run.check_states_of_one_step(directory, powers)
    run = directory if stock_run.has_run(directory) else None
    facts = FileFacts(run=run, powers=powers, cuts=cuts, copies=copies)
    return OpenedCheckpoint(format, catalog, config[0], facts=facts, recorded=config[1])


def check_not_alternating(directory: AnyPath, model: StoredModel) -> None:
    """Check that rows of gate and up do not alternate in stacked experts: Paddle's formats do not record the order.

    Raises:
        OptionError: the model has such experts.
    """
    is_stacked = any(name.endswith(STACK_OF_FFN) for name in model.rules.targets)
    if is_stacked and model.description.config.get("using_sonic_moe"):
        raise OptionError(
            "Experts of using_sonic_moe are only supported in checkpoints of this package and in exports.",
            where=str(directory),
            evidence=["gate and up alternate row by row in training, which Paddle's formats do not record"],
            next_step="Resume with PaddleFormers and export the weights, or train without using_sonic_moe.",
        )


def check_no_links(directory: Path, entries: Iterable[Path]) -> None:
    """Check that no file or directory is a link that leads out of the checkpoint.

    Raises:
        FormatError: there are such links.
    """
    root = os.path.realpath(directory)
    outside = [str(one) for one in entries if os.path.commonpath((root, os.path.realpath(one))) != root]
    if outside:
        what = f"{directory} contains links that lead out of the checkpoint."
        raise malformed(directory, what, outside, "Replace the links by copies of their targets.")


def model_description(directory: AnyPath, config: Mapping[str, Any], names: Iterable[str] = ()) -> ModelDescription:
    """Return the description of the model with this configuration.

    Args:
        directory: the checkpoint, for errors.
        config: the configuration.
        names: names of stored tensors; in PaddleNLP's classes their scope is the name of the family.
    Raises:
        NotACheckpoint: there is no configuration.
    """
    if not config:
        raise NotACheckpoint(
            f"{directory} does not describe the model.",
            where=str(directory),
            evidence=[f"{CONFIG_NAME} is not in it"],
            next_step=f"{NAME_CONFIG} For other commands, copy {directory.name} and add {CONFIG_NAME} to the copy.",
        )
    if any(name.startswith(f"{family_for(config).name}.") for name in names):
        config = {**config, IS_NLP: True}
    return ModelDescription(config, partial=True)


PARAMETER_NAMES = "StructuredToParameterName@@"
"""The key under which ``paddle.save`` stores the names of parameters."""
DTYPES = {
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
"""The dtypes of arrays in Paddle's files, by numpy's codes."""


@dataclass(frozen=True, slots=True)
class FileArray:
    """An array that is contiguous in a file.

    Args:
        file: the name of the file.
        begin: offset of its first byte.
        shape: its shape.
        dtype: numpy name of the element type.
    """

    file: str
    begin: int
    shape: Shape
    dtype: str

    @property
    def fragment(self) -> StoredFragment:
        """Its position, as a tensor with the shape of the array."""
        return StoredFragment(self.file, self.begin, whole(self.shape))

    def shard(
        self, name: str, shape: Shape, box: Box | None = None, flat: tuple[int, int] | None = None, dtype: str = ""
    ) -> StoredShard:
        """Return the array as a shard of a tensor.

        Args:
            name: name of the tensor.
            shape: global shape of the tensor.
            box: the part of the tensor; None for all of it.
            flat: the range of the part's elements that the array contains; None for all of them.
            dtype: dtype of the tensor; empty if it is the array's.
        """
        part = Shard(name, dtype or self.dtype, shape, box or whole(shape), flat)
        return part, self.file, self.begin, dtype_size(self.dtype)


def arrays_of(name: str, header: Header) -> dict[str, FileArray]:
    """Return the arrays of a safetensors file."""
    return {
        key: FileArray(name, one.begin, one.shape, from_safetensors(one.dtype)) for key, one in header.tensors.items()
    }


def read_arrays(path: Path, *others: str) -> tuple[dict[str, FileArray], list[dict[Any, Any]]]:
    """Return the arrays of a pickle by name, and the dictionaries under some other keys; empty if there is none.

    Raises:
        FormatError: the pickle contains something else.
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
        FormatError: the dictionary contains something else.
    """
    return {key: _array(path, key, value) for key, value in content.items()}


def _array(path: Path, key: Any, value: Any) -> FileArray:
    # Optimizer states are written as pairs of their name and their array.
    array = value[1] if isinstance(value, tuple) and len(value) == 2 else value
    if not isinstance(key, str) or not isinstance(array, PickledArray) or array.code not in DTYPES:
        raise malformed_file(path, f"{quoted(key)} is not a tensor")
    return FileArray(path.name, array.begin, array.shape, DTYPES[array.code])


StoredAs = tuple[str, str, bool]
"""Role, dtype in the files if it differs, and whether the axes in the files are reversed."""


def gather_roles(
    shards: Mapping[StoredAs, Sequence[StoredShard]],
) -> tuple[dict[str, dict[str, StoredTensor]], list[str]]:
    """Return the tensors of a checkpoint by role, and the contradictions between files as text."""
    roles: dict[str, dict[str, StoredTensor]] = {}
    faults: list[str] = []
    for (role, file_dtype, turned), own in shards.items():
        tensors, contradictions = gather_shards(own)
        known = roles.setdefault(role, {})
        twice = tensors.keys() & known.keys()
        faults += [*contradictions, *(f"{name}: ranks stored it in different forms" for name in sorted(twice))]
        forms: dict[StoredForm, StoredForm] = {}
        for name, one in tensors.items():
            form = forms.setdefault(one.form, structs.replace(one.form, file_dtype=file_dtype, turned=turned))
            known[name] = StoredTensor(name, form, one.offsets)
    if not roles.get(MODEL_STATE):
        faults.append(f"{MODEL_STATE}: no tensor is stored")
    return {role: roles[role] for role in ROLES if roles.get(role)}, faults
