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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.storage.paths import parse_hidden
from tests.crash.groups import BROKEN, DONE, REFUSED, Group, RankEnd, RefuseAt
from tests.crash.killing import Kill, prepared
from tests.crash.kills import NEW, NEXT, OLD, Scenario, operations
from tests.crash.net import Gate
from tests.crash.worlds import (
    Found,
    Lost,
    chosen,
    cleaned_by_the_next_save,
    copy,
    names_in,
    ranks_of,
    save,
    save_together,
    whole,
)

REASONS = (errno.ENOSPC, errno.EIO, errno.EROFS)
_MAKING = ("create", "write", "mkdir")
_ROOMS = 12
_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000
_READ_ONLY, _REMOUNT = 1, 32


@dataclass(frozen=True)
class Refusal:
    """One accident.

    Args:
        at: the operation, as if it were a kill.
        reason: the error number.
        lasting: whether all that follows is refused too.
    """

    at: Kill
    reason: int
    lasting: bool

    def __str__(self) -> str:
        lasting = " from then on" if self.lasting else ""
        return f"{self.at.scenario.name}: {errno.errorcode[self.reason]}{lasting} at {self.at.number} ({self.at.kind})"


def refusals(scenario: Scenario, directory: Path) -> list[Refusal]:
    """Every refusal of a scenario, each with one of the reasons in turn."""
    kills = [kill for kill in operations(scenario, directory) if kill.all_ranks == (scenario.ranks == 1)]
    return [
        Refusal(kill, REASONS[number % len(REASONS)], lasting)
        for number, kill in enumerate(kills)
        for lasting in (False, True)
        if lasting or kill.kind != "write" or number % 4 == 0
    ]


def carry_out(refusal: Refusal, directory: Path) -> None:
    """One accident, and everything that must hold after it.

    Raises:
        Lost: something does not.
    """
    kill, scenario = refusal.at, refusal.at.scenario
    there = prepared(scenario, directory, directory / "refused")
    gates = {kill.rank: RefuseAt(kill.number, refusal.reason, refusal.lasting)}
    ends = Group(scenario.ranks, lambda channel: scenario.job(there, channel), there, gates).end()
    done = same_end(ends)
    found = chosen(there)
    if found != scenario.after and (done or found != scenario.before):
        raise Lost(f"{found} is taken, and the ranks ended with {ends[0].code}")
    if not done and errno.errorcode[refusal.reason] not in ends[0].text:
        raise Lost(f"the error does not say why: {ends[0].text}")
    if kill.kind in _MAKING:
        if done or found != scenario.before:
            raise Lost("the save went on though something could not be written")
        if not refusal.lasting and hidden_in(there) != hidden_in(directory / "prepared" / "there"):
            raise Lost(f"a failed save has left {hidden_in(there)}")
    cleaned_by_the_next_save(there, 9, NEXT)


def same_end(ends: list[RankEnd]) -> bool:
    """Whether the ranks have done their job; all of them, or none.

    Raises:
        Lost: they have not ended alike.
    """
    if len({(end.code, end.text) for end in ends}) != 1 or ends[0].code not in (DONE, REFUSED):
        raise Lost(f"the ranks ended with {[(end.code, end.text) for end in ends]}")
    return ends[0].code == DONE


def hidden_in(directory: Path) -> list[str]:
    """The directories beside the checkpoints that are not finished."""
    return [name for name in names_in(directory) if parse_hidden(directory / name) is not None]


def no_room(grid: str, directory: Path) -> Iterator[str]:
    """A save of a further step with less room than it needs, and a little more each time: what is wrong, or nothing.

    The room is that of a disk of its own, where the system lets us mount one; elsewhere the length of files is limited.

    Args:
        grid: the layout.
        directory: to work in.
    """
    before, disk = directory / "before", directory / "disk"
    save_together(before, grid, 5, OLD)
    disk.mkdir()
    size = sum(path.stat().st_size for path in before.rglob("*")) // 1024
    for number in range(_ROOMS):
        part = number / (_ROOMS - 1)
        yield _tried(grid, copy(before, directory / "limited"), int(part**3 * 1024 * size))
        if _mount(disk, f"size={int((1.3 + part) * size) + 60}k"):
            shutil.copytree(before, disk, dirs_exist_ok=True)
            yield _tried(grid, disk, None)
            _unmount(disk)
        else:
            yield _tried(grid, copy(before, directory / "limited"), 1024 * number)


def read_only(grid: str, directory: Path) -> str:
    """A save of a further step where nothing can be written: what is wrong, or nothing.

    Args:
        grid: the layout.
        directory: to work in.
    """
    there = directory / "read-only"
    there.mkdir()
    mounted = _mount(there, "size=10m")
    save_together(there, grid, 5, OLD)
    gates: dict[int, Gate] = {}
    if mounted:
        _mount(there, "size=10m", _READ_ONLY | _REMOUNT)
    else:
        gates = {rank: RefuseAt(0, errno.EROFS, lasting=True) for rank in range(ranks_of(grid))}
    ends = Group(ranks_of(grid), lambda channel: save(there, grid, 6, NEW, channel), there, gates).end()
    done, text = same_end(ends), ends[0].text
    unchanged = names_in(there) == ["checkpoint-5"] and whole(there / "checkpoint-5") == OLD
    _unmount(there)
    return "" if unchanged and not done and "EROFS" in text else f"{grid}, read-only: {text}"


def _tried(grid: str, there: Path, limit: int | None) -> str:
    """Save a step under a bound on the length of a file, if any, and look."""
    try:
        ends = _save(grid, there, limit)
        done = same_end(ends)
        if not done and not any(name in ends[0].text for name in ("EFBIG", "ENOSPC")):
            raise Lost(ends[0].text)
        if chosen(there) != (Found(6, NEW) if done else Found(5, OLD)) or hidden_in(there):
            raise Lost(f"{chosen(there)} is taken, {names_in(there)} are there, and the ranks ended with {ends[0]}")
    except Lost as error:
        return f"{grid}, {limit}: {error}"
    return ""


def _save(grid: str, there: Path, limit: int | None) -> list[RankEnd]:
    def job(channel: Channel) -> None:
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        save(there, grid, 6, NEW, channel)

    ends = Group(ranks_of(grid), job, there).end()
    if any(end.code == BROKEN for end in ends):
        raise Lost(f"the ranks ended with {ends}")
    return ends


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


def _unmount(where: Path) -> None:
    ctypes.CDLL(None).umount2(os.fsencode(where), 2)
