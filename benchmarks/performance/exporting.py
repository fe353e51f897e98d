"""The memory of an export in a process of its own: ``python -m benchmarks.performance.exporting SOURCE TARGET BYTES``.

Prints how many bytes the resident memory rose above where it stood before the export.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.performance.measuring import with_peak
from benchmarks.performance.models import MODELS, laid_over, piece_of
from benchmarks.performance.pieces import part_of
from paddleformers_fc.execute.export import export_checkpoint
from verification.simulate_ranks import filled, save

MODEL_SIZES = {"256 MiB model": "quarter", "1 GiB model": "large"}
FILE_BYTES = 100 * 10**6


def export_peaks(root: Path) -> Iterator[tuple[str, int]]:
    """By model, the rise of memory of an export; the largest tensors of both models have 32 and 16 MiB."""
    for title, model in MODEL_SIZES.items():
        source, target = root / model, root / f"{model}-exported"
        laid = laid_over(model, "")
        weights = {"model_state": laid.weights(0)}
        held = filled(weights, lambda role, shard: part_of(piece_of(role, shard)).reshape(shard.global_shape))
        save(source, [held], laid)
        command = [sys.executable, "-m", "benchmarks.performance.exporting", str(source), str(target)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        yield f"{title}, {FILE_BYTES // 10**6} MB files, {MODELS[model].title}", int(output)


def main() -> None:
    """Export, and print the rise."""
    source, target = map(Path, sys.argv[1:3])
    _, peak = with_peak(lambda: export_checkpoint(source, target, FILE_BYTES))
    print(peak)


if __name__ == "__main__":
    main()
