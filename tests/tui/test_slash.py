"""Reading and completing commands, settings, attachments, and that every command in the table can be run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localspec.api.types import Sampling
from localspec.chats import Stored
from localspec.tui.attachments import AttachmentError, Attachments, fenced, find_files, read_file
from localspec.tui.options import SETTING_NAMES, ChatSettings, SettingError, UiOptions, with_setting
from localspec.tui.slash import SLASHES, SlashError, complete, read_slash
from localspec.tui.slash_runner import SlashRunner, free_path, settings_text
from localspec.tui.suggest import suggestions


@pytest.mark.parametrize("text", ["hello", "//usr", "/usr/bin is a folder", "/a\nb", "", " /help"])
def test_other_text_is_not_a_command(text: str) -> None:
    assert read_slash(text) is None


def test_commands_are_read_and_may_be_shortened() -> None:
    assert read_slash("/set  top_p 0.5 ") == ("set", "top_p 0.5")
    assert read_slash("/ret") == ("retry", "")
    with pytest.raises(SlashError, match="use /help, /model, "):
        read_slash("/zzz")
    with pytest.raises(SlashError, match="use /copy, /clear"):
        read_slash("/c")


def test_every_command_of_the_table_runs() -> None:
    host: Any = None
    assert SlashRunner(host).names == {slash.name for slash in SLASHES}


def test_completion() -> None:
    assert [value for value, _ in complete("/dr")] == ["/draft "]
    assert [value for value, _ in complete("/draft n", drafters=("off", "ngram"))] == ["/draft ngram"]
    assert [value for value, _ in complete("/model ", models=("a", "b"))] == ["/model a", "/model b"]
    assert ("/set top_p ", "") in complete("/set t")
    assert complete("/draft ngram", drafters=("ngram",)) == [] and complete("no") == []


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [("temperature", "0.7", 0.7), ("top_k", "40", 40), ("seed", "7", 7), ("min_p", "0", 0.0)],
)
def test_sampling_settings_reach_the_request(name: str, value: str, got: float) -> None:
    settings = with_setting(ChatSettings(), name, value)
    request = settings.request((Stored("user", "q"),), "", Sampling(top_p=0.9), chat_id="c", private=False)
    assert getattr(request.sampling, name) == got
    assert request.sampling.top_p == 0.9
    assert with_setting(settings, name, "default") == ChatSettings()


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "hot"), ("temperature", "-1"), ("temperature", "nan"), ("top_k", "1.5"), ("max_tokens", "0"),
     ("seed", str(2**64)), ("colour", "red"), ("depth", "")],
)  # fmt: skip
def test_wrong_settings_say_what_would_work(name: str, value: str) -> None:
    with pytest.raises(SettingError, match=r"from|use one of"):
        with_setting(ChatSettings(), name, value)


def test_settings_survive_the_store_and_odd_values_are_left_out() -> None:
    settings = ChatSettings({"temperature": 0.5, "top_k": 3}, 100, "ngram", 4, True, 50)
    assert ChatSettings.from_json(settings.to_json()) == settings
    odd = {
        "sampling": {"temperature": "hot", "x": 1, "top_k": 2},
        "depth": [],
        "thinking": "yes",
        "max_tokens": -1,
        "z": 1,
    }
    assert ChatSettings.from_json(odd) == ChatSettings({"top_k": 2})
    assert settings_text(ChatSettings()).startswith("Nothing is set")
    assert set(SETTING_NAMES) > {"temperature", "max_tokens"}


def test_request_leaves_out_empty_answers_and_carries_privacy() -> None:
    messages = (Stored("user", "a"), Stored("assistant", "", state="error"), Stored("user", "b"))
    settings = ChatSettings(thinking=False, drafter="ngram", depth=2, max_tokens=9)
    request = settings.request(messages, "Be brief.", Sampling(), chat_id="c", private=True)
    assert [(m.role, m.content) for m in request.messages] == [("system", "Be brief."), ("user", "a"), ("user", "b")]
    assert request.template_options == {"enable_thinking": False}
    assert (request.private, request.chat_id, request.drafter, request.depth, request.max_tokens) == (
        True,
        "c",
        "ngram",
        2,
        9,
    )


def test_files_are_checked_and_fenced(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = '```'\n")
    (tmp_path / "b.bin").write_bytes(b"\x00\x01")
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    assert fenced("a.py", read_file(tmp_path / "a.py")) == "File `a.py`:\n````py\nx = '```'\n````\n"
    for name, complaint in (("b.bin", "binary"), ("c.txt", "UTF-8"), ("no", "not a file"), (".", "not a file")):
        with pytest.raises(AttachmentError, match=complaint):
            read_file(tmp_path / name)


def test_chips_stand_for_their_text() -> None:
    chips = Attachments()
    one, two = chips.add("pasted 50 lines", "ONE"), chips.add("pasted 50 lines", "TWO")
    assert one != two
    assert chips.expand(f"a {two} b {one}") == "a TWO b ONE"
    chips.clear()
    assert chips.expand(one) == one


def test_file_picker_finds_by_letters_and_skips_hidden(tmp_path: Path) -> None:
    for name in ("src/engine.py", "src/deep/engine_test.py", ".git/engine", "readme.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert find_files(tmp_path, "engpy") == ["src/engine.py", "src/deep/engine_test.py"]
    options = UiOptions(export_dir=tmp_path, copy_file=tmp_path / "c")
    assert suggestions("see @readm", None, options) == [("@readme.md", "readme.md")]
    assert suggestions("mail a@readm", None, options) == []


def test_export_names_are_safe_and_free(tmp_path: Path) -> None:
    path = free_path(tmp_path, "../../etc/passwd: a “title”", "md")
    assert path.parent == tmp_path and path.name == "etc-passwd--a--title.md"
    path.write_text("x")
    assert free_path(tmp_path, "../../etc/passwd: a “title”", "md").name == "etc-passwd--a--title-2.md"
    assert free_path(tmp_path, "???", "json").name == "chat.json"
