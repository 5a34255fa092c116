"""What the tuner screen says, as styled lines. Pure: a report in, text out."""

from __future__ import annotations

from collections.abc import Iterator

from rich.style import Style
from rich.text import Text

from localspec.api.tuning import Candidate, TunerChoice, TunerReport
from localspec.tui.origins import style_of
from localspec.tui.text import bar, clean_line, short_count

_TITLE = Style(bold=True)
_DIM = Style(dim=True)
_BAR = Style(color="#5c9df5")
_NAME_CELLS = 20
HOW = (
    "The tuner weighs drafters by expected tokens a second: 1 plus the chances that each guess is kept, divided by the "
    "milliseconds of such a step, both measured here while answers are written. It keeps the best, apart for each kind "
    "of text, number of answers at once and length of context, and tries the others for a few steps now and then: "
    "rarely while they lose, soon when the text changes. Answers are the same whatever it chooses."
)


def report_lines(report: TunerReport, width: int) -> list[Text]:
    """The choice now, the choices by kind of work with their candidates, and how the tuner works."""
    lines = [
        Text.assemble(
            ("Now: ", _TITLE), (_method(report.drafter, report.depth), _TITLE), f"  {clean_line(report.reason)}"
        )
    ]
    if report.by_hand:
        lines.append(Text("Chosen by hand: the tuner weighs nothing until /draft auto."))
    if not report.choices:
        lines.append(Text("Nothing is measured yet: the tuner learns while answers are written."))
    for choice in report.choices:
        lines.append(Text())
        lines.extend(_choice_lines(choice, width))
    lines.append(Text())
    lines.extend(_wrapped(HOW, width))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _choice_lines(choice: TunerChoice, width: int) -> Iterator[Text]:
    place = (
        f"{clean_line(choice.phase)}, {choice.active} at once, context from {short_count(choice.context_from_tokens)}"
    )
    yield Text.assemble((place, _TITLE))
    yield Text.assemble("  ", (_method(choice.drafter, choice.depth), _TITLE), f": {clean_line(choice.reason)}")
    rest = [f"{choice.decisions} decisions in this run" if choice.decisions else "known from an earlier run"]
    rest += [f"tries {clean_line(choice.next_trial)}"] if choice.next_trial else []
    yield Text("  " + " · ".join(rest), style=_DIM)
    top = max((candidate.tok_per_s for candidate in choice.candidates), default=0.0)
    for candidate in choice.candidates:
        yield _candidate_line(candidate, candidate.drafter == choice.drafter, top, width)


def _candidate_line(candidate: Candidate, is_chosen: bool, top: float, width: int) -> Text:
    depth = f" {candidate.depth}" if candidate.depth and candidate.drafter != "off" else ""
    # A name may be cut, a figure may not.
    name = clean_line(candidate.drafter)[: _NAME_CELLS - 1 - len(depth)] + depth
    figures = f"{candidate.tok_per_s:>8.1f} tok/s"
    step = f"  {candidate.tokens_per_step:.2f} tokens in {candidate.step_ms:.1f} ms"
    age = freshness(candidate)
    # The parts of the rate, and its bar, are left out where the words need the room.
    room = width - 2 - _NAME_CELLS - len(figures) - len(age) - 3
    if room >= len(step):
        figures, room = figures + step, room - len(step)
    room = min(16, room)
    line = Text("● " if is_chosen else "  ")
    line.append(f"{name:<{_NAME_CELLS}}", style_of(candidate.drafter) if candidate.drafter != "off" else "")
    line.append(figures, _TITLE if is_chosen else "")
    if room >= 6:
        line.append(f" {bar(candidate.tok_per_s / top if top else 0.0, room)}", _BAR)
    line.append(f"  {age}", _DIM)
    return line


def freshness(candidate: Candidate) -> str:
    """How much stands behind a figure, and how old it is."""
    source = f"{short_count(candidate.measured_steps)} steps" if candidate.measured_steps else "by its neighbours"
    if candidate.steps_ago is None:
        return f"{source}, earlier run"
    return f"{source}, {short_count(candidate.steps_ago)} ago"


def _method(drafter: str, depth: int) -> str:
    name = clean_line(drafter)
    return f"{name} {depth}" if depth and drafter != "off" else name


def _wrapped(text: str, width: int) -> Iterator[Text]:
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            yield Text(line, style=_DIM)
            line = word
        else:
            line = f"{line} {word}" if line else word
    yield Text(line, style=_DIM)
