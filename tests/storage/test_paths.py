"""What a user's text stands for, and that a URL never shows its password."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from paddleformers_fc.errors import FormatError, OptionError
from paddleformers_fc.storage.paths import RemotePath, mask_credentials, parse_hidden, parse_path, parse_step


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("out/checkpoint-3", "out/checkpoint-3"),
        ("/data/a:b", "/data/a:b"),
        ("file:///data/run%201/checkpoint-3", "/data/run 1/checkpoint-3"),
        ("file://localhost/data/", "/data"),
        ("FILE:///data", "/data"),
    ],
)
def test_a_path_or_a_file_url_is_a_path_of_this_machine(text: str, path: str) -> None:
    assert parse_path(text) == Path(path)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://bucket/run/checkpoint-3/", "s3://bucket/run/checkpoint-3"),
        ("S3://Bucket/Run", "s3://Bucket/Run"),
        ("memory://a", "memory://a"),
        ("https://host:8000/weights", "https://host:8000/weights"),
    ],
)
def test_a_url_is_remote_and_loses_its_last_slash(text: str, url: str) -> None:
    assert parse_path(text) == RemotePath(url)


@pytest.mark.parametrize(
    "text",
    [
        "s3://",
        "memory:///",
        "file://other/data",
        "file://localhost",
        "simplecache::s3://b/c",
        "zip://a::s3://b",
        "https://h/d?token=x",
    ],
)
def test_a_url_that_cannot_be_a_directory_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="cannot be used as a directory"):
        parse_path(text)


def test_a_remote_path_is_taken_apart_and_put_together_as_a_local_one() -> None:
    path = parse_path("s3://bucket/run") / "checkpoint-3" / PurePosixPath("model_state/rank-00000.safetensors")
    assert isinstance(path, RemotePath)
    assert path.url == "s3://bucket/run/checkpoint-3/model_state/rank-00000.safetensors"
    assert (path.name, path.suffix) == ("rank-00000.safetensors", ".safetensors")
    assert path.parent.parent == RemotePath("s3://bucket/run/checkpoint-3")
    assert parse_step(path.parent.parent) == 3
    assert path.parent.parent.with_name("checkpoint-4").url == "s3://bucket/run/checkpoint-4"
    assert parse_path(path) is path
    assert path / PurePosixPath() == path


def test_the_top_of_a_store_is_its_own_parent() -> None:
    assert RemotePath("s3://bucket").parent == RemotePath("s3://bucket")


@pytest.mark.parametrize("part", ["..", "a/../../b", "/etc/passwd"])
def test_no_path_leaves_a_remote_directory(part: str) -> None:
    with pytest.raises(FormatError, match="leads out of"):
        parse_path("memory://run") / part


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sftp://ann:se/cr@et@host/run", "sftp://***@host/run"),
        ("sftp://ann:secret@host:22/run", "sftp://***@host:22/run"),
        ("ftp://token@host/run", "ftp://***@host/run"),
        ("s3://bucket/a@b/c", "s3://bucket/a@b/c"),
        ("http://host:80/a@b", "http://host:80/a@b"),
    ],
)
def test_users_and_passwords_are_not_shown(url: str, shown: str) -> None:
    assert str(RemotePath(url)) == shown
    assert repr(RemotePath(url)) == f"RemotePath('{shown}')"
    assert mask_credentials(f"no access to {url} today") == f"no access to {shown} today"


@pytest.mark.parametrize(
    "name",
    [".checkpoint-5.unfinished-", ".checkpoint-5.unfinished-xyz", "checkpoint-5.unfinished-ab", ".unfinished-ab"],
)
def test_a_name_that_only_looks_similar_is_not_that_of_a_stale_directory(name: str) -> None:
    assert parse_hidden(Path(name)) is None
