"""The operating system refuses an operation in the midst of a save: no room, a broken device, a read-only mount.

At every operation of every rank it refuses that one, or that one and all that follow. Every rank must end with the
same error, what was there before must be whole, and nothing may be left but what is named for what it is; what is left,
the next save deletes. Room really runs out as well: on a small disk in memory that is mounted for this process
alone, and by a limit on the length of files; and a disk is really mounted read-only.

Time: 60 ms for each.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paddleformers_fc.distributed.channel import Channel
from tests.crash import kills
from tests.crash.groups import DONE, REFUSED, RankEnd, RefuseAt, run_ranks
from tests.crash.killing import Instant, Scenario, check, instants, run
from tests.crash.net import Gate
from tests.crash.worlds import NEW, OLD, Lost, chosen, fresh, hidden_in, ranks_of, save, save_together

REASONS = (errno.ENOSPC, errno.EIO, errno.EROFS)
_MAKING = ("create", "write", "mkdir")
_ROOMS = 12
_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000
_READ_ONLY, _REMOUNT = 1, 32


@dataclass(frozen=True)
class Refusal:
    """One accident.

    Args:
        at: the operation.
        reason: the error number.
        lasting: whether all that follows is refused too.
    """

    at: Instant
    reason: int
    lasting: bool

    def __str__(self) -> str:
        return f"{self.at}: {errno.errorcode[self.reason]}{' from then on' if self.lasting else ''}"


def scenarios() -> Iterator[Scenario]:
    """Saves of a new step and of a step again."""
    return (one for one in kills.scenarios() if one.name.startswith(("a new step,", "a step again,")))


def refusals(scenario: Scenario, directory: Path) -> list[Refusal]:
    """Every refusal of a scenario, each with one of the reasons in turn."""
    return [
        Refusal(at, REASONS[number % len(REASONS)], lasting)
        for number, at in enumerate(instants(scenario, directory))
        for lasting in (False, True)
        if lasting or at.kind != "write" or number % 4 == 0
    ]


def carry_out(refusal: Refusal, directory: Path) -> None:
    """One accident, and everything that must hold after it.

    Raises:
        Lost: something does not.
    """
    at, scenario = refusal.at, refusal.at.scenario
    there, ends = run(scenario, directory, {at.rank: RefuseAt(at.number, refusal.reason, refusal.lasting)})
    done = _same_end(ends, [refusal.reason])
    found = check(scenario, there, ends)
    if at.kind in _MAKING:
        if done or found != scenario.before:
            raise Lost("the save went on though something could not be written")
        if not refusal.lasting and hidden_in(there):
            raise Lost(f"a failed save has left {hidden_in(there)}")
    scenario.clean(there)


def _same_end(ends: Sequence[RankEnd], reasons: Sequence[int]) -> bool:
    """Whether the ranks have done their job; all of them, or none.

    Raises:
        Lost: they have not ended alike, or with an error that does not say why.
    """
    (code, text), *others = {(end.code, end.text) for end in ends}
    if others or code not in (DONE, REFUSED):
        raise Lost(f"the ranks ended with {ends}")
    if code == REFUSED and not any(errno.errorcode[reason] in text for reason in reasons):
        raise Lost(f"the error does not say why: {text}")
    return code == DONE


@dataclass(frozen=True)
class Room:
    """A save of a further step with less room than it needs, or a little more; or where nothing can be written.

    Args:
        grid: the layout.
        kind: whether the length of files is limited, the size of a disk, or the disk is read-only.
        part: how much room there is, from 0 to 1.
    """

    grid: str
    kind: str
    part: float


def rooms(grid: str, directory: Path) -> list[Room]:
    """Every room for a layout."""
    limits = [Room(grid, kind, number / (_ROOMS - 1)) for number in range(_ROOMS) for kind in ("files", "disk")]
    return [*limits, Room(grid, "read-only", 1)]


def save_into(room: Room, directory: Path) -> None:
    """One save, on a disk of its own where the system lets us mount one; elsewhere files are limited, or it is refused.

    Raises:
        Lost: what was there before is not whole, or the ranks have not ended alike.
    """
    before, there = directory / "before" / room.grid, fresh(directory / "there")
    if not before.exists():
        save_together(before, room.grid, 5, OLD)
    size = sum(path.stat().st_size for path in before.rglob("*")) // 1024
    mounted = room.kind != "files" and _mount(there, f"size={int((1.3 + room.part) * size) + 60}k")
    shutil.copytree(before, there, dirs_exist_ok=True)
    gates: dict[int, Gate] = {}
    if room.kind == "read-only" and not (mounted and _mount(there, "", _READ_ONLY | _REMOUNT)):
        gates = {rank: RefuseAt(0, errno.EROFS, lasting=True) for rank in range(ranks_of(room.grid))}

    def job(channel: Channel) -> None:
        if room.kind != "read-only" and not mounted:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            most = int(room.part**3 * 1024 * size)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        save(there, room.grid, 6, NEW, channel)

    try:
        done = _same_end(run_ranks(ranks_of(room.grid), job, there, gates), (errno.EFBIG, *REASONS))
        found = chosen(there)
        if found != ((6, NEW) if done else (5, OLD)) or (done and gates) or hidden_in(there):
            raise Lost(f"{found} is taken, {hidden_in(there)} are hidden, and that all have saved is {done}")
    finally:
        ctypes.CDLL(None).umount2(os.fsencode(there), 2)


def with_own_mounts() -> bool:
    """Let this process mount what no other one sees; whether the system allows it."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_USER | _NEW_MOUNTS) != 0:
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def _mount(where: Path, options: str, flags: int = 0) -> bool:
    mount = ctypes.CDLL(None, use_errno=True).mount
    return int(mount(b"tmpfs", os.fsencode(where), b"tmpfs", flags, options.encode())) == 0
