"""What each of four ranks does in a job whose replicas share their reads.

``python sharing_jobs.py DIRECTORY FILE VICTIM``, with the file to damage and the rank to kill.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import xxhash

from paddleformers_fc import FlexCheckpointCallback, cpu_runtime
from paddleformers_fc.distributed import store_client
from paddleformers_fc.distributed.liveness import MAX_FINAL_WAIT_SECONDS
from paddleformers_fc.errors import FlexError
from paddleformers_fc.execute import exchange
from paddleformers_fc.plan import transfer_plan
from tests.harness.limits import LIMIT
from tests.harness.sealing import reseal
from tests.harness.tiny import MatrixLayout
from tests.trainer.jobs import flex_trainer

DP4, SD4 = MatrixLayout("dp4", nproc=4), MatrixLayout("sd4", nproc=4, sharding=4, split_param=True)
MODEL = {"hidden_size": 128, "intermediate_size": 256}


class Observer(FlexCheckpointCallback):
    """Remembers what a rank has read, and what it then has in memory."""

    trainer: Any = None

    def on_checkpoint_loaded(self, args: Any, report: Any) -> None:
        values = [*self.trainer.model.state_dict().values(), *self.trainer.optimizer.state_dict().values()]
        digests = [xxhash.xxh3_128_hexdigest(one.numpy().tobytes()) for one in values if hasattr(one, "numpy")]
        self.found = {"read": report.bytes, "asked": asked(), "tensors": digests}


def asked() -> int:
    """How many bytes this process has asked the system for."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def resume(directory: Path, layout: MatrixLayout, way: str, verify: str = "size") -> dict[str, Any]:
    """What a rank has read and then has, or its error."""
    arguments = {"max_steps": 2, "flex_timeout": int(LIMIT), "flex_read": way, "flex_verify": verify}
    observer = Observer()
    again = str(directory / "again")
    observer.trainer = flex_trainer(layout.to_json(), again, arguments, model=MODEL, callbacks=[observer])
    before = asked()
    try:
        observer.trainer.train(resume_from_checkpoint=str(directory / "out/checkpoint-2"))
    except FlexError as error:
        return {"error": type(error).__name__, "text": error.render()}
    return {**observer.found, "asked": observer.found["asked"] - before}


def flip_in_the_middle(path: Path) -> None:
    """Change a bit of a tensor."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def lose(victim: bool, dying: Path) -> None:
    """Kill the victim when it is to send what it has read; for the others time passes from then on."""
    rounds, send, is_readable = iter(range(2)), exchange.exchange_round, store_client._is_readable

    def send_or_die(*args: Any) -> Any:
        if next(rounds, None) is None:
            dying.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return send(*args)

    def in_time(connection: socket.socket, seconds: float) -> bool:
        while not is_readable(connection, 0.1):
            if dying.exists():
                return is_readable(connection, min(seconds, MAX_FINAL_WAIT_SECONDS))
        return True

    if victim:
        exchange.exchange_round = send_or_die
    else:
        store_client._is_readable = in_time


def main(directory: Path, damaged: str, victim: int) -> None:
    """Save, resume, resume what is damaged, and lose a rank during a resume; write down what has happened."""
    import paddle.distributed as dist

    transfer_plan.TURN_BYTES = 1 << 16  # A small model takes many rounds.
    checkpoint = directory / "out/checkpoint-2"
    flex_trainer(SD4.to_json(), str(checkpoint.parent), {"max_steps": 2, "save_steps": 2}, model=MODEL).train()
    ways = [(layout, way) for layout in (DP4, SD4) for way in ("each", "auto")]
    found = {f"{layout.name} {way}": resume(directory, layout, way) for layout, way in ways}
    rank = dist.get_rank()
    if rank == 0:
        reseal(checkpoint, block_bytes=4096)
        flip_in_the_middle(checkpoint / damaged)
    dist.barrier()
    found["damaged"] = resume(directory, DP4, "auto", "full")
    (directory / f"resumed-{rank}.json").write_text(json.dumps(found))
    lose(rank == victim, directory / "dying")
    (directory / f"lost-{rank}.json").write_text(json.dumps(resume(directory, DP4, "auto")))


if __name__ == "__main__":
    cpu_runtime.activate()
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
