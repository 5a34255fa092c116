"""`pull`, `ls`, `show --fit`, `rm`, `verify`, `prune`, `df` against a hub on this machine, as a user types them."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save

from localspec.api.types import EngineError
from localspec.cli import group
from localspec.commands.common import make_locator
from localspec.config import load_settings
from localspec.hub import budget
from localspec.hub.gpus import GpuReading
from localspec.hub.records import HubError
from tests.hub.hub_fake_server import FakeHub, running

MODEL_CONFIG = {
    "model_type": "qwen3_5",
    "text_config": {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "max_position_embeddings": 100_000,
        "mtp_num_hidden_layers": 1,
    },
}  # fmt: skip
CATALOGUE = """
format_version = 1
[[model]]
id = "tiny"
aliases = ["t"]
title = "Tiny"
base = "acme/base"
architecture = "qwen3_5"
format = "bf16"
licence = "mit"
smallest_gpu_gib = 8
context_tokens = { 8 = 1000, 24 = 100000 }
verified = false
[[model.source]]
kind = "hub"
repo = "acme/tiny"
include = ["*.safetensors", "*.json"]
[[model.drafter]]
kind = "mtp"
repo = "acme/base"
verified = false
[[model.drafter]]
kind = "eagle3"
repo = "acme/eagle"
verified = false
"""
Run = Callable[..., Result]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    config = json.dumps(MODEL_CONFIG).encode()
    weights = {"model.language_model.embed_tokens.weight": np.zeros((1 << 12, 64), np.float16)}
    weights |= {"lm_head.weight": np.zeros((1 << 12, 64), np.float16), "model.visual.w": np.zeros(9, np.float16)}
    base = FakeHub(
        repo="acme/base", files={"config.json": config, "model.safetensors": save({"mtp.fc.weight": np.ones(99)})}
    )
    eagle = FakeHub(repo="acme/eagle", files={"config.json": b"{}", "model.safetensors": save({"w": np.ones(50)})})
    files = {"config.json": config, "tokenizer.json": b"{}", "model.safetensors": save(weights)}
    with running(FakeHub(files=files, others=[base, eagle])) as hub:
        yield hub


@pytest.fixture
def run(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "models.toml").write_text(CATALOGUE)
    environment = {"LOCALSPEC_HOME": str(home), "HF_ENDPOINT": hub.hub_url, "HF_HOME": str(tmp_path / "hf")}
    environment |= {"HF_TOKEN": "", "HF_HUB_OFFLINE": "", "PIP_INDEX_URL": f"{hub.hub_url}/simple"}
    monkeypatch.setattr("localspec.hub.gpus.read_gpus", lambda: GpuReading(problem="no card in this test"))

    def call(*arguments: str, exit_code: int = 0, **extra: str) -> Result:
        result = CliRunner().invoke(group, [*arguments], env=environment | extra)
        assert result.exit_code == exit_code, result.output
        return result

    return call


def document(result: Result) -> Any:
    return json.loads(result.stdout)


def test_a_model_from_pull_to_rm(run: Run, hub: FakeHub, tmp_path: Path) -> None:
    dry = run("pull", "t", "--dry-run")
    assert "tiny: would come from acme/tiny@" in dry.stdout and "in all" in dry.stdout
    pulled = document(run("pull", "t", "--drafter", "eagle3", "--json"))
    assert pulled["model_id"] == "tiny" and pulled["total_bytes"] > 1 << 19
    assert [each["model_id"] for each in pulled["drafters"]] == ["tiny.eagle3"]
    assert len(document(run("show", "t", "--json"))["pinned_revisions"]["acme/tiny"]) == 40
    assert "already here" in run("pull", "tiny").stdout  # and now the mtp block, which this export lost
    row = document(run("ls", "--json"))[0]
    assert (row["id"], row["installed"], row["drafters"]) == ("tiny", True, ["eagle3", "mtp"])
    assert "+eagle3 +mtp" in run("ls").stdout
    shown = document(run("show", "t.mtp", "--json"))
    assert (shown["id"], shown["drafts_for"], shown["installed"]) == ("tiny.mtp", "tiny", True)
    assert shown["source"] == "mtp from acme/base" and shown["size_bytes"] > 0
    assert document(run("verify", "--json")) == {"tiny": [], "tiny.mtp": [], "tiny.eagle3": []}
    use = document(run("df", "--json"))
    assert [name for name, _ in use["models"]] == ["tiny"] and len(use["drafters"]) == 2
    assert use["total_bytes"] > pulled["total_bytes"] and use["partial_bytes"] == 0
    weights = tmp_path / "home" / "models" / "tiny" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    assert "does not have the hash" in run("verify", "t", exit_code=1).stdout
    (tmp_path / "home" / "drafters" / "models" / "tiny.mtp" / "localspec.json").write_text("{")
    every = run("verify", exit_code=1).stdout
    assert "tiny: model.safetensors does not" in every and "tiny.mtp: " in every and "tiny.eagle3: whole" in every
    run("pull", "tiny", "--force")
    assert run("verify", "t").stdout == "tiny: whole\n"
    assert run("rm", "tiny.eagle3").stdout.startswith("tiny.eagle3: removed")
    removed = document(run("rm", "t", "--json"))
    assert set(removed["removed"]) == {"tiny", "tiny.mtp"} and removed["freed_bytes"] > 0
    assert "not installed" in run("rm", "tiny", exit_code=1).stderr
    assert "no model is installed" in run("verify").stderr


def test_fit_tells_the_budget_use_by_use(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = document(run("show", "tiny", "--fit", "--gpu-gib", "24", "--json"))["fit"]
    assert estimate[0]["contexts"][0]["tokens"] == 100_000 and "estimate" in estimate[0]["note"]
    sizes = [each["card"] for each in document(run("show", "tiny", "--fit", "--json"))["fit"]]
    assert sizes == [f"a {gib} GB card" for gib in budget.SOLD_SIZES_GIB]
    assert "needs a card of 8 GB" in run("show", "tiny", "--gpu-gib", "4").stdout
    run("pull", "tiny", "--drafter", "mtp", "--drafter", "eagle3")
    (exact,) = document(run("show", "tiny", "--gpu-gib", "2", "--json"))["fit"]
    parts = {part["name"]: part["bytes"] for part in exact["parts"]}
    assert parts["weights on the card"] == 2 * 64 << 12  # the head; the embedding is gathered from host memory
    assert parts["drafter mtp"] == 99 * 8 and parts["drafter eagle3"] == 50 * 8
    by_dtype = {each["kv_dtype"]: each for each in exact["contexts"]}
    # One attention layer and the MTP block's own, keys and values of 2 heads of 16.
    assert by_dtype["fp8"]["bytes_per_token"] == 2 * 2 * 2 * 16 == by_dtype["bf16"]["bytes_per_token"] / 2
    assert by_dtype["fp8"]["tokens"] == 100_000
    free = exact["available_bytes"] - sum(parts.values())
    (small,) = document(run("show", "tiny", "--gpu-gib", str(2 - (free - 128 * 1000) / 0.975 / 2**30), "--json"))["fit"]
    assert {each["kv_dtype"]: each["tokens"] for each in small["contexts"]} == {"fp8": 768, "bf16": 256}
    text = run("show", "tiny", "--gpu-gib", "2").stdout
    assert "on a 2 GB card" in text and "fp8 cache, 0.1 KiB a token: 100,000 tokens" in text
    assert "pinned host memory" in text


def test_wrong_use_of_pull_is_said_before_anything_is_fetched(run: Run, hub: FakeHub) -> None:
    assert "no kind of drafter 'magic'" in run("pull", "tiny", "--drafter", "magic", exit_code=1).stderr
    assert "no drafter 'dflash'" in run("pull", "tiny", "--drafter", "dflash", exit_code=1).stderr
    assert hub.log == []
    assert "hub cache" in run("pull", "tiny", "--offline", exit_code=1).stderr
    assert "hub cache" in run("pull", "tiny", exit_code=1, HF_HUB_OFFLINE="1").stderr
    assert hub.log == []


def test_a_gated_model_names_page_and_place_of_the_token(run: Run, hub: FakeHub, tmp_path: Path) -> None:
    hub.token = "hf_right"
    refused = run("pull", "tiny", exit_code=1).stderr
    assert f"{hub.hub_url}/acme/tiny" in refused and "set HF_TOKEN" in refused
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("hf_wrong\n")
    refused = run("pull", "tiny", exit_code=1)
    assert str(tmp_path / "hf" / "token") in refused.stderr and "hf_wrong" not in refused.output
    (tmp_path / "hf" / "token").write_text("hf_right\n")
    assert "ready" in run("pull", "tiny", "--drafter", "none").stdout


def test_mirrors_from_the_environment(run: Run, hub: FakeHub) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
        mirrored = run("pull", "tiny", "--drafter", "none", HF_ENDPOINT=nowhere, LOCALSPEC_HUB_MIRRORS=hub.hub_url)
    assert "ready from acme/tiny@" in mirrored.stdout
    assert {request.authorization for request in hub.log} == {None}


def test_prune_leaves_running_pulls_alone(run: Run, tmp_path: Path) -> None:
    from localspec.storage.files import exclusive_lock

    for name in ("one", "two"):
        folder = tmp_path / "home" / "models" / ".partial" / name
        folder.mkdir(parents=True)
        (folder / "x.part").write_bytes(b"x" * 5000)
        (folder / "lock").write_bytes(b"")
    assert document(run("prune", "--json")) == {"freed_bytes": 0}
    with exclusive_lock(tmp_path / "home" / "models" / ".partial" / "two" / "lock", wait=False):
        assert document(run("prune", "--all", "--json"))["freed_bytes"] >= 5000
        assert [path.name for path in (tmp_path / "home" / "models" / ".partial").iterdir()] == ["two"]


def test_an_imported_model_is_shown_too(run: Run, hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    for name, data in hub.files.items():
        (folder / name).write_bytes(data)
    run("import", str(folder))
    shown = document(run("show", "own", "--fit", "--json"))
    assert shown["architecture"] == "qwen3_5" and shown["source"].startswith("imported from")
    assert len(shown["fit"]) == len(budget.SOLD_SIZES_GIB)


@pytest.mark.torch
@pytest.mark.parametrize(("exit_code", "code"), [(1, "model_not_found"), (3, "machine_cannot")])
def test_a_first_answer_without_room_for_the_demo_ends_as_a_pull_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exit_code: int, code: str
) -> None:
    def refuse(*arguments: object) -> None:
        raise HubError("no room", exit_code)

    monkeypatch.setattr("localspec.hub.get.get", refuse)
    locate = make_locator(load_settings({"LOCALSPEC_HOME": str(tmp_path)}), offline=True)
    with pytest.raises(EngineError) as caught:
        locate("smollm2-135m", print)
    assert caught.value.code == code


def test_doctor_s_exit_codes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 with warnings at most, 1 for what can be mended, 3 for a machine that cannot run what is installed."""
    monkeypatch.setattr("localspec.hub.doctor.read_gpus", lambda: GpuReading(problem="no NVIDIA driver is installed"))
    monkeypatch.setattr("localspec.hub.doctor_places.SPEED_TEST_BYTES", 1 << 20)
    report = document(run("doctor", "--json"))
    by_name = {check["name"]: check for check in report["checks"]}
    assert report["exit_code"] == 0 and by_name["gpu driver"]["status"] == "skipped"
    assert {"torch", "compiler", "kernel self-test", "disk speed", "models", "chats", "port", "terminal"} <= set(
        by_name
    )
    chats = tmp_path / "home" / "chats.sqlite3"
    chats.write_bytes(b"not a database" * 100)
    damaged = document(run("doctor", "--json", exit_code=1))
    assert [check["name"] for check in damaged["checks"] if check["status"] == "failed"] == ["chats"]
    chats.unlink()
    run("pull", "tiny", "--drafter", "none")  # its catalogue entry needs a card of 8 GB
    cannot = run("doctor", exit_code=3).stdout
    assert "failed   gpu driver" in cannot and "reboot" in cannot


@pytest.mark.torch
def test_doctor_goes_on_where_something_cannot_be_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "home" / "models.toml"
    own.write_text(CATALOGUE.replace("title", "titel"))
    report = document(run("doctor", "--json", exit_code=1))
    failed = {check["name"]: check for check in report["checks"] if check["status"] == "failed"}
    assert list(failed) == ["own models"] and "models.toml" in failed["own models"]["finding"]
    own.unlink()
    place = tmp_path / "home" / "models" / "locked"
    place.mkdir(parents=True)
    read = Path.stat

    def refuse(path: Path, *, follow_symlinks: bool = True) -> Any:
        if path.parent == place:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", refuse)
    assert run("ls").exit_code == 0
    report = document(run("doctor", "--json", exit_code=1))
    failed = {check["name"]: check for check in report["checks"] if check["status"] == "failed"}
    assert list(failed) == ["models"] and "locked" in failed["models"]["finding"]
    assert "permissions" in failed["models"]["finding"]


def test_doctor_runs_the_kernels_own_test(monkeypatch: pytest.MonkeyPatch) -> None:
    from localspec.commands.doctor import kernel_test
    from localspec.kernels import self_test

    good = self_test.GroupResult("linear", 0.0, 1.0, 0.1)
    outcomes = [good, self_test.GroupResult("gdn", 2.0, 1.0, 0.1, "too far")]
    seen: list[str] = []

    def run(ops: object, device: object) -> self_test.SelfTestReport:
        seen.append(str(device))
        return self_test.SelfTestReport(tuple(outcomes), (), 0.2)

    monkeypatch.setattr(self_test, "run", run)
    found = kernel_test("cpu")
    assert seen == ["cpu"] and found.failures == ("gdn: too far",) and "1 of 2" in found.summary
