"""A web server with byte ranges that counts what it is asked, and can be made to answer wrongly."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import aiohttp
import fsspec

from tests.harness.limits import LIMIT

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass
class Served:
    """A directory behind a URL.

    Attributes:
        root: the directory.
        url: of it.
        ranges: path, first byte and length of every range that was asked for.
        refuse: statuses to answer with, by the end of a path.
        answer: what is sent in place of a range's bytes.
        tags: whether files have entity tags and times.
    """

    root: Path
    url: str = ""
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    refuse: dict[str, int] = field(default_factory=dict)
    answer: Callable[[bytes], bytes] = bytes
    tags: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def bytes(self) -> int:
        """How many bytes were asked for."""
        return sum(length for _, _, length in self.ranges)


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body of an answer are two packets; the second would wait for the first to be acknowledged.
    disable_nagle_algorithm = True

    def __init__(self, *arguments: object, served: Served) -> None:
        self._served = served
        super().__init__(*arguments, directory=str(served.root))  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        if not self._refused():
            self._send(b"", looking=True)

    def do_GET(self) -> None:
        if self._refused():
            return
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if asked is None or not path.is_file():
            super().do_GET()
            return
        first, last = int(asked[1]), int(asked[2])
        with self._served.lock:
            self._served.ranges.append((path.relative_to(self._served.root).as_posix(), first, last + 1 - first))
        if first >= path.stat().st_size:
            self.send_error(416)
            return
        with path.open("rb") as file:
            file.seek(first)
            data = file.read(last + 1 - first)
        self._send(self._served.answer(data), looking=False)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""

    def _refused(self) -> bool:
        status = next((status for end, status in self._served.refuse.items() if self.path.endswith(end)), None)
        if status is not None:
            self.send_error(status)
        return status is not None

    def _send(self, data: bytes, looking: bool) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        status = path.stat()
        self.send_response(200 if looking else 206)
        self.send_header("Content-Length", str(status.st_size if looking else len(data)))
        if self._served.tags:
            self.send_header("ETag", f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}")
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    # With the five of the library, a client that opens more connections at once waits for seconds to try again.
    request_queue_size = 128


@contextmanager
def serving(root: Path) -> Iterator[Served]:
    """Serve a directory on this machine while the block runs."""
    served = Served(root)
    server = _Server(("127.0.0.1", 0), partial(_Handler, served=served))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    # The client waits for an answer as long as a test may take, in place of its own five minutes.
    patient = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=LIMIT, sock_connect=LIMIT)}}
    before = fsspec.config.conf.get("http", {})
    fsspec.config.conf["http"] = {**before, **patient}
    try:
        served.url = f"http://127.0.0.1:{server.server_port}"
        yield served
    finally:
        fsspec.config.conf["http"] = before
        server.shutdown()
        thread.join()
        server.server_close()
