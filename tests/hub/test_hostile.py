"""A repository made by an attacker: code, huge files, escapes in texts, odd headers, redirects; all refused plainly."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from hub_fake_server import FakeHub, Fault, running
from safetensors.numpy import save

from localspec.hub import layout
from localspec.hub.catalogue import Catalogue, entry_for_repo
from localspec.hub.get import Wish, get
from localspec.hub.importing import import_path
from localspec.hub.local import list_installed, remove
from localspec.hub.records import HubError, HubSettings
from localspec.hub.web import RemoteFile, check_response, total_size

CONFIG = {"model_type": "llama", "auto_map": {"AutoModel": "evil.Model"}, "architectures": ["../../x"]}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": save({"w": np.zeros(64, np.float32)}),
        "evil.py": b"raise SystemExit('code of a repository ran')",
        "pytorch_model.bin": b"a pickle",
    }
    with running(FakeHub(files=files)) as hub:
        yield hub


def settings_of(hub: FakeHub) -> HubSettings:
    return HubSettings(endpoint=hub.hub_url, stall_timeout_s=5.0, max_attempts=2, backoff_s=0.01, allow_pip=False)


def pull(hub: FakeHub, data_dir: Path) -> Path:
    (result, *_) = get(Catalogue(()), Wish("acme/tiny"), data_dir, settings_of(hub))
    return Path(result.directory)


def test_code_and_pickles_stay_where_they_are(hub: FakeHub, tmp_path: Path) -> None:
    folder = pull(hub, tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "localspec.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert not any(request.path.endswith((".py", ".bin")) for request in hub.log)


def test_a_repository_of_pickles_alone_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(HubError, match=r"has no \*\.safetensors file"):
        pull(hub, tmp_path)
    assert list_installed(tmp_path) == ()


def test_weights_without_a_config_are_not_fetched(hub: FakeHub, tmp_path: Path) -> None:
    del hub.files["config.json"]
    hub.files["adapter_config.json"] = b"{}"
    with pytest.raises(HubError, match=r"has no config\.json"):
        pull(hub, tmp_path)
    assert not any("/resolve/" in request.path for request in hub.log)


def test_a_config_of_many_gigabytes_is_not_fetched(hub: FakeHub, tmp_path: Path) -> None:
    hub.extra_siblings = [{"rfilename": "extra.json", "size": 1 << 40, "blobId": "0" * 40}]
    with pytest.raises(HubError, match="at most 64 MiB are taken"):
        pull(hub, tmp_path)
    assert all(request.path.startswith("/api/") for request in hub.log)


@pytest.mark.parametrize("size", [-1, 1.5, True, "9", None, 1 << 80])
def test_sizes_that_a_listing_makes_up(hub: FakeHub, tmp_path: Path, size: object) -> None:
    """What the listing says is believed only where the reply agrees."""
    wrong = {"rfilename": "model.safetensors", "size": size, "blobId": "0" * 40, "lfs": {"sha256": "ab" * 32}}
    hub.listing = json.dumps({"sha": "c" * 40, "siblings": [{"rfilename": "config.json"}, wrong]}).encode()
    with pytest.raises(HubError):
        pull(hub, tmp_path)
    assert list_installed(tmp_path) == ()


@pytest.mark.parametrize(
    "licence",
    ["\x1b]0;owned\x07", "a" * 5000, ["mit"], {"a": 1}, "\u202e", None],
    ids=["escape", "long", "list", "object", "turned around", "none"],
)
def test_texts_of_a_listing_never_reach_a_terminal_raw(hub: FakeHub, tmp_path: Path, licence: object) -> None:
    hub.licence = licence  # type: ignore[assignment]
    manifest = layout.read_manifest(pull(hub, tmp_path))
    assert manifest.licence == "not stated"


def test_architectures_are_shown_quoted(hub: FakeHub, tmp_path: Path) -> None:
    hub.files["config.json"] = json.dumps({"model_type": "\x1b[2Jx"}).encode()
    with pytest.raises(HubError) as caught:
        pull(hub, tmp_path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "config",
    [b"[" * 100_000, b'{"model_type": ' + b"9" * 5000 + b"}", b"\xff\xfe", b'{"a":1e999}', b"[]", b"null", b""],
)
def test_a_config_that_is_none(hub: FakeHub, tmp_path: Path, config: bytes) -> None:
    hub.files["config.json"] = config
    with pytest.raises(HubError):
        pull(hub, tmp_path)
    assert hub.body_bytes_of("model.safetensors") == 0


@pytest.mark.parametrize("value", ["9" * 5000, "-1", "0x10", "1e9", "\u0663", ""], ids=range(6))
def test_headers_that_are_no_sizes(value: str) -> None:
    request = httpx.Request("GET", "http://h/x")
    headers = [(b"Content-Length", value.encode()), (b"Content-Range", b"bytes 0-0/" + value.encode())]
    for status in (200, 206):
        reply = httpx.Response(status, headers=headers, request=request)
        assert total_size(reply) in (None, 3)


def test_https_does_not_fall_back_to_http() -> None:
    first = httpx.Response(302, request=httpx.Request("GET", "https://h/x"))
    last = httpx.Response(200, request=httpx.Request("GET", "http://h/x"), history=[first])
    with pytest.raises(HubError, match="redirects from https to plain http"):
        check_response(last, RemoteFile("x", "https://h/x"))


@pytest.mark.parametrize("target", ["file:///etc/passwd", "gopher://h/", "http://[::bad/", "/loop"])
def test_redirects_to_nowhere(hub: FakeHub, tmp_path: Path, target: str) -> None:
    hub.faults = [Fault("redirect", target=target, times=1000)]
    with pytest.raises(HubError):
        pull(hub, tmp_path)
    assert list_installed(tmp_path) == ()


def test_links_in_a_folder_that_is_imported(tmp_path: Path) -> None:
    """A link to a file is followed, as hub caches consist of them; pipes and folders under a file's name are not."""
    folder = tmp_path / "own"
    folder.mkdir()
    (tmp_path / "elsewhere.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "config.json").symlink_to(tmp_path / "elsewhere.json")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(save({"w": np.zeros(4, np.float32)}))
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "dir.safetensors").mkdir()
    (folder / "loop.json").symlink_to("loop.json")
    result = import_path(folder, tmp_path / "data")
    names = {path.name: path for path in Path(result.directory).iterdir()}
    assert set(names) == {"config.json", "tokenizer.json", "model.safetensors", "localspec.json"}
    assert not names["config.json"].is_symlink()


def test_a_linked_model_is_removed_without_its_target(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "file").write_text("mine")
    (tmp_path / "data" / "models").mkdir(parents=True)
    (tmp_path / "data" / "models" / "linked").symlink_to(target)
    remove(tmp_path / "data", "linked")
    assert (target / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "name", ["a/..", "../a", "a/b/c", "a b/c", "-a/b", "a/\x1b", "a/b:../../x.gguf", "a/b:x\n.gguf"]
)
def test_addresses_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(HubError) as caught:
        get(Catalogue((entry_for_repo("x/y"),)), Wish(name), tmp_path, HubSettings(endpoint="http://127.0.0.1:9"))
    assert str(caught.value).isprintable()
    with pytest.raises(HubError):
        get(Catalogue(()), replace(Wish("x/y"), drafters=(f"eagle3={name}",)), tmp_path, HubSettings())
