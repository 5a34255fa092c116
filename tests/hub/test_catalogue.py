"""The catalogue: what the shipped file promises, and that mistakes are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from localspec.hub.catalogue import Catalogue, HubSource, WheelSource, load_catalogue
from localspec.hub.records import HubError

GOOD = """
format_version = 1
[[model]]
id = "m"
aliases = ["em"]
title = "M"
architecture = "llama"
format = "gguf"
licence = "mit"
base = "a/m"
smallest_gpu_gib = 8
context_tokens = { 24 = 1000, 8 = 500 }
verified = false
sampling.default = { temperature = 0.5, top_k = 20 }
[[model.source]]
kind = "hub"
repo = "a/b"
include = ["*.gguf"]
[[model.source]]
kind = "wheel"
requirement = "a-b==1.0"
wheel_name = "a_b-1.0-py3-none-any.whl"
wheel_size_bytes = 10
wheel_sha256 = "HASH"
member = "a/b.gguf"
member_size_bytes = 9
member_sha256 = "HASH"
[[model.drafter]]
kind = "mtp"
verified = false
""".replace("HASH", "ab" * 32)


def load(tmp_path: Path, text: str) -> Catalogue:
    path = tmp_path / "models.toml"
    path.write_text(text)
    return load_catalogue(builtin=path)


def test_a_good_entry(tmp_path: Path) -> None:
    model = load(tmp_path, GOOD).find("em")
    assert model.id == "m" and not model.demo and not model.verified
    assert model.sources[0] == HubSource("a/b", include=("*.gguf",))
    assert isinstance(model.sources[1], WheelSource) and model.sources[1].member_sha256 == "ab" * 32
    assert dict(model.context_tokens) == {8: 500, 24: 1000} and list(model.context_tokens) == [8, 24]
    assert dict(model.sampling["default"]) == {"temperature": 0.5, "top_k": 20}
    assert model.drafters[0].kind == "mtp" and model.drafters[0].repo is None


MISTAKES = {
    "unknown key": ('title = "M"', 'title = "M"\ncolour = "red"', "model m: the key 'colour' is not known"),
    "unknown key in source": ('repo = "a/b"', 'repo = "a/b"\nbranch = "x"', "source 1: the key 'branch' is not known"),
    "unknown root key": ("format_version = 1", "format_version = 1\nextra = 2", "the key 'extra' is not known"),
    "missing key": ('licence = "mit"\n', "", "model m: the key 'licence' is missing"),
    "wrong type": ("smallest_gpu_gib = 8", 'smallest_gpu_gib = "8"', "a int is needed"),
    "bool for a number": ("smallest_gpu_gib = 8", "smallest_gpu_gib = true", "a int is needed"),
    "number for a bool": ("verified = false\nsampling", "verified = 0\nsampling", "a bool is needed"),
    "negative": ("smallest_gpu_gib = 8", "smallest_gpu_gib = -1", "cannot be negative"),
    "no size": ("smallest_gpu_gib = 8", f"smallest_gpu_gib = {'9' * 400}", "larger than anything"),
    "no size of a card": ("8 = 500", f"{'9' * 5000} = 500", "maps GiB to tokens"),
    "terminal codes": ('title = "M"', 'title = "\\u001b[31mM"', "without control characters"),
    "format": ('format = "gguf"', 'format = "exl3"', "one of gguf, nvfp4, fp8, bf16, mxfp4 is needed"),
    "version": ("format_version = 1", "format_version = 2", "format_version 2, this program reads 1"),
    "id": ('id = "m"', 'id = "../m"', "is not a model id"),
    "repo": ('repo = "a/b"', 'repo = "a/../b"', "not of the form"),
    "repo with scheme": ('repo = "a/b"', 'repo = "https://x/y"', "not of the form"),
    "hash": ("ab" * 32, "ab" * 31, "not of the form"),
    "requirement": ("a-b==1.0", "a-b>=1.0", "not of the form"),
    "requirement with an option": ("a-b==1.0", "a-b==1.0 --pre", "not of the form"),
    "wheel name": ("a_b-1.0-py3-none-any.whl", "../x.whl", "is refused"),
    "files and include": ('include = ["*.gguf"]', "", "either 'files' with their hashes or 'include'"),
    "preset key": ("top_k = 20", "top_q = 20", "unknown key 'top_q'"),
    "preset value": ("top_k = 20", 'top_k = "x"', "a number is needed"),
    "contexts": ("8 = 500", "eight = 500", "maps GiB to tokens"),
    "drafter kind": ('kind = "mtp"', 'kind = "medusa"', "one of mtp, eagle3"),
    "draft model without one": ('kind = "mtp"', 'kind = "draft_model"', "needs 'model'"),
    "not TOML": ("[[model]]", "[[model]", "cannot be read as TOML"),
    "alias twice": ('aliases = ["em"]', 'aliases = ["em", "em2"]\n', ""),
}


@pytest.mark.parametrize(("old", "new", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    if not message:
        assert load(tmp_path, GOOD.replace(old, new)).find("em2").id == "m"
        return
    with pytest.raises(HubError, match=re.escape(message)):
        load(tmp_path, GOOD.replace(old, new))


def test_source_is_needed(tmp_path: Path) -> None:
    text = GOOD.split("[[model.source]]")[0]
    with pytest.raises(HubError, match="has no source"):
        load(tmp_path, text)


def test_user_additions_replace_and_add(tmp_path: Path) -> None:
    (tmp_path / "built.toml").write_text(GOOD)
    own = GOOD.replace('title = "M"', 'title = "Mine"') + GOOD.split("format_version = 1")[1].replace(
        '"m"', '"n"', 1
    ).replace('"em"', '"en"')
    (tmp_path / "own.toml").write_text(own)
    catalogue = load_catalogue(tmp_path / "own.toml", tmp_path / "built.toml")
    assert [m.id for m in catalogue.models] == ["m", "n"]
    assert catalogue.find("m").title == "Mine"
    assert load_catalogue(tmp_path / "absent.toml", tmp_path / "built.toml").find("m").title == "M"
    (tmp_path / "own.toml").write_text(GOOD.replace('"m"', '"other"', 1))
    with pytest.raises(HubError, match="'em' belongs to both m and other"):
        load_catalogue(tmp_path / "own.toml", tmp_path / "built.toml")


def test_unknown_name_lists_near_ones_and_a_hub_address_is_taken() -> None:
    catalogue = load_catalogue()
    with pytest.raises(HubError, match=r"no model 'qwen3\.8-27'; known are qwen3\.8-27b"):
        catalogue.find("qwen3.8-27")
    with pytest.raises(HubError, match=r"smollm2-135m, .*owner/name"):
        catalogue.find("zzz")
    made_up = catalogue.find("Some-Org/Model_7B.v2")
    assert (made_up.id, made_up.verified) == ("model_7b.v2", False)
    assert made_up.sources == (HubSource("Some-Org/Model_7B.v2", include=made_up.sources[0].include),)  # type: ignore[union-attr]
    for hostile in (
        "a/b:../x.gguf",
        "a/b:x/y.gguf",
        "a/b:x.bin",
        "../x",
        "a/..",
        "a/b/c",
        "a/b?x",
        "/b",
        "a/ b",
        "https://x/y",
        "a/..",
    ):
        with pytest.raises(HubError):
            catalogue.find(hostile)


def test_the_shipped_catalogue_keeps_its_promises() -> None:
    catalogue = load_catalogue()
    demo = catalogue.demo()
    assert demo.id == "smollm2-135m" and demo.verified and catalogue.find("demo") is demo
    assert [m.id for m in catalogue.models if m.demo] == ["smollm2-135m"]
    for name in re.findall(r"pull (\S+)|or (qwen\S+)", demo.advice):
        assert catalogue.find(next(n for n in name if n))
    hub, wheel = demo.sources
    assert isinstance(hub, HubSource) and isinstance(wheel, WheelSource)
    assert hub.files[0].sha256 == wheel.member_sha256 and hub.files[0].size_bytes == wheel.member_size_bytes
    ids = {m.id for m in catalogue.models}
    assert {"qwen3.8-27b", "qwen3.6-27b", "qwen3.5-9b", "qwen3.5-4b", "qwen3.5-2b", "qwen3.5-0.8b"} <= ids
    for model in catalogue.models:
        pinned = all(isinstance(s, WheelSource) or s.files for s in model.sources)
        assert model.verified == pinned, model.id
        assert "default" in model.sampling, model.id
        for drafter in model.drafters:
            if drafter.model is not None:
                assert drafter.model in ids


def test_every_shipped_entry_is_complete() -> None:
    """What a first start, `show --fit` and `pull --drafter` rely on."""
    shipped = load_catalogue()
    for model in shipped.models:
        assert model.base and model.licence and model.sources and model.sampling["default"], model.id
        sizes = list(model.context_tokens)
        assert model.context_tokens or not model.smallest_gpu_gib, model.id
        assert not sizes or not model.smallest_gpu_gib or sizes[0] == model.smallest_gpu_gib, model.id
        assert sorted(model.context_tokens.values()) == list(model.context_tokens.values()), model.id
        assert model.verified == all(
            isinstance(source, WheelSource) or bool(source.files) for source in model.sources
        ), model.id
    kinds = {drafter.kind for model in shipped.models for drafter in model.drafters}
    assert kinds == {"mtp", "eagle3", "dflash", "dspark", "draft_model"}
    repos = [s.repo for model in shipped.models for s in model.sources if isinstance(s, HubSource)]
    assert len(repos) == len(set(repos)), "two entries for the same files"
