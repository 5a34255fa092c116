"""Sizes that keep the code readable: files to 400 lines, functions to 60, every package with a docstring."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "localspec"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_file_is_small_and_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert ast.get_docstring(tree), f"{path} does not say what it knows"
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{path}:{node.lineno} {node.name} has {length} lines"


def test_every_folder_is_a_package() -> None:
    missing = [folder for folder in PACKAGE.rglob("*") if folder.is_dir() and "__pycache__" not in folder.parts]
    assert not [folder for folder in missing if list(folder.glob("*.py")) and not (folder / "__init__.py").exists()]
