"""Hostile documents, read in a process of its own that has little memory and little time.

``python -m tests.corruption.hostile fuzz KIND DIRECTORY SEED COUNT`` changes nodes of a kind of document and gives each
result to the reader that the product uses for it. What comes out is counted; anything but an error of ours, or success,
is reported with the place it came from. The process may take :data:`SPARE_BYTES` beyond what it has after its imports,
so that an allocation without a bound is a ``MemoryError``, which is none of ours, and it may compute for
:data:`DEADLINE`, so that time without a bound is a failure too. Time is that of the processor, which does not depend on
what else a machine does.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import resource
import struct
import subprocess
import sys
import time
import traceback
import tracemalloc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.aoa import evaluate, parse, read_config as read_statements
from paddleformers_fc.errors import FlexError, MappingError, from_wire
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.families.enumerate import enumerate_tensors
from paddleformers_fc.families.stated import decode_mapping
from paddleformers_fc.formats import huggingface
from paddleformers_fc.formats.index import decode_index, encode_index, shard_columns
from paddleformers_fc.formats.registry import read_config
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping import prove
from paddleformers_fc.mapping.boxes import Box, cover_faults, whole
from paddleformers_fc.storage import state_json
from paddleformers_fc.storage.checksum import INDEX_NAME, FileRecord, checksum_of, digest_of_blocks, records_of
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME
from paddleformers_fc.storage.manifest import MANIFEST_NAME, Manifest, read_manifest
from paddleformers_fc.storage.safetensors import read_header
from paddleformers_fc.trainer import position
from tests.aoa.spaces import side
from tests.corruption.nodes import TEXTS, mutated, written
from tests.harness.limits import LIMIT
from tests.harness.sealing import columns_of, reseal, sealed
from verification.digests import canonical_digests

SPARE_BYTES = 1 << 30
DEADLINE = math.ceil(LIMIT)
"""Seconds that a process may compute before the system kills it."""

WEIGHTS = "model_state/rank-00000.safetensors"


class Outcome(msgspec.Struct):
    """What a process saw.

    Attributes:
        tried: how many documents.
        refused: how many of them with an error of ours.
        strange: every other error with its place, each once.
        slowest: seconds of the processor for the slowest document.
        peak: of a bomb, most bytes that Python's allocator held beyond what it held before.
    """

    tried: int = 0
    refused: int = 0
    strange: list[str] = msgspec.field(default_factory=list)
    slowest: float = 0.0
    peak: int = 0


@dataclass(frozen=True)
class Target:
    """One kind of document.

    Args:
        documents: valid ones, of JSON's own types.
        use: gives bytes to the reader of the product, and does with the result what the product does.
        change: another document made of one, as bytes.
    """

    documents: tuple[Any, ...]
    use: Callable[[bytes], object]
    change: Callable[[Any, random.Random], bytes] = mutated


def fuzz(kind: str, directory: Path, seed: int, count: int) -> Outcome:
    """Run one kind in a process of its own.

    Args:
        kind: one of :data:`KINDS`.
        directory: holds a small checkpoint, ``checkpoint-3``, which is changed and put back.
        seed: of every choice.
        count: how many documents.
    """
    return msgspec.json.decode(child("fuzz", kind, directory, str(seed), str(count)), type=Outcome)


def child(*arguments: object) -> bytes:
    """What a process of this module prints."""
    command = [sys.executable, "-m", "tests.corruption.hostile", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, timeout=LIMIT, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}\n{done.stderr.decode()[-4000:]}")
    return done.stdout.splitlines()[-1]


def bound_memory(spare: int = SPARE_BYTES) -> None:
    """Let this process take no more than ``spare`` bytes of address space from here on."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + spare
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def judge(outcome: Outcome, work: Callable[[], object]) -> None:
    """Do something hostile and note how it ended."""
    outcome.tried += 1
    began = time.process_time()
    try:
        try:
            work()
        except FlexError as error:
            outcome.refused += 1
            # Rendering the error must not fail either.
            str(error).encode("utf-8")
            from_wire(error.to_wire())
    except BaseException as error:
        frames = [one for one in traceback.extract_tb(error.__traceback__) if "paddleformers_fc" in one.filename]
        place = f"{frames[-1].filename.rpartition('paddleformers_fc/')[2]}:{frames[-1].lineno}" if frames else "?"
        line = f"{type(error).__name__} in {place}: {str(error)[:120]}"
        if len(outcome.strange) < 20 and line not in outcome.strange:
            outcome.strange.append(line)
    outcome.slowest = max(outcome.slowest, time.process_time() - began)


# ---- The kinds of documents.


def _use(checkpoint: Path) -> None:
    # An attacker recomputes sizes and checksums, so they are not checked here.
    for _ in canonical_digests(checkpoint, "off", [MODEL_STATE]):
        pass


def _written_to(checkpoint: Path, name: str, frame: Callable[[bytes], bytes]) -> Callable[[bytes], None]:
    """Puts a document into a file of the checkpoint, uses the checkpoint, and puts the file back."""
    path = checkpoint / name
    original = path.read_bytes()

    def run(raw: bytes) -> None:
        path.write_bytes(frame(raw))
        try:
            _use(checkpoint)
        finally:
            path.write_bytes(original)

    return run


def _sealed(raw: bytes) -> bytes:
    """A manifest whose seal fits its content, as a forger would write it."""
    try:
        document = json.loads(raw)
        document.pop("seal", None)
        return sealed(msgspec.convert(document, Manifest))
    except (ValueError, TypeError, AttributeError, RecursionError, msgspec.MsgspecError):
        return raw  # A document without the form of a manifest has no seal.


def _manifest(directory: Path) -> Target:
    document = json.loads((directory / MANIFEST_NAME).read_bytes())
    return Target((document,), _written_to(directory, MANIFEST_NAME, _sealed))


def _plain(name: str, directory: Path) -> Target:
    def run(raw: bytes) -> None:
        with forged(directory, name, raw):
            _use(directory)

    return Target((json.loads((directory / name).read_bytes()),), run)


@contextmanager
def forged(directory: Path, name: str, raw: bytes) -> Iterator[None]:
    """A checkpoint with another document whose checksum is in the manifest; both files are put back at the end."""
    paths = [directory / one for one in dict.fromkeys((name, INDEX_NAME, MANIFEST_NAME))]
    originals = [path.read_bytes() for path in paths]
    paths[0].write_bytes(raw)
    if name == INDEX_NAME:
        manifest = read_manifest(directory)
        others = [one for one in manifest.files if one.path != name]
        files = sorted([*others, *records_of([checksum_of(name, raw)])], key=lambda one: one.path)
        paths[-1].write_bytes(sealed(msgspec.structs.replace(manifest, files=files)))
    else:
        reseal(directory)
    try:
        yield
    finally:
        for path, original in zip(paths, originals, strict=True):
            path.write_bytes(original)


def _headed(header: bytes, rest: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + rest


def _header(directory: Path) -> Target:
    raw = (directory / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    run = _written_to(directory, WEIGHTS, lambda header: _headed(header.ljust(length), raw[8 + length :]))
    return Target((json.loads(raw[8 : 8 + length]),), run)


def _shards(directory: Path) -> Target:
    """The index, whose arrays are mutated as lists."""
    original = (directory / INDEX_NAME).read_bytes()
    columns = columns_of(original)
    manifest = read_manifest(directory)
    recorded = decode_index(original, manifest.files, directory / INDEX_NAME).recorded
    checksums = [one for path, one in recorded.items() if path != INDEX_NAME]

    def run(raw: bytes) -> None:
        try:
            lists = json.loads(raw)
            arrays = {name: np.array(lists[name], columns[name].dtype).reshape(-1) for name in columns}
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return  # No arrays, so no index.
        with forged(directory, INDEX_NAME, encode_index(arrays, checksums)):
            _use(directory)

    return Target(({name: array.tolist() for name, array in columns.items()},), run)


def _index(directory: Path) -> Target:
    target = directory.with_name("open-weights")
    if not target.exists():
        export_checkpoint(directory, target, 4096)
        (target / CHECKSUMS_NAME).unlink()  # Checksums would reject every change before it is read.
    document = json.loads((target / huggingface.INDEX_NAME).read_bytes())
    return Target((document,), _written_to(target, huggingface.INDEX_NAME, bytes))


def _wire(directory: Path) -> Target:
    error = MappingError("what", where="where", evidence=["one", "two"], next_step="next")

    def use(raw: bytes) -> None:
        # Messages of other ranks arrive as text.
        raise from_wire(raw.decode("utf-8", "surrogateescape"))

    return Target((json.loads(error.to_wire()),), use)


def _codec(directory: Path) -> Target:
    array = {"__array__": "<f4", "shape": [2, 2], "values": [1.0, 2.0, 3.0, 4.0]}
    state = {"step": 3, "generator": {"__tuple__": ["MT19937", array, 7]}, "loss": [0.5, None, True]}
    data = position.to_document(
        position.Position(1, 8, 72), position.BatchSizes(2, 2, 2), position.SampleOrder(True, 64, True, 42)
    )

    def use(raw: bytes) -> None:
        position.from_document(state_json.decode_object(raw, "trainer/data.json"), "trainer/data.json")

    return Target((data, data, state), use)


def _statements(directory: Path) -> Target:
    names = [f"m.{layer}.{part}.w" for layer in range(3) for part in "qkvgud"]
    left = side({**dict.fromkeys(names, (8, 4)), "m.0.e.0.x": (8,), "m.0.e.1.x": (8,)})
    fused = {f"m.{layer}.{part}": (4, 8 * len(part)) for layer in range(3) for part in ("qkv", "gu")}
    right = side({**fused, **{f"m.{layer}.d.w": (4, 8) for layer in range(3)}, "m.0.e": (16,)})
    config = {
        "aoa_config_reverse": False,
        "aoa_statements": [
            "m.$LAYER_ID.q.w^T, m.$LAYER_ID.k.w^T, m.$LAYER_ID.v.w^T -> m.$LAYER_ID.qkv, fused_qkv_old, num_heads=2,"
            " num_key_value_groups=2",
            "m.$LAYER_ID.g.w^T, m.$LAYER_ID.u.w^T -> m.$LAYER_ID.gu, fused_ffn",
            "m.$LAYER_ID.d.w -> m.$LAYER_ID.d.w, permute='[1, 0]'",
            "m.0.e.0.x, m.0.e.1.x -> m.0.e, axis=0",
        ],
    }

    def use(raw: bytes) -> None:
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            return
        if isinstance(value, dict):
            prove(evaluate(read_statements(value), left, right))

    def change(document: Any, chance: random.Random) -> bytes:
        statements = document.get("aoa_statements") if isinstance(document, dict) else None
        if isinstance(statements, list):
            document = {**document, "aoa_statements": [_garbled(one, chance) for one in statements]}
        return mutated(document, chance)

    return Target((config,), use, change)


_SIGNS = ("->", ",", "=", ":", "[", "]", "^T", "*", "_", "'")
_WORDS = (*_SIGNS, "$LAYER_ID", "$EXPERT_ID", "fused_ffn", "axis=", "dtype='")


def _garbled(statement: Any, chance: random.Random) -> Any:
    """A statement of which a few characters or words were changed, mostly none."""
    if not isinstance(statement, str) or chance.random() < 0.5:
        return statement
    for _ in range(chance.choice((1, 1, 2, 5))):
        at, to = sorted(chance.choices(range(len(statement) + 1), k=2))
        new = chance.choice(("", chance.choice(_WORDS), str(10 ** chance.randrange(12)), chance.choice(TEXTS)))
        statement = statement[:at] + new + statement[min(to, at + chance.randrange(8)) :]
    return statement


def _trainer(directory: Path) -> Target:
    """What needs Paddle: the Trainer's state, a scheduler's, and the generators'."""
    import paddle
    from paddleformers.trainer import TrainerState

    from paddleformers_fc.trainer import documents, rng

    paddle.set_device("cpu")
    scheduler = paddle.optimizer.lr.LambdaDecay(0.1, lambda step: 0.5**step)
    state = TrainerState(global_step=3, epoch=0.5, log_history=[{"loss": 1.5, "step": 3}])
    values = [state_json.encode(one, "state") for one in (dataclasses.asdict(state), scheduler.state_dict())]

    def use(raw: bytes) -> None:
        if b"hybrid_parallel" in raw:
            rng.restore_generators(raw, "trainer/rng-00000.json", 1, True, True)
            return
        value = state_json.decode_object(raw, "trainer/state.json")
        if "last_lr" in value:
            documents.check_alike(value, scheduler.state_dict(), Path("trainer/scheduler.json"))
            scheduler.set_state_dict(value)
            scheduler.step()
        else:
            state = documents._trainer_state(value, Path("trainer/state.json"))
            state.global_step += 1
            state.save_to_json("/dev/null")

    return Target(tuple(json.loads(raw) for raw in (*values, rng.capture_generators(1, True)())), use)


KINDS: dict[str, Callable[[Path], Target]] = {
    "manifests": _manifest,
    "mappings": functools.partial(_plain, "mapping.json"),
    "configurations": functools.partial(_plain, "config.json"),
    "safetensors headers": _header,
    "shard descriptions": _shards,
    "indices of open weights": _index,
    "errors of other ranks": _wire,
    "data positions": _codec,
    "Trainer states": _trainer,
    "aoa_configs": _statements,
}


def _fuzz(kind: str, directory: Path, seed: int, count: int) -> Outcome:
    target = KINDS[kind](directory)
    chance = random.Random(seed)
    outcome = Outcome()
    for document in target.documents:
        judge(outcome, functools.partial(target.use, written(document).encode()))
    if outcome.refused and kind not in ("errors of other ranks", "data positions"):
        outcome.strange.append("the valid document is refused")
    outcome = Outcome(strange=outcome.strange)
    bound_memory()
    for number in range(count):
        raw = target.change(target.documents[number % len(target.documents)], chance)
        judge(outcome, functools.partial(target.use, raw))
    return outcome


# ---- Documents that ask for much.


def _rule_set(**fields: Any) -> bytes:
    rule = {"sources": ["a"], "targets": ["b"], "parts": [4], "axis": 0, "axes": [0], **fields}
    targets = {name: {"shape": [sum(rule["parts"])], "dtype": "float32"} for name in rule["targets"]}
    described = {"config": {}, "is_fleet": None}
    return json.dumps({"model": described, "rules": {"targets": targets, "rules": [rule]}}).encode()


def _mapped(raw: bytes) -> None:
    decode_mapping(raw, "mapping.json")[1].mapping()


def _read_configuration(raw: bytes, place: Path) -> None:
    (place / "config.json").write_bytes(raw)
    read_config(place)


def _enumerated(**sizes: int) -> None:
    config = {"model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    config |= {"vocab_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_experts": 8, **sizes}
    for _ in enumerate_tensors(family_for(config), ModelDescription(config, is_fleet=True)):
        pass


def _opened_header(raw: bytes, place: Path, size: int = 0) -> None:
    path = place / "x.safetensors"
    path.write_bytes(raw)
    if size:
        with path.open("r+b") as file:
            file.truncate(size)
    read_header(path)


def _shaped(shape: list[int], place: Path) -> None:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}
    _opened_header(_headed(json.dumps({"a": entry}).encode(), b"1234"), place)


def _sparse_manifest(place: Path) -> None:
    with (place / MANIFEST_NAME).open("wb") as file:
        file.truncate(2 << 30)
    read_manifest(place)


def _described(axes: int) -> None:
    place = (2,) * axes
    raw = encode_index(shard_columns([(WEIGHTS, [Shard("a", "float32", place, whole(place), (1, 2))])]), [])
    index = decode_index(raw, [FileRecord(WEIGHTS, 0, digest_of_blocks(b""))], Path(INDEX_NAME))
    for shard, *_ in index.shards(WEIGHTS):
        assert len(shard.fragments) < 100


def _staggered() -> None:
    rows = [Box((at, 0), (at + 1, 1)) for at in range(600)]
    columns = [Box((0, at), (600, at + 1)) for at in range(1, 601)]
    cover_faults(whole((600, 601)), rows + columns)


def _stated(*statements: str) -> None:
    parse(statements, side({"a": (4, 6), "b": (4, 6)}), side({"c": (4, 12)}))


def _unlike_names() -> None:
    names = (f"{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}{chr(97 + i // 676)}" for i in range(2000))
    left = side({f"m.{'abc' * 30}{name}": (2,) for name in names})
    parse([f"m.{'cba' * 32}q{chr(97 + i)}b.w -> c" for i in range(20)], left, side({"c": (2,)}))


def _decoded(document: Any) -> None:
    state_json.decode_object(written({"value": document}).encode(), "trainer/state.json")


def _raised(raw: bytes) -> None:
    raise from_wire(raw.decode())


DEEP = b"[" * 1_000_000 + b"]" * 1_000_000
FAR = 10**12

BOMBS: dict[str, Callable[[Path], None]] = {
    "a manifest of 2 GB": _sparse_manifest,
    "a header that claims 2^63 bytes": lambda place: _opened_header(struct.pack("<Q", 1 << 63) + b"{}", place),
    "a header of 100 MB of zeros": lambda place: _opened_header(struct.pack("<Q", 10**8), place, 10**8 + 8),
    "a tensor whose bytes cannot be counted": lambda place: _shaped([2**40] * 9, place),
    "a tensor of 100,000 axes": lambda place: _shaped([1] * 10**5, place),
    "a header of a million empty lists": lambda place: _opened_header(
        _headed(b'{"a":[' + b"[]," * 1_000_000 + b"[]]}", b""), place
    ),
    "a shard of 100,000 axes": lambda place: _described(10**5),
    "half a tensor cut into 600 rows, the other half into 600 columns": lambda place: _staggered(),
    "a rule of 10^9 rounds": lambda place: _mapped(_rule_set(parts=[10**9], target_blocks=10**9)),
    "a rule of 2^60 rounds": lambda place: _mapped(_rule_set(parts=[2**60], source_blocks=2**60)),
    "a rule of 10^6 parts": lambda place: _mapped(_rule_set(parts=[8] * 10**6, target_blocks=8)),
    "a rule of 100,000 axes": lambda place: _mapped(_rule_set(axes=list(range(10**5)))),
    "a mapping nested a million times": lambda place: _mapped(b'{"x":' + DEEP + b"}"),
    "a configuration nested a million times": lambda place: _read_configuration(DEEP, place),
    "a configuration of 20 MB": lambda place: _read_configuration(b" " * 20_000_000, place),
    "a configuration of two million empty lists": lambda place: _read_configuration(
        b'{"a":[' + b"[]," * 2_000_001 + b"[]", place
    ),
    "a configuration with one key 500,000 times": lambda place: _read_configuration(
        b'{"a":0' + b',"a":0' * 500_000 + b"}", place
    ),
    "a number of a million digits": lambda place: _read_configuration(b'{"a":' + b"9" * 10**6 + b"}", place),
    "10^12 layers": lambda place: _enumerated(num_hidden_layers=FAR),
    "10^12 experts in 10^12 layers": lambda place: _enumerated(num_hidden_layers=FAR, num_experts=FAR),
    "a Trainer state with a string of 4 GB for a number": lambda place: _decoded(
        {"__array__": "U999999999", "shape": [1], "values": [1]}
    ),
    "an error of another rank nested a million times": lambda place: _raised(DEEP),
    "a statement of 100,000 tokens": lambda place: _stated("a, " * 50_000 + "b -> c"),
    "2,000 fused layouts in a chain": lambda place: _stated(
        "a -> t0", *(f"t{i} -> t{i + 1}, fused_ffn" for i in range(2_000))
    ),
    "5,000 statements that copy": lambda place: _stated(*(f"a -> x{i}" for i in range(5_000))),
    "names that resemble 2,000 others in many ways": lambda place: _unlike_names(),
}
"""What no reader may build, by what it is; each must be refused."""


DEAR = (
    "a header of a million empty lists",
    "a rule of 10^6 parts",
    "half a tensor cut into 600 rows, the other half into 600 columns",
    "a statement of 100,000 tokens",
    "2,000 fused layouts in a chain",
    "names that resemble 2,000 others in many ways",
)
"""Bombs that take seconds before they are refused."""


def blasts(directory: Path, left_out: Collection[str] = ()) -> dict[str, Outcome]:
    """Every bomb, one after the other in a process of little memory."""
    names = json.dumps([name for name in BOMBS if name not in left_out])
    return msgspec.json.decode(child("bombs", names, directory, 0, 0), type=dict[str, Outcome])


def _bombs(place: Path, names: Sequence[str]) -> dict[str, Outcome]:
    seen: dict[str, Outcome] = {}
    _stated("a, b -> c, axis=1")  # One-time initialization is not measured.
    bound_memory(4 * SPARE_BYTES)
    for name in names:
        print(name, file=sys.stderr, flush=True)
        seen[name] = Outcome()
        tracemalloc.start()
        judge(seen[name], functools.partial(BOMBS[name], place))
        seen[name].peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return seen


if __name__ == "__main__":
    _, _verb, _kind, _directory, _seed, _count = sys.argv
    resource.setrlimit(resource.RLIMIT_CPU, (DEADLINE, DEADLINE))
    if _verb == "bombs":
        _seen: Any = _bombs(Path(_directory), json.loads(_kind))
    else:
        _seen = _fuzz(_kind, Path(_directory), int(_seed), int(_count))
    print(msgspec.json.encode(_seen).decode())
