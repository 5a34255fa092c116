"""What the user is told when the engine goes or comes back. Knows no widget."""

from __future__ import annotations

from localspec.api.types import EngineState, MetricsSnapshot


class EngineNotices:
    """Follows the engine's state from sample to sample."""

    def __init__(self) -> None:
        self._state: EngineState = "loading"
        self._was_ready = False

    def see(self, now: MetricsSnapshot) -> tuple[str, bool] | None:
        """(what to say, whether it is an error) when the state changed in a way that matters."""
        before, self._state = self._state, now.state
        was_ready, self._was_ready = self._was_ready, self._was_ready or now.state == "ready"
        if now.state == before:
            return None
        if now.state in ("failed", "stopped"):
            return f"The engine {now.state}: {now.stage or 'no reason given'}. The chat is kept.", True
        if now.state == "loading" and was_ready:
            return f"The engine is not ready: {now.stage or 'it loads'}. The chat is kept.", False
        return ("The engine is back.", False) if now.state == "ready" and was_ready else None
