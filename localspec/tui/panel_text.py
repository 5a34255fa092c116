"""What the live panel says, as styled lines. Pure: snapshots in, text out; it knows no widget and no clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

from localspec.api.types import DrafterMetrics, MetricsSnapshot, ModelInfo
from localspec.tui.origins import style_of
from localspec.tui.text import bar, bytes_text, clean_line, fitting, percent, short_count, sparkline
from localspec.tui.tier_text import disk_rate, tier_lines

_TITLE = Style(bold=True)
_DIM = Style(dim=True)
_STRONG = Style(bold=True)
_BAR = Style(color="#5c9df5")
HISTORY_LENGTH = 120
MAX_POSITIONS = 8


@dataclass(frozen=True)
class PanelState:
    """Everything the panel needs. `history` holds tokens per second of the last samples, the newest last."""

    model: ModelInfo | None = None
    now: MetricsSnapshot = field(default_factory=MetricsSnapshot)
    before: MetricsSnapshot | None = None
    history: tuple[float, ...] = ()
    address: str = ""
    private: bool = False

    def advanced(self, model: ModelInfo | None, now: MetricsSnapshot) -> PanelState:
        """The state after another sample."""
        history = (*self.history[-(HISTORY_LENGTH - 1) :], now.tok_per_s)
        # Step times are shown over the recent past: a new reference is taken when counters moved on or fell back.
        before = self.before
        if before is None or now.verify_steps < before.verify_steps or now.verify_steps - before.verify_steps > 64:
            before = self.now if self.now.verify_steps <= now.verify_steps else None
        return PanelState(model, now, before, history, self.address, self.private)


def acceptance(drafters: tuple[DrafterMetrics, ...]) -> float | None:
    """Accepted over drafted tokens of all drafters; None before the first draft."""
    drafted = sum(drafter.drafted_tokens for drafter in drafters)
    return sum(drafter.accepted_tokens for drafter in drafters) / drafted if drafted else None


def per_position(drafters: tuple[DrafterMetrics, ...]) -> tuple[float, ...]:
    """Share of drafts at offset 1, 2, ... that were accepted, over all drafters."""
    length = max((len(drafter.drafted_per_position) for drafter in drafters), default=0)
    rates = []
    for offset in range(length):
        drafted = sum(d.drafted_per_position[offset] for d in drafters if offset < len(d.drafted_per_position))
        accepted = sum(d.accepted_per_position[offset] for d in drafters if offset < len(d.accepted_per_position))
        rates.append(accepted / drafted if drafted else 0.0)
    return tuple(rates)


def speedup_text(now: MetricsSnapshot) -> str:
    """`×1.84 against plain`, or what is missing to say so."""
    if now.speedup_vs_plain is not None:
        return f"×{now.speedup_vs_plain:.2f} against plain"
    if now.state == "loading":
        return "against plain: not measured yet"
    if now.drafter in ("server", "unknown"):
        return "against plain: not said"
    return "against plain: measuring" if now.drafter != "off" else "drafting is off"


def step_times_ms(state: PanelState) -> tuple[float, float] | None:
    """(drafting, verifying) milliseconds a step over the recent past; None before a timed step."""
    now, before = state.now, state.before or MetricsSnapshot()
    steps = now.verify_steps - before.verify_steps
    if steps <= 0:
        before, steps = MetricsSnapshot(), now.verify_steps
    if steps <= 0 or now.verify_ms <= 0:
        return None
    return (now.draft_ms - before.draft_ms) / steps, (now.verify_ms - before.verify_ms) / steps


def full_lines(state: PanelState, width: int) -> list[Text]:
    """The panel at the right of a wide terminal."""
    sections = (
        ("Model", _model_lines(state, width)),
        ("Drafting", _drafting_lines(state.now, width)),
        ("Speed", _speed_lines(state, width)),
        ("Context", _context_lines(state.now, width)),
        ("Memory", _memory_lines(state.now, width)),
        ("Requests", _request_lines(state)),
        ("Cache and disk", tier_lines(state.now.tiers, state.now.storage, width)),
    )
    lines: list[Text] = []
    for title, body in sections:
        shown = list(body)
        if shown:
            rule = "─" * max(0, width - len(title) - 1)
            lines.append(Text.assemble((title, _TITLE), " ", (rule, _DIM)))
            lines.extend(shown)
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def strip_lines(state: PanelState, width: int) -> list[Text]:
    """The two lines of a narrow terminal."""
    now, rate = state.now, acceptance(state.now.drafters)
    name = _model_name(state)
    first = Text.assemble((name, _STRONG))
    if now.state != "ready":
        first.append(f"  {now.state}: {clean_line(now.stage)}" if now.stage else f"  {now.state}")
        first.truncate(width, overflow="ellipsis")
        return [first, Text()]
    figures = f"  accepted {percent(rate) if rate is not None else '–'}"
    if now.mean_accepted_run:
        figures += f"  run {now.mean_accepted_run:.2f}"
    drafter = Text(f"  {_drafter_text(now)}")
    # Names may be cut, figures may not: half a figure is a wrong one.
    drafter.truncate(max(0, width - cell_len(name) - len(figures)), overflow="ellipsis")
    first = Text.assemble((name, _STRONG), drafter, figures)
    second = Text(f"{now.tok_per_s:.1f} tok/s", style=_STRONG)
    parts = [speedup_text(now)]
    if _reads(now):
        parts.append(f"reading {percent(now.prefill_done_tokens / now.prefill_total_tokens)}")
    if now.context_limit_tokens:
        parts.append(f"context {short_count(now.context_used_tokens)}/{short_count(now.context_limit_tokens)}")
    if now.queued_requests:
        parts.append(f"{now.queued_requests} waiting")
    times = step_times_ms(state)
    if times is not None:
        parts.append(f"draft {times[0]:.1f} verify {times[1]:.1f} ms")
    disk = disk_rate(now.tiers, now.storage)
    parts += [disk] if disk else []
    if sum(now.memory_bytes.values()):
        parts.append(f"{bytes_text(sum(now.memory_bytes.values()))} used")
    rest = Text("".join(f"  {part}" for part in fitting(parts, width - second.cell_len, 2)))
    second = Text.assemble((second.plain, _STRONG), rest)
    for line in (first, second):
        line.truncate(width, overflow="ellipsis")
    return [first, second]


def _model_name(state: PanelState) -> str:
    name = clean_line(state.model.id if state.model else state.now.model_id) or "no model yet"
    return f"{name} (demo)" if state.model is not None and state.model.demo else name


def _model_lines(state: PanelState, width: int) -> Iterator[Text]:
    now, model = state.now, state.model
    yield Text(_model_name(state), style=_STRONG)
    if model is not None and model.note:
        yield from _wrapped(clean_line(model.note), width, _DIM)
    if now.state != "ready":
        yield from _wrapped(f"{now.state}: {clean_line(now.stage)}" if now.stage else now.state, width)
    elif now.device:
        yield from _wrapped(clean_line(now.device), width, _DIM)
    if state.private:
        yield Text("private chat: nothing is written")


def _drafter_text(now: MetricsSnapshot) -> str:
    name = clean_line(now.drafter)
    return f"{name} · depth {now.depth}" if now.drafter != "off" and now.depth else name


def _drafting_lines(now: MetricsSnapshot, width: int) -> Iterator[Text]:
    if now.state == "loading":
        yield from _wrapped("chosen when the model is loaded", width, _DIM)
        return
    yield from _wrapped(_drafter_text(now), width, _STRONG)
    if now.drafter_reason:
        yield from _wrapped(clean_line(now.drafter_reason), width, _DIM)
    rate = acceptance(now.drafters)
    if rate is None:
        yield Text("no draft yet", style=_DIM)
        return
    yield Text.assemble("accepted ", (percent(rate), _STRONG), f"  mean run {now.mean_accepted_run:.2f}")
    for offset, share in enumerate(per_position(now.drafters)[:MAX_POSITIONS], start=1):
        yield Text.assemble((f"{offset:>2} ", _DIM), (bar(share, width - 9), _BAR), f" {percent(share):>4}")
    for drafter in now.drafters:
        if drafter.drafted_tokens:
            counts = f"{short_count(drafter.accepted_tokens)}/{short_count(drafter.drafted_tokens)}"
            name = (clean_line(drafter.name), style_of(drafter.name))
            yield Text.assemble(name, f" {percent(drafter.acceptance_rate)} {counts}")


def _speed_lines(state: PanelState, width: int) -> Iterator[Text]:
    yield Text.assemble((f"{state.now.tok_per_s:.1f}", _STRONG), " tok/s now")
    if any(state.history):
        yield Text(sparkline(state.history, width), style=_BAR)
    yield Text(speedup_text(state.now))
    times = step_times_ms(state)
    if times is not None:
        yield Text(f"draft {times[0]:.1f} ms · verify {times[1]:.1f} ms", style=_DIM)


def _context_lines(now: MetricsSnapshot, width: int) -> Iterator[Text]:
    limit = now.context_limit_tokens
    if limit:
        label = f" {short_count(now.context_used_tokens)}/{short_count(limit)}"
        yield Text.assemble(_tray(now.context_used_tokens / limit, width - len(label)), label)
    total = now.prefill_total_tokens
    if _reads(now):
        label = f" {now.prefill_done_tokens}/{total}"
        yield Text.assemble("reading ", bar(now.prefill_done_tokens / total, max(1, width - 8 - len(label))), label)


def _reads(now: MetricsSnapshot) -> bool:
    # The figures of a prompt whose reader left in the middle of it stay; nobody reads it any more.
    return now.active_requests > 0 and now.prefill_total_tokens > now.prefill_done_tokens


def _tray(share: float, width: int) -> Text:
    filled = bar(share, max(1, width))
    return Text.assemble((filled.rstrip(), _BAR), ("·" * (len(filled) - len(filled.rstrip())), _DIM))


def _memory_lines(now: MetricsSnapshot, width: int) -> Iterator[Text]:
    total = sum(now.memory_bytes.values())
    for name, size_bytes in now.memory_bytes.items():
        if size_bytes:
            share = (bar(size_bytes / total, max(1, width - 21)), _BAR)
            yield Text.assemble(f"{clean_line(name)[:9]:<9} ", share, f" {bytes_text(size_bytes):>9}")


def _request_lines(state: PanelState) -> Iterator[Text]:
    now = state.now
    yield Text(f"{now.active_requests} running · {now.queued_requests} waiting")
    if state.address:
        yield Text(clean_line(state.address), style=_DIM)
    for client in now.clients:
        rate = f" {percent(client.accepted_tokens / client.drafted_tokens)}" if client.drafted_tokens else ""
        yield Text(f"{clean_line(client.name)}: {short_count(client.completion_tokens)} tokens{rate}", style=_DIM)


def _wrapped(text: str, width: int, style: Style | None = None) -> Iterator[Text]:
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            yield Text(line, style=style or "")
            line = word
        else:
            line = f"{line} {word}" if line else word
    if line:
        yield Text(line, style=style or "")
