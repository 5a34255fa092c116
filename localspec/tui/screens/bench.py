"""The bench screen: drafters and depths against plain decoding, on this chat's questions or on a set of our own.

Measures through the Engine protocol, so a remote server can be measured too. The table fills while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, DataTable, Input, Label, Select

from localspec.api.engine import DrafterChoice
from localspec.api.types import EngineError
from localspec.matrix.bench import AS_IT_IS, OFF, BenchPlan, Cell, run_bench
from localspec.matrix.prompts import Prompt
from localspec.matrix.table import Key, key_of
from localspec.matrix.workloads import WORKLOADS
from localspec.tui.bench_run import (
    AUTO,
    BUILT_IN,
    THIS_CHAT,
    BenchForm,
    BenchResult,
    best_method,
    best_of_each,
    chat_prompts,
    keys_of,
    read_plan,
)
from localspec.tui.clipboard import write_private
from localspec.tui.drafter_choice import choose_drafter
from localspec.tui.options import SettingError
from localspec.tui.screens.large import LargeScreen
from localspec.tui.text import clean_line, percent

if TYPE_CHECKING:
    from localspec.tui.conversation import Conversation

COLUMNS = ("", "drafter", "depth", "×plain", "tok/s", "run", "acc.", "work", "act.", "per position")
_BEST = "bold"
_WAITING = "dim"


@dataclass
class BenchState:
    """What outlives the screen: the last form and the last table, so that it can be looked at again."""

    form: BenchForm | None = None
    keys: tuple[Key, ...] = ()
    """Every cell that was asked for, in the order of measuring."""
    cells: list[Cell] = field(default_factory=list)
    model: str = ""
    device: str = ""


class BenchScreen(LargeScreen[None]):
    """Closes with Esc; while it measures, Esc stops the measuring first."""

    AUTO_FOCUS = "#start"
    BINDINGS = [  # noqa: RUF012 - the base class declares it
        Binding("escape", "leave", "Close", priority=True),
        Binding("f5", "start", "Start", priority=True),
        Binding("f6", "apply", "Use this row", priority=True),
        Binding("f7", "export('txt')", "Save text", priority=True),
        Binding("f8", "export('json')", "Save JSON", priority=True),
    ]

    def __init__(self, conversation: Conversation, folder: Path, state: BenchState) -> None:
        super().__init__("bench")
        self._talk = conversation
        self._folder = folder
        self._state = state
        self._is_measuring = False

    def compose(self) -> ComposeResult:
        form = self._state.form or self._first_form()
        choices = (THIS_CHAT, BUILT_IN, *WORKLOADS)
        with Vertical():
            yield Label("Bench: drafting against plain decoding", classes="title", markup=False)
            with Horizontal(classes="row"):
                yield Label("prompts")
                yield Select.from_values(choices, value=form.prompts, allow_blank=False, compact=True, id="prompts")
                yield Label("drafters")
                yield Input(form.drafters, compact=True, id="drafters")
            with Horizontal(classes="row"):
                yield Label("depths")
                yield Input(form.depths, compact=True, id="depths")
                yield Label("active")
                yield Input(form.active, compact=True, id="active")
                yield Label("tokens")
                yield Input(form.max_tokens, compact=True, id="tokens")
            yield DataTable(cursor_type="row", zebra_stripes=False, id="cells")
            yield Label("", id="said", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("F5 Start", compact=True, id="start")
                yield Button("F6 Use row", compact=True, id="apply")
                yield Button("F7 Text", compact=True, id="txt")
                yield Button("F8 JSON", compact=True, id="json")
                yield Button("Esc Close", compact=True, id="leave")

    def on_mount(self) -> None:
        self._table.add_columns(*COLUMNS)
        if self._state.keys:
            self._lay_out(self._state.keys)
            for cell in self._state.cells:
                self._show(cell)
            self._show_best()
        else:
            self._say("Measures every drafter and depth beside plain decoding. Esc stops it.")

    # What can be done

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        actions = {"start": self.action_start, "apply": self.action_apply, "leave": self.action_leave}
        name = event.button.id or ""
        if name in actions:
            actions[name]()
        else:
            self.action_export(name)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.action_start()

    def action_leave(self) -> None:
        if self.close_list():
            return
        if self._is_measuring:
            self.workers.cancel_group(self, "bench")
        else:
            self._state.form = self._form()
            self.dismiss(None)

    def action_start(self) -> None:
        if self._is_measuring:
            self._say("It measures already. Esc stops it.")
            return
        engine = self._talk.engine
        model = engine.model()
        try:
            if model is None:
                raise SettingError("The model is not loaded yet: start again when it is.")
            if self._talk.answer is not None:
                raise SettingError("An answer is being written, which would spoil the figures: stop it first.")
            plan = read_plan(self._form(), self._prompts(), model.drafters)
        except SettingError as error:
            self._say(str(error))
            return
        state = self._state
        state.form, state.keys, state.cells = self._form(), keys_of(plan, model.drafters), []
        state.model, state.device = model.id, engine.metrics().device
        self._lay_out(self._state.keys)
        self._measure(plan)

    def action_apply(self) -> None:
        """Draft from now on as the row under the cursor does."""
        keys = self._state.keys
        if self._table.cursor_row < len(keys):
            self._apply(*keys[self._table.cursor_row][1:3])

    def action_export(self, kind: str) -> None:
        if not self._state.cells:
            self._say("Nothing is measured yet.")
            return
        result = BenchResult(self._state.model, self._state.device, tuple(self._state.cells))
        path, number = self._folder / f"bench.{kind}", 1
        while path.exists():
            number += 1
            path = self._folder / f"bench-{number}.{kind}"
        try:
            write_private(path, result.text() if kind == "txt" else result.json())
        except OSError as error:
            self._say(f"{path} cannot be written ({error.strerror}).")
            return
        self._say(f"Written to {path}.")

    # Inside

    @work(exclusive=True, group="bench")
    async def _measure(self, plan: BenchPlan) -> None:
        self._is_measuring = True
        ended = "Stopped."
        try:
            self._mark_running(0)
            self._say(f"Measuring {len(self._state.keys)} cells. Esc stops it.{self._caution()}")
            await run_bench(self._talk.engine, plan, self._take)
            ended = "Done."
        except EngineError as error:
            ended = f"Stopped: {error.message}"
        except Exception as error:
            # A remote server can fail in any way; the cells so far are kept.
            ended = f"Stopped: {error or type(error).__name__}"
        finally:
            self._is_measuring = False
            if self.is_mounted:
                self._mark_running(len(self._state.keys))
                self._show_best(ended)

    @work(exclusive=True, group="apply")
    async def _apply(self, drafter: str, depth: int) -> None:
        if drafter == AS_IT_IS:
            self._say("This server chooses its drafter itself; set it where it was started.")
            return
        try:
            await choose_drafter(self._talk, DrafterChoice(drafter, depth or None))
            self._say(f"From now on: {drafter}" + (f", depth {depth}." if depth else "."))
        except EngineError as error:
            self._say(error.message)

    def _take(self, cell: Cell) -> None:
        self._state.cells.append(cell)
        self._show(cell)
        number = self._state.keys.index(key_of(cell)) + 1
        self._mark_running(number)
        self._say(f"{number} of {len(self._state.keys)} cells. Esc stops it.")

    def _lay_out(self, keys: tuple[Key, ...]) -> None:
        self._table.clear()
        for key in keys:
            values = ("", key[1], str(key[2] or "–"), "", "", "", "", key[0], str(key[3]), "")
            self._table.add_row(*(Text(value, _WAITING) for value in values), key=_row_key(key))

    def _show(self, cell: Cell) -> None:
        self._write(key_of(cell), _figures(cell), "")

    def _show_best(self, ended: str = "") -> None:
        best = best_of_each(self._state.cells)
        for cell in self._state.cells:
            if key_of(cell) in best:
                self._write(key_of(cell), _figures(cell), _BEST, "★")
        method = best_method(self._state.cells)
        if method is None:
            self._say(ended)
            return
        drafter, depth, gain = method
        if drafter == AS_IT_IS:
            self._say(f"{ended} This server chooses its drafter itself.".strip())
            return
        name = f"{drafter} at depth {depth}" if depth else "plain decoding" if drafter == OFF else drafter
        differing = sum(cell.differs_from_off or 0 for cell in self._state.cells)
        words = f"{ended} Best: {name}, ×{gain:.2f}. F6 uses the row under the cursor.{self._caution()}".strip()
        self._say(words + (f" {differing} tokens differ from plain decoding." if differing else ""))
        row = next(i for i, key in enumerate(self._state.keys) if key[1:3] == (drafter, depth))
        self._table.move_cursor(row=row)
        self._table.focus()

    def _write(self, key: Key, figures: tuple[str, ...], style: str, mark: str = "") -> None:
        values = (mark, key[1], str(key[2] or "–"), *figures[:4], key[0], str(key[3]), figures[4])
        row = self._table.get_row_index(_row_key(key))
        for column, value in enumerate(values):
            self._table.update_cell_at((row, column), Text(value, style), update_width=True)  # type: ignore[arg-type]

    def _mark_running(self, number: int) -> None:
        """Row `number` is measured next. Rows before it without figures were left out: no draft got so deep."""
        measured = {key_of(cell) for cell in self._state.cells}
        for row, key in enumerate(self._state.keys[:number]):
            if key not in measured:
                self._table.update_cell_at((row, 0), Text("–", _WAITING))  # type: ignore[arg-type]
        if number < len(self._state.keys):
            self._table.update_cell_at((number, 0), Text("▸", _BEST))  # type: ignore[arg-type]
            self._table.move_cursor(row=number)

    def _say(self, text: str) -> None:
        self.query_one("#said", Label).update(clean_line(text))

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one("#cells", DataTable)

    def _form(self) -> BenchForm:
        values = [self.query_one(f"#{name}", Input).value for name in ("drafters", "depths", "active", "tokens")]
        return BenchForm(str(self.query_one("#prompts", Select).value), *values)

    def _first_form(self) -> BenchForm:
        model = self._talk.engine.model()
        names = [name for name in (model.drafters if model else ()) if name != OFF]
        return BenchForm(THIS_CHAT if self._prompts() else BUILT_IN, ", ".join(names))

    def _caution(self) -> str:
        """Answers that a chat got already may have been learnt since; asking for them again flatters the table."""
        tables = any("ngram_disk" in key[1] or key[1] == AUTO for key in self._state.keys)
        own = any(key[0] == THIS_CHAT for key in self._state.keys)
        return " A table that has learnt this chat's answers looks better here than it is." if tables and own else ""

    def _prompts(self) -> tuple[Prompt, ...]:
        return chat_prompts(self._talk.messages, self._talk.system_prompt)


def _row_key(key: Key) -> str:
    return "/".join(map(str, key))


def _figures(cell: Cell) -> tuple[str, ...]:
    """Gain, rate, run length, accepted share, shares per position."""
    return (
        "1" if cell.speedup is None else f"{cell.speedup:.2f}",
        f"{cell.tok_per_s:.1f}",
        f"{cell.acceptance_length:.2f}",
        percent(cell.acceptance_rate) if cell.drafter != OFF else "",
        " ".join(f"{share:.2f}" for share in cell.per_position[:8]),
    )
