"""An S3 store on this machine: moto's server, which can refuse requests, and repeat what it was sent."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

from paddleformers_fc.storage.files import files_within
from paddleformers_fc.storage.paths import RemotePath
from tests.harness.limits import LIMIT

REGION = "us-east-1"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "the-key-of-a-test",
    "AWS_SECRET_ACCESS_KEY": "the-secret-of-a-test",
    "AWS_SESSION_TOKEN": "the-token-of-a-test",
}
# The user's own S3 configuration must not affect tests.
_NOTHING = {"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "no_proxy": "127.0.0.1"}
_UNWANTED = ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
# Headers in which a request shows who asks; the token comes first, because errors tell the beginning of a long text.
_SHOWN = ("HTTP_X_AMZ_SECURITY_TOKEN", "HTTP_AUTHORIZATION")


@dataclass
class Store:
    """The server's application, seen from the wire.

    Attributes:
        application: moto's.
        url: where it answers.
        repeats: whether a range is refused, with an error that repeats by whom it was asked for.
        accepts: called with method, path and query before a request that may change an object; False refuses it.
        changed: called with the path after an object was written, but not by the client of the test.
    """

    application: Callable[..., Iterable[bytes]]
    url: str = ""
    repeats: bool = False
    accepts: Callable[[str, str, str], bool] = lambda method, path, query: True
    changed: Callable[[str], None] = lambda path: None

    def __call__(self, request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request."""
        method, path = request["REQUEST_METHOD"], request["PATH_INFO"]
        changes = method not in ("GET", "HEAD") and not self.accepts(method, path, request.get("QUERY_STRING", ""))
        if changes or (self.repeats and "HTTP_RANGE" in request):
            request["wsgi.input"].read(int(request.get("CONTENT_LENGTH") or 0))
            sent = " ".join(f"{name}: {request[name]}" for name in _SHOWN)
            body = f"<Error><Code>AccessDenied</Code><Message>{sent}</Message></Error>".encode()
            start("403 Forbidden", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        body = b"".join(self.application(request, start))
        if method in ("PUT", "POST") and "Boto3" not in request.get("HTTP_USER_AGENT", ""):
            self.changed(path)
        return [body]


@dataclass(frozen=True)
class Bucket:
    """An empty bucket, and a client beside the one that is tested.

    Attributes:
        store: the server.
        client: boto3's.
        path: the bucket's URL.
    """

    store: Store
    client: Any
    path: RemotePath

    def put(self, name: str, data: bytes) -> RemotePath:
        """Write or replace an object."""
        self.client.put_object(Bucket=self.path.name, Key=name, Body=data)
        return self.path / name

    def remove(self, name: str) -> None:
        """Delete an object."""
        self.client.delete_object(Bucket=self.path.name, Key=name)

    def files(self, under: str) -> dict[str, bytes]:
        """Return every object below a name, by its path from there."""
        found = self.client.list_objects_v2(Bucket=self.path.name, Prefix=f"{under}/").get("Contents", [])
        return {
            one["Key"].removeprefix(f"{under}/"): self.client.get_object(Bucket=self.path.name, Key=one["Key"])[
                "Body"
            ].read()
            for one in found
        }

    def unfinished(self) -> list[str]:
        """Return the names of uploads that were begun and neither completed nor discarded."""
        found = self.client.list_multipart_uploads(Bucket=self.path.name).get("Uploads", [])
        return [one["Key"] for one in found]

    def upload(self, source: Path) -> RemotePath:
        """Write every file of a directory, below its name."""
        for path in files_within(source):
            self.put(path.relative_to(source.parent).as_posix(), path.read_bytes())
        return self.path / source.name


@pytest.fixture(scope="session")
def s3() -> Iterator[Store]:
    """One server for all tests."""
    from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    store = Store(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, store, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        store.url = f"http://127.0.0.1:{server.server_port}"
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def bucket(s3: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket that fsspec finds by its configuration and the environment, as a user's."""
    import boto3
    from botocore.config import Config

    for name in _UNWANTED:
        monkeypatch.delenv(name, raising=False)
    for name, value in {**CREDENTIALS, **_NOTHING, "AWS_DEFAULT_REGION": REGION}.items():
        monkeypatch.setenv(name, value)
    patient = {"connect_timeout": LIMIT, "read_timeout": LIMIT}
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": s3.url, "config_kwargs": patient})
    client = boto3.client("s3", endpoint_url=s3.url, config=Config(**patient))
    name = f"bucket-{uuid.uuid4().hex}"
    client.create_bucket(Bucket=name)
    yield Bucket(s3, client, RemotePath(f"s3://{name}"))
    s3.repeats, s3.accepts = False, lambda method, path, query: True
    s3.changed = lambda path: None
    client.close()
