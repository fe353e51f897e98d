"""Read the Trainer's files in PaddleFormers' own formats as the metadata files of a flex checkpoint.

================================  ==========================================================
``trainer_state.bin``, ``.json``  the Trainer's state
``training_args.bin``             batch sizes, parallel degrees, and settings of the moving average
``scheduler.pdparams``            the learning-rate scheduler
``scaler.pdparams``               the loss scaler of float16 runs
``rng_state_R.pth``               the random generators of rank R
================================  ==========================================================

All but the JSON file are pickles, which are read as data (:mod:`paddleformers_fc.storage.pickles`). They do not contain
the order of the data: the position is a number of steps, from which a resumed run computes its samples as PaddleFormers
does.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paddleformers_fc.errors import Corrupt, FlexError, FormatError
from paddleformers_fc.formats.catalog import COPY_AGAIN_STEP, Catalog, damaged, malformed
from paddleformers_fc.layout.roles import EMA_STATE, OPTIMIZER_STATE
from paddleformers_fc.storage import state_json
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors
from paddleformers_fc.storage.files import exists, list_directory, open_local, read_range
from paddleformers_fc.storage.json_io import parse_json, read_document
from paddleformers_fc.storage.manifest import TRAINER_DIRECTORY, Manifest
from paddleformers_fc.storage.paths import AnyPath, parse_step
from paddleformers_fc.storage.pickles import PickledArray, Record, read_pickle
from paddleformers_fc.text import count_text

STATES = ("trainer_state.json", "trainer_state.bin")
"""The possible names of the Trainer's state; a checkpoint has one of them."""
ARGUMENTS, SCHEDULER, SCALER = "training_args.bin", "scheduler.pdparams", "scaler.pdparams"
_PICKLES = {"scheduler": SCHEDULER, "scaler": SCALER}
SIGNAL = re.compile(r"saved_signal_([0-9]{1,9})")
"""The name of the file that a rank writes after its part of a checkpoint."""

_LOSS_OF_STEP = "loss"
"""A key that a Trainer with a moving average adds to its state during a step; it is not a field of the state."""
_MAX_STATE_BYTES = 512 * 1024 * 1024
_GENERATORS = re.compile(r"rng_state_(0|[1-9][0-9]{0,8})\.pth")
_BETAS = {".beta1_pow_acc_0": "adam_beta1", ".beta2_pow_acc_0": "adam_beta2"}
"""The suffixes of powers of Adam's betas, and the training arguments with the betas."""
_TRAINED_TOGETHER = re.compile(r".*\.experts\.[0-9]+\.|[^0-9]*?\.(?=[0-9]+\.)")
"""The prefix that parameters with gradients in the same steps share."""
_LEAST_POWER = 1e-30
"""Smaller powers are too close to underflow to be exact."""
_ALTERED_STEP = "Use another checkpoint; this one contains files of different saves, or was altered."
_DEGREES = {
    "dp": "data_parallel_size",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "sharding": "sharding_parallel_size",
    "ep": "expert_model_parallel_size",
    "sep": "sep_parallel_size",
    "cp": "context_parallel_size",
}
_AVERAGE = ("save_ema_coef", "ema_interval", "ema_loss_threshold")
_RANKS, _SEEDS = ("dp", "sharding", "pp"), ("sharding", "dp", "pp")
"""The order of axes that numbers ranks, and the order that numbers their seeds. Both continue with sep and tp."""
_OF_WORLD = ("dp", "tp", "pp", "sharding", "sep")


def run_files(directory: Path) -> list[Path]:
    """Return the files of a directory that contain a Trainer's state."""
    known = {*STATES, ARGUMENTS, SCHEDULER, SCALER}
    return [path for path in list_directory(directory) if path.name in known or _GENERATORS.fullmatch(path.name)]


def has_run(directory: Path) -> bool:
    """Return whether a directory contains a Trainer's state."""
    return any(exists(directory / name) for name in STATES)


@dataclass(frozen=True, slots=True)
class Power:
    """A stored power of a beta, with its file and its element type."""

    file: str
    dtype: str
    number: float

    @property
    def is_valid(self) -> bool:
        """Whether the number can be a power. The dtype of other numbers is reported with their names elsewhere."""
        return self.dtype == "float32" and 0 <= self.number <= 1


Powers = Mapping[str, Power]
NO_POWERS: Powers = {}


def read_run(directory: Path, powers: Powers = NO_POWERS) -> Manifest:
    """Return a manifest with the facts in a Trainer's files.

    Args:
        directory: the checkpoint.
        powers: the powers of Adam's betas in its optimizer states.
    Returns:
        a manifest without files.
    Raises:
        Corrupt: files are from different steps or runs, or the random generators of some ranks are missing.
        FormatError: a file is malformed.
    """
    state, arguments = _state(directory), _arguments(directory)
    step = _count(state, "global_step", directory)
    _check_same_step(directory, step)
    degrees = {axis: _degree(arguments, key) for axis, key in _DEGREES.items()}
    ranks = {int(found[1]) for path in list_directory(directory) if (found := _GENERATORS.fullmatch(path.name))}
    world = math.prod(degrees[axis] for axis in _OF_WORLD) if arguments else max(ranks, default=0) + 1
    _check_all_generators(directory, ranks, world)
    _check_states_of_step(directory, powers, arguments, step)
    return Manifest(
        written_by="PaddleFormers",
        step=step,
        consumed_samples=_count(state, "consumed_samples", directory) if "consumed_samples" in state else 0,
        world_size=world,
        parallel=degrees if arguments else {},
        family="",
        files=[],
    )


def _check_states_of_step(directory: Path, powers: Powers, arguments: Mapping[str, Any], step: int) -> None:
    """Check that optimizer states are from the Trainer's step, by the powers of Adam's betas.

    Raises:
        Corrupt: the steps differ by more than the rounding of the powers explains.
    """
    if exists(directory / SCALER):
        return  # A loss scaler skips steps of the optimizer.
    for ending, key in _BETAS.items():
        beta = arguments.get(key)
        # The smallest power has made most steps: parameters without a gradient skip steps.
        least = min((one.number for name, one in powers.items() if name.endswith(ending) and one.is_valid), default=0.0)
        if isinstance(beta, float) and 0 < beta < 1 and least > _LEAST_POWER:
            decay = -math.log(np.float32(beta))
            done = round(-math.log(least) / decay) - 1
            if abs(done - step) > step * 2.0**-23 / decay:
                lines = f"state of the Trainer: step {step}", f"optimizer states: step {done}"
                raise different_steps(directory, [*lines, f"by {key} {beta:g} of {ARGUMENTS}"])
            return


def check_states_of_one_step(directory: Path, powers: Powers) -> None:
    """Check that all files of optimizer states are from the same step.

    The layers of a stack get gradients in the same steps, and so do the weights of one expert. For such parameters, the
    smallest powers in all files must be equal.

    Raises:
        Corrupt: files have different powers.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    for name, one in powers.items():
        if one.is_valid:
            parameter, _, power = name.rpartition(".")
            together = _TRAINED_TOGETHER.match(parameter)
            least = found.setdefault((together[0] if together else parameter, power), {})
            least[one.file] = min(one.number, least.get(one.file, 1.0))
    lines = {
        f"{file}: {power} is {number:g}": None
        for (_, power), least in found.items()
        if len(set(least.values())) > 1
        for file, number in sorted(least.items())
    }
    if lines:
        raise different_steps(directory, lines)


def check_powers(directory: AnyPath, powers: Powers) -> None:
    """Check that the powers of Adam's betas are between 0 and 1. Powers of many steps underflow to 0.

    Raises:
        Corrupt: powers are out of range; the error lists all of them.
    """
    invalid = [f"{name}: {one.number:g}" for name, one in powers.items() if not 0 <= one.number <= 1]
    if invalid:
        count = count_text(len(invalid), "number")
        what = f"{directory} contains powers of Adam's betas outside of 0 to 1: {count}."
        raise damaged(directory, what, invalid, _ALTERED_STEP)


def read_powers(directory: Path, catalog: Catalog) -> Powers:
    """Return the powers of Adam's betas by full name of the state. Every file is opened once."""
    endings = tuple(_BETAS)
    places: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name, tensor in catalog.roles.get(OPTIMIZER_STATE, {}).items():
        if name.endswith(endings) and tensor.offsets:
            file, begin = tensor.offsets[0]
            places.setdefault((file, tensor.dtype), []).append((begin, name))
    found: dict[str, Power] = {}
    for (file, stored), own in places.items():
        dtype = to_numpy(to_safetensors(stored))
        with open_local(directory / file) as opened:
            raw = b"".join(read_range(opened, begin, dtype.itemsize) for begin, _ in sorted(own))
        numbers = np.frombuffer(raw, dtype).astype(np.float64).tolist()
        found |= {name: Power(file, stored, one) for (_, name), one in zip(sorted(own), numbers, strict=True)}
    return found


def run_documents(directory: Path, roles: Collection[str]) -> list[str]:
    """Return the metadata files of a flex checkpoint that :func:`read_run_document` derives from a Trainer's files.

    Args:
        directory: the checkpoint.
        roles: the stored roles.
    """
    names = {path.name for path in list_directory(directory)}
    if not names & {*STATES}:
        return []
    found = ["state", "data", *(["ema"] if EMA_STATE in roles else [])]
    found += [document for document, name in _PICKLES.items() if name in names]
    ranks = (int(ranked[1]) for name in sorted(names) if (ranked := _GENERATORS.fullmatch(name)))
    found += [f"rng-{rank:05d}" for rank in ranks]
    return [f"{TRAINER_DIRECTORY}/{name}.json" for name in found]


def read_run_document(directory: Path, name: str) -> bytes:
    """Return one of :func:`run_documents`.

    Raises:
        CheckpointError: a file of the Trainer is damaged, malformed or from another rank.
    """
    document = name.removeprefix(f"{TRAINER_DIRECTORY}/").removesuffix(".json")
    if document == "state":
        return state_json.encode(_state(directory), "trainer state")
    if document == "data":
        return state_json.encode(_position(directory), "data position")
    if document == "ema":
        return state_json.encode(_average(directory), "moving average")
    if document in _PICKLES:
        path = directory / _PICKLES[document]
        return state_json.encode(_plain(read_pickle(path), path), path.name)
    return _generators(directory, int(document.removeprefix("rng-")))


def check_finished(directory: Path, world_size: int) -> None:
    """Check that every rank has finished its part of a checkpoint.

    Args:
        directory: the checkpoint.
        world_size: number of ranks that saved it.
    Raises:
        Corrupt: ``saved_signal_*`` files are missing.
    """
    signals = {int(found[1]) for path in list_directory(directory) if (found := SIGNAL.fullmatch(path.name))}
    missing = sorted(set(range(world_size)) - signals)
    if missing:
        next_step = "Set resume_from_checkpoint to it if you know that it is complete."
        evidence = [f"missing: saved_signal_{rank}" for rank in missing[:8]]
        raise damaged(directory, f"Not every rank has finished {directory}.", evidence, next_step)


def lacking(documents: Collection[str], rank: int) -> list[str]:
    """Return the state of a run that a checkpoint lacks, for the log.

    Args:
        documents: the paths of its metadata files, as in a flex checkpoint.
        rank: the rank whose random states are needed.
    """
    needed = {
        "scheduler": "the learning-rate scheduler",
        f"rng-{rank:05d}": "random states of this rank",
    }
    absent = [text for name, text in needed.items() if f"{TRAINER_DIRECTORY}/{name}.json" not in documents]
    return [*absent, "the order of the data (this run's order is used)", "checksums"]


def _state(directory: Path) -> dict[str, Any]:
    """Return the fields of a ``TrainerState``."""
    for name in STATES:
        path = directory / name
        if not exists(path):
            continue
        if path.suffix == ".json":
            try:
                value = parse_json(read_document(path, _MAX_STATE_BYTES))
            except ValueError as error:
                raise malformed_file(path, str(error)) from error
        else:
            content = read_pickle(path, any_class=True)
            value = _plain(content.fields, path) if isinstance(content, Record) else None
        if not isinstance(value, dict):
            raise malformed_file(path, "it contains no Trainer state")
        return {key: one for key, one in value.items() if key != _LOSS_OF_STEP}
    raise Corrupt(f"{directory} has no Trainer state.", where=str(directory), next_step=_ALTERED_STEP)


def _arguments(directory: Path) -> Mapping[str, Any]:
    """Return the training arguments; empty if they are missing or cannot be read as data."""
    try:
        content = read_pickle(directory / ARGUMENTS, any_class=True)
    except FlexError:
        return {}
    return content.fields if isinstance(content, Record) else {}


def stated_sharding(directory: Path) -> int | None:
    """Return the sharding degree of the optimizer states in the training arguments; None if unknown."""
    arguments = _arguments(directory)
    found = [arguments.get(f"sharding_parallel_{word}") for word in ("size", "degree")]  # "degree" in PaddleNLP.
    return next((one for one in found if type(one) is int and one > 0), None)


def removes_masters(directory: Path) -> bool:
    """Return whether a unified checkpoint has no master weights, by the training arguments."""
    options = _arguments(directory).get("unified_checkpoint_config")
    return isinstance(options, (list, tuple, str)) and "remove_master_weight" in options


def _position(directory: Path) -> dict[str, Any]:
    """Return the document of the data position, see ``trainer.position``."""
    record, arguments = read_run(directory), _arguments(directory)
    sizes = [arguments.get(key) for key in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    position: dict[str, Any] = {"steps": record.step, "consumed": record.consumed_samples, "pace": None}
    if all(type(one) is int and one > 0 for one in sizes):
        ranks = record.parallel["dp"] * record.parallel["sharding"]
        position["pace"] = {"micro_batch": sizes[0], "accumulation": sizes[1], "ranks": ranks}
    return position


def _average(directory: Path) -> dict[str, Any]:
    """Return the document of a moving average, see ``trainer.ema``; unknown values are None."""
    arguments = _arguments(directory)
    decay, interval, threshold = (arguments.get(f"zcc_{key}") for key in _AVERAGE)
    step: int | None = None
    if type(interval) is int and interval > 0:
        # With a threshold, updates may be skipped, so the step of the last update is unknown.
        done = _count(_state(directory), "global_step", directory)
        step = None if threshold is not None else done - done % interval
    else:
        interval = None
    return {
        "step": step,
        "decay": decay if isinstance(decay, float) else None,
        "interval": interval,
    }


def _check_all_generators(directory: Path, ranks: Collection[int], world_size: int) -> None:
    """Check that the random generators of all ranks are present, or of none, which resumes with a warning.

    Semi-automatic parallelism writes the generators of all ranks into one file, numbered by the number of ranks.
    """
    found = [rank for rank in ranks if rank < world_size]
    if found and len(found) < world_size:
        missing = itertools.islice((rank for rank in range(world_size) if rank not in ranks), 8)
        what = f"{directory} has the random generators of {len(found)} of {world_size} ranks."
        next_step = "Copy the files again; or remove all rng_state_*.pth to resume without random states."
        raise damaged(directory, what, (f"missing: rng_state_{rank}.pth" for rank in missing), next_step)


def _rank_of_seed(seed: Any, world_size: Any, arguments: Mapping[str, Any]) -> int | None:
    """Return the rank whose dropout generator has this seed; None if the seed does not determine the rank.

    PaddleFormers numbers these seeds over the axes of the grid, starting at ``seed`` plus the number of ranks.
    """
    first = arguments.get("seed")
    order = ("dp", "pp", "sharding") if arguments.get("hybrid_parallel_topo_order") == "pp_first" else _RANKS
    axes = [[axis for axis in one if _degree(arguments, _DEGREES[axis]) > 1] for one in (order, _SEEDS)]
    uncounted = _degree(arguments, _DEGREES["cp"]) > 1 or arguments.get("use_expert_parallel")
    if any(type(one) is not int for one in (first, seed, world_size)) or axes[0] != axes[1] or uncounted:
        return None
    rank: int = seed - first - world_size
    return rank if 0 <= rank < world_size else None


def _generators(directory: Path, rank: int) -> bytes:
    path = directory / f"rng_state_{rank}.pth"
    content = read_pickle(path, any_class=True)
    if not isinstance(content, dict):
        raise malformed_file(path, "it contains no random states")
    try:
        tracked = content.get("hybrid_parallel_rng_state_tracker") or {}
        document = {
            "world_size": content["world_size"],
            "python": content["python"],
            "numpy": _plain(content["numpy"], path),
            "cpu": _generator(content["cpu"]),
            "device": [_generator(one) for one in content["cuda"]],
            "hybrid_parallel": {
                name: [_generator(one) for one in (states if isinstance(states, list) else [states])]
                for name, states in tracked.items()
            },
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise malformed_file(path, f"it contains no random states: {error!r}"[:200]) from error
    for seed in (one["seed"] for one in document["hybrid_parallel"].get("local_seed", ())):
        owner = _rank_of_seed(seed, document["world_size"], _arguments(directory))
        if owner not in (None, rank):
            what = f"{path} contains the random generators of rank {owner}."
            raise damaged(path, what, [f"the seed of local_seed is {seed}"], _ALTERED_STEP)
    return state_json.encode(document, "random generators")


def _generator(content: Any) -> dict[str, Any]:
    """Convert a generator of Paddle, which is pickled as device, seed, offset and the engine's state as text."""
    device, seed, offset, engine = content.fields[""]
    return {"device": device, "seed": seed, "offset": offset, "engine": bytes(engine).decode("latin-1")}


def _plain(value: Any, path: Path) -> Any:
    """Read the arrays in a value of a pickle. Paddle pickles a tensor as its name and its array."""
    if isinstance(value, PickledArray):
        with open_local(path) as file:
            raw = read_range(file, value.begin, value.length)
        return np.frombuffer(raw, f"<{value.code}").reshape(value.shape)
    if isinstance(value, dict):
        return {key: _plain(one, path) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one, path) for one in value]
    if isinstance(value, tuple):
        items = tuple(_plain(one, path) for one in value)
        is_tensor = len(items) == 2 and isinstance(items[0], str) and isinstance(items[1], np.ndarray)
        return items[1] if is_tensor else items
    return value


def _count(state: Mapping[str, Any], key: str, directory: Path) -> int:
    value = state.get(key)
    if type(value) is not int or value < 0:
        raise malformed_file(directory, f"{key} of its Trainer is {str(value)[:50]}")
    return value


def _degree(arguments: Mapping[str, Any], key: str) -> int:
    value = arguments.get(key)
    return value if type(value) is int and value > 0 else 1


def _check_same_step(directory: Path, step: int) -> None:
    """Check that the scheduler and the name of the directory have this step. A loss scaler makes the scheduler skip."""
    steps = {"state of the Trainer": step}
    if (named := parse_step(directory)) is not None:
        steps[f"name {directory.name}"] = named
    if exists(directory / SCHEDULER) and not exists(directory / SCALER):
        epoch = epoch_of(read_pickle(directory / SCHEDULER))
        steps |= {} if epoch is None else {SCHEDULER: epoch}
    if len(set(steps.values())) > 1:
        raise different_steps(directory, [f"{name}: step {found}" for name, found in steps.items()])


def epoch_of(scheduler: Any) -> int | None:
    """Return the number of steps of a pickled scheduler; None if it has none."""
    epoch = scheduler.get("last_epoch") if isinstance(scheduler, dict) else None
    return epoch if type(epoch) is int else None


def different_steps(directory: Path, evidence: Iterable[str]) -> Corrupt:
    """Return the error for a directory with files from different steps."""
    return damaged(directory, f"{directory} contains files of different steps.", evidence, _ALTERED_STEP)


def malformed_file(path: Path, fault: str) -> FormatError:
    """Return the error for a malformed file of a checkpoint."""
    return malformed(path, f"{path} is not a valid file of a Paddle checkpoint: {fault}.", (), COPY_AGAIN_STEP)
