"""The location of a checkpoint: a local directory, or a URL of a store that answers range requests.

:func:`parse_path` parses the text of a user once, at the edge (command line, options, public API). After that a local
directory is a ``pathlib.Path`` and a remote one a :class:`RemotePath`, which has the few operations that readers of
checkpoints use. Requests to stores are in :mod:`.remote`; this module sends none.

A save is a rename, which object stores do not have, so it calls :func:`require_local`. Exports and conversions are also
written to stores, see :func:`parse_target`.

Names of the directories beside a checkpoint.

====================================  =================================================================================
``checkpoint-500``                    a checkpoint; 500 is the step
``.checkpoint-500.unfinished-TOKEN``  a staging directory, of a running save or of a process that died; the token
                                      begins with a digest of the run's id
``.checkpoint-500.aside-TOKEN``       an older checkpoint while a newer one, staged with this token, takes its name
``.checkpoint-500.removed-TOKEN``     a checkpoint that is being deleted
``kept-TOKEN.checkpoint-500``         files of other programs that had the name; never deleted here
====================================  =================================================================================

No name but the first matches ``checkpoint-*``, so that people and the Trainer's rotation do not take the others for
checkpoints.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path, PurePosixPath
from typing import TypeAlias, TypeVar
from urllib.parse import unquote

import msgspec
import xxhash

from paddleformers_fc.errors import FormatError, OptionError

# One protocol, or several that fsspec chains.
_URL = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_LOCAL = frozenset({"file", "local"})
_WEB = frozenset({"http", "https"})
_IN_PROCESS = "memory"
# Up to the "@" in front of the host; a secret may hold slashes, and a port is none.
_CREDENTIALS = re.compile(r"(?<=://)(?:[^/@:\s]*:(?!\d+/)\S*@|[^/\s]*@)")


class RemotePath(msgspec.Struct, frozen=True, order=True):
    """A file or directory of a store, by its URL.

    As text it is the URL without user and password; :attr:`url` is the whole.

    Args:
        url: with its protocol and without a slash at the end, such as ``s3://bucket/run/checkpoint-3``.
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
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The end of the name, from its last dot on."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """The directory it is in; the top of a store is its own."""
        above = self.url.rpartition("/")[0]
        return self if above.endswith("/") else RemotePath(above)

    def with_name(self, name: str) -> RemotePath:
        """Another entry of the same directory."""
        return self.parent / name


AnyPath: TypeAlias = Path | RemotePath


def parse_path(named: str | os.PathLike[str] | RemotePath) -> AnyPath:
    """Parse the path or URL of a user without accessing it; a ``file://`` URL is a local path.

    Raises:
        OptionError: the URL cannot be that of a directory, no file system has such a path, or there is no text: it
            would be the current directory.
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
        _reject(text, "URLs inside URLs cannot be joined with the names of files")
    if protocol in _WEB and ("?" in rest or "#" in rest):
        _reject(text, "what follows ? or # would be lost when names of files are added")
    return RemotePath(f"{protocol}://{rest}")


def expand_user(named: str | os.PathLike[str]) -> str:
    """Return a user's text with the home directory in place of its ``~``, as PaddleFormers reads ``output_dir``.

    For what a shell has not read: keys of a configuration, arguments in quotes. Directories that PaddleFormers uses
    unchanged, such as that of ``save_pretrained``, are not expanded, because it writes files of its own there.

    Raises:
        OptionError: no file system has such a path.
    """
    return os.path.expanduser(_path_text(named))


def parse_named(named: str | os.PathLike[str] | RemotePath) -> AnyPath:
    """Parse a path or URL as :func:`parse_path`, with the home directory in place of ``~``."""
    return named if isinstance(named, RemotePath) else parse_path(expand_user(named))


def _path_text(named: str | os.PathLike[str]) -> str:
    """Return the text of a path.

    Raises:
        OptionError: it is not a text, or contains what no file system can name.
    """
    text = os.fspath(named)
    try:
        is_possible = b"\0" not in os.fsencode(text) and isinstance(text, str)
    except UnicodeEncodeError:
        is_possible = False
    if not is_possible:
        raise OptionError(
            f"Invalid path {text!r}.",
            evidence=["a path is a text without NUL, in the encoding of the file system"],
            next_step="Correct the path.",
        )
    return text


def require_local(named: str | os.PathLike[str] | RemotePath, doing: str) -> Path:
    """Return a directory that is written, which must be one of this machine.

    Args:
        named: as the user named it.
        doing: the written object, as the beginning of a sentence: "A checkpoint".

    Raises:
        OptionError: it is remote.
    """
    found = parse_path(named)
    if isinstance(found, RemotePath):
        raise OptionError(
            f"{doing} cannot be written to {found}.",
            where=str(found),
            evidence=["it is written beside its target and renamed at the end, and such a store cannot rename"],
            next_step="Write it to a directory of this machine, then upload its files, "
            "flex_checkpoint.json or model.safetensors.index.json last.",
        )
    return found


def parse_target(named: str | os.PathLike[str] | RemotePath, doing: str) -> AnyPath:
    """Parse the path or URL of a directory that is written.

    Args:
        named: as the user named it.
        doing: the written object, as the beginning of a sentence: "An export".

    Raises:
        OptionError: it cannot be that of a directory, or web servers are only read from.
    """
    found = parse_path(named)
    if isinstance(found, RemotePath) and found.protocol in _WEB:
        raise OptionError(
            f"{doing} cannot be written to {found}.",
            where=str(found),
            evidence=["files of a web server are only read"],
            next_step="Name a directory of this machine, or an object store such as s3://bucket/run/export.",
        )
    return found


def require_lasting(found: AnyPath, doing: str) -> None:
    """Refuse a target in the memory of this process, which ends with it.

    Args:
        found: a parsed target.
        doing: as for :func:`parse_target`.

    Raises:
        OptionError: it is in memory.
    """
    if isinstance(found, RemotePath) and found.protocol == _IN_PROCESS:
        raise OptionError(
            f"{doing} in {found} would end with this process.",
            where=str(found),
            next_step="Name a directory of this machine, or an object store such as s3://bucket/run.",
        )


def parse_store(named: str, doing: str) -> RemotePath:
    """Parse the URL of a store that outlives this process; a ``file://`` URL is that of a store of this machine.

    Args:
        named: as the user named it.
        doing: as for :func:`parse_target`.

    Raises:
        OptionError: it is not such a URL.
    """
    found = parse_target(named, doing)
    require_lasting(found, doing)
    if isinstance(found, RemotePath):
        return found
    if _URL.fullmatch(named) is None:
        _reject(named, "it is no URL")
    return RemotePath(f"file://{found}")


def check_not_empty(text: str) -> None:
    """Refuse an empty text where a directory is named, such as a variable of a shell that was never set.

    Raises:
        OptionError: it is empty.
    """
    if not text:
        raise OptionError(
            "A directory is named by an empty text.",
            evidence=["it would be the current directory, which is rarely meant"],
            next_step="Name a directory; the current one is a dot.",
        )


def mask_credentials(text: str) -> str:
    """Return a text without the users and passwords of the URLs in it."""
    return _CREDENTIALS.sub("***@", text)


def _local_path(text: str, rest: str) -> Path:
    host, slash, below = rest.partition("/")
    if host not in ("", "localhost"):
        _reject(text, f"{host!r} would be another machine; a path of this one has three slashes")
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
"""The name of the lock inside a staging directory."""

_CHECKPOINT = re.compile(r"checkpoint-([0-9]+)")
_KEPT = re.compile(r"kept-[0-9a-f]+\.(.+)", re.DOTALL)
_BESIDE = re.compile(rf"\.(.+)\.({UNFINISHED}|{ASIDE}|{REMOVED})-([0-9a-f]+)", re.DOTALL)


def hidden_name(target: Path, state: str, token: str = "") -> Path:
    """Return the name next to ``target`` for a directory in one of the three hidden states.

    Args:
        target: the name of the directory without a state.
        state: the state.
        token: makes the name unique; a new one by default.

    Raises:
        OptionError: the target has no name that another directory can take.
    """
    if target.name in ("", ".."):
        raise OptionError(
            f"{target} has no name of its own, and a checkpoint is renamed when it is complete.",
            where=str(target),
            next_step="Name a directory such as checkpoint-3; nothing was written.",
        )
    return target.with_name(f".{target.name}.{state}-{token or secrets.token_hex(6)}")


def run_digest(run: str) -> str:
    """Return the beginning of the tokens of a run."""
    return xxhash.xxh3_64_hexdigest(run.encode())


def backup_name(target: Path) -> Path:
    """Return a fresh name next to ``target`` for files that were there before and are not ours."""
    return target.with_name(f"kept-{secrets.token_hex(6)}.{target.name}")


def parse_hidden(path: _P) -> tuple[_P, str, str] | None:
    """Return ``(target, state, token)`` of a directory in one of the hidden states; None for any other name."""
    match = _BESIDE.fullmatch(path.name)
    return (path.with_name(match[1]), match[2], match[3]) if match else None


def parse_kept(path: _P) -> _P | None:
    """Return the name that a backup directory (:func:`backup_name`) was made from; None for any other name."""
    match = _KEPT.fullmatch(path.name)
    return path.with_name(match[1]) if match else None


def parse_step(path: AnyPath) -> int | None:
    """Return the step of a directory called ``checkpoint-N``; None for any other name."""
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else None
