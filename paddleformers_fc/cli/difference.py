"""``diff``: print the differences between two checkpoints."""

from __future__ import annotations

import math

import paddleformers_fc
from paddleformers_fc import output
from paddleformers_fc.execute.diff_checkpoints import Difference, Different
from paddleformers_fc.formats.registry import FORMATS, describes_model
from paddleformers_fc.plan.report import states_joined
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import count_text, fold

_MOST_FIGURES = 10
"""Maximum number of tensors that are printed with figures."""
_MANY_ULP = 1 << 12
"""More than a few operations can round."""


def compare(
    a: AnyPath, b: AnyPath, config: str | None, role: str | None, atol: float = 0.0, rtol: float = 0.0
) -> Difference:
    """Compare two checkpoints.

    Args:
        a: a checkpoint of any format.
        b: the other checkpoint.
        config: as for :func:`.api.open`, for whichever side has no configuration.
        role: as for :meth:`.api.Checkpoint.diff`.
        atol: likewise.
        rtol: likewise.
    Raises:
        OptionError: both sides have a configuration that differs from ``config``.
        FlexError: a side cannot be opened, proved or read.
    """
    sides = (a, b)
    lacking = [side for side in sides if config is not None and not describes_model(side)] or sides
    one, other = (paddleformers_fc.open(side, config=config if side in lacking else None) for side in sides)
    found: Difference = one.diff(other, role, atol=atol, rtol=rtol)
    return found


def show(found: Difference, console: output.Console) -> None:
    """Print the largest differences, every difference with folded indices, and a table of counts."""
    titles = {one.name: one.title for one in FORMATS}
    output.print_styled(console, ("A ", "bold"), f"{found.a.path} ({titles[found.a.kind]})")
    output.print_styled(console, ("B ", "bold"), f"{found.b.path} ({titles[found.b.kind]})")
    _show_largest(found, console)
    for role, one in found.roles.items():
        _show_lines(console, f"{role}: different", len(one.different), _reasons(one.different))
        _show_lines(console, f"{role}: only in A", len(one.only_in_a), states_joined(one.only_in_a))
        _show_lines(console, f"{role}: only in B", len(one.only_in_b), states_joined(one.only_in_b))
    families = (found.a.model_type, found.b.model_type)
    if not found.equal and all(families) and families[0] != families[1]:
        console.print(f"A is a model of family {families[0]}, B of {families[1]}.")
    console.print(_counts(found))
    if found.not_compared:
        left = ", ".join(found.not_compared)
        console.print(f"Not compared, because the format of one side cannot contain it: {left}.")
    if found.equal:
        verdict, summary = ("equal", "bold green"), _equal_text(found)
    else:
        verdict, summary = ("not equal", "bold red"), _unequal_text(found)
    output.print_styled(console, verdict, f": {summary}, {found.seconds:.2f} s")


def _has_tolerance(found: Difference) -> bool:
    return bool(found.atol or found.rtol)


def _equal_text(found: Difference) -> str:
    """Return how many tensors are equal, bitwise and within the tolerance if there is one."""
    roles = found.roles.values()
    text = f"{count_text(sum(one.equal for one in roles), 'tensor')} bitwise equal"
    if not _has_tolerance(found):
        return text
    within = sum(one.within_tolerance for one in roles)
    return f"{text}, {within:,} equal within the tolerance (atol {found.atol:g}, rtol {found.rtol:g})"


def _unequal_text(found: Difference) -> str:
    """Return the totals of the table; zeros are omitted, except for "different"."""
    roles = found.roles.values()
    different = sum(len(one.different) for one in roles)
    sides = {"A": sum(len(one.only_in_a) for one in roles), "B": sum(len(one.only_in_b) for one in roles)}
    only = "".join(f", {count:,} only in {side}" for side, count in sides.items() if count)
    total = sum(one.equal + one.within_tolerance for one in roles) + different + sum(sides.values())
    text = f"{different:,} different{only}, of {count_text(total, 'tensor')}"
    return f"{text}; {_equal_text(found)}" if _has_tolerance(found) else text


def _show_largest(found: Difference, console: output.Console) -> None:
    """Print the figures of the tensors with the largest differences, over all roles."""
    rows = [(role, one, one.deviation) for role, roles in found.roles.items() for one in roles.different]
    measured = [(role, one, figures) for role, one, figures in rows if figures is not None]
    measured.sort(key=lambda row: math.inf if row[2].absolute is None else row[2].absolute, reverse=True)
    if not measured:
        return
    first = f"largest differences ({min(_MOST_FIGURES, len(measured))} of {len(measured)})"
    table = output.table_of(first, ("absolute", "ULP", "elements", "first at"))
    for role, one, figures in measured[:_MOST_FIGURES]:
        absolute = "not finite" if figures.absolute is None else f"{figures.absolute:.3g}"
        ulp = "" if figures.ulp is None else f"{figures.ulp:,}"
        elements = f"{figures.elements:,} of {math.prod(one.a.shape):,}"
        table.add_row(f"{role} {one.name}", absolute, ulp, elements, str(list(figures.first)))
    console.print(table)
    if any((figures.ulp or 0) > _MANY_ULP for _, _, figures in measured[:_MOST_FIGURES]):
        console.print("Near zero numbers are dense: a small absolute difference there is a large one in ULPs.")


def _reasons(different: list[Different]) -> list[str]:
    """Return one line per difference and reason; states of a parameter with the same reason share a line."""
    names: dict[str, list[str]] = {}
    for item in different:
        names.setdefault(item.reason, []).append(item.name)
    return [f"{name}: {reason}" for reason, found in names.items() for name in states_joined(found)]


def _counts(found: Difference) -> output.Table:
    within = ["within tolerance"] if _has_tolerance(found) else []
    table = output.table_of("role", ("equal", *within, "different", "only in A", "only in B"))
    for role, one in found.roles.items():
        close = [one.within_tolerance] if within else []
        counts = (one.equal, *close, len(one.different), len(one.only_in_a), len(one.only_in_b))
        table.add_row(role, *(f"{count:,}" for count in counts), style=None if one.same else "red")
    return table


def _show_lines(console: output.Console, heading: str, count: int, lines: list[str]) -> None:
    if lines:
        console.print(f"{heading} ({count})", style="bold red")
        for line in fold(lines):
            console.print(f"  {line}")
