"""What a terminal can show of the chat, told from what the environment says of it. Nothing is sent to the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from localspec.hub.doctor_report import Check

# Programs that tell keys such as Shift+Enter apart, and those that let a program fill the clipboard (OSC 52).
EXTENDED_KEYS = ("kitty", "ghostty", "wezterm", "foot", "alacritty", "iterm.app", "rio")
CLIPBOARD = (*EXTENDED_KEYS, "xterm", "windows terminal", "contour", "mintty", "konsole")


@dataclass(frozen=True)
class TerminalFacts:
    """What the environment says of the terminal; None where it does not say."""

    is_terminal: bool
    columns: int
    lines: int
    term: str | None
    color_term: str | None
    inside_tmux: bool = False
    program: str | None = None
    """TERM_PROGRAM, or another name by which the terminal makes itself known."""
    over_ssh: bool = False
    encoding: str = "utf-8"


def check_terminal(terminal: TerminalFacts) -> Check:
    """What the chat's interface can show here."""
    if not terminal.is_terminal:
        return Check(
            "terminal", "skipped", "not a terminal", "'localspec chat --plain' and 'localspec run' work in pipes"
        )
    finding = ", ".join([_named(terminal), f"{terminal.columns}x{terminal.lines}", *_abilities(terminal)])
    if terminal.term in (None, "dumb"):
        return Check("terminal", "warning", finding, "this terminal cannot draw; use 'localspec chat --plain'")
    if terminal.encoding.lower().replace("-", "") != "utf8":
        advice = f"its encoding is {terminal.encoding}; set LANG to a UTF-8 locale such as C.UTF-8"
        return Check("terminal", "warning", finding, advice)
    if terminal.columns < 80 or terminal.lines < 24:
        return Check("terminal", "warning", finding, "80x24 or larger is needed for all panels")
    return Check("terminal", "ok", finding)


def _named(terminal: TerminalFacts) -> str:
    name = terminal.term or "unknown"
    return f"{terminal.program} ({name})" if terminal.program else name


def _abilities(terminal: TerminalFacts) -> list[str]:
    known = f"{terminal.program or ''} {terminal.term or ''}".lower()
    found = ["true colour" if terminal.color_term in ("truecolor", "24bit") else "256 colours or fewer"]
    if terminal.inside_tmux:
        found.append("in tmux (keys and clipboard as its extended-keys and set-clipboard allow)")
        return found
    found.append("all keys" if any(name in known for name in EXTENDED_KEYS) else "some keys alike")
    found.append("clipboard" if any(name in known for name in CLIPBOARD) else "clipboard unknown (OSC 52)")
    return [*found, *(["over SSH"] if terminal.over_ssh else [])]
