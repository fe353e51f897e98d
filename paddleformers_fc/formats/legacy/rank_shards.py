"""Read checkpoints of older Trainers with one pickle per rank, as shards of global tensors.

Weights are stored per tensor-parallel rank and stage (with ``sharding_io`` and FlashCheckpoint also per sharding rank,
described in ``model_meta.json``), optimizer states and moving averages per sharding rank. Files are grouped by stage
and tensor-parallel rank (:class:`StageFiles`) and converted to shards (:class:`Assembly`). For each local tensor:

1. A table, or else the building order (:mod:`.canonical_ranks`), gives the parameter of a state's variable.
2. The family declares the axis that tensor parallelism cuts, and the shapes prove it. :mod:`.rank_files` arranges the
   pieces of a sharding group. A weight that no file contains is read from its master weight, with a cast.
3. Expert-parallel ranks use the same variable names for different experts; their order in the group separates them.

Missing files, mixed grids or steps, and incomplete tensors are detected. Without checksums, changed bytes are not.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any

from msgspec import structs

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import family_for, is_known
from paddleformers_fc.families.names import Names
from paddleformers_fc.formats import stock_checkpoint as stock, stock_run
from paddleformers_fc.formats.catalog import Catalog, StoredFragment, damaged
from paddleformers_fc.formats.checkpoint import CONFIG_NAME, Config, Format, OpenedCheckpoint, StoredShard, local_files
from paddleformers_fc.formats.huggingface import INDEX_NAME, SINGLE_NAME
from paddleformers_fc.formats.legacy.canonical_ranks import CanonicalModel, assign_variables, canonical_models
from paddleformers_fc.formats.legacy.rank_files import (
    EMA,
    MODEL,
    OPTIMIZER,
    RankContent,
    RankFiles,
    arrange,
    check_one_checkpoint,
    divides_experts,
    find_rank_files,
    is_rank_file,
    read_rank_file,
    scheduler_epoch,
    unsupported_experts,
)
from paddleformers_fc.formats.paddle_distcp import PADDLE_DISTCP
from paddleformers_fc.formats.stock_run import ARGUMENTS, SCHEDULER, different_steps, malformed_file
from paddleformers_fc.layout.roles import (
    EMA_STATE,
    MASTER,
    MASTER_WEIGHT,
    MODEL_STATE,
    OPTIMIZER_STATE,
    ROLES,
    split_state_name,
)
from paddleformers_fc.mapping.boxes import Box, Shape, shifted, whole
from paddleformers_fc.storage.dtypes import dtype_size
from paddleformers_fc.storage.files import is_file
from paddleformers_fc.storage.identities import identities_of
from paddleformers_fc.storage.json_io import MAX_DOCUMENT_BYTES, parse_json, read_document
from paddleformers_fc.storage.paths import AnyPath, require_local
from paddleformers_fc.text import fold

META_NAME = "model_meta.json"

_EXPERT = re.compile(r"\.experts\.[0-9]{1,6}\.")
_SLICE = "slice@"
"""The prefix of states of parameters that stage 3 slices."""
_OF_MASTER = "fp32_master_0_"
"""In optimizers with master weights, this separates the names of parameter and state."""
_FROZEN = "save_sharding_stage1_model_include_freeze_params"
_PADDLE_DTYPES = {10: "float32", 11: "float64", 15: "float16", 16: "bfloat16", 22: "bfloat16", 5: "float32"}
"""Paddle's dtype codes in ``model_meta.json``; the last two are from earlier versions."""


_FLOATS = ("float16", "float32", "float64")

States = dict[tuple[str, str], list[stock.FileArray]]
"""The pieces of the states of a parameter by role and full name."""


@dataclass(frozen=True)
class Part:
    """The part of a parameter on the ranks of one cell.

    Args:
        name: structured name.
        dtype: dtype of the weight; empty if unknown.
        shape: global shape.
        box: the part, in global coordinates.
        first: whether no earlier cell contains the same part; later copies are compared, not read.
    """

    name: str
    dtype: str
    shape: Shape
    box: Box
    first: bool


@dataclass(frozen=True)
class StageFiles:
    """A cell: the files of all ranks of a sharding group, for one pipeline stage and one tensor-parallel rank.

    The experts of each expert-parallel rank form a separate cell (:func:`_expert_cells`).

    Args:
        tp: tensor-parallel rank.
        pp: pipeline stage.
        contents: the contents of files of each kind, in the order of the sharding group.
        names: variable names by structured name.
        shapes: local shape and dtype of described parameters, by structured name.
        others: variable names of parameters in the same files that belong to another cell.
        canonical: boxes of weights in files with canonical names, by structured name: whether the file has the axes in
            reverse order, and the box.
    """

    tp: int
    pp: int
    contents: Mapping[str, Sequence[RankContent]]
    names: Mapping[str, str]
    shapes: Mapping[str, tuple[Shape, str]]
    others: Mapping[str, str] = field(default_factory=dict)
    canonical: Mapping[str, Sequence[tuple[bool, StoredShard]]] = field(default_factory=dict)


def _assembled(directory: Path, files: RankFiles, config: Mapping[str, Any], last: bool = False) -> Assembly:
    """Read all files of a directory and convert them to shards, from the first or the last copy of each tensor."""
    contents = {name: read_rank_file(directory, name) for name in files.names}
    _check_steps_equal(directory, contents)
    if is_known(config):
        declared = Names(family_for(config), stock.model_description(directory, config))
        named = [name for name in files.files[MODEL].values() if name.endswith(".pdparams")]
        contents |= {name: contents[name].renamed(declared.name_of) for name in named}
    files = _described(directory, files)
    cells = _cells(directory, files, contents)
    if any(name.endswith(".safetensors") for name in files.names):
        cells = _canonical_cells(directory, config, files.tp, cells)
    assembly = Assembly(directory, config, files.tp, any(one.contents[OPTIMIZER] for one in cells))
    for cell in reversed(cells) if last else cells:
        assembly.add(cell)
    if not {*assembly.weightless}.isdisjoint(assembly.stateless):
        assembly.faults.append(f"sharding_io only stores untrained weights with {_FROZEN}")
    if assembly.stateless and not (files.described or files.sharding in (1, stock_run.stated_sharding(directory))):
        assembly.faults += (f"{name}: no optimizer state is stored" for name in assembly.stateless)
        assembly.faults.append(
            f"{ARGUMENTS} does not have sharding_parallel_size {files.sharding}: files of other ranks may be missing"
        )
    return assembly


def _check_steps_equal(directory: Path, contents: Mapping[str, RankContent]) -> None:
    """Check that optimizer files and scheduler have the same number of steps."""
    epochs = {name: one.epoch for name, one in contents.items() if one.epoch is not None}
    if (epoch := scheduler_epoch(directory)) is not None and epochs:
        epochs[SCHEDULER] = epoch
    if len(set(epochs.values())) > 1:
        raise different_steps(directory, (f"{name}: step {epoch}" for name, epoch in sorted(epochs.items())))


def _described(directory: Path, files: RankFiles) -> RankFiles:
    """Add the content of ``model_meta.json`` to the files, if it exists."""
    path = directory / META_NAME
    if not is_file(path):
        return files
    try:
        meta = parse_json(read_document(path, MAX_DOCUMENT_BYTES))
        degrees, described = meta["parallel_config"], meta["sharding_metas"] or {}
        grid = [degrees[key] for key in ("mp_degree", "pp_degree", "sharding_degree")]
        experts, of_experts = (max(index(degrees.get(key, 1)), 1) for key in ("ep_degree", "moe_sharding_degree"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise malformed_file(path, str(error)) from error
    tp, shards = files.tp, files.sharding
    if grid != [tp, files.pp, shards]:
        described_grid = f"{META_NAME}: tp={grid[0]} pp={grid[1]} sharding={grid[2]} ep={experts}"
        grid_of_files = f"files: tp={tp} pp={files.pp} sharding={shards}"
        what = f"{META_NAME} and the files of {directory} have different numbers of ranks."
        raise damaged(path, what, [described_grid, grid_of_files])
    if not isinstance(described, dict):
        raise malformed_file(path, "sharding_metas is not an object")
    if experts > 1 and not (divides_experts(tp, shards, experts) and of_experts * experts == tp * shards):
        why = f"{META_NAME}: tp={tp} sharding={shards} ep={experts} moe_sharding={of_experts}"
        raise unsupported_experts(directory, why)
    return replace(files, ep=experts, described=described)


def _cells(directory: Path, files: RankFiles, contents: Mapping[str, RankContent]) -> list[StageFiles]:
    found: list[StageFiles] = []
    for pp, tp in itertools.product(range(files.pp), range(files.tp)):
        if files.ep == 1:
            found.append(_cell(files, contents, tp, pp))
        else:
            ranks = range(files.ep // files.tp)
            found += _expert_cells(directory, [_cell(files, contents, tp, pp, ep) for ep in ranks])
    seen: set[str] = set()
    for experts in map(_experts, found):
        # This happens if each rank numbers its experts from 0.
        if files.ep > 1 and (twice := sorted(seen & experts)):
            raise unsupported_experts(directory, f"{twice[0]} is on several ranks")
        seen |= experts
    return found


def _experts(cell: StageFiles) -> frozenset[str]:
    return frozenset(name for name in {*cell.names, *cell.shapes} if _EXPERT.search(name))


def _expert_cells(directory: Path, cells: Sequence[StageFiles]) -> list[StageFiles]:
    """Return a cell with the tensors that the expert-parallel ranks share, and one cell per rank with its experts.

    A variable of an expert has the same name on every rank, for different experts. Other variables are the same
    parameter on all ranks, which share its states as a sharding group.

    Raises:
        FormatError: names do not show which experts a rank has.
    """
    experts = list(map(_experts, cells))
    rests = [{name: one for name, one in cell.names.items() if not _EXPERT.search(name)} for cell in cells]
    stacked = [name for rest in rests for name in rest if ".experts." in name]
    known = frozenset().union(*experts)
    weights = [name for one in cells[0].contents[MODEL] for name in one.arrays]
    unnamed = [name for name in weights if _EXPERT.search(name) and name not in known]
    if stacked or unnamed or any(rest != rests[0] for rest in rests) or len(set(map(bool, experts))) > 1:
        named = f"{stacked[0]} is on several ranks" if stacked else "ranks have different parameters"
        raise unsupported_experts(directory, f"{unnamed[0]}: no file names its variable" if unnamed else named)
    every = {name: cell.names.get(name, "") for cell in cells for name in (*cell.names, *cell.shapes)}
    found = [_with_names(cells[0], {*cells[0].names, *cells[0].shapes} - experts[0], every)]
    for rank, (cell, own) in enumerate(zip(cells, experts, strict=True)):
        contents = {kind: ones[rank :: len(cells)] for kind, ones in cell.contents.items()}
        found.append(_with_names(replace(cell, contents=contents), own, every))
    return found


def _with_names(cell: StageFiles, own: Collection[str], every: Mapping[str, str]) -> StageFiles:
    """Restrict a cell to the tensors with some names; ``every`` has all names in its files."""
    return replace(
        cell,
        names={name: one for name, one in cell.names.items() if name in own},
        shapes={name: one for name, one in cell.shapes.items() if name in own},
        others={name: one for name, one in every.items() if name not in own},
    )


def _cell(files: RankFiles, contents: Mapping[str, RankContent], tp: int, pp: int, ep: int | None = None) -> StageFiles:
    own = {kind: [contents[name] for name in files.of(kind, tp, pp)] for kind in (MODEL, OPTIMIZER, EMA)}
    named = own[MODEL] if ep is None else own[MODEL][ep : ep + 1]
    names = {name: variable for one in named for name, variable in one.names.items()}
    shapes: dict[str, tuple[Shape, str]] = {}
    key = f"tp{tp:02d}_pp{pp:02d}" + ("" if ep is None else f"_ep{ep * files.tp + tp:02d}")
    if files.described:
        try:
            described = files.described[key]
            names |= {str(name): str(variable) for name, variable in described["structure_name_mapping"].items()}
            shapes = {
                str(name): (tuple(map(index, one[0])), _PADDLE_DTYPES.get(one[1], ""))
                for name, one in described["param_meta"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise malformed_file(Path(META_NAME), f"{key}: {error}") from error
    return StageFiles(tp, pp, own, names, shapes)


def _canonical_cells(
    directory: Path, config: Mapping[str, Any], tp: int, cells: Sequence[StageFiles]
) -> list[StageFiles]:
    """Convert cells whose weights have canonical names to the names and orientation of the optimizer states.

    Raises:
        MappingError: no model of the configuration has these tensors and states, or several have.
    """
    stored = sorted({name for cell in cells for content in cell.contents[MODEL] for name in content.arrays})
    found: list[list[StageFiles]] = []
    faults: list[str] = []
    for model in canonical_models(stock.model_description(directory, config), tp, stored):
        named = [model if isinstance(model, str) else _canonical_cell(model, cell) for cell in cells]
        mismatches = [one for one in named if isinstance(one, str)]
        faults += mismatches
        if not mismatches:
            found.append([one for one in named if isinstance(one, StageFiles)])
    has_states = any(cell.contents[OPTIMIZER] for cell in cells)
    if len(found) == 1 or (found and not has_states):
        return found[0]
    raise MappingError(
        f"The optimizer states in {directory} cannot be assigned to parameters.",
        where=str(directory),
        evidence=fold(dict.fromkeys(faults)) or [f"{len(found)} models of {CONFIG_NAME} have these canonical tensors"],
        next_step="Save it again with save_to_hf: false, which stores the names; or export the weights without the "
        "files of the optimizer, from a copy.",
    )


def _canonical_cell(model: CanonicalModel, cell: StageFiles) -> StageFiles | str:
    """Convert a cell to the names and orientation of a model, or return as text why it does not match."""
    stored = {name: one for content in cell.contents[MODEL] for name, one in content.arrays.items()}
    shapes = model.on_stage(stored)
    states = cell.contents[OPTIMIZER]
    names = assign_variables(states, shapes) if states else dict.fromkeys(shapes, "")
    if isinstance(names, str):
        return f"tp{cell.tp:02d}_pp{cell.pp:02d}: {names}"
    canonical: dict[str, list[tuple[bool, StoredShard]]] = {}
    for name in shapes:
        for placed in model.shards(name, stored, cell.tp):
            if isinstance(placed, str):
                return placed
            canonical.setdefault(name, []).append(placed)
    dtypes = {name: (shape, canonical[name][0][1][0].dtype) for name, shape in shapes.items()}
    return replace(cell, contents={**cell.contents, MODEL: []}, names=names, shapes=dtypes, canonical=canonical)


@dataclass
class Assembly:
    """Collects the shards of all cells, and faults that show that the files are not one complete checkpoint.

    Args:
        directory: the checkpoint.
        config: its configuration.
        tp: number of tensor-parallel ranks.
        has_states: whether there are optimizer files.
    Attributes:
        faults: faults, one line each.
        cuts: number of shards per axis, by parameter.
        copies: tensors that are replicated on two tensor-parallel ranks: the name, both copies, and the bytes per
            element.
        stateless: parameters without optimizer states, such as untrained ones.
        weightless: parameters without a weight.
        shards: the shards.
    """

    directory: Path
    config: Mapping[str, Any]
    tp: int
    has_states: bool
    faults: list[str] = field(default_factory=list)
    cuts: dict[str, Shape] = field(default_factory=dict)
    copies: list[tuple[str, StoredFragment, StoredFragment, int]] = field(default_factory=list)
    stateless: list[str] = field(default_factory=list)
    weightless: list[str] = field(default_factory=list)
    shards: dict[stock.StoredAs, list[StoredShard]] = field(default_factory=dict)
    _copied: dict[tuple[str, str], Sequence[stock.FileArray]] = field(default_factory=dict)
    _seen: set[tuple[str, Box]] = field(default_factory=set)

    def add(self, cell: StageFiles) -> None:
        """Add the tensors of one cell."""
        weights = {name: one for content in reversed(cell.contents[MODEL]) for name, one in content.arrays.items()}
        weights = {name: one for name, one in weights.items() if name not in cell.others}
        variables = _by_variable(cell.names)
        states, averages = self._states(cell, variables), self._averages(cell, variables)
        for name in dict.fromkeys((*cell.names, *cell.shapes, *weights)):
            part = self._part(cell, name, weights.get(name))
            if part is None:
                continue
            own = states.get(name, {})
            canonical = [one for _, one in cell.canonical.get(name, ())]
            stored = [weights[name]] if name in weights else []
            arrays = stored or [
                stock.FileArray(file, begin, one.box.shape, one.dtype) for one, file, begin, _ in canonical
            ]
            self._compare(part, {(MODEL_STATE, name): arrays, **own})
            if not part.first:
                continue
            # A tied parameter has the states of the name that sorts first.
            owner = variables.get(cell.names.get(name, ""), name)
            master = states.get(owner, {}).get((MASTER_WEIGHT, owner + MASTER.suffix), [])
            self._add_weight(part, cell, stored, master)
            for (role, full), pieces in own.items():
                self._add_state(part, role, full, pieces)
            if name in averages:
                self._join(part, (EMA_STATE, "", False), name, "float32", averages[name])
            if self.has_states and not own and owner == name and self._is_trained(name):
                self.stateless.append(name)

    def _add_weight(
        self, part: Part, cell: StageFiles, stored: Sequence[stock.FileArray], master: Sequence[stock.FileArray]
    ) -> None:
        if part.name in cell.canonical:
            for transposed, shard in cell.canonical[part.name]:
                self.keep((MODEL_STATE, "", transposed), shard)
        elif stored:
            self._join(part, (MODEL_STATE, "", False), part.name, part.dtype, stored)
        elif master and part.dtype:
            self._join(part, (MODEL_STATE, MASTER.dtype, False), part.name, part.dtype, master)
        else:
            self.faults.append(f"{part.name}: neither the weight nor its master weight is stored")
            self.weightless.append(part.name)

    def _add_state(self, part: Part, role: str, name: str, pieces: Sequence[stock.FileArray]) -> None:
        first = pieces[0]
        if split_state_name(role, name, first.shape).scalar:
            if not any(part.box.lo):
                self.keep((role, "", False), first.shard(name, first.shape))
        elif first.dtype.endswith(_FLOATS):
            self._join(part, (role, "", False), name, first.dtype, pieces)
        else:
            self.faults.append(f"{name}: {first.dtype} in {first.file}: quantised states cannot be read")

    def keep(self, stored_as: stock.StoredAs, shard: StoredShard) -> None:
        """Add a shard."""
        self.shards.setdefault(stored_as, []).append(shard)

    def _join(
        self, part: Part, stored_as: stock.StoredAs, name: str, dtype: str, pieces: Sequence[stock.FileArray]
    ) -> None:
        """Add the part as the pieces of a sharding group."""
        placed = arrange(part.box.shape, pieces)
        if isinstance(placed, str):
            self.faults.append(f"{name}: {placed}")
            return
        for piece, flat in placed:
            self.keep(stored_as, piece.shard(name, part.shape, part.box, flat, dtype))

    def _compare(self, part: Part, own: Mapping[tuple[str, str], Sequence[stock.FileArray]]) -> None:
        """Record copies of tensors that another tensor-parallel rank also stores."""
        for (role, name), pieces in own.items() if self.tp > 1 and part.box == whole(part.shape) else ():
            first = self._copied.setdefault((role, name), pieces)
            for one, other in zip(first, pieces, strict=False) if first is not pieces else ():
                if (one.shape, one.dtype) == (other.shape, other.dtype):
                    self.copies.append((name, one.fragment, other.fragment, dtype_size(one.dtype)))

    def _part(self, cell: StageFiles, name: str, weight: stock.FileArray | None) -> Part | None:
        """Return the part of a parameter in a cell; None if it is unknown, which is recorded as a fault."""
        if weight is None and name not in cell.shapes:
            self.faults.append(f"{name}: no file contains its shape")
            return None
        shape, dtype = cell.shapes[name] if weight is None else (weight.shape, weight.dtype)
        total, axis = shape, None
        if self.tp > 1:
            found = self._declared.whole(name, shape, self.tp)
            if isinstance(found, str):
                self.faults.append(f"{name}: its tensor-parallel axis cannot be inferred: {found}")
                return None
            total, axis = found
        box = shifted(shape, tuple(cell.tp * length if at == axis else 0 for at, length in enumerate(shape)))
        first = (name, box) not in self._seen
        self._seen.add((name, box))
        self.cuts[name] = tuple(self.tp if at == axis else 1 for at in range(len(shape)))
        return Part(name, dtype, total, box, first)

    @cached_property
    def _declared(self) -> Names:
        model = stock.model_description(self.directory, self.config)
        return Names(family_for(model.config), model)

    def _is_trained(self, name: str) -> bool:
        return not is_known(self.config) or self._declared.trained(name)

    def _states(self, cell: StageFiles, variables: Mapping[str, str]) -> dict[str, States]:
        """Return the pieces of every state by parameter, in the order of the sharding group."""
        found: dict[str, States] = {}
        known = {**_by_variable(cell.others), **variables}
        for content in cell.contents[OPTIMIZER]:
            for role, arrays in ((OPTIMIZER_STATE, content.arrays), (MASTER_WEIGHT, content.master)):
                for key, array in arrays.items():
                    name, state = _split(key, known)
                    if name is None or bool(state) is not (role == OPTIMIZER_STATE):
                        self.faults.append(f"{array.file}: {key} belongs to no stored parameter")
                    elif name not in cell.others:
                        full = f"{name}.{state}" if state else name + MASTER.suffix
                        found.setdefault(name, {}).setdefault((role, full), []).append(array)
        return found

    def _averages(self, cell: StageFiles, variables: Mapping[str, str]) -> dict[str, list[stock.FileArray]]:
        """Return the pieces of every moving average by structured name; averages of master weights take precedence."""
        found: dict[str, list[stock.FileArray]] = {}
        known = {**_by_variable(cell.others), **variables}
        for content in cell.contents[EMA]:
            for key, array in content.master.items():
                found.setdefault(known.get(key.removeprefix(_SLICE), key), []).append(array)
        for content in cell.contents[EMA]:
            for key, array in content.arrays.items():
                if array.dtype == MASTER.dtype:
                    found.setdefault(known.get(key, key), [array])
        for name in found.keys() - cell.names.keys() - cell.others.keys():
            self.faults.append(f"{found[name][0].file}: the average {name} belongs to no stored parameter")
        return found


def _by_variable(names: Mapping[str, str]) -> dict[str, str]:
    """Return the structured name of every variable; for tied parameters, the name that sorts first."""
    found: dict[str, str] = {}
    for name in sorted(names):
        found.setdefault(names[name], name)
    return found


def _split(key: str, variables: Mapping[str, str]) -> tuple[str | None, str]:
    """Split a key such as ``linear_5.w_0_fp32_master_0_moment1_0`` into parameter and state; a weight has no state."""
    key = key.removeprefix(_SLICE)
    for at in (len(key), *(at for at in range(len(key) - 1, 0, -1) if key[at] == "_")):
        if key[:at] in variables:
            return variables[key[:at]], key[at + 1 :].removeprefix(_OF_MASTER)
    return None, ""


def _is_hybrid(directory: AnyPath) -> bool:
    return _has_rank_files(directory, has_meta=False)


def _is_sharding_io(directory: AnyPath) -> bool:
    return _has_rank_files(directory, has_meta=True)


def _has_rank_files(directory: AnyPath, has_meta: bool) -> bool:
    """Return whether there are rank files: optimizer files, or weight files in a directory without open weights."""
    names = local_files(directory)
    if (META_NAME in names) is not has_meta:
        return False
    if any(is_rank_file(name, OPTIMIZER, EMA) for name in names):
        return True
    return not names & {INDEX_NAME, SINGLE_NAME} and any(is_rank_file(name, MODEL) for name in names)


def _open(format: Format, directory: AnyPath, verify: str, config: Config) -> OpenedCheckpoint:
    """Open a checkpoint. Tensor-parallel checkpoints require a configuration.

    Raises:
        NotACheckpoint: a configuration is required, and there is none.
        Corrupt: files are missing or from different steps, or tensors are incomplete; the error lists all of them.
        FormatError: a pickle contains more than data, files are from two checkpoints, or a file is malformed.
        MappingError: the model's family does not declare a tensor that is cut.
    """
    if PADDLE_DISTCP.recognises(directory):
        check_one_checkpoint(directory, [(MODEL_STATE, "files of ranks")])
    directory = require_local(directory, "A checkpoint of Paddle")
    stored_config = stock.read_stock_config(directory, config)
    files = find_rank_files(directory)
    identities = identities_of(directory / name for name in files.names)
    found = _assembled(directory, files, stored_config[0])
    faults = dict.fromkeys(found.faults)
    return stock.open_stock(
        format, directory, found.shards, identities, faults, stored_config, found.cuts, found.copies
    )


def _last_copies(checkpoint: OpenedCheckpoint) -> Catalog:
    """Read the files again, and return the copies of the last tensor-parallel rank."""
    directory = require_local(checkpoint.catalog.root, "A checkpoint of Paddle")
    found = _assembled(directory, find_rank_files(directory), checkpoint.config, last=True)
    return structs.replace(checkpoint.catalog, roles=stock.gather_roles(found.shards)[0])


LEGACY_HYBRID = Format(
    name="legacy_hybrid",
    title="checkpoint of hybrid parallelism (one .pdparams and .pdopt per rank)",
    predicate="was written rank by rank by an older Trainer",
    advice="Convert it with paddleformers-fc convert, and use the result.",
    checks=("tensors", "model", "replicas", "equal values"),
    recognises=_is_hybrid,
    opener=_open,
    verifier=stock.verify_stock,
    describe=stock.describe_stock,
    last_copies=_last_copies,
    roles=ROLES,
)
"""One file per rank and kind."""

SHARDING_IO = structs.replace(
    LEGACY_HYBRID,
    name="sharding_io",
    title="checkpoint of sharding_io or FlashCheckpoint (one file per rank and model_meta.json)",
    predicate="was written rank by rank by sharding_io or FlashCheckpoint",
    recognises=_is_sharding_io,
)
"""The same, and ``model_meta.json`` describes the ranks."""
