"""Where a model's files are: hub listings, package index pages, the user's hub cache. Torch-free.

Knows the hub's listing call, the simple index in both its forms, and the folder layout of the hub's cache. Gives
`RemoteFile` and local paths; fetching is `hub.transfer`'s work. Every reply is bounded and checked before use.
"""

from __future__ import annotations

import fnmatch
import html.parser
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urldefrag, urljoin, urlsplit

import httpx

from localspec.hub import layout
from localspec.hub.catalogue import HubSource, WheelSource, is_repo
from localspec.hub.layout import check_file_name
from localspec.hub.records import HubError, HubSettings
from localspec.hub.replies import get_reply, json_object
from localspec.hub.web import AccessRefused, CorruptFile, NotThere, RemoteFile, UnusableReply

MAX_FILES = 500
MAX_SMALL_FILE_BYTES = layout.MAX_JSON_BYTES
"""Of everything but weights: a config or tokenizer is read into memory, and none is larger."""
WEIGHT_SUFFIXES = (".safetensors", ".gguf")
_SHA1, _SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Located:
    """The files of one source, as it states them."""

    label: str
    """For the user and the manifest: which repository, revision and host."""
    files: tuple[RemoteFile, ...]
    licence: str = ""
    commit: str = ""
    """Set when a listing was resolved, so that the result can be pinned."""
    base_model: str = ""
    """`owner/name` that the repository's card gives as its base."""


def hub_addresses(source: HubSource, settings: HubSettings) -> tuple[str, ...]:
    """Hub addresses to try, in order and without repetition. Raises HubError for one that is no web address."""
    addresses = (settings.endpoint, *source.mirrors, *settings.mirrors)
    for address in addresses:
        if not _is_web(address):
            shown = address.rpartition("@")[2]
            raise HubError(f"{shown!r} is no web address of a hub; look at HF_ENDPOINT and LOCALSPEC_HUB_MIRRORS")
    return tuple(dict.fromkeys(address.rstrip("/") for address in addresses))


def _is_web(address: str) -> bool:
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host)


def locate_hub(client: httpx.Client, source: HubSource, address: str, settings: HubSettings) -> Located:
    """Files of a repository at one hub address.

    Raises SourceUnavailable when the hub cannot be reached, AccessRefused explained for gated repositories, NotThere
    for a missing repository, UnusableReply where no hub answers, HubError for a listing that is not acceptable.
    """
    headers = _token_headers(address, settings)
    if source.files:
        files = tuple(
            RemoteFile(
                name=file.name,
                url=_resolve_url(address, source.repo, source.revision, file.name),
                size_bytes=file.size_bytes,
                sha256=file.sha256,
                headers=headers,
            )
            for file in source.files
        )
        return Located(f"{source.repo}@{source.revision} on {urlsplit(address).hostname}", files)
    url = f"{address}/api/models/{source.repo}/revision/{quote(source.revision, safe='')}?blobs=true"
    try:
        reply = get_reply(client, RemoteFile(source.repo, url, headers=headers), settings)
        listing = json_object(reply.body, source.repo, url)
    except AccessRefused as error:
        raise explain_refusal(source.repo, address, settings) from error
    except NotThere as error:
        raise NotThere(f"{urlsplit(address).hostname} has no repository {source.repo} (or it needs a token)") from error
    commit = listing.get("sha")
    if not isinstance(commit, str) or not _SHA1.fullmatch(commit):
        raise UnusableReply(f"the listing of {source.repo} names no revision; is {address} a hub?")
    files = tuple(
        _listed_file(entry, _resolve_url(address, source.repo, commit, str(entry["rfilename"])), headers)
        for entry in _wanted(listing, source)
    )
    card = listing.get("cardData")
    licence = card.get("license") if isinstance(card, dict) else None
    if not isinstance(licence, str) or len(licence) > 100 or not licence.isprintable():
        licence = ""
    base = card.get("base_model") if isinstance(card, dict) else None
    base = base[0] if isinstance(base, list) and len(base) == 1 else base
    base = base if isinstance(base, str) and is_repo(base) else ""
    label = f"{source.repo}@{commit} on {urlsplit(address).hostname}"
    return Located(label, files, licence, commit, base)


def explain_refusal(repo: str, address: str, settings: HubSettings) -> AccessRefused:
    """What a user must do about a 401 or 403."""
    page = f"{address}/{repo}"
    if settings.token is None:
        return AccessRefused(
            f"{repo} is gated or private: accept its terms at {page} and set {settings.token_variable}"
        )
    return AccessRefused(
        f"{repo} refuses the token in {settings.token_variable}: accept its terms at {page} with the token's account"
    )


def _token_headers(address: str, settings: HubSettings) -> tuple[tuple[str, str], ...]:
    """The token goes to the configured endpoint only."""
    if settings.token is None or address != settings.endpoint.rstrip("/"):
        return ()
    return (("Authorization", f"Bearer {settings.token}"),)


def _resolve_url(address: str, repo: str, revision: str, name: str) -> str:
    return f"{address}/{repo}/resolve/{quote(revision, safe='')}/{quote(name)}"


def _wanted(listing: Mapping[str, Any], source: HubSource) -> list[dict[str, Any]]:
    """Entries at the top of the repository that match the patterns."""
    siblings = listing.get("siblings")
    if not isinstance(siblings, list) or not all(isinstance(s, dict) for s in siblings):
        raise HubError(f"the listing of {source.repo} has no files")
    wanted = []
    for entry in siblings:
        name = entry.get("rfilename")
        if isinstance(name, str) and any(fnmatch.fnmatchcase(name, pattern) for pattern in source.include):
            if "/" in name and ".." not in name:
                continue
            check_file_name(name)
            size_bytes = entry.get("size")
            if not name.endswith(WEIGHT_SUFFIXES) and type(size_bytes) is int and size_bytes > MAX_SMALL_FILE_BYTES:
                limit_mib = MAX_SMALL_FILE_BYTES >> 20
                raise HubError(f"{name} of {source.repo} has {size_bytes} bytes, at most {limit_mib} MiB are taken")
            wanted.append(entry)
    if not wanted:
        offered = [str(s.get("rfilename")) for s in siblings if str(s.get("rfilename")).endswith(".gguf")][:3]
        advice = f"; name one of its GGUF files: {source.repo}:{', :'.join(offered)}" if offered else ""
        raise HubError(f"{source.repo} has no file that matches {', '.join(source.include)}{advice}")
    if len(wanted) > MAX_FILES:
        raise HubError(f"{source.repo} has {len(wanted)} files to fetch, at most {MAX_FILES} are accepted")
    return wanted


def _listed_file(entry: Mapping[str, Any], url: str, headers: tuple[tuple[str, str], ...]) -> RemoteFile:
    lfs = entry.get("lfs")
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else None
    git_sha1 = entry.get("blobId") if sha256 is None else None
    size_bytes = entry.get("size")
    return RemoteFile(
        name=str(entry["rfilename"]),
        url=url,
        size_bytes=size_bytes if type(size_bytes) is int and size_bytes >= 0 else None,
        sha256=sha256 if isinstance(sha256, str) and _SHA256.fullmatch(sha256) else None,
        git_sha1=git_sha1 if isinstance(git_sha1, str) and _SHA1.fullmatch(git_sha1) else None,
        headers=headers,
    )


def locate_wheel(client: httpx.Client, source: WheelSource, settings: HubSettings) -> RemoteFile:
    """The wheel on the index page, with the hash the catalogue pins.

    Raises SourceUnavailable when the index cannot be reached, NotThere when it lacks the wheel, CorruptFile when it
    lists the wheel with another hash.
    """
    project = re.sub(r"[-_.]+", "-", source.requirement.partition("==")[0]).lower()
    page = RemoteFile(project, f"{settings.index_url.rstrip('/')}/{project}/")
    accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
    reply = get_reply(client, page, settings, {"Accept": accept})
    read_links = _json_links if "json" in reply.content_type else _html_links
    links = read_links(reply.body, reply.url)
    for link, sha256 in links:
        if urlsplit(link).path.rpartition("/")[2] == source.wheel_name:
            if sha256 is not None and sha256 != source.wheel_sha256:
                raise CorruptFile(f"the index lists {source.wheel_name} with another hash than the catalogue pins")
            return RemoteFile(source.wheel_name, link, source.wheel_size_bytes, source.wheel_sha256)
    raise NotThere(f"the index at {urlsplit(settings.index_url).hostname} has no {source.wheel_name}")


def _json_links(body: bytes, base_url: str) -> list[tuple[str, str | None]]:
    try:
        files = json.loads(body)["files"]
        return [(_web_url(base_url, file["url"]), file.get("hashes", {}).get("sha256")) for file in files]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HubError(f"the index page {base_url} is not in a known form") from error


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _html_links(body: bytes, base_url: str) -> list[tuple[str, str | None]]:
    anchors = _Anchors()
    anchors.feed(body.decode("utf-8", "replace"))
    links: list[tuple[str, str | None]] = []
    for reference in anchors.links:
        link, fragment = urldefrag(_web_url(base_url, reference))
        links.append((link, fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None))
    return links


def _web_url(base_url: str, reference: str) -> str:
    try:
        url = urljoin(base_url, reference)
        is_web = _is_web(url)
    except ValueError:
        is_web = False
    if not is_web:
        raise HubError(f"the index page {base_url} links to {reference!r}, only web addresses are followed")
    return url


def cached_blob(settings: HubSettings, source: HubSource, remote: RemoteFile) -> Path | None:
    """The file in the user's hub cache, where blobs are named by their hash; None when it is not there whole."""
    name = remote.sha256 or remote.git_sha1
    if settings.hub_cache_dir is None or name is None:
        return None
    blob = Path(settings.hub_cache_dir) / f"models--{source.repo.replace('/', '--')}" / "blobs" / name
    fits = blob.is_file() and remote.size_bytes in (None, blob.stat().st_size)
    return blob if fits else None


def locate_in_cache(settings: HubSettings, source: HubSource) -> Located | None:
    """A repository's files as the user's hub cache knows them, for work without a network."""
    if settings.hub_cache_dir is None:
        return None
    if source.files:
        files = tuple(RemoteFile(f.name, "", f.size_bytes, f.sha256) for f in source.files)
        return Located(f"{source.repo}@{source.revision} in the hub cache", files)
    folder = Path(settings.hub_cache_dir) / f"models--{source.repo.replace('/', '--')}"
    try:
        commit = (folder / "refs" / source.revision).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    if not _SHA1.fullmatch(commit) or not (folder / "snapshots" / commit).is_dir():
        return None
    found = []
    for path in sorted((folder / "snapshots" / commit).iterdir()):
        blob = path.resolve().name
        if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in source.include) and path.is_file():
            is_lfs = _SHA256.fullmatch(blob) is not None
            found.append(
                RemoteFile(
                    check_file_name(path.name),
                    "",
                    path.stat().st_size,
                    blob if is_lfs else None,
                    blob if _SHA1.fullmatch(blob) else None,
                )
            )
    return Located(f"{source.repo}@{commit} in the hub cache", tuple(found)) if found else None
