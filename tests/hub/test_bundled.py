"""Drafters that come with the program: pinned, installed without a network, refused when damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.hub import bundled, layout
from localspec.hub.catalogue import BundledSource, drafter_entry, load_catalogue, read_catalogue_file
from localspec.hub.get import Wish, get
from localspec.hub.pull import drafters_directory, pull
from localspec.hub.records import HubError, HubSettings

DEMO_KINDS = ("eagle3", "dflash", "dspark", "mtp")


@pytest.mark.parametrize("kind", DEMO_KINDS)
def test_the_demos_drafters_are_what_the_catalogue_pins(kind: str) -> None:
    catalogue = load_catalogue(None)
    (source,) = drafter_entry(catalogue, catalogue.demo(), kind).sources
    assert isinstance(source, BundledSource)
    for file in source.files:
        path = bundled.BUNDLED_DIR / source.folder / file.name
        assert (path.stat().st_size, layout.sha256_of(path)) == (file.size_bytes, file.sha256)


def test_a_drafter_is_installed_without_a_network(tmp_path: Path) -> None:
    catalogue = load_catalogue(None)
    (result,) = get(catalogue, Wish("demo.eagle3", offline=True), tmp_path, HubSettings())
    folder = drafters_directory(tmp_path) / "models" / "smollm2-135m.eagle3"
    assert Path(result.directory) == folder and result.source == "this program"
    manifest = layout.read_manifest(folder)
    assert set(manifest.files) == {"config.json", "model.safetensors"}
    assert not (folder / "model.safetensors").samefile(bundled.BUNDLED_DIR / folder.name / "model.safetensors")
    (again,) = get(catalogue, Wish("smollm2-135m.eagle3", offline=True), tmp_path, HubSettings())
    assert again.already_installed


def test_changed_and_missing_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = load_catalogue(None)
    entry = drafter_entry(catalogue, catalogue.demo(), "eagle3")
    monkeypatch.setattr(bundled, "BUNDLED_DIR", tmp_path / "data")
    with pytest.raises(HubError, match="not part of this installation"):
        pull(entry, tmp_path, HubSettings(), offline=True)
    (source,) = entry.sources
    assert isinstance(source, BundledSource)
    folder = tmp_path / "data" / source.folder
    folder.mkdir(parents=True)
    for file in source.files:
        (folder / file.name).write_bytes(bytes(file.size_bytes))
    with pytest.raises(HubError, match="hash of the catalogue"):
        pull(entry, tmp_path, HubSettings(), offline=True)
    assert not (tmp_path / "models" / entry.id).exists()


def test_a_folder_cannot_leave_the_package(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "models.toml").read_text(encoding="utf-8")
    (tmp_path / "models.toml").write_text(text.replace('bundled = "smollm2-135m.eagle3"', 'bundled = "../secrets"'))
    with pytest.raises(HubError, match="not a model id"):
        read_catalogue_file(tmp_path / "models.toml")
    (tmp_path / "models.toml").write_text(text.replace('bundled = "smollm2', 'repo = "a/b"\nbundled = "smollm2', 1))
    with pytest.raises(HubError, match="bundled drafter"):
        read_catalogue_file(tmp_path / "models.toml")
