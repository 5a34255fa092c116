"""What `pull` takes along: text parts only, lost MTP blocks by their byte ranges, chosen drafters, newer revisions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hub_fake_server import COMMIT, FakeHub, Fault, cache_file, running
from hub_gguf_samples import SampleModel, write_model
from safetensors.numpy import load_file, save

from localspec.commands.common import known_id
from localspec.config import load_settings
from localspec.hub import layout, tensor_pull
from localspec.hub.catalogue import Catalogue, DrafterEntry, HubSource, ModelEntry, find_drafter, load_catalogue
from localspec.hub.get import Wish, get
from localspec.hub.local import list_installed, verify
from localspec.hub.records import HubError, HubSettings, PullProgress

CONFIG = {"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 1}}
MTP = {
    "mtp.fc.weight": np.arange(20_000, dtype=np.float32).reshape(100, 200),
    "mtp.norm.weight": np.arange(7, dtype=np.float16),
    "mtp.layers.0.input_layernorm.weight": np.full(3, 5, np.float32),
}


def shard(*names: str, size: int = 3000) -> dict[str, np.ndarray]:
    return {name: np.full(size, len(name), np.float32) for name in names}


def sharded(shards: dict[str, dict[str, np.ndarray]], config: dict[str, object] = CONFIG) -> dict[str, bytes]:
    """The files of a repository with these weight files and an index."""
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    return {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": b'{"version": "1.0"}',
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{file: save(tensors) for file, tensors in shards.items()},
    }


EXPORT = {
    "model-00001-of-00003.safetensors": shard("model.language_model.embed_tokens.weight", "lm_head.weight"),
    "model-00002-of-00003.safetensors": shard("model.language_model.norm.weight", "model.visual.blocks.0.w"),
    "model-00003-of-00003.safetensors": shard("model.visual.blocks.1.w", "model.visual.merger.w"),
}
BASE = {
    "model-00001-of-00002.safetensors": shard("lm_head.weight", size=50_000) | {"mtp.fc.weight": MTP["mtp.fc.weight"]},
    "model-00002-of-00002.safetensors": {
        **shard("model.visual.merger.w", "zz.last", size=40_000),
        **{name: MTP[name] for name in MTP if name != "mtp.fc.weight"},
    },
}


@pytest.fixture
def export() -> Iterator[FakeHub]:
    files = sharded(EXPORT)
    hub = FakeHub(repo="acme/export", files=files, lfs={name for name in files if name.endswith("safetensors")})
    with running(hub):
        yield hub


@pytest.fixture
def base(export: FakeHub) -> Iterator[FakeHub]:
    """A second repository on the same hub."""
    files = sharded(BASE)
    hub = FakeHub(repo="acme/base", files=files, lfs={name for name in files if name.endswith("safetensors")})
    export.others = [hub]
    yield hub


def settings_of(hub: FakeHub) -> HubSettings:
    return HubSettings(
        endpoint=hub.hub_url, connect_timeout_s=1.0, stall_timeout_s=5.0, max_attempts=2, backoff_s=0.01,
        range_bytes=30_000, allow_pip=False,
    )  # fmt: skip


def catalogue_with(*drafters: DrafterEntry) -> Catalogue:
    source = HubSource("acme/export", include=("*.safetensors", "*.json"))
    model = ModelEntry(
        id="export", aliases=("ex",), title="Export", architecture="qwen3_5", format="nvfp4", licence="mit",
        sources=(source,), drafters=drafters,
    )  # fmt: skip
    return Catalogue((model,))


WITH_BASE = catalogue_with(DrafterEntry("mtp", "acme/base"), DrafterEntry("dflash", "acme/dflash"))


def test_files_of_the_vision_tower_alone_are_not_fetched(export: FakeHub, tmp_path: Path) -> None:
    wish = Wish("export", drafters=("none",))
    (dry,) = get(WITH_BASE, replace(wish, dry_run=True), tmp_path, settings_of(export))
    (result,) = get(WITH_BASE, wish, tmp_path, settings_of(export))
    folder = Path(result.directory)
    kept = {"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"}
    assert {path.name for path in folder.glob("*.safetensors")} == kept == {n for n in dry.files if "model-" in n}
    assert not any("00003-of-00003" in request.path for request in export.log)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == kept and index["metadata"] == {"total_size": 1}
    assert verify(tmp_path, "export") == ()
    # A second pull of the same model from its pins is the same model.
    first = layout.read_manifest(folder).fingerprint
    get(WITH_BASE, replace(wish, force=True), tmp_path, settings_of(export))
    assert layout.read_manifest(folder).fingerprint == first


def test_a_lost_mtp_block_comes_from_the_base_by_its_ranges(export: FakeHub, base: FakeHub, tmp_path: Path) -> None:
    seen: list[PullProgress] = []
    model, drafter = get(WITH_BASE, Wish("ex"), tmp_path, settings_of(export), seen.append)
    assert drafter.model_id == "export.mtp" and drafter.source == f"mtp.* of acme/base@{COMMIT} on 127.0.0.1"
    folder = tmp_path / "drafters" / "models" / "export.mtp"
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "localspec.json"}
    found = load_file(folder / "model.safetensors")
    assert found.keys() == MTP.keys()
    for name, values in MTP.items():
        np.testing.assert_array_equal(found[name], values)
    headers = sum(int.from_bytes(base.files[name][:8], "little") + 8 for name in base.lfs)
    fetched = sum(base.body_bytes_of(name) for name in base.lfs)
    assert fetched == headers + sum(values.nbytes for values in MTP.values())
    assert any("lost its mtp block" in each.message for each in seen)
    assert model.model_id == "export" and len(list_installed(tmp_path)) == 1
    # A second time nothing is asked of the base.
    base.log = []
    get(WITH_BASE, Wish("ex"), tmp_path, settings_of(export))
    assert base.log == []


def test_an_export_that_kept_its_block_needs_no_base(export: FakeHub, base: FakeHub, tmp_path: Path) -> None:
    export.files = sharded(EXPORT | {"model-00002-of-00003.safetensors": shard("mtp.fc.weight")})
    notes: list[str] = []
    settings = settings_of(export)
    assert len(get(WITH_BASE, Wish("export"), tmp_path, settings)) == 1
    get(WITH_BASE, Wish("export", ("mtp",)), tmp_path, settings, lambda p: notes.append(p.message))
    assert base.log == [] and any("holds its mtp block" in note for note in notes)


def test_a_base_that_is_not_there_costs_the_drafter_only(export: FakeHub, tmp_path: Path) -> None:
    notes: list[str] = []
    results = get(WITH_BASE, Wish("export"), tmp_path, settings_of(export), lambda p: notes.append(p.message))
    assert [each.model_id for each in results] == ["export"]
    assert any("goes without its mtp block" in note and "acme/base" in note for note in notes)
    with pytest.raises(HubError, match=r"export\.mtp could not be fetched.*acme/base"):
        get(WITH_BASE, Wish("export", ("mtp",)), tmp_path, settings_of(export))


def test_the_base_that_a_repository_names_itself(export: FakeHub, base: FakeHub, tmp_path: Path) -> None:
    export.base_model = "acme/base"
    results = get(Catalogue(()), Wish("acme/export"), tmp_path, settings_of(export))
    assert [each.model_id for each in results] == ["export", "export.mtp"]


def test_the_block_resumes_and_stays_pinned(export: FakeHub, base: FakeHub, tmp_path: Path) -> None:
    get(WITH_BASE, Wish("export", ("none",)), tmp_path, settings_of(export))
    fc_at = base.files["model-00001-of-00002.safetensors"].index(MTP["mtp.fc.weight"].tobytes())
    base.faults = [Fault("status", "model-00001-of-00002.safetensors", 500, not_before_byte=fc_at + 30_000, times=99)]
    with pytest.raises(HubError, match="it answers 500"):
        get(WITH_BASE, Wish("export.mtp"), tmp_path, replace(settings_of(export), n_connections=1))
    base.faults, base.log = [], []
    get(WITH_BASE, Wish("export.mtp"), tmp_path, settings_of(export))
    asked = [r.range for r in base.log if r.range and r.range[0] >= fc_at and "00001" in r.path]
    assert asked and min(start for start, _ in asked) >= fc_at + 30_000
    again = base.files["model-00001-of-00002.safetensors"].replace(MTP["mtp.fc.weight"].tobytes(), b"\1" * 80_000)
    base.files["model-00001-of-00002.safetensors"] = again
    with pytest.raises(HubError, match=r"is not what was pulled first; pull with --update"):
        get(WITH_BASE, Wish("export.mtp", force=True), tmp_path, settings_of(export))
    (updated,) = get(WITH_BASE, Wish("export.mtp", force=True, update=True), tmp_path, settings_of(export))
    assert load_file(Path(updated.directory) / "model.safetensors")["mtp.fc.weight"][0, 0] != 0


def test_finished_stretches_and_small_files_are_not_fetched_again(
    export: FakeHub, base: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_pull, "write_safetensors", fail)
    with pytest.raises(HubError, match="cannot be written"):
        get(WITH_BASE, Wish("export.mtp"), tmp_path, settings_of(export))
    monkeypatch.undo()
    base.log = []
    get(WITH_BASE, Wish("export.mtp"), tmp_path, settings_of(export))
    headers = sum(int.from_bytes(base.files[name][:8], "little") + 8 for name in base.lfs)
    assert sum(base.body_bytes_of(name) for name in base.lfs) == headers
    assert base.body_bytes_of("config.json") == 0


def test_another_file_behind_the_address_is_refused(export: FakeHub, base: FakeHub, tmp_path: Path) -> None:
    base.linked_etag = "f" * 64
    with pytest.raises(HubError, match="another file than the one that was listed"):
        get(WITH_BASE, Wish("export.mtp"), tmp_path, settings_of(export))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: (1 << 60).to_bytes(8, "little") + raw[8:], "declares a header of"),
        (lambda raw: (33 << 20).to_bytes(8, "little") + raw[8:], "declares a header of"),
        (lambda raw: raw[:8] + b"[" * (len(raw) - 8), "is not a JSON object"),
        (lambda raw: raw.replace(b'"shape"', b'"sharp"'), "must have exactly"),
        (lambda raw: raw[:4], "too short"),
        (lambda raw: raw[:-4], "lies outside the file"),
    ],
    ids=["huge", "larger than any", "no json", "odd key", "short", "cut"],
)
def test_hostile_headers_of_the_base(
    export: FakeHub, base: FakeHub, tmp_path: Path, damage: object, message: str
) -> None:
    base.files |= {name: damage(base.files[name]) for name in base.lfs}  # type: ignore[operator]
    with pytest.raises(HubError, match=message):
        get(WITH_BASE, Wish("export.mtp"), tmp_path, settings_of(export))


@pytest.mark.parametrize(
    "weight_map", ["[]", '{"mtp.a": 3}', '{"mtp.a": "../x.safetensors"}', '{"mtp.a": "absent.safetensors"}', "{}"]
)
def test_hostile_indexes_of_the_base(export: FakeHub, base: FakeHub, tmp_path: Path, weight_map: str) -> None:
    base.files["model.safetensors.index.json"] = f'{{"weight_map": {weight_map}}}'.encode()
    with pytest.raises(HubError, match=r"index of a checkpoint|is refused|lists no absent|holds no mtp"):
        get(WITH_BASE, Wish("export.mtp"), tmp_path, settings_of(export))


def test_the_block_from_the_hub_cache_offline(export: FakeHub, base: FakeHub, tmp_path: Path) -> None:
    for name, data in base.files.items():
        if name != "tokenizer.json":
            cache_file(tmp_path / "cache", name, data, name in base.lfs, "acme/base")
    settings = replace(settings_of(export), hub_cache_dir=str(tmp_path / "cache"))
    (result,) = get(WITH_BASE, Wish("export.mtp", offline=True), tmp_path, settings)
    np.testing.assert_array_equal(
        load_file(Path(result.directory) / "model.safetensors")["mtp.fc.weight"], MTP["mtp.fc.weight"]
    )
    assert base.log == [] and export.log == []


def test_the_hub_cache_is_never_written_to(export: FakeHub, tmp_path: Path) -> None:
    """A repository may hold a manifest of ours: folders of installed models are uploaded as they are."""
    export.files["localspec.json"] = b'{"model_id": "another"}'
    for name, data in export.files.items():
        cache_file(tmp_path / "cache", name, data, name in export.lfs, "acme/export")
    before = {path: path.read_bytes() for path in (tmp_path / "cache").rglob("blobs/*")}
    settings = replace(settings_of(export), hub_cache_dir=str(tmp_path / "cache"))
    (result,) = get(WITH_BASE, Wish("export", ("none",), offline=True), tmp_path, settings)
    assert {path: path.read_bytes() for path in before} == before
    assert layout.read_manifest(Path(result.directory)).model_id == "export"


def test_drafters_by_name_and_by_choice(export: FakeHub, base: FakeHub, tmp_path: Path) -> None:
    chosen = FakeHub(repo="acme/dflash", files={"config.json": b"{}", "model.safetensors": save(shard("w"))})
    export.others += [chosen]
    settings = settings_of(export)
    results = get(WITH_BASE, Wish("export", ("dflash",)), tmp_path, settings)
    assert [each.model_id for each in results] == ["export", "export.dflash"]
    (alone,) = get(WITH_BASE, Wish("acme/dflash", force=True), tmp_path, settings)
    assert alone.model_id == "export.dflash"
    own = get(WITH_BASE, Wish("export", ("eagle3=acme/dflash",)), tmp_path, settings)
    assert own[1].model_id == "export.eagle3" and (Path(own[1].directory) / "model.safetensors").is_file()
    for wrong in ("magic", "eagle3", "magic=a/b", "dflash=nowhere"):
        export.log = []
        with pytest.raises(HubError, match=r"no kind of drafter|no drafter 'eagle3'|hub address"):
            get(WITH_BASE, Wish("export", (wrong,), force=True), tmp_path, settings)
        assert export.log == []


def test_an_installed_small_model_drafts_from_links(tmp_path: Path) -> None:
    write_model(tmp_path / "small.gguf", SampleModel())
    gguf = (tmp_path / "small.gguf").read_bytes()
    hub = FakeHub(repo="acme/export", files=sharded(EXPORT))
    small_hub = FakeHub(repo="acme/small", files={"small.gguf": gguf})
    small = ModelEntry("small", "Small", "llama", "gguf", "mit", (HubSource("acme/small", include=("small.gguf",)),))
    catalogue = catalogue_with(DrafterEntry("draft_model", model="small"))
    catalogue = Catalogue((*catalogue.models, small))
    with running(hub):
        hub.others = [small_hub]
        settings = settings_of(hub)
        get(catalogue, Wish("small"), tmp_path / "with", settings)
        small_hub.log = []
        (_, linked) = get(catalogue, Wish("export", ("draft_model",)), tmp_path / "with", settings)
        assert small_hub.log == []
        weights = tmp_path / "with" / "models" / "small" / "model.safetensors"
        assert (Path(linked.directory) / "model.safetensors").samefile(weights)
        (_, fetched) = get(catalogue, Wish("export", ("draft_model",)), tmp_path / "without", settings)
        assert (Path(fetched.directory) / "tokenizer.json").is_file()
    assert linked.model_id == fetched.model_id == "export.draft_model"


def test_update_replaces_only_what_is_newer(export: FakeHub, tmp_path: Path) -> None:
    wish = Wish("export", ("none",))
    settings = settings_of(export)
    get(WITH_BASE, wish, tmp_path, settings)
    (same,) = get(WITH_BASE, replace(wish, update=True), tmp_path, settings)
    assert same.already_installed
    export.commit = "d" * 40
    changed = export.files["model-00001-of-00003.safetensors"].replace(b"\x00\x00\x0e\x42", b"\x00\x00\x10\x42")
    export.files["model-00001-of-00003.safetensors"] = changed
    export.log = []
    (newer,) = get(WITH_BASE, replace(wish, update=True), tmp_path, settings)
    assert not newer.already_installed and "d" * 40 in newer.source
    assert export.body_bytes_of("model-00002-of-00003.safetensors") == 0  # unchanged, taken from the old folder
    assert (Path(newer.directory) / "model-00001-of-00003.safetensors").read_bytes() == changed
    assert verify(tmp_path, "export") == ()


def test_a_repository_of_the_same_name_is_another_model(
    export: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sharded(EXPORT)
    files["tokenizer.json"] = b'{"version": "2.0"}'
    other = FakeHub(repo="bob/Export", files=files, lfs={name for name in files if name.endswith("safetensors")})
    export.others = [other]
    settings, empty = settings_of(export), Catalogue(())
    (first,) = get(empty, Wish("acme/export", ("none",)), tmp_path, settings)
    # Hubs tell no capitals apart.
    assert get(empty, Wish("Acme/Export", ("none",)), tmp_path, settings)[0].already_installed
    with pytest.raises(HubError, match="another model is installed as export, from acme/export@"):
        get(empty, Wish("bob/Export", ("none",)), tmp_path, settings)
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path))
    # Neither is it run, shown or removed for the other one.
    assert known_id(load_settings(), "acme/export") == "export"
    assert known_id(load_settings(), "bob/Export") == "bob/Export"
    (second,) = get(empty, Wish("bob/Export", ("none",), force=True), tmp_path, settings)
    assert second.directory == first.directory and "bob/Export@" in second.source
    assert (Path(second.directory) / "tokenizer.json").read_bytes() == files["tokenizer.json"]
    assert verify(tmp_path, "export") == ()


def test_what_the_shipped_catalogue_knows_as_drafters() -> None:
    shipped = load_catalogue()
    for model in shipped.models:
        for drafter in model.drafters:
            if drafter.repo or drafter.model:
                found = find_drafter(shipped, f"{model.id}.{drafter.kind}")
                assert found is not None and (found[0].id, found[1]) == (model.id, drafter.kind)
    assert find_drafter(shipped, "Qwen/Qwen3.6-27B") is None
    assert tensor_pull.WEIGHTS_NAME == "model.safetensors"
