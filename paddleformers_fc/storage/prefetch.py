"""Ranges of remote files: fetched in few large requests, served from memory in many small reads.

A request to a store takes milliseconds, the time of megabytes. A reader of a tensor needs rows, blocks that fit the
processor's cache, and thousands of norms and powers of beta. Locally the page cache makes that cheap; for stores this
module does. A caller announces the ranges that will be read (:meth:`Prefetcher.expect`). Neighbours become one request
if the gap between them costs less than a request, long ranges become several, and requests are bundled. The first read
in a bundle fetches all of it, its requests in parallel.

Memory: ``bundles`` times ``BUNDLE_BYTES``; then the least recently used bundle is dropped, and fetched again when it is
needed again. Announced ranges should therefore be read roughly in the order of files, or be short. Bytes: a gap that is
read along has at most ``GAP_BYTES``, and a request of more than ``FREE_BYTES`` has at most ``MAX_OVER_READ`` times the
wanted bytes.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from paddleformers_fc.storage.paths import RemotePath
from paddleformers_fc.storage.remote import PART_BYTES, RemoteFile

GAP_BYTES = 256 * 1024
"""Bytes that arrive in the time of a request, a low estimate: a gap of this length is read along."""
MAX_GAP_RATIO = 16.0
"""Maximum ratio of requested to wanted bytes, for requests of more than ``FREE_BYTES``."""
FREE_BYTES = 64 * 1024
"""A request of this length takes as long as one of a byte."""
BUNDLE_BYTES = PART_BYTES
MOST_REQUESTS = 64
"""Maximum number of requests of a bundle, which are sent at the same time."""


@dataclass(frozen=True, slots=True)
class ExpectedRange:
    """A range that will be read, or successive ones with the gaps between them.

    Args:
        begin: offset of the first byte.
        end: offset behind the last.
        size: how many of these bytes are wanted.
    """

    begin: int
    end: int
    size: int


def joins(gap: int, length: int, size: int) -> bool:
    """Return whether two ranges are cheaper as one request.

    Args:
        gap: bytes between them.
        length: bytes of both with the gap.
        size: bytes that are wanted of both.
    """
    return gap <= GAP_BYTES and (length <= FREE_BYTES or length <= MAX_GAP_RATIO * size)


@dataclass
class _Bundle:
    """Requests that are fetched together.

    Args:
        requests: offsets of the first byte and behind the last.
        answers: the fetched bytes by request; None before the fetch and after eviction.
    """

    requests: list[tuple[int, int]]
    answers: Sequence[bytes] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def size(self) -> int:
        """Bytes of all requests."""
        return sum(end - begin for begin, end in self.requests)


class _Expected:
    """The expected ranges of one file."""

    def __init__(self, wanted: Iterable[ExpectedRange]) -> None:
        self.bundles = list(bundle_requests(wanted))
        self._places = [
            (begin, end, bundle, index) for bundle in self.bundles for index, (begin, end) in enumerate(bundle.requests)
        ]

    def parts(self, begin: int, end: int) -> list[tuple[_Bundle, int, int, int]]:
        """Return the parts of a range: bundle, number of the request, range inside it. Empty if it is not covered."""
        found: list[tuple[_Bundle, int, int, int]] = []
        number = bisect_right(self._places, begin, key=lambda place: place[0]) - 1
        while begin < end:
            if not 0 <= number < len(self._places):
                return []
            low, high, bundle, index = self._places[number]
            if not low <= begin < high:
                return []
            found.append((bundle, index, begin - low, min(end, high) - low))
            begin, number = min(end, high), number + 1
        return found


class Prefetcher:
    """The expected ranges of remote files, and the bundles that were fetched. Safe for several threads.

    Args:
        bundles: maximum number of bundles in memory.
    """

    def __init__(self, bundles: int) -> None:
        self._room = bundles * BUNDLE_BYTES
        self._expected: dict[RemotePath, _Expected] = {}
        self._loaded: OrderedDict[int, _Bundle] = OrderedDict()
        self._loaded_bytes = 0
        self._lock = threading.Lock()

    def expect(self, path: RemotePath, wanted: Iterable[ExpectedRange]) -> None:
        """Announce the ranges of a file that will be read, in place of earlier ones."""
        with self._lock:
            before = self._expected.get(path)
            for bundle in before.bundles if before is not None else ():
                if self._loaded.pop(id(bundle), None) is not None:
                    self._loaded_bytes -= bundle.size
            self._expected[path] = _Expected(wanted)

    def read_into(self, file: RemoteFile, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``offset`` on; a range that was not expected is requested alone.

        Raises:
            Corrupt, StorageError: as :meth:`RemoteFile.read_into`.
        """
        expected = self._expected.get(file.path)
        if expected is None or not self._fill(file, expected, offset, view):
            file.read_into(offset, view)

    def read_each(self, file: RemoteFile, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill many views, each with the bytes from its offset on.

        Raises:
            Corrupt, StorageError: as :meth:`RemoteFile.read_into`.
        """
        expected = self._expected.get(file.path)
        if expected is None or not all(expected.parts(low, low + view.nbytes) for low, view in ranges if view.nbytes):
            wanted = (ExpectedRange(low, low + view.nbytes, view.nbytes) for low, view in ranges)
            expected = _Expected(wanted)
        for low, view in ranges:
            self._fill(file, expected, low, view)

    def _fill(self, file: RemoteFile, expected: _Expected, offset: int, view: memoryview) -> bool:
        """Fill ``view`` from bundles; return False, with nothing done, if they do not cover it."""
        parts = expected.parts(offset, offset + view.nbytes)
        done = 0
        for bundle, index, low, high in parts:
            view[done : done + high - low] = memoryview(self._fetched(file, bundle)[index])[low:high]
            done += high - low
        return bool(parts)

    def _fetched(self, file: RemoteFile, bundle: _Bundle) -> Sequence[bytes]:
        with bundle.lock:
            answers = bundle.answers
            if answers is None:
                answers = bundle.answers = file.fetch(bundle.requests)
        self._note(bundle)
        return answers

    def _note(self, bundle: _Bundle) -> None:
        """Record a bundle as used, and evict the least recently used ones beyond the bound."""
        with self._lock:
            if id(bundle) not in self._loaded:
                self._loaded[id(bundle)] = bundle
                self._loaded_bytes += bundle.size
            self._loaded.move_to_end(id(bundle))
            while self._loaded_bytes > self._room and len(self._loaded) > 1:
                _, oldest = self._loaded.popitem(last=False)
                self._loaded_bytes -= oldest.size
                # A thread that is copying from it holds a reference to its answers.
                oldest.answers = None


def bundle_requests(wanted: Iterable[ExpectedRange]) -> Iterator[_Bundle]:
    """Yield the requests for ranges of one file, in bundles."""
    some: list[tuple[int, int]] = []
    size = 0
    for begin, end in _requests(wanted):
        if some and (size + end - begin > BUNDLE_BYTES or len(some) == MOST_REQUESTS):
            yield _Bundle(some)
            some, size = [], 0
        some.append((begin, end))
        size += end - begin
    if some:
        yield _Bundle(some)


def _requests(wanted: Iterable[ExpectedRange]) -> Iterator[tuple[int, int]]:
    """Yield the offsets of requests: neighbours are joined, long ranges are cut."""
    for one in _joined(sorted((one for one in wanted if one.begin < one.end), key=lambda one: (one.begin, one.end))):
        for low in range(one.begin, one.end, BUNDLE_BYTES):
            yield low, min(low + BUNDLE_BYTES, one.end)


def _joined(wanted: Iterable[ExpectedRange]) -> Iterator[ExpectedRange]:
    last: ExpectedRange | None = None
    for one in wanted:
        if last is not None:
            end, size = max(last.end, one.end), last.size + one.size
            # Overlapping ranges are always joined, so that their bytes are requested once.
            if one.begin < last.end or joins(one.begin - last.end, end - last.begin, size):
                last = ExpectedRange(last.begin, end, size)
                continue
            yield last
        last = one
    if last is not None:
        yield last
