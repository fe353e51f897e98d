"""Run a matrix: sources once, then every cell, on fork servers in parallel, resuming after an interruption.

A cell has three questions. A's checkpoint is loaded under B and saved before the first step, B's is loaded under A and
saved: is every canonical tensor of every role md5-equal to A's, there and back? Are A and B exported to md5-equal
files? Are the losses of B's next three steps those of the uninterrupted A?

The result of a cell is a JSON file, written when it is finished; a second run keeps the equal results of this recipe. A
cell that was not equal keeps its directory with the ranks' logs.

Time: 2 to 6 s per cell and server on one core each. Memory: 400 MB per server and about 50 MB per rank beside it. Disk:
the sources, 5 MB each, and the directories of cells that were not equal.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from paddleformers_fc.errors import FlexError, PeerError
from paddleformers_fc.execute.digest import TensorDigest
from paddleformers_fc.execute.export import export_checkpoint
from verification.digests import canonical_digests, unequal_tensors
from verification.forkserver import ForkServer, JobResult
from verification.matrix.jobs import JOB, Training
from verification.matrix.layouts import MatrixLayout, parse_layout
from verification.matrix.recipe import Cell, Experiment, Recipe

SERVERS = 2
_T = TypeVar("_T")


class CellOutcome(msgspec.Struct, frozen=True):
    """The result of a cell.

    Args:
        name: of the cell.
        fingerprint: of the recipe.
        tensors: how many canonical tensors were compared, of all roles.
        unequal: those that were not md5-equal to A's, under B or back under A; with the reason.
        export_equal: the exports are md5-equal.
        expected: A's losses after the checkpoint.
        losses: B's.
        error: why the cell could not be finished; empty when it was.
    """

    name: str
    fingerprint: str
    tensors: int = 0
    unequal: tuple[str, ...] = ()
    export_equal: bool = False
    expected: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    error: str = ""

    @property
    def difference(self) -> float:
        """The largest distance of a loss to A's; infinite where one is missing or is not a number."""
        distances = [abs(a - b) for a, b in zip(self.losses, self.expected, strict=False)]
        whole = len(self.losses) == len(self.expected) > 0 and not any(map(math.isnan, distances))
        return max(distances) if whole else math.inf

    def right(self, tolerance: float) -> bool:
        """Return whether everything is md5-equal, and losses differ by no more than this."""
        is_equal = not self.error and not self.unequal and self.export_equal and self.tensors > 0
        return is_equal and self.difference <= tolerance


class CellDigests(msgspec.Struct, frozen=True):
    """The results of an experiment: variant -> losses of its two layouts."""

    title: str
    fingerprint: str
    losses: dict[str, tuple[tuple[float, ...], tuple[float, ...]]]


@dataclass(frozen=True)
class Saved:
    """A source that was trained.

    Args:
        checkpoint: at the step where conversions begin.
        losses: of all steps.
        digests: of its canonical tensors.
        exported: file -> digest of its export.
    """

    checkpoint: Path
    losses: tuple[float, ...]
    digests: list[TensorDigest]
    exported: dict[str, str]


class Workshop:
    """Fork servers, and a directory for their output; a context manager.

    Args:
        recipe: the matrix.
        root: the directory; results of an earlier run of this recipe are used.
    """

    def __init__(self, recipe: Recipe, root: Path) -> None:
        self._recipe, self._root = recipe, root
        self._checkpoint = f"checkpoint-{recipe.saved_at}"
        self._servers: SimpleQueue[ForkServer] = SimpleQueue()
        self._saved: dict[tuple[str, bool], Future[Saved]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Workshop:
        with ExitStack() as stack:
            for number in range(SERVERS):
                directory = self._root / "servers" / str(number)
                shutil.rmtree(directory, ignore_errors=True)
                self._servers.put(stack.enter_context(ForkServer(directory=directory)))
            self._pool = stack.enter_context(ThreadPoolExecutor(SERVERS))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._stack.close()

    def run(self, cells: Iterable[Cell]) -> Iterator[CellOutcome]:
        """Run these cells, and yield the outcome of each in their order."""
        wanted = list(cells)
        # In the order of the rows, sources first: a cell never waits for a source that has not begun.
        for cell in wanted:
            key = (cell.source.name, cell.hold_predictions)
            if key not in self._saved:
                self._saved[key] = self._pool.submit(self._source, cell.source, cell.hold_predictions)
        futures = [self._pool.submit(self._cell, cell) for cell in wanted]
        for future in futures:
            yield future.result()

    def saved(self, cell: Cell) -> Saved:
        """Return the source of a cell that was run."""
        return self._saved[cell.source.name, cell.hold_predictions].result()

    def known(self, cell: Cell) -> CellOutcome | None:
        """Return the result of a cell from this run or an earlier one of this recipe."""
        found = _read(self._record(cell), CellOutcome)
        return found if found is not None and found.fingerprint == self._recipe.fingerprint else None

    def _record(self, cell: Cell) -> Path:
        return self._root / "cells" / f"{file_name(cell.name)}.json"

    def experiment(self, experiment: Experiment) -> CellDigests:
        """Run one experiment, or take its result from an earlier run."""
        fingerprint = f"{self._recipe.fingerprint}-{msgspec.json.encode(experiment).hex()}"
        path = self._root / "experiments" / f"{file_name(experiment.title)}.json"
        known = _read(path, CellDigests)
        if known is not None and known.fingerprint == fingerprint:
            return known
        jobs = {
            variant: [
                self._pool.submit(self._plain, parse_layout(name), change, path.with_suffix("") / variant / name)
                for name in experiment.layouts
            ]
            for variant, change in experiment.variants.items()
        }
        losses = {variant: (pair[0].result(), pair[1].result()) for variant, pair in jobs.items()}
        found = CellDigests(experiment.title, fingerprint, losses)
        _write(path, found)
        return found

    def _plain(self, layout: MatrixLayout, change: Mapping[str, dict[str, Any]], output_dir: Path) -> tuple[float, ...]:
        recipe = self._recipe
        changed: dict[str, Any] = {key: {**getattr(recipe, key), **more} for key, more in change.items()}
        changed["last_step"] = recipe.saved_at
        return self._train(Training(structs.replace(recipe, **changed), layout, str(output_dir)))

    def _source(self, layout: MatrixLayout, hold: bool) -> Saved:
        directory = self._root / "sources" / file_name(layout.name + ("-held" if hold else ""))
        record = directory / f"losses-{self._recipe.fingerprint}.json"
        losses = _read(record, tuple[float, ...])
        if losses is None:
            shutil.rmtree(directory, ignore_errors=True)
            losses = self._train(Training(self._recipe, layout, str(directory / "run"), hold))
            _write(record, losses)
        checkpoint = directory / "run" / self._checkpoint
        digests = list(canonical_digests(checkpoint))
        return Saved(checkpoint, losses, digests, _exported(checkpoint, directory / "export"))

    def _cell(self, cell: Cell) -> CellOutcome:
        path = self._record(cell)
        known = self.known(cell)
        if known is not None and known.right(self._recipe.tolerance):
            return known
        directory = path.with_suffix("")
        shutil.rmtree(directory, ignore_errors=True)
        try:
            outcome = self._converted(cell, directory)
        except FlexError as error:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "error.txt").write_text(error.render() + "\n", encoding="utf-8")
            outcome = CellOutcome(cell.name, self._recipe.fingerprint, error=str(error))
        _write(path, outcome)
        if outcome.right(self._recipe.tolerance):
            shutil.rmtree(directory)
        return outcome

    def _converted(self, cell: Cell, directory: Path) -> CellOutcome:
        saved, hold = self.saved(cell), cell.hold_predictions
        there, back = directory / "there", directory / "back"
        forth = Training(self._recipe, cell.target, str(there), hold, resume=str(saved.checkpoint))
        losses = self._train(forth)
        returned = structs.replace(self._recipe, last_step=self._recipe.saved_at)
        self._train(Training(returned, cell.source, str(back), hold, resume=str(there / self._checkpoint)))
        return CellOutcome(
            name=cell.name,
            fingerprint=self._recipe.fingerprint,
            tensors=len(saved.digests),
            unequal=(
                *_unequal(saved.digests, there / self._checkpoint, f"under {cell.target.name}"),
                *_unequal(saved.digests, back / self._checkpoint, f"back under {cell.source.name}"),
            ),
            export_equal=_exported(there / self._checkpoint, directory / "export") == saved.exported,
            expected=saved.losses[self._recipe.saved_at :],
            losses=losses,
        )

    def _train(self, training: Training) -> tuple[float, ...]:
        """Run a training on the next free server and return its losses; logs of a failure go beside its output.

        Raises:
            PeerError: a rank failed.
        """
        server = self._servers.get()
        try:
            result = server.attempt(JOB, training.layout.nproc, training.to_json())
        finally:
            self._servers.put(server)
        if not result.ok:
            raise _failure(result, Path(training.output_dir) / "logs")
        for log in result.logs:
            log.unlink()
        return tuple(result.values[0])


def _failure(result: JobResult, directory: Path) -> PeerError:
    """Return the error of a training that failed, with its logs moved to where they stay."""
    directory.mkdir(parents=True, exist_ok=True)
    evidence: list[str] = []
    for log, code in zip(result.logs, result.returncodes, strict=True):
        kept = Path(shutil.move(log, directory / log.name))
        last = kept.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        evidence.append(f"{kept} ({'time was over' if result.timed_out else f'code {code}'}): {' '.join(last)}")
    return PeerError("A training failed.", where=str(directory), evidence=evidence, next_step="Read the logs.")


def _unequal(expected: list[TensorDigest], checkpoint: Path, where: str) -> tuple[str, ...]:
    found = canonical_digests(checkpoint, roles={digest.role for digest in expected})
    return tuple(f"{role} {name} {where}" for role, name in unequal_tensors(expected, found))


def _exported(checkpoint: Path, directory: Path) -> dict[str, str]:
    """File -> checksum of the weights as open weights."""
    shutil.rmtree(directory, ignore_errors=True)
    digests = export_checkpoint(checkpoint, directory).digests()
    shutil.rmtree(directory)
    return digests


def file_name(name: str) -> str:
    """Return the name of a cell, a layout or an experiment as that of a file."""
    return re.sub(r"[^\w+-]+", "_", name.replace("->", "-to-")).strip("_")


def _read(path: Path, kind: type[_T]) -> _T | None:
    """Return the result of an earlier run; None if there is none, or if it is not readable."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(content)))
    unfinished.rename(path)
