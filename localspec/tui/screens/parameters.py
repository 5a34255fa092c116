"""Parameters of the chat: system prompt, thinking, drafter, sampling. Empty fields leave the choice to the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Label, Select, TextArea

from localspec.api.types import ModelInfo
from localspec.tui.options import SETTING_NAMES, ChatSettings, SettingError, with_setting

_THINKING: dict[str, bool | None] = {"auto": None, "on": True, "off": False}


@dataclass(frozen=True)
class Parameters:
    """What was chosen. `drafter` None leaves the engine's present choice."""

    settings: ChatSettings
    system_prompt: str
    drafter: str | None


class ParametersScreen(ModalScreen[Parameters | None]):
    """Returns the parameters after Ctrl+S or Enter, None after Esc."""

    AUTO_FOCUS = "#system"
    BINDINGS = [  # noqa: RUF012 - the base class declares it
        Binding("ctrl+s", "apply", "Apply", priority=True),
        Binding("escape", "dismiss(None)", "Cancel", priority=True),
    ]

    def __init__(self, settings: ChatSettings, system_prompt: str, model: ModelInfo | None) -> None:
        super().__init__(classes="dialog parameters")
        self._settings = settings
        self._system_prompt = system_prompt
        self._model = model

    def compose(self) -> ComposeResult:
        thinking = next(name for name, value in _THINKING.items() if value == self._settings.thinking)
        drafters = ("auto", *(self._model.drafters if self._model else ("off",)))
        with Vertical():
            with VerticalScroll():
                yield Label("System prompt")
                yield TextArea(self._system_prompt, id="system", tab_behavior="focus")
                with Horizontal(classes="row"):
                    yield Label("thinking")
                    yield Select.from_values(_THINKING, value=thinking, allow_blank=False, compact=True, id="thinking")
                with Horizontal(classes="row"):
                    yield Label("drafter")
                    yield Select.from_values(drafters, prompt="as it is", compact=True, id="drafter")
                for name in SETTING_NAMES:
                    with Horizontal(classes="row"):
                        yield Label(name)
                        yield Input(self._value(name), placeholder=self._default(name), compact=True, id=f"set-{name}")
            yield Label("", id="problem", markup=False)
            yield Label("Ctrl+S applies · empty: the model's own · Esc cancels", classes="hint")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.action_apply()

    def action_apply(self) -> None:
        """Check the fields; close if all are right, else say what is wrong and go there."""
        settings = replace(self._settings, thinking=_THINKING[str(self.query_one("#thinking", Select).value)])
        for name in SETTING_NAMES:
            field = self.query_one(f"#set-{name}", Input)
            try:
                settings = with_setting(settings, name, field.value.strip() or "default")
            except SettingError as error:
                self.query_one("#problem", Label).update(str(error))
                field.focus()
                return
        chosen = self.query_one("#drafter", Select)
        drafter = None if chosen.is_blank() else str(chosen.value)
        self.dismiss(Parameters(settings, self.query_one("#system", TextArea).text.strip(), drafter))

    def _value(self, name: str) -> str:
        value = self._settings.sampling.get(name, getattr(self._settings, name, None))
        return "" if value is None else f"{value:.17g}" if isinstance(value, float) else str(value)

    def _default(self, name: str) -> str:
        value = getattr(self._model.sampling, name, None) if self._model else None
        return "" if value is None else f"model: {value:g}"
