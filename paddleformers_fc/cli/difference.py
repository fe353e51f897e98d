"""``diff``: which canonical tensors of two checkpoints are not the same bits, whatever their layouts and formats.

Every tensor of either side is put together in canonical form and hashed (md5), one at a time; memory is the largest
tensor and a digest per tensor. Open weights hold ``model_state`` alone, so beside them nothing else is compared, and
the optimizer's states, most of a checkpoint's bytes, are not read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from paddleformers_fc.cli.opening import HUGGINGFACE, PADDLE, CheckpointKind, config_beside, kind_of
from paddleformers_fc.errors import OptionError
from paddleformers_fc.execute.digest import TensorDigest, canonical_digests
from paddleformers_fc.layout.roles import MODEL_STATE, ROLES
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.plan.report import states_joined
from paddleformers_fc.storage.files import is_directory
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import count_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class Side(msgspec.Struct, frozen=True):
    """One of the two directories.

    Attributes:
        path: as it was named.
        kind: what it is.
        model_type: of its ``config.json``; empty where there is none, or it names none.
    """

    path: str
    kind: CheckpointKind
    model_type: str


class Form(msgspec.Struct, frozen=True):
    """A tensor on one side: element type, global shape, and md5 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    md5: str


class Different(msgspec.Struct, frozen=True):
    """A tensor that both sides hold and that is not the same."""

    name: str
    a: Form
    b: Form

    @property
    def reason(self) -> str:
        """What differs, in words."""
        if self.a.shape != self.b.shape:
            return f"shape {list(self.a.shape)} and {list(self.b.shape)}"
        if self.a.dtype != self.b.dtype:
            return f"dtype {self.a.dtype} and {self.b.dtype}"
        return "values"


class RoleDifference(msgspec.Struct, frozen=True):
    """What was found in one role.

    Attributes:
        equal: tensors that are the same, bit for bit.
        different: tensors that both sides hold and that are not.
        only_in_a: names.
        only_in_b: names.
    """

    equal: int
    different: list[Different]
    only_in_a: list[str]
    only_in_b: list[str]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.different or self.only_in_a or self.only_in_b)


class Difference(msgspec.Struct, frozen=True):
    """The outcome.

    Attributes:
        equal: whether everything that was compared is the same.
        a: the first directory.
        b: the second.
        roles: what was found, by compared role.
        not_compared: roles that one side holds and the other cannot.
        seconds: how long it took.
    """

    equal: bool
    a: Side
    b: Side
    roles: dict[str, RoleDifference]
    not_compared: list[str]
    seconds: float


def diff(a: AnyPath, b: AnyPath, role: str | None = None) -> Difference:
    """Compare two directories.

    Args:
        a: a flex checkpoint or a directory of open weights.
        b: the other.
        role: the only role to compare; None for all that both sides can have.
    Raises:
        OptionError: the role is unknown, held by neither side, or one that open weights do not have.
        FlexError: a directory cannot be opened, proved or read.
    """
    started = time.monotonic()
    sides = (_side(a), _side(b))
    roles = _compared_roles(sides, role)
    first, second = ({(one.role, one.name): one for one in canonical_digests(path, roles=roles)} for path in (a, b))
    present = [name for name in roles if any(key[0] == name for key in (*first, *second))]
    if not present:
        raise OptionError(
            f"Neither side holds a tensor of {role}.",
            where=f"{a} and {b}",
            next_step="Leave out --role; inspect shows which roles a checkpoint has.",
        )
    found = {name: _compare(name, first, second) for name in present}
    left_out = _left_out((a, b), sides) if role is None else []
    equal = all(one.same for one in found.values())
    return Difference(equal, *sides, found, left_out, round(time.monotonic() - started, 3))


def _side(directory: AnyPath) -> Side:
    kind = kind_of(directory)
    return Side(str(directory), kind, str(config_beside(directory).get("model_type") or ""))


def _left_out(places: Sequence[AnyPath], sides: Sequence[Side]) -> list[str]:
    """Roles that the checkpoint holds and the open weights beside it cannot hold."""
    if all(side.kind != HUGGINGFACE for side in sides):
        return []
    checkpoints = [found for found, side in zip(places, sides, strict=True) if side.kind != HUGGINGFACE]
    return [
        role
        for role in ROLES
        if role != MODEL_STATE and any(is_directory(checkpoint / role) for checkpoint in checkpoints)
    ]


def _compared_roles(sides: Sequence[Side], role: str | None) -> tuple[str, ...]:
    if role is not None and role not in ROLES:
        raise OptionError(
            f"There is no role {role!r}.",
            where="--role",
            evidence=[f"roles: {', '.join(ROLES)}"],
            next_step="Name one of these, or leave out --role to compare all.",
        )
    weights = next((side for side in sides if side.kind == HUGGINGFACE), None)
    if weights is None:
        return ROLES if role is None else (role,)
    if role not in (None, MODEL_STATE):
        raise OptionError(
            f"Open weights have no {role}.",
            where=weights.path,
            next_step=f"Compare two flex checkpoints, or leave {MODEL_STATE} as the role.",
        )
    return (MODEL_STATE,)


def _compare(
    role: str, first: dict[tuple[str, str], TensorDigest], second: dict[tuple[str, str], TensorDigest]
) -> RoleDifference:
    mine = {name: one for (found, name), one in first.items() if found == role}
    theirs = {name: one for (found, name), one in second.items() if found == role}
    different = [
        Different(name, _form(one), _form(theirs[name]))
        for name, one in mine.items()
        if name in theirs and one != theirs[name]
    ]
    only_in_a = [name for name in mine if name not in theirs]
    only_in_b = [name for name in theirs if name not in mine]
    return RoleDifference(len(mine) - len(different) - len(only_in_a), different, only_in_a, only_in_b)


def _form(digest: TensorDigest) -> Form:
    return Form(digest.dtype, digest.shape, digest.md5)


def show(found: Difference, console: Console) -> None:
    """The counts as a table, then every difference, indices folded."""
    from rich.text import Text

    console.print(Text.assemble(("A ", "bold"), f"{found.a.path} ({_kind_text(found.a.kind)})"))
    console.print(Text.assemble(("B ", "bold"), f"{found.b.path} ({_kind_text(found.b.kind)})"))
    console.print(_counts(found))
    for role, one in found.roles.items():
        _show_lines(console, f"{role}: different", len(one.different), _reasons(one.different))
        _show_lines(console, f"{role}: only in A", len(one.only_in_a), states_joined(one.only_in_a))
        _show_lines(console, f"{role}: only in B", len(one.only_in_b), states_joined(one.only_in_b))
    families = (found.a.model_type, found.b.model_type)
    if not found.equal and all(families) and families[0] != families[1]:
        console.print(Text(f"A is a model of family {families[0]}, B of {families[1]}."))
    if found.not_compared:
        console.print(Text(f"Not compared, because open weights do not have it: {', '.join(found.not_compared)}."))
    equal = sum(one.equal for one in found.roles.values())
    if found.equal:
        verdict, said = Text("equal", "bold green"), f"{count_text(equal, 'tensor')} the same bit for bit"
    else:
        unequal = sum(len(one.different) + len(one.only_in_a) + len(one.only_in_b) for one in found.roles.values())
        verdict, said = Text("different", "bold red"), f"{unequal:,} of {count_text(equal + unequal, 'tensor')}"
    console.print(Text.assemble(verdict, f": {said}, {found.seconds:.2f} s"))


def _reasons(different: list[Different]) -> list[str]:
    """Every difference with its reason; the states of a parameter that differ for the same reason are one line."""
    names: dict[str, list[str]] = {}
    for item in different:
        names.setdefault(item.reason, []).append(item.name)
    return [f"{name}: {reason}" for reason, found in names.items() for name in states_joined(found)]


def _kind_text(kind: CheckpointKind) -> str:
    return {HUGGINGFACE: "open weights", PADDLE: "checkpoint of Paddle"}.get(kind, "flex checkpoint")


def _counts(found: Difference) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("role", style="cyan")
    for heading in ("equal", "different", "only in A", "only in B"):
        table.add_column(heading, justify="right")
    for role, one in found.roles.items():
        counts = (one.equal, len(one.different), len(one.only_in_a), len(one.only_in_b))
        table.add_row(role, *(f"{count:,}" for count in counts), style=None if one.same else "red")
    return table


def _show_lines(console: Console, heading: str, count: int, lines: list[str]) -> None:
    from rich.text import Text

    if lines:
        console.print(Text(f"{heading} ({count})", "bold red"))
        for line in fold(lines):
            console.print(Text(f"  {line}"))
