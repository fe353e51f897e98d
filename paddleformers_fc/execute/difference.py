"""Comparison of two checkpoints tensor by tensor, across parallel layouts and formats.

Every canonical tensor of either side is assembled and hashed (md5), one at a time; memory is the largest tensor and a
digest per tensor. Only roles that both formats can contain are compared, so that beside open weights the states of the
optimizer, most of a checkpoint's bytes, are not read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from paddleformers_fc.errors import OptionError
from paddleformers_fc.execute.digest import TensorDigest, digests_of
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.layout.roles import ROLES


class Side(msgspec.Struct, frozen=True):
    """One of the two directories.

    Attributes:
        path: as it was named.
        kind: its format.
        model_type: of its ``config.json``; empty where there is none, or it names none.
    """

    path: str
    kind: str
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
        """The difference in words."""
        if self.a.shape != self.b.shape:
            return f"shape {list(self.a.shape)} and {list(self.b.shape)}"
        if self.a.dtype != self.b.dtype:
            return f"dtype {self.a.dtype} and {self.b.dtype}"
        return "values"


class RoleDifference(msgspec.Struct, frozen=True):
    """The differences of one role.

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
        """Whether both sides are equal."""
        return not (self.different or self.only_in_a or self.only_in_b)


class Difference(msgspec.Struct, frozen=True):
    """The differences between two checkpoints.

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


def compare_checkpoints(a: OpenedCheckpoint, b: OpenedCheckpoint, role: str | None = None) -> Difference:
    """Compare two checkpoints.

    Args:
        a: an opened checkpoint of any format.
        b: the other.
        role: the only role to compare; None for all that both formats can contain.
    Raises:
        OptionError: the role is unknown, in neither side, or one that a format cannot contain.
        FlexError: a mapping cannot be proved, or a file cannot be read.
    """
    started = time.monotonic()
    both = (a, b)
    roles = _compared_roles(both, role)
    first, second = ({(one.role, one.name): one for one in digests_of(side, roles)} for side in both)
    present = [name for name in roles if any(key[0] == name for key in (*first, *second))]
    if not present:
        raise OptionError(
            f"Neither side holds a tensor of {role}.",
            where=f"{a.catalog.root} and {b.catalog.root}",
            next_step="Leave out --role; inspect shows which roles a checkpoint has.",
        )
    found = {name: _compare(name, first, second) for name in present}
    left_out = [] if role is not None else [name for name in _stored_roles(both) if name not in roles]
    equal = all(one.same for one in found.values())
    return Difference(equal, _side(a), _side(b), found, left_out, round(time.monotonic() - started, 3))


def _side(checkpoint: OpenedCheckpoint) -> Side:
    model_type = str(checkpoint.config.get("model_type") or "")
    return Side(str(checkpoint.catalog.root), checkpoint.format.name, model_type)


def _stored_roles(sides: Sequence[OpenedCheckpoint]) -> list[str]:
    return [role for role in ROLES if any(role in side.catalog.roles for side in sides)]


def _compared_roles(sides: Sequence[OpenedCheckpoint], role: str | None) -> tuple[str, ...]:
    if role is not None and role not in ROLES:
        raise OptionError(
            f"Unknown role {role!r}.",
            where="--role",
            evidence=[f"roles: {', '.join(ROLES)}"],
            next_step="Name one of these, or leave out --role to compare all.",
        )
    roles = [one for one in ROLES if role in (None, one)]
    for side in sides:
        if role not in (None, *side.format.roles):
            raise OptionError(
                f"{side.catalog.root} {side.format.predicate} and has no {role}.",
                where=str(side.catalog.root),
                next_step="Compare two flex checkpoints, or leave out --role.",
            )
        roles = [one for one in roles if one in side.format.roles]
    return tuple(roles)


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
