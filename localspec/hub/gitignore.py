"""Which files a .gitignore leaves out, by git's documented rules. Knows patterns and relative paths, opens one file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MAX_IGNORE_BYTES = 1 << 20


@dataclass(frozen=True)
class _Rule:
    pattern: re.Pattern[str]
    """Over the path from the folder of the file that holds the rule."""
    folder: Path
    keeps: bool
    folders_only: bool


@dataclass(frozen=True)
class IgnoreRules:
    """Rules from the outermost folder to the innermost; of those that match the last decides."""

    rules: tuple[_Rule, ...] = ()

    @classmethod
    def above(cls, folder: Path) -> IgnoreRules:
        """Rules of the repository that holds `folder`, down to but without the folder's own."""
        chain = [folder, *folder.parents]
        root = next((at for at, parent in enumerate(chain) if (parent / ".git").exists()), None)
        if root is None:
            return cls()
        rules = cls(tuple(_read(chain[root] / ".git" / "info" / "exclude", chain[root])))
        for parent in reversed(chain[1 : root + 1]):
            rules = rules.inside(parent)
        return rules

    def inside(self, folder: Path) -> IgnoreRules:
        """With those of a .gitignore that lies in `folder`."""
        return IgnoreRules((*self.rules, *_read(folder / ".gitignore", folder)))

    def ignores(self, path: Path, is_folder: bool) -> bool:
        """Whether the path is left out. The folders above it must have been asked before: git does not enter them."""
        for rule in reversed(self.rules):
            if rule.folders_only and not is_folder:
                continue
            if rule.pattern.fullmatch(PurePosixPath(path.relative_to(rule.folder)).as_posix()):
                return not rule.keeps
        return False


def _read(path: Path, folder: Path) -> Iterator[_Rule]:
    try:
        with path.open("rb") as file:
            lines = file.read(MAX_IGNORE_BYTES).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return
    yield from _parse(lines, folder)


def _parse(lines: Iterable[str], folder: Path) -> Iterator[_Rule]:
    for line in lines:
        text = line.rstrip() if not line.rstrip("\n").endswith("\\ ") else line
        if not text or text.startswith("#"):
            continue
        keeps = text.startswith("!")
        text = text[1:] if keeps else text
        folders_only = text.endswith("/")
        text = text.rstrip("/")
        if not text:
            continue
        # A slash inside ties the pattern to its folder; else it names a file or folder at any depth.
        tied = "/" in text
        try:
            pattern = re.compile(("" if tied else "(?:.*/)?") + _expression(text.lstrip("/")), re.DOTALL)
        except re.error:
            continue
        yield _Rule(pattern, folder, keeps, folders_only)


_TOKEN = re.compile(r"\A\*\*/|/\*\*/|/\*\*\Z|\*+|\?|\[[!^]?\]?[^\]]*\]|\\.|.", re.DOTALL)


def _expression(pattern: str) -> str:
    return "".join(_translated(part) for part in _TOKEN.findall(pattern))


def _translated(part: str) -> str:
    fixed = {"**/": "(?:.*/)?", "/**/": "/(?:.*/)?", "/**": "/.*", "?": "[^/]"}
    if part in fixed:
        return fixed[part]
    if part.startswith("*"):
        return "[^/]*"
    if part.startswith("[") and len(part) > 1:
        inner = part[1:-1].replace("\\", "\\\\").replace("[", "\\[")
        return f"[^{inner[1:]}]" if inner.startswith(("!", "^")) else f"[{inner}]"
    return re.escape(part[1:] if part.startswith("\\") and len(part) > 1 else part)
