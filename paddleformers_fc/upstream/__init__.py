"""Check that the installed Paddle and PaddleFormers have everything that this package replaces or reads.

PaddleFormers has no interface for checkpoint plugins, so this package replaces methods and reads attributes that any
release may rename. A renamed hook must not lead to a run that saves in another format or resumes with wrong numbers.
So each hook is one row of :mod:`.hooks`, and :func:`require` checks the rows before anything is replaced.

Rows are checked on the imported objects: attributes by lookup, parameters by signature, and names that exist only on
instances by the bytecode of the functions that set or read them.

Importing this package imports neither Paddle nor PaddleFormers; the checks do. Time: 20 ms once both are imported.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from paddleformers_fc.errors import EnvironmentMismatch
from paddleformers_fc.text import install_command
from paddleformers_fc.upstream.hooks import CPU_RUNTIMES, LIBRARIES, PADDLEFORMERS, PADDLENLP, Hook


def is_installed(name: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    return find_spec(name) is not None


def _has_trainer(name: str) -> bool:
    """Return whether a package is installed and has a Trainer; older versions of PaddleFleet only have layers."""
    spec = find_spec(name)
    return spec is not None and any(Path(root, "trainer").is_dir() for root in spec.submodule_search_locations or ())


LIBRARY = next(filter(_has_trainer, LIBRARIES), PADDLEFORMERS)
"""The library whose Trainer this process uses. PaddleFormers and PaddleNLP cannot be installed together."""

FORMERS = PADDLEFORMERS if LIBRARY == PADDLENLP else LIBRARY
"""The library with the command line: PaddleFormers, or PaddleFleet if that has the Trainer."""

VERSIONS = {"paddle": "3.3.1", **{name: one.version for name, one in LIBRARIES.items() if one.version}}
"""The tested versions by module, as in its ``__version__``; builds for accelerators have the same."""

INSTALL = (
    f"Run {install_command('cpu')}; for NVIDIA devices first install Paddle as its installation page says, then run "
    f"{install_command('formers')}."
)
"""The next step if Paddle or PaddleFormers is missing."""
_ABSENT = " is not installed"


def require(hooks: Iterable[Hook]) -> None:
    """Check that no hook is missing or different in the installed Paddle and PaddleFormers.

    An untested version alone is not an error here; see :func:`require_versions`.

    Args:
        hooks: rows of the tables.

    Raises:
        EnvironmentMismatch: with every difference, and untested versions.
    """
    found = differences(hooks)
    if found:
        raise _mismatch([*unknown_versions(), *found])


def require_versions(unknown: str) -> list[str]:
    """Check that this package is tested with the installed versions of Paddle and PaddleFormers.

    Args:
        unknown: what to do if not: ``refuse`` or ``warn``.

    Returns:
        one line per untested version, for a warning.

    Raises:
        EnvironmentMismatch: a version is untested, and ``unknown`` is not ``warn``.
    """
    found = unknown_versions()
    if found and unknown != "warn":
        raise _mismatch(found, "; or set flex_unknown_versions: warn to try the installed ones")
    return found


def differences(hooks: Iterable[Hook]) -> list[str]:
    """Return every difference between the rows and the installed packages, one line each."""
    hooks = tuple(hooks)
    absent = [f"{name}{_ABSENT}" for name in sorted({hook.package for hook in hooks}) if not is_installed(name)]
    return absent or list(dict.fromkeys(line for hook in hooks for line in _differences(hook)))


def cpu_runtime_hooks() -> tuple[Hook, ...]:
    """Return the hooks that the CPU runtime needs here: none on an accelerator, and none of missing packages."""
    if import_module("paddle").device.get_device() != "cpu":
        return ()
    return tuple(hook for hook in CPU_RUNTIMES[LIBRARY] if is_installed(hook.package))


def unknown_versions() -> list[str]:
    """Return a line for Paddle and one for the library, if the version of its module or distribution is not tested.

    Libraries whose hooks were only compared with their public source have no tested version.
    """
    lines = []
    for name in filter(is_installed, ("paddle", LIBRARY)):
        versions, known = {str(getattr(import_module(name), "__version__", "without a version"))}, VERSIONS.get(name)
        with suppress(metadata.PackageNotFoundError):
            versions.add(metadata.version(name))
        if found := sorted(set(map(without_build, versions)) - {known}):
            tested = f"the tested version is {name} {known}" if known else f"no version of {name} is tested"
            lines.append(f"{name} {', '.join(found)} is installed; {tested}")
    return lines


def without_build(version: str) -> str:
    """Return the version without the suffix of a build for a device, such as ``.post126`` or ``+cu126``."""
    return re.sub(r"(\.post\d{1,3})?(\+.*)?$", "", version)


def _mismatch(evidence: list[str], alternative: str = "") -> EnvironmentMismatch:
    where = f"Python environment {sys.prefix}"
    if any(line.endswith(_ABSENT) for line in evidence):
        install = f"Run {install_command('nlp')}." if f"{PADDLENLP}{_ABSENT}" in evidence else INSTALL
        return EnvironmentMismatch(
            "Paddle or the library with its Trainer is not installed.",
            where=where,
            evidence=evidence,
            next_step=install,
        )
    library = LIBRARY if LIBRARY in VERSIONS else PADDLEFORMERS
    known = f"paddle {VERSIONS['paddle']} and {library} {VERSIONS[library]}"
    return EnvironmentMismatch(
        "The installed Paddle or library differs from what this package is written for.",
        where=where,
        evidence=evidence,
        next_step=f"Install {known}, or a version of paddleformers_fc for the installed ones{alternative}.",
    )


def _differences(hook: Hook) -> Iterator[str]:
    module, _, path = hook.place.partition(":")
    try:
        found: Any = import_module(module)
    except Exception as error:  # A module may raise anything when it is imported.
        yield f"{module} cannot be imported: {type(error).__name__}: {error}"
        return
    for name in path.split(".") if path else ():
        if not _has(found, name):
            yield f"{hook.place} is missing"
            return
        found = getattr(found, name)
    if hook.signature and hook.signature != (signature := _signature(found)):
        yield f"{hook.place} has the parameters {signature}; expected {hook.signature}"
    function = _function(found)
    for name in hook.names:
        if not any(_has(found, one) if function is None else uses(function, one) for one in name.split("|")):
            yield f"{hook.place} {'has no' if function is None else 'does not use'} {name}"


def replace_everywhere(original: Callable[..., Any], replacement: Callable[..., Any]) -> int:
    """Bind ``replacement`` in every imported module in which ``original.__name__`` is ``original``.

    Assigning it in its home module would not change modules that have imported the function by name. Time: one pass
    over ``sys.modules``, about 1 ms for 3,000 modules.

    Args:
        original: the function as its home module defines it.
        replacement: the function that takes its place.

    Returns:
        The number of modules that changed.
    """
    name = original.__name__
    changed = 0
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, replacement)
            changed += 1
    return changed


def uses(function: Any, name: str) -> bool:
    """Return whether the code of an upstream Python function, inside any wrappers, contains a name or text."""
    unwrapped = _function(function)
    return unwrapped is not None and name in _used(unwrapped.__code__)


def _function(found: Any) -> FunctionType | None:
    """Return the upstream Python function inside any wrappers; None if it is not a Python function."""
    found = found.fget if isinstance(found, property) else found
    found = inspect.unwrap(getattr(found, "__func__", found))
    return found if isinstance(found, FunctionType) else None


def _has(found: Any, name: str) -> bool:
    """Return whether a class or module has a dataclass field, or an attribute that is not inherited from ``object``."""
    if name in getattr(found, "__dataclass_fields__", ()):
        return True
    return hasattr(found, name) and not (hasattr(object, name) and getattr(found, name) is getattr(object, name))


@functools.cache
def _signature(found: Any) -> str:
    """Return the parameters of a callable without annotations; a default that is a function is ``...``.

    Cached, because a process checks the tables several times. A replaced hook is another callable.
    """
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return "that cannot be read"
    parameters = [
        one.replace(annotation=one.empty, default=... if isinstance(one.default, FunctionType) else one.default)
        for one in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty)).replace("Ellipsis", "...")


@functools.cache
def _used(code: CodeType) -> frozenset[str]:
    """Return every name and text in a function's bytecode, including nested functions."""
    inner = (_used(one) for one in code.co_consts if isinstance(one, CodeType))
    texts = (one for one in code.co_consts if isinstance(one, str))
    return frozenset().union(code.co_names, texts, *inner)
