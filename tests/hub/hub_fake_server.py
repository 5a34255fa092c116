"""A real HTTP server that speaks the hub's listing, its redirects to a second host, ranges and the simple index.

Faults are scripted: each is used up by the first body request that its filter matches. Everything asked for is logged.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


@dataclass
class Fault:
    """What goes wrong with one request for the bytes of `name` ('' matches any)."""

    kind: str
    """status, drop, stall, trickle, wrong_bytes, whole (200 instead of a part), other_part, redirect (to `target`)."""
    name: str = ""
    status: int = 503
    after_bytes: int = 0
    retry_after: str | None = None
    not_before_byte: int = 0
    """Only for requests whose range starts here or later; 1 spares the first probe."""
    times: int = 1
    target: str = ""


@dataclass
class LoggedRequest:
    method: str
    path: str
    range: tuple[int, int] | None
    authorization: str | None
    sent_bytes: int = 0


@dataclass
class FakeHub:
    """State of both servers; tests change it at will."""

    repo: str = "acme/tiny"
    files: dict[str, bytes] = field(default_factory=dict)
    lfs: set[str] = field(default_factory=set)
    """Files that are served by the second host, as large ones are."""
    faults: list[Fault] = field(default_factory=list)
    token: str | None = None
    """Gated when set: requests need it."""
    licence: str = "apache-2.0"
    base_model: str | None = None
    commit: str = COMMIT
    linked_etag: str | None = None
    """What redirects state as the hash of the file; None: its own."""
    others: list[FakeHub] = field(default_factory=list)
    """Further repositories of the same hub, with files, faults and logs of their own."""
    wheels: dict[str, bytes] = field(default_factory=dict)
    html_index: bool = False
    index_hash: str | None = None
    serves_ranges: bool = True
    etags: bool = True
    bytes_per_s: float | None = None
    log: list[LoggedRequest] = field(default_factory=list)
    hub_url: str = ""
    cdn_url: str = ""
    extra_siblings: list[dict[str, Any]] = field(default_factory=list)
    listing: bytes | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def body_bytes_of(self, name: str) -> int:
        """Body bytes sent for a file, one-byte probes left out."""
        places = (f"/resolve/{self.commit}", "/resolve/main", "/files", "/cdn", f"/cdn/@{self.repo}")
        wanted = tuple(f"{place}/{name}" for place in places)
        return sum(r.sent_bytes for r in self.log if r.path.endswith(wanted) and r.range != (0, 0))

    def take_fault(self, name: str, start: int) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.name in ("", name) and start >= fault.not_before_byte:
                    fault.times -= 1
                    if fault.times == 0:
                        self.faults.remove(fault)
                    return fault
        return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: FakeHub
    hub: FakeHub
    """The repository that the request is about."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.route(body=False)

    def do_GET(self) -> None:
        self.route(body=True)

    def route(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        about = [each for each in self.root.others if f"{each.repo}/" in f"{path}/"]
        self.hub = about[0] if about else self.root
        path = path.replace(f"/cdn/@{self.hub.repo}/", "/cdn/")
        entry = LoggedRequest(self.command, path, self.parse_range(), self.headers.get("Authorization"))
        with self.hub.lock:
            self.hub.log.append(entry)
        repo = re.escape(self.hub.repo)
        if re.fullmatch(rf"/api/models/{repo}(/revision/[^/]+)?", path):
            self.answer_listing()
        elif found := re.fullmatch(rf"/{repo}/resolve/[^/]+/(.+)", path):
            self.answer_resolve(found[1], entry, body)
        elif path.startswith("/cdn/"):
            self.answer_bytes(path.removeprefix("/cdn/"), self.hub.files.get(path.removeprefix("/cdn/")), entry, body)
        elif path.startswith("/simple/"):
            self.answer_index()
        elif path.startswith("/files/"):
            self.answer_bytes(
                path.removeprefix("/files/"), self.hub.wheels.get(path.removeprefix("/files/")), entry, body
            )
        else:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def parse_range(self) -> tuple[int, int] | None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        return (int(found[1]), int(found[2])) if found else None

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refused(self) -> bool:
        if self.hub.token is None or self.headers.get("Authorization") == f"Bearer {self.hub.token}":
            return False
        status = 401 if self.headers.get("Authorization") is None else 403
        self.answer(status, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        return True

    def answer_listing(self) -> None:
        if self.refused():
            return
        fault = self.hub.take_fault("(listing)", 0) if any(f.name == "(listing)" for f in self.hub.faults) else None
        if fault is not None:
            self.answer(fault.status, b"", {})
            return
        siblings: list[dict[str, Any]] = []
        for name, data in self.hub.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_sha1(data)}
            if name in self.hub.lfs:
                entry["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        card = {"license": self.hub.licence, "base_model": self.hub.base_model}
        document = {
            "id": self.hub.repo, "modelId": self.hub.repo, "sha": self.hub.commit, "private": False, "tags": [],
            "cardData": card, "siblings": siblings + self.hub.extra_siblings,
        }  # fmt: skip
        body = self.hub.listing if self.hub.listing is not None else json.dumps(document).encode()
        self.answer(200, body, {"Content-Type": "application/json"})

    def answer_resolve(self, name: str, entry: LoggedRequest, body: bool) -> None:
        if self.refused():
            return
        data = self.hub.files.get(name)
        if data is not None and name in self.hub.lfs:
            of_other = "" if self.hub is self.root else f"@{self.hub.repo}/"
            headers = {"Location": f"{self.root.cdn_url}/cdn/{of_other}{name}", "X-Repo-Commit": self.hub.commit}
            etag = self.hub.linked_etag or sha256(data)
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{etag}"'}
            self.answer(302, b"", headers)
            return
        self.answer_bytes(name, data, entry, body)

    def answer_index(self) -> None:
        links = [
            (f"{self.hub.hub_url}/files/{n}", n, self.hub.index_hash or sha256(d)) for n, d in self.hub.wheels.items()
        ]
        if self.hub.html_index:
            rows = "".join(f'<a href="../../files/{name}#sha256={digest}">{name}</a><br/>' for _, name, digest in links)
            self.answer(200, f"<html><body>{rows}</body></html>".encode(), {"Content-Type": "text/html"})
            return
        files = [{"filename": name, "url": url, "hashes": {"sha256": digest}} for url, name, digest in links]
        body = json.dumps({"meta": {"api-version": "1.1"}, "name": "p", "files": files}).encode()
        self.answer(200, body, {"Content-Type": "application/vnd.pypi.simple.v1+json"})

    def answer_bytes(self, name: str, data: bytes | None, entry: LoggedRequest, body: bool) -> None:
        if data is None:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        asked = entry.range if self.hub.serves_ranges else None
        fault = self.hub.take_fault(name, asked[0] if asked else 0) if body else None
        if fault is not None and fault.kind == "status":
            self.answer(fault.status, b"", {"Retry-After": fault.retry_after} if fault.retry_after else {})
            return
        if fault is not None and fault.kind == "redirect":
            self.answer(302, b"", {"Location": self.path if fault.target == "/loop" else fault.target})
            return
        if fault is not None and fault.kind == "whole":
            asked = None
        headers = {"Accept-Ranges": "bytes", "X-Repo-Commit": self.hub.commit}
        if self.hub.etags:
            headers["ETag"] = f'"{git_sha1(data)}"'
        if asked is not None and asked[0] >= len(data):
            self.answer(416, b"", {**headers, "Content-Range": f"bytes */{len(data)}"})
            return
        piece, status = data, 200
        if asked is not None:
            piece, status = data[asked[0] : asked[1] + 1], 206
            first = asked[0] + (7 if fault is not None and fault.kind == "other_part" else 0)
            headers["Content-Range"] = f"bytes {first}-{first + len(piece) - 1}/{len(data)}"
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(piece)))
        self.end_headers()
        if body:
            self.send_piece(piece, entry, fault)

    def send_piece(self, piece: bytes, entry: LoggedRequest, fault: Fault | None) -> None:
        if fault is not None and fault.kind == "wrong_bytes":
            piece = bytes([piece[0] ^ 1]) + piece[1:]
        stop_at = fault.after_bytes if fault is not None and fault.kind in ("drop", "stall") else len(piece)
        is_trickle = fault is not None and fault.kind == "trickle"
        step = 1 if is_trickle else 16384
        for start in range(0, min(stop_at, len(piece)), step):
            chunk = piece[start : min(start + step, stop_at)]
            try:
                self.wfile.write(chunk)
            except OSError:
                self.close_connection = True
                return
            entry.sent_bytes += len(chunk)
            if is_trickle:
                time.sleep(0.05)
            if self.hub.bytes_per_s:
                time.sleep(len(chunk) / self.hub.bytes_per_s)
        if fault is not None and fault.kind == "stall":
            time.sleep(3.0)
        if fault is not None and fault.kind in ("drop", "stall"):
            self.close_connection = True
            self.connection.close()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that hang up are part of the tests


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    """Starts both hosts; they differ in name, so that headers must not cross from one to the other."""
    handler = type("BoundHandler", (Handler,), {"root": hub, "hub": hub})
    servers = [Server(("127.0.0.1", 0), handler) for _ in range(2)]
    hub.hub_url = f"http://127.0.0.1:{servers[0].server_port}"
    hub.cdn_url = f"http://localhost:{servers[1].server_port}"
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def cache_file(cache: Path, name: str, data: bytes, lfs: bool, repo: str = "acme/tiny") -> None:
    """A file as the hub's client lays it down: a blob named by its hash, a link in the snapshot, a ref."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    blob = folder / "blobs" / (sha256(data) if lfs else git_sha1(data))
    snapshot = folder / "snapshots" / COMMIT
    for directory in (blob.parent, snapshot, folder / "refs"):
        directory.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    (folder / "refs" / "main").write_text(COMMIT)
