"""Two jobs that know nothing of each other work in one directory at the same time.

One of them, the *first*, is held at an operation, before or after it is carried out; then the *other*, real processes
too, runs from its beginning to its end; then the first goes on. So every interleaving in which one of the two is not
interrupted is tried, looks included, and each time in the same order.

Afterwards every job that was reported as done is done, no job has ended without an error of ours, what is found is a
whole checkpoint of one that is done, nothing finished has become something else, and the next save cleans up. The
other one is also looked at while the first is held: what belongs to it must not have been touched.

Time: 80 ms for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paddleformers_fc.storage.paths import ASIDE, hidden_name
from tests.crash.groups import DONE, REFUSED, Group, Held, KillAt, Place, RankEnd
from tests.crash.kills import NEXT, OLD
from tests.crash.worlds import (
    ONE,
    Job,
    Lost,
    chosen,
    cleaned_by_the_next_save,
    copy,
    names_in,
    ranks_of,
    resume_and_save,
    rotate_alone,
    save,
    save_together,
    whole,
)

FIRST, OTHER = 11, 12


@dataclass(frozen=True)
class Racer:
    """One of the two jobs.

    Args:
        name: for a report.
        ranks: how many.
        job: what each rank does.
        writes: the generation that it saves as step 6; None if it saves nothing.
    """

    name: str
    ranks: int
    job: Job
    writes: int | None


@dataclass(frozen=True)
class Race:
    """Two jobs and where they meet.

    Args:
        first: the one that is held.
        other: the one that runs meanwhile.
        place: what is there before, by name.
        can_exchange: whether names can be exchanged.
    """

    first: Racer
    other: Racer
    place: str
    can_exchange: bool

    def __str__(self) -> str:
        how = "" if self.can_exchange else ", by two renames"
        return f"{self.first.name} meets {self.other.name}, {self.place}{how}"


@dataclass(frozen=True)
class Meeting:
    """One interleaving.

    Args:
        race: the jobs.
        rank: of the first job, which is held.
        number: of its operation.
        kind: of the operation.
        afterwards: whether it is held after it was carried out.
    """

    race: Race
    rank: int
    number: int
    kind: str
    afterwards: bool

    def __str__(self) -> str:
        when = "after" if self.afterwards else "before"
        return f"{self.race}: rank {self.rank} held {when} operation {self.number} ({self.kind})"


def _saver(grid: str, generation: int) -> Racer:
    return Racer(
        f"a save on {ranks_of(grid)}",
        ranks_of(grid),
        lambda there, channel: save(there, grid, 6, generation, channel),
        generation,
    )


def _resumer(generation: int) -> Racer:
    return Racer(
        "a resume and save",
        1,
        lambda there, channel: resume_and_save(there, ONE, 6, generation, channel),
        generation,
    )


ROTATION = Racer("rotation", 1, lambda there, channel: rotate_alone(there, 1, channel), None)


def _empty(there: Path) -> None:
    save_together(there, ONE, 5, OLD)


def _finished(there: Path) -> None:
    _empty(there)
    save_together(there, ONE, 6, OLD)


def _foreign(there: Path) -> None:
    _empty(there)
    (there / "checkpoint-6").mkdir()
    (there / "checkpoint-6" / "0.metadata").write_text("theirs")


def _aside(there: Path) -> None:
    _finished(there)
    (there / "checkpoint-6").rename(hidden_name(there / "checkpoint-6", ASIDE))


def _crashed(there: Path) -> None:
    _empty(there)
    Group(1, lambda channel: save(there, ONE, 6, OLD, channel), there, {0: KillAt(37, True)}).end()


PLACES: dict[str, Callable[[Path], None]] = {
    "nothing there": _empty,
    "the step is there": _finished,
    "somebody's files are there": _foreign,
    "the step is aside": _aside,
    "an unfinished one is there": _crashed,
}


def races() -> Iterator[Race]:
    """Every pair of jobs in every place they can meet in."""
    for can_exchange in (True, False):
        for place in PLACES:
            yield Race(_saver(ONE, FIRST), _saver(ONE, OTHER), place, can_exchange)
            yield Race(_saver("dp=2", FIRST), _saver("tp=2", OTHER), place, can_exchange)
            yield Race(_resumer(FIRST), _saver(ONE, OTHER), place, can_exchange)
            yield Race(_saver(ONE, FIRST), _resumer(OTHER), place, can_exchange)
            yield Race(ROTATION, _saver(ONE, OTHER), place, can_exchange)
            yield Race(_saver(ONE, FIRST), ROTATION, place, can_exchange)


def short_races() -> Iterator[Race]:
    """Pairs of which both make and clean a directory."""
    for place in ("nothing there", "an unfinished one is there", "the step is there"):
        for other in (_saver(ONE, OTHER), ROTATION):
            yield Race(_saver(ONE, FIRST), other, place, can_exchange=True)


def meetings(race: Race, directory: Path) -> list[Meeting]:
    """Every interleaving of a race, from running the first job through alone."""
    there = _place(race, directory)
    ends = _group(race.first, there, race.can_exchange).end()
    if any(end.code != DONE or end.outside for end in ends):
        raise Lost(f"{race}: the first job alone does not work: {ends}")
    return [
        Meeting(race, rank, number, kind, afterwards)
        for rank, end in enumerate(ends)
        for number, kind in enumerate(end.kinds)
        for afterwards in (False, True)
        if (not afterwards or kind != "look") and not _repeats(end.kinds, number)
    ]


def _repeats(kinds: Sequence[str], number: int) -> bool:
    """Whether it is one of many successive writes into an own file, which no other job can distinguish."""
    return number > 0 and kinds[number] == "write" == kinds[number - 1]


def carry_out(meeting: Meeting, directory: Path) -> None:
    """One interleaving, and everything that must hold after it.

    Raises:
        Lost: something does not.
    """
    race = meeting.race
    there = _place(race, directory)
    held = _held(race.first, there, meeting.rank, (Place(meeting.number, meeting.afterwards),), race.can_exchange)
    waits = held.waits()
    other = _group(race.other, there, race.can_exchange).end()
    if waits:
        held.go()
    _check(race, there, held.end(), other)


def relays(race: Race, directory: Path) -> list[Relay]:
    """Interleavings of three parts around the making and cleaning of a directory, the first in both jobs' lives."""
    there = _place(race, directory)
    (end, *_) = _group(race.first, there, race.can_exchange).end()
    early = [number for number, kind in enumerate(end.kinds[:24]) if not _repeats(end.kinds, number)]
    later = [*early[::3], len(end.kinds) // 2, len(end.kinds) - 4]
    return [
        Relay(race, begins, meets, ends)
        for begins in early[:9]
        for meets in early[:9]
        for ends in later
        if ends > begins
    ]


@dataclass(frozen=True)
class Relay:
    """One interleaving of three parts: the first job begins, the other one begins, the first one continues for a while,
    then the other one comes to its end, and then the first.

    Args:
        race: the jobs.
        begins: the operation that the first is held before.
        meets: the operation that the other one is held before.
        ends: the later operation that the first is held before.
    """

    race: Race
    begins: int
    meets: int
    ends: int

    def __str__(self) -> str:
        return f"{self.race}: the first held before {self.begins} and {self.ends}, the other before {self.meets}"


def carry_out_relay(relay: Relay, directory: Path) -> None:
    """One interleaving of three parts, and everything that must hold after it.

    Raises:
        Lost: something does not.
    """
    race = relay.race
    there = _place(race, directory)
    one = _held(race.first, there, 0, (Place(relay.begins), Place(relay.ends)), race.can_exchange)
    one_waits = one.waits()
    other = _held(race.other, there, 0, (Place(relay.meets),), race.can_exchange)
    other_waits = other.waits()
    if one_waits:
        one.go()
        one_waits = one.waits()
    if other_waits:
        other.go()
    other_ends = other.end()
    if one_waits:
        one.go()
    _check(race, there, one.end(), other_ends)


def _check(race: Race, there: Path, first: list[RankEnd], other: list[RankEnd]) -> None:
    """What must hold after two jobs have ended."""
    _orderly("the first", first)
    _orderly("the other", other)
    generations = [
        racer.writes
        for racer, ends in ((race.first, first), (race.other, other))
        if racer.writes is not None and all(end.code == DONE for end in ends)
    ]
    if not generations and (race.first.writes or race.other.writes):
        raise Lost(f"no job has saved: {[end.text for end in (*first, *other)]}")
    found = chosen(there, kept=race.place == "somebody's files are there")
    if found.step != 6 or found.generation not in generations:
        raise Lost(f"{found} is taken of {generations}: {names_in(there)}")
    for name in names_in(there):
        if name.startswith("kept-") and (there / name / "flex_checkpoint.json").exists():
            raise Lost(f"{name} holds a finished checkpoint, of generation {whole(there / name)}")
    cleaned_by_the_next_save(there, 9, NEXT, kept=race.place == "somebody's files are there")
    if race.place == "somebody's files are there" and not any(
        (there / name / "0.metadata").exists() for name in names_in(there)
    ):
        raise Lost(f"somebody's files are gone: {names_in(there)}")


def _orderly(who: str, ends: list[RankEnd]) -> None:
    codes = {end.code for end in ends}
    if len(codes) != 1 or not codes <= {DONE, REFUSED} or any(end.outside for end in ends):
        raise Lost(f"{who} ended with {[(end.code, end.text, end.outside) for end in ends]}")


def _held(racer: Racer, there: Path, rank: int, places: tuple[Place, ...], can_exchange: bool) -> Held:
    return Held(racer.ranks, lambda channel: racer.job(there, channel), there, rank, places, can_exchange)


def _group(racer: Racer, there: Path, can_exchange: bool) -> Group:
    return Group(racer.ranks, lambda channel: racer.job(there, channel), there, can_exchange=can_exchange)


def _place(race: Race, directory: Path) -> Path:
    prepared = directory / race.place.replace(" ", "-").replace("'", "")
    if not prepared.exists():
        prepared.mkdir()
        PLACES[race.place](prepared)
    return copy(prepared, directory / "raced")
