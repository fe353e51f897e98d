"""The Python API: open a checkpoint of any format, then inspect, verify, compare, plan or export it.

``paddleformers_fc.open`` returns a :class:`Checkpoint`, whose methods do what the commands of ``paddleformers-fc`` do.
Neither Paddle nor an accelerator is needed. ``save`` and ``load`` are in :mod:`paddleformers_fc.trainer.loop`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from os import PathLike
from types import MappingProxyType
from typing import Any

import numpy as np
from msgspec import structs

from paddleformers_fc.aoa import read_config
from paddleformers_fc.api_arguments import (
    COUNT,
    DIRECTORY,
    FLAG,
    TEXT,
    TOLERANCE,
    instance_of,
    one_of,
    parse_box,
    require,
    require_or_none,
)
from paddleformers_fc.errors import OptionError
from paddleformers_fc.execute.diff_checkpoints import Difference, Tolerance, compare_checkpoints
from paddleformers_fc.execute.digest import read_canonical
from paddleformers_fc.execute.export import (
    ExportReport,
    check_no_overlap,
    check_target,
    export_opened,
    parse_export_dtype,
)
from paddleformers_fc.execute.merging import check_same_base
from paddleformers_fc.execute.verify import Verification, verify_checkpoint
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.formats.adapters import check_rewritable, config_of_base, require_adapters
from paddleformers_fc.formats.checkpoint import TIED_WAYS, with_role, with_tied
from paddleformers_fc.formats.flex import FLEX_WRITER
from paddleformers_fc.formats.huggingface import DEFAULT_MAX_SHARD_BYTES, HUGGINGFACE_WRITER, open_huggingface
from paddleformers_fc.formats.inspection import JobFacts, RoleFacts, job_facts, role_facts
from paddleformers_fc.formats.registry import (
    check_heads,
    conversion_target,
    default_writer,
    given_config,
    open_checkpoint,
    writer_of,
)
from paddleformers_fc.layout.roles import MODEL_STATE, ROLES
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import whole
from paddleformers_fc.plan.build import ReadSource
from paddleformers_fc.plan.explain import Explanation, explain_tensor
from paddleformers_fc.plan.forecast import GridPlan, PlanFlows, plan_load
from paddleformers_fc.plan.sources import canonical_layout, canonical_source
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors
from paddleformers_fc.storage.manifest import check_level
from paddleformers_fc.storage.paths import RemotePath, parse_named, parse_target
from paddleformers_fc.text import count_text, natural, size_text, suggestion

Location = str | PathLike[str] | RemotePath
"""A path, or a URL such as ``s3://bucket/run/checkpoint-3``."""


@dataclass(frozen=True)
class Metadata:
    """The content of a checkpoint.

    Args:
        path: the directory or URL.
        format: ``flex_checkpoint``, ``huggingface`` (open weights), ``paddle`` (FlexCheckpoint), or another readable
            format.
        job: the job that saved it: step, samples, ranks, parallel degrees, family; None if the format does not record
            it.
        config: the model's ``config.json``; empty if there is none.
        roles: number of tensors, elements and bytes by role; ``roles["model_state"].elements`` counts the parameters.
        files: number of files.
        bytes: total size of the files.
    """

    path: str
    format: str
    job: JobFacts | None
    config: Mapping[str, Any]
    roles: Mapping[str, RoleFacts]
    files: int
    bytes: int


@dataclass(frozen=True)
class TensorInfo:
    """One canonical tensor.

    Args:
        name: canonical name; optimizer states have a suffix such as ``.moment1_0``.
        shape: global shape.
        dtype: numpy name of the element type; ``bfloat16`` and ``float8`` types come from ``ml_dtypes``.
        role: ``model_state``, ``master_weight``, ``optimizer_state`` or ``ema_state``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str


class Checkpoint:
    """An opened checkpoint; :func:`open` returns it.

    Tensors have canonical names, as in the model's Hugging Face files, for every format and parallel layout. An
    optimizer state has the name of its parameter and a suffix.

    Example:
        >>> import paddleformers_fc
        >>> checkpoint = paddleformers_fc.open("out/checkpoint-3")
        >>> checkpoint.metadata.job.step
        3
        >>> checkpoint.read("model.norm.weight").shape
        (64,)
    """

    def __init__(self, opened: OpenedCheckpoint) -> None:
        require(instance_of(OpenedCheckpoint, "the path to paddleformers_fc.open"), opened=opened)
        self._opened = opened

    def __repr__(self) -> str:
        found = self.metadata
        step = "" if found.job is None else f" step={found.job.step}"
        tensors = count_text(sum(one.tensors for one in found.roles.values()), "tensor")
        return f"<Checkpoint {found.path} format={found.format}{step}: {tensors}, {size_text(found.bytes)}>"

    def _repr_html_(self) -> str:
        """Return a table of the roles, which notebooks show."""
        rows = [("role", "tensors", "elements", "bytes", "dtypes")]
        for role, facts in self.metadata.roles.items():
            numbers = f"{facts.tensors:,}", f"{facts.elements:,}", size_text(facts.bytes)
            rows.append((role, *numbers, ", ".join(facts.dtypes)))
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        return f"<p>{escape(repr(self))}</p><table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"

    @cached_property
    def _source(self) -> ReadSource:
        """The proved mapping to canonical tensors."""
        return canonical_source(self._opened)

    @cached_property
    def _layout(self) -> dict[str, dict[str, Shard]]:
        """Every canonical tensor, by role and name."""
        return canonical_layout(self._source)

    @property
    def metadata(self) -> Metadata:
        """A summary of the checkpoint, from its manifest and file headers.

        Example:
            >>> paddleformers_fc.open("out/checkpoint-3").metadata.roles["model_state"].elements
            123456
        """
        opened = self._opened
        sizes = opened.file_sizes
        return Metadata(
            path=str(opened.catalog.root),
            format=opened.format.name,
            job=job_facts(opened.commit_record),
            config=MappingProxyType(opened.config),
            roles=MappingProxyType(role_facts(opened)),
            files=len(sizes),
            bytes=sum(sizes.values()),
        )

    def tensors(self) -> list[TensorInfo]:
        """List the canonical tensors of every role, in natural order.

        Raises:
            MappingError: the checkpoint's mapping cannot be proved.

        Example:
            >>> [one.name for one in checkpoint.tensors() if one.role == "model_state"][:1]
            ['lm_head.weight']
        """
        return [
            TensorInfo(name, shards[name].global_shape, shards[name].dtype, role)
            for role, shards in self._layout.items()
            for name in sorted(shards, key=natural)
        ]

    def read(self, name: str, box: Sequence[slice] | None = None, role: str | None = None) -> np.ndarray[Any, Any]:
        """Read a canonical tensor, or a box of it. Only the byte ranges of the box are read.

        The first call proves the checkpoint's mapping. The time of later calls does not depend on the number of
        tensors. Checksums are not compared; call :meth:`verify` for that.

        Args:
            name: canonical name, as :meth:`tensors` lists it.
            box: one slice per axis, without steps, with bounds as in numpy; None for all of the tensor.
            role: the role; None if only one role contains the name.
        Returns:
            a new array of the tensor's dtype and the shape of the box.
        Raises:
            OptionError: the name is unknown, or the box is not valid for its shape.
            CheckpointError: a file is missing, truncated or replaced.

        Example:
            >>> checkpoint.read("model.embed_tokens.weight", (slice(0, 16), slice(None))).shape
            (16, 64)
        """
        require(TEXT, name=name)
        require_or_none(one_of(ROLES), role=role)
        layout = self._layout
        roles = [one for one in layout if role in (None, one) and name in layout[one]]
        if not roles:
            raise OptionError(
                f"Unknown tensor {name!r}." if role is None else f"Unknown tensor {name!r} of role {role!r}.",
                where=str(self._opened.catalog.root),
                evidence=suggestion(name, {key for one in layout if role in (None, one) for key in layout[one]}),
                next_step="Checkpoint.tensors() lists the names and roles.",
            )
        tensor = layout[roles[0]][name]
        part = whole(tensor.global_shape) if box is None else parse_box(name, tensor.global_shape, box)
        if not part.volume:
            return np.empty(part.shape, to_numpy(to_safetensors(tensor.dtype)))
        target = Shard(name, tensor.dtype, tensor.global_shape, part)
        (array,) = read_canonical(self._source, {roles[0]: {name: target}}).values()
        return array.reshape(part.shape)

    def verify(self, level: str = "full") -> Verification:
        """Check files, checksums, headers, the mapping, and tied tensors.

        Args:
            level: ``off`` reads the manifest and headers; ``size`` also checks file sizes; ``full`` reads every byte.
        Returns:
            the completed checks.
        Raises:
            FlexError: a check failed; the error lists all faults.

        Example:
            >>> paddleformers_fc.open("out/checkpoint-3").verify().passed
            True
        """
        check_level(level)
        outcome, problem = verify_checkpoint(self._opened.catalog.root, level)
        if problem is not None:
            raise problem
        return outcome

    def diff(self, other: Checkpoint, role: str | None = None, *, atol: float = 0.0, rtol: float = 0.0) -> Difference:
        """Compare with another checkpoint, tensor by tensor, across layouts and formats.

        Tensors are compared bitwise by default. With a tolerance, tensors of the same shape and dtype are equal if
        ``abs(a - b) <= atol + rtol * abs(b)`` for all elements. NaN equals NaN, and infinities equal themselves.

        Args:
            other: the other checkpoint; ``b`` is from it.
            role: the only role to compare; None for all roles that both formats support.
            atol: absolute tolerance, finite and at least 0.
            rtol: relative tolerance, finite and at least 0.
        Raises:
            OptionError: the role is unknown, one of the formats does not support it, or a tolerance is invalid.

        Example:
            >>> checkpoint.diff(paddleformers_fc.open("hf")).equal
            True
        """
        require(instance_of(Checkpoint, "an opened checkpoint: paddleformers_fc.open(path)"), other=other)
        require(TOLERANCE, atol=atol, rtol=rtol)
        return compare_checkpoints(self._opened, other._opened, role, Tolerance(float(atol), float(rtol)))

    def plan(self, layout: str, dtype: str | None = None, aoa_config: Mapping[str, object] | None = None) -> GridPlan:
        """Plan a load under a parallel layout for every rank, without starting any rank.

        Args:
            layout: degrees by axis, such as ``tp=2,pp=2,dp=4``.
            dtype: the target model's dtype; the stored one by default.
            aoa_config: statements that map stored names to the model's, as when a flex checkpoint is resumed.
        Raises:
            OptionError: the layout is not valid for the model.
            MismatchError: the stored tensors do not match the configuration's model.

        Example:
            >>> paddleformers_fc.open("out/checkpoint-3").plan("tp=2,pp=2").world_size
            4
        """
        _require_planning(layout, aoa_config)
        return plan_load(self._opened, layout, dtype, aoa_config).plan()

    def explain(self, name: str) -> Explanation:
        """Trace a tensor to its files and byte offsets, in either direction, with the rules in between.

        Args:
            name: canonical or stored name.
        Raises:
            OptionError: the name is unknown.

        Example:
            >>> [box.file for box in checkpoint.explain("model.norm.weight").tensors[0].boxes]
            ['model_state/rank-00000.safetensors']
        """
        require(TEXT, name=name)
        return explain_tensor(self._opened, name)

    def plan_flows(
        self, layout: str, dtype: str | None = None, aoa_config: Mapping[str, object] | None = None
    ) -> PlanFlows:
        """Plan a load as :meth:`plan` does, and count the bytes that each rank reads from each writer.

        Args:
            layout: degrees by axis, such as ``tp=2,pp=2,dp=4``.
            dtype: the target model's dtype; the stored one by default.
            aoa_config: statements that map stored names to the model's.
        Raises:
            FlexError: as :meth:`plan`.

        Example:
            >>> paddleformers_fc.open("out/checkpoint-3").plan_flows("tp=2").writers
            ['rank 0', 'rank 1']
        """
        _require_planning(layout, aoa_config)
        return plan_load(self._opened, layout, dtype, aoa_config).flows()

    def export(
        self,
        directory: Location,
        *,
        max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
        verify: str = "full",
        replace: bool = False,
        tied: str = "refuse",
        format: str = "",
        base: Location | None = None,
        accept_base: bool = False,
        role: str = MODEL_STATE,
        dtype: str = "",
        md5: bool = False,
    ) -> ExportReport:
        """Write the weights, or their moving average, as Hugging Face files.

        Args:
            directory: the target: a path, or a URL such as ``s3://bucket/hf``; other files in it are kept.
            max_shard_bytes: maximum size of the tensors in one file, in bytes.
            verify: ``full`` first verifies all checksums of the checkpoint.
            replace: replace a model in the target.
            tied: which copy of a tied tensor to export if copies differ: from the ``first`` or ``last`` stage or rank.
            format: ``huggingface``, ``peft`` or ``paddleformers-lora``; for adapters the default is ``peft``.
            base: open weights to merge the adapters into; the export is then a complete model.
            accept_base: allow a ``base`` that differs from the files that the adapters were trained on.
            role: ``model_state``, or ``ema_state`` for the moving average, in the dtypes of the weights. Tensors
                without an average come from ``model_state``.
            dtype: ``float32`` or ``bfloat16``, also written ``fp32`` or ``bf16``; the dtype of the weights by default.
                ``float32`` exports master weights where they are stored.
            md5: also compute one md5 of the names and bytes of all tensors while they are written, for the report. It
                is equal for every layout and size of files.
        Raises:
            OptionError: the target contains a model or is inside a checkpoint, or there is no moving average.
            CheckpointError: the checkpoint is damaged, or already contains open weights.

        Example:
            >>> paddleformers_fc.open("out/checkpoint-3").export("hf").tensors
            21
        """
        _require_writing(directory, max_shard_bytes, verify, replace, tied)
        require_or_none(TEXT, format=format, dtype=dtype)
        require_or_none(DIRECTORY, base=base)
        require(FLAG, accept_base=accept_base, md5=md5)
        target = parse_target(directory, "An export")
        check_rewritable(self._opened)
        opened = with_role(self._opened, role)
        writer = writer_of(format) if format else default_writer(self._opened)
        merged = None if base is None else _base_of(self._opened, base, verify, accept_base)
        if merged is not None:
            writer = writer_of("huggingface")
        dtype = parse_export_dtype(dtype)
        if dtype and (merged is not None or writer is not HUGGINGFACE_WRITER):
            raise OptionError(
                "Adapters are exported in their own dtype.",
                where="--dtype",
                next_step="Leave out --dtype (dtype=), or merge the adapters first and convert the merged model.",
            )
        check_target(target, self._opened.model_files, replace, writer)
        chosen = structs.replace(with_tied(opened, tied), unread=verify == "full")
        return export_opened(chosen, target, max_shard_bytes, writer=writer, base=merged, dtype=dtype, md5=md5)

    def convert(
        self,
        directory: Location,
        *,
        format: str = "flex",
        config: Location | None = None,
        max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
        verify: str = "full",
        replace: bool = False,
        tied: str = "refuse",
    ) -> ExportReport:
        """Write the checkpoint in another format. The source is not changed.

        Optimizer states and the Trainer's state are written if both formats support them.

        Args:
            directory: the target: a path or a URL; for a flex checkpoint it must be empty or new.
            format: ``flex``, from which training resumes; ``hf``, the weights as Hugging Face files; or ``distcp``,
                from which PaddleFormers resumes without this package.
            config: as for :func:`open`.
            max_shard_bytes: maximum size of the tensors in one file, in bytes.
            verify: ``full`` first verifies all checksums that the source records.
            replace: replace a model in the target; only for ``hf``.
            tied: as for :meth:`export`.
        Raises:
            OptionError: the format is unknown, or the target is not empty or inside the source.
            FlexError: the checkpoint is damaged, or its mapping cannot be proved.

        Example:
            >>> paddleformers_fc.open("hf").convert("checkpoint-0").tensors
            21
        """
        _require_writing(directory, max_shard_bytes, verify, replace, tied)
        require(TEXT, format=format)
        require_or_none(DIRECTORY, config=config)
        target, (_, writer) = parse_target(directory, "A conversion"), conversion_target(format)
        opened = self._opened
        if writer is not FLEX_WRITER:
            check_rewritable(opened)
        root = opened.catalog.root
        given = config_of_base(opened) if config is None else given_config(root, parse_named(config))
        if opened.commit_record is None and (verify == "full" or given is not opened.config):
            opened = open_checkpoint(root, verify, config=given)
        if config is not None:
            check_heads(opened)
        check_no_overlap(root, target)
        check_target(target, opened.model_files, replace, writer)
        unread = verify == "full" and opened.commit_record is not None
        return export_opened(
            structs.replace(with_tied(opened, tied), unread=unread), target, max_shard_bytes, writer=writer
        )


def open(
    path_or_url: Location,
    verify: str = "size",
    roles: Collection[str] | None = None,
    *,
    config: Location | None = None,
) -> Checkpoint:
    """Open a checkpoint of any format, or a directory of open weights.

    Args:
        path_or_url: a directory, or a URL such as ``s3://bucket/run/checkpoint-3``.
        verify: how thoroughly to check files first: ``off``, ``size`` (sizes, and checksums of metadata files) or
            ``full`` (every byte).
        roles: the roles of a flex checkpoint to open, including ``model_state``; None for all. Under ``off``, files of
            other roles need not exist.
        config: the model's ``config.json`` or a directory with it, for checkpoints of other formats that lack it.
    Raises:
        OptionError: a role is unknown, ``model_state`` is not among the roles, or the checkpoint has a configuration
            that differs from ``config``.
        NotACheckpoint: no format recognises the directory.
        CheckpointError: the checkpoint is damaged or malformed.

    Example:
        >>> paddleformers_fc.open("out/checkpoint-3")
        <Checkpoint out/checkpoint-3 format=flex_checkpoint step=3: 96 tensors, 1.7 MB>
    """
    require(DIRECTORY, path_or_url=path_or_url)
    require_or_none(DIRECTORY, config=config)
    check_level(verify)
    directory = parse_named(path_or_url)
    given = None if config is None else given_config(directory, parse_named(config))
    opened = open_checkpoint(directory, verify, roles, given)
    if given is not None:
        check_heads(opened)
    return Checkpoint(opened)


def _base_of(adapters: OpenedCheckpoint, base: Location, verify: str, accept: bool) -> OpenedCheckpoint:
    """Open the base of a checkpoint of adapters, after checking that it is the base they were trained on."""
    opened = open_huggingface(parse_named(base), verify)
    if not accept:
        check_same_base(require_adapters(adapters), opened.catalog.root, opened.files)
    return opened


def _require_planning(layout: str, aoa_config: Mapping[str, object] | None) -> None:
    """Check the arguments that :meth:`Checkpoint.plan` and :meth:`Checkpoint.plan_flows` share."""
    require(TEXT, layout=layout)
    if aoa_config is not None:
        read_config(aoa_config)


def _require_writing(directory: Location, max_shard_bytes: int, verify: str, replace: bool, tied: str) -> None:
    """Check the arguments that :meth:`Checkpoint.export` and :meth:`Checkpoint.convert` share."""
    require(DIRECTORY, directory=directory)
    require(COUNT, max_shard_bytes=max_shard_bytes)
    require(FLAG, replace=replace)
    require(one_of(TIED_WAYS), tied=tied)
    check_level(verify)
