"""What an empty chat says."""

from __future__ import annotations

from localspec.api.types import MetricsSnapshot, ModelInfo
from localspec.tui.text import clean_line


def welcome_text(model: ModelInfo | None, now: MetricsSnapshot, *, private: bool) -> str:
    """A few lines: the model or what is loading, and how to begin."""
    if model is None:
        name = clean_line(now.model_id) or "the model"
        stage = f": {clean_line(now.stage)}" if now.stage else ""
        lines = (
            [f"{name} could not be loaded{stage}."]
            if now.state == "failed"
            else [f"Loading {name}{stage}.", "Write already: the question is sent when the model is ready."]
        )
    else:
        lines = [
            f"{clean_line(model.title)}{' (demo)' if model.demo else ''}",
            *([clean_line(model.note)] if model.note else []),
        ]
    if private:
        lines.append("Private chat: nothing of it is written to disk. /save keeps it.")
    return "\n".join([*lines, "", "Enter sends · Ctrl+J new line · Esc stops · F1 all keys · / commands"])
