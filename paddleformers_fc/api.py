"""The Python API: open a checkpoint of any format, look at it, check, compare, plan and export it.

``paddleformers_fc.open`` returns a :class:`Checkpoint`; each method is a few lines over the packages below, and the
commands of ``paddleformers-fc`` do the same.
It needs neither Paddle nor an accelerator. ``save`` and ``load`` are in :mod:`paddleformers_fc.trainer.loop`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    instance_of,
    one_of,
    parse_box,
    require,
    require_or_none,
)
from paddleformers_fc.errors import OptionError
from paddleformers_fc.execute.diff_checkpoints import Difference, compare_checkpoints
from paddleformers_fc.execute.digest import read_canonical
from paddleformers_fc.execute.export import ExportReport, check_dtype, check_no_overlap, check_target, export_opened
from paddleformers_fc.execute.merging import check_same_base
from paddleformers_fc.execute.verify import Verification, verify_checkpoint
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.formats.adapters import check_rewritable, config_of_base, require_adapters
from paddleformers_fc.formats.checkpoint import TIED_WAYS, with_role, with_tied
from paddleformers_fc.formats.flex import FLEX_WRITER
from paddleformers_fc.formats.huggingface import DEFAULT_MAX_SHARD_BYTES, HUGGINGFACE_WRITER, open_huggingface
from paddleformers_fc.formats.inspection import JobFacts, RoleFacts, job_facts, role_facts
from paddleformers_fc.formats.registry import (
    conversion_target,
    default_writer,
    open_checkpoint,
    require_config,
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
from paddleformers_fc.text import natural

Location = str | PathLike[str] | RemotePath
"""A path, or a URL such as ``s3://bucket/run/checkpoint-3``."""


@dataclass(frozen=True)
class Metadata:
    """The content of a checkpoint.

    Args:
        path: the directory or URL.
        format: ``flex_checkpoint``, ``huggingface`` (open weights), ``paddle`` (FlexCheckpoint), or the name of another
            format that is read.
        job: the job that saved it: step, samples, ranks, parallel degrees, family; None for formats without a record.
        config: the model's ``config.json``; empty if there is none.
        roles: number of tensors, elements and bytes by role; ``roles["model_state"].elements`` counts the parameters.
        files: number of files.
        bytes: their sizes together.
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
        name: canonical name; a state has the suffix of its kind, such as ``.moment1_0``.
        shape: global shape.
        dtype: element type by its numpy name; ``bfloat16`` and ``float8`` types are those of ``ml_dtypes``.
        role: ``model_state``, ``master_weight``, ``optimizer_state`` or ``ema_state``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str


class Checkpoint:
    """An opened checkpoint; :func:`open` returns it.

    Tensors have canonical names, those of the model's Hugging Face files, under every format and parallel layout. The
    states of an optimizer have the name of their parameter and a suffix.

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
        return f"Checkpoint({str(self._opened.catalog.root)!r}, format={self._opened.format.name!r})"

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
        """The content of the checkpoint, from its manifest and headers.

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
            MappingError: the mapping of the checkpoint cannot be proved.

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
        """Read a canonical tensor, or a box of it; only the byte ranges of the box are read.

        The first call proves the mapping of the checkpoint; later calls take the same time for any number of tensors.
        Checksums of tensors are not compared: :meth:`verify` does that for the whole checkpoint.

        Args:
            name: canonical name, as :meth:`tensors` lists it.
            box: one slice per axis, without steps, with bounds as in numpy; None for the whole tensor.
            role: the role; None for the one role that contains the name.
        Returns:
            a new array of the tensor's dtype and the shape of the box.
        Raises:
            OptionError: the name is unknown, or the box is not one of its shape.
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
                next_step="Checkpoint.tensors() lists the names and roles.",
            )
        tensor = layout[roles[0]][name]
        part = whole(tensor.global_shape) if box is None else parse_box(name, tensor.global_shape, box)
        if not part.volume:
            return np.empty(part.shape, to_numpy(to_safetensors(tensor.dtype)))
        wanted = Shard(name, tensor.dtype, tensor.global_shape, part)
        (array,) = read_canonical(self._source, {roles[0]: {name: wanted}}).values()
        return array.reshape(part.shape)

    def verify(self, level: str = "full") -> Verification:
        """Check files, checksums, headers, the mapping, and tied tensors.

        Args:
            level: ``off`` reads manifest and headers, ``size`` looks at the files as well, ``full`` reads every byte.
        Returns:
            the checks that were made.
        Raises:
            FlexError: with the faults of all checks that were made.

        Example:
            >>> paddleformers_fc.open("out/checkpoint-3").verify().passed
            True
        """
        check_level(level)
        outcome, problem = verify_checkpoint(self._opened.catalog.root, level)
        if problem is not None:
            raise problem
        return outcome

    def diff(self, other: Checkpoint, role: str | None = None) -> Difference:
        """Compare with another checkpoint, tensor by tensor, across layouts and formats.

        Args:
            other: the other checkpoint.
            role: the only role to compare; None for all that both formats can contain.
        Raises:
            OptionError: the role is unknown, or one of the formats cannot contain it.

        Example:
            >>> checkpoint.diff(paddleformers_fc.open("hf")).equal
            True
        """
        require(instance_of(Checkpoint, "an opened checkpoint: paddleformers_fc.open(path)"), other=other)
        return compare_checkpoints(self._opened, other._opened, role)

    def plan(self, layout: str, dtype: str | None = None, aoa_config: Mapping[str, object] | None = None) -> GridPlan:
        """Plan a load under a parallel layout for every rank, without any of them.

        Args:
            layout: degrees by axis, such as ``tp=2,pp=2,dp=4``.
            dtype: the target model's dtype; by default the stored one.
            aoa_config: statements from stored names to the model's, as in a resume of a flex checkpoint.
        Raises:
            OptionError: the model cannot have the layout.
            MismatchError: the stored tensors do not fit the model of the configuration.

        Example:
            >>> paddleformers_fc.open("out/checkpoint-3").plan("tp=2,pp=2").world_size
            4
        """
        _require_planning(layout, aoa_config)
        return plan_load(self._opened, layout, dtype, aoa_config).plan()

    def explain(self, name: str) -> Explanation:
        """Explain a tensor: all stored boxes that it is read from or that read it, and the rules between them.

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
        """Plan a load as :meth:`plan` does, with the bytes that every rank reads from every writer.

        Args:
            layout: degrees by axis, such as ``tp=2,pp=2,dp=4``.
            dtype: the target model's dtype; by default the stored one.
            aoa_config: statements from stored names to the model's.
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
    ) -> ExportReport:
        """Write the weights, or their moving average, as Hugging Face files.

        Args:
            directory: the target: a path or a URL of a store such as ``s3://bucket/hf``; other files in it are kept.
            max_shard_bytes: bound on the tensors of one file, in bytes.
            verify: ``full`` compares the checksum of every byte of the checkpoint first.
            replace: replace a model in the target.
            tied: the copy of a tensor that is exported where copies differ: of the ``first`` or ``last`` stage or rank.
            format: ``huggingface``, ``peft`` or ``paddleformers-lora``; by default PEFT's for a checkpoint of adapters.
            base: open weights into which the adapters are merged; the export is then a whole model.
            accept_base: whether ``base`` may be other files than those that the adapters were trained on.
            role: ``model_state``, or ``ema_state`` for the moving average, in the dtypes of the weights. Tensors
                without an average are those of ``model_state``.
            dtype: ``float32`` or ``bfloat16``; by default that of the weights. To float32, master weights are read
                where they are stored.
        Raises:
            OptionError: the target contains a model or is inside a checkpoint, or there is no moving average.
            CheckpointError: the checkpoint is damaged, or is open weights already.

        Example:
            >>> paddleformers_fc.open("out/checkpoint-3").export("hf").tensors
            21
        """
        _require_writing(directory, max_shard_bytes, verify, replace, tied)
        require_or_none(TEXT, format=format, dtype=dtype)
        require_or_none(DIRECTORY, base=base)
        require(FLAG, accept_base=accept_base)
        target = parse_target(directory, "An export")
        check_rewritable(self._opened)
        opened = with_role(self._opened, role)
        writer = writer_of(format) if format else default_writer(self._opened)
        merged = None if base is None else _base_of(self._opened, base, verify, accept_base)
        if merged is not None:
            writer = writer_of("huggingface")
        check_dtype(dtype)
        if dtype and (merged is not None or writer is not HUGGINGFACE_WRITER):
            raise OptionError(
                "Adapters are exported in their own dtype.",
                where="--dtype",
                next_step="Leave out --dtype (dtype=), or merge the adapters first and convert the merged model.",
            )
        check_target(target, self._opened.model_files, replace, writer)
        chosen = structs.replace(with_tied(opened, tied), unread=verify == "full")
        return export_opened(chosen, target, max_shard_bytes, writer=writer, base=merged, dtype=dtype)

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

        Optimizer states and the state of the Trainer are written as far as both formats have them.

        Args:
            directory: the target: a path or a URL of a store; that of a flex checkpoint must be empty or new.
            format: ``flex``, from which training resumes, ``hf``, the weights as Hugging Face files, or ``distcp``,
                from which PaddleFormers resumes without this package.
            config: a directory with the model's ``config.json``, for checkpoints that lack one.
            max_shard_bytes: bound on the tensors of one file, in bytes.
            verify: ``full`` compares all checksums that the source records first.
            replace: replace a model in the target; for ``hf`` alone.
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
        given = config_of_base(opened) if config is None else require_config(parse_named(config))
        if opened.commit_record is None and (verify == "full" or given is not opened.config):
            opened = open_checkpoint(root, verify, config=given)
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
        verify: the comparison before the first read: ``off``, ``size`` (sizes, checksums of small files) or ``full``
            (every byte).
        roles: the roles of a flex checkpoint to open, ``model_state`` among them; None for all. Under
            ``off``, files of others need not exist.
        config: a directory with the model's ``config.json``, for checkpoints of other formats that lack one.
    Raises:
        OptionError: a role is unknown, or ``model_state`` is not among the roles.
        NotACheckpoint: no format recognises the directory.
        CheckpointError: it is damaged or malformed.

    Example:
        >>> paddleformers_fc.open("out/checkpoint-3")
        Checkpoint('out/checkpoint-3', format='flex_checkpoint')
    """
    require(DIRECTORY, path_or_url=path_or_url)
    require_or_none(DIRECTORY, config=config)
    check_level(verify)
    given = None if config is None else require_config(parse_named(config))
    return Checkpoint(open_checkpoint(parse_named(path_or_url), verify, roles, given))


def _base_of(adapters: OpenedCheckpoint, base: Location, verify: str, accept: bool) -> OpenedCheckpoint:
    """Return the opened base of a checkpoint of adapters."""
    opened = open_huggingface(parse_named(base), verify)
    if not accept:
        check_same_base(require_adapters(adapters), opened.catalog.root, opened.files)
    return opened


def _require_planning(layout: str, aoa_config: Mapping[str, object] | None) -> None:
    """Check the arguments that both plans have in common."""
    require(TEXT, layout=layout)
    if aoa_config is not None:
        read_config(aoa_config)


def _require_writing(directory: Location, max_shard_bytes: int, verify: str, replace: bool, tied: str) -> None:
    """Check the arguments that an export and a conversion have in common."""
    require(DIRECTORY, directory=directory)
    require(COUNT, max_shard_bytes=max_shard_bytes)
    require(FLAG, replace=replace)
    require(one_of(TIED_WAYS), tied=tied)
    check_level(verify)
