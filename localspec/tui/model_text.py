"""What the models screen says: rows, budget bars, progress of pulls. Pure: records in, styled text out."""

from __future__ import annotations

from collections.abc import Iterable

from rich.style import Style
from rich.text import Text

from localspec.api.library import Budget, LibraryModel, PullStep
from localspec.tui.text import bar, bytes_text, clean_line, percent, seconds_text, short_count

_DIM = Style(dim=True)
_STRONG = Style(bold=True)
_NAME_CELLS = 24
# Each use has a glyph of its own, so that the bar can be read without colour.
_USES = (
    ("weights", "█", Style(color="#5c9df5")),
    ("runtime", "▓", Style(color="#b48ef0")),
    ("state", "▒", Style(color="#d9c24a")),
    ("cache", "░", Style(color="#4fc38a")),
)
_FREE = "·"


def matching(models: Iterable[LibraryModel], typed: str) -> list[LibraryModel]:
    """Models whose id or title holds all typed words."""
    words = typed.casefold().split()
    return [m for m in models if all(word in f"{m.id} {m.title}".casefold() for word in words)]


def row_text(model: LibraryModel, budget: Budget | None, step: PullStep | None, is_loaded: bool) -> Text:
    """One line: mark, name, size, what fits, title."""
    mark = "● " if is_loaded else "✓ " if model.installed else "  "
    text = Text(mark, no_wrap=True, overflow="ellipsis")
    text.append(f"{clean_line(model.id)[: _NAME_CELLS - 1]:<{_NAME_CELLS}}", _STRONG if model.installed else "")
    if step is not None:
        text.append(f"fetching {progress_share(step)}", _STRONG)
        return text
    size = bytes_text(model.size_bytes) if model.size_bytes else ""
    text.append(f"{size:>8}  ")
    text.append(f"{fit_words(budget):<14}", "" if budget is not None and budget.context_tokens else _DIM)
    text.append(f"  {clean_line(model.problem or model.title)}{' (demo)' if model.demo else ''}", _DIM)
    return text


def fit_words(budget: Budget | None) -> str:
    """`fits 65k`, `fits about 71k`, `too large`."""
    if budget is None:
        return ""
    if not budget.context_tokens:
        return "too large here"
    return f"fits {'about ' if budget.estimated else ''}{short_count(budget.context_tokens)}"


def details_lines(model: LibraryModel, budget: Budget | None, step: PullStep | None, width: int) -> list[Text]:
    """The model in full: title, facts, budget, progress or advice. At most six lines."""
    facts = [model.weight_format, model.licence, *drafter_words(model)]
    if not model.verified and not model.installed:
        facts.append("not checked against its source yet")
    lines = [
        Text.assemble((clean_line(model.title), _STRONG), " (demo)" if model.demo else ""),
        Text(clean_line(" · ".join(fact for fact in facts if fact)), style=_DIM),
    ]
    if budget is not None:
        lines += budget_lines(budget, width)
    elif not model.installed:
        lines.append(Text("How much of its context fits is known when it is installed.", style=_DIM))
    if step is not None:
        lines.append(progress_line(step, width))
    elif model.problem or model.advice:
        lines.append(Text(clean_line(model.problem or model.advice), style="" if model.problem else _DIM))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def drafter_words(model: LibraryModel) -> list[str]:
    """Drafters that are here, and how to fetch one that is not."""
    kinds = dict.fromkeys((*model.drafters_here, *model.drafters))
    if not kinds:
        return []
    words = [f"drafters {', '.join(f'{kind} ✓' if kind in model.drafters_here else kind for kind in kinds)}"]
    missing = [kind for kind in kinds if kind not in model.drafters_here]
    if model.installed and missing:
        words.append(f"type {model.id}.{missing[0]} to fetch one")
    return words


def budget_lines(budget: Budget, width: int) -> list[Text]:
    """The bar of the device's free memory by use, and its legend."""
    device = clean_line(budget.device)
    if not budget.weights_bytes:
        known = (
            f"about {short_count(budget.context_tokens)} tokens of context fit"
            if budget.context_tokens
            else "too large"
        )
        return [Text(f"{known} on {device} ({bytes_text(budget.available_bytes)} free)")]
    uses = {
        "weights": budget.weights_bytes,
        "runtime": budget.runtime_bytes,
        "state": budget.state_bytes,
        "cache": budget.cache_bytes,
    }
    scale = max(budget.available_bytes, sum(uses.values()), 1)
    line, filled, total = Text(), 0, 0
    for name, glyph, style in _USES:
        total += uses[name]
        cells = round(total / scale * width) - filled
        line.append(glyph * cells, style)
        filled += cells
    line.append(_FREE * (width - filled), _DIM)
    legend = Text()
    for name, glyph, style in _USES:
        if uses[name]:
            legend.append(glyph, style)
            legend.append(f" {name} {bytes_text(uses[name])}  ")
    if budget.context_tokens:
        whole = "" if budget.context_tokens < budget.context_limit_tokens else ", all of it"
        words = f"{short_count(budget.context_tokens)} tokens of context fit{whole}"
    else:
        words = "does not fit"
    return [Text(f"{words}: {bytes_text(budget.available_bytes)} free on {device}"), line, legend]


def progress_share(step: PullStep) -> str:
    """`43%`, or the stage where there is no size."""
    if step.total_bytes:
        return percent(step.done_bytes / step.total_bytes)
    return clean_line(step.stage)


def progress_line(step: PullStep, width: int) -> Text:
    """Bar, share, speed and time left of a pull."""
    if not step.total_bytes:
        return Text(clean_line(step.message))
    words = f" {progress_share(step)} of {bytes_text(step.total_bytes)}"
    if step.rate_bytes_per_s:
        words += f" · {bytes_text(step.rate_bytes_per_s)}/s"
    if step.eta_s is not None:
        words += f" · {seconds_text(step.eta_s)} left"
    stage = f"{clean_line(step.stage)} "
    room = max(6, width - len(stage) - len(words))
    filled = bar(step.done_bytes / step.total_bytes, min(room, 40))
    return Text.assemble(
        stage, (filled.rstrip(), _USES[0][2]), (_FREE * (len(filled) - len(filled.rstrip())), _DIM), words
    )
