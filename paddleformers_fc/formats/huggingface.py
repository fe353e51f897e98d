"""A directory of open weights: safetensors files in canonical names.

If ``model.safetensors.index.json`` exists, only the files that it lists are read. A listed file that is missing or
lacks its tensor is an error. Unlisted tensors in listed files also count as stored, and a load that does not use them
fails, because they may be scales of other tensors. Without an index, the directory must contain ``model.safetensors``,
or all of ``model-i-of-N``. Files are compared with ``flex_checksums.json``, which exports contain, if it exists.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import PurePosixPath
from typing import Any

from paddleformers_fc.errors import FormatError, NotACheckpoint, OptionError
from paddleformers_fc.formats.built_model import built_model
from paddleformers_fc.formats.catalog import Catalog, damaged, gather_shards, malformed
from paddleformers_fc.formats.checkpoint import (
    CONFIG_NAME,
    DEPTH_TEXT,
    CheckList,
    Config,
    ExportWriter,
    FileFacts,
    Format,
    OpenedCheckpoint,
    OutputFile,
    StoredModel,
    StoredShard,
    grouped_by_size,
    local_files,
    model_documents,
    parse_config,
    tensor_header,
)
from paddleformers_fc.formats.quantized import plain_config, scaled_files, scaled_shards
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.layout.shards import Shard, ShardsByRole, shard_bytes
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.mapping.boxes import whole
from paddleformers_fc.storage.dtypes import from_safetensors, item_size
from paddleformers_fc.storage.export_checksums import (
    CHECKSUMS_NAME,
    FileChecksums,
    read_checksums,
    read_exported,
    verify_export,
)
from paddleformers_fc.storage.files import exists, is_file, list_directory, map_paths
from paddleformers_fc.storage.identities import Identities, identities_of
from paddleformers_fc.storage.json_io import MAX_DOCUMENT_BYTES, parse_json
from paddleformers_fc.storage.manifest import check_level
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.safetensors import Header, read_header
from paddleformers_fc.text import count_text

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DEFAULT_MAX_SHARD_BYTES = 5 * 10**9
"""Default bound on the tensors of one file, in bytes."""

FETCH_AGAIN = "Download the files again: index and files are not from the same download."
_NAME_ANOTHER = "Name a directory that save_pretrained or the export command wrote, or a complete download."
_EXPORT = "Export it with `paddleformers-fc export CHECKPOINT DIRECTORY`, and name that directory."
_TORCH = (
    r"pytorch_model.*\.bin(\.index\.json)?",
    "a pickle of PyTorch",
    "Convert the weights with Transformers: AutoModelForCausalLM.from_pretrained(DIRECTORY).save_pretrained("
    "NEW_DIRECTORY); then name the new directory.",
)
_OTHER_FORMATS = (
    (r"flex_checkpoint\.json", "a flex checkpoint", f"Resume it with resume_from_checkpoint. {_EXPORT}"),
    (r"mapping\.json", "an unfinished flex checkpoint", f"Name a finished one. {_EXPORT}"),
    (r"model_state|.*\.distcp", "a checkpoint of Paddle", _EXPORT),
    (
        r".*\.pdparams(\.index\.json)?",
        "PaddleFormers' own format",
        "Convert the weights with PaddleFormers alone, in a separate process: AutoModelForCausalLM.from_pretrained("
        'DIRECTORY, load_checkpoint_format="", convert_from_hf=False).save_pretrained(NEW_DIRECTORY); then name the '
        "new directory.",
    ),
    _TORCH,
    (r"adapter_.*|peft_model.*|lora_.*", "an adapter", "Name the directory of the model that the adapter is for."),
    (r".*\.safetensors", "a file that no index lists", f"Download {INDEX_NAME} as well."),
)
"""Other content of a directory: a pattern for file names, a description, and how to get open weights."""
_NUMBERED = re.compile(r"model-([0-9]{5})-of-([0-9]{5})\.safetensors")
OF_PADDLE = ("np", "pd")
"""Values of ``format`` in the metadata of files that PaddleFormers writes in its own orientation."""
_OF_TRAINER = ("trainer_state.json", "training_args.bin")
"""Files of PaddleFormers' Trainer. Without them, ``np`` does not prove anything: other tools write it too."""

MAX_INDEX_BYTES = 64 * 1024 * 1024
"""Maximum size of an index, enough for 400,000 tensors."""


def open_huggingface(directory: AnyPath, verify: str = "size", as_stored: bool = False) -> OpenedCheckpoint:
    """Open a directory of open weights.

    Args:
        directory: safetensors files in canonical names, with their index.
        verify: how to compare files with the ``flex_checksums.json`` of exports: ``off`` compares only the index,
            ``size`` also sizes and the checksums of metadata files, ``full`` all checksums.
        as_stored: return the values and scales of a quantization as they are stored, for a listing.
    Raises:
        NotACheckpoint: there is neither an index nor ``model.safetensors``.
        Corrupt: files or tensors of the index are missing, or files differ from the exported ones; the error lists all
            of them.
        FormatError: an index or header is malformed, or a quantization is not supported.
        OptionError: the level is unknown.
    """
    check_level(verify)
    checksums = read_checksums(directory)
    files = _files(directory, checksums)
    # The configuration is needed too: nothing else shows how the rows of a tensor belong to heads.
    documents = [INDEX_NAME] if exists(directory / INDEX_NAME) else []
    documents += [CONFIG_NAME] if CONFIG_NAME in (checksums or {}) else []
    read = read_files(directory / INDEX_NAME, files, checksums, verify, documents)
    native = _of_paddle(directory, read.headers)
    config = read_config(directory, checksums or {})
    names = _with_unnamed(files, read.headers, directory)
    plain, scaled = (names, {}) if as_stored else scaled_files(directory, config, names, read.headers)
    produced = {directory / path: file for path, (_, file) in scaled.items()}
    used = plain_config(config) if scaled else config
    opened = replace(read, identities={**read.identities, **produced}).opened(
        HUGGINGFACE,
        chain(read.shards(plain), scaled_shards(scaled)),
        used,
        FileFacts(checksums, native, used != config),
    )
    if not opened.catalog.count:
        raise damaged(directory, "The directory contains no tensor.", sorted(files), FETCH_AGAIN)
    return opened


@dataclass(frozen=True)
class WeightFiles:
    """The weight files in a directory.

    Args:
        directory: the directory of the files.
        checksums: recorded checksums of the files; None if there are none.
        headers: headers by file name.
        identities: identities of the files, from before the headers were read.
    """

    directory: AnyPath
    checksums: FileChecksums | None
    headers: dict[str, Header]
    identities: Identities

    def shards(self, files: Mapping[str, Iterable[str]]) -> Iterator[StoredShard]:
        """Yield complete tensors, given the names of tensors by file."""
        for name, tensors in files.items():
            for tensor in tensors:
                entry = self.headers[name].tensors[tensor]
                shard = Shard(tensor, from_safetensors(entry.dtype), entry.shape, whole(entry.shape))
                yield shard, name, entry.begin, item_size(entry.dtype)

    def opened(
        self, format: Format, shards: Iterable[StoredShard], config: dict[str, Any], facts: FileFacts
    ) -> OpenedCheckpoint:
        """Return the opened checkpoint with these shards.

        Raises:
            Corrupt: shards contradict each other.
        """
        tensors, faults = gather_shards(shards)
        if faults:
            raise damaged(self.directory, "Files contradict each other.", faults, FETCH_AGAIN)
        checksums = self.checksums or {}
        recorded = {name: checksums[name] for name in self.headers if name in checksums}
        catalog = Catalog(self.directory, {MODEL_STATE: tensors}, self.identities)
        return OpenedCheckpoint(format, catalog, config, facts=facts, recorded=recorded)


def read_files(
    index: AnyPath,
    files: Mapping[str, Sequence[str]],
    checksums: FileChecksums | None,
    verify: str,
    documents: Sequence[str],
) -> WeightFiles:
    """Compare weight files with their checksums, and read their headers.

    Args:
        index: the path of the index, which need not exist.
        files: the tensors in every file of the index.
        checksums: recorded checksums of the directory.
        verify: ``off``, ``size`` or ``full``.
        documents: metadata files to compare with their checksums as well.
    Raises:
        Corrupt: a file does not match its checksum, or lacks a tensor that the index lists in it.
        FormatError: a header is malformed.
    """
    directory = index.parent
    if checksums is not None and verify != "off":
        verify_export(directory, checksums, verify, needed=[*files, *documents])
    # Take identities before headers, so that a file that is replaced later is noticed.
    identities = identities_of(directory / name for name in files)
    headers = dict(zip(files, map_paths(read_header, (directory / name for name in files), directory), strict=True))
    _check_indexed(index, files, headers)
    return WeightFiles(directory, checksums, headers, identities)


def _of_paddle(directory: AnyPath, headers: Mapping[str, Header]) -> tuple[str, ...]:
    """Return the files whose ``format`` is PaddleFormers', although another tool may have written them.

    Raises:
        FormatError: PaddleFormers' Trainer wrote them with ``save_to_hf: false``. Their linear layers are not
            transposed, which the shapes of square layers do not show.
    """
    native = tuple(sorted(name for name, header in headers.items() if header.metadata.get("format") in OF_PADDLE))
    if native and any(exists(directory / name) for name in _OF_TRAINER):
        raise model_orientation(directory, native)
    return native


def model_orientation(directory: AnyPath, native: Sequence[str], has: str = "has") -> FormatError:
    """Return the error for files whose linear layers have, or may have, the orientation of PaddleFormers."""
    what = f"{directory} {has} weights in the orientation of PaddleFormers, which save_to_hf: false writes."
    next_step = "Save the weights with save_to_hf: true, or use a checkpoint that contains optimizer states."
    evidence = [f"the metadata of {', '.join(native)} have format np or pd"]
    return malformed(directory / native[0], what, evidence, next_step)


def check_orientation(checkpoint: OpenedCheckpoint, linear: Iterable[str]) -> None:
    """Check that shapes prove the orientation of files with PaddleFormers' ``format``.

    If the shapes match, another tool wrote the files in the orientation of open weights. Square weights match in either
    orientation.

    Args:
        checkpoint: opened open weights.
        linear: the canonical weights that are transposed in the model.
    Raises:
        FormatError: all linear weights are square.
    """
    stored = checkpoint.catalog.roles[MODEL_STATE]
    native = checkpoint.facts.native
    shapes = [stored[name].shape for name in linear if name in stored] if native else []
    if shapes and all(shape == shape[::-1] for shape in shapes):
        raise model_orientation(checkpoint.catalog.root, native, "may have")


def linear_weights(rules: RuleSet) -> Iterator[str]:
    """Yield the canonical weights that are transposed in the model."""
    for rule in rules.rules:
        axes = [axis for axis in rule.axes if axis >= 0]
        if axes != sorted(axes):
            yield from rule.sources


def read_description(directory: AnyPath, name: str, checksums: FileChecksums | None = None) -> bytes | None:
    """Read a metadata file of open weights, such as ``config.json``; None if it does not exist.

    Args:
        directory: the directory of the file.
        name: the name of the file.
        checksums: the recorded checksums, empty without any; None to read them.
    Raises:
        Corrupt: the file does not match its recorded checksum.
        FormatError: it is too long, or not a regular file.
        StorageError: it cannot be read.
    """
    if not exists(directory / name):
        return None
    recorded = read_checksums(directory) if checksums is None else checksums
    return read_exported(directory, recorded, name, MAX_DOCUMENT_BYTES)


def read_config(directory: AnyPath, checksums: FileChecksums | None = None) -> dict[str, Any]:
    """Read ``config.json`` and compare it with its recorded checksum, if any; empty if the file does not exist.

    Args:
        directory: the directory of the file.
        checksums: the recorded checksums, empty without any; None to read them.
    Raises:
        Corrupt: it does not match its checksum.
        FormatError: it is not a JSON object.
    """
    raw = read_description(directory, CONFIG_NAME, checksums)
    return {} if raw is None else parse_config(raw, directory / CONFIG_NAME)


def _files(directory: AnyPath, checksums: FileChecksums | None) -> dict[str, list[str]]:
    """Return the weight files, with the tensors that the index lists in each; without an index, none are listed."""
    index = directory / INDEX_NAME
    if exists(index):
        return indexed_files(index, checksums)
    if exists(directory / SINGLE_NAME):
        return {SINGLE_NAME: []}
    names = [path.name for path in list_directory(directory)]
    if numbered := [name for name in names if _NUMBERED.fullmatch(name)]:
        _check_finished(directory)
        _check_all_files(directory, numbered)
        return {name: [] for name in sorted(numbered)}
    others, step = _other_files(directory, _OTHER_FORMATS)
    raise NotACheckpoint(
        "The directory contains no open weights.",
        where=str(directory),
        evidence=[f"neither {INDEX_NAME} nor {SINGLE_NAME} is there", *others],
        next_step=step or _NAME_ANOTHER,
    )


def torch_files(directory: AnyPath) -> tuple[list[str], str]:
    """Return a line about PyTorch's pickles of weights, and how to convert them; both empty if there are none."""
    return _other_files(directory, (_TORCH,))


def _other_files(directory: AnyPath, formats: Iterable[tuple[str, str, str]]) -> tuple[list[str], str]:
    """Return a line about the files of each format, and how to convert the first; both empty if there are none."""
    names = [path.name for path in list_directory(directory)]
    others = [
        (f"{_shortened(found)}: {format_name}", step)
        for pattern, format_name, step in formats
        if (found := [name for name in names if re.fullmatch(pattern, name)])
    ]
    return [line for line, _ in others], others[0][1] if others else ""


def _check_finished(directory: AnyPath) -> None:
    """Check that numbered files without an index are not an incomplete export of this package.

    Raises:
        NotACheckpoint: they have checksums, which only exports have; an export writes the index last.
    """
    if exists(directory / CHECKSUMS_NAME):
        raise NotACheckpoint(
            f"The export to {directory} is not complete.",
            where=str(directory),
            evidence=[f"{CHECKSUMS_NAME} is there, and {INDEX_NAME}, which an export writes last, is missing"],
            next_step="Export again.",
        )


def _check_all_files(directory: AnyPath, numbered: Sequence[str]) -> None:
    """Check that the numbers in the names of files without an index are complete.

    Raises:
        Corrupt: files are missing; the error lists all of them.
        FormatError: the numbers are of two models, or invalid.
    """
    total, *others = sorted({name.rpartition("-of-")[2] for name in numbered})
    expected = {f"model-{place:05d}-of-{total}" for place in range(1, int(total[:5]) + 1)}
    missing, unexpected = sorted(expected - {*numbered}), sorted({*numbered} - expected)
    if unexpected:
        evidence = [f"model-...-of-{one}" for one in (total, *others)] if others else unexpected
        what = f"The weight files in {directory} are not numbered as one model."
        raise malformed(directory, what, evidence, FETCH_AGAIN)
    if missing:
        what = f"{count_text(len(missing), 'weight file')} in {directory} cannot be found."
        next_step = f"Download the missing files, and {INDEX_NAME}, which lists all of them."
        raise damaged(directory, what, (f"{name} is missing" for name in missing), next_step)


def _shortened(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def indexed_files(index: AnyPath, checksums: FileChecksums | None) -> dict[str, list[str]]:
    """Return the tensors in every file of an index.

    Args:
        index: the index, in the directory of its files.
        checksums: checksums to compare it with.
    Raises:
        Corrupt: files are missing.
        FormatError: the index is malformed, or lists a file outside its directory.
    """
    raw = read_exported(index.parent, checksums, index.name, MAX_INDEX_BYTES)
    try:
        weight_map = parse_json(raw)["weight_map"]
        pairs = [(tensor, _text(name)) for tensor, name in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise malformed(index, "The index is malformed.", [repr(error)], FETCH_AGAIN) from error
    files: dict[str, list[str]] = {}
    for tensor, name in pairs:
        if not _is_plain(name):
            next_step = "Put the files next to their index, and list them without a path."
            raise malformed(index, "The index lists a file outside its directory.", [repr(name)], next_step)
        files.setdefault(name, []).append(tensor)
    there = map_paths(is_file, (index.parent / name for name in files), index)
    missing = sorted(name for name, found in zip(files, there, strict=True) if not found)
    if missing:
        what = f"{count_text(len(missing), 'file')} of the index cannot be found."
        next_step = "Download the missing files; nothing was loaded."
        if index.name == INDEX_NAME and exists(index.parent / SINGLE_NAME):
            next_step = f"Download the missing files; or delete the index if {SINGLE_NAME} contains the model."
        raise damaged(index, what, missing, next_step)
    return files


def _check_indexed(index: AnyPath, files: Mapping[str, Sequence[str]], headers: Mapping[str, Header]) -> None:
    """Check that files contain the tensors that the index lists in them.

    Args:
        index: the index, for errors.
        files: the tensors in every file of the index.
        headers: the headers of these files.
    Raises:
        Corrupt: tensors are missing; the error lists all of them.
    """
    faults = [
        f"{tensor}: the index lists it in {name}, which lacks it"
        for name, tensors in files.items()
        for tensor in tensors
        if tensor not in headers[name].tensors
    ]
    if faults:
        raise damaged(index, f"Files lack {count_text(len(faults), 'tensor')} of the index.", faults, FETCH_AGAIN)


def _is_plain(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return PurePosixPath(name).name == name and name not in ("", ".", "..") and not {"\\", "\0"} & set(name)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a file name is {str(value)[:100]}")
    return value


def _with_unnamed(files: dict[str, list[str]], headers: dict[str, Header], directory: AnyPath) -> dict[str, list[str]]:
    """Return the files with all their tensors, including tensors that the index does not list.

    Raises:
        Corrupt: several files contain a tensor that the index does not list.
    """
    named = {tensor for tensors in files.values() for tensor in tensors}
    holders: dict[str, list[str]] = {}
    for name in files:
        for tensor in headers[name].tensors:
            if tensor not in named:
                holders.setdefault(tensor, []).append(name)
    faults = [f"{tensor}: in {' and '.join(names)}" for tensor, names in holders.items() if len(names) > 1]
    if faults:
        what = f"Several files contain {count_text(len(faults), 'tensor')} that the index does not list."
        raise damaged(directory / INDEX_NAME, what, faults, FETCH_AGAIN)
    added = {name: list(tensors) for name, tensors in files.items()}
    for tensor, names in holders.items():
        added[names[0]].append(tensor)
    return added


def _no_rules(checkpoint: OpenedCheckpoint) -> None:
    """Return None, because open weights are canonical tensors.

    Raises:
        OptionError: the checkpoint contains adapters without their base.
    """
    adapters = checkpoint.known.adapters
    if adapters is not None:
        root, base = str(checkpoint.catalog.root), adapters.base.location
        command = f"paddleformers-fc export {shlex.quote(root)} OUT"
        raise OptionError(
            "The checkpoint contains adapters without their base, which is not a model.",
            where=root,
            evidence=[f"the base: {base or 'not read from files'}"],
            next_step=f"Export the adapters: {command} --format peft. Or export the merged model: "
            f"{command} --base {shlex.quote(base) if base else 'BASE'}",
        )


def _weight_files(checkpoint: OpenedCheckpoint, layout: ShardsByRole, max_file_bytes: int) -> tuple[OutputFile, ...]:
    """Divide the weights into files, in natural order, so that equal content gives equal bytes."""
    groups = grouped_by_size(layout.get(MODEL_STATE, {}), max_file_bytes)
    count = len(groups)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    paths = [SINGLE_NAME] if count == 1 else names
    return tuple(OutputFile(path, MODEL_STATE, group) for path, group in zip(paths, groups, strict=True))


def _index(checkpoint: OpenedCheckpoint, files: Sequence[OutputFile]) -> dict[str, bytes]:
    """Return the index, if there are several files."""
    return {INDEX_NAME: (json.dumps(weight_index(files), indent=2) + "\n").encode()} if len(files) > 1 else {}


def weight_index(files: Sequence[OutputFile]) -> dict[str, Any]:
    """Return the content of the index of weight files: the total size, and the file of each tensor."""
    tensors = [(one, file.path) for file in files for one in file.tensors]
    return {
        "metadata": {"total_size": sum(shard_bytes(one) for one, _ in tensors)},
        "weight_map": {one.name: path for one, path in tensors},
    }


def _is_open_weights(directory: AnyPath) -> bool:
    """Return whether there is an index, a single weight file, or a numbered one."""
    if exists(directory / INDEX_NAME) or exists(directory / SINGLE_NAME):
        return True
    return any(map(_NUMBERED.fullmatch, local_files(directory)))


def _open(format: Format, directory: AnyPath, verify: str, config: Config) -> OpenedCheckpoint:
    return open_huggingface(directory, verify)


def _verify(format: Format, directory: AnyPath, level: str, checks: CheckList) -> OpenedCheckpoint:
    """Check the recorded checksums of an export, and that every tensor is in the file that the index lists."""
    with checks.required("checksums"):
        checksums = read_checksums(directory)
    if checksums is None:
        checks.not_compared(f"there is no {CHECKSUMS_NAME}, which exports of this package have")
    elif level != "off":
        needed = [name for name in checksums if level == "full" or name.endswith(".safetensors")]
        with checks.optional("checksums"):
            verify_export(directory, checksums, level, needed=needed)
            checks.passed("checksums", f"{count_text(len(checksums), 'file')}: {DEPTH_TEXT[level]}")
    unlisted = [] if checksums is None else [name for name in model_documents(directory) if name not in checksums]
    if unlisted:
        checks.impossible.append(f"{', '.join(unlisted)}: not listed in {CHECKSUMS_NAME}")
    compared = checksums is not None and level != "off" and not checks.faults
    with checks.required("tensors"):
        opened = open_huggingface(directory, "size" if compared else "off")
    checks.passed("tensors", f"{count_text(opened.catalog.count, 'tensor')}, each in the file that the index lists")
    if exists(directory / SINGLE_NAME) and SINGLE_NAME not in opened.files:
        checks.impossible.append(f"{SINGLE_NAME}: not in the index, and Transformers reads it instead of the index")
    return opened


def _build(checkpoint: OpenedCheckpoint) -> StoredModel:
    """Return the model that PaddleFormers builds from open weights."""
    found = built_model(checkpoint)
    check_orientation(checkpoint, linear_weights(found.rules))
    return found


HUGGINGFACE = Format(
    name="huggingface",
    title="open weights (Hugging Face)",
    predicate="contains open weights",
    advice="Name a finished checkpoint-N directory. To start from open weights, set model_name_or_path to them, and "
    "leave out resume_from_checkpoint.",
    checks=("checksums", "tensors", "model", "equal values"),
    recognises=_is_open_weights,
    opener=_open,
    verifier=_verify,
    build=_build,
    canonical=True,
)
"""Open weights: safetensors files in canonical names."""

HUGGINGFACE_WRITER = ExportWriter(
    marks=(INDEX_NAME, SINGLE_NAME),
    rules=_no_rules,
    files=_weight_files,
    header=partial(tensor_header, {"format": "pt"}),
    documents=_index,
    numbered=r"model-.*\.safetensors",
)
