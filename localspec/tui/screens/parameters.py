"""Settings: presets, sampling, thinking, drafter, system prompts, theme. An empty field is the model's own choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Button, Input, Label, Select, TextArea

from localspec.api.types import ModelInfo
from localspec.tui.options import SETTING_NAMES, ChatSettings, SettingError, with_setting
from localspec.tui.saved import with_prompt
from localspec.tui.screens.large import LargeScreen

_THINKING: dict[str, bool | None] = {"auto": None, "on": True, "off": False}
_OWN = "the model's own"
_OTHERS = ("max_tokens", "depth", "thinking_budget_tokens", "seed")
"""Settings that no preset of a model touches."""


@dataclass(frozen=True)
class Parameters:
    """What is set, and after the screen what was chosen. `drafter` None leaves the engine's present choice."""

    settings: ChatSettings
    system_prompt: str
    drafter: str | None = None
    saved_prompts: Mapping[str, str] = field(default_factory=dict)
    theme: str = ""


class ParametersScreen(LargeScreen[Parameters | None]):
    """Returns the parameters after Ctrl+S or Enter, None after Esc. `presets` are the model's, by name."""

    AUTO_FOCUS = "#system"
    BINDINGS = [  # noqa: RUF012 - the base class declares it
        Binding("ctrl+s", "apply", "Apply", priority=True),
        Binding("escape", "leave", "Cancel", priority=True),
    ]

    def __init__(
        self, given: Parameters, model: ModelInfo | None, presets: Mapping[str, Mapping[str, float]], themes: list[str]
    ) -> None:
        super().__init__("parameters")
        self._given = given
        self._model = model
        self._presets = presets
        self._themes = themes

    def compose(self) -> ComposeResult:
        settings = self._given.settings
        thinking = next(name for name, value in _THINKING.items() if value == settings.thinking)
        drafters = dict.fromkeys(("auto", *(self._model.drafters if self._model else ("off",))))
        presets, prompts = (_OWN, *self._presets), tuple(self._given.saved_prompts)
        with Vertical():
            with VerticalScroll():
                yield Label("System prompt")
                yield TextArea(self._given.system_prompt, id="system", tab_behavior="focus")
                yield from _row("saved prompts", Select.from_values(prompts, prompt="none", compact=True, id="saved"))
                keeping = Input(placeholder="a name; empty text removes it", compact=True, id="save-as")
                yield from _row("save it as", keeping)
                thinks = Select.from_values(_THINKING, value=thinking, allow_blank=False, compact=True, id="thinking")
                yield from _row("thinking", thinks)
                yield from self._field("thinking_budget_tokens")
                choice = Select.from_values(drafters, prompt="as it is", compact=True, id="drafter")
                yield from _row("drafter", choice)
                yield from self._field("depth")
                yield from _row("preset", Select.from_values(presets, prompt="as set", compact=True, id="preset"))
                for name in SETTING_NAMES:
                    if name not in ("thinking_budget_tokens", "depth"):
                        yield from self._field(name)
                theme = Select.from_values(
                    self._themes, value=self._given.theme, allow_blank=False, compact=True, id="theme"
                )
                yield from _row("theme", theme)
            yield Label("", id="problem", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Ctrl+S Apply", compact=True, id="apply")
                yield Button("Esc Cancel", compact=True, id="leave")

    def on_mount(self) -> None:
        if self._given.drafter is not None:
            chosen = self.query_one("#drafter", Select)
            chosen.value = self._given.drafter if self._knows(self._given.drafter) else Select.NULL

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.action_apply()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        if event.button.id == "apply":
            self.action_apply()
        else:
            self.action_leave()

    def on_select_changed(self, event: Select.Changed) -> None:
        event.stop()
        if event.select.is_blank():
            return
        value = str(event.value)
        if event.select.id == "preset":
            self._fill(self._presets.get(value, {}))
        elif event.select.id == "saved":
            self.query_one("#system", TextArea).load_text(self._given.saved_prompts[value])
            self.query_one("#save-as", Input).value = value
        elif event.select.id == "theme":
            self.app.theme = value

    def action_leave(self) -> None:
        if self.close_list():
            return
        self.app.theme = self._given.theme
        self.dismiss(None)

    def action_apply(self) -> None:
        """Check the fields; close if all are right, else say what is wrong and go there."""
        settings = replace(self._given.settings, thinking=_THINKING[str(self.query_one("#thinking", Select).value)])
        for name in SETTING_NAMES:
            entry = self.query_one(f"#set-{name}", Input)
            try:
                settings = with_setting(settings, name, entry.value.strip() or "default")
            except SettingError as error:
                self.query_one("#problem", Label).update(str(error))
                entry.focus()
                return
        chosen = self.query_one("#drafter", Select)
        text = self.query_one("#system", TextArea).text.strip()
        name, prompts = self.query_one("#save-as", Input).value.strip(), self._given.saved_prompts
        self.dismiss(
            Parameters(
                settings,
                text,
                None if chosen.is_blank() else str(chosen.value),
                with_prompt(prompts, name, text) if name else prompts,
                self.app.theme,
            )
        )

    def _fill(self, preset: Mapping[str, float]) -> None:
        """Put a preset into the fields; what it does not name is the model's own again."""
        for name in SETTING_NAMES:
            if name not in _OTHERS:
                self.query_one(f"#set-{name}", Input).value = _text(preset.get(name))

    def _field(self, name: str) -> ComposeResult:
        settings = self._given.settings
        value = settings.sampling.get(name, getattr(settings, name, None))
        default = getattr(self._model.sampling, name, None) if self._model else None
        hint = "" if default is None else f"model: {default:g}"
        yield from _row(name.replace("_", " "), Input(_text(value), placeholder=hint, compact=True, id=f"set-{name}"))

    def _knows(self, drafter: str) -> bool:
        return drafter == "auto" or (self._model is not None and drafter in self._model.drafters)


def _row(label: str, widget: Input | Select[str] | Select[bool | None]) -> ComposeResult:
    with Horizontal(classes="row"):
        yield Label(label)
        yield widget


def _text(value: float | None) -> str:
    return "" if value is None else str(value)
