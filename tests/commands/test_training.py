"""`train-draft` and `adapt` from the command line to installed files, on a tiny model of random weights."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from localspec.chats import NewChat, Stored, open_store
from localspec.commands.adapt import adapt
from localspec.commands.train_draft import train_draft
from localspec.formats.checkpoint import open_checkpoint, read_config
from localspec.hub.install import LocalFile, NewModel, install
from localspec.hub.layout import read_manifest
from localspec.hub.meter import ProgressMeter
from localspec.hub.pull import drafters_directory
from localspec.hub.records import ignore_progress
from localspec.storage.files import exclusive_lock
from localspec.training.export import export
from localspec.training.target import DenseTarget
from localspec.training.trainer import Trainer
from tests.helpers.models import load_model
from tests.helpers.tiny_text import tiny_text_model
from tests.training.common import CPU, TinyTarget, drafter

pytestmark = pytest.mark.torch

TRAIN = ("tiny", "--device", "cpu", "--steps", "3", "--answer-tokens", "12", "--tokens-per-batch", "256", "--offline")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with an installed model."""
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "home"))
    folder = tiny_text_model("qwen2", 2, tmp_path / "model")
    take(folder, NewModel("tiny", "here", "none"), tmp_path / "home")
    return tmp_path / "home"


def take(folder: Path, model: NewModel, data_dir: Path) -> None:
    files = [LocalFile(path.name, path, None, "copied") for path in sorted(folder.iterdir()) if path.is_file()]
    install(files, model, data_dir, ProgressMeter(ignore_progress))


def invoke(command: click.Command, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, arguments)
    assert result.exception is None or isinstance(result.exception, (SystemExit, click.ClickException)), result.exc_info
    return result.exit_code, result.output


def prompts(folder: Path) -> Path:
    rows: list[Any] = [{"prompt": f"say {n}"} for n in range(20)]
    rows += [{"turns": [f"count to {n}", "again"]} for n in range(12)]
    rows += [
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": f"why {n}"}]} for n in range(12)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "more.txt").write_text("a line\n\nanother line\n")
    return folder / "prompts.jsonl"


def trained(home: Path, method: str = "eagle3") -> Path:
    out = home.parent / method
    given = ("--prompts", str(prompts(home.parent)), "--prompts", str(home.parent / "more.txt"))
    code, text = invoke(train_draft, *TRAIN, "--method", method, *given, "--out", str(out), "--form", "nvfp4")
    assert code == 0, text
    assert "on held-out prompts" in text
    return out


def test_a_drafter_is_trained_resumed_and_refused(home: Path) -> None:
    out = trained(home, "dspark")
    report = json.loads((out / "training.json").read_text())
    assert report["answers"] > 30 and report["curve"][-1]["step"] == 3
    before = (out / "model.safetensors").read_bytes()
    size = (out / "answers" / "index.bin").stat().st_size
    trained(home, "dspark")
    # Every prompt has its answer and every step is done: nothing changes.
    assert (out / "model.safetensors").read_bytes() == before
    assert (out / "answers" / "index.bin").stat().st_size == size
    other = ("--prompts", str(home.parent / "prompts.jsonl"), "--out", str(out), "--method", "eagle3")
    code, text = invoke(train_draft, *TRAIN, *other)
    assert code == 1 and "another training" in text
    with exclusive_lock(out / "training.lock", wait=False):
        code, text = invoke(train_draft, *TRAIN, "--method", "dspark", *other[:2], "--out", str(out))
        assert code == 1 and "another run trains" in text
    take(tiny_text_model("qwen2", 5, home.parent / "other"), NewModel("other", "here", "none"), home)
    code, text = invoke(train_draft, "other", *TRAIN[1:], "--method", "dspark", *other[:2], "--out", str(out))
    assert code == 1 and "answers of another model" in text
    (home.parent / "bad.jsonl").write_text("{}\n")
    code, text = invoke(train_draft, *TRAIN, "--prompts", str(home.parent / "bad.jsonl"), "--out", str(out))
    assert code == 1 and "bad.jsonl, line 1 has none of prompt" in text


def test_prompts_that_nothing_can_be_learnt_from_are_left_out(home: Path) -> None:
    rows = [{"prompt": f"say {n}"} for n in range(40)] + [{"prompt": "many words " * 4000}]
    (home.parent / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = home.parent / "long"
    code, text = invoke(train_draft, *TRAIN, "--prompts", str(home.parent / "long.jsonl"), "--out", str(out))
    assert code == 0 and "1 prompts of more than 960 tokens are left out" in text
    assert (out / "answers" / "index.bin").stat().st_size == 40 * 32


def test_a_folder_with_another_model_is_not_written_to(home: Path) -> None:
    out = home / "models" / "tiny"
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    code, text = invoke(train_draft, *TRAIN, "--prompts", str(prompts(home.parent)), "--out", str(out))
    assert code == 1 and "would be overwritten; take another folder" in text
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("command", [train_draft, adapt])
def test_options_that_no_training_can_honour_are_refused(command: click.Command, home: Path) -> None:
    given = ("--prompts", str(prompts(home.parent)), "--out", str(home / "out")) if command is train_draft else ()
    for minutes in ("inf", "nan"):
        code, text = invoke(command, "tiny", *given, "--minutes", minutes)
        assert code == 2 and "is no finite number" in text
    if command is train_draft:
        assert invoke(command, "tiny", *given, "--seed", str(1 << 31))[0] == 2


def test_damaged_prompt_files_are_named(home: Path) -> None:
    packed = gzip.compress(prompts(home.parent).read_bytes())
    out = ("--out", str(home / "out"))
    for name, data in (("cut", packed[:200]), ("torn", packed[:30] + b"\xff" * 40 + packed[70:])):
        path = home.parent / f"{name}.jsonl.gz"
        path.write_bytes(data)
        code, text = invoke(train_draft, *TRAIN, "--prompts", str(path), *out)
        assert code == 1 and f"{path} is a damaged gzip file" in text
    half = home.parent / "half.jsonl"
    half.write_text(prompts(home.parent).read_text() + '{"prompt": "half a \\ud800 pair"}\n')
    code, text = invoke(train_draft, *TRAIN, "--prompts", str(half), *out)
    assert code == 0, text


def talk(home: Path, chats: int, ids_from: int = 0, question: str = "question") -> None:
    """Saved conversations whose answers are ids of the model."""
    store = open_store(home / "chats.sqlite3")
    for number in range(chats):
        chat = store.create(NewChat(title="t", model_id="tiny", system_prompt="be brief"))
        asked = store.add(chat.id, Stored("user", f"{question} {number}"))
        ids = tuple(ids_from + (7 * number + 3 * place) % 250 for place in range(20))
        answer = Stored("assistant", "text", asked.id, state="done", model_id="tiny", token_ids=ids)
        store.show_branch(chat.id, store.add(chat.id, answer).id)
    store.close()


def test_chats_are_read_only_with_agreement(home: Path) -> None:
    out = trained(home)
    folder = home.parent / "only"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((out / name).read_bytes())
    model = NewModel("tiny.eagle3", "trained", "none", needs_tokenizer=False)
    take(folder, model, drafters_directory(home))
    talk(home, 30)
    common = ("tiny", "--device", "cpu", "--minutes", "0.05", "--json")
    code, text = invoke(adapt, *common)
    assert code == 2 and "agreement" in text
    assert invoke(adapt, *common, "--nightly") == (0, "")
    with exclusive_lock(home / "adapt.lock", wait=False):
        code, text = invoke(adapt, *common, "--yes")
        assert code == 1 and "another adaptation" in text
    code, text = invoke(adapt, *common, "--yes")
    assert code == 0, text
    assert "acceptance length" in text
    (result,) = json.loads(text[text.index("[\n") :])
    installed = drafters_directory(home) / "models" / "tiny.eagle3"
    same = (installed / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert result["answers"] == 30 and result["kept"] == (result["after"] > result["before"]) == (not same)
    assert read_manifest(installed).source == ("adapted on this machine" if result["kept"] else "trained")
    # Each model has its own time of the newest answer.
    consent = home / "adapt.json"
    assert set(json.loads(consent.read_text())["adapted_s"]) == {"tiny"} and "agreed_s" in consent.read_text()
    # Nothing new was said since.
    assert json.loads(invoke(adapt, *common, "--nightly")[1]) == []
    if result["kept"]:
        assert "from before is back" in invoke(adapt, "tiny", "--undo")[1]
        assert (installed / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert "no longer read" in invoke(adapt, "--withdraw")[1]
    assert invoke(adapt, *common)[0] == 2


def with_drafters(home: Path, *kinds: str) -> None:
    """Untrained drafters of the model, installed."""
    dense = DenseTarget(read_config(home.parent / "model"), open_checkpoint(home.parent / "model"), CPU, torch.float32)
    target = TinyTarget(home.parent / "model", load_model(home.parent / "model"), dense)
    for kind in kinds:
        export(drafter(kind, target, range(240)), home.parent / kind)
        model = NewModel(f"tiny.{kind}", "pulled", "none", needs_tokenizer=False)
        take(home.parent / kind, model, drafters_directory(home))


ADAPT = ("tiny", "--device", "cpu", "--minutes", "0.05", "--yes", "--json")


def test_a_drafter_that_cannot_be_trained_keeps_no_other_from_it(home: Path) -> None:
    with_drafters(home, "eagle3", "dflash")
    path = home.parent / "dflash" / "config.json"
    config = json.loads(path.read_text())
    config["dflash_config"]["causal"] = False
    path.write_text(json.dumps(config))
    take(path.parent, NewModel("tiny.dflash", "pulled", "none", needs_tokenizer=False), drafters_directory(home))
    talk(home, 30)
    code, text = invoke(adapt, *ADAPT)
    assert code == 0, text
    first, second = json.loads(text[text.index("[\n") :])
    assert "before" in first and second["outcome"].startswith("unchanged: block drafters are trained with causal")
    assert json.loads((home / "adapt.json").read_text())["adapted_s"]
    code, text = invoke(adapt, *ADAPT, "--method", "dflash")
    assert code == 1 and "causal" in text


def test_answers_that_cannot_be_learnt_from_are_left_out(home: Path) -> None:
    with_drafters(home, "mtp")
    talk(home, 30)
    # Of a model with a larger vocabulary that had the same name; and a chat that the template refuses.
    talk(home, 3, ids_from=1000)
    path = home / "models" / "tiny" / "tokenizer_config.json"
    refusing = "{% if 'forbidden' in messages[-1].content %}{{ raise_exception('no') }}{% endif %}"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "chat_template": refusing + settings["chat_template"]}))
    again = home.parent / "again"
    again.mkdir()
    for each in path.parent.iterdir():
        (again / each.name).write_bytes(each.read_bytes())
    (again / "localspec.json").unlink()
    take(again, NewModel("tiny", "here", "none"), home)
    talk(home, 3, question="forbidden")
    code, text = invoke(adapt, *ADAPT)
    assert code == 0, text
    assert json.loads(text[text.index("[\n") :])[0]["answers"] == 30


def test_no_file_holds_the_answers_while_they_are_learnt(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever kills the run in the middle leaves nothing of the chats behind."""
    with_drafters(home, "eagle3")
    talk(home, 30)
    temporary = home.parent / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    seen: list[int] = []

    def look(self: Trainer, step: int) -> Any:
        seen.append(sum(path.is_file() for path in temporary.rglob("*")))
        return backward(self, step)

    backward = Trainer._backward
    monkeypatch.setattr(Trainer, "_backward", look)
    code, text = invoke(adapt, *ADAPT)
    assert code == 0, text
    assert len(seen) > 4 and set(seen) == {0}


def test_a_card_that_is_too_small_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_drafters(home, "eagle3")
    talk(home, 30)

    def full(self: Trainer, step: int) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Trainer, "_backward", full)
    code, text = invoke(adapt, *ADAPT)
    assert code == 1 and "cpu has too little memory to train for tiny" in text
