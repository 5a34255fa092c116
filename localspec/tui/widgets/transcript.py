"""The messages of a chat in one scrolling view that draws lines.

One line view and not a widget a message: a layout that walks 500 widgets for each line of a growing answer costs more
than the whole budget of the interface (scripts/measure_tui.py). Each message still has its own `MessageLines`, which
renders it once. Long chats are shown from their end; earlier messages come in when the view is scrolled to the top.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.scrollbar import ScrollBar
from textual.selection import Selection
from textual.strip import Strip

from localspec.chats import Stored
from localspec.tui.block_cursor import Mark, block_at, block_of, fold_of, next_block, next_message
from localspec.tui.line_painter import MARGIN, LinePainter, same_lines, selected
from localspec.tui.markdown import MarkdownRenderer
from localspec.tui.message_lines import Block, Look, MessageLines
from localspec.tui.widgets.quick_bar import QuickScrollBar
from localspec.tui.wrap import wrap_text

# Opening a chat renders this much of its end at once; a page of Markdown takes some 20 ms.
VIEW_LINES = 500
# While an answer grows the view moves on by several lines at once: moving repaints every line on the screen.
STEP_SHARE = 4
MORE_MESSAGES = 40
_CURSOR = Style(reverse=True)
_DIM = Style(dim=True)


class Transcript(ScrollView, can_focus=True):
    """Shows messages; follows the end while it is at the end."""

    BINDINGS = [  # noqa: RUF012 - the base class declares it
        Binding("up", "block(-1)", "Block above", show=False),
        Binding("down", "block(1)", "Block below", show=False),
        Binding("enter,space", "fold", "Fold"),
        Binding("c", "chosen('copy')", "Copy"),
        Binding("y", "chosen('copy_code')", "Copy code"),
        Binding("e", "chosen('edit')", "Edit and resend"),
        Binding("r", "chosen('regenerate')", "Answer again"),
        Binding("b", "chosen('branch')", "Branch here"),
        Binding("left", "chosen('previous')", "Previous branch", show=False),
        Binding("right", "chosen('next')", "Next branch", show=False),
    ]

    class Chosen(Message):
        """A key asks for something to be done with the marked message (None: none) or with a block of it."""

        def __init__(self, action: str, message: Stored | None, block: Block | None = None) -> None:
            super().__init__()
            self.action = action
            self.message = message
            self.block = block

    def __init__(self, *, dark: bool = True, id: str | None = None) -> None:
        super().__init__(id=id)
        self._renderer = MarkdownRenderer(dark=dark)
        self._look = Look(0, self._renderer)
        self._items: list[MessageLines] = []
        self._first = 0
        self._starts: list[int] = []
        self._line_count = 0
        self._welcome = ""
        self._mark: Mark | None = None
        self._base: Style | None = None
        self._painter = LinePainter()

    # What the screen calls

    def show(self, messages: Sequence[Stored], places: dict[int, tuple[int, int]]) -> None:
        """Show these messages, from the end. Lines of messages that were already shown are kept."""
        known = {item.message.id: item for item in self._items if item.message.state != "streaming"}
        items = []
        for message in messages:
            place = places.get(message.id, (1, 1))
            item = known.get(message.id)
            same = item is not None and item.siblings == place
            if item is None or not same:
                item = MessageLines(message, place)
            item.update(message)
            items.append(item)
        self._items, self._mark = items, None
        self._lay_out_from_end()
        self.follow()

    def update_last(self, message: Stored, note: str = "") -> None:
        """The last message grew or ended."""
        if not self._items or self._look.width <= 0:
            return
        was_at_end = self.is_vertical_scroll_end or self.max_scroll_y == 0
        item = self._items[-1]
        before = item.strips(self._look)
        item.update(message, note)
        after = item.strips(self._look)
        start = self._starts[-1]
        count = start + len(after)
        height = self._stepped(count) if message.state == "streaming" else count
        same = same_lines(before, after)
        self._line_count = count
        if height != self.virtual_size.height:
            self._grow(height)
            if was_at_end:
                self.follow()
        self.refresh_lines(start + same, max(len(before), len(after)) - same)

    def welcome(self, text: str) -> None:
        """What an empty chat shows."""
        if text != self._welcome:
            self._welcome = text
            if not self._items:
                self._lay_out_from_end()

    def set_look(
        self, *, thoughts_open: bool | None = None, drafts: bool | None = None, dark: bool | None = None
    ) -> None:
        """Change how messages are shown; what is None stays."""
        look = self._look
        if dark is not None and dark != self._renderer.dark:
            self._renderer = MarkdownRenderer(dark=dark)
        self._look = Look(
            look.width,
            self._renderer,
            look.thoughts_open if thoughts_open is None else thoughts_open,
            look.drafts if drafts is None else drafts,
        )
        if thoughts_open is not None:
            for item in self._items:
                item.forget_folds()
        at_end = self.is_vertical_scroll_end
        self._lay_out_from_end()
        if at_end:
            self.follow()

    def paint_now(self) -> None:
        """Paint what changed at once. Textual would do it in its next rounds, each of which wakes the process anew."""
        screen, changed = self.screen, [w for w in (self, self.vertical_scrollbar) if w._repaint_required]
        if changed and screen.is_current and not self.app._batch_count and not self._layout_required:
            for widget in changed:
                widget._repaint_required = False
                screen._dirty_widgets.add(widget)
            screen._on_timer_update()

    @property
    def look(self) -> Look:
        return self._look

    def follow(self) -> None:
        """Go to the end and stay there while it grows."""
        # Forced: the first time that lines do not fit there is no scroll bar yet.
        self.scroll_end(animate=False, immediate=True, x_axis=False, force=True)

    def move_cursor(self, step: int) -> None:
        """Mark the next (1) or previous (-1) message."""
        if self._items:
            self._set_mark(next_message(self._items, self._mark, step))

    def move_block(self, step: int) -> None:
        """Mark the next (1) or previous (-1) block, from one message to the next."""
        if self._items:
            self._set_mark(next_block(self._items, self._look, self._mark, step))

    def unmark(self) -> None:
        """Nothing is marked any more."""
        if self._mark is not None:
            self._mark = None
            self.refresh()

    def go_to(self, message_id: int) -> None:
        """Mark a message and scroll to it."""
        for number, item in enumerate(self._items):
            if item.message.id == message_id:
                self._set_mark(Mark(number))

    def go_near(self, message: Stored) -> None:
        """Mark the shown sibling of a message."""
        for item in self._items:
            if item.message.parent_id == message.parent_id:
                self.go_to(item.message.id)

    @property
    def marked_block(self) -> Block | None:
        """The block under the cursor; None if nothing or a whole message is marked."""
        return block_of(self._items, self._look, self._mark)

    @property
    def plain_text(self) -> str:
        """All lines that are in the view, for tests and selection."""
        return "\n".join(self._line(y).text.rstrip() for y in range(self._line_count))

    # Textual

    def on_resize(self, event: events.Resize) -> None:
        self._painter.forget()
        width = self.scrollable_content_region.width - 2 * MARGIN
        if width != self._look.width and width > 0:
            at_end = self.is_vertical_scroll_end
            self._look = Look(width, self._renderer, self._look.thoughts_open, self._look.drafts)
            self._lay_out_from_end()
            if at_end:
                self.follow()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if new_value <= 0 < old_value and self._first > 0:
            self._show_more(MORE_MESSAGES)

    def on_click(self, event: events.Click) -> None:
        y = event.y + self.scroll_offset.y
        number = bisect_right(self._starts, y) - 1
        if self.text_selection is not None or not 0 <= number < len(self._starts):
            return
        item = self._items[self._first + number]
        block, is_fold = block_at(item, self._look, y - self._starts[number])
        self._mark = Mark(self._first + number, block)
        if is_fold:
            self.action_fold()
        self.refresh()

    def action_block(self, step: int) -> None:
        self.move_block(step)

    def action_fold(self) -> None:
        """Fold or unfold the marked block; of a marked message, its thought or first block that folds."""
        fold = fold_of(self._items, self._look, self._mark) if self._mark is not None else ""
        if fold and self._mark is not None:
            self._items[self._mark.item].toggle(fold, self._look)
            self._lay_out()
            self._show_mark()

    def action_chosen(self, action: str) -> None:
        message = None if self._mark is None else self._items[self._mark.item].message
        self.post_message(self.Chosen(action, message, self.marked_block))

    def render_lines(self, crop: Region) -> list[Strip]:
        top, (start, end) = self.scroll_offset.y, crop.column_span
        strips = [self._finished(top + y) for y in crop.line_range]
        return strips if (start, end) == (0, self.size.width) else [strip.crop(start, end) for strip in strips]

    def render_line(self, y: int) -> Strip:
        """One finished line of the view; text selection asks for the places in it."""
        return self._finished(self.scroll_offset.y + y)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._base = None
        self._painter.forget()

    @property
    def vertical_scrollbar(self) -> ScrollBar:
        if self._vertical_scrollbar is None:
            self._vertical_scrollbar = bar = QuickScrollBar(thickness=self.scrollbar_size_vertical)
            bar.display = False
            self.app._start_widget(self, bar)
        return self._vertical_scrollbar

    @property
    def allow_select(self) -> bool:
        return True

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        return selection.extract(self.plain_text), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    # Lines

    def _line(self, y: int) -> Strip:
        if not self._items:
            lines = wrap_text(self._welcome, max(1, self._look.width), _DIM)
            return lines[y] if y < len(lines) else Strip([], 0)
        if y >= self._line_count:
            return Strip([], 0)
        if self._first and y == 0:
            text = f"▲ {self._first} earlier messages: scroll up for more"
            return Strip([Segment(text, _DIM)]).crop(0, max(1, self._look.width))
        number = bisect_right(self._starts, y) - 1
        strips = self._items[self._first + number].strips(self._look)
        offset = y - self._starts[number]
        strip = strips[offset] if offset < len(strips) else Strip([], 0)
        is_marked = self._mark is not None and self._first + number == self._mark.item
        return strip.apply_style(_CURSOR) if is_marked and offset == 0 else strip

    def _finished(self, line_number: int) -> Strip:
        source, selection = self._line(line_number), self.text_selection
        is_marked = line_number in self._marked_lines()
        if selection is None and not is_marked:
            kept = self._painter.kept(line_number, source)
            if kept is not None:
                return kept
        shown = source
        if selection is not None:
            style = self.screen.get_component_rich_style("screen--selection")
            shown = selected(source, selection, line_number, style)
        if self._base is None:
            self._base = self.rich_style
        finished = self._painter.finish(
            shown,
            line_number,
            self.size.width,
            self._base,
            is_marked=is_marked,
            filters=self.get_line_filters(),
            background=self.background_colors[1],
        )
        if selection is None and not is_marked:
            self._painter.keep(line_number, source, finished)
        return finished

    def _marked_lines(self) -> range:
        mark, block = self._mark, self.marked_block
        if mark is None or block is None or mark.item < self._first:
            return range(0)
        start = self._starts[mark.item - self._first]
        return range(start + block.start, start + block.end)

    def _set_mark(self, mark: Mark) -> None:
        self._mark = mark
        if mark.item < self._first:
            self._show_more(self._first - mark.item)
        self._show_mark()

    def _show_mark(self) -> None:
        """Scroll as little as shows what is marked, its beginning if it is larger than the view."""
        mark, block = self._mark, self.marked_block
        if mark is not None:
            top = self._starts[mark.item - self._first]
            if block is None:
                self.scroll_to(y=max(0, top - 1), animate=False)
            else:
                start, end = top + block.start, top + block.end
                y = min(max(self.scroll_y, end - self.size.height), start - 1)
                if y != self.scroll_y:
                    self.scroll_to(y=max(0, y), animate=False)
        self.refresh()

    def _lay_out_from_end(self) -> None:
        if self._look.width <= 0:
            return
        first, lines = len(self._items), 0
        while first > 0 and lines < VIEW_LINES:
            first -= 1
            lines += len(self._items[first].strips(self._look))
        self._first = first
        for item in self._items[:first]:
            item.drop()
        self._lay_out()

    def _lay_out(self) -> None:
        line = 1 if self._first else 0
        self._starts = []
        for item in self._items[self._first :]:
            self._starts.append(line)
            line += len(item.strips(self._look))
        if not self._items:
            line = len(wrap_text(self._welcome, self._look.width))
        self._set_line_count(line)
        self.refresh()

    def _show_more(self, count: int) -> None:
        before = self._line_count
        self._first = max(0, self._first - count)
        self._lay_out()
        self.scroll_to(y=self.scroll_y + self._line_count - before, animate=False)

    def _grow(self, height: int) -> None:
        size = Size(self._look.width, height)
        if self.show_vertical_scrollbar and height > self.size.height:
            # Nothing but the scroll bar depends on the height, so the screen needs no layout.
            self.set_reactive(Transcript.virtual_size, size)
            self.vertical_scrollbar.window_virtual_size = height
        else:
            self.virtual_size = size

    def _stepped(self, count: int) -> int:
        step = max(1, self.size.height // STEP_SHARE)
        return -(-count // step) * step if count > self.size.height else count

    def _set_line_count(self, count: int) -> None:
        self._line_count = count
        self.virtual_size = Size(self._look.width, count)
