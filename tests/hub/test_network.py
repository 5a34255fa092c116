"""Ways into the network: proxies and exceptions from them, certificates, the token's place and its limits, mirrors."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from hub_fake_server import FakeHub, Fault, running

from localspec.commands.common import hub_settings
from localspec.config import load_settings
from localspec.hub.catalogue import HubSource, entry_for_repo
from localspec.hub.pull import pull
from localspec.hub.records import HubError, HubSettings
from localspec.hub.replies import get_bytes, get_reply
from localspec.hub.sources import hub_addresses, locate_hub
from localspec.hub.web import RemoteFile, SourceUnavailable, check_etag, make_client, probe

SETTINGS = HubSettings(connect_timeout_s=1.0, stall_timeout_s=1.0)


class Proxy(BaseHTTPRequestHandler):
    """Answers every address itself and notes it."""

    seen: list[str]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.seen.append(self.path)
        body = b"from the proxy"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[str]]]:
    seen: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundProxy", (Proxy,), {"seen": seen}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    server.server_close()


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with running(FakeHub(files={"config.json": b"{}"})) as hub:
        yield hub


def text_of(settings: HubSettings, url: str) -> str:
    with make_client(settings) as client:
        return get_reply(client, RemoteFile("x", url), settings).body.decode()


@pytest.mark.parametrize(
    ("no_proxy", "by_proxy"),
    [
        ((), True),
        (("other.example",), True),
        (("models.example",), False),
        ((".example",), False),
        (("example",), False),
        (("*",), False),
        (("models.example:81",), True),
        (("ls.example",), True),
        (("10.0.0.0/8", ""), True),
    ],
    ids=str,
)
def test_no_proxy_in_the_forms_that_people_write(
    proxy: tuple[str, list[str]], no_proxy: tuple[str, ...], by_proxy: bool
) -> None:
    url, seen = proxy
    settings = replace(SETTINGS, http_proxy=url, no_proxy=no_proxy)
    if by_proxy:
        assert text_of(settings, "http://models.example/x") == "from the proxy"
        assert seen == ["http://models.example/x"]
    else:
        with pytest.raises(SourceUnavailable, match=r"models\.example cannot be reached"):
            text_of(settings, "http://models.example/x")
        assert seen == []


def test_addresses_are_direct_when_listed(proxy: tuple[str, list[str]], hub: FakeHub) -> None:
    url, seen = proxy
    settings = replace(SETTINGS, http_proxy=url.removeprefix("http://"), no_proxy=("127.0.0.1", "::1"))
    assert text_of(settings, f"{hub.hub_url}/{hub.repo}/resolve/main/config.json") == "{}"
    assert seen == []


def test_the_environment_is_read_by_the_configuration_alone(
    proxy: tuple[str, list[str]], hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert text_of(SETTINGS, f"{hub.hub_url}/{hub.repo}/resolve/main/config.json") == "{}"
    url, seen = proxy
    config = load_settings({"HTTP_PROXY": url, "NO_PROXY": "localhost, .corp.example/", "HOME": "/nowhere"})
    assert config.network.no_proxy == ("localhost", ".corp.example")
    assert text_of(hub_settings(config), "http://models.example/y") == "from the proxy"
    assert seen == ["http://models.example/y"]
    assert load_settings({"http_proxy": "a", "HTTP_PROXY": "b"}).network.http_proxy == "a"
    both = load_settings({"ALL_PROXY": "http://p:1"}).network
    assert (both.http_proxy, both.https_proxy) == ("http://p:1", "http://p:1")


@pytest.mark.parametrize("changes", [{"http_proxy": "gopher://x:1"}, {"https_proxy": "http://[::"}, {"ca_file": "/no"}])
def test_unusable_settings_are_named(changes: dict[str, str]) -> None:
    with pytest.raises(HubError, match="HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE"):
        make_client(replace(SETTINGS, **changes))


def test_own_certificates(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(HubError, match="SSL_CERT_FILE"):
        make_client(replace(SETTINGS, ca_file=str(tmp_path / "ca.pem")))
    shipped = ssl.get_default_verify_paths().cafile
    if shipped is not None:
        make_client(replace(SETTINGS, ca_file=shipped)).close()
    config = load_settings({"SSL_CERT_FILE": "/a/b.pem", "SSL_CERT_DIR": "/a"})
    assert (hub_settings(config).ca_file, hub_settings(config).ca_dir) == ("/a/b.pem", "/a")


def test_token_from_its_variable_or_its_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(" hf_secret\n")
    home = {"HF_HOME": str(tmp_path)}
    cases = [
        ({"HF_TOKEN": "hf_own", **home}, "hf_own", "HF_TOKEN"),
        ({"HUGGING_FACE_HUB_TOKEN": "hf_old", **home}, "hf_old", "HUGGING_FACE_HUB_TOKEN"),
        (home, "hf_secret", str(tmp_path / "token")),
        ({"HF_TOKEN_PATH": str(tmp_path / "token")}, "hf_secret", str(tmp_path / "token")),
        ({**home, "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}, None, "HF_TOKEN"),
        ({"HF_HOME": str(tmp_path / "absent")}, None, "HF_TOKEN"),
        ({"XDG_CACHE_HOME": str(tmp_path / "none")}, None, "HF_TOKEN"),
        ({"HF_TOKEN": "two words", "HF_HOME": "/nowhere"}, None, "HF_TOKEN"),
        ({"HF_TOKEN": "line\nbreak", "HF_HOME": "/nowhere"}, None, "HF_TOKEN"),
    ]
    for environment, token, place in cases:
        network = load_settings(environment).network
        assert (network.hub_token, network.hub_token_place) == (token, place), environment
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "token").write_bytes(b"\xff" * 100)
    assert load_settings({"XDG_CACHE_HOME": str(tmp_path)}).network.hub_token is None


@pytest.mark.parametrize(
    ("value", "offline"), [("", False), ("0", False), ("false", False), ("OFF", False), ("1", True), ("YES", True)]
)
def test_offline_by_the_hub_s_own_variable(value: str, offline: bool) -> None:
    assert load_settings({"HF_HUB_OFFLINE": value}).network.offline is offline
    assert load_settings({"LOCALSPEC_OFFLINE": value}).network.offline is offline


def test_the_token_shows_nowhere(tmp_path: Path) -> None:
    config = load_settings({"HF_TOKEN": "hf_secret", "HTTPS_PROXY": "http://u:hf_secret@p"})
    assert "hf_secret" not in repr(config) and "hf_secret" not in repr(hub_settings(config))
    remote = RemoteFile("x", "http://h/x", headers=(("Authorization", "Bearer hf_secret"),))
    assert "hf_secret" not in repr(remote)


def test_the_token_does_not_follow_a_redirect_to_another_host(hub: FakeHub) -> None:
    hub.files, hub.lfs, hub.token = {"model.safetensors": b"12345"}, {"model.safetensors"}, "hf_secret"
    settings = replace(SETTINGS, endpoint=hub.hub_url, token="hf_secret")
    with make_client(settings) as client:
        located = locate_hub(client, HubSource("acme/tiny", include=("*",)), hub.hub_url, settings)
        found = probe(client, located.files[0])
        assert get_bytes(client, found, settings, 1, 4) == b"234"
    sent = {request.path.split("/")[1]: request.authorization for request in hub.log}
    assert sent == {"api": "Bearer hf_secret", "acme": "Bearer hf_secret", "cdn": None}


def test_a_file_that_is_not_the_listed_one(hub: FakeHub) -> None:
    listed = RemoteFile("x", "http://h/x", sha256="a" * 64, etag='"' + "b" * 64 + '"')
    with pytest.raises(HubError, match="another file than the one that was listed"):
        check_etag(listed)
    check_etag(replace(listed, etag='W/"' + "a" * 64 + '"'))
    check_etag(replace(listed, etag='"short"'))
    check_etag(replace(listed, etag=None))


def test_small_replies_are_bounded(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files["config.json"] = json.dumps({"a": "b" * 100}).encode()
    remote = RemoteFile("config.json", f"{hub.hub_url}/{hub.repo}/resolve/main/config.json")
    settings = replace(SETTINGS, reply_timeout_s=0.3)
    with make_client(settings) as client:
        assert get_bytes(client, remote, settings, 0, 5) == b'{"a":'
        with pytest.raises(SourceUnavailable, match="does not serve parts"):
            get_bytes(client, remote, settings, 0, 900)
        with pytest.raises(HubError, match="at most"):
            get_bytes(client, remote, settings, 0, 1 << 40)
        hub.faults = [Fault("trickle", times=9)]
        with pytest.raises(SourceUnavailable, match="takes too long"):
            get_bytes(client, remote, settings, 0, 50)
        hub.faults, hub.serves_ranges = [], False
        with pytest.raises(SourceUnavailable, match="does not serve parts"):
            get_bytes(client, remote, settings, 0, 5)
        monkeypatch.setattr("localspec.hub.replies.MAX_REPLY_BYTES", 10)
        with pytest.raises(HubError, match="is larger than"):
            get_reply(client, remote, settings)


def test_a_client_takes_nothing_from_netrc(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login u password p\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with make_client(SETTINGS) as client:
        assert isinstance(client, httpx.Client)
        client.get(f"{hub.hub_url}/{hub.repo}/resolve/main/config.json")
    assert [request.authorization for request in hub.log] == [None]


@pytest.mark.parametrize("name", ["LOCALSPEC_HOME", "HF_HOME", "XDG_CACHE_HOME", "HF_HUB_CACHE", "HF_TOKEN_PATH"])
def test_the_home_of_nobody_is_named(name: str) -> None:
    with pytest.raises(FileNotFoundError, match="no such home") as caught:
        load_settings({name: "~no-such-user/x"})
    assert str(caught.value.filename).startswith("~no-such-user/x")


@pytest.mark.parametrize("address", ["foo", "http://", "http://[::1", "ftp://hub.example", "http://u:word@:x"])
def test_an_address_that_is_none_of_the_web_is_named(address: str) -> None:
    for settings in (replace(SETTINGS, endpoint=address), replace(SETTINGS, mirrors=(address,))):
        with pytest.raises(HubError, match="is no web address of a hub; look at HF_ENDPOINT") as caught:
            hub_addresses(HubSource("a/b", "main", include=("*.json",)), settings)
        assert "word" not in str(caught.value)


class Portal(Proxy):
    """Answers every address with the same page, as networks do before a log-in."""

    code = 200

    def do_GET(self) -> None:
        self.send_response(self.code)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"<p/>")


@pytest.mark.parametrize("code", [200, 204, 302, 400, 407, 451])
def test_where_no_hub_answers_the_mirror_is_asked(code: int, hub: FakeHub, tmp_path: Path) -> None:
    hub.files["a.safetensors"] = b"x"
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Portal,), {"code": code, "seen": []}))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    settings = replace(SETTINGS, endpoint=f"http://127.0.0.1:{server.server_port}", mirrors=(hub.hub_url,))
    entry = entry_for_repo(hub.repo)
    found = pull(entry, tmp_path, settings, dry_run=True)
    assert "127.0.0.1" in found.source and set(found.files) >= {"config.json"}
    server.shutdown()
    server.server_close()
