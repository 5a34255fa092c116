"""Copying text out: the terminal (OSC 52, by the app), the desktop's own program, and a file that always works."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

# Terminals cut or refuse longer escape sequences; the base64 of this many bytes stays under 100,000 characters.
TERMINAL_LIMIT_BYTES = 74_994
# The last one is Windows' own, within reach of WSL; it takes UTF-16.
_PROGRAMS = (("wl-copy",), ("xclip", "-selection", "clipboard"), ("clip.exe",))
_TIMEOUT_S = 2.0


def copy_with_desktop(text: str) -> str:
    """Hand text to `wl-copy`, `xclip` or `clip.exe`; the name of the one that took it, or an empty string."""
    for program, *arguments in _PROGRAMS:
        if shutil.which(program) is None:
            continue
        try:
            subprocess.run(
                [program, *arguments],
                input=text.encode("utf-16" if program == "clip.exe" else "utf-8", "replace"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return program
    return ""


def write_private(path: Path, text: str) -> None:
    """Write a file that only the owner can read, replacing an older one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f".{path.name}.part")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    partial.replace(path)
