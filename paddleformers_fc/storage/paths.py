"""Paths and URLs of checkpoints, and the names of the directories next to them.

:func:`parse_path` parses a user's text once. After that, a local directory is a ``pathlib.Path`` and a directory of a
store a :class:`RemotePath`. Only the first of these names matches ``checkpoint-*``:

====================================  =================================================================================
``checkpoint-500``                    a checkpoint; 500 is the step
``.checkpoint-500.unfinished-TOKEN``  a staging directory; the token begins with a digest of the run's id
``.checkpoint-500.aside-TOKEN``       a backup of a checkpoint while the newer save with this token replaces it
``.checkpoint-500.removed-TOKEN``     a checkpoint that is being deleted
``kept-TOKEN.checkpoint-500``         files of other programs that had the name; never deleted
====================================  =================================================================================
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TypeAlias, TypeVar
from urllib.parse import unquote

import msgspec

from paddleformers_fc.errors import FormatError, OptionError

# One protocol, or several chained ones of fsspec.
_URL = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_LOCAL = frozenset({"file", "local"})
_WEB = frozenset({"http", "https"})
_IN_PROCESS = "memory"
# Everything before the "@" of the host. A secret may contain slashes; a port number is not a secret.
_CREDENTIALS = re.compile(r"(?<=://)(?:[^/@:\s]*:(?!\d+/)\S*@|[^/\s]*@)")


class RemotePath(msgspec.Struct, frozen=True, order=True):
    """A file or directory of a store, by its URL.

    Its text omits user and password; :attr:`url` includes them.

    Args:
        url: with the protocol and without a trailing slash, such as ``s3://bucket/run/checkpoint-3``.
    """

    url: str

    def __truediv__(self, part: str | PurePosixPath) -> RemotePath:
        """Return a path below this directory.

        Raises:
            FormatError: the part is absolute or leads out of the directory.
        """
        text = str(part)
        if text == ".":
            return self
        if text.startswith("/") or ".." in text.split("/"):
            raise FormatError(f"{text!r} leads out of {self}.", where=str(self))
        return RemotePath(f"{self.url}/{text}")

    def __str__(self) -> str:
        return mask_credentials(self.url)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    @property
    def protocol(self) -> str:
        """The scheme, before ``://``."""
        return self.url.partition("://")[0]

    @property
    def name(self) -> str:
        """The last component."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The file extension, with its dot."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """The parent directory; the root of a store is its own parent."""
        above = self.url.rpartition("/")[0]
        return self if above.endswith("/") else RemotePath(above)

    def with_name(self, name: str) -> RemotePath:
        """Return another entry of the same directory."""
        return self.parent / name


AnyPath: TypeAlias = Path | RemotePath


def parse_path(named: str | os.PathLike[str] | RemotePath) -> AnyPath:
    """Parse a user's path or URL without accessing it; a ``file://`` URL is a local path.

    Raises:
        OptionError: the URL cannot name a directory, the path is impossible, or the text is empty, which would mean the
            current directory.
    """
    if isinstance(named, RemotePath):
        return named
    text = _path_text(named)
    check_not_empty(text)
    match = _URL.fullmatch(text)
    if match is None:
        return Path(text)
    protocol, rest = match[1].lower(), match[2].rstrip("/")
    if protocol in _LOCAL:
        return _local_path(text, rest)
    if not rest.strip("/"):
        _reject(text, "it names no directory")
    if "::" in text:
        _reject(text, "file names cannot be appended to nested URLs")
    if protocol in _WEB and ("?" in rest or "#" in rest):
        _reject(text, "file names cannot be appended after ? or #")
    return RemotePath(f"{protocol}://{rest}")


def expand_user(named: str | os.PathLike[str]) -> str:
    """Expand ``~`` in a user's text, as PaddleFormers does for ``output_dir``.

    This is for text that no shell has expanded, such as keys of a configuration. Directories that PaddleFormers uses
    unexpanded, as in ``save_pretrained``, are not expanded, because PaddleFormers writes its own files there.

    Raises:
        OptionError: the path is impossible.
    """
    return os.path.expanduser(_path_text(named))


def parse_named(named: str | os.PathLike[str] | RemotePath) -> AnyPath:
    """Parse a path or URL like :func:`parse_path`, after expanding ``~``."""
    return named if isinstance(named, RemotePath) else parse_path(expand_user(named))


def _path_text(named: str | os.PathLike[str]) -> str:
    """Return the text of a path.

    Raises:
        OptionError: it is not text, or contains characters that no path can have.
    """
    text = os.fspath(named)
    try:
        is_possible = b"\0" not in os.fsencode(text) and isinstance(text, str)
    except UnicodeEncodeError:
        is_possible = False
    if not is_possible:
        raise OptionError(
            f"Invalid path {text!r}.",
            evidence=["a path is text without NUL, in the encoding of the file system"],
            next_step="Correct the path.",
        )
    return text


def require_local(named: str | os.PathLike[str] | RemotePath, doing: str) -> Path:
    """Return an output directory, which must be local because a save ends with a rename.

    Args:
        named: the directory, as the user named it.
        doing: the written object, as the beginning of a sentence: "A checkpoint".

    Raises:
        OptionError: the directory is remote.
    """
    found = parse_path(named)
    if isinstance(found, RemotePath):
        raise OptionError(
            f"{doing} cannot be written to {found}.",
            where=str(found),
            evidence=["it is written next to its target and renamed at the end, but such a store cannot rename"],
            next_step="Write it to a local directory, then upload its files, "
            "flex_checkpoint.json or model.safetensors.index.json last.",
        )
    return found


def parse_target(named: str | os.PathLike[str] | RemotePath, doing: str) -> AnyPath:
    """Parse the path or URL of an output directory.

    Args:
        named: the directory, as the user named it.
        doing: the written object, as the beginning of a sentence: "An export".

    Raises:
        OptionError: it cannot name a directory, or is on a web server, which is read-only.
    """
    found = parse_path(named)
    if isinstance(found, RemotePath) and found.protocol in _WEB:
        raise OptionError(
            f"{doing} cannot be written to {found}.",
            where=str(found),
            evidence=["web servers are read-only"],
            next_step="Name a local directory, or an object store such as s3://bucket/run/export.",
        )
    return found


def require_lasting(found: AnyPath, doing: str) -> None:
    """Check that a target outlives this process.

    Args:
        found: a parsed target.
        doing: as for :func:`parse_target`.

    Raises:
        OptionError: the target is in memory.
    """
    if isinstance(found, RemotePath) and found.protocol == _IN_PROCESS:
        raise OptionError(
            f"{doing} in {found} would end with this process.",
            where=str(found),
            next_step="Name a local directory, or an object store such as s3://bucket/run.",
        )


def parse_store(named: str, doing: str) -> RemotePath:
    """Parse the URL of a store that outlives this process; a ``file://`` URL counts as a local store.

    Args:
        named: the URL, as the user wrote it.
        doing: as for :func:`parse_target`.

    Raises:
        OptionError: it is not such a URL.
    """
    found = parse_target(named, doing)
    require_lasting(found, doing)
    if isinstance(found, RemotePath):
        return found
    if _URL.fullmatch(named) is None:
        _reject(named, "it is not a URL")
    return RemotePath(f"file://{found}")


def check_not_empty(text: str) -> None:
    """Check that the path of a directory is not empty, as an unset shell variable would be.

    Raises:
        OptionError: it is empty.
    """
    if not text:
        raise OptionError(
            "The path of a directory is empty.",
            evidence=["it would mean the current directory, which is rarely intended"],
            next_step="Name a directory; use . for the current one.",
        )


def mask_credentials(text: str) -> str:
    """Mask users and passwords in the URLs of a text."""
    return _CREDENTIALS.sub("***@", text)


def _local_path(text: str, rest: str) -> Path:
    host, slash, below = rest.partition("/")
    if host not in ("", "localhost"):
        _reject(text, f"{host!r} would be another machine; a local file:// URL has three slashes")
    if not slash and not text.endswith("/"):
        _reject(text, "it names no directory")
    return Path(_path_text("/" + unquote(below)))


def _reject(text: str, fault: str) -> None:
    raise OptionError(
        f"{mask_credentials(text)} cannot be used as a directory: {fault}.",
        next_step="Name a path, or a URL such as s3://bucket/run/checkpoint-3.",
    )


_P = TypeVar("_P", Path, RemotePath, AnyPath)

UNFINISHED = "unfinished"
ASIDE = "aside"
REMOVED = "removed"
LOCK_NAME = ".flex.lock"
"""Name of the lock file inside a staging directory."""

_CHECKPOINT = re.compile(r"checkpoint-([0-9]+)")
_BESIDE = re.compile(rf"\.(.+)\.({UNFINISHED}|{ASIDE}|{REMOVED})-([0-9a-f]+)", re.DOTALL)


def parse_hidden(path: _P) -> tuple[_P, str, str] | None:
    """Return ``(target, state, token)`` of a directory in one of the hidden states; None for any other name."""
    match = _BESIDE.fullmatch(path.name)
    return (path.with_name(match[1]), match[2], match[3]) if match else None


def parse_step(path: AnyPath) -> int | None:
    """Return the step of a directory called ``checkpoint-N``; None for any other name."""
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else None
