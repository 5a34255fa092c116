"""One HTTP request of the hub: the client's limits, what a file's address states, what a status code means. Torch-free.

Knows no ranges and no disk (`hub.transfer`), and no listings (`hub.sources`).
"""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field, replace

import httpx

from localspec.hub.records import HubError, HubSettings

HTTP_OK, HTTP_PARTIAL, HTTP_RANGE_REFUSED, HTTP_TOO_MANY = 200, 206, 416, 429


class SourceUnavailable(HubError):
    """This source cannot give the file now; the next one may."""


class AccessRefused(HubError):
    """The source wants a token, or another one, or an accepted licence (401, 403)."""


class NotThere(HubError):
    """The source has no such file (404, 410)."""


class UnusableReply(HubError):
    """What answers there is no hub, or will not serve us; another address may."""


class FileChanged(HubError):
    """The file behind the address is another one than when the transfer began."""


class CorruptFile(HubError):
    """All bytes are here and their hash is wrong."""


@dataclass(frozen=True)
class RemoteFile:
    """A file to fetch. `size_bytes` and hashes are what the source or the catalogue states; None: not stated."""

    name: str
    url: str
    size_bytes: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None
    etag: str | None = None
    serves_ranges: bool = True
    first_byte: int = 0
    """Where the wanted bytes begin in the file behind the address; `size_bytes` counts the wanted ones only."""
    whole_bytes: int | None = None
    """Size of the file behind the address, where only a part of it is wanted."""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Extra request headers (an access token); the HTTP client drops them when a redirect leaves the host."""


def make_client(settings: HubSettings) -> httpx.Client:
    """An HTTP client with bounded waits. Connections are not retried by it: the range loop decides that.

    The environment is not looked at: a .netrc there would send credentials to hosts that this program did not choose.
    Raises HubError for a proxy or certificates that cannot be used.
    """
    n_connections = settings.n_connections + 2
    limits = httpx.Limits(max_connections=n_connections, max_keepalive_connections=n_connections)
    try:
        trusted = _trusted(settings)
        return httpx.Client(
            follow_redirects=True,
            max_redirects=8,
            timeout=httpx.Timeout(settings.stall_timeout_s, connect=settings.connect_timeout_s),
            limits=limits,
            verify=trusted,
            mounts=_proxy_mounts(settings, limits, trusted),
            trust_env=False,
            headers={"User-Agent": "localspec", "Accept-Encoding": "identity"},
        )
    except (OSError, ValueError, ImportError, httpx.InvalidURL) as error:
        raise HubError(
            f"the proxy or certificate settings cannot be used ({error}); look at HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE"
        ) from error


def _trusted(settings: HubSettings) -> ssl.SSLContext | bool:
    if settings.ca_file is None and settings.ca_dir is None:
        return True
    return ssl.create_default_context(cafile=settings.ca_file, capath=settings.ca_dir)


def _proxy_mounts(
    settings: HubSettings, limits: httpx.Limits, trusted: ssl.SSLContext | bool
) -> dict[str, httpx.BaseTransport | None]:
    """Transports by address pattern; None is the direct one. The longest pattern that fits an address counts."""
    mounts: dict[str, httpx.BaseTransport | None] = {}
    for scheme, proxy in (("http://", settings.http_proxy), ("https://", settings.https_proxy)):
        if proxy is not None:
            address = proxy if "://" in proxy else f"http://{proxy}"
            mounts[scheme] = httpx.HTTPTransport(proxy=address, limits=limits, verify=trusted)
    if not mounts or "*" in settings.no_proxy:
        return {}
    for host in settings.no_proxy:
        mounts.update(dict.fromkeys(_direct_patterns(host)))
    return mounts


def _direct_patterns(host: str) -> tuple[str, ...]:
    """Patterns of a NO_PROXY entry: a name stands for itself and for names below it; networks are not known here."""
    if "/" in host or not host.strip("."):
        return ()
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        name = host.removeprefix("*").removeprefix(".")
        return (f"all://{name}", f"all://*.{name}")
    return (f"all://[{host.strip('[]')}]" if ":" in host else f"all://{host}",)


def probe(client: httpx.Client, remote: RemoteFile) -> RemoteFile:
    """Fills in size and ETag by asking for one byte. Raises SourceUnavailable or HubError for a refusal."""
    headers = {**dict(remote.headers), "Range": "bytes=0-0"}
    try:
        with client.stream("GET", remote.url, headers=headers) as response:
            check_response(response, remote)
            size_bytes = total_size(response)
            # A hub states the file's own ETag on the redirect; that of the host behind it may differ from host to host.
            linked = [hop.headers["X-Linked-ETag"] for hop in response.history if "X-Linked-ETag" in hop.headers]
            etag = (linked or [response.headers.get("ETag")])[0]
            serves_ranges = response.status_code != HTTP_OK
    except httpx.HTTPError as error:
        raise SourceUnavailable(f"{host_of(remote.url)} cannot be reached ({words_of(error)})") from error
    if remote.size_bytes is not None and size_bytes is not None and size_bytes != remote.size_bytes:
        raise CorruptFile(
            f"{remote.name} has {size_bytes} bytes at {host_of(remote.url)}, {remote.size_bytes} are expected"
        )
    size_bytes = size_bytes if size_bytes is not None else remote.size_bytes
    return replace(remote, size_bytes=size_bytes, etag=etag, serves_ranges=serves_ranges)


def total_size(response: httpx.Response) -> int | None:
    """Size of the whole file in bytes as the reply states it, also when it carries a part only."""
    if response.status_code == HTTP_PARTIAL:
        return _natural(response.headers.get("Content-Range", "").rpartition("/")[2])
    if response.status_code == HTTP_RANGE_REFUSED:
        return 0
    return _natural(response.headers.get("Content-Length", ""))


def _natural(text: str) -> int | None:
    """A size of a header; more digits than any file needs are no size."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None


def check_response(response: httpx.Response, remote: RemoteFile) -> None:
    """Passes 200, 206 and 416; raises SourceUnavailable for 429 and 5xx, what fits the code for everything else, and
    HubError for a redirect out of https."""
    code = response.status_code
    if any(hop.url.scheme == "https" for hop in response.history) and response.url.scheme != "https":
        raise HubError(f"{host_of(remote.url)} redirects from https to plain http, which is refused")
    if code in (HTTP_OK, HTTP_PARTIAL, HTTP_RANGE_REFUSED):
        return
    if code == HTTP_TOO_MANY or code >= 500:
        raise SourceUnavailable(f"{host_of(remote.url)} answers {code}; try again later")
    kinds = {401: AccessRefused, 403: AccessRefused, 404: NotThere, 410: NotThere}
    raise kinds.get(code, UnusableReply)(f"{remote.name} cannot be fetched: {host_of(remote.url)} answers {code}")


def retry_after_s(response: httpx.Response) -> float:
    """Seconds of a Retry-After header; the date form is rare and treated as absent."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0


def check_etag(remote: RemoteFile) -> None:
    """Where a hub names a file's content by its hash, the file behind the address must be the listed one.

    Raises FileChanged when it is not.
    """
    etag = (remote.etag or "").removeprefix("W/").strip('"')
    if remote.sha256 is not None and len(etag) == len(remote.sha256) and etag != remote.sha256:
        raise FileChanged(f"{remote.name} at {host_of(remote.url)} is another file than the one that was listed")


def host_of(url: str) -> str:
    """The host, for messages: an address may carry a signature."""
    return httpx.URL(url).host


def words_of(error: httpx.HTTPError) -> str:
    """What happened, also for errors without a text."""
    return str(error) or type(error).__name__
