"""The chat: transcript, prompt, panel, and the keys that act on them. What they do to the chat is `Conversation`."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path

from textual import events, work
from textual.app import ComposeResult
from textual.screen import Screen
from textual.theme import Theme
from textual.widgets import Footer, Label, TextArea

from localspec.api.library import ModelLibrary
from localspec.api.types import EngineError
from localspec.chats import ChatError
from localspec.tui.attachments import AttachmentError
from localspec.tui.compositor import CroppingCompositor
from localspec.tui.conversation import Conversation
from localspec.tui.drafter_choice import choose_again
from localspec.tui.engine_notices import EngineNotices
from localspec.tui.options import SettingError, UiOptions
from localspec.tui.panel_text import PanelState
from localspec.tui.screens.answering import Answering
from localspec.tui.screens.browse import Browser
from localspec.tui.screens.chat_keys import KEYS
from localspec.tui.screens.copier import Copier
from localspec.tui.screens.drafts import Drafts
from localspec.tui.screens.help import HelpScreen
from localspec.tui.screens.message_actions import MessageActions
from localspec.tui.slash import SlashError, read_slash
from localspec.tui.slash_runner import SlashRunner, last_code
from localspec.tui.suggest import suggestions
from localspec.tui.text import problem_text
from localspec.tui.welcome import welcome_text
from localspec.tui.widgets.completions import Completions
from localspec.tui.widgets.draft_legend import DraftLegend
from localspec.tui.widgets.live_panel import LivePanel
from localspec.tui.widgets.prompt import Prompt
from localspec.tui.widgets.transcript import Transcript

SAMPLE_INTERVAL_S = 0.5
WIDE_COLUMNS = 110
TINY = (60, 16)
PANEL_FORMS = ("auto", "full", "strip", "off")
_EXPECTED = (ChatError, EngineError, SlashError, SettingError, AttachmentError, OSError)


class ChatScreen(Screen[None]):
    """One conversation and everything around it."""

    BINDINGS = KEYS

    def __init__(self, conversation: Conversation, options: UiOptions, library: ModelLibrary | None = None) -> None:
        super().__init__()
        self._compositor = CroppingCompositor()
        self.conversation = conversation
        self.options = options
        self.panel_form = "auto"
        self._state = PanelState(address=options.address)
        self._notices = EngineNotices()
        self._slash = SlashRunner(self)
        self.answering = Answering(self)
        self._browser = Browser(self, library)
        self._message_actions = MessageActions(self)
        self._copier = Copier(self)
        self._drafts = Drafts(self)
        self._has_warned = False

    def compose(self) -> ComposeResult:
        # No containers: each one would be drawn again below every change of the transcript.
        yield LivePanel(id="panel")
        yield LivePanel(is_strip=True, id="strip")
        yield Transcript(id="transcript")
        yield Label(self.options.caption, id="caption", markup=False)
        yield DraftLegend(id="legend")
        yield Completions(id="completions")
        yield Prompt(blink=not self.options.still, id="prompt")
        yield Footer(show_command_palette=False)

    async def on_mount(self) -> None:
        self.query_one("#caption").display = bool(self.options.caption)
        self.set_interval(SAMPLE_INTERVAL_S, self.sample)
        self._follow_theme()
        self.app.theme_changed_signal.subscribe(self, self._theme_changed)
        self.prompt.focus()
        self.run_worker(self._follow_engine(), group="engine", exit_on_error=False)
        await self._try(self._start())
        self.sample()

    # Parts

    @property
    def prompt(self) -> Prompt:
        return self.query_one("#prompt", Prompt)

    @property
    def transcript(self) -> Transcript:
        return self.query_one("#transcript", Transcript)

    @property
    def busy(self) -> bool:
        """Whether an answer is being written."""
        return self.conversation.answer is not None

    # What the user types

    async def on_prompt_submitted(self, event: Prompt.Submitted) -> None:
        text = event.text
        completions = self.query_one(Completions)
        completions.offer([])
        if not text.strip():
            return
        try:
            slash = read_slash(text.strip())
        except SlashError as error:
            self.tell(str(error), error=True)
            return
        if slash is not None:
            self.prompt.put("")
            await self._try(self._slash.run(*slash))
        elif self.busy:
            self.tell("An answer is being written: Esc stops it, then send again.", error=True)
        else:
            await self._try(self._send(self._drafts.chips.expand(text[1:] if text.startswith("//") else text)))

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        text = self.prompt.text
        choices = suggestions(text, self.conversation.engine.model(), self.options) if len(text) < 300 else []
        self.query_one(Completions).offer(choices)
        self.prompt.completing = bool(choices)

    async def on_prompt_completion(self, event: Prompt.Completion) -> None:
        completions = self.query_one(Completions)
        if event.step:
            completions.move(event.step)
            return
        value = completions.marked
        completions.offer([])
        self.prompt.completing = False
        if value is None:
            return
        if value.startswith("@"):
            self.prompt.put(self.prompt.text[: self.prompt.text.rfind("@")])
            await self._try(self.attach(self.options.export_dir / value[1:]))
        else:
            self.prompt.put(value)

    def on_prompt_pasted(self, event: Prompt.Pasted) -> None:
        self._drafts.pasted(event.text)

    async def on_transcript_chosen(self, event: Transcript.Chosen) -> None:
        await self._try(self._message_actions.run(event.action, event.message, event.block))

    def on_resize(self, event: events.Resize) -> None:
        self._arrange(event.size.width, event.size.height)

    # Keys

    async def action_stop(self) -> None:
        if self.busy:
            self.answering.cancel()
        elif self.prompt.completing:
            self.query_one(Completions).offer([])
            self.prompt.completing = False
        elif not self.prompt.has_focus:
            self.transcript.unmark()
            self.prompt.focus()
        else:
            self.prompt.stash()
            self.prompt.put("")
            await self._try(self._restore())

    async def action_copy_or_stop(self) -> None:
        selected = self.get_selected_text() or self.prompt.selected_text
        if selected:
            self.copy_out(selected, "selection")
        elif self.busy:
            await self.action_stop()
        else:
            self.tell("Nothing is selected. Ctrl+Q leaves.")

    async def action_new(self) -> None:
        await self._try(self.new_chat())

    async def action_browse(self, kind: str) -> None:
        self._browser.show(kind)

    async def action_retry(self) -> None:
        await self._try(self.retry())

    def action_toggle_thoughts(self) -> None:
        self.transcript.set_look(thoughts_open=not self.transcript.look.thoughts_open)

    def action_toggle_drafts(self) -> None:
        is_on = not self.transcript.look.drafts
        self.transcript.set_look(drafts=is_on)
        model, now = self._state.model, self._state.now
        names = (*(model.drafters if model else ()), *(drafter.name for drafter in now.drafters))
        self.query_one(DraftLegend).show(names, is_on)

    def action_cycle_panel(self) -> None:
        self.panel_form = PANEL_FORMS[(PANEL_FORMS.index(self.panel_form) + 1) % len(PANEL_FORMS)]
        self._remember("panel", self.panel_form)
        self._arrange(self.size.width, self.size.height)

    def action_help(self) -> None:
        self.show_help()

    def action_copy_code(self) -> None:
        code = last_code(self.conversation)
        if code is None:
            self.tell("There is no code block in this chat.", error=True)
        else:
            self.copy_out(code, "code block")

    def action_open_chips(self) -> None:
        self.prompt.put(self._drafts.chips.expand(self.prompt.text))

    def action_mark(self, step: int) -> None:
        self.transcript.focus()
        self.transcript.move_cursor(step)

    def action_scroll(self, where: str) -> None:
        getattr(self.transcript, f"scroll_{where}")(animate=False)

    # What commands and lists ask for (slash_runner.Host, browse.Browser)

    def tell(self, text: str, *, error: bool = False) -> None:
        self.notify(text, severity="error" if error else "information", timeout=10 if error else 6, markup=False)

    def copy_out(self, text: str, what: str) -> None:
        self._copier.copy(text, what)

    def show_screen(self, kind: str) -> None:
        self._browser.show(kind)

    def show_help(self) -> None:
        self.app.push_screen(HelpScreen())

    def put_prompt(self, text: str) -> None:
        self.prompt.stash()
        self.prompt.put(text)
        self.prompt.focus()

    async def shown(self) -> None:
        talk = self.conversation
        self.transcript.show(talk.messages, talk.places)
        self.prompt.set_history(await talk.store.run(lambda s: s.recent_prompts()))
        self.sub_title = talk.chat.title if talk.chat else ""
        self.sample()

    async def new_chat(self, *, private: bool = False) -> None:
        await self.answering.stop()
        await self.conversation.settle()
        await self._drafts.keep()
        self.conversation.new(private=private)
        self.prompt.put("")
        await self.shown()
        self.prompt.focus()

    async def open_chat(self, chat_id: str, message_id: int | None = None) -> None:
        """Show another chat; its cache is brought near meanwhile."""
        await self.answering.stop()
        await self._drafts.keep()
        await self.conversation.open(chat_id, message_id)
        await self._drafts.recall()
        await self.shown()
        if message_id is not None:
            self.transcript.go_to(message_id)
        self.prompt.focus()
        self.run_worker(self.conversation.warm(), group="warm", exclusive=True)

    async def retry(self) -> None:
        await self.answering.stop()
        self.conversation.drop_last_answer()
        await self.answering.start()

    async def switch_model(self, name: str) -> None:
        self.tell(f"Loading {name}.")
        self._load(name)

    async def attach(self, path: Path) -> None:
        await self._drafts.attach(path)

    async def leave(self, *, at_once: bool = False) -> None:
        """Stop, keep what is unsent, and end the app. Text that cannot be saved holds it back once."""
        await self.answering.stop()
        try:
            await self.conversation.settle()
        except ChatError as error:
            if not at_once and not self._has_warned:
                self._has_warned = True
                self.tell(f"{error} Leaving again leaves the last answer unsaved.", error=True)
                return
        else:
            self._has_warned = False
        await self._browser.close()
        await self._try(self._drafts.keep())
        self.conversation.close()
        self.app.exit()

    def sample(self) -> None:
        """Show the engine's figures; keep what is being written."""
        self._drafts.sometimes()
        engine = self.conversation.engine
        model, now = engine.model(), engine.metrics()
        self._state = PanelState(
            self._state.model,
            self._state.now,
            self._state.before,
            self._state.history,
            self.options.address or self.options.find_address(),
            self.conversation.private,
        ).advanced(model, now)
        self.query_one("#panel", LivePanel).show(self._state)
        self.query_one("#strip", LivePanel).show(self._state)
        if not self.conversation.messages:
            self.transcript.welcome(welcome_text(model, now, private=self.conversation.private))
        notice = self._notices.see(now)
        if notice is not None:
            self.tell(notice[0], error=notice[1])
            if now.state == "ready":
                # Another process, or another model: neither knows what was chosen before.
                self.run_worker(choose_again(self.conversation), group="engine", exit_on_error=False)

    # Inside

    async def _start(self) -> None:
        talk = self.conversation
        notice = await talk.store.run(lambda s: s.notice)
        if notice:
            self.tell(notice, error=True)
        await talk.recall_settings()
        await self._drafts.recall()
        await self.shown()
        form, theme = await talk.durable.run(lambda s: (s.note("panel", "auto"), s.note("theme")))
        self.panel_form = form if form in PANEL_FORMS else "auto"
        self._arrange(self.size.width, self.size.height)
        if theme in self.app.available_themes:
            self.app.theme = theme

    async def _follow_engine(self) -> None:
        # A connection to an engine is made by the first call that is awaited; figures come, and the engine knows of
        # its user, from then on.
        with suppress(EngineError):
            await self.conversation.engine.wait_ready()
            await choose_again(self.conversation)

    async def _restore(self) -> None:
        if self.conversation.is_cut:
            await self.conversation.restore()
            await self.shown()

    async def _send(self, text: str) -> None:
        await self.conversation.say(text)
        await self._drafts.sent()
        await self.answering.start()

    def _arrange(self, width: int, height: int) -> None:
        is_tiny = width < TINY[0] or height < TINY[1]
        form = self.panel_form
        if form == "auto":
            form = "off" if is_tiny else "full" if width >= WIDE_COLUMNS else "strip"
        self.set_class(is_tiny, "tiny")
        for name in ("full", "strip"):
            self.set_class(form == name, f"panel-{name}")
        self.call_after_refresh(self.sample)

    def _follow_theme(self) -> None:
        self.transcript.set_look(dark=self.app.current_theme.dark)

    def _theme_changed(self, theme: Theme) -> None:
        self._follow_theme()
        self._remember("theme", theme.name)

    def _remember(self, name: str, value: str) -> None:
        if not self.conversation.private:
            self.conversation.durable.submit(lambda s: s.remember(name, value))

    async def _try(self, work: Awaitable[None]) -> None:
        try:
            await work
        except _EXPECTED as error:
            self.tell(problem_text(error), error=True)

    @work(exclusive=True, group="model")
    async def _load(self, name: str) -> None:
        try:
            model = await self.conversation.engine.load(name)
            self.tell(f"{model.title} is loaded.")
        except EngineError as error:
            self.tell(error.message, error=True)
