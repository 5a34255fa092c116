"""Installed models on disk: list, show, verify, remove, prune, disk use; and what a damaged one does to them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from localspec.hub import layout, local
from localspec.hub.records import HubError


def install(data_dir: Path, model_id: str, weights: bytes = b"w" * 5000, notes: tuple[str, ...] = ()) -> Path:
    with layout.building(data_dir, model_id) as directory:
        config = {"model_type": "llama", "num_hidden_layers": 3, "max_position_embeddings": 512, "vocab_size": 9}
        layout.write_json(directory / "config.json", config)
        layout.write_json(directory / "tokenizer_config.json", {"chat_template": "{{ x }}"})
        (directory / "model.safetensors").write_bytes(weights)
        files = layout.describe_files(directory, {})
        manifest = layout.Manifest(model_id, "a test", "mit", files, layout.fingerprint_of(files), notes)
        return layout.publish(directory, manifest, data_dir)


def test_list_and_show(tmp_path: Path) -> None:
    assert local.list_installed(tmp_path) == ()
    install(tmp_path, "b-model", notes=("demo",))
    install(tmp_path, "a-model", b"x" * 100_000)
    first, second = local.list_installed(tmp_path)
    assert (first.model_id, second.model_id) == ("a-model", "b-model")
    assert (first.is_demo, second.is_demo) == (False, True)
    assert first.problem is None and 100_000 <= first.size_bytes < 140_000
    facts = local.show(tmp_path, "b-model")
    assert (facts.architecture, facts.n_layers, facts.context_tokens, facts.vocabulary) == ("llama", 3, 512, 9)
    assert facts.has_chat_template and facts.weight_format == "not stated"


def test_unknown_model_says_what_is_there(tmp_path: Path) -> None:
    install(tmp_path, "a-model")
    with pytest.raises(HubError, match=r"other is not installed \(installed: a-model\); run 'localspec pull other'"):
        local.find_installed(tmp_path, "other")
    for hostile in ("../a-model", "..", ".partial", "a/b", ""):
        with pytest.raises(HubError, match="is not a model id"):
            local.remove(tmp_path, hostile)


def test_verify_names_every_kind_of_damage(tmp_path: Path) -> None:
    directory = install(tmp_path, "m")
    heard: list[str] = []
    assert local.verify(tmp_path, "m", heard.append) == ()
    assert heard == ["config.json", "model.safetensors", "tokenizer_config.json"]
    (directory / "model.safetensors").write_bytes(b"v" + b"w" * 4999)
    (directory / "config.json").write_bytes(b"{}")
    (directory / "tokenizer_config.json").unlink()
    (directory / "stray").write_bytes(b"")
    problems = local.verify(tmp_path, "m")
    assert [p.split(" ")[0] for p in problems] == ["config.json", "model.safetensors", "tokenizer_config.json", "stray"]
    assert "does not have the hash" in problems[1] and "is missing" in problems[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(layout_version=99), "layout version 99"),
        (lambda d: d.update(fingerprint="0" * 64), "its own fingerprint"),
        (lambda d: d["files"].update({"../evil": {"size": 1, "sha256": "ab" * 32}}), "is refused"),
        (lambda d: d["files"]["config.json"].update(size=-5), "is damaged"),
        (lambda d: d["files"]["config.json"].update(size=True), "is damaged"),
        (lambda d: d.update(files=[1]), "is damaged"),
        (lambda d: d.pop("source"), "is damaged"),
        (lambda d: d.update(model_id="../x"), "is not a model id"),
    ],
    ids=["version", "fingerprint", "path", "size", "bool", "files", "source", "id"],
)
def test_a_damaged_manifest_is_listed_with_its_problem(tmp_path: Path, change: object, message: str) -> None:
    directory = install(tmp_path, "m")
    document = json.loads((directory / "localspec.json").read_text())
    change(document)  # type: ignore[operator]
    (directory / "localspec.json").write_text(json.dumps(document))
    (model,) = local.list_installed(tmp_path)
    assert model.manifest is None and model.problem is not None and message in model.problem
    assert local.remove(tmp_path, "m") > 0


@pytest.mark.parametrize("raw", [b"", b"[]", b"\xff\xfe", b'{"a":' * 50_000, b"null"])
def test_a_manifest_that_is_no_json_object(tmp_path: Path, raw: bytes) -> None:
    directory = install(tmp_path, "m")
    (directory / "localspec.json").write_bytes(raw)
    (model,) = local.list_installed(tmp_path)
    assert model.problem is not None and "localspec.json" in model.problem


def test_missing_file_shows_in_the_list(tmp_path: Path) -> None:
    directory = install(tmp_path, "m")
    (directory / "model.safetensors").unlink()
    assert local.list_installed(tmp_path)[0].problem == "model.safetensors is missing; pull the model again"


def test_remove_gives_back_links_only(tmp_path: Path) -> None:
    directory = install(tmp_path, "m")
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(b"keep")
    (directory / "extra.safetensors").symlink_to(outside)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(b"keep")
    (directory / "linked").symlink_to(folder)
    local.remove(tmp_path, "m")
    assert outside.read_bytes() == b"keep" and (folder / "file").read_bytes() == b"keep"
    assert local.list_installed(tmp_path) == () and list((tmp_path / "models").iterdir()) == []


def test_foreign_folders_and_links_are_told_apart_from_damaged_models(tmp_path: Path) -> None:
    directory = install(tmp_path, "m", b"w" * 50_000)
    (tmp_path / "models" / "my pictures").mkdir()
    foreign = next(model for model in local.list_installed(tmp_path) if model.model_id == "my pictures")
    assert foreign.problem is not None and "move" in foreign.problem and "pull" not in foreign.problem
    link = tmp_path / "models" / ".partial" / "link"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(directory)
    assert local.prune(tmp_path, stale_after_s=0.0) < 50_000  # what lies behind the link stays, and is not counted
    assert not link.is_symlink() and local.verify(tmp_path, "m") == ()


def test_prune_takes_old_leftovers_only(tmp_path: Path) -> None:
    install(tmp_path, "m")
    models = tmp_path / "models"
    for name in (".tmp-old-1", ".tmp-new-2", ".partial/old", ".partial/new"):
        (models / name).mkdir(parents=True)
        (models / name / "data").write_bytes(b"x" * 8192)
    now_s = time.time()
    for name, other_s in ((".tmp-old-1", now_s - 7200), (".partial/old", now_s + 90_000)):  # or the clock was set back
        for path in (models / name / "data", models / name):
            os.utime(path, (other_s, other_s))
    assert local.disk_use(tmp_path).partial_bytes == 4 * 8192
    assert local.prune(tmp_path) == 2 * 8192
    assert {str(p.relative_to(models)) for p in models.rglob("data")} == {".tmp-new-2/data", ".partial/new/data"}
    assert local.list_installed(tmp_path)[0].problem is None


def test_a_full_disk_names_what_could_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "small")
    install(tmp_path, "large", b"x" * 300_000)
    (install(tmp_path, "broken") / "localspec.json").write_text("{")
    monkeypatch.setattr(layout, "free_bytes", lambda directory: 5 << 30)
    layout.refuse_small_disk("m", 4 << 30, tmp_path)
    with pytest.raises(HubError, match=r"needs 6\.51 GB .*5\.37 GB are free.*'localspec rm': large .*, small "):
        layout.refuse_small_disk("m", 6 << 30, tmp_path)


def test_disk_use(tmp_path: Path) -> None:
    assert local.disk_use(tmp_path / "not" / "there").total_bytes == 0
    install(tmp_path, "small")
    install(tmp_path, "large", b"x" * 300_000)
    use = local.disk_use(tmp_path)
    assert [name for name, _ in use.models] == ["large", "small"]
    assert use.total_bytes == sum(size for _, size in use.models) and use.free_bytes > 0


def test_publish_replaces_atomically_and_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    first = install(tmp_path, "m", b"one")
    second = install(tmp_path, "m", b"two")
    assert first == second and (second / "model.safetensors").read_bytes() == b"two"
    with pytest.raises(RuntimeError), layout.building(tmp_path, "m") as directory:
        (directory / "x").write_bytes(b"")
        raise RuntimeError
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["m"]


def test_fingerprint_depends_on_names_sizes_and_hashes() -> None:
    record = layout.FileRecord(5, "ab")
    prints = {
        layout.fingerprint_of({"a": record}),
        layout.fingerprint_of({"b": record}),
        layout.fingerprint_of({"a": layout.FileRecord(6, "ab")}),
        layout.fingerprint_of({"a": layout.FileRecord(5, "ac")}),
        layout.fingerprint_of({"a": record, "b": record}),
    }
    assert len(prints) == 5
    assert layout.fingerprint_of({"a": record, "b": record}) == layout.fingerprint_of({"b": record, "a": record})


def test_created_directories_are_private_and_links_are_followed(tmp_path: Path) -> None:
    data = tmp_path / "parent" / "data"
    layout.partial_directory(data, "m")
    for path in (data, data / "models", data / "models" / ".partial", data / "models" / ".partial" / "m"):
        assert path.stat().st_mode & 0o777 == 0o700, path
    (tmp_path / "other disk").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "models").symlink_to(tmp_path / "other disk")
    install(tmp_path / "linked", "m")
    assert (tmp_path / "other disk" / "m" / "localspec.json").is_file()
