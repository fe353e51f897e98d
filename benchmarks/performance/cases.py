"""The cases: what is measured, under which layouts, between which contenders, and what is aimed at."""

from __future__ import annotations

from dataclasses import dataclass

SAVERS = ("raw", "ours", "safetensors", "stock", "stock safetensors", "dcp")
LEVELS = ("ours", "ours size", "ours off")
"""This package under each value of ``flex_verify``; ``ours`` is the default, ``full``. They read the same files."""
LOADERS = ("raw", *LEVELS, "safetensors", "stock", "stock safetensors", "dcp")
RESHARDERS = ("raw", *LEVELS, "stock", "stock safetensors", "dcp")
STREAMERS = ("stock", "ours", "ours exported", "raw")
"""Paddle's ``Layer.full``, ``stream``, a save with an export of the checkpoint, and broadcasts of the shards alone."""
CHECKS = ("verify", "diff")
"""Verbs that read a checkpoint and fill no tensor."""
STORED = ("raw", *LEVELS)
"""Those whose reads of tensors a simulated storage sees."""
STORAGE_RATE, STORAGE_LATENCY = 10**9, 0.001
"""Bytes a second of the storage that is simulated, and seconds that a request takes beside."""


@dataclass(frozen=True)
class Case:
    """One thing that is measured.

    Args:
        name: what a reader sees.
        verb: ``save``, ``load`` (from a checkpoint), ``start`` (from open weights), ``export``, ``stream`` (of weights
            in memory to every rank), ``verify`` or ``diff`` (of a checkpoint and its copy).
        model: a name of :data:`.models.MODELS`.
        ranks: how many take part.
        layout: theirs.
        contenders: who takes part, the baseline first.
        source: layout and number of ranks that saved what is loaded; empty for the same.
        source_ranks: see ``source``; 0 for the same.
        is_stored: whether files are on the simulated storage.
    """

    name: str
    verb: str
    model: str
    ranks: int
    layout: str
    contenders: tuple[str, ...]
    source: str = ""
    source_ranks: int = 0
    is_stored: bool = False

    @property
    def saved_layout(self) -> str:
        """The layout of what is loaded."""
        return self.source or self.layout

    @property
    def saved_ranks(self) -> int:
        """The number of ranks that saved what is loaded."""
        return self.source_ranks or self.ranks


CASES: tuple[Case, ...] = (
    Case("save, 1 rank", "save", "large", 1, "", SAVERS),
    Case("save, 2 ranks", "save", "large", 2, "tp=2", SAVERS),
    Case("save, 4 ranks", "save", "large", 4, "tp=4", SAVERS),
    Case("save, 8 ranks", "save", "large", 8, "tp=8", SAVERS),
    Case("save, 20,000 tensors", "save", "small", 1, "", SAVERS),
    Case("save, 100,000 tensors", "save", "names", 1, "", SAVERS),
    Case("load, same layout, 1 rank", "load", "large", 1, "", LOADERS),
    Case("load, same layout, 2 ranks", "load", "large", 2, "tp=2", LOADERS),
    Case("load, same layout, 4 ranks", "load", "large", 4, "tp=4", LOADERS),
    Case("load, same layout, 8 ranks", "load", "large", 8, "tp=8", LOADERS),
    Case("load, same layout, 20,000 tensors", "load", "small", 1, "", LOADERS),
    Case("load, same layout, 100,000 tensors", "load", "names", 1, "", LOADERS),
    Case("load, tp 4 to tp 2", "load", "large", 2, "tp=2", RESHARDERS, "tp=4", 4),
    Case("load, rows to columns, 4 ranks", "load", "large", 4, "columns", RESHARDERS, "rows", 4),
    Case("load, rows to columns, 4 ranks to 2", "load", "large", 2, "columns", RESHARDERS, "rows", 4),
    Case(
        "load, sharding v2, 2 to 4",
        "load",
        "quarter",
        4,
        "sharding=4,split=true+states",
        ("raw", *LEVELS, "stock", "stock safetensors"),
        "sharding=2,split=true+states",
        2,
    ),
    Case(
        "load, stage 3 slices, 2 to 4",
        "load",
        "large",
        4,
        "sharding=4,stage=3",
        ("raw", *LEVELS, "stock", "stock safetensors"),
        "sharding=2,stage=3",
        2,
    ),
    Case("load from storage, same layout, 2 ranks", "load", "large", 2, "tp=2", STORED, is_stored=True),
    Case("load from storage, 20,000 tensors", "load", "small", 1, "", STORED, is_stored=True),
    Case("load from storage, tp 4 to tp 2", "load", "large", 2, "tp=2", STORED, "tp=4", 4, True),
    Case("load from storage, rows to columns", "load", "large", 4, "columns", STORED, "rows", 4, True),
    Case("open weights to tp 2, transposed", "start", "large", 2, "tp=2", ("raw", "ours", "safetensors", "stock")),
    Case("two layers of 7B to tp 2, transposed", "start", "7b", 2, "pp=16,tp=2", ("raw", "ours", "safetensors")),
    Case("export", "export", "large", 1, "", ("safetensors", "ours"), "tp=4", 4),
    Case("stream, tp 2 pp 2", "stream", "quarter", 4, "pp=2,tp=2", STREAMERS),
    *(
        Case(f"{verb}, {size}", verb, model, 1, "", ("raw", "ours"))
        for verb in CHECKS
        for size, model in (("65 tensors", "large"), ("20,000 tensors", "small"), ("100,000 tensors", "many"))
    ),
)
"""Every case, in the order of the report. Of ``export`` the baseline is ``safetensors.save_file``, of ``stream``
``Layer.full``, of ``verify`` and ``diff`` a read of as many bytes through a buffer of 4 MiB."""


@dataclass(frozen=True)
class Target:
    """What is aimed at: a ratio of this package's rate to another's within one case.

    Args:
        case: its name.
        against: a contender, or the name of another case of which this package's own rate is taken.
        at_least: the ratio, of later calls.
    """

    case: str
    against: str
    at_least: float


def targets() -> tuple[Target, ...]:
    """Every ratio that is aimed at."""
    made: list[Target] = []
    for ranks in ("1 rank", "2 ranks", "4 ranks"):
        made += [Target(f"save, {ranks}", "raw", 0.8), Target(f"save, {ranks}", "stock", 3.0)]
        made += [Target(f"load, same layout, {ranks}", "raw", 0.8), Target(f"load, same layout, {ranks}", "stock", 4.0)]
    for name in ("load, tp 4 to tp 2", "load, rows to columns, 4 ranks", "load, rows to columns, 4 ranks to 2"):
        made += [Target(name, "raw", 0.5), Target(name, "dcp", 2.0)]
    made += [
        Target("open weights to tp 2, transposed", "raw", 0.3),
        Target("two layers of 7B to tp 2, transposed", "raw", 0.3),
        Target("load, sharding v2, 2 to 4", "raw", 0.6),
        Target("load, stage 3 slices, 2 to 4", "raw", 0.6),
        Target("export", "safetensors", 0.8),
        Target("stream, tp 2 pp 2", "stock", 1.0),
        Target("save, 20,000 tensors", "save, 1 rank", 0.4),
        Target("load, same layout, 20,000 tensors", "load, same layout, 1 rank", 0.4),
    ]
    made += [Target(case.name, "raw", 0.7) for case in CASES if case.verb in CHECKS]
    for name in ("same layout, 1 rank", "same layout, 2 ranks", "same layout, 20,000 tensors", "tp 4 to tp 2"):
        made.append(Target(f"load, {name}", "ours off", 0.8))
    for name in ("same layout, 2 ranks", "20,000 tensors", "tp 4 to tp 2"):
        made.append(Target(f"load from storage, {name}", "ours off", 0.909))
    return tuple(made)


MOST_AMPLIFICATION = 1.05
"""Bytes read from storage over bytes needed, at most."""

MOST_MEMORY = 64 << 20
"""Bytes above the targets that a load may take, beside its largest single read."""
