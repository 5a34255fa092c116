"""Small replies held in memory: listings, index pages, the beginnings of weight files. Torch-free.

Every reply is bounded in size and in time. Busy servers are asked again, unreachable ones are not. What a reply says is
checked by whoever asked.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from localspec.hub.records import HubError, HubSettings
from localspec.hub.web import (
    HTTP_PARTIAL,
    RemoteFile,
    SourceUnavailable,
    UnusableReply,
    check_response,
    host_of,
    words_of,
)

MAX_REPLY_BYTES = 32 << 20
REPLY_ATTEMPTS = 3


@dataclass(frozen=True)
class Reply:
    """A whole body and the address that it came from in the end."""

    body: bytes
    content_type: str
    url: str


def get_reply(
    client: httpx.Client, remote: RemoteFile, settings: HubSettings, headers: Mapping[str, str] | None = None
) -> Reply:
    """The body of a small file. Raises SourceUnavailable, what `check_response` raises, or HubError for a large one."""
    for attempt in range(1, REPLY_ATTEMPTS + 1):
        try:
            with client.stream("GET", remote.url, headers={**dict(remote.headers), **(headers or {})}) as response:
                check_response(response, remote)
                body = _read_body(response, remote, settings)
                return Reply(body, response.headers.get("Content-Type", ""), str(response.url))
        except SourceUnavailable:
            if attempt == REPLY_ATTEMPTS:
                raise
            time.sleep(0.3 * attempt)
        except httpx.HTTPError as error:
            raise SourceUnavailable(f"{host_of(remote.url)} cannot be reached ({words_of(error)})") from error
    raise AssertionError("the loop returns or raises")


def get_bytes(client: httpx.Client, remote: RemoteFile, settings: HubSettings, start: int, end: int) -> bytes:
    """Bytes `start` up to but not including `end` of a file.

    Raises SourceUnavailable when the server does not serve exactly those, or see `get_reply`.
    """
    if end - start > MAX_REPLY_BYTES:
        raise HubError(f"{remote.name} would take {end - start} bytes to look at, at most {MAX_REPLY_BYTES} are read")
    headers = {**dict(remote.headers), "Range": f"bytes={start}-{end - 1}"}
    try:
        with client.stream("GET", remote.url, headers=headers) as response:
            check_response(response, remote)
            stated = response.headers.get("Content-Range", "")
            if response.status_code != HTTP_PARTIAL or not stated.startswith(f"bytes {start}-{end - 1}/"):
                raise SourceUnavailable(f"{host_of(remote.url)} does not serve parts of {remote.name}")
            body = _read_body(response, remote, settings)
    except httpx.HTTPError as error:
        raise SourceUnavailable(f"{host_of(remote.url)} cannot be reached ({words_of(error)})") from error
    if len(body) != end - start:
        raise SourceUnavailable(f"{host_of(remote.url)} sent {len(body)} of {end - start} bytes of {remote.name}")
    return body


def _read_body(response: httpx.Response, remote: RemoteFile, settings: HubSettings) -> bytes:
    until_s = time.monotonic() + settings.reply_timeout_s
    body = bytearray()
    for piece in response.iter_bytes():
        body += piece
        if len(body) > MAX_REPLY_BYTES:
            raise HubError(f"the reply about {remote.name} is larger than {MAX_REPLY_BYTES >> 20} MiB")
        if time.monotonic() > until_s:
            raise SourceUnavailable(f"{host_of(remote.url)} takes too long over {remote.name}; try again later")
    return bytes(body)


def json_object(body: bytes, about: str, url: str) -> dict[str, Any]:
    """A JSON object. Raises UnusableReply that asks whether the address is a hub."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UnusableReply(f"the reply about {about} is not JSON; is {url} a hub?") from error
    if not isinstance(document, dict):
        raise UnusableReply(f"the reply about {about} is not a JSON object; is {url} a hub?")
    return document
