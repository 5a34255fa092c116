"""Pulling from a hub, an index and the hub's cache: order of sources, refusals, disk, resume after a kill."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hub_fake_server import COMMIT, FakeHub, Fault, cache_file, running, sha256
from hub_gguf_samples import SampleModel, write_model
from safetensors.numpy import save

from localspec.hub import layout, sources
from localspec.hub.catalogue import (
    Catalogue,
    DrafterEntry,
    HubSource,
    ModelEntry,
    PinnedFile,
    WheelSource,
    drafter_entry,
    entry_for_repo,
    load_catalogue,
)
from localspec.hub.local import list_installed, remove, verify
from localspec.hub.pull import drafters_directory, pull
from localspec.hub.records import HubError, HubSettings, PullProgress
from localspec.hub.web import SourceUnavailable
from localspec.hub.wheel import extract_member

GGUF, WHEEL = "tiny.gguf", "tiny_model-1.0-py3-none-any.whl"
UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / GGUF
    write_model(path, SampleModel())
    return path.read_bytes()


def wheel_of(data: bytes, member: str = f"tiny_model/{GGUF}") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('a wheel must never be imported')")
        archive.writestr(member, data)
        for name, text in {
            "METADATA": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }.items():
            archive.writestr(f"tiny_model-1.0.dist-info/{name}", text)
    return buffer.getvalue()


@pytest.fixture
def hub(gguf_bytes: bytes) -> Iterator[FakeHub]:
    hub = FakeHub(files={GGUF: gguf_bytes}, lfs={GGUF}, wheels={WHEEL: wheel_of(gguf_bytes)})
    with running(hub):
        yield hub


def settings_for(hub: FakeHub, **changes: object) -> HubSettings:
    plain = HubSettings(
        endpoint=hub.hub_url, index_url=f"{hub.hub_url}/simple", connect_timeout_s=1.0, stall_timeout_s=0.5,
        max_attempts=2, backoff_s=0.01, range_bytes=50_000, allow_pip=False,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def hub_source(data: bytes) -> HubSource:
    return HubSource("acme/tiny", files=(PinnedFile(GGUF, len(data), sha256(data)),))


def wheel_source(hub: FakeHub, data: bytes) -> WheelSource:
    wheel = hub.wheels[WHEEL]
    return WheelSource(
        "tiny-model==1.0", WHEEL, len(wheel), sha256(wheel), f"tiny_model/{GGUF}", len(data), sha256(data)
    )


def entry_with(*sources: HubSource | WheelSource) -> ModelEntry:
    return ModelEntry(
        id="tiny", title="Tiny", architecture="llama", format="gguf", licence="apache-2.0", sources=sources,
        demo=True, advice="Pull a larger one.", sampling={"default": {"temperature": 0.2}},
    )  # fmt: skip


def installed_names(result_directory: str) -> set[str]:
    return {path.name for path in Path(result_directory).iterdir()}


EXPECTED_NAMES = {
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors",
    "localspec.json",
}  # fmt: skip


def test_pull_from_the_hub_installs_and_the_second_pull_does_nothing(
    hub: FakeHub, gguf_bytes: bytes, tmp_path: Path
) -> None:
    seen: list[PullProgress] = []
    result = pull(entry_with(hub_source(gguf_bytes)), tmp_path, settings_for(hub), seen.append)
    assert installed_names(result.directory) == EXPECTED_NAMES
    manifest = layout.read_manifest(Path(result.directory))
    assert manifest.notes == ("demo", "Pull a larger one.")
    assert manifest.source == "acme/tiny@main on 127.0.0.1"
    assert manifest.files["model.safetensors"].sha256 == layout.sha256_of(Path(result.directory) / "model.safetensors")
    generation = json.loads((Path(result.directory) / "generation_config.json").read_text())
    assert generation["temperature"] == 0.2 and generation["do_sample"] is True
    for path in [Path(result.directory), *Path(result.directory).iterdir()]:
        assert path.stat().st_mode & 0o077 == 0, path
    assert sorted(p.name for p in (tmp_path / "models").iterdir()) == [".partial", "tiny"]
    assert list((tmp_path / "models" / ".partial").iterdir()) == []
    stages = [p.stage for p in seen if p.stage != "note"]
    assert list(dict.fromkeys(stages)) == ["locate", "download", "convert", "publish", "done"]
    downloads = [p.done_bytes for p in seen if p.stage == "download"]
    assert downloads == sorted(downloads) and downloads[-1] == len(gguf_bytes)
    hub.log = []
    again = pull(entry_with(hub_source(gguf_bytes)), tmp_path, settings_for(hub))
    assert again.already_installed and hub.log == []


def test_unreachable_hub_is_said_and_the_wheel_is_taken(hub: FakeHub, gguf_bytes: bytes, tmp_path: Path) -> None:
    seen: list[PullProgress] = []
    entry = entry_with(hub_source(gguf_bytes), wheel_source(hub, gguf_bytes))
    began_s = time.monotonic()
    result = pull(entry, tmp_path, settings_for(hub, endpoint=UNREACHABLE), seen.append)
    assert time.monotonic() - began_s < 5
    assert result.source == "wheel tiny-model==1.0"
    assert installed_names(result.directory) == EXPECTED_NAMES
    assert any("127.0.0.1 cannot be reached" in p.message for p in seen if p.stage == "note")
    assert "tiny_model" not in sys.modules


@pytest.mark.parametrize("html", [False, True], ids=["json", "html"])
def test_both_index_forms(hub: FakeHub, gguf_bytes: bytes, tmp_path: Path, html: bool) -> None:
    hub.html_index = html
    result = pull(entry_with(wheel_source(hub, gguf_bytes)), tmp_path, settings_for(hub))
    assert installed_names(result.directory) == EXPECTED_NAMES


def test_pip_is_tried_when_the_index_does_not_answer(
    hub: FakeHub, gguf_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*arguments: object) -> None:
        raise SourceUnavailable("the index cannot be reached (no certificate)")

    monkeypatch.setattr(sources, "locate_wheel", unreachable)
    entry = entry_with(wheel_source(hub, gguf_bytes))
    with pytest.raises(HubError, match="no certificate"):
        pull(entry, tmp_path, settings_for(hub))
    result = pull(entry, tmp_path, settings_for(hub, allow_pip=True))
    assert installed_names(result.directory) == EXPECTED_NAMES
    hub.wheels.clear()
    with pytest.raises(HubError, match=r"pip could not fetch tiny-model==1\.0"):
        pull(entry, tmp_path / "2", settings_for(hub, allow_pip=True))


def test_hub_and_wheel_give_the_same_model(hub: FakeHub, gguf_bytes: bytes, tmp_path: Path) -> None:
    one = pull(entry_with(hub_source(gguf_bytes)), tmp_path / "1", settings_for(hub))
    two = pull(entry_with(wheel_source(hub, gguf_bytes)), tmp_path / "2", settings_for(hub))
    prints = [layout.read_manifest(Path(r.directory)).fingerprint for r in (one, two)]
    assert prints[0] == prints[1]


def test_mirror_is_tried_and_gets_no_token(hub: FakeHub, gguf_bytes: bytes, tmp_path: Path) -> None:
    settings = settings_for(hub, endpoint=UNREACHABLE, mirrors=(hub.hub_url,), token="secret")
    result = pull(entry_with(hub_source(gguf_bytes)), tmp_path, settings)
    assert installed_names(result.directory) == EXPECTED_NAMES
    assert {r.authorization for r in hub.log} == {None}


def test_dry_run_states_sizes_and_writes_no_model(hub: FakeHub, gguf_bytes: bytes, tmp_path: Path) -> None:
    result = pull(entry_with(hub_source(gguf_bytes)), tmp_path, settings_for(hub), dry_run=True)
    assert dict(result.files) == {GGUF: len(gguf_bytes)} and result.dry_run
    assert not Path(result.directory).exists()
    assert hub.body_bytes_of(GGUF) == 0


@pytest.mark.parametrize("token", [None, "wrong"])
def test_gated_model_is_explained(hub: FakeHub, gguf_bytes: bytes, tmp_path: Path, token: str | None) -> None:
    hub.token = "right"
    with pytest.raises(HubError) as caught:
        pull(entry_with(hub_source(gguf_bytes)), tmp_path, settings_for(hub, token=token))
    assert f"{hub.hub_url}/acme/tiny" in str(caught.value) and "HF_TOKEN" in str(caught.value)
    assert "wrong" not in str(caught.value)
    pull(entry_with(hub_source(gguf_bytes)), tmp_path, settings_for(hub, token="right"))


def test_too_small_disk_is_refused_before_the_first_byte(
    hub: FakeHub, gguf_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "free_bytes", lambda directory: 64 << 20)
    with pytest.raises(HubError, match=r"needs 0\.07 GB on the disk of .*, 0\.07 GB are free") as caught:
        pull(entry_with(hub_source(gguf_bytes)), tmp_path, settings_for(hub))
    assert caught.value.exit_code == 3
    assert hub.body_bytes_of(GGUF) == 0


def test_wrong_bytes_are_fetched_again_once_then_refused(hub: FakeHub, gguf_bytes: bytes, tmp_path: Path) -> None:
    hub.faults = [Fault("wrong_bytes", not_before_byte=1)]
    pull(entry_with(hub_source(gguf_bytes)), tmp_path / "1", settings_for(hub))
    hub.faults = [Fault("wrong_bytes", not_before_byte=1, times=1000)]
    with pytest.raises(HubError, match="wrong hash"):
        pull(entry_with(hub_source(gguf_bytes)), tmp_path / "2", settings_for(hub))
    assert [p.name for p in (tmp_path / "2" / "models").iterdir()] == [".partial"]


def test_other_file_of_the_same_size_is_refused(hub: FakeHub, gguf_bytes: bytes, tmp_path: Path) -> None:
    pinned = hub_source(gguf_bytes)
    hub.files[GGUF] = gguf_bytes[:-1] + b"\x01"
    with pytest.raises(HubError, match="wrong hash"):
        pull(entry_with(pinned), tmp_path, settings_for(hub))


def test_index_with_another_hash_is_refused(hub: FakeHub, gguf_bytes: bytes, tmp_path: Path) -> None:
    hub.index_hash = "0" * 64
    with pytest.raises(HubError, match="another hash than the catalogue pins"):
        pull(entry_with(wheel_source(hub, gguf_bytes)), tmp_path, settings_for(hub))


@pytest.mark.parametrize("case", ["other member", "other bytes", "longer member", "no zip", "member with dots"])
def test_hostile_wheels(hub: FakeHub, gguf_bytes: bytes, tmp_path: Path, case: str) -> None:
    member = f"tiny_model/{GGUF}"
    if case == "other member":
        hub.wheels[WHEEL] = wheel_of(gguf_bytes, "tiny_model/else.gguf")
    elif case == "other bytes":
        hub.wheels[WHEEL] = wheel_of(gguf_bytes[:-1] + b"\x01")
    elif case == "longer member":
        hub.wheels[WHEEL] = wheel_of(gguf_bytes + b"\0" * 10_000_000)
    elif case == "no zip":
        hub.wheels[WHEEL] = b"PK" + b"\0" * 5000
    else:
        member = "../../evil.gguf"
        hub.wheels[WHEEL] = wheel_of(gguf_bytes, member)
    source = replace(wheel_source(hub, gguf_bytes), member=member)
    with pytest.raises(HubError, match=r"is not the file|readable form|is refused"):
        pull(entry_with(source), tmp_path, settings_for(hub))
    assert not (tmp_path / "models" / "tiny").exists()
    assert not (tmp_path / "evil.gguf").exists() and not (tmp_path / "models" / "evil.gguf").exists()


def test_a_member_that_unpacks_to_far_more_is_cut(hub: FakeHub, tmp_path: Path) -> None:
    path = tmp_path / WHEEL
    path.write_bytes(wheel_of(b"\0" * 50_000_000))
    source = WheelSource("t==1", WHEEL, 1, "0" * 64, f"tiny_model/{GGUF}", 1000, "0" * 64)
    taken: list[int] = []
    with pytest.raises(HubError, match="is not the file"):
        extract_member(path, source, tmp_path / "out", taken.append)
    assert sum(taken) < 2_000_000 and not (tmp_path / "out").exists()


def test_damaged_gguf_leaves_no_model(hub: FakeHub, gguf_bytes: bytes, tmp_path: Path) -> None:
    hub.files[GGUF] = gguf_bytes[:-4000]
    with pytest.raises(HubError, match="does not lie inside the file"):
        pull(entry_with(hub_source(hub.files[GGUF])), tmp_path, settings_for(hub))
    assert [p.name for p in (tmp_path / "models").iterdir()] == [".partial"]


def test_two_pulls_at_once(hub: FakeHub, gguf_bytes: bytes, tmp_path: Path) -> None:
    messages = []

    def meddle(progress: PullProgress) -> None:
        if progress.stage == "download" and not messages:
            with pytest.raises(HubError, match="being pulled by another process") as caught:
                pull(entry_with(hub_source(gguf_bytes)), tmp_path, settings_for(hub))
            messages.append(str(caught.value))

    pull(entry_with(hub_source(gguf_bytes)), tmp_path, settings_for(hub), meddle)
    assert len(messages) == 1


def test_force_replaces_an_installed_model(hub: FakeHub, gguf_bytes: bytes, tmp_path: Path) -> None:
    entry = entry_with(hub_source(gguf_bytes))
    first = Path(pull(entry, tmp_path, settings_for(hub)).directory)
    (first / "model.safetensors").write_bytes(b"damaged")
    pull(entry, tmp_path, settings_for(hub), force=True)
    manifest = layout.read_manifest(first)
    assert layout.sha256_of(first / "model.safetensors") == manifest.files["model.safetensors"].sha256
    assert sorted(p.name for p in (tmp_path / "models").iterdir()) == [".partial", "tiny"]


@pytest.mark.parametrize("damage", ["cut", "lacking", "manifest"])
def test_what_is_seen_to_be_damaged_is_mended_by_a_plain_pull(
    hub: FakeHub, gguf_bytes: bytes, tmp_path: Path, damage: str
) -> None:
    """Errors say 'pull the model again', so that has to help."""
    entry = entry_with(hub_source(gguf_bytes))
    first = Path(pull(entry, tmp_path, settings_for(hub)).directory)
    if damage == "lacking":
        (first / "config.json").unlink()
    elif damage == "manifest":
        (first / layout.MANIFEST_NAME).write_text("{")
    else:
        (first / "model.safetensors").write_bytes((first / "model.safetensors").read_bytes()[:1000])
    assert not pull(entry, tmp_path, settings_for(hub)).already_installed
    assert verify(tmp_path, "tiny") == ()
    assert pull(entry, tmp_path, settings_for(hub)).already_installed


KILLED = """
import sys
from pathlib import Path
from localspec.hub.catalogue import HubSource, ModelEntry, PinnedFile
from localspec.hub.pull import drafters_directory, pull
from localspec.hub.records import HubSettings
url, data, size, digest = sys.argv[1:]
entry = ModelEntry(id="tiny", title="Tiny", architecture="llama", format="gguf", licence="x",
                   sources=(HubSource("acme/tiny", files=(PinnedFile("tiny.gguf", int(size), digest),)),))
pull(entry, Path(data), HubSettings(endpoint=url, range_bytes=50_000))
"""


def test_kill_9_then_resume_fetches_only_the_rest(hub: FakeHub, gguf_bytes: bytes, tmp_path: Path) -> None:
    hub.bytes_per_s = len(gguf_bytes) / 8
    part = tmp_path / "models" / ".partial" / "tiny" / f"{GGUF}.part.json"
    command = [sys.executable, "-c", KILLED, hub.hub_url, str(tmp_path), str(len(gguf_bytes)), sha256(gguf_bytes)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    try:
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s and process.poll() is None:
            if part.exists() and sum(e - s for s, e in json.loads(part.read_text())["done"]) > 20_000:
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    held = sum(e - s for s, e in json.loads(part.read_text())["done"])
    assert 20_000 < held < len(gguf_bytes)
    hub.bytes_per_s, hub.log = None, []
    result = pull(entry_with(hub_source(gguf_bytes)), tmp_path, settings_for(hub))
    assert installed_names(result.directory) == EXPECTED_NAMES
    assert hub.body_bytes_of(GGUF) == len(gguf_bytes) - held


def test_file_in_the_hub_cache_is_used_also_offline(hub: FakeHub, gguf_bytes: bytes, tmp_path: Path) -> None:
    cache_file(tmp_path / "cache", GGUF, gguf_bytes, lfs=True)
    settings = settings_for(hub, hub_cache_dir=str(tmp_path / "cache"))
    pull(entry_with(hub_source(gguf_bytes)), tmp_path / "1", settings)
    assert hub.body_bytes_of(GGUF) == 0
    hub.log = []
    pull(entry_with(hub_source(gguf_bytes), wheel_source(hub, gguf_bytes)), tmp_path / "2", settings, offline=True)
    assert hub.log == []


def test_offline_without_the_files_says_so(hub: FakeHub, gguf_bytes: bytes, tmp_path: Path) -> None:
    with pytest.raises(HubError, match=r"not in the hub cache.*offline"):
        pull(
            entry_with(hub_source(gguf_bytes), wheel_source(hub, gguf_bytes)), tmp_path, settings_for(hub), offline=True
        )
    assert hub.log == []


def test_damaged_file_in_the_hub_cache_is_refused(hub: FakeHub, gguf_bytes: bytes, tmp_path: Path) -> None:
    cache_file(tmp_path / "cache", GGUF, gguf_bytes, lfs=True)
    blob = tmp_path / "cache" / "models--acme--tiny" / "blobs" / sha256(gguf_bytes)
    blob.write_bytes(gguf_bytes[:-1] + b"\x01")
    settings = settings_for(hub, hub_cache_dir=str(tmp_path / "cache"))
    with pytest.raises(HubError, match=r"in the hub cache .* is damaged"):
        pull(entry_with(hub_source(gguf_bytes)), tmp_path, settings, offline=True)


def checkpoint(model_type: str = "llama", **config: object) -> dict[str, bytes]:
    weights = save({"model.norm.weight": np.ones(8, dtype=np.float32), "w": np.zeros((64, 1024), dtype=np.float32)})
    return {
        "config.json": json.dumps({"model_type": model_type, **config}).encode(),
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer_config.json": b"{}",
        "model.safetensors": weights,
        "README.md": b"not wanted",
        "onnx/model.json": b"{}",
    }


def test_any_repository_by_name(hub: FakeHub, tmp_path: Path) -> None:
    hub.files, hub.lfs = checkpoint(), {"model.safetensors"}
    result = pull(entry_for_repo("acme/tiny"), tmp_path, settings_for(hub))
    assert installed_names(result.directory) == EXPECTED_NAMES - {"generation_config.json"}
    manifest = layout.read_manifest(Path(result.directory))
    assert manifest.source == f"acme/tiny@{COMMIT} on 127.0.0.1" and manifest.licence == "apache-2.0"
    assert (Path(result.directory) / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt_neox"}, "its architecture 'gpt_neox' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "its weight format 'awq' is not supported"),
    ],
)
def test_unsupported_repository_is_refused_before_its_weights(
    hub: FakeHub, tmp_path: Path, config: dict[str, object], message: str
) -> None:
    hub.files, hub.lfs = checkpoint(**config), {"model.safetensors"}  # type: ignore[arg-type]
    with pytest.raises(HubError, match=message):
        pull(entry_for_repo("acme/tiny"), tmp_path, settings_for(hub))
    assert hub.body_bytes_of("model.safetensors") == 0


@pytest.mark.parametrize(
    "name", ["../../.bashrc.json", "..\\x.json", ".hidden.json", "a" * 300 + ".json", "a\x00.json"]
)
def test_listing_with_hostile_names(hub: FakeHub, tmp_path: Path, name: str) -> None:
    hub.files, hub.lfs = checkpoint(), {"model.safetensors"}
    hub.extra_siblings = [{"rfilename": name, "size": 3, "blobId": "0" * 40}]
    with pytest.raises(HubError, match="is refused"):
        pull(entry_for_repo("acme/tiny"), tmp_path, settings_for(hub))


@pytest.mark.parametrize(
    "listing", [b"", b"[]", b"{}", b'{"sha": "x"}', b'{"sha": 3, "siblings": 4}', b"<html>", b"[" * 99999]
)
def test_listing_that_is_none(hub: FakeHub, tmp_path: Path, listing: bytes) -> None:
    hub.listing = listing
    with pytest.raises(HubError, match=r"is .*a hub"):
        pull(entry_for_repo("acme/tiny"), tmp_path, settings_for(hub))


def test_weights_that_are_not_whole_are_refused(hub: FakeHub, tmp_path: Path) -> None:
    hub.files, hub.lfs = checkpoint(), {"model.safetensors"}
    hub.files["model.safetensors"] = hub.files["model.safetensors"][:-10]
    with pytest.raises(HubError, match=r"model\.safetensors"):
        pull(entry_for_repo("acme/tiny"), tmp_path, settings_for(hub))
    assert not (tmp_path / "models" / "tiny").exists()


def test_a_failed_check_costs_no_download(hub: FakeHub, tmp_path: Path) -> None:
    hub.files, hub.lfs = checkpoint(), {"model.safetensors"}
    tokenizer = hub.files.pop("tokenizer.json")
    with pytest.raises(HubError, match=r"has no tokenizer\.json"):
        pull(entry_for_repo("acme/tiny"), tmp_path, settings_for(hub))
    hub.files["tokenizer.json"], hub.log = tokenizer, []
    pull(entry_for_repo("acme/tiny"), tmp_path, settings_for(hub))
    assert hub.body_bytes_of("model.safetensors") == 0


def test_a_failed_publication_costs_no_download(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files, hub.lfs = checkpoint(), {"model.safetensors"}

    def fail(*arguments: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(layout, "publish", fail)
    with pytest.raises(HubError, match="cannot be written"):
        pull(entry_for_repo("acme/tiny"), tmp_path, settings_for(hub))
    monkeypatch.undo()
    hub.log = []
    pull(entry_for_repo("acme/tiny"), tmp_path, settings_for(hub))
    assert hub.body_bytes_of("model.safetensors") == 0


def test_a_drafter_needs_no_tokenizer_and_is_no_model(hub: FakeHub, tmp_path: Path) -> None:
    hub.files, hub.lfs = checkpoint("DFlashDraftModel"), {"model.safetensors"}
    del hub.files["tokenizer.json"]
    drafters = (DrafterEntry("dflash", "acme/tiny"), DrafterEntry("mtp"))
    target = replace(entry_with(hub_source(b"")), id="target", drafters=drafters)
    catalogue = Catalogue((target,))
    entry = drafter_entry(catalogue, target, "dflash")
    result = pull(entry, drafters_directory(tmp_path), settings_for(hub))
    assert Path(result.directory) == tmp_path / "drafters" / "models" / "target.dflash"
    assert (Path(result.directory) / "model.safetensors").is_file()
    assert list_installed(tmp_path) == ()
    with pytest.raises(HubError, match="comes with the model itself"):
        drafter_entry(catalogue, target, "mtp")
    with pytest.raises(HubError, match="no drafter 'eagle3'; known for it: dflash, mtp"):
        drafter_entry(catalogue, target, "eagle3")
    shipped = load_catalogue()
    small = drafter_entry(shipped, shipped.find("qwen2.5-coder-1.5b"), "draft_model")
    assert small.id == "qwen2.5-coder-1.5b.draft_model" and small.sources == shipped.find("qwen2.5-coder-0.5b").sources


def test_one_gguf_file_of_a_repository(hub: FakeHub, gguf_bytes: bytes, tmp_path: Path) -> None:
    hub.files["other.gguf"] = b"x"
    with pytest.raises(HubError, match=r"name one of its GGUF files: acme/tiny:tiny\.gguf, :other\.gguf"):
        pull(entry_for_repo("acme/tiny"), tmp_path, settings_for(hub))
    result = pull(load_catalogue().find(f"acme/tiny:{GGUF}"), tmp_path, settings_for(hub))
    assert result.model_id == "tiny" and installed_names(result.directory) == EXPECTED_NAMES
    assert hub.body_bytes_of("other.gguf") == 0


def test_cached_weights_are_linked_not_copied(hub: FakeHub, tmp_path: Path) -> None:
    files = checkpoint()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        cache_file(tmp_path / "cache", name, files[name], lfs=name == "model.safetensors")
    settings = settings_for(hub, hub_cache_dir=str(tmp_path / "cache"))
    result = pull(entry_for_repo("acme/tiny"), tmp_path, settings, offline=True)
    blob = tmp_path / "cache" / "models--acme--tiny" / "blobs" / sha256(files["model.safetensors"])
    assert (Path(result.directory) / "model.safetensors").samefile(blob)


def test_what_was_resolved_stays_pinned(hub: FakeHub, tmp_path: Path) -> None:
    hub.files, hub.lfs = checkpoint(), {"model.safetensors"}
    first = pull(entry_for_repo("acme/tiny"), tmp_path, settings_for(hub))
    wanted = layout.read_manifest(Path(first.directory)).fingerprint
    hub.log = []
    again = pull(entry_for_repo("acme/tiny"), tmp_path, settings_for(hub), force=True)
    assert layout.read_manifest(Path(again.directory)).fingerprint == wanted
    assert layout.read_manifest(Path(again.directory)).licence == "apache-2.0"
    assert not any(r.path.startswith("/api/") for r in hub.log)
    assert all(f"/resolve/{COMMIT}/" in r.path or r.path.startswith("/cdn/") for r in hub.log)
    assert hub.body_bytes_of("model.safetensors") == 0  # it is whole on this disk
    hub.files["tokenizer.json"] = b'{"version": "1.1"}'
    (Path(first.directory) / "tokenizer.json").unlink()
    with pytest.raises(HubError, match=r"tokenizer\.json from 127\.0\.0\.1 has the wrong hash"):
        pull(entry_for_repo("acme/tiny"), tmp_path, settings_for(hub), force=True)
    assert layout.read_manifest(Path(first.directory)).fingerprint == wanted
    newest = pull(entry_for_repo("acme/tiny"), tmp_path, settings_for(hub), force=True, update=True)
    assert hub.body_bytes_of("model.safetensors") == 0
    assert layout.read_manifest(Path(newest.directory)).fingerprint != wanted
    pull(entry_for_repo("acme/tiny"), tmp_path, settings_for(hub), force=True)


@pytest.mark.parametrize(
    "damage",
    ["", "[]", "{}", '{"format_version": 9}', '{"format_version": 1, "repositories": {"a": {"files": {"../x": {}}}}}'],
)
def test_damaged_pins_are_said_and_made_anew(hub: FakeHub, tmp_path: Path, damage: str) -> None:
    hub.files, hub.lfs = checkpoint(), {"model.safetensors"}
    pull(entry_for_repo("acme/tiny"), tmp_path, settings_for(hub))
    pins = tmp_path / "models" / "pins.json"
    whole = pins.read_text()
    assert pins.stat().st_mode & 0o077 == 0
    pins.write_text(damage)
    seen: list[PullProgress] = []
    pull(entry_for_repo("acme/tiny"), tmp_path, settings_for(hub), seen.append, force=True)
    assert any("pins.json" in p.message for p in seen if p.stage == "note")
    assert pins.read_text() == whole


def test_across_disks_cached_files_stay_and_are_linked(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    hub.files, hub.lfs = checkpoint(), {"model.safetensors"}
    weights = hub.files["model.safetensors"]
    cache_file(tmp_path / "cache", "model.safetensors", weights, lfs=True)
    monkeypatch.setattr(os, "link", refuse)
    settings = settings_for(hub, hub_cache_dir=str(tmp_path / "cache"))
    directory = Path(pull(entry_for_repo("acme/tiny"), tmp_path, settings).directory)
    blob = tmp_path / "cache" / "models--acme--tiny" / "blobs" / sha256(weights)
    assert blob.read_bytes() == weights and (directory / "model.safetensors").is_symlink()
    assert not (directory / "config.json").is_symlink()
    assert verify(tmp_path, "tiny") == ()
    remove(tmp_path, "tiny")
    assert blob.read_bytes() == weights


def test_busy_hub_is_asked_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.files, hub.lfs = checkpoint(), {"model.safetensors"}
    hub.faults = [Fault("status", name="(listing)", status=429)]
    pull(entry_for_repo("acme/tiny"), tmp_path, settings_for(hub))


def test_missing_repository(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="has no repository acme/other"):
        pull(entry_for_repo("acme/other"), tmp_path, settings_for(hub))


def test_the_hub_of_these_tests_serves_the_hubs_own_client(hub: FakeHub, tmp_path: Path) -> None:
    from huggingface_hub import HfApi, hf_hub_download

    hub.files, hub.lfs = checkpoint(), {"model.safetensors"}
    info = HfApi(endpoint=hub.hub_url).model_info("acme/tiny", files_metadata=True)
    assert info.sha == COMMIT and {s.rfilename for s in info.siblings or []} == set(hub.files)
    for name in ("config.json", "model.safetensors"):
        path = hf_hub_download("acme/tiny", name, endpoint=hub.hub_url, cache_dir=tmp_path / "cache")
        assert Path(path).read_bytes() == hub.files[name]
    hub.log = []
    settings = settings_for(hub, hub_cache_dir=str(tmp_path / "cache"))
    pull(entry_for_repo("acme/tiny"), tmp_path, settings)
    assert hub.body_bytes_of("model.safetensors") == 0


def test_pulling_needs_no_torch() -> None:
    code = "import sys, localspec.hub.pull, localspec.hub.local; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0
