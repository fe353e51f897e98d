"""Arrays in files of Paddle: only the place of each is kept, and tensors are gathered from the places.

The files are safetensors, or pickles of ``paddle.save``, which are read as data (``storage.pickles``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paddleformers_fc.formats.catalog import StoredForm, StoredFragment, StoredTensor, gather_shards
from paddleformers_fc.formats.checkpoint import StoredShard
from paddleformers_fc.formats.stock_checkpoint import malformed_file
from paddleformers_fc.layout.roles import MODEL_STATE, ROLES
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import Box, Shape, whole
from paddleformers_fc.storage.dtypes import dtype_size, from_safetensors
from paddleformers_fc.storage.pickles import PickledArray, quoted, read_pickle
from paddleformers_fc.storage.safetensors import Header

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
            dtype: element type of the tensor; empty for that of the array.
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
            form = forms.setdefault(one.form, replace(one.form, file_dtype=file_dtype, turned=turned))
            known[name] = StoredTensor(name, form, one.offsets)
    if not roles.get(MODEL_STATE):
        faults.append(f"{MODEL_STATE}: no tensor is stored")
    return {role: roles[role] for role in ROLES if roles.get(role)}, faults
