"""Find the parameter of a variable such as ``linear_5.w_0`` without a table of names.

Paddle names a variable after the class of its layer and a number that counts the layers of that class in the order in
which they are built. The parameters of a stage, in the order in which their family builds them, therefore consist of
one sequence per class, and all layers of a kind (``q_proj`` of every decoder layer) are of one class. The variables are
assigned only if a single assignment fits the sizes of all states.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paddleformers_fc.families.declarations import NUMBER
from paddleformers_fc.formats.legacy.rank_files import FileArray, RankContent
from paddleformers_fc.formats.legacy.sharding_group import arrange
from paddleformers_fc.mapping import Shape

_VARIABLE = re.compile(r"(?:slice@)?(([^@]+)_([0-9]{1,9})\.([wb]_[0-9]+))(?:_([A-Za-z]\w*))?")
_NAMED = ("embed", "lm_head")
"""Words that the class of a layer and the name of its parameter both contain, or neither."""
_NUMBER_SHAPES = ((), (1,))


@dataclass(frozen=True)
class _Variable:
    """A variable, and the pieces of each of its states that has its shape."""

    name: str
    states: Sequence[Sequence[FileArray]]

    def fits(self, shape: Shape) -> bool:
        """Return whether all states can be those of a parameter of this shape."""
        return all(not isinstance(arrange(shape, pieces), str) for pieces in self.states)


def assign_variables(contents: Sequence[RankContent], parameters: Mapping[str, Shape]) -> dict[str, str] | str:
    """Return the name of the variable of every parameter.

    Args:
        contents: the optimizer's files of one stage and tensor-parallel rank.
        parameters: local shapes by structured name, in the order in which the model builds them.
    Returns:
        the names, or as text why they do not follow.
    """
    classes = _classes(contents)
    count = sum(map(len, classes.values()))
    if count != len(parameters):
        return f"the optimizer has states of {count} variables, and the model has {len(parameters)} parameters"
    found: list[dict[str, str]] = []
    for assigned in _assignments(classes, list(parameters.items())):
        found.append(assigned)
        if len(found) > 1:
            name = next(one for one in parameters if found[0][one] != found[1][one])
            return f"{name} can be {found[0][name]} or {found[1][name]}"
    if not found:
        return f"no order of the classes {', '.join(sorted({name for name, _ in classes}))} fits the parameters' shapes"
    return found[0]


def _classes(contents: Sequence[RankContent]) -> dict[tuple[str, str], list[_Variable]]:
    """Return the variables by the class of their layer and their role in it, in the order of their numbers."""
    pieces: dict[tuple[str, str, int, str], dict[str, list[FileArray]]] = {}
    for content in contents:
        for key, array in (*content.arrays.items(), *content.master.items()):
            match = _VARIABLE.fullmatch(key)
            if match is not None:
                states = pieces.setdefault((match[2], match[4], int(match[3]), match[1]), {})
                states.setdefault(match[5] or "", []).append(array)
    classes: dict[tuple[str, str], list[_Variable]] = {}
    for (kind, leaf, _, name), states in sorted(pieces.items()):
        shaped = [one for one in states.values() if one[0].shape not in _NUMBER_SHAPES]
        classes.setdefault((kind, leaf), []).append(_Variable(name, shaped))
    return classes


def _is_possible(variables: tuple[str, str], name: str) -> bool:
    """Return whether names allow variables of a class and a role to be those of a parameter."""
    kind, leaf = variables
    return all((word in kind) == (word in name) for word in _NAMED) and (leaf[0] == "w" or name.endswith("bias"))


def _assignments(
    classes: Mapping[tuple[str, str], Sequence[_Variable]], parameters: Sequence[tuple[str, Shape]]
) -> Iterator[dict[str, str]]:
    """Yield every assignment in which layers of a kind are of one class and each class is in order."""
    # The state of the search: parameters done, the class of every kind, the number of variables used per class.
    Kinds = dict[str, tuple[str, str]]
    pending: list[tuple[int, Kinds, dict[tuple[str, str], int], dict[str, str]]] = [(0, {}, {}, {})]
    while pending:
        done, kinds, used, assigned = pending.pop()
        while done < len(parameters):
            name, shape = parameters[done]
            kind = NUMBER.sub("#", name)
            if kind not in kinds:
                pending += [
                    (done, {**kinds, kind: one}, dict(used), dict(assigned))
                    for one in classes
                    if _is_possible(one, name)
                ]
                break
            at = used.get(kinds[kind], 0)
            variables = classes[kinds[kind]]
            if at == len(variables) or not variables[at].fits(shape):
                break
            used[kinds[kind]] = at + 1
            assigned[name] = variables[at].name
            done += 1
        else:
            yield assigned
