"""Fetches one file over HTTP: parallel ranges, resumable after any kind of end, hashed as the bytes arrive. Torch-free.

Knows addresses, sizes, ETags and hashes. Does not know hubs, wheels or models. What is on disk while a file is under
way: `NAME.part` (sparse, ranges written in place) and `NAME.part.json` (size, ETag, expected hash, finished ranges).
The sidecar may be behind the data, never ahead of it; the hash over the whole file decides in the end. A remote file
may be a stretch of a larger one (`first_byte`, `whole_bytes`); positions here count from its beginning.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from localspec.hub.layout import write_json
from localspec.hub.ranges import Span, SpanLedger
from localspec.hub.records import EXIT_MACHINE_CANNOT, HubError, HubSettings
from localspec.hub.web import (
    HTTP_OK,
    HTTP_PARTIAL,
    HTTP_RANGE_REFUSED,
    HTTP_TOO_MANY,
    CorruptFile,
    FileChanged,
    RemoteFile,
    SourceUnavailable,
    check_response,
    host_of,
    retry_after_s,
    total_size,
    words_of,
)

SIDECAR_INTERVAL_S = 1.0
WORKER_EXIT_S = 1.0
MAX_PAUSE_S = 30.0


class Transfer:
    """One file under way. `run` returns when the file is complete and its hash is right."""

    def __init__(
        self,
        client: httpx.Client,
        remote: RemoteFile,
        destination: Path,
        settings: HubSettings,
        on_bytes: Callable[[int], None],
    ) -> None:
        """`remote` must have been probed; `on_bytes` hears the change of the number of bytes held (negative: lost)."""
        self.remote = remote
        self.destination = destination
        self._client = client
        self._settings = settings
        self._on_bytes = on_bytes
        self._part = destination.with_name(destination.name + ".part")
        self._sidecar = destination.with_name(destination.name + ".part.json")
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._ledger = self._load_ledger()
        self._body_etag: str | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes that a former run left behind and that need not be fetched again."""
        return self._ledger.done_bytes

    def run(self) -> str:
        """Fetches what is missing, checks the hash, gives the file its name; returns the sha256.

        Raises FileChanged and CorruptFile (the partial file is gone then), SourceUnavailable (the partial file stays),
        HubError for refusals and a full disk (the partial file stays).
        """
        digest = hashlib.sha256()
        handle = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            self._save_ledger()
            self._fetch_ranges(handle, digest)
            os.fsync(handle)
        except (FileChanged, CorruptFile):
            self.discard()
            raise
        except OSError as error:
            raise _explain(error, self._part) from error
        finally:
            self._save_ledger_quietly()
            # Under the lock, so that a worker that is still on its way out cannot write to a reused descriptor.
            with self._lock:
                os.close(handle)
        self._check_hashes(digest.hexdigest())
        self._part.rename(self.destination)
        self._sidecar.unlink(missing_ok=True)
        return digest.hexdigest()

    def discard(self) -> None:
        """Forgets everything that was fetched of this file."""
        self._on_bytes(-self._ledger.done_bytes)
        self._ledger = SpanLedger(self._size_bytes)
        self._part.unlink(missing_ok=True)
        self._sidecar.unlink(missing_ok=True)

    @property
    def _size_bytes(self) -> int:
        if self.remote.size_bytes is None:
            raise SourceUnavailable(f"{host_of(self.remote.url)} does not say how large {self.remote.name} is")
        return self.remote.size_bytes

    def _identity(self) -> dict[str, object]:
        return {
            "size_bytes": self._size_bytes,
            "first_byte": self.remote.first_byte,
            "etag": self.remote.etag,
            "sha256": self.remote.sha256,
        }

    def _load_ledger(self) -> SpanLedger:
        """What a former run finished, if it is of the same file; anything doubtful starts afresh."""
        empty = SpanLedger(self._size_bytes)
        if (self.remote.etag is None and self.remote.sha256 is None) or not self.remote.serves_ranges:
            return empty
        try:
            document = json.loads(self._sidecar.read_text(encoding="utf-8"))
            stored_bytes = self._part.stat().st_size
            if {key: document[key] for key in self._identity()} != self._identity():
                return empty
            spans = [Span(int(start), int(end)) for start, end in document["done"]]
            return (
                SpanLedger(self._size_bytes, spans) if max((s.end for s in spans), default=0) <= stored_bytes else empty
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return empty

    def _save_ledger(self) -> None:
        with self._lock:
            done = [[span.start, span.end] for span in self._ledger.done]
        temporary = self._sidecar.with_name(self._sidecar.name + ".new")
        write_json(temporary, {**self._identity(), "done": done})
        temporary.replace(self._sidecar)

    def _save_ledger_quietly(self) -> None:
        """On a full disk the older sidecar stays, which only means that a little is fetched again."""
        try:
            if self._part.exists():
                self._save_ledger()
        except OSError:
            self._sidecar.with_name(self._sidecar.name + ".new").unlink(missing_ok=True)

    def _fetch_ranges(self, handle: int, digest: hashlib._Hash) -> None:
        """Workers fetch missing spans; this thread hashes the finished front and keeps the sidecar fresh."""
        pending = self._ledger.missing(
            self._settings.range_bytes if self.remote.serves_ranges else self._size_bytes + 1
        )
        n_workers = min(self._settings.n_connections, len(pending))
        workers = [
            threading.Thread(target=self._work, args=(handle, pending), name=f"localspec-fetch-{i}", daemon=True)
            for i in range(n_workers)
        ]
        hashed_bytes, saved_at_s = 0, time.monotonic()
        try:
            for worker in workers:
                worker.start()
            while self._failure is None:
                alive = next((worker for worker in workers if worker.is_alive()), None)
                if alive is None:
                    break
                hashed_bytes = self._hash_front(handle, digest, hashed_bytes)
                alive.join(0.05)
                if time.monotonic() - saved_at_s > SIDECAR_INTERVAL_S:
                    self._save_ledger_quietly()
                    saved_at_s = time.monotonic()
        finally:
            self._stop.set()
            for worker in workers:
                worker.join(WORKER_EXIT_S)
        if self._failure is not None:
            raise self._failure
        hashed_bytes = self._hash_front(handle, digest, hashed_bytes)
        if hashed_bytes != self._size_bytes:
            raise SourceUnavailable(f"{host_of(self.remote.url)} stopped before {self.remote.name} was complete")

    def _hash_front(self, handle: int, digest: hashlib._Hash, hashed_bytes: int) -> int:
        with self._lock:
            front_bytes = self._ledger.front_bytes
        while hashed_bytes < front_bytes:
            piece = os.pread(handle, min(4 << 20, front_bytes - hashed_bytes), hashed_bytes)
            if not piece:
                raise CorruptFile(f"{self._part} became shorter while it was written; run the command again")
            digest.update(piece)
            hashed_bytes += len(piece)
        return hashed_bytes

    def _work(self, handle: int, pending: list[Span]) -> None:
        try:
            while not self._stop.is_set():
                with self._lock:
                    if not pending:
                        return
                    span = pending.pop(0)
                self._fetch_span(handle, span)
        except BaseException as error:
            self._stop.set()
            with self._lock:
                self._failure = self._failure or _explain(error, self._part)

    def _fetch_span(self, handle: int, span: Span) -> None:
        """Tries until the span is complete; only attempts that moved no byte count against the limit."""
        position, n_failures, reason = span.start, 0, ""
        while position < span.end:
            if self._stop.is_set():
                return
            if n_failures >= self._settings.max_attempts:
                raise SourceUnavailable(
                    f"{host_of(self.remote.url)} failed {n_failures} times in a row on {self.remote.name} ({reason})"
                )
            before, pause_s = position, 0.0
            try:
                position = self._stream(handle, Span(position, span.end))
                reason = "the connection ended early"
                is_slow = False
            except _Interrupted as error:
                position, reason, pause_s, is_slow = error.position, error.reason, error.retry_after_s, error.is_slow
            n_failures = 0 if position > before and not is_slow else n_failures + 1
            if position < span.end:
                doubled_s = self._settings.backoff_s * 2 ** max(0, n_failures - 1)
                self._stop.wait(min(MAX_PAUSE_S, max(pause_s, doubled_s)))

    def _stream(self, handle: int, span: Span) -> int:
        """One request; returns the position reached, or raises _Interrupted with it."""
        first = self.remote.first_byte + span.start
        last = self.remote.first_byte + span.end - 1
        headers = {**dict(self.remote.headers), "Range": f"bytes={first}-{last}"}
        position, pace = span.start, _Pace(self._settings)
        try:
            with self._client.stream("GET", self.remote.url, headers=headers) as response:
                self._check_range(response, span)
                # Chunks as the network gives them: what a larger buffer holds is lost when the connection drops.
                # A server without ranges sends the whole file again: the part before the span is dropped.
                n_skipped = first if response.status_code == HTTP_OK else 0
                for chunk in response.iter_raw():
                    if pace.is_too_slow(len(chunk)):
                        raise _Interrupted(position, "the bytes only trickle", 0.0, is_slow=True)
                    kept = chunk[n_skipped : n_skipped + span.end - position]
                    n_skipped = max(0, n_skipped - len(chunk))
                    if not self._keep(handle, kept, position):
                        return position
                    position += len(kept)
                    self._on_bytes(len(kept))
                    if position == span.end:
                        break
        except httpx.HTTPError as error:
            raise _Interrupted(position, words_of(error), 0.0) from error
        return position

    def _keep(self, handle: int, data: bytes, position: int) -> bool:
        """Writes bytes and marks them as there; False when the transfer has ended meanwhile."""
        with self._lock:
            if self._stop.is_set():
                return False
            _write_at(handle, data, position)
            self._ledger.add(Span(position, position + len(data)))
            return True

    def _check_range(self, response: httpx.Response, span: Span) -> None:
        code = response.status_code
        if code == HTTP_TOO_MANY or code >= 500:
            raise _Interrupted(span.start, f"it answers {code}", retry_after_s(response))
        check_response(response, self.remote)
        etag = response.headers.get("ETag")
        with self._lock:
            self._body_etag = self._body_etag or etag
            changed = code == HTTP_RANGE_REFUSED or (etag is not None and etag != self._body_etag)
        total_bytes = total_size(response)
        whole_bytes = self._size_bytes if self.remote.whole_bytes is None else self.remote.whole_bytes
        if changed or (total_bytes is not None and total_bytes != whole_bytes):
            raise FileChanged(f"{self.remote.name} changed at {host_of(self.remote.url)} while it was fetched")
        stated = response.headers.get("Content-Range", "")
        if code == HTTP_PARTIAL and not stated.startswith(f"bytes {self.remote.first_byte + span.start}-"):
            raise SourceUnavailable(
                f"{host_of(self.remote.url)} sends another part ({stated!r}) than the one asked for"
            )

    def _check_hashes(self, sha256: str) -> None:
        wrong = self.remote.sha256 is not None and sha256 != self.remote.sha256
        if not wrong and self.remote.git_sha1 is not None:
            wrong = git_sha1_of(self._part) != self.remote.git_sha1
        if wrong:
            self.discard()
            raise CorruptFile(
                f"{self.remote.name} from {host_of(self.remote.url)} has the wrong hash and was thrown away"
            )


class _Interrupted(Exception):
    """A request ended before its span did."""

    def __init__(self, position: int, reason: str, retry_after_s: float, is_slow: bool = False) -> None:
        super().__init__(reason)
        self.position = position
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.is_slow = is_slow
        """Ended by us: what it brought is no reason to go on as before."""


class _Pace:
    """Whether one request brings bytes fast enough, judged once a window."""

    def __init__(self, settings: HubSettings) -> None:
        self._window_s = settings.stall_timeout_s
        self._least_bytes = settings.least_bytes_per_s * settings.stall_timeout_s
        self._since_s, self._bytes = time.monotonic(), 0

    def is_too_slow(self, n_bytes: int) -> bool:
        """Counts bytes that came; True when a window is over and brought too few."""
        self._bytes += n_bytes
        now_s = time.monotonic()
        if now_s - self._since_s < self._window_s:
            return False
        is_slow = self._bytes < self._least_bytes
        self._since_s, self._bytes = now_s, 0
        return is_slow


def git_sha1_of(path: Path) -> str:
    """The hash that git gives a file's content, which hubs state for small files."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(4 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _write_at(handle: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        n_written = os.pwrite(handle, view, position)
        view, position = view[n_written:], position + n_written


def _explain(error: BaseException, part: Path) -> BaseException:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return HubError(
            f"the disk of {part.parent} is full; what was fetched stays, free some space and run the command again",
            EXIT_MACHINE_CANNOT,
        )
    return error
